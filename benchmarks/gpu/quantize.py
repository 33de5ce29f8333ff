"""`sd.quantize`, jitted and eager, compared with the cast kernel that it selects and with XLA's cast.

Rates are relative to the kernel's: the rest is Python overhead and what XLA adds around the kernel. Before anything is
timed, results are compared with XLA's, byte for byte.
"""

import functools
import re
import time

import jax
import jax.numpy as jnp

import scaledot as sd
from benchmarks.gpu import cast, report
from benchmarks.gpu.implementations import Implementation, Program, jax_implementation, measure

SHAPE = (8192, 8192)
TARGET = 0.85  # of the kernel's rate
KERNEL, JITTED, EAGER, XLA = "the cast kernel alone", "sd.quantize, jitted", "sd.quantize, eager", "XLA's cast, jitted"


def quantize_of(case: cast.Case, **options):
    """Returns the call of `sd.quantize` that computes the cast of a case."""
    (cast,) = case.casts
    return functools.partial(sd.quantize, format=cast.format, axis=(0, 1), block=cast.tile, **options)


def check(case: cast.Case, x: jax.Array) -> None:
    """Raises AssertionError unless `sd.quantize` selects a kernel whose codes and scales are those of XLA's cast."""
    quantize = quantize_of(case)
    if not re.search(r"hopper_cast_\w+ +selected: ", sd.explain(quantize, x)):
        raise AssertionError(f"{case.name}: no kernel is selected\n{sd.explain(quantize, x)}")
    cast.require_same(case.name, quantize(x), quantize_of(case, kernel="xla_cast")(x))


def _eager(step, x: jax.Array) -> Implementation:
    def build() -> Program:
        start = time.perf_counter()
        jax.block_until_ready(step(x))
        return Program(lambda: step(x), jax.block_until_ready, time.perf_counter() - start, None)

    return Implementation(EAGER, build, ours=True)


def run(cases: tuple[str, ...], rounds: int, skipped: frozenset[str]) -> None:
    rows, key = [], jax.random.key(0)
    for case in (case for case in cast.QUANTIZE_CASES if not cases or case.name in cases):
        x = jax.random.normal(jax.random.key(1), SHAPE, case.dtype)
        check(case, x.at[3, 5].set(jnp.inf).at[7, 9].set(jnp.nan))
        implementations = [
            jax_implementation(KERNEL, case.by_kernel, x, key, ours=True),
            jax_implementation(JITTED, quantize_of(case), x, ours=True),
            _eager(quantize_of(case), x),
            jax_implementation(XLA, quantize_of(case, kernel="xla_cast"), x),
        ]
        timed, not_run = measure(implementations, rounds, skipped)
        print(f"{case.name}, {SHAPE[0]} x {SHAPE[1]} {x.dtype}")
        row = {"case": case.name, "dtype": x.dtype.name, "target": TARGET, "implementations": {}, "not_run": not_run}
        for name in timed:
            ratio = timed[KERNEL].median / timed[name].median
            row["implementations"][name] = {**timed[name].as_dict(), "of_kernel": ratio}
            target = TARGET if name in (JITTED, EAGER) else None
            print(report.result_line(name, timed[name], f"{ratio:.0%} of kernel", target, ratio))
        rows.append(row)
        print(f"wrote {report.write('quantize', rows, shape=SHAPE)}", flush=True)
