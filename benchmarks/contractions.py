"""Quantised matmuls on the CPU, compared with Qwix, jax.nn and float32: time, working memory and compile time.

All implementations of a case multiply the same two matrices, quantised beforehand by each library. They are compiled
ahead of time and timed alternately in one process. Speedups are ratios of median times. Before timing, scaledot's
result is compared with the float64 matmul of the dequantised operands; the errors of all implementations are recorded.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import scaledot as sd
from benchmarks import libraries, record
from benchmarks.table import verdict
from benchmarks.timing import Times, interleaved

SIZE = 1024
COMPILES = 5
MEMORY_CASE = (2048, 4096, 2048)  # M, K, N
TEMP_TARGET = 64 * 2**20
DIMENSIONS = (((1,), (0,)), ((), ()))


@dataclasses.dataclass(frozen=True)
class Case:
    """A matmul, with minimum speedups (`targets`) and the maximum compile time relative to a float32 matmul."""

    name: str
    format: str
    block: int | None
    qwix: libraries.QwixCast
    targets: dict[str, float]
    compile_target: float

    def quantize(self, x: jax.Array, axis: int) -> sd.ScaledArray:
        return sd.quantize(x, self.format, block=self.block, axis=axis)


CASES = (
    Case("int8 per channel", "int8", None, libraries.QwixCast("int8"), {"qwix": 1}, 2),
    Case("int8 tile 128", "int8", 128, libraries.QwixCast("int8", tile=128), {"qwix": 5, "float32": 1}, 4),
    Case("mxfp8", "mxfp8", None, libraries.QwixCast("mxfp8", tile=32), {"qwix": 2, "jax.nn": 2}, 4),
    Case("nvfp4", "nvfp4", None, libraries.QwixCast("nvfp4", tile=16), {"qwix": 2, "jax.nn": 2}, 4),
    Case("fp8_e4m3 per tensor", "fp8_e4m3", None, libraries.QwixCast("float8_e4m3fn", per_tensor=True), {}, 2),
)


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled matmul with its operands."""

    run: Any
    operands: tuple
    compile_s: float

    def __call__(self) -> jax.Array:
        return self.run(*self.operands)


def run(size: int, repeats: int) -> dict:
    jax.config.update("jax_platforms", "cpu")
    x, w = (jax.random.normal(jax.random.key(key), (size, size), jnp.float32) for key in (0, 1))
    notes = [*libraries.notes()[:-1], *jax_nn_note()]
    print(*notes, sep="\n")
    float32 = {
        "a float32 matmul": jnp.matmul,
        "a float32 matmul and scale": lambda a, b: jnp.matmul(a, b) * np.float32(2),
    }
    baselines = {name: compiled(f, x, w).compile_s for name, f in float32.items()}
    rows = []
    for case in tqdm(CASES, unit="case", leave=False):
        rows.append(_row(case, x, w, baselines, repeats))
        tqdm.write(_line(rows[-1]))
    memory = _memory()
    print(_memory_line(memory))
    settings = {"suite": "contractions", "size": size, "repeats": repeats}
    return {**settings, "environment": record.environment(), "notes": notes, "cases": rows, "memory": memory}


def compiled(f: Callable, *operands) -> Program:
    """Compiles a function several times and returns the program with the least time of tracing and compilation."""
    seconds = []
    for _ in range(COMPILES):
        jax.clear_caches()
        start = time.perf_counter()
        program = jax.jit(f).lower(*operands).compile()
        seconds.append(time.perf_counter() - start)
    return Program(program, operands, min(seconds))


def _row(case: Case, x: jax.Array, w: jax.Array, baselines: dict[str, float], repeats: int) -> dict:
    programs = {"ours": _ours(case, x, w), "float32": compiled(jnp.matmul, x, w)}
    if libraries.has_qwix():
        programs["qwix"] = _qwix(case, x, w)
    if case.format in ("mxfp8", "nvfp4") and not jax_nn_note():
        programs["jax.nn"] = _jax_nn(case, x, w)
    _check(case, programs["ours"])
    errors = {name: _relative_error(program(), x, w) for name, program in programs.items()}
    times = interleaved(programs, repeats)
    ours = times["ours"]
    return {
        "case": case.name,
        "implementations": {name: _numbers(programs[name], times[name], errors[name]) for name in programs},
        "ratios": {name: _ratio(case, name, times[name], ours) for name in times if name != "ours"},
        "compile": {
            "ours_ms": 1e3 * programs["ours"].compile_s,
            "target": case.compile_target,
            "relative_to": {name: programs["ours"].compile_s / seconds for name, seconds in baselines.items()},
        },
    }


def _ours(case: Case, x: jax.Array, w: jax.Array) -> Program:
    return compiled(sd.matmul, case.quantize(x, 1), case.quantize(w, 0))


def _qwix(case: Case, x: jax.Array, w: jax.Array) -> Program:
    import qwix  # pyright: ignore[reportMissingImports]  (an optional library)

    dot = functools.partial(qwix.dot_general, dimension_numbers=DIMENSIONS)
    return compiled(dot, case.qwix.quantizer(0)(x), case.qwix.quantizer(1)(w))


