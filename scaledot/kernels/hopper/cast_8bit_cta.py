"""One program (CTA) of the tile cast: fetch a tile, find its factors, cast it part by part, store the codes."""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from scaledot.formats import Format
from scaledot.kernels.hopper.cast_8bit_launch import PAIRS, PART, CastLaunch, FromAmax, GivenMultiplier, PerRow, Result
from scaledot.kernels.hopper.cast_arithmetic import (
    amax_codec,
    flush_subnormals,
    rotated,
    scaled_or_nan,
    to_float8,
    to_int8,
)
from scaledot.kernels.hopper.memory_layouts import LANES, load
from scaledot.kernels.hopper.scale_blocks import SCALE_BLOCK
from scaledot.numerics.bits import ONE, amax_of_rank, divide, magnitude_rank
from scaledot.numerics.encode import rounded
from scaledot.numerics.rounding import uniform_at
from scaledot.numerics.scale import scales_or_nan

WGMMA = plgpu.Layout.WGMMA
EACH = plgpu.Layout.WG_STRIDED((SCALE_BLOCK,), vec_size=1)  # one line for each thread
COLUMN = plgpu.Layout.TILED(  # one column of (rows, SCALE_BLOCK) for each thread
    plgpu.Tiling(((1, SCALE_BLOCK), (LANES,), (1,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
)
_FLOAT32 = np.dtype(np.float32)


def run(call: CastLaunch, x_gmem, *others) -> None:
    """One program: fetch a tile, decide its factors, cast it part by part, store codes."""
    program = _program(call, others)
    program.fetch(x_gmem)
    multiplier = program.known_multiplier()
    plgpu.barrier_wait(program.full)
    if call.of_lines:
        program.scale_lines()
    elif call.of_blocks:
        multiplier = program.scale_square()
    program.cast(multiplier)
    program.store()


def _program(call: CastLaunch, others: tuple[Any, ...]) -> "CtaCast":
    """The references of a program by name; those that a call does not have are None."""
    refs: Any = iter(others)
    given = None if call.of_blocks else next(refs)
    seeds = next(refs) if call.stochastic else None
    row_tiles = next(refs) if call.has_strips else None
    outs = Result(*(next(refs) if want else None for want in call.writes))
    x_smem, rows_smem, words_smem, lines_smem, turned_smem, full = refs
    row, column = call.grid[0] - 1 - lax.axis_index("row"), lax.axis_index("column")
    tile = Tile(x_smem, None if row_tiles is None else row_tiles[row, 1])
    turned = {side: turned_smem.at[i] for i, side in enumerate(call.turns)}
    return CtaCast(
        call, row, column, tile, given, seeds, row_tiles, outs, rows_smem, words_smem, lines_smem, turned, full
    )


class CtaCast(NamedTuple):
    """A program and all it reads and writes: the tile at (row, column) of the grid."""

    call: CastLaunch
    row: Any
    column: Any
    tile: "Tile"
    given: Any
    seeds: Any
    row_tiles: Any
    outs: Result
    rows_smem: Any
    words_smem: Any
    lines_smem: Any
    turned: dict[int, Any]
    full: Any

    @property
    def pairs(self) -> Any:
        return pl.ds(self.row * PAIRS, PAIRS)

    def along(self, part: int) -> Any:
        """The columns of a part."""
        return pl.ds((self.column * self.call.parts + part) * PART, PART)

    def fetch(self, x_gmem) -> None:
        """Start the copies of the even and the odd rows."""
        call, width = self.call, PART // self.call.pieces
        for part, parity, piece in itertools.product(range(call.parts), range(2), range(call.pieces)):
            columns = pl.ds((self.column * call.parts + part) * PART + piece * width, width)
            source = x_gmem.at[*_source(self.row_tiles, self.row, parity), columns]
            plgpu.copy_gmem_to_smem(source, self.tile.smem.at[part, parity, piece], self.full)

    def known_multiplier(self) -> Any:
        """The factor of the whole matrix; those of rows go to shared memory instead."""
        is_first = (self.row == 0) & (self.column == 0)
        if self.call.scaling is GivenMultiplier:
            multiplier, scale_gmem = self.given[0], self.outs.row_scale
            pl.when(is_first)(lambda: scale_gmem.__setitem__(0, divide(ONE, multiplier)))
            return multiplier
        if self.call.scaling is FromAmax:
            return _scale_tensor(self.given, self.call.format, self.outs.row_scale, is_first)
        if self.call.scaling is PerRow:
            self.lines_smem[0] = load(self.given.at[self.row], EACH)
        return None

    def scale_lines(self) -> None:
        """Leave the factors of rows and columns in shared memory, and write their scales."""
        call = self.call
        sides = [side for side in range(2) if side not in call.turns]
        _longest_lines(self.tile, self.lines_smem, sides, call.saturates)
        for side in call.turns:
            _rotate(self.tile, self.turned[side], self.lines_smem, side, call.rotations[side], call.saturates)
        places = (self.column, self.row), (self.row, self.column)
        for side, scale_gmem in enumerate((self.outs.row_scale, self.outs.column_scale)):
            levels = scales_or_nan(load(self.lines_smem.at[side], EACH), call.format, _FLOAT32)
            if scale_gmem is not None:
                scale_gmem[places[side]] = levels.scale
            self.lines_smem[side] = levels.multipliers[0]

    def scale_square(self) -> jax.Array:
        """The factor of the tile, whose scale is written."""
        ordered, amax_of = amax_codec(self.call.saturates)
        sizes = [ordered(value) for part in self.tile.parts for value in self.tile.values(part)]
        largest = amax_of(largest_of(functools.reduce(jnp.maximum, sizes)))
        levels = scales_or_nan(largest, self.call.format, _FLOAT32)
        self.outs.row_scale[self.row, self.column] = levels.scale
        return levels.multipliers[0]

    def cast(self, multiplier) -> None:
        """Codes of each part into shared memory; magnitudes and sums on the way."""
        wanted = self.call.wanted
        largest = plgpu.layout_cast(jnp.zeros((PAIRS, PART), jnp.uint32), WGMMA)
        for part in range(self.call.parts):
            values = self.tile.values(part)
            if wanted.amax:
                largest = functools.reduce(jnp.maximum, map(magnitude_rank, values), largest)
            if wanted.sums:
                self.outs.sums[self.row, self.along(part)] = jnp.sum(values[0] + values[1], axis=0)
            self._cast_part(part, values, multiplier)
        if wanted.amax:
            self.outs.amax[self.row, self.column] = amax_of_rank(largest_of(largest))

    def _cast_part(self, part: int, values: list[jax.Array], multiplier) -> None:
        call = self.call
        rows = self._codes(part, values, 0, multiplier) if call.wanted.rows or call.casts_once else []
        if call.wanted.rows:
            for parity in range(2):
                self.rows_smem[part, parity] = rows[parity]
        if not call.wanted.transposed:
            return
        if call.stochastic:  # loaded again: registers would not hold them until now
            values = self.tile.values(part)
        turned = rows if call.casts_once else self._codes(part, values, 1, multiplier)
        even, odd = (lax.bitcast_convert_type(code, jnp.uint8).astype(jnp.uint16) for code in turned)
        if call.format.is_integer:  # Mosaic still extends their sign
            even &= np.uint16(0xFF)
        self.words_smem.at[part].T[...] = even | (odd << 8)

    def _codes(self, part: int, values: list[jax.Array], transposed: int, multiplier) -> list[jax.Array]:
        """Of the even and the odd rows of a part."""
        call, made = self.call, []
        if transposed in call.turns:
            values = _turned_values(self.turned[transposed], part, transposed)
        for parity, value in enumerate(values):
            by = self._multiplier(part, parity, transposed, multiplier)
            up = flush_subnormals(value) * by if call.of_blocks or call.saturates else scaled_or_nan(value, by)
            place = self.row * SCALE_BLOCK + parity, (self.column * call.parts + part) * PART
            uniform = _uniform(self.seeds.at[transposed], place, call.width) if call.stochastic else None
            made.append(_code(up, call.format, uniform, call.saturates))
        return made

    def _multiplier(self, part: int, parity: int, transposed: int, multiplier) -> Any:
        if self.call.of_lines and transposed:
            return _spread(self.lines_smem.at[1], part * PART, 1)
        return multiplier if multiplier is not None else _spread(self.lines_smem.at[0], parity * PAIRS, 0)

    def store(self) -> None:
        """Copy codes from shared memory to the results."""
        plgpu.commit_smem()
        for part in range(self.call.parts):
            if self.call.wanted.rows:
                for parity in range(2):
                    target = self.outs.rows.at[self.pairs, parity, self.along(part)]
                    plgpu.copy_smem_to_gmem(self.rows_smem.at[part, parity], target)
            if self.call.wanted.transposed:
                target = self.outs.transposed.at[self.along(part), self.pairs]
                plgpu.copy_smem_to_gmem(self.words_smem.at[part], target)
        plgpu.wait_smem_to_gmem(0)


def _source(strips_gmem, row, parity: int) -> tuple[Any, Any]:
    """Pairs of rows of x, and which of each pair, that are the even or odd rows of a tile."""
    if strips_gmem is None:
        return pl.ds(row * PAIRS, PAIRS), parity
    first = strips_gmem[row, 0] + parity
    return pl.ds(lax.div(first, 2), PAIRS), lax.rem(first, 2)


class Tile(NamedTuple):
    """A tile of x in shared memory: parts of its columns, even and odd rows, pieces of a part.

    count: how many rows are taken, the others being zeros; None for all.
    """

    smem: Any
    count: Any

    @property
    def parts(self) -> range:
        return range(self.smem.shape[0])

    def values(self, part: int) -> list[jax.Array]:
        """The even and the odd rows of a part."""
        return [self._rows(part, parity) for parity in range(2)]

    def _rows(self, part: int, parity: int) -> jax.Array:
        loaded = [load(self.smem.at[part, parity, piece], WGMMA) for piece in range(self.smem.shape[2])]
        value = (loaded[0] if len(loaded) == 1 else jnp.concatenate(loaded, axis=1)).astype(jnp.float32)
        if self.count is None:
            return value
        pair = plgpu.broadcasted_iota(jnp.int32, value.shape, 0, layout=WGMMA)
        return jnp.where(2 * pair + parity < self.count, value, np.float32(0))


def largest_of(x: jax.Array) -> jax.Array:
    """The largest element of a matrix in registers."""
    return jnp.max(jnp.max(x, axis=1), axis=0)


def _scale_tensor(seen_gmem, format: Format, scale_gmem, is_first) -> jax.Array:
    """The factor that a format makes of the largest magnitude; the first program writes the scale."""
    seen = load(seen_gmem, plgpu.Layout.WG_STRIDED(seen_gmem.shape, vec_size=1))
    levels = scales_or_nan(jnp.max(seen), format, _FLOAT32)
    pl.when(is_first)(lambda: scale_gmem.__setitem__(0, levels.scale))
    return levels.multipliers[0]


def _longest_lines(tile: Tile, lines_smem, sides: list[int], finite: bool) -> None:
    """Leaves the largest magnitudes of the rows (0), even ones first, and of the columns (1) in shared memory."""
    ordered, amax_of = amax_codec(finite)
    longest: list[Any] = [None, None]
    for part in tile.parts if sides else ():
        sizes = [ordered(value) for value in tile.values(part)]
        if 1 in sides:
            lines_smem[1, pl.ds(part * PART, PART)] = amax_of(jnp.max(jnp.maximum(*sizes), axis=0))
        if 0 in sides:
            ends = [jnp.max(size, axis=1) for size in sizes]
            longest = ends if part == 0 else [jnp.maximum(*pair) for pair in zip(longest, ends, strict=True)]
    for parity in range(2 if 0 in sides else 0):
        lines_smem[0, pl.ds(parity * PAIRS, PAIRS)] = amax_of(longest[parity])


def _rotate(tile: Tile, turned_smem, lines_smem, side: int, rotation: Any, finite: bool) -> None:
    """Leaves the tile rotated, lines down its columns; and the largest magnitude of each where those of others are.

    Sums below 2^-126 are kept where the reference makes them zeros.
    """
    ordered, amax_of = amax_codec(finite)
    for part in tile.parts:
        for parity, value in enumerate(tile.values(part)):
            _block(turned_smem, part, parity, side)[...] = value.astype(jnp.bfloat16)
    size = rotation.size
    row_tiles = range(2) if side else range(1)  # even rows come first, and odd ones after them
    deep = size // len(row_tiles)

    def group(i, most):
        refs = [turned_smem.at[pl.ds(strip * PAIRS + i * deep, deep), pl.ds(0, SCALE_BLOCK)] for strip in row_tiles]
        loaded = [load(ref, COLUMN, optimized=False).astype(jnp.float32) for ref in refs]
        values = rotated([each[j : j + 1] for j in range(deep) for each in loaded], rotation)
        for strip, ref in enumerate(refs):
            ref[...] = jnp.concatenate(values[strip :: len(refs)]).astype(jnp.bfloat16)
        return functools.reduce(jnp.maximum, map(ordered, values), most)

    nothing = plgpu.layout_cast(jnp.zeros((1, SCALE_BLOCK), jnp.uint32), COLUMN)
    lines_smem[pl.ds(side, 1)] = amax_of(lax.fori_loop(0, SCALE_BLOCK // size, group, nothing))


def _block(turned_smem, part: int, parity: int, side: int) -> Any:
    """Where the even or odd rows of a part of the columns are in a rotated tile, as they lie in the matrix."""
    rows, columns = pl.ds(parity * PAIRS, PAIRS), pl.ds(part * PART, PART)
    return turned_smem.at[rows, columns] if side else turned_smem.at[columns, rows].T


def _turned_values(turned_smem, part: int, side: int) -> list[jax.Array]:
    blocks = [_block(turned_smem, part, parity, side) for parity in range(2)]
    return [load(block, WGMMA, optimized=False).astype(jnp.float32) for block in blocks]


def _code(up: jax.Array, format: Format, uniform: jax.Array | None, saturates: bool) -> jax.Array:
    if format.is_integer:
        return to_int8(up, format, uniform)
    return to_float8(up if uniform is None else rounded(up, format, uniform), format.code_dtype, saturates)


def _spread(line_smem, first: int, axis: int) -> jax.Array:
    """Numbers of some rows or columns, as one for each element."""
    size = (PAIRS, PART)[axis]
    line = load(line_smem.at[pl.ds(first, size)], WGMMA.reduce(1 - axis))
    return plgpu.layout_cast(lax.broadcast_in_dim(line, (PAIRS, PART), (axis,)), WGMMA)


def _uniform(seeds_gmem, place, width: int) -> jax.Array:
    """Numbers in [0, 1) for every second row from a place on, where rows have `width` elements."""
    row, column = place
    pair, across = (plgpu.broadcasted_iota(jnp.uint32, (PAIRS, PART), axis, layout=WGMMA) for axis in range(2))
    start = (row * np.int32(width) + column).astype(jnp.uint32)
    return uniform_at(start + pair * np.uint32(2 * width) + across, seeds_gmem[0], seeds_gmem[1])
