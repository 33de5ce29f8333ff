"""Eager calls: what Python costs around a small matmul, beside `jnp.matmul` of the same shapes.

Outside jit every call checks its arguments, finds its kernel and dispatches a program. A time is that of one call out
of a hundred in a row, with the next dispatched while the last one runs. Targets were set where `jnp.matmul` took 76
microseconds.
"""

import jax
import jax.numpy as jnp

import scaledot as sd
from benchmarks import record
from benchmarks.timing import interleaved
from scaledot import train

SIZE = 128
CALLS = 100
TARGETS = {"sd.matmul of int8": 300e-6, "train.dense, fp8_current": 600e-6}  # seconds


def run(size: int, repeats: int) -> dict:
    key = jax.random.key(0)
    x, w = jax.random.normal(key, (size, size)), jax.random.normal(key, (size, size))
    lhs, rhs = sd.quantize(x, "int8"), sd.quantize(w, "int8", axis=0)
    verbs = {
        "jnp.matmul": lambda: jnp.matmul(x, w),
        "sd.matmul of int8": lambda: sd.matmul(lhs, rhs),
        "train.dense, fp8_current": lambda: train.dense(x, w, recipe="fp8_current"),
        "sd.quantize to mxfp8": lambda: sd.quantize(x, "mxfp8"),
    }
    calls = {name: lambda verb=verb: [verb() for _ in range(CALLS)] for name, verb in verbs.items()}
    times = {name: each.median / CALLS for name, each in interleaved(calls, repeats).items()}
    rows = []
    for name, seconds in times.items():
        target = TARGETS.get(name)
        verdict = "" if target is None else f"  at most {target * 1e6:.0f}: {'met' if seconds <= target else 'missed'}"
        print(f"{name:<26} {seconds * 1e6:7.1f} us{verdict}")
        rows.append({"call": name, "seconds": seconds, "target": target})
    return {"environment": record.environment(), "size": size, "calls": CALLS, "rows": rows}
