"""One read of a matrix, 8-bit codes as they lie and transposed: one scale for all, for tiles or for lines of 128.

Lines run along the rows for codes that are written as they lie, and down the columns for those that are written
transposed, so a product finds them along its sum either way. So do the groups of a rotation, which a second tile in
shared memory is for: there they run down the columns in any case, and a thread has a column.

A program has one tile. Bytes cannot be transposed in shared memory on Hopper, pairs of bytes can: the even and the odd
rows of a tile are read apart, and the codes of two rows that belong to one column are packed into one 16-bit word. The
transposed matrix of words is the transposed matrix of codes.

Rows may also come in strips that a table names, each from any row on and no longer than a tile. Shared memory then has
them in rows of 128 bytes, swizzled, because copies in tiles of eight rows begin at every eighth row only.

Codes of NaN and infinities are NaN where one scale is for a whole matrix of 8-bit floats. Elsewhere the scale of what
holds one is NaN.

The last rows come first: the cache may still have them from who looked for the largest magnitude, and then has the
first codes for who multiplies.
"""

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
from scaledot.kernels.mosaic.casts import LINE
from scaledot.kernels.mosaic.memory import (
    LANES,
    SWIZZLE,
    THREADS,
    flushed,
    load,
    rotated,
    scaled_or_nan,
    side_by_side,
    tiled,
    to_float8,
    to_int8,
)
from scaledot.numerics.bits import amax_of_bits, amax_of_rank, magnitude_bits, magnitude_rank
from scaledot.numerics.encode import rounded
from scaledot.numerics.hadamard import Hadamard
from scaledot.numerics.rounding import uniform_at
from scaledot.numerics.scale import levels_or_nan

