"""What whole models are held to: ratios of steps to bfloat16, and seconds of first steps."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.gpu import model, report

# At least these ratios to bfloat16: a target, and one beyond it.
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
# Of the fastest checkpoint policy that needs no more memory than bfloat16 with checkpoint_dots.
REMATERIALISED = (1.43, 1.50)
REMAT_BASE = f"8 blocks, scanned, dots saved/{model.BASE}"
# At most so many seconds beyond the first step of bfloat16.
BEYOND = {
    "4 blocks/fp8_current": (8, 5),
    "4 blocks/fp8_delayed": (12, 8),
    "4 blocks/fp8_block": (10, 6),
    "4 blocks/mxfp8": (10, 6),
    "4 blocks/nvfp4": (15, 10),
}
# Of these seconds, what each further block adds.
A_BLOCK = (0.3, 0.1)
FEW, MANY = "4 blocks/fp8_current", "16 blocks/fp8_current"
# The whole first step of a second process with a persistent compilation cache.
SECOND_PROCESS = (10, 6)
SECOND = "16 blocks, second process/fp8_current"


class Aim(NamedTuple):
    """A target: a ratio that is at least so large, or seconds that are at most so many. reached: None if unmeasured."""

    what: str
    over: str
    target: float
    stretch: float
    reached: float | None
    at_most: bool = False

    @property
    def met(self) -> bool | None:
        return report.is_met(self.reached, self.target, self.at_most)


def aims(results: dict[str, Any]) -> Iterator[Aim]:
    """All targets, and what a device's file says of them."""
    known = model.measured(results)
    for row, wanted in SPEEDS.items():
        yield Aim(f"step of {row}", model.base_row(row), *wanted, speed(known, row))
    best = "step of 8 blocks, scanned, fastest policy that needs no more memory/fp8_current"
    yield Aim(best, REMAT_BASE, *REMATERIALISED, _rematerialised(known))
    for row, wanted in BEYOND.items():
        yield Aim(f"first step of {row}, s", f"beyond {model.base_row(row)}", *wanted, beyond(known, row), at_most=True)
    few, many = beyond(known, FEW), beyond(known, MANY)
    blocks = model.CASES[MANY.split("/")[0]].blocks - model.CASES[FEW.split("/")[0]].blocks
    added = None if few is None or many is None else (many - few) / blocks
    yield Aim("first step, each further block/fp8_current, s", "beyond bfloat16's", *A_BLOCK, added, at_most=True)
    second = known.get(SECOND)
    whole = None if second is None else sum(second["first"].values())
    yield Aim(f"first step of {SECOND}, s", "the whole of it", *SECOND_PROCESS, whole, at_most=True)


def speed(known: dict[str, dict[str, Any]], row: str, base: str | None = None) -> float | None:
    """Steps per second over those of the bfloat16 row."""
    found, plain = known.get(row), known.get(base or model.base_row(row))
    return None if found is None or plain is None else plain["seconds"] / found["seconds"]


def beyond(known: dict[str, dict[str, Any]], row: str) -> float | None:
    """Seconds of the first step beyond the bfloat16 row's."""
    found, plain = known.get(row), known.get(model.base_row(row))
    if found is None or plain is None:
        return None
    return sum(found["first"].values()) - sum(plain["first"].values())


def _rematerialised(known: dict[str, dict[str, Any]]) -> float | None:
    if REMAT_BASE not in known:
        return None
    most = known[REMAT_BASE]["peak_bytes"]
    rows = (row for row in known if row.endswith("/fp8_current") and model.policy_of(row) is not None)
    ratios = [speed(known, row, REMAT_BASE) for row in rows if known[row]["peak_bytes"] <= most]
    return max((ratio for ratio in ratios if ratio is not None), default=None)
