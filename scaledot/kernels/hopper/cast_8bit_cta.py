"""The body of the 8-bit cast kernel for one CTA: load a tile, compute multipliers, quantise chunks, store codes.

A CTA is one warpgroup. Arrays in registers are float32 (64, 64) in the WGMMA layout: the even or the odd rows of a
chunk of 64 columns. See `cast_8bit_kernel` for the tile, the transpose and the rotation.
"""

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
from scaledot.kernels.hopper import cast_support
from scaledot.kernels.hopper.cast_8bit_launch import (
    CHUNK,
    COLUMNWISE,
    ROW_PAIRS,
    ROWWISE,
    CastParameters,
    Outputs,
    RowMultipliers,
    TensorAmax,
    TensorMultiplier,
)
from scaledot.kernels.hopper.cast_arithmetic import (
    flush_subnormals,
    ordered_bits_conversions,
    rotated,
    scaled_or_nan,
    to_float8,
    to_int8,
)
from scaledot.kernels.hopper.memory_layouts import COLUMN_PER_THREAD, load
from scaledot.kernels.hopper.scale_blocks import SCALE_BLOCK
from scaledot.numerics.bits import ONE, amax_of_rank, divide, magnitude_rank
from scaledot.numerics.encode import round_to_element
from scaledot.numerics.rounding import uniform_at
from scaledot.numerics.scale import scales_or_nan

WGMMA = plgpu.Layout.WGMMA
# Layout of (128,), one element per thread: the scale of a row or a column.
ELEMENT_PER_THREAD = plgpu.Layout.WG_STRIDED((SCALE_BLOCK,), vec_size=1)
_FLOAT32 = np.dtype(np.float32)


def run(params: CastParameters, x_gmem, *refs) -> None:
    """Runs one CTA."""
    cta = _cta(params, refs)
    cta.load_tile(x_gmem)
    multiplier = cta.load_multipliers()
    plgpu.barrier_wait(cta.loaded)
    if params.has_1d_blocks:
        cta.scale_1d_blocks()
    elif params.is_blockwise:
        multiplier = cta.scale_square_block()
    cta.quantize(multiplier)
    cta.store()


def _cta(params: CastParameters, other_refs: tuple[Any, ...]) -> "Cta":
    """Names the refs of a CTA; those that the launch does not have are None."""
    refs: Any = iter(other_refs)
    scaling = None if params.is_blockwise else next(refs)
    seeds = next(refs) if params.stochastic else None
    source_rows = next(refs) if params.has_source_rows else None
    outputs = Outputs(*(next(refs) if is_written else None for is_written in params.written))
    x_smem, rowwise_smem, columnwise_smem, multipliers_smem, rotated_smem, loaded = refs
    row, column = params.grid[0] - 1 - lax.axis_index("row"), lax.axis_index("column")
    tile = Tile(x_smem, None if source_rows is None else source_rows[row, 1])
    return Cta(
        params,
        row,
        column,
        tile,
        scaling,
        seeds,
        source_rows,
        outputs,
        rowwise_smem,
        columnwise_smem,
        multipliers_smem,
        {output: rotated_smem.at[i] for i, output in enumerate(params.rotated_outputs)},
        loaded,
    )


