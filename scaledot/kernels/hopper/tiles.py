"""The tile shapes of a matmul kernel, and the schedule that assigns output tiles to the CTAs of a persistent grid.

Group sizes of a grouped matmul are data, so its tiles are computed on the device: XLA computes a small int32 table of
them before the kernel starts, and every CTA reads its tiles from that table.

Example: with the default `Config`, a CTA has two consumer warpgroups of 64 × 256 each, stacked along M, and computes
tiles of 128 × 256; with `cluster_along="rows"`, a cluster of two CTAs computes 256 × 256.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from scaledot.kernels.hopper.swizzle_atom import ATOM_ROWS

PRODUCER_REGISTERS = 40  # setmaxnreg of the producer warpgroup


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile shapes and pipeline depth of a matmul kernel.

    wg_m, wg_n: the output tile of one consumer warpgroup.
    wg_along: "rows" (M) or "columns" (N), along which the tiles of a CTA's consumer warpgroups are stacked.
    stages: pipeline stages in SMEM.
    n_splits: if accumulators are promoted, a warpgroup computes its tile in `n_splits` parts along N, one after the
    other, because registers must hold the accumulators of a part in addition to the float32 totals of the whole tile.
    grid_tile_width, grid_minor_dim: the order of output tiles, for L2 locality; see `plgpu.planar_snake`.
    cluster_along: "rows" (M) or "columns" (N), along which the tiles of a cluster of two CTAs are stacked; None for
    clusters of one CTA.
    epilogue_columns: columns of a 16-bit result that are stored at a time.
    consumer_warpgroups: per CTA.
    """

    wg_m: int = 64
    wg_n: int = 256
    wg_along: str = "rows"
    stages: int = 4
    n_splits: int = 2
    grid_tile_width: int = 4
    grid_minor_dim: int = 1
    cluster_along: str | None = None
    epilogue_columns: int = 64
    consumer_warpgroups: int = 2

    @property
    def consumer_registers(self) -> int:
        """The setmaxnreg of consumers.

        An SM has 65536 registers: 512 per thread if there were one warpgroup, of 128 threads. The producer keeps
        `PRODUCER_REGISTERS` of these 512, and consumer warpgroups share the rest equally, in multiples of 8.
        """
        return (512 - PRODUCER_REGISTERS) // self.consumer_warpgroups // 8 * 8

    @property
    def cta_m(self) -> int:
        """Rows of the output tile of a CTA."""
        return self.wg_m * (self.consumer_warpgroups if self.wg_along == "rows" else 1)

    @property
    def cta_n(self) -> int:
        """Columns of the output tile of a CTA."""
        return self.wg_n * (self.consumer_warpgroups if self.wg_along == "columns" else 1)

    @property
    def cluster_size(self) -> int:
        """CTAs of a cluster."""
        return 1 if self.cluster_along is None else 2

    @property
    def cluster_tile_m(self) -> int:
        """Rows of the output tile of a cluster."""
        return self.cta_m * (2 if self.cluster_along == "rows" else 1)

    @property
    def cluster_tile_n(self) -> int:
        """Columns of the output tile of a cluster."""
        return self.cta_n * (2 if self.cluster_along == "columns" else 1)


class Groups(NamedTuple):
    """The groups of a grouped matmul. axis: "rows" (of a) or "k". table: see `groups_of_rows` and `groups_of_k`."""

    axis: str
    count: int
    table: jax.Array


