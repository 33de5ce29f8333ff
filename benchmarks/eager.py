"""Eager dispatch: Python overhead of small calls outside jit, compared with `jnp.matmul` of the same shapes.

Outside jit every call checks its arguments, looks up its kernel and dispatches a compiled program. Times are means over
a hundred calls, each dispatched while the one before runs. Targets were set on a machine on which `jnp.matmul` took
76 µs.
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
    functions = {
        "jnp.matmul": lambda: jnp.matmul(x, w),
        "sd.matmul of int8": lambda: sd.matmul(lhs, rhs),
        "train.dense, fp8_current": lambda: train.dense(x, w, recipe="fp8_current"),
        "sd.quantize to mxfp8": lambda: sd.quantize(x, "mxfp8"),
    }
    calls = {name: lambda call=call: [call() for _ in range(CALLS)] for name, call in functions.items()}
    times = {name: each.median / CALLS for name, each in interleaved(calls, repeats).items()}
    rows = []
    for name, seconds in times.items():
        target = TARGETS.get(name)
        verdict = "" if target is None else f"  at most {target * 1e6:.0f}: {'met' if seconds <= target else 'missed'}"
        print(f"{name:<26} {seconds * 1e6:7.1f} us{verdict}")
        rows.append({"call": name, "seconds": seconds, "target": target})
    return {"environment": record.environment(), "size": size, "calls": CALLS, "rows": rows}