def _jax_nn(case: Case, x: jax.Array, w: jax.Array) -> Program:
    a, b = case.quantize(x, 1), case.quantize(w.T, 1)
    operands = a.data[None], b.data[None], a.scale[None], b.scale[None]
    if a.tensor_scale is None or b.tensor_scale is None:
        return compiled(jax.nn.scaled_matmul, *operands)
    # jax.nn.scaled_matmul applies block scales only; its callers apply tensor scales.
    tensor_scale = a.tensor_scale * b.tensor_scale
    return compiled(lambda a, b, s, t, scale: jax.nn.scaled_matmul(a, b, s, t) * scale, *operands, tensor_scale)


def jax_nn_note() -> list[str]:
    """The reason why jax.nn is not timed, or an empty list."""
    codes, scales = jnp.ones((1, 32, 32), jnp.float8_e4m3fn), jnp.ones((1, 32, 1), jnp.float8_e8m0fnu)
    try:
        jax.jit(jax.nn.scaled_matmul).lower(codes, codes, scales, scales)
    except NotImplementedError:
        return ["jax.nn.scaled_matmul has no CPU lowering in this version of jax and is not timed"]
    return []


def _check(case: Case, ours: Program) -> None:
    """Compares scaledot's matmul with the float64 matmul of the dequantised operands, up to float32 accumulation."""
    a, b = (np.asarray(sd.dequantize(q, jnp.float32), np.float64) for q in ours.operands)
    error = np.abs(np.asarray(ours(), np.float64) - a @ b)
    worst = float(np.max(error / (np.abs(a) @ np.abs(b)))) * 2**24
    if not worst <= a.shape[1]:
        raise AssertionError(f"{case.name}: the largest error is {worst:.0f} * 2^-24 * (|a| @ |b|)")


def _relative_error(y: jax.Array, x: jax.Array, w: jax.Array) -> float:
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    return float(np.linalg.norm(np.asarray(y, np.float64).reshape(exact.shape) - exact) / np.linalg.norm(exact))


def _numbers(program: Program, times: Times, error: float) -> dict:
    return {
        "median_ms": 1e3 * times.median,
        "min_ms": 1e3 * times.min,
        "relative_error": error,
        "temp_bytes": _temp_bytes(program.run),
        "compile_ms": 1e3 * program.compile_s,
    }


def _temp_bytes(program: Any) -> int:
    return program.memory_analysis().temp_size_in_bytes


def _ratio(case: Case, name: str, other: Times, ours: Times) -> dict:
    target = case.targets.get(name)
    ratio = other.median / ours.median
    met = None if target is None else ratio >= target
    return {"ratio": ratio, "ratio_of_min": other.min / ours.min, "target": target, "met": met}


def _memory() -> dict:
    """Working memory of an int8 matmul with blocks of 128, from XLA's memory analysis; nothing is run."""
    m, k, n = MEMORY_CASE
    shapes = jax.ShapeDtypeStruct((m, k), jnp.float32), jax.ShapeDtypeStruct((k, n), jnp.float32)
    case = next(case for case in CASES if case.name == "int8 tile 128")
    implementations: dict[str, tuple[Callable, Callable, Callable]] = {
        "ours": (sd.matmul, functools.partial(case.quantize, axis=1), functools.partial(case.quantize, axis=0))
    }
    if libraries.has_qwix():
        import qwix  # pyright: ignore[reportMissingImports]

        dot = functools.partial(qwix.dot_general, dimension_numbers=DIMENSIONS)
        implementations["qwix"] = (dot, case.qwix.quantizer(0), case.qwix.quantizer(1))
    temp_bytes = {}
    for name, (dot, *casts) in implementations.items():
        operands = [jax.eval_shape(cast, shape) for cast, shape in zip(casts, shapes, strict=True)]
        temp_bytes[name] = _temp_bytes(jax.jit(dot).lower(*operands).compile())
    target = {"target_bytes": TEMP_TARGET, "met": temp_bytes["ours"] <= TEMP_TARGET}
    return {"case": f"int8 tile 128, {m} x {k} x {n}", "temp_bytes": temp_bytes, **target}


def _line(row: dict) -> str:
    times = ", ".join(
        f"{name} {numbers['median_ms']:.2f} ms (relative error {numbers['relative_error']:.1e})"
        for name, numbers in row["implementations"].items()
    )
    ratios = ", ".join(
        f"{name} {r['ratio']:.2f}" + ("" if r["target"] is None else f" (>= {r['target']:g}: {verdict(r['met'])})")
        for name, r in row["ratios"].items()
    )
    ratios_of_compile = ", ".join(f"{ratio:.1f} x {name}" for name, ratio in row["compile"]["relative_to"].items())
    compile_time = (
        f"compiles in {row['compile']['ours_ms']:.0f} ms, {ratios_of_compile} (target {row['compile']['target']:g})"
    )
    return f"{row['case']}\n  {times}\n  speedups: {ratios}\n  {compile_time}"


def _memory_line(memory: dict) -> str:
    sizes = ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in memory["temp_bytes"].items())
    return f"{memory['case']}: working memory {sizes} (<= {TEMP_TARGET // 2**20} MiB: {verdict(memory['met'])})"
