"""Targets of the whole-model benchmarks: speedups over bfloat16, and seconds of first steps."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.gpu import model, report

# Minimum speedups over bfloat16: (target, stretch).
SPEEDUPS = {
    "4 blocks/fp8_current": (1.45, 1.50),
    "4 blocks/fp8_delayed": (1.47, 1.52),
    "4 blocks/fp8_block": (1.28, 1.35),
    "4 blocks/mxfp8": (1.02, 1.06),
    "4 blocks/nvfp4": (0.97, 1.02),
    "4 blocks, quantised LM head/fp8_current": (1.54, 1.60),
    "16 blocks/fp8_current": (1.50, 1.56),
    "8 blocks, scanned/fp8_current": (1.48, 1.55),
    "8 blocks, scanned, nothing_saveable/fp8_current": (1.50, 1.58),
}
# Minimum speedup of the fastest checkpoint policy that needs no more memory than bfloat16 with checkpoint_dots.
REMAT_SPEEDUP = (1.43, 1.50)
# A policy may need more memory by this fraction: on an H200, the peak under checkpoint_dots_and_quantized_gemms is
# 4,864 bytes above the baseline's 38.9 GB.
MEMORY_TOLERANCE = 0.001
REMAT_BASE = f"8 blocks, scanned, checkpoint_dots/{model.BASE}"
# Maximum seconds of the first step in addition to those of bfloat16.
EXTRA_FIRST_STEP_S = {
    "4 blocks/fp8_current": (8, 5),
    "4 blocks/fp8_delayed": (12, 8),
    "4 blocks/fp8_block": (10, 6),
    "4 blocks/mxfp8": (10, 6),
    "4 blocks/nvfp4": (15, 10),
}
# Maximum seconds, in addition to those of bfloat16, that each further decoder block adds to the first step.
EXTRA_PER_BLOCK_S = (0.3, 0.1)
FEWER_BLOCKS, MORE_BLOCKS = "4 blocks/fp8_current", "16 blocks/fp8_current"
# Maximum seconds of the first step of a second process with a persistent compilation cache.
SECOND_PROCESS_S = (10, 6)
SECOND_PROCESS_ROW = "16 blocks, second process/fp8_current"


class Target(NamedTuple):
    """A minimum speedup over the row `relative_to`, or if `at_most` a maximum of seconds.

    measured: None if one of the rows was not measured.
    """

    name: str
    relative_to: str
    target: float
    stretch: float
    measured: float | None
    at_most: bool = False

    @property
    def met(self) -> bool | None:
        return report.is_met(self.measured, self.target, self.at_most)


def targets(results: dict[str, Any]) -> Iterator[Target]:
    """Yields all targets with the measurements in a device's results."""
    known = model.measured(results)
    for row, bounds in SPEEDUPS.items():
        yield Target(
            f"step of {model.displayed_row(row)}",
            model.displayed_row(model.base_row(row)),
            *bounds,
            speedup(known, row),
        )
    best = "step of 8 blocks, scanned, fastest policy that needs no more memory (within 0.1 %)/fp8_current"
    yield Target(best, model.displayed_row(REMAT_BASE), *REMAT_SPEEDUP, _best_remat_speedup(known))
    for row, bounds in EXTRA_FIRST_STEP_S.items():
        yield Target(
            f"first step of {row}, s",
            f"beyond {model.base_row(row)}",
            *bounds,
            extra_first_step_s(known, row),
            at_most=True,
        )
    fewer, more = extra_first_step_s(known, FEWER_BLOCKS), extra_first_step_s(known, MORE_BLOCKS)
    blocks = model.CASES[MORE_BLOCKS.split("/")[0]].blocks - model.CASES[FEWER_BLOCKS.split("/")[0]].blocks
    added = None if fewer is None or more is None else (more - fewer) / blocks
    yield Target(
        "first step, each further block/fp8_current, s", "beyond bfloat16's", *EXTRA_PER_BLOCK_S, added, at_most=True
    )
    second = known.get(SECOND_PROCESS_ROW)
    total = None if second is None else sum(second["first"].values())
    yield Target(f"first step of {SECOND_PROCESS_ROW}, s", "total", *SECOND_PROCESS_S, total, at_most=True)


def speedup(known: dict[str, dict[str, Any]], row: str, base: str | None = None) -> float | None:
    """The speedup of a row over its bfloat16 baseline; None if one of them was not measured."""
    result, baseline = known.get(row), known.get(base or model.base_row(row))
    return None if result is None or baseline is None else baseline["seconds"] / result["seconds"]


def extra_first_step_s(known: dict[str, dict[str, Any]], row: str) -> float | None:
    """Seconds of the first step less those of the bfloat16 baseline; None if one of them was not measured."""
    result, baseline = known.get(row), known.get(model.base_row(row))
    if result is None or baseline is None:
        return None
    return sum(result["first"].values()) - sum(baseline["first"].values())


def _best_remat_speedup(known: dict[str, dict[str, Any]]) -> float | None:
    """The largest speedup of a policy that needs no more memory than REMAT_BASE, within MEMORY_TOLERANCE.

    None if REMAT_BASE was not measured.
    """
    if REMAT_BASE not in known:
        return None
    peak = known[REMAT_BASE]["peak_bytes"] * (1 + MEMORY_TOLERANCE)
    rows = (row for row in known if row.endswith("/fp8_current") and model.policy_of(row) is not None)
    ratios = [speedup(known, row, REMAT_BASE) for row in rows if known[row]["peak_bytes"] <= peak]
    return max((ratio for ratio in ratios if ratio is not None), default=None)
