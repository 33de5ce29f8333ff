"""How a matrix product is cut into tiles, and which program of the GPU computes which of them.

Groups, whose sizes are data, are cut on the device: a small table says what the tiles are, and programs look them up.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from scaledot.kernels.hopper.memory import ROW_TILE

FETCH_REGISTERS = 40


@dataclasses.dataclass(frozen=True)
class Config:
    """How a product is cut up.

    rows, columns: the tile of one warpgroup. groups: warpgroups that multiply. split: whether they lie below each other
    ("rows") or side by side ("columns"). stages: slots of the ring. parts: pieces in which a promoted tile is
    multiplied. band: how many output tiles wide the path is that programs walk along the result, for the cache; along:
    the axis that it follows. pair: how the tiles of two programs that share an operand lie, "rows" (below each other),
    "columns" or None. epilogue_columns: 16-bit results of a row that are stored at a time.
    """

    rows: int = 64
    columns: int = 256
    split: str = "rows"
    stages: int = 4
    parts: int = 2
    band: int = 4
    along: int = 1
    pair: str | None = None
    epilogue_columns: int = 64
    groups: int = 2

    @property
    def registers(self) -> int:
        """Of a thread that multiplies."""
        return (512 - FETCH_REGISTERS) // self.groups // 8 * 8

    @property
    def program_rows(self) -> int:
        return self.rows * (self.groups if self.split == "rows" else 1)

    @property
    def program_columns(self) -> int:
        return self.columns * (self.groups if self.split == "columns" else 1)

    @property
    def paired(self) -> int:
        """Programs that work together."""
        return 1 if self.pair is None else 2

    @property
    def team_rows(self) -> int:
        return self.program_rows * (2 if self.pair == "rows" else 1)

    @property
    def team_columns(self) -> int:
        return self.program_columns * (2 if self.pair == "columns" else 1)


class Groups(NamedTuple):
    """Parts of the rows or of the sum. axis: "rows" or "sum". table: what programs look up, of either kind below."""

    axis: str
    count: int
    table: jax.Array


def groups_of_rows(sizes: jax.Array, m: int, config: Config) -> Groups:
    """Consecutive rows of a, each group with a matrix of b: int32 (1 + tiles, 4), of which the first says how many.

    The others have group, first row, and from which to which of its rows it belongs to the group: copies can begin at
    every eighth row only. Rows of no group are one more, without a matrix.
    """
    ends = jnp.append(jnp.cumsum(sizes), m).astype(jnp.int32)
    starts = jnp.append(0, ends[:-1])
    firsts = starts // ROW_TILE * ROW_TILE
    tiles = jnp.where(ends > starts, -(-(ends - firsts) // config.program_rows), 0)
    after = jnp.cumsum(tiles)
    index = jnp.arange(m // config.program_rows + 2 * ends.size, dtype=jnp.int32)
    group = jnp.minimum(jnp.sum(index[:, None] >= after[None], axis=1, dtype=jnp.int32), ends.size - 1)
    row = firsts[group] + (index - (after - tiles)[group]) * config.program_rows
    low, high = jnp.maximum(starts[group] - row, 0), jnp.minimum(ends[group] - row, config.program_rows)
    count = jnp.zeros(4, jnp.int32).at[0].set(after[-1])
    table = jnp.concatenate([count[None], jnp.stack([group, row, low, high], axis=1)])
    return Groups("rows", sizes.size, table.astype(jnp.int32))


def groups_of_sum(steps: jax.Array) -> Groups:
    """Consecutive steps of the sum, so many in each group: int32 (groups, 2), the first step and how many."""
    return Groups("sum", steps.size, jnp.stack([jnp.cumsum(steps) - steps, steps], axis=1).astype(jnp.int32))


class Tile(NamedTuple):
    """A part of the result.

    row, column: its first ones. first: the first of the program's steps that belong to it. start, steps: where its sum
    begins, and how long it is. group: whose matrix or result it has. rows: from which to which belong to the group.
    """

    row: Any
    column: Any
    first: Any
    start: Any
    steps: Any
    group: Any = None
    rows: Any = None


class Warpgroup(NamedTuple):
    """A warpgroup that multiplies: its index in the CTA, and where its part of the CTA's tile begins."""

    index: Any
    row: Any
    column: Any


@dataclasses.dataclass(frozen=True)
class TileSchedule:
    """Which program computes which tiles; K is that many `steps` long."""

    m: int
    n: int
    steps: int
    config: Config
    programs: int
    groups: Groups | None

    @property
    def teams(self) -> int:
        return self.programs // self.config.paired

    def over_tiles(self, table, work) -> Any:
        """work(tile) for each tile of this program; returns its number of steps."""
        config, team = self.config, lax.axis_index("team")
        axis = None if self.groups is None else self.groups.axis
        down = table[0, 0] if axis == "rows" else pl.cdiv(self.m, config.team_rows)
        grid = down, pl.cdiv(self.n, config.team_columns)
        results = self.groups.count if self.groups is not None and axis == "sum" else 1
        turns = lax.div(grid[0] * grid[1] * results - team + self.teams - 1, self.teams)

        def turn(count, first):
            index = team + count * self.teams
            tile = self._tile(table, axis, index, grid, first)
            work(tile)
            return first + tile.steps

        return lax.fori_loop(0, turns, turn, jnp.int32(0))

    def _tile(self, table, axis: str | None, index, grid, first) -> Tile:
        config, member, group = self.config, lax.axis_index("member"), None
        matrices = 0 if self.groups is None else self.groups.count
        if axis == "sum":
            group, index = lax.div(index, grid[0] * grid[1]), lax.rem(index, grid[0] * grid[1])
        row, column = plgpu.planar_snake(index, grid, config.along, config.band)
        row = row * 2 + member if config.pair == "rows" else row
        column = column * 2 + member if config.pair == "columns" else column
        left = column * config.program_columns
        if axis == "rows":
            group, top, *rows = (table[1 + row, i] for i in range(4))
            steps = jnp.where(group < matrices, self.steps, 0)
            return Tile(top, left, first, 0, steps, lax.min(group, matrices - 1), rows)
        top = row * config.program_rows
        if axis == "sum":
            return Tile(top, left, first, table[group, 0], table[group, 1], group)
        return Tile(top, left, first, 0, self.steps)
