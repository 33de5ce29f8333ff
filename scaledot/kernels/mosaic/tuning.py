"""Which tiles a product is cut into: measured ones where a device's table has them, a count of work elsewhere.

The tables are `tuned/<device>.json`, written by `python -m scaledot tune`.
"""

import dataclasses
import functools
import json
from importlib import resources
from typing import Any

import jax

from scaledot.kernels.mosaic import support


@dataclasses.dataclass(frozen=True)
class Shape:
    """What tiles are chosen by: sizes, bytes of an element and of a result, and whether sums are promoted."""

    m: int
    n: int
    k: int
    itemsize: int
    out_itemsize: int
    promote: bool


def config_for(shape: Shape) -> Any:
    from scaledot.kernels.mosaic.matmul import Config

    fields = _measured(shape)
    return Config(**fields) if fields is not None else heuristic(shape)


def heuristic(shape: Shape) -> Any:
    """The candidate that keeps the multiprocessors busiest: fewest rounds of tiles, each weighed by its size.

    A tile half as wide reads one operand twice as often; the tensor cores run at about 85 % then.
    """
    from scaledot.kernels.mosaic.matmul import Config

    def cost(config: Any) -> float:
        tiles = -(-shape.m // config.program_rows) * -(-shape.n // config.program_columns)
        rounds = -(-tiles // support.multiprocessors())
        slowdown = 1.0 if config.columns == 256 else 1 / 0.85
        return rounds * config.program_rows * config.program_columns * slowdown

    return min((Config(), Config(columns=128, stages=6, parts=1)), key=cost)


def _measured(shape: Shape) -> dict[str, Any] | None:
    for row in _table(jax.devices()[0].device_kind):
        if row["shape"] == dataclasses.asdict(shape):
            return row["config"]
    return None


@functools.cache
def _table(device_kind: str) -> tuple[dict[str, Any], ...]:
    name = device_kind.lower().replace(" ", "-") + ".json"
    file = resources.files("scaledot.kernels.mosaic") / "tuned" / name
    return tuple(json.loads(file.read_text())["matmul"]) if file.is_file() else ()
