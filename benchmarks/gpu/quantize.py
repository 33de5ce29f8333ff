"""`sd.quantize` beside the cast kernel that it takes, jitted and eagerly, and beside XLA's cast.

Rates are parts of the kernel's own: what is lost is Python, and whatever XLA puts around the kernel. Results are
compared with XLA's, byte for byte, before anything is timed.
"""

import functools
import time

import jax
import jax.numpy as jnp

import scaledot as sd
from benchmarks.gpu import cast, report
from benchmarks.gpu.sides import Running, Side, jax_side, measure

SHAPE = (8192, 8192)
TARGET = 0.85  # of the kernel's own rate
KERNEL, JITTED, EAGER, XLA = "the cast kernel alone", "sd.quantize, jitted", "sd.quantize, eager", "XLA's cast, jitted"


def quantize_of(case: cast.Case, **options):
    """The call of `sd.quantize` that asks for the cast of a case."""
    (wanted,) = case.wanted
    return functools.partial(sd.quantize, format=wanted.format, axis=(0, 1), block=wanted.tile, **options)


def check(case: cast.Case, x: jax.Array) -> None:
    """Raise unless `sd.quantize` takes a kernel, whose bytes are XLA's."""
    quantize = quantize_of(case)
    if "TAKEN: codes" not in sd.explain(quantize, x):
        raise AssertionError(f"{case.name}: no kernel is taken\n{sd.explain(quantize, x)}")
    cast.require_same(case.name, quantize(x), quantize_of(case, kernel="xla_cast")(x))


def _eager(step, x: jax.Array) -> Side:
    def build() -> Running:
        start = time.perf_counter()
        jax.block_until_ready(step(x))
        return Running(lambda: step(x), jax.block_until_ready, time.perf_counter() - start, None)

    return Side(EAGER, build, ours=True)


def run(cases: tuple[str, ...], turns: int, skipped: frozenset[str]) -> None:
    rows, key = [], jax.random.key(0)
    for case in (case for case in cast.QUANTIZE_CASES if not cases or case.name in cases):
        x = jax.random.normal(jax.random.key(1), SHAPE, case.dtype)
        check(case, x.at[3, 5].set(jnp.inf).at[7, 9].set(jnp.nan))
        sides = [
            jax_side(KERNEL, case.ours, x, key, ours=True),
            jax_side(JITTED, quantize_of(case), x, ours=True),
            _eager(quantize_of(case), x),
            jax_side(XLA, quantize_of(case, kernel="xla_cast"), x),
        ]
        timed, missing = measure(sides, turns, skipped)
        print(f"{case.name}, {SHAPE[0]} x {SHAPE[1]} {x.dtype}")
        row = {"case": case.name, "dtype": x.dtype.name, "target": TARGET, "sides": {}, "missing": missing}
        for name in timed:
            part = timed[KERNEL].median / timed[name].median
            row["sides"][name] = {**timed[name].as_dict(), "of_kernel": part}
            target = TARGET if name in (JITTED, EAGER) else None
            print(report.side_line(name, timed[name], f"{part:.0%} of kernel", target, part))
        rows.append(row)
        print(f"wrote {report.write('quantize', rows, shape=SHAPE)}", flush=True)
