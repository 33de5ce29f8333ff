"""A test that separates four-bit recipes: a byte-level GPT of 20M parameters on Python source, over paired seeds.

* `config`, `corpus`, `model`, `training`: what is trained.
* `rows`: the recipes that are compared.
* `results`, `schedule`: runs accumulate in a file, within a limited time.
* `gaps`, `findings`: gaps to bf16 with standard errors, and what they show.
* `command`: `python -m benchmarks.convergence --suite code-gpt`.

It needs optax and tqdm in addition to scaledot's own dependencies.
"""
