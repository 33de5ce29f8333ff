"""Mutation testing: measures which faults the tests detect, by introducing faults into the library.

`python -m tests.mutations` takes ten named mutations (`patches/`, one unified diff each) and thirty random mutants
drawn with a fixed seed, applies each alone in a scratch copy of the tracked files, and runs the tests on it. A mutant
that makes a test fail is *killed*, otherwise it *survived*: the tests lack a case, or the mutant is *equivalent* (no
input distinguishes it from the original). Survivors of the default suite are then run against the tests that only
`pytest --all` adds; a mutant that only those kill shows a case that the default selection should include.

Forty full runs would take most of a day, so only tests that can detect a mutant are run. One pass over the unmutated
tree, which must succeed, runs each test file in a separate process, in a copy with a probe before every mutated
statement. A test file that never executes that statement cannot kill the mutant. This holds for files, not for single
tests: jit and `lru_cache` cache traces, so of two tests that depend on a line only the first executes it, and
module-scoped fixtures have the same effect. Probes are part of the copy's source, so they also report from child
processes and at import. They report the tests that reach them: a few of these, cheapest first, run before whole files.

Verdicts are written one by one and reused for the same tree and versions. At the end, the tests that killed mutants run
once more without any mutation; verdicts of tests that fail there, too, are discarded.
"""
