"""Interleaved timing: each round calls every program once, so that whatever else the machine does slows all alike.

The order changes from round to round, because a program that always follows one which frees much memory pays for it.

The ratio of two medians taken this way is steadier than either median; the minimum is what the code can do
when nothing else runs.
"""

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of each repeat."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def min(self) -> float:
        return min(self.seconds)


def interleaved(calls: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, Times]:
    """Times of each call, taken in turns after one warm-up each."""
    for call in calls.values():
        jax.block_until_ready(call())
    order = random.Random(0)
    rounds = [{name: _seconds(calls[name]) for name in order.sample(list(calls), len(calls))} for _ in range(repeats)]
    return {name: Times(tuple(turn[name] for turn in rounds)) for name in calls}


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    result = jax.block_until_ready(call())
    end = time.perf_counter()
    del result  # freed after the clock has stopped
    return end - start
