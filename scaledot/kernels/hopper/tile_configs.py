"""Chooses the `tiles.Config` of a matmul: the tuned one if the device's table has its `GemmKey`, else a heuristic's.

The tables are `tuned/<device kind>.json`, written by `scaledot tune`.
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
class GemmKey:
    """The key of a tuned config: the sizes and dtypes of a matmul, how it accumulates, and its groups.

    element: "float8", "int8" or "bfloat16".
    out_itemsize: bytes of an element of the result.
    accumulation: "unpromoted", over all of K in the tensor cores' accumulators; "promoted" to float32 registers every
    128 elements of K; or promoted with block scales, if b has one for each of its "blocks_1x128" or "blocks_128x128".
    row_groups, k_groups: the number of groups of rows or of K, 0 for a matmul without.
    """

    m: int
    n: int
    k: int
    element: str
    out_itemsize: int
    accumulation: str = "unpromoted"
    row_groups: int = 0
    k_groups: int = 0

    @property
    def promotes(self) -> bool:
        return self.accumulation != "unpromoted"


def accumulation_mode(promote: bool, has_k_block_scales: bool, square_blocks: bool) -> str:
    """Returns `GemmKey.accumulation`; see `matmul.matmul` for the arguments."""
    if has_k_block_scales:
        return "blocks_128x128" if square_blocks else "blocks_1x128"
    return "promoted" if promote else "unpromoted"


_overrides: dict[GemmKey, Any] = {}


@contextlib.contextmanager
def config_override(gemm: GemmKey, config: Any) -> Iterator[None]:
    """Makes `config_for(gemm)` return `config` inside the context, for matmuls that are traced there."""
    _overrides[gemm] = config
    try:
        yield
    finally:
        del _overrides[gemm]


def config_for(gemm: GemmKey) -> Any:
    from scaledot.kernels.hopper.tiles import Config

    if gemm in _overrides:
        return _overrides[gemm]
    fields = _tuned(gemm)
    return Config(**fields) if fields is not None else heuristic(gemm)


def heuristic(gemm: GemmKey) -> Any:
    """Returns the candidate with the lowest estimated cost: waves of output tiles, times the size of a tile.

    Clusters of two CTAs along rows are preferred for 8-bit operands, and clusters of one for bfloat16. Tiles of 128
    columns read one operand twice as often as tiles of 256, so they are chosen only if they save at least 15%. The
    estimate ignores how groups divide M or K.
    """

    def cost(config: Any) -> float:
        tiles = -(-gemm.m // config.cluster_tile_m) * -(-gemm.n // config.cluster_tile_n)
        waves = -(-tiles // (support.sm_count() // config.cluster_size))
        clustered = 1.02 if gemm.element == "bfloat16" else 0.99
        slowdown = (1.0 if config.wg_n == 256 else 1 / 0.85) * (clustered if config.cluster_along else 1.0)
        return waves * config.cta_m * config.cta_n * slowdown

    if gemm.row_groups:
        return min(map(for_groups, candidates(gemm.promotes)), key=cost)
    configs = candidates(gemm.promotes)
    return min((c for c in configs if c.cluster_along is None or gemm.m > c.cta_m), key=cost)


def for_groups(config: Any) -> Any:
    """Adapts a config to groups of rows.

    Neighbouring row tiles may belong to different groups, so CTAs share no tile of b. Tiles that a group fills in part
    need another staging buffer, so `epilogue_columns` is halved to 32.
    """
    return dataclasses.replace(config, cluster_along=None, epilogue_columns=32)


def candidates(promote: bool) -> list[Any]:
    from scaledot.kernels.hopper.tiles import Config

    if promote:  # three consumers: two keep the tensor cores busy while one promotes its accumulators
        return [Config(wg_n=128, stages=4, n_splits=1, grid_tile_width=8, epilogue_columns=32, consumer_warpgroups=3)]
    wide, narrow = Config(), Config(wg_n=128, stages=6, n_splits=1)
    return [
        dataclasses.replace(config, cluster_along=dimension)
        for config in (wide, narrow)
        for dimension in (None, "rows")
    ]


def _tuned(gemm: GemmKey) -> dict[str, Any] | None:
    for entry in _table(jax.devices()[0].device_kind):
        if GemmKey(**entry["gemm"]) == gemm:
            return entry["config"]
    return None


@functools.cache
def _table(device_kind: str) -> tuple[dict[str, Any], ...]:
    file = _path(device_kind)
    return tuple(json.loads(file.read_text())["matmul"]) if file.exists() else ()


def path_of_device() -> Path:
    """The path of the table for this process's device, which need not exist."""
    return _path(jax.devices()[0].device_kind)


def _path(device_kind: str) -> Path:
    return Path(__file__).parent / "tuned" / (device_kind.lower().replace(" ", "-") + ".json")
