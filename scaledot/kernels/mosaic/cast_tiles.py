"""One read of a matrix, 8-bit codes as they lie and transposed: one scale for all, for tiles or for lines of 128.

Lines run along the rows for codes that are written as they lie, and down the columns for those that are written
transposed, so a matmul finds them along its contracted axis either way. So do the groups of a rotation, which a second
tile in shared memory is for: there they run down the columns in any case, and a thread has a column.

A program (CTA) has one tile of 128 rows. Bytes cannot be transposed in shared memory on Hopper, pairs of bytes can: the
even and the odd rows of a tile are read apart, and the codes of two rows that belong to one column are packed into one
16-bit word. The transposed matrix of words is the transposed matrix of codes.

Rows may also come in strips that a table names, each from any row on and no longer than a tile. Shared memory then has
them in rows of 128 bytes, swizzled, because copies in tiles of eight rows begin at every eighth row only.

NaN and infinities either propagate or saturate. Propagating, the codes of both are NaN where one scale is for a whole
matrix of 8-bit floats; elsewhere the scale of what holds one is NaN. Saturating, scales follow from finite elements,
infinities become the largest code, and NaN the NaN code of a float or the integer 0.

The last rows come first: the cache may still have them from the search for the largest magnitude, and then has the
first codes for the matmul.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from scaledot.formats import Format
from scaledot.kernels.mosaic.memory import (
    LANES,
    SWIZZLE,
    THREADS,
    flushed,
    load,
    magnitudes,
    rotated,
    scaled_or_nan,
    side_by_side,
    tiled,
    to_float8,
    to_int8,
)
from scaledot.kernels.mosaic.sizes import LINE
from scaledot.numerics.bits import amax_of_rank, magnitude_rank
from scaledot.numerics.encode import rounded
from scaledot.numerics.hadamard import Hadamard
from scaledot.numerics.rounding import uniform_at
from scaledot.numerics.scale import levels_or_nan

PAIRS = LINE // 2  # pairs of rows in a tile
PART = 64  # columns that are in registers at a time
SEARCHERS = 1024  # programs that look for the largest magnitude
READS = 8  # loads that one of them has in flight
WGMMA = plgpu.Layout.WGMMA
EACH = plgpu.Layout.WG_STRIDED((LINE,), vec_size=1)  # one line for each thread
COLUMN = plgpu.Layout.TILED(  # one column of (rows, LINE) for each thread
    plgpu.Tiling(((1, LINE), (LANES,), (1,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
)
PITCH = LINE + 8  # of rows in the tile of a rotation, so that those of a column lie in different banks
Rotations = tuple[Hadamard | None, Hadamard | None]


class Given(NamedTuple):
    """A factor for the whole matrix, float32 (1,)."""

    factor: jax.Array


class Seen(NamedTuple):
    """Largest magnitudes, as `amax` gives them; the format makes one scale of them, NaN where one is infinite."""

    maxima: jax.Array


class OfRows(NamedTuple):
    """A factor for each row of the results, float32 (M,)."""

    factors: jax.Array


class OfBlocks(NamedTuple):
    """A scale for each line of 128, or for each tile of 128 x 128."""

    square: bool


Scaling = Given | Seen | OfRows | OfBlocks


class Wanted(NamedTuple):
    """Which results to write: codes as they lie, codes transposed, the largest magnitude, sums of each column."""

    rows: bool = True
    transposed: bool = True
    amax: bool = False
    sums: bool = False


class Result(NamedTuple):
    """What was wanted, None elsewhere.

    amax: one of each tile. sums: one row of each strip of tiles. Scales are (1,) for a factor that was seen, (M / 128,
    K / 128) for squares; for lines (M, K / 128) of the rows and (K, M / 128) of the transposed matrix.
    """

    rows: Any
    transposed: Any
    amax: Any
    sums: Any
    row_scale: Any
    column_scale: Any


def amax(x: jax.Array, finite: bool) -> jax.Array:
    """Largest magnitudes of x, whose rows and columns are multiples of 128: one of each program.

    finite: of its finite elements; otherwise infinite where a program has found NaN or infinities.
    """
    ordered, amax_of = magnitudes(finite)
    vector = 16 // x.dtype.itemsize
    layout = side_by_side(LANES, vector)
    read = THREADS * vector // LANES, LANES
    chunks = x.size // (READS * math.prod(read))

    def kernel(x_gmem, out_gmem):
        program = lax.axis_index("program")

        def larger(step, most):
            first = (program + step * SEARCHERS) * READS
            parts = [load(x_gmem.at[first + i], layout, optimized=False) for i in range(READS)]
            return functools.reduce(jnp.maximum, [ordered(part.astype(jnp.float32)) for part in parts], most)

        nothing = plgpu.layout_cast(jnp.zeros(read, jnp.uint32), layout)
        most = lax.fori_loop(0, lax.div(chunks - program + SEARCHERS - 1, SEARCHERS), larger, nothing)
        out_gmem[program] = amax_of(_largest(most))

    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((SEARCHERS,), jnp.float32),
        grid=(SEARCHERS,),
        grid_names=("program",),
        compiler_params=_PARAMETERS,
    )
    return run(x.reshape(-1, *read))


def cast(
    x: jax.Array,
    format: Format,
    scaling: Scaling,
    wanted: Wanted,
    seeds: jax.Array | None = None,
    width: int = 0,
    rotations: Rotations = (None, None),
    strips: jax.Array | None = None,
    saturates: bool = False,
) -> Result:
    """Codes of x (M, K), which must be multiples of 128; of 2 and 128 where there are strips.

    strips: for every 128 rows of the results, the first row of x that they have and how many, the rest being zeros;
    int32 (M / 128, 2), with the M of the results. None: all rows as they come.
    seeds: the words of two keys, uint32 (2, 2), for codes as they lie and for transposed ones; None rounds to nearest.
    width: the length of rows by which elements are counted for stochastic rounding. rotations: along the lines of codes
    as they lie and of transposed ones, before the cast. saturates: what becomes of NaN and infinities.
    """
    rows = x.shape[0] if strips is None else strips.shape[0] * LINE
    call = Call(
        (rows, x.shape[1]),
        x.dtype,
        format,
        type(scaling),
        isinstance(scaling, OfBlocks) and scaling.square,
        wanted,
        seeds is not None,
        strips is not None,
        width,
        rotations,
        saturates,
    )
    assert call.of_lines or not call.turns

    def kernel(*refs) -> None:
        _kernel(call, *refs)

    run = plgpu.kernel(
        kernel,
        out_type=tuple(output for output, want in zip(call.outputs, call.writes, strict=True) if want),
        grid=call.grid,
        grid_names=("row", "column"),
        scratch_types=call.scratch,
        compiler_params=_PARAMETERS,
    )
    optional = (*call.factors(scaling), seeds, strips)
    written = iter(run(x.reshape(-1, 2, x.shape[1]), *(each for each in optional if each is not None)))
    return call.result(*(next(written) if want else None for want in call.writes))


_PARAMETERS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
_FLOAT32 = np.dtype(np.float32)


@dataclasses.dataclass(frozen=True)
class Call:
    """One launch, before data: shapes of its grid, outputs and shared memory. shape: (M, K) of the results."""

    shape: tuple[int, int]
    input_dtype: Any
    format: Format
    scaling: type
    square: bool
    wanted: Wanted
    stochastic: bool
    has_strips: bool
    width: int
    rotations: Rotations
    saturates: bool

    @property
    def of_blocks(self) -> bool:
        return self.scaling is OfBlocks

    @property
    def of_lines(self) -> bool:
        return self.of_blocks and not self.square

    @property
    def turns(self) -> list[int]:
        """Which results are rotated: 0 for codes as they lie, 1 for transposed ones."""
        return [side for side, rotation in enumerate(self.rotations) if rotation is not None]

    @property
    def parts(self) -> int:
        """Parts of PART columns that a tile has."""
        return LINE // PART if self.of_blocks else 1

    @property
    def grid(self) -> tuple[int, int]:
        return self.shape[0] // LINE, self.shape[1] // (self.parts * PART)

    @property
    def pieces(self) -> int:
        """Copies that fetch a part: rows of strips are at most 128 bytes long in shared memory."""
        return PART * self.input_dtype.itemsize // SWIZZLE if self.has_strips else 1

    @property
    def casts_once(self) -> bool:
        """Whether codes as they lie and transposed ones are the same."""
        return not self.of_lines and not self.stochastic

    @property
    def writes(self) -> tuple[bool, ...]:
        """Which of the outputs are written."""
        has_scale = self.scaling in (Seen, OfBlocks) and (self.wanted.rows or not self.of_lines)
        return *self.wanted, has_scale, self.of_lines and self.wanted.transposed

    @property
    def outputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        (m, k), (deep, wide) = self.shape, self.grid
        scales = (1,) if self.scaling is Seen else (wide, deep, LINE) if self.of_lines else (deep, wide)
        return (
            jax.ShapeDtypeStruct((m // 2, 2, k), self.format.code_dtype),
            jax.ShapeDtypeStruct((k, m // 2), jnp.uint16),
            jax.ShapeDtypeStruct((deep, wide), jnp.float32),
            jax.ShapeDtypeStruct((deep, k), jnp.float32),
            jax.ShapeDtypeStruct(scales, jnp.float32),
            jax.ShapeDtypeStruct((deep, wide, LINE), jnp.float32),
        )

    @property
    def scratch(self) -> list[Any]:
        """Shared memory: the tile, its codes as they lie and as words, factors of lines, rotated tiles. A barrier."""
        parts, pieces, dtype = self.parts, self.pieces, self.format.code_dtype
        transforms = tiled(PART // pieces, self.input_dtype)[1 if self.has_strips else 0 :]
        has_lines = self.of_lines or self.scaling is OfRows
        rows = plgpu.SMEM((parts, 2, PAIRS, PART), dtype, transforms=tiled(PART, dtype))
        words = plgpu.SMEM((parts, PART, PAIRS), jnp.uint16, transforms=tiled(PAIRS, jnp.uint16))
        return [
            plgpu.SMEM((parts, 2, pieces, PAIRS, PART // pieces), self.input_dtype, transforms=transforms),
            rows if self.wanted.rows else None,
            words if self.wanted.transposed else None,
            plgpu.SMEM((2, LINE), jnp.float32) if has_lines else None,
            plgpu.SMEM((len(self.turns), LINE, PITCH), jnp.bfloat16) if self.turns else None,
            plgpu.Barrier(num_arrivals=2 * parts * pieces),
        ]

    def factors(self, scaling: Scaling) -> list[jax.Array]:
        """The array of a scaling that has one; of each tile's rows the even ones come first."""
        if isinstance(scaling, OfBlocks):
            return []
        if not isinstance(scaling, OfRows):
            return [scaling[0]]
        deep = self.grid[0]
        return [scaling.factors.reshape(deep, PAIRS, 2).transpose(0, 2, 1).reshape(deep, LINE)]

    def result(self, rows, words, largest, sums, scale, column_scale) -> Result:
        """What the launch has written, in the shapes of Result."""
        (m, k), (deep, wide) = self.shape, self.grid
        if self.of_lines and scale is not None:  # even rows come first in each tile
            scale = scale.reshape(wide, deep, 2, PAIRS).transpose(1, 3, 2, 0).reshape(m, wide)
        return Result(
            None if rows is None else rows.reshape(m, k),
            None if words is None else lax.bitcast_convert_type(words, self.format.code_dtype).reshape(k, m),
            largest,
            sums,
            scale,
            None if column_scale is None else column_scale.reshape(deep, k).T,
        )


