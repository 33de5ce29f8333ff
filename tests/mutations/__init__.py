"""Mutation testing: what the tests notice, measured by breaking the library on purpose.

`python -m tests.mutations` takes ten named mutations (`patches/`, one unified diff each) and thirty mutants drawn by a
seed, applies each alone in a scratch copy of the tracked files, and runs the tests on it. A mutant that makes a test
fail is *killed*, one that does not has *survived*: the tests lack a case, or the mutant is *equivalent* (no input tells
it from the original). Survivors of the default suite are then given to the tests that only `pytest --all` runs; one
that those kill is a loss of the default suite.

Forty full runs would take most of a day, so only tests that can notice a mutant are run. One pass over the unmutated
tree, which must succeed, runs each test file in a process of its own, in a copy with a probe before every mutated
statement. A file that never executes that statement cannot tell the mutant from the original. This holds for files, not
for single tests: jit and `lru_cache` keep traces, so of two tests that depend on a line only the first executes it, and
module-scoped fixtures have the same effect. Probes are part of the copy's source, so they also report from child
processes and at import. They name tests that do reach them: a few of these, cheapest first, run before whole files.

Verdicts are written one by one and not computed again for the same tree and versions. The tests that killed mutants are
run once more without any mutation at the end: one that fails there, too, decides nothing.
"""
