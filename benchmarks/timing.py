"""Interleaved timing: each round calls every program once, so that other load on the machine affects all alike.

The order is shuffled in each round, because a program that always follows one that frees much memory is slowed by it.
The ratio of two medians measured this way varies less than either median; the minimum is the time without other load.
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
    """Returns the times of each call, measured alternately after one warm-up call of each."""
    for call in calls.values():
        jax.block_until_ready(call())
    order = random.Random(0)
    rounds = [{name: _seconds(calls[name]) for name in order.sample(list(calls), len(calls))} for _ in range(repeats)]
    return {name: Times(tuple(times[name] for times in rounds)) for name in calls}


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    result = jax.block_until_ready(call())
    end = time.perf_counter()
    del result  # after the clock has stopped, so that freeing is not timed
    return end - start