def _kernel(call: Call, x_gmem, *others) -> None:
    """One program: fetch a tile, decide its factors, cast it part by part, store codes."""
    program = _program(call, others)
    program.fetch(x_gmem)
    factor = program.known_factor()
    plgpu.barrier_wait(program.full)
    if call.of_lines:
        program.scale_lines()
    elif call.of_blocks:
        factor = program.scale_square()
    program.cast(factor)
    program.store()


def _program(call: Call, others: tuple[Any, ...]) -> "Program":
    """The references of a program by name; those that a call does not have are None."""
    refs: Any = iter(others)
    given = None if call.of_blocks else next(refs)
    seeds = next(refs) if call.stochastic else None
    strips = next(refs) if call.has_strips else None
    outs = Result(*(next(refs) if want else None for want in call.writes))
    x_smem, rows_smem, words_smem, lines_smem, turned_smem, full = refs
    row, column = call.grid[0] - 1 - lax.axis_index("row"), lax.axis_index("column")
    tile = Tile(x_smem, None if strips is None else strips[row, 1])
    turned = {side: turned_smem.at[i] for i, side in enumerate(call.turns)}
    return Program(call, row, column, tile, given, seeds, strips, outs, rows_smem, words_smem, lines_smem, turned, full)


class Program(NamedTuple):
    """A program and all it reads and writes: the tile at (row, column) of the grid."""

    call: Call
    row: Any
    column: Any
    tile: "Tile"
    given: Any
    seeds: Any
    strips: Any
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
            source = x_gmem.at[*_source(self.strips, self.row, parity), columns]
            plgpu.copy_gmem_to_smem(source, self.tile.smem.at[part, parity, piece], self.full)

    def known_factor(self) -> Any:
        """The factor of the whole matrix; those of rows go to shared memory instead."""
        if self.call.scaling is Given:
            return self.given[0]
        if self.call.scaling is Seen:
            is_first = (self.row == 0) & (self.column == 0)
            return _scale_tensor(self.given, self.call.format, self.outs.row_scale, is_first)
        if self.call.scaling is OfRows:
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
            levels = levels_or_nan(load(self.lines_smem.at[side], EACH), call.format, _FLOAT32)
            if scale_gmem is not None:
                scale_gmem[places[side]] = levels.scale
            self.lines_smem[side] = levels.factors[0]

    def scale_square(self) -> jax.Array:
        """The factor of the tile, whose scale is written."""
        ordered, amax_of = magnitudes(self.call.saturates)
        sizes = [ordered(value) for part in self.tile.parts for value in self.tile.values(part)]
        largest = amax_of(_largest(functools.reduce(jnp.maximum, sizes)))
        levels = levels_or_nan(largest, self.call.format, _FLOAT32)
        self.outs.row_scale[self.row, self.column] = levels.scale
        return levels.factors[0]

    def cast(self, factor) -> None:
        """Codes of each part into shared memory; magnitudes and sums on the way."""
        wanted = self.call.wanted
        largest = plgpu.layout_cast(jnp.zeros((PAIRS, PART), jnp.uint32), WGMMA)
        for part in range(self.call.parts):
            values = self.tile.values(part)
            if wanted.amax:
                largest = functools.reduce(jnp.maximum, map(magnitude_rank, values), largest)
            if wanted.sums:
                self.outs.sums[self.row, self.along(part)] = jnp.sum(values[0] + values[1], axis=0)
            self._cast_part(part, values, factor)
        if wanted.amax:
            self.outs.amax[self.row, self.column] = amax_of_rank(_largest(largest))

    def _cast_part(self, part: int, values: list[jax.Array], factor) -> None:
        call = self.call
        rows = self._codes(part, values, 0, factor) if call.wanted.rows or call.casts_once else []
        if call.wanted.rows:
            for parity in range(2):
                self.rows_smem[part, parity] = rows[parity]
        if not call.wanted.transposed:
            return
        if call.stochastic:  # loaded again: registers would not hold them until now
            values = self.tile.values(part)
        turned = rows if call.casts_once else self._codes(part, values, 1, factor)
        even, odd = (lax.bitcast_convert_type(code, jnp.uint8).astype(jnp.uint16) for code in turned)
        if call.format.is_integer:  # Mosaic still extends their sign
            even &= np.uint16(0xFF)
        self.words_smem.at[part].T[...] = even | (odd << 8)

    def _codes(self, part: int, values: list[jax.Array], transposed: int, factor) -> list[jax.Array]:
        """Of the even and the odd rows of a part."""
        call, made = self.call, []
        if transposed in call.turns:
            values = _turned_values(self.turned[transposed], part, transposed)
        for parity, value in enumerate(values):
            by = self._factor(part, parity, transposed, factor)
            up = flushed(value) * by if call.of_blocks or call.saturates else scaled_or_nan(value, by)
            place = self.row * LINE + parity, (self.column * call.parts + part) * PART
            uniform = _uniform(self.seeds.at[transposed], place, call.width) if call.stochastic else None
            made.append(_code(up, call.format, uniform, call.saturates))
        return made

    def _factor(self, part: int, parity: int, transposed: int, factor) -> Any:
        if self.call.of_lines and transposed:
            return _spread(self.lines_smem.at[1], part * PART, 1)
        return factor if factor is not None else _spread(self.lines_smem.at[0], parity * PAIRS, 0)

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