class Cta(NamedTuple):
    """A CTA and its refs: the tile at (row, column) of the grid.

    scaling, seeds, source_rows, outputs: refs in GMEM. rotated_smem: rotated tiles by output, ROWWISE or COLUMNWISE.
    multipliers_smem: (2, 128), of the rows of the tile, even ones first, and of its columns; it holds amaxes until
    multipliers are computed from them. loaded: the barrier of the TMA copies.
    """

    params: CastParameters
    row: Any
    column: Any
    tile: "Tile"
    scaling: Any
    seeds: Any
    source_rows: Any
    outputs: Outputs
    rowwise_smem: Any
    columnwise_smem: Any
    multipliers_smem: Any
    rotated_smem: dict[int, Any]
    loaded: Any

    @property
    def row_pairs(self) -> Any:
        """The row pairs of the tile in the outputs."""
        return pl.ds(self.row * ROW_PAIRS, ROW_PAIRS)

    def columns(self, chunk: int) -> Any:
        """The columns of a chunk in the outputs."""
        return pl.ds((self.column * self.params.chunks + chunk) * CHUNK, CHUNK)

    def load_tile(self, x_gmem) -> None:
        """Issues the TMA copies of the even and the odd rows."""
        params, width = self.params, CHUNK // self.params.copies
        for chunk, parity, copy in itertools.product(range(params.chunks), range(2), range(params.copies)):
            columns = pl.ds((self.column * params.chunks + chunk) * CHUNK + copy * width, width)
            source = x_gmem.at[*_source_index(self.source_rows, self.row, parity), columns]
            plgpu.copy_gmem_to_smem(source, self.tile.smem.at[chunk, parity, copy], self.loaded)

    def load_multipliers(self) -> Any:
        """Returns the multiplier of the whole matrix, None with row or block scales; loads row multipliers to SMEM.

        The first CTA writes the scale of the whole matrix to GMEM.
        """
        is_first = (self.row == 0) & (self.column == 0)
        if self.params.scaling is TensorMultiplier:
            multiplier, scale_gmem = self.scaling[0], self.outputs.rowwise_scale
            pl.when(is_first)(lambda: scale_gmem.__setitem__(0, divide(ONE, multiplier)))
            return multiplier
        if self.params.scaling is TensorAmax:
            finite = cast_support.is_amax_finite(self.params.format, self.params.saturates)
            _, from_ordered_bits = ordered_bits_conversions(finite)
            amax = from_ordered_bits(jnp.max(load(self.scaling, ELEMENT_PER_THREAD)))
            scales = scales_or_nan(amax, self.params.format, _FLOAT32)
            pl.when(is_first)(lambda: self.outputs.rowwise_scale.__setitem__(0, scales.scale))
            return scales.multipliers[0]
        if self.params.scaling is RowMultipliers:
            self.multipliers_smem[0] = load(self.scaling.at[self.row], ELEMENT_PER_THREAD)
        return None

    def scale_1d_blocks(self) -> None:
        """Computes the scales of 1×128 blocks, writes them to GMEM and the multipliers to SMEM."""
        params = self.params
        unrotated = [output for output in (ROWWISE, COLUMNWISE) if output not in params.rotated_outputs]
        _block_amaxes(self.tile, self.multipliers_smem, unrotated, params.saturates)
        for output in params.rotated_outputs:
            rotation = params.rotations[output]
            _rotate(self.tile, self.rotated_smem[output], self.multipliers_smem, output, rotation, params.saturates)
        places = (self.column, self.row), (self.row, self.column)
        for output, scale_gmem in enumerate((self.outputs.rowwise_scale, self.outputs.columnwise_scale)):
            block_amax = load(self.multipliers_smem.at[output], ELEMENT_PER_THREAD)
            scales = scales_or_nan(block_amax, params.format, _FLOAT32)
            if scale_gmem is not None:
                scale_gmem[places[output]] = scales.scale
            self.multipliers_smem[output] = scales.multipliers[0]

    def scale_square_block(self) -> jax.Array:
        """Computes the scale of the tile, a 128×128 block, writes it to GMEM and returns the multiplier."""
        to_ordered_bits, from_ordered_bits = ordered_bits_conversions(finite=self.params.saturates)
        ordered_bits = [to_ordered_bits(values) for chunk in self.tile.chunks for values in self.tile.values(chunk)]
        block_amax = from_ordered_bits(matrix_max(functools.reduce(jnp.maximum, ordered_bits)))
        scales = scales_or_nan(block_amax, self.params.format, _FLOAT32)
        self.outputs.rowwise_scale[self.row, self.column] = scales.scale
        return scales.multipliers[0]

    def quantize(self, multiplier) -> None:
        """Writes the codes of each chunk to SMEM, and the amax and column sums of the tile to GMEM."""
        requested = self.params.requested
        largest = plgpu.layout_cast(jnp.zeros((ROW_PAIRS, CHUNK), jnp.uint32), WGMMA)
        for chunk in range(self.params.chunks):
            values = self.tile.values(chunk)
            if requested.amax:
                largest = functools.reduce(jnp.maximum, map(magnitude_rank, values), largest)
            if requested.column_sums:
                self.outputs.column_sums[self.row, self.columns(chunk)] = jnp.sum(values[0] + values[1], axis=0)
            self._quantize_chunk(chunk, values, multiplier)
        if requested.amax:
            self.outputs.amax[self.row, self.column] = amax_of_rank(matrix_max(largest))

    def _quantize_chunk(self, chunk: int, values: list[jax.Array], multiplier) -> None:
        params = self.params
        needs_rowwise = params.requested.rowwise or params.shares_codes
        rowwise = self._codes(chunk, values, ROWWISE, multiplier) if needs_rowwise else []
        if params.requested.rowwise:
            for parity in range(2):
                self.rowwise_smem[chunk, parity] = rowwise[parity]
        if not params.requested.columnwise:
            return
        if params.stochastic:  # load again: there are not enough registers to keep them
            values = self.tile.values(chunk)
        columnwise = rowwise if params.shares_codes else self._codes(chunk, values, COLUMNWISE, multiplier)
        even, odd = (lax.bitcast_convert_type(code, jnp.uint8).astype(jnp.uint16) for code in columnwise)
        if params.format.is_integer:  # Mosaic sign-extends int8 even after the bitcast to uint8
            even &= np.uint16(0xFF)
        self.columnwise_smem.at[chunk].T[...] = even | (odd << 8)

    def _codes(self, chunk: int, values: list[jax.Array], output: int, multiplier) -> list[jax.Array]:
        """Returns the codes of the even and of the odd rows of a chunk, for the row-wise or column-wise output."""
        params, codes = self.params, []
        if output in params.rotated_outputs:
            values = _rotated_values(self.rotated_smem[output], chunk, output)
        for parity, value in enumerate(values):
            by = self._multiplier(chunk, parity, output, multiplier)
            scaled = (
                flush_subnormals(value) * by if params.is_blockwise or params.saturates else scaled_or_nan(value, by)
            )
            place = self.row * SCALE_BLOCK + parity, (self.column * params.chunks + chunk) * CHUNK
            uniform = _uniform(self.seeds.at[output], place, params.row_length) if params.stochastic else None
            codes.append(_encode(scaled, params.format, uniform, params.saturates))
        return codes

    def _multiplier(self, chunk: int, parity: int, output: int, multiplier) -> Any:
        """Returns the scalar multiplier, or the multipliers of the even or odd rows of a chunk, (64, 64)."""
        if self.params.has_1d_blocks and output == COLUMNWISE:
            return _broadcast(self.multipliers_smem.at[COLUMNWISE], chunk * CHUNK, 1)
        if multiplier is not None:
            return multiplier
        return _broadcast(self.multipliers_smem.at[ROWWISE], parity * ROW_PAIRS, 0)

    def store(self) -> None:
        """Stores the codes from SMEM to GMEM by TMA."""
        plgpu.commit_smem()
        for chunk in range(self.params.chunks):
            if self.params.requested.rowwise:
                for parity in range(2):
                    target = self.outputs.rowwise.at[self.row_pairs, parity, self.columns(chunk)]
                    plgpu.copy_smem_to_gmem(self.rowwise_smem.at[chunk, parity], target)
            if self.params.requested.columnwise:
                target = self.outputs.columnwise.at[self.columns(chunk), self.row_pairs]
                plgpu.copy_smem_to_gmem(self.columnwise_smem.at[chunk], target)
        plgpu.wait_smem_to_gmem(0)


