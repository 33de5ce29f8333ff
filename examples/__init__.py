"""Programs to read and to run: `python -m examples.demo`, `python -m examples.gpt_linen --recipe nvfp4`."""
