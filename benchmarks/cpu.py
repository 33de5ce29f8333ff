"""quantize and dequantize on the CPU compared with Qwix, their working memory, and the time of `import scaledot`.

One row per case and function. A ratio is Qwix's median time over scaledot's, so larger is better. Results are checked
on other data before timing, and the signal-to-noise ratios of both libraries are recorded, because a faster cast with a
larger error would not be comparable. Programs are compiled ahead of time and timed in one process on the same array.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

import scaledot as sd
from benchmarks import checks, imports, libraries, record, table
from benchmarks.libraries import QwixCast
from benchmarks.timing import Times, interleaved

SIZE = 4096
TEMP_TARGET = 1.5  # working memory of quantize, in bytes of its input
DEQUANTIZE_TARGET = 1.0
IMPORT_TARGET = 0.1  # seconds
NIBBLES = (
    "Before jax 0.12, XLA's CPU backend stores 4-bit arrays one element at a time (about 7 ns per element), "
    "which bounds every library."
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A cast of a matrix by scaledot and by Qwix; `target` is the minimum speedup of quantize."""

    name: str
    format: str
    block: tuple[int, ...] | None
    qwix: QwixCast
    target: float | None

    def quantize(self, x: jax.Array) -> sd.ScaledArray:
        return sd.quantize(x, self.format, block=self.block)


CASES = (
    Case("int8 per channel", "int8", (0,), QwixCast("int8"), 1.0),
    Case("int4 group 128", "int4", (128,), QwixCast("int4", tile=128), None),
    Case("mxfp8", "mxfp8", None, QwixCast("mxfp8", tile=32), 2.0),
    Case("mxfp4", "mxfp4", None, QwixCast("mxfp4", tile=32), 4.0),
    Case("nvfp4", "nvfp4", None, QwixCast("nvfp4", tile=16), 4.0),
    Case("nf4", "nf4", None, QwixCast("nf4", tile=64), 4.0),
    Case("fp8_e4m3 per tensor", "fp8_e4m3", None, QwixCast("float8_e4m3fn", per_tensor=True), None),
    Case("fp8_e4m3 1x128", "fp8_e4m3", (128,), QwixCast("float8_e4m3fn", tile=128), None),
)


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One library's compiled functions, and their results for x."""

    quantize: Any
    dequantize: Any
    quantized: Any
    dequantized: jax.Array


def run(size: int, repeats: int) -> dict:
    jax.config.update("jax_platforms", "cpu")
    x = jax.random.normal(jax.random.key(0), (size, size), jnp.float32)
    notes = [*libraries.notes(), NIBBLES]
    print(*notes, "", table.header(), sep="\n")
    with tqdm(total=2 * len(CASES) + imports.TIMES_EACH, unit="step", leave=False) as bar:
        rows = [row for case in CASES for row in _rows(case, x, repeats, bar)]
        importing = _import_row(bar)
    _print_summary(rows, importing)
    settings = {"suite": "cpu", "size": size, "dtype": "float32", "repeats": repeats}
    return {**settings, "environment": record.environment(), "notes": notes, "cases": rows, "import": importing}


def _rows(case: Case, x: jax.Array, repeats: int, bar: tqdm) -> list[dict]:
    """Checks quantize and dequantize of a case, then times them."""
    bar.set_description(case.name)
    _check(case, x.shape)
    implementations = {"ours": _compile(case.quantize, sd.dequantize, x)}
    if libraries.has_qwix():
        implementations["qwix"] = _compile(case.qwix.quantizer(), case.qwix.dequantizer(), x)
    rows = []
    for function, target in (("quantize", case.target), ("dequantize", DEQUANTIZE_TARGET)):
        calls = {name: _call(implementation, function, x) for name, implementation in implementations.items()}
        rows.append(_row(case, function, target, implementations, interleaved(calls, repeats), x))
        tqdm.write(table.line(rows[-1]))
        bar.update()
    return rows


def _check(case: Case, shape: tuple[int, ...]) -> None:
    x = jax.random.normal(jax.random.key(1), shape, jnp.float32)
    ours = _compile(case.quantize, sd.dequantize, x)
    with jax.disable_jit():
        unjitted = case.quantize(x)
    checks.require_same_bytes(case.name, ours.quantized, unjitted)
    checks.require_nearest(case.name, x, ours.quantized, ours.dequantized)


def _compile(quantize: Callable, dequantize: Callable, x: jax.Array) -> Implementation:
    quantize = jax.jit(quantize).lower(x).compile()
    quantized = quantize(x)
    dequantize = jax.jit(dequantize).lower(quantized).compile()
    return Implementation(quantize, dequantize, quantized, dequantize(quantized))


def _call(implementation: Implementation, function: str, x: jax.Array) -> Callable[[], Any]:
    if function == "quantize":
        return lambda: implementation.quantize(x)
    return lambda: implementation.dequantize(implementation.quantized)


def _row(
    case: Case,
    function: str,
    target,
    implementations: dict[str, Implementation],
    times: dict[str, Times],
    x: jax.Array,
) -> dict:
    numbers = {name: _numbers(each, function, times[name], x) for name, each in implementations.items()}
    ours = numbers["ours"]
    qwix = numbers.get("qwix", dict.fromkeys(ours))
    ratios = {"ratio": None, "ratio_of_min": None, "target": target, "met": None}
    if "qwix" in times:
        ratios["ratio"] = times["qwix"].median / times["ours"].median
        ratios["ratio_of_min"] = times["qwix"].min / times["ours"].min
        ratios["met"] = None if target is None else ratios["ratio"] >= target
    prefixed = {
        f"{name}_{key}": value for name, each in (("ours", ours), ("qwix", qwix)) for key, value in each.items()
    }
    return {"case": f"{case.name} {function}", **prefixed, **ratios, **_memory(function, ours["temp_bytes"], x.nbytes)}


def _numbers(implementation: Implementation, function: str, times: Times, x: jax.Array) -> dict:
    return {
        "median_ms": 1e3 * times.median,
        "min_ms": 1e3 * times.min,
        "snr_db": checks.snr_db(x, implementation.dequantized),
        "temp_bytes": getattr(implementation, function).memory_analysis().temp_size_in_bytes,
    }


def _memory(function: str, temp_bytes: int, input_bytes: int) -> dict:
    """Working memory relative to the input, with a target for quantize only, whose result is smaller than its input."""
    ratio, target = temp_bytes / input_bytes, TEMP_TARGET
    if function != "quantize":
        ratio = target = None
    met = None if ratio is None else ratio <= TEMP_TARGET
    return {"temp_over_input": ratio, "temp_target": target, "temp_met": met}


def _import_row(bar: tqdm) -> dict:
    bar.set_description("import")
    seconds = []
    for pair in imports.pairs():
        seconds.append(pair)
        bar.update()
    summary = imports.summary(seconds)
    met = summary["scaledot_s"] <= IMPORT_TARGET
    return {**summary, "times_each": len(seconds), "target_s": IMPORT_TARGET, "met": met}


def _print_summary(rows: list[dict], importing: dict) -> None:
    cost, verdict = importing["scaledot_s"], table.verdict(importing["met"])
    print(f"import scaledot, beyond import jax: {cost:.3f} s | target <= {IMPORT_TARGET:g} s | {verdict}")
    outcomes = [importing["met"], *(row[key] for row in rows for key in ("met", "temp_met"))]
    print(f"{outcomes.count(True)} targets met, {outcomes.count(False)} missed")
