"""Does a recipe train? Three tests that tell good recipes from bad.

Whether a cast is right on average (`bias`), whether small gradients beside large ones still arrive (`stall`), which a
short loss curve cannot show, and how much a tiny GPT loses on a source whose entropy is known (`gpt`). Each is a module
with `run`, which returns rows that hold what came out beside what was expected, and `line`, a row for people.
"""
