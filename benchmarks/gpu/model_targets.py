"""Targets of the whole-model benchmarks: speedups over bfloat16, and seconds of first steps."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.gpu import model, report

# Least speedups over bfloat16: (target, stretch).
SPEEDS = {
    "4 blocks/fp8_current": (1.45, 1.50),
    "4 blocks/fp8_delayed": (1.47, 1.52),
    "4 blocks/fp8_block": (1.28, 1.35),
    "4 blocks/mxfp8": (1.02, 1.06),
    "4 blocks/nvfp4": (0.97, 1.02),
    "4 blocks, head too/fp8_current": (1.54, 1.60),
    "16 blocks/fp8_current": (1.50, 1.56),
    "8 blocks, scanned/fp8_current": (1.48, 1.55),
    "8 blocks, scanned, nothing saved/fp8_current": (1.50, 1.58),
}
# Least speedup of the fastest checkpoint policy that needs no more memory than bfloat16 with checkpoint_dots.
REMATERIALISED = (1.43, 1.50)
REMAT_BASE = f"8 blocks, scanned, dots saved/{model.BASE}"
# Most seconds of the first step beyond that of bfloat16.
BEYOND = {
    "4 blocks/fp8_current": (8, 5),
    "4 blocks/fp8_delayed": (12, 8),
    "4 blocks/fp8_block": (10, 6),
    "4 blocks/mxfp8": (10, 6),
    "4 blocks/nvfp4": (15, 10),
}
# Most seconds, beyond bfloat16, that each further decoder block adds to the first step.
PER_BLOCK = (0.3, 0.1)
FEW, MANY = "4 blocks/fp8_current", "16 blocks/fp8_current"
# Most seconds of the first step of a second process with a persistent compilation cache.
SECOND_PROCESS = (10, 6)
SECOND = "16 blocks, second process/fp8_current"


class Aim(NamedTuple):
    """A target: the least speedup over a row, or if `at_most` the most seconds. reached: None if not measured."""

    name: str
    over: str
    target: float
    stretch: float
    reached: float | None
    at_most: bool = False

    @property
    def met(self) -> bool | None:
        return report.is_met(self.reached, self.target, self.at_most)


def aims(results: dict[str, Any]) -> Iterator[Aim]:
    """Yields all targets with what a device's results reached."""
    known = model.measured(results)
    for row, bounds in SPEEDS.items():
        yield Aim(f"step of {row}", model.base_row(row), *bounds, speed(known, row))
    best = "step of 8 blocks, scanned, fastest policy that needs no more memory/fp8_current"
    yield Aim(best, REMAT_BASE, *REMATERIALISED, _rematerialised(known))
    for row, bounds in BEYOND.items():
        yield Aim(f"first step of {row}, s", f"beyond {model.base_row(row)}", *bounds, beyond(known, row), at_most=True)
    few, many = beyond(known, FEW), beyond(known, MANY)
    blocks = model.CASES[MANY.split("/")[0]].blocks - model.CASES[FEW.split("/")[0]].blocks
    added = None if few is None or many is None else (many - few) / blocks
    yield Aim("first step, each further block/fp8_current, s", "beyond bfloat16's", *PER_BLOCK, added, at_most=True)
    second = known.get(SECOND)
    total = None if second is None else sum(second["first"].values())
    yield Aim(f"first step of {SECOND}, s", "total", *SECOND_PROCESS, total, at_most=True)


def speed(known: dict[str, dict[str, Any]], row: str, base: str | None = None) -> float | None:
    """The speedup of a row over its bfloat16 baseline; None if one of them was not measured."""
    result, baseline = known.get(row), known.get(base or model.base_row(row))
    return None if result is None or baseline is None else baseline["seconds"] / result["seconds"]


def beyond(known: dict[str, dict[str, Any]], row: str) -> float | None:
    """Seconds of the first step beyond that of the bfloat16 baseline; None if one of them was not measured."""
    result, baseline = known.get(row), known.get(model.base_row(row))
    if result is None or baseline is None:
        return None
    return sum(result["first"].values()) - sum(baseline["first"].values())


def _rematerialised(known: dict[str, dict[str, Any]]) -> float | None:
    if REMAT_BASE not in known:
        return None
    peak = known[REMAT_BASE]["peak_bytes"]
    rows = (row for row in known if row.endswith("/fp8_current") and model.policy_of(row) is not None)
    ratios = [speed(known, row, REMAT_BASE) for row in rows if known[row]["peak_bytes"] <= peak]
    return max((ratio for ratio in ratios if ratio is not None), default=None)