def _source_index(source_rows_gmem, row, parity: int) -> tuple[Any, Any]:
    """Returns the row pairs of a tile in x (rows / 2, 2, columns), and the row of each pair with this parity."""
    if source_rows_gmem is None:
        return pl.ds(row * ROW_PAIRS, ROW_PAIRS), parity
    first = source_rows_gmem[row, 0] + parity
    return pl.ds(lax.div(first, 2), ROW_PAIRS), lax.rem(first, 2)


class Tile(NamedTuple):
    """A tile of x in SMEM: (chunks, parity of rows, TMA copies, row pairs, columns of a copy).

    row_count: the number of rows that are taken from x, the others being zeros; None for all 128.
    """

    smem: Any
    row_count: Any

    @property
    def chunks(self) -> range:
        return range(self.smem.shape[0])

    def values(self, chunk: int) -> list[jax.Array]:
        """Loads the even and the odd rows of a chunk, float32 (64, 64) each."""
        return [self._rows(chunk, parity) for parity in range(2)]

    def _rows(self, chunk: int, parity: int) -> jax.Array:
        loaded = [load(self.smem.at[chunk, parity, copy], WGMMA) for copy in range(self.smem.shape[2])]
        value = (loaded[0] if len(loaded) == 1 else jnp.concatenate(loaded, axis=1)).astype(jnp.float32)
        if self.row_count is None:
            return value
        pair = plgpu.broadcasted_iota(jnp.int32, value.shape, 0, layout=WGMMA)
        return jnp.where(2 * pair + parity < self.row_count, value, np.float32(0))


def matrix_max(x: jax.Array) -> jax.Array:
    """Returns the largest element of a matrix in registers."""
    return jnp.max(jnp.max(x, axis=1), axis=0)


def _block_amaxes(tile: Tile, amaxes_smem, outputs: list[int], saturates: bool) -> None:
    """Writes the amaxes of rows, even ones first, and of columns to amaxes_smem[ROWWISE] and [COLUMNWISE].

    outputs: which of the two to compute. saturates: amaxes of finite elements; otherwise infinite if one is not finite.
    """
    to_ordered_bits, from_ordered_bits = ordered_bits_conversions(finite=saturates)
    row_ordered_bits: list[Any] = [None, None]
    for chunk in tile.chunks if outputs else ():
        ordered_bits = [to_ordered_bits(values) for values in tile.values(chunk)]
        if COLUMNWISE in outputs:
            columns = pl.ds(chunk * CHUNK, CHUNK)
            amaxes_smem[COLUMNWISE, columns] = from_ordered_bits(jnp.max(jnp.maximum(*ordered_bits), axis=0))
        if ROWWISE in outputs:
            chunk_ordered_bits = [jnp.max(bits, axis=1) for bits in ordered_bits]
            pairs = zip(row_ordered_bits, chunk_ordered_bits, strict=True)
            row_ordered_bits = chunk_ordered_bits if chunk == 0 else [jnp.maximum(*pair) for pair in pairs]
    for parity in range(2 if ROWWISE in outputs else 0):
        amaxes_smem[ROWWISE, pl.ds(parity * ROW_PAIRS, ROW_PAIRS)] = from_ordered_bits(row_ordered_bits[parity])