def _largest(x: jax.Array) -> jax.Array:
    return jnp.max(jnp.max(x, axis=1), axis=0)


def _scale_tensor(seen_gmem, format: Format, scale_gmem, is_first) -> jax.Array:
    """The factor that a format makes of the largest magnitude; the first program writes the scale."""
    seen = load(seen_gmem, plgpu.Layout.WG_STRIDED((SEARCHERS,), vec_size=1))
    levels = levels_or_nan(jnp.max(seen), format, _FLOAT32)
    pl.when(is_first)(lambda: scale_gmem.__setitem__(0, levels.scale))
    return levels.factors[0]


def _longest_lines(tile: Tile, lines_smem, sides: list[int], finite: bool) -> None:
    """Leaves the largest magnitudes of the rows (0), even ones first, and of the columns (1) in shared memory."""
    ordered, amax_of = magnitudes(finite)
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
    ordered, amax_of = magnitudes(finite)
    for part in tile.parts:
        for parity, value in enumerate(tile.values(part)):
            _block(turned_smem, part, parity, side)[...] = value.astype(jnp.bfloat16)
    size = rotation.size
    strips = range(2) if side else range(1)  # even rows come first, and odd ones after them
    deep = size // len(strips)

    def group(i, most):
        refs = [turned_smem.at[pl.ds(strip * PAIRS + i * deep, deep), pl.ds(0, LINE)] for strip in strips]
        loaded = [load(ref, COLUMN, optimized=False).astype(jnp.float32) for ref in refs]
        values = rotated([each[j : j + 1] for j in range(deep) for each in loaded], rotation)
        for strip, ref in enumerate(refs):
            ref[...] = jnp.concatenate(values[strip :: len(refs)]).astype(jnp.bfloat16)
        return functools.reduce(jnp.maximum, map(ordered, values), most)

    nothing = plgpu.layout_cast(jnp.zeros((1, LINE), jnp.uint32), COLUMN)
    lines_smem[pl.ds(side, 1)] = amax_of(lax.fori_loop(0, LINE // size, group, nothing))


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
