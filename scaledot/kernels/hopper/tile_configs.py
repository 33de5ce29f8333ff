"""Which tiles a product is cut into: measured ones where a device's table has them, a count of work elsewhere.

The tables are `tuned/<device>.json`, written by `scaledot tune`.
"""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from scaledot.kernels.hopper import support


@dataclasses.dataclass(frozen=True)
class Shape:
    """What tiles are chosen by.

    element: "float8", "int8" or "bfloat16". out_itemsize: bytes of a result. sums: "chained" in the tensor cores,
    "promoted" to float32 every 128 terms, or promoted and scaled, where the second operand has scales of "lines" or of
    "squares". row_groups, sum_groups: in how many groups the rows or the terms are, 0 for none.
    """

    m: int
    n: int
    k: int
    element: str
    out_itemsize: int
    sums: str = "chained"
    row_groups: int = 0
    sum_groups: int = 0

    @property
    def promotes(self) -> bool:
        return self.sums != "chained"


def sums_of(promote: bool, in_steps: bool, squares: bool) -> str:
    """The name that a Shape has for them."""
    if in_steps:
        return "squares" if squares else "lines"
    return "promoted" if promote else "chained"


_tried: dict[Shape, Any] = {}


@contextlib.contextmanager
def trying(shape: Shape, config: Any) -> Iterator[None]:
    """Products of that shape that are traced meanwhile are cut so, whatever was measured."""
    _tried[shape] = config
    try:
        yield
    finally:
        del _tried[shape]


def config_for(shape: Shape) -> Any:
    from scaledot.kernels.hopper.tiles import Config

    if shape in _tried:
        return _tried[shape]
    fields = _measured(shape)
    return Config(**fields) if fields is not None else heuristic(shape)


def heuristic(shape: Shape) -> Any:
    """The candidate that keeps the multiprocessors busiest: fewest rounds of tiles, each weighed by its size.

    Pairs of programs that lie below each other are preferred where there are enough rows of 8-bit elements. A tile half
    as wide reads one operand twice as often, and is taken only where it saves more than that may cost.
    """

    def cost(config: Any) -> float:
        tiles = -(-shape.m // config.team_rows) * -(-shape.n // config.team_columns)
        rounds = -(-tiles // (support.sm_count() // config.paired))
        paired = 1.02 if shape.element == "bfloat16" else 0.99
        slowdown = (1.0 if config.columns == 256 else 1 / 0.85) * (paired if config.pair else 1.0)
        return rounds * config.program_rows * config.program_columns * slowdown

    if shape.row_groups:
        return min(map(for_groups, candidates(shape.promotes)), key=cost)
    fitting = [config for config in candidates(shape.promotes) if config.pair is None or shape.m > config.program_rows]
    return min(fitting, key=cost)


def for_groups(config: Any) -> Any:
    """Neighbouring tiles may have different matrices, and what tiles that are not full need takes half of the room."""
    return dataclasses.replace(config, pair=None, epilogue_columns=32)


def candidates(promote: bool) -> list[Any]:
    from scaledot.kernels.hopper.tiles import Config

    if promote:  # three warpgroups, of which two multiply while one moves its sums
        return [Config(columns=128, stages=4, parts=1, band=8, epilogue_columns=32, groups=3)]
    wide, narrow = Config(), Config(columns=128, stages=6, parts=1)
    return [dataclasses.replace(config, pair=pair) for config in (wide, narrow) for pair in (None, "rows")]


def _measured(shape: Shape) -> dict[str, Any] | None:
    for row in _table(jax.devices()[0].device_kind):
        if Shape(**row["shape"]) == shape:
            return row["config"]
    return None


@functools.cache
def _table(device_kind: str) -> tuple[dict[str, Any], ...]:
    file = _path(device_kind)
    return tuple(json.loads(file.read_text())["matmul"]) if file.exists() else ()


def path_of_device() -> Path:
    """The table of this process's device, whether it is there or not."""
    return _path(jax.devices()[0].device_kind)


def _path(device_kind: str) -> Path:
    return Path(__file__).parent / "tuned" / (device_kind.lower().replace(" ", "-") + ".json")
