"""Runnable examples: `python -m examples.demo`, `python -m examples.gpt_linen --recipe nvfp4`."""
