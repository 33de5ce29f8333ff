"""Estimates of how long runs take, so that a session ends within its time."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

MARGIN = 1.1  # estimates are raised by this factor


def estimated_seconds(runs: Sequence[Mapping[str, Any]], row: str, compiled: bool = False) -> float:
    """Returns the longest time of the row's earlier `runs`, or of all rows if it has none; 0 if there are no runs.

    compiled: whether the row's programs are compiled already.
    """
    known = [run for run in runs if run["row"] == row] or list(runs)
    run_s = max((run["run_s"] for run in known), default=0.0)
    compile_s = 0.0 if compiled else max((run["compile_s"] for run in known), default=0.0)
    return MARGIN * (run_s + compile_s)


@dataclasses.dataclass(frozen=True)
class Deadline:
    """The time.monotonic() at which the session must have ended."""

    at: float

    @classmethod
    def after(cls, minutes: float | None, start: float) -> "Deadline":
        return cls(float("inf") if minutes is None else start + 60 * minutes)

    def allows(self, seconds: float) -> bool:
        return time.monotonic() + seconds <= self.at