def groups_of_rows(sizes: jax.Array, m: int, config: Config) -> Groups:
    """Groups of consecutive rows of a (M, K), each with its own matrix of b.

    The table is int32 (1 + tiles, 4). Entry [0, 0] is the number of row tiles; the other rows are, for each row tile,
    its group, its first row, and the half-open range of its rows that belong to the group. Operands are tiled
    in atoms of eight rows in SMEM (`TilingTransform`), and Mosaic tiles the tensor map in the same way. So a TMA load
    must start at a multiple of eight rows, and a tile may begin with rows of the group before. Rows after the last
    group form one more group, numbered `sizes.size`, which has no matrix.
    """
    ends = jnp.append(jnp.cumsum(sizes), m).astype(jnp.int32)
    starts = jnp.append(0, ends[:-1])
    aligned_starts = starts // ATOM_ROWS * ATOM_ROWS
    tiles = jnp.where(ends > starts, -(-(ends - aligned_starts) // config.cta_m), 0)
    tile_ends = jnp.cumsum(tiles)
    # Upper bound: a group needs less than size / cta_m + 2 tiles, with its partial last tile and 7 rows for alignment.
    index = jnp.arange(m // config.cta_m + 2 * ends.size, dtype=jnp.int32)
    group = jnp.minimum(jnp.sum(index[:, None] >= tile_ends[None], axis=1, dtype=jnp.int32), ends.size - 1)
    row = aligned_starts[group] + (index - (tile_ends - tiles)[group]) * config.cta_m
    low, high = jnp.maximum(starts[group] - row, 0), jnp.minimum(ends[group] - row, config.cta_m)
    count = jnp.zeros(4, jnp.int32).at[0].set(tile_ends[-1])
    table = jnp.concatenate([count[None], jnp.stack([group, row, low, high], axis=1)])
    return Groups("rows", sizes.size, table.astype(jnp.int32))


def groups_of_k(steps: jax.Array) -> Groups:
    """Groups of consecutive K steps, `steps[g]` in group g, each with its own result.

    The table is int32 (groups, 2): the first step of each group, and its number of steps.
    """
    return Groups("k", steps.size, jnp.stack([jnp.cumsum(steps) - steps, steps], axis=1).astype(jnp.int32))


class Tile(NamedTuple):
    """An output tile of a CTA.

    row, column: its first row and column.
    pipeline_step: the number of K steps in earlier tiles of the CTA. Step i of the tile is step pipeline_step + i of
    the pipeline, which selects its stage, modulo `Config.stages`. (Mosaic tracks the phases of barriers.)
    k_start, k_steps: the K steps that the tile accumulates, [k_start, k_start + k_steps).
    group: the index of its matrix of b (groups of rows) or of its result (groups of K).
    rows: the half-open range of its rows that belong to the group, or None if all do.
    """

    row: Any
    column: Any
    pipeline_step: Any
    k_start: Any
    k_steps: Any
    group: Any = None
    rows: Any = None


class Warpgroup(NamedTuple):
    """A consumer warpgroup: its index in the CTA, and the first row and column of its tile within the CTA's tile."""

    index: Any
    row: Any
    column: Any


@dataclasses.dataclass(frozen=True)
class TileSchedule:
    """The output tiles of each CTA, for a result (m, n) and K of `k_steps` steps."""

    m: int
    n: int
    k_steps: int
    config: Config
    ctas: int
    groups: Groups | None

    @property
    def clusters(self) -> int:
        return self.ctas // self.config.cluster_size

    def for_each_tile(self, table, process) -> Any:
        """Calls process(tile) for each output tile of this CTA; returns their total number of K steps."""
        config, cluster = self.config, lax.axis_index("cluster")
        axis = None if self.groups is None else self.groups.axis
        row_tiles = table[0, 0] if axis == "rows" else pl.cdiv(self.m, config.cluster_tile_m)
        grid = row_tiles, pl.cdiv(self.n, config.cluster_tile_n)
        results = self.groups.count if self.groups is not None and axis == "k" else 1
        count = lax.div(grid[0] * grid[1] * results - cluster + self.clusters - 1, self.clusters)

        def body(i, pipeline_step):
            tile = self._tile(table, axis, cluster + i * self.clusters, grid, pipeline_step)
            process(tile)
            return pipeline_step + tile.k_steps

        return lax.fori_loop(0, count, body, jnp.int32(0))

    def _tile(self, table, axis: str | None, index, grid, pipeline_step) -> Tile:
        config, rank, group = self.config, lax.axis_index("cta"), None
        group_count = 0 if self.groups is None else self.groups.count
        if axis == "k":
            group, index = lax.div(index, grid[0] * grid[1]), lax.rem(index, grid[0] * grid[1])
        row_tile, column_tile = plgpu.planar_snake(index, grid, config.grid_minor_dim, config.grid_tile_width)
        row_tile = row_tile * 2 + rank if config.cluster_along == "rows" else row_tile
        column_tile = column_tile * 2 + rank if config.cluster_along == "columns" else column_tile
        column = column_tile * config.cta_n
        if axis == "rows":
            group, row, *rows = (table[1 + row_tile, i] for i in range(4))
            k_steps = jnp.where(group < group_count, self.k_steps, 0)
            # Rows after the last group have no matrix: their tiles have a valid group index and 0 K steps.
            return Tile(row, column, pipeline_step, 0, k_steps, lax.min(group, group_count - 1), rows)
        row = row_tile * config.cta_m
        if axis == "k":
            return Tile(row, column, pipeline_step, table[group, 0], table[group, 1], group)
        return Tile(row, column, pipeline_step, 0, self.k_steps)
