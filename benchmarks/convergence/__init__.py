"""Convergence tests of recipes.

* `bias`: whether stochastic casts are unbiased.
* `stall`: whether small gradients that share a block with large ones still make progress, which a short loss curve
  does not show.
* `gpt`: the excess loss of a tiny GPT on a source of known entropy.
* `code_gpt`: the loss of a GPT of 20M parameters on Python source, which separates four-bit recipes.

`three_tests` runs the first three; each has `run`, which returns rows of measured and expected results, and `line`,
which formats a row. `code_gpt` is a suite of its own.
"""