PAIRS = LINE // 2  # pairs of rows in a tile
PART = 64  # columns that are in registers at a time
SEARCHERS = 1024  # programs that look for the largest magnitude
READS = 8  # that one of them has on their way
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
    ordered, amax_of = (magnitude_rank, amax_of_rank) if finite else (magnitude_bits, amax_of_bits)
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
) -> Result:
    """Codes of x (M, K), which must be multiples of 128; of 2 and 128 where there are strips.

    strips: for every 128 rows of the results, the first row of x that they have and how many, the rest being zeros;
    int32 (M / 128, 2), with the M of the results. None: all rows as they come.
    seeds: the words of two keys, uint32 (2, 2), for codes as they lie and for transposed ones; None rounds to nearest.
    width: the length of rows by which elements are counted for stochastic rounding. rotations: along the lines of codes
    as they lie and of transposed ones, before the cast.
    """
    k = x.shape[1]
    m = x.shape[0] if strips is None else strips.shape[0] * LINE
    dtype = format.code_dtype
    of_lines = isinstance(scaling, OfBlocks) and not scaling.square
    turns = [side for side, rotation in enumerate(rotations) if rotation is not None]
    assert of_lines or not turns
    parts = LINE // PART if isinstance(scaling, OfBlocks) else 1
    deep, wide = m // LINE, k // (parts * PART)
    pieces = 1 if strips is None else PART * x.dtype.itemsize // SWIZZLE
    piece_columns = PART // pieces
    has_scale = isinstance(scaling, Seen | OfBlocks) and (wanted.rows or not of_lines)
    writes = (*wanted, has_scale, of_lines and wanted.transposed)
    given = [] if isinstance(scaling, OfBlocks) else [scaling[0]]
    if isinstance(scaling, OfRows):  # even rows come first in each tile
        given = [scaling.factors.reshape(deep, PAIRS, 2).transpose(0, 2, 1).reshape(deep, LINE)]

    def kernel(x_gmem, *others):
        refs: Any = iter(others)
        given_gmem: Any = next(refs) if given else None
        seeds_gmem: Any = None if seeds is None else next(refs)
        strips_gmem: Any = None if strips is None else next(refs)
        outs: tuple[Any, ...] = tuple(next(refs) if want else None for want in writes)
        rows_gmem, words_gmem, amax_gmem, sums_gmem, row_scale, column_scale = outs
        x_smem, rows_smem, words_smem, lines_smem, turned_smem, full = refs
        turned_of: dict[int, Any] = {side: turned_smem.at[i] for i, side in enumerate(turns)}
        row, column = deep - 1 - lax.axis_index("row"), lax.axis_index("column")
        pairs = pl.ds(row * PAIRS, PAIRS)
        along = [pl.ds((column * parts + part) * PART, PART) for part in range(parts)]
        tile = Tile(x_smem, None if strips is None else strips_gmem[row, 1])
        for part, parity, piece in itertools.product(range(parts), range(2), range(pieces)):
            columns = pl.ds((column * parts + part) * PART + piece * piece_columns, piece_columns)
            source = x_gmem.at[*_source(strips_gmem, row, parity), columns]
            plgpu.copy_gmem_to_smem(source, x_smem.at[part, parity, piece], full)
        factor: Any = None
        if isinstance(scaling, Given):
            factor = given_gmem[0]
        elif isinstance(scaling, Seen):
            factor = _scale_tensor(given_gmem, format, row_scale, (row == 0) & (column == 0))
        elif isinstance(scaling, OfRows):
            lines_smem[0] = load(given_gmem.at[row], EACH)
        plgpu.barrier_wait(full)
        if of_lines:
            _longest_lines(tile, lines_smem, [side for side in range(2) if side not in turns])
            for side in turns:
                _rotate(tile, turned_of[side], lines_smem, side, rotations[side])
            _scale_lines(format, lines_smem, row_scale, column_scale, row, column)
        elif isinstance(scaling, OfBlocks):
            factor = _scale_square(tile, format, row_scale, row, column)

        def factor_of(part: int, parity: int, transposed: int) -> Any:
            if of_lines and transposed:
                return _spread(lines_smem.at[1], part * PART, 1)
            return factor if factor is not None else _spread(lines_smem.at[0], parity * PAIRS, 0)

        def codes(part: int, values: list[jax.Array], transposed: int) -> list[jax.Array]:
            made = []
            if transposed in turns:
                values = _turned_values(turned_of[transposed], part, transposed)
            for parity, value in enumerate(values):
                by = factor_of(part, parity, transposed)
                up = flushed(value) * by if isinstance(scaling, OfBlocks) else scaled_or_nan(value, by)
                place = row * LINE + parity, (column * parts + part) * PART
                uniform = None if seeds is None else _uniform(seeds_gmem.at[transposed], place, width)
                made.append(_code(up, format, uniform))
            return made

        one_cast = not of_lines and seeds is None
        largest = plgpu.layout_cast(jnp.zeros((PAIRS, PART), jnp.uint32), WGMMA)
        for part in range(parts):
            values = tile.values(part)
            if wanted.amax:
                largest = functools.reduce(jnp.maximum, map(magnitude_rank, values), largest)
            if wanted.sums:
                sums_gmem[row, along[part]] = jnp.sum(values[0] + values[1], axis=0)
            rows = codes(part, values, 0) if wanted.rows or one_cast else []
            if wanted.rows:
                for parity in range(2):
                    rows_smem[part, parity] = rows[parity]
            if wanted.transposed:
                if seeds is not None:  # registers would not hold them until now
                    values = tile.values(part)
                turned = rows if one_cast else codes(part, values, 1)
                even, odd = (lax.bitcast_convert_type(code, jnp.uint8).astype(jnp.uint16) for code in turned)
                if format.is_integer:  # Mosaic still extends their sign
                    even &= np.uint16(0xFF)
                words_smem.at[part].T[...] = even | (odd << 8)
        if wanted.amax:
            amax_gmem[row, column] = amax_of_rank(_largest(largest))
        plgpu.commit_smem()
        for part in range(parts):
            if wanted.rows:
                for parity in range(2):
                    plgpu.copy_smem_to_gmem(rows_smem.at[part, parity], rows_gmem.at[pairs, parity, along[part]])
            if wanted.transposed:
                plgpu.copy_smem_to_gmem(words_smem.at[part], words_gmem.at[along[part], pairs])
        plgpu.wait_smem_to_gmem(0)

    scales = (1,) if isinstance(scaling, Seen) else (wide, deep, LINE) if of_lines else (deep, wide)
    outputs = (
        jax.ShapeDtypeStruct((m // 2, 2, k), dtype),
        jax.ShapeDtypeStruct((k, m // 2), jnp.uint16),
        jax.ShapeDtypeStruct((deep, wide), jnp.float32),
        jax.ShapeDtypeStruct((deep, k), jnp.float32),
        jax.ShapeDtypeStruct(scales, jnp.float32),
        jax.ShapeDtypeStruct((deep, wide, LINE), jnp.float32),
    )
    transforms = tiled(piece_columns, x.dtype)[0 if strips is None else 1 :]
    run = plgpu.kernel(
        kernel,
        out_type=tuple(output for output, want in zip(outputs, writes, strict=True) if want),
        grid=(deep, wide),
        grid_names=("row", "column"),
        scratch_types=[
            plgpu.SMEM((parts, 2, pieces, PAIRS, piece_columns), x.dtype, transforms=transforms),
            plgpu.SMEM((parts, 2, PAIRS, PART), dtype, transforms=tiled(PART, dtype)) if wanted.rows else None,
            plgpu.SMEM((parts, PART, PAIRS), jnp.uint16, transforms=tiled(PAIRS, jnp.uint16))
            if wanted.transposed
            else None,
            plgpu.SMEM((2, LINE), jnp.float32) if of_lines or isinstance(scaling, OfRows) else None,
            plgpu.SMEM((len(turns), LINE, PITCH), jnp.bfloat16) if turns else None,
            plgpu.Barrier(num_arrivals=2 * parts * pieces),
        ],
        compiler_params=_PARAMETERS,
    )
    written = iter(run(x.reshape(-1, 2, k), *given, *(each for each in (seeds, strips) if each is not None)))
    rows, words, largest, sums, scale, column_scale = (next(written) if want else None for want in writes)
    if of_lines and scale is not None:  # even rows come first in each tile
        scale = scale.reshape(wide, deep, 2, PAIRS).transpose(1, 3, 2, 0).reshape(m, wide)
    return Result(
        None if rows is None else rows.reshape(m, k),
        None if words is None else lax.bitcast_convert_type(words, dtype).reshape(k, m),
        largest,
        sums,
        scale,
        None if column_scale is None else column_scale.reshape(deep, k).T,
    )


_PARAMETERS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
_FLOAT32 = np.dtype(np.float32)


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


def _scale_square(tile: Tile, format: Format, scale_gmem, row, column) -> jax.Array:
    sizes = [magnitude_bits(value) for part in tile.parts for value in tile.values(part)]
    levels = levels_or_nan(amax_of_bits(_largest(functools.reduce(jnp.maximum, sizes))), format, _FLOAT32)
    scale_gmem[row, column] = levels.scale
    return levels.factors[0]


def _longest_lines(tile: Tile, lines_smem, sides: list[int]) -> None:
    """Leaves the largest magnitudes of the rows (0), even ones first, and of the columns (1) in shared memory."""
    longest: list[Any] = [None, None]
    for part in tile.parts if sides else ():
        sizes = [magnitude_bits(value) for value in tile.values(part)]
        if 1 in sides:
            lines_smem[1, pl.ds(part * PART, PART)] = amax_of_bits(jnp.max(jnp.maximum(*sizes), axis=0))
        if 0 in sides:
            ends = [jnp.max(size, axis=1) for size in sizes]
            longest = ends if part == 0 else [jnp.maximum(*pair) for pair in zip(longest, ends, strict=True)]
    for parity in range(2 if 0 in sides else 0):
        lines_smem[0, pl.ds(parity * PAIRS, PAIRS)] = amax_of_bits(longest[parity])


def _rotate(tile: Tile, turned_smem, lines_smem, side: int, rotation: Any) -> None:
    """Leaves the tile rotated, lines down its columns; and the largest magnitude of each where those of others are.

    Sums below 2^-126 are kept where the reference makes them zeros.
    """
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
        return functools.reduce(jnp.maximum, map(magnitude_bits, values), most)

    nothing = plgpu.layout_cast(jnp.zeros((1, LINE), jnp.uint32), COLUMN)
    lines_smem[pl.ds(side, 1)] = amax_of_bits(lax.fori_loop(0, LINE // size, group, nothing))


def _block(turned_smem, part: int, parity: int, side: int) -> Any:
    """Where the even or odd rows of a part of the columns are in a rotated tile, as they lie in the matrix."""
    rows, columns = pl.ds(parity * PAIRS, PAIRS), pl.ds(part * PART, PART)
    return turned_smem.at[rows, columns] if side else turned_smem.at[columns, rows].T


def _turned_values(turned_smem, part: int, side: int) -> list[jax.Array]:
    blocks = [_block(turned_smem, part, parity, side) for parity in range(2)]
    return [load(block, WGMMA, optimized=False).astype(jnp.float32) for block in blocks]


def _scale_lines(format: Format, lines_smem, row_scale, column_scale, row, column) -> None:
    """Makes factors of the largest magnitudes that were found, in their place."""
    for side, scale_gmem, at in ((0, row_scale, (column, row)), (1, column_scale, (row, column))):
        levels = levels_or_nan(load(lines_smem.at[side], EACH), format, _FLOAT32)
        if scale_gmem is not None:
            scale_gmem[at] = levels.scale
        lines_smem[side] = levels.factors[0]


def _code(up: jax.Array, format: Format, uniform: jax.Array | None) -> jax.Array:
    if format.is_integer:
        return to_int8(up, format, uniform)
    if uniform is None:
        return to_float8(up, format.code_dtype)
    return rounded(up, format, uniform).astype(format.code_dtype)


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