def _rotate(tile: Tile, rotated_smem, amaxes_smem, output: int, rotation: Any, saturates: bool) -> None:
    """Writes the rotated tile to SMEM, with blocks down its columns, and the amax of each block to amaxes_smem[output].

    Inputs and intermediate values of the rotation below 2^-126 are not flushed to zero, where the reference flushes
    them. `Cta._codes` flushes rotated values, as the reference does.
    """
    to_ordered_bits, from_ordered_bits = ordered_bits_conversions(finite=saturates)
    for chunk in tile.chunks:
        for parity, value in enumerate(tile.values(chunk)):
            _rotated_chunk(rotated_smem, chunk, parity, output)[...] = value.astype(jnp.bfloat16)
    size = rotation.size
    halves = range(2) if output == COLUMNWISE else range(1)  # even rows, then odd rows
    rows = size // len(halves)  # of each half, in one rotation

    def rotate_rows(i, largest):
        refs = [rotated_smem.at[pl.ds(half * ROW_PAIRS + i * rows, rows), pl.ds(0, SCALE_BLOCK)] for half in halves]
        loaded = [load(ref, COLUMN_PER_THREAD, optimized=False).astype(jnp.float32) for ref in refs]
        values = rotated([each[j : j + 1] for j in range(rows) for each in loaded], rotation)
        for half, ref in enumerate(refs):
            ref[...] = jnp.concatenate(values[half :: len(refs)]).astype(jnp.bfloat16)
        return functools.reduce(jnp.maximum, map(to_ordered_bits, values), largest)

    zeros = plgpu.layout_cast(jnp.zeros((1, SCALE_BLOCK), jnp.uint32), COLUMN_PER_THREAD)
    amaxes_smem[pl.ds(output, 1)] = from_ordered_bits(lax.fori_loop(0, SCALE_BLOCK // size, rotate_rows, zeros))


def _rotated_chunk(rotated_smem, chunk: int, parity: int, output: int) -> Any:
    """Returns the ref of the even or odd rows of a chunk in a rotated tile, (64, 64) as in the matrix."""
    rows, columns = pl.ds(parity * ROW_PAIRS, ROW_PAIRS), pl.ds(chunk * CHUNK, CHUNK)
    return rotated_smem.at[rows, columns] if output == COLUMNWISE else rotated_smem.at[columns, rows].T


def _rotated_values(rotated_smem, chunk: int, output: int) -> list[jax.Array]:
    """Loads the even and the odd rows of a chunk of a rotated tile, float32 (64, 64) each."""
    refs = [_rotated_chunk(rotated_smem, chunk, parity, output) for parity in range(2)]
    return [load(ref, WGMMA, optimized=False).astype(jnp.float32) for ref in refs]


def _encode(scaled: jax.Array, format: Format, uniform: jax.Array | None, saturates: bool) -> jax.Array:
    """Rounds scaled values to codes; with `uniform`, random numbers in [0, 1), by stochastic rounding."""
    if format.is_integer:
        return to_int8(scaled, format, uniform)
    return to_float8(
        scaled if uniform is None else round_to_element(scaled, format, uniform), format.code_dtype, saturates
    )


def _broadcast(multipliers_smem, first: int, axis: int) -> jax.Array:
    """Loads 64 multipliers, of rows (axis 0) or columns (1), and broadcasts them to (64, 64)."""
    size = (ROW_PAIRS, CHUNK)[axis]
    multipliers = load(multipliers_smem.at[pl.ds(first, size)], WGMMA.reduce(1 - axis))
    return plgpu.layout_cast(lax.broadcast_in_dim(multipliers, (ROW_PAIRS, CHUNK), (axis,)), WGMMA)


def _uniform(seeds_gmem, place, row_length: int) -> jax.Array:
    """Returns random numbers in [0, 1) for 64 columns of every second row, from the element at `place` on."""
    row, column = place
    pair, offset = (plgpu.broadcasted_iota(jnp.uint32, (ROW_PAIRS, CHUNK), axis, layout=WGMMA) for axis in range(2))
    start = (row * np.int32(row_length) + column).astype(jnp.uint32)
    return uniform_at(start + pair * np.uint32(2 * row_length) + offset, seeds_gmem[0], seeds_gmem[1])
