"""Casts on the CPU: quantize and dequantize beside Qwix, working memory, and the cost of `import scaledot`.

One row per case and direction. The ratio is the peer's median over ours, so larger is better for us. A speed is
taken only after the result was checked on fresh data, and stands beside both signal-to-noise ratios, because a
faster cast that loses more is not the same cast. Both sides run ahead-of-time compiled programs that start from
the same array in the same process.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

import scaledot as sd
from benchmarks import checks, imports, peers, record, table
from benchmarks.peers import QwixCast
from benchmarks.timing import Times, interleaved

SIZE = 4096
TEMP_TARGET = 1.5  # working memory of quantize, in bytes of its input
DEQUANTIZE_TARGET = 1.0
IMPORT_TARGET = 0.1  # seconds
NIBBLES = (
    "On jax < 0.12 XLA's CPU stores 4-bit arrays one nibble at a time (about 7 ns an element), "
    "which bounds every library there."
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A cast of a matrix, ours and Qwix's; `target` is the ratio that quantize should reach."""

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
class Side:
    """One library's case, compiled: there, back, and what the round trip of x gives."""

    quantize: Any
    dequantize: Any
    quantized: Any
    values: jax.Array


def run(size: int, repeats: int) -> dict:
    jax.config.update("jax_platforms", "cpu")
    x = jax.random.normal(jax.random.key(0), (size, size), jnp.float32)
    notes = [*peers.notes(), NIBBLES]
    print(*notes, "", table.header(), sep="\n")
    with tqdm(total=2 * len(CASES) + imports.TIMES_EACH, unit="step", leave=False) as bar:
        rows = [row for case in CASES for row in _rows(case, x, repeats, bar)]
        importing = _import_row(bar)
    _print_summary(rows, importing)
    settings = {"suite": "cpu", "size": size, "dtype": "float32", "repeats": repeats, "peer": "qwix"}
    return {**settings, "environment": record.environment(), "notes": notes, "cases": rows, "import": importing}


def _rows(case: Case, x: jax.Array, repeats: int, bar: tqdm) -> list[dict]:
    """Both directions of a case, checked and then timed."""
    bar.set_description(case.name)
    _check(case, x.shape)
    sides = {"ours": _compile(case.quantize, sd.dequantize, x)}
    if peers.has_qwix():
        sides["peer"] = _compile(case.qwix.quantizer(), case.qwix.dequantizer(), x)
    rows = []
    for verb, target in (("quantize", case.target), ("dequantize", DEQUANTIZE_TARGET)):
        calls = {name: _call(side, verb, x) for name, side in sides.items()}
        rows.append(_row(case, verb, target, sides, interleaved(calls, repeats), x))
        tqdm.write(table.line(rows[-1]))
        bar.update()
    return rows


def _check(case: Case, shape: tuple[int, ...]) -> None:
    x = jax.random.normal(jax.random.key(1), shape, jnp.float32)
    ours = _compile(case.quantize, sd.dequantize, x)
    with jax.disable_jit():
        plain = case.quantize(x)
    checks.require_same_bytes(case.name, ours.quantized, plain)
    checks.require_nearest(case.name, x, ours.quantized, ours.values)


def _compile(quantize: Callable, dequantize: Callable, x: jax.Array) -> Side:
    there = jax.jit(quantize).lower(x).compile()
    quantized = there(x)
    back = jax.jit(dequantize).lower(quantized).compile()
    return Side(there, back, quantized, back(quantized))


def _call(side: Side, verb: str, x: jax.Array) -> Callable[[], Any]:
    return (lambda: side.quantize(x)) if verb == "quantize" else (lambda: side.dequantize(side.quantized))


def _row(case: Case, verb: str, target, sides: dict[str, Side], times: dict[str, Times], x: jax.Array) -> dict:
    ours = _side_numbers(sides["ours"], verb, times["ours"], x)
    peer = _side_numbers(sides["peer"], verb, times["peer"], x) if "peer" in sides else dict.fromkeys(ours)
    ratios = {"ratio": None, "ratio_of_min": None, "target": target, "met": None}
    if "peer" in times:
        ratios["ratio"] = times["peer"].median / times["ours"].median
        ratios["ratio_of_min"] = times["peer"].min / times["ours"].min
        ratios["met"] = None if target is None else ratios["ratio"] >= target
    named = {
        f"{side}_{key}": value for side, numbers in (("ours", ours), ("peer", peer)) for key, value in numbers.items()
    }
    return {"case": f"{case.name} {verb}", **named, **ratios, **_memory(verb, ours["temp_bytes"], x.nbytes)}


def _side_numbers(side: Side, verb: str, times: Times, x: jax.Array) -> dict:
    return {
        "median_ms": 1e3 * times.median,
        "min_ms": 1e3 * times.min,
        "snr_db": checks.snr_db(x, side.values),
        "temp_bytes": getattr(side, verb).memory_analysis().temp_size_in_bytes,
    }


def _memory(verb: str, temp_bytes: int, input_bytes: int) -> dict:
    """Only quantize has a bound: what it makes is smaller than what it reads."""
    part, target = temp_bytes / input_bytes, TEMP_TARGET
    if verb != "quantize":
        part = target = None
    return {"temp_over_input": part, "temp_target": target, "temp_met": None if part is None else part <= TEMP_TARGET}


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
    print(f"import scaledot over import jax: {cost:.3f} s | target <= {IMPORT_TARGET:g} s | {verdict}")
    outcomes = [importing["met"], *(row[key] for row in rows for key in ("met", "temp_met"))]
    print(f"{outcomes.count(True)} targets met, {outcomes.count(False)} missed")
