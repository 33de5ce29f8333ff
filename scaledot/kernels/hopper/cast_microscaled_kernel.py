"""Casts a matrix to MXFP8 or NVFP4 in one pass over memory, with blocks along rows and down columns.

Outputs may have 1-d blocks of 32 (MXFP8) or 16 (NVFP4) elements along rows, the same down columns, or square blocks.
Each output is codes and the bytes of their scales, or bfloat16 values (code times block scale). Hopper's tensor cores
do not apply block scales; these values are exact in bfloat16, so a matmul of them is exact up to accumulation.

Grid and CTA: one CTA of one warpgroup (128 threads) for as many rows as a block is long and 128 × V columns. TMA loads
the tile to SMEM. A thread holds V neighbouring columns in registers: V = 8 for MXFP8 from 16-bit inputs, otherwise 4
(2 with a rotation and column packing, see below).
Blocks down columns, and the groups of a Hadamard rotation, are therefore held by one thread; a block along a row is
shared by size / V neighbouring lanes. A first loop over the rows casts blocks along rows and accumulates the amax of
each column; a second loop casts blocks down columns and square blocks. Codes and scales are stored from registers.

Scales: E8M0 scales of MXFP8 are computed from the amax of each block. NVFP4 has two levels, E4M3 block scales and one
tensor scale, which is computed from the amax before the cast. XLA computes the amax; if an output is rotated, the
kernel `amaxes` does, in another pass over memory. `tensor_multipliers` are the reciprocals of tensor scales, by which x
is multiplied.

Packing of 4-bit codes, two to a byte: packing two neighbouring rows, the even row in the low nibble, needs the fewest
instructions, because one thread holds both. Packing two neighbouring columns is XLA's layout of 4-bit arrays. For this
the CTA reads bfloat16 as 32-bit words of two columns, so that even and odd columns are in separate registers; V then
counts words, so a CTA has twice as many columns; if an output is rotated, V is 2 instead of 4.

NaN and infinities propagate, by a NaN scale of their block, or saturate: scales are then computed from finite elements,
infinities become the largest code, and NaN becomes the NaN code of an 8-bit float or the 4-bit code 0. Codes and scales
are bit-identical to the reference. Dequantised bfloat16 values below 2^-126 are kept, and such inputs and intermediate
values of a rotation are not flushed, where the reference flushes both to zero; neither is large enough to change the
result of a matmul.

Example: x bfloat16 (512, 2048) to MXFP8 codes along rows and down columns. A CTA has 32 rows and 1024 columns, 64 KiB
of SMEM; the grid is (16, 2). Outputs are codes (512, 2048) with scales (512, 64), and codes (512, 2048) with scales
(16, 2048). The kernel reads 2 MiB and writes 2 MiB of codes.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from scaledot.formats import Format
from scaledot.kernels.hopper.cast_arithmetic import (
    flush_subnormals,
    ordered_bits_conversions,
    rotated,
    scale_reciprocal,
    to_float8,
)
from scaledot.kernels.hopper.launch import call_exported
from scaledot.kernels.hopper.memory_layouts import THREADS, load, row_vector_layout
from scaledot.kernels.hopper.scale_blocks import MICROSCALED_BLOCKS
from scaledot.kernels.hopper.support import kernel_name
from scaledot.numerics.bits import amax_of_rank, float_of, magnitude_rank, power_of_two
from scaledot.numerics.encode import float_code, round_to_element
from scaledot.numerics.hadamard import Hadamard
from scaledot.numerics.rounding import uniform_at
from scaledot.numerics.scale import E4M3_MAX, e8m0_code

COLUMN_MULTIPLE = THREADS * 8  # K must be a multiple of this
ROWS_PER_STEP = 4  # rows in one iteration of a loop
# MXFP8 values are code * 2^-8 * (2^8 * scale): the smallest E8M0 scale, 2^-127, is subnormal in float32, and 2^8 times
# the largest scale of 8-bit codes, 2^119, does not overflow.
CODE_MULTIPLIER = np.float32(2.0**-8)
AMAX_BLOCKS = 8  # blocks of rows that a CTA of the amax kernel reads, at most


@dataclasses.dataclass(frozen=True)
class OutputSpec:
    """One output of the kernel.

    blocks: "along" rows, "down" columns, or "square". dequantized: bfloat16 values instead of codes and scales.
    rotation: down the columns, before the cast. packing: two "rows" or two "columns" of 4-bit codes to a byte, or "".
    saturates: whether infinities saturate and scales are computed from finite elements; otherwise NaN and infinities
    propagate.
    """

    format: Format
    blocks: str
    dequantized: bool
    stochastic: bool = False
    rotation: Hadamard | None = None
    packing: str = ""
    saturates: bool = False

    def has_same_codes(self, other: "OutputSpec") -> bool:
        """Whether both outputs have the same codes; outputs with stochastic rounding have different keys."""
        return (
            not self.stochastic
            and dataclasses.replace(self, dequantized=other.dequantized, packing=other.packing) == other
        )


class CodesAndScales(NamedTuple):
    """Codes and the bytes of their scales; or bfloat16 values, and None."""

    data: jax.Array
    scale: jax.Array | None


def cast(
    x: jax.Array,
    outputs: tuple[OutputSpec, ...],
    tensor_multipliers: jax.Array | None,
    seeds: jax.Array | None,
    row_length: int,
) -> tuple[CodesAndScales, ...]:
    """Casts x (M, K) to these outputs; M must be a multiple of the block size and K of 1024.

    tensor_multipliers: for each output of a two-level format, the quantisation multiplier of the tensor and its
    reciprocal, float32 (outputs, 2).
    seeds: two words of a random key for each output, uint32 (outputs, 2); None if all round to nearest.
    row_length: columns of the unpadded (global) array, for the flat index of an element. Either all outputs pack
    columns or none.
    """
    m, k = x.shape
    params = CastParameters.of(x, outputs, tensor_multipliers is not None, seeds is not None, row_length)

    def kernel(*refs) -> None:
        _kernel(params, *refs)

    tile = (params.block, params.columns // params.block, params.block_elements)
    run = plgpu.kernel(
        kernel,
        out_type=tuple(each for output in outputs for each in params.output_types(m, k, output)),
        grid=(m // params.block, k // params.columns),
        grid_names=("row", "column"),
        kernel_name=kernel_name("cast", *dict.fromkeys(output.format.name for output in outputs)),
        scratch_types=[plgpu.SMEM(tile, params.dtype), plgpu.Barrier()],
        compiler_params=_PARAMETERS,
    )
    if params.paired:
        x = lax.bitcast_convert_type(x.reshape(m, k // 2, 2), jnp.uint32)
    optional = [each for each in (tensor_multipliers, seeds) if each is not None]
    arrays = iter(call_exported(params, run, x.reshape(m, k // params.block, params.block_elements), *optional))

    def result(output: OutputSpec) -> CodesAndScales:
        data = next(arrays)
        scale = None if output.dequantized else next(arrays)
        if scale is not None and scale.ndim == 4:  # (blocks, 2, blocks, elements): interleave even and odd columns
            scale = scale.transpose(0, 2, 3, 1)
        return CodesAndScales(
            data.reshape(data.shape[0], -1), None if scale is None else scale.reshape(scale.shape[0], -1)
        )

    return tuple(map(result, outputs))


class CastParameters(NamedTuple):
    """The static parameters of a launch.

    block: the block size. vector: V, neighbouring elements of a row that a thread holds, words if columns are `paired`.
    paired: whether x is read as 32-bit words of two bfloat16 columns. dtype: of elements in SMEM.
    """

    outputs: tuple[OutputSpec, ...]
    block: int
    vector: int
    paired: bool
    dtype: Any
    has_tensor_multipliers: bool
    has_seeds: bool
    row_length: int

    @classmethod
    def of(
        cls,
        x: jax.Array,
        outputs: tuple[OutputSpec, ...],
        has_tensor_multipliers: bool,
        has_seeds: bool,
        row_length: int,
    ) -> "CastParameters":
        format = outputs[0].format
        block, paired = MICROSCALED_BLOCKS[format.element, format.scale], outputs[0].packing == "columns"
        assert all((output.packing == "columns") == paired for output in outputs)
        vector = _vector(block, x.dtype)
        if paired and any(output.rotation is not None for output in outputs):
            vector //= 2  # a thread holds a whole block of each of its columns in registers
        dtype = jnp.uint32 if paired else x.dtype
        return cls(outputs, block, vector, paired, dtype, has_tensor_multipliers, has_seeds, row_length)

    @property
    def block_elements(self) -> int:
        """Elements in SMEM of a block along a row."""
        return self.block // (2 if self.paired else 1)

    @property
    def columns(self) -> int:
        """Columns of x in a CTA tile."""
        return THREADS * self.vector * self.block // self.block_elements

    def output_types(self, m: int, k: int, output: OutputSpec) -> list[jax.ShapeDtypeStruct]:
        """The types of an output as the kernel writes it: data, and the bytes of scales if it has codes."""
        across = k // self.block
        dtype = jnp.bfloat16 if output.dequantized else jnp.uint8 if output.packing else output.format.element_dtype
        data = jax.ShapeDtypeStruct((m // 2 if output.packing == "rows" else m, across, self.block_elements), dtype)
        if output.dequantized:
            return [data]
        down = m // self.block
        scales = {"along": (m, across), "down": (down, across, self.block), "square": (down, across)}
        if output.blocks == "down" and self.paired:  # those of even columns, then those of odd columns
            return [data, jax.ShapeDtypeStruct((down, 2, across, self.block_elements), jnp.uint8)]
        return [data, jax.ShapeDtypeStruct(scales[output.blocks], jnp.uint8)]


def _kernel(params: CastParameters, x_gmem, *refs) -> None:
    """Runs one CTA. Outputs with the same codes share one cast."""
    *refs, x_smem, loaded = refs
    others = iter(refs)
    tensor_multipliers_gmem = next(others) if params.has_tensor_multipliers else None
    seeds_gmem = next(others) if params.has_seeds else None
    across = params.columns // params.block
    first_row, first_block = lax.axis_index("row") * params.block, lax.axis_index("column") * across
    tile = x_gmem.at[pl.ds(first_row, params.block), pl.ds(first_block, across)]
    plgpu.copy_gmem_to_smem(tile, x_smem, loaded)
    pending = [
        OutputRefs(i, spec, next(others), None if spec.dequantized else next(others))
        for i, spec in enumerate(params.outputs)
    ]
    casts = []
    while pending:
        spec, index = pending[0].spec, pending[0].index
        shared = [pending[0], *(output for output in pending[1:] if spec.has_same_codes(output.spec))]
        pending = [output for output in pending if output not in shared]
        tensor_multipliers = (
            None
            if tensor_multipliers_gmem is None
            else (tensor_multipliers_gmem[index, 0], tensor_multipliers_gmem[index, 1])
        )
        uniform = functools.partial(_uniform, seeds_gmem, index, params.row_length) if spec.stochastic else None
        casts.append(Cast(spec, tensor_multipliers, tuple(shared), uniform))
    plgpu.barrier_wait(loaded)
    _run_casts(casts, Tile(x_smem, first_row, first_block, params.vector, params.paired))


def amaxes(x: jax.Array, rotations: tuple[Hadamard | None, ...], block: int) -> jax.Array:
    """Returns the amax of the finite elements of x (M, K) after each rotation, or without one for None: (rotations,).

    Rotations run down columns, in groups of `block` rows. A thread holds `block` rows of its columns in registers.
    """
    m, k = x.shape
    vector, down = _vector(block, x.dtype), m // block
    columns = THREADS * vector
    row_tiles = -(-down // AMAX_BLOCKS)

    def kernel(x_gmem, out_gmem):
        row_tile, column = lax.axis_index("row_tile"), lax.axis_index("column")

        def accumulate(i, largest):
            first = (row_tile + i * row_tiles) * block
            blocks = pl.ds(column * (columns // block), columns // block)
            rows = [_load_row(x_gmem.at[first + j, blocks], vector) for j in range(block)]
            result = []
            for rotation, most in zip(rotations, largest, strict=True):
                values = rows if rotation is None else rotated(rows, rotation)
                result.append(functools.reduce(jnp.maximum, map(magnitude_rank, values), most))
            return tuple(result)

        zeros = plgpu.layout_cast(jnp.zeros((columns // block, block), jnp.uint32), row_vector_layout(block, vector))
        count = lax.div(down - row_tile + row_tiles - 1, row_tiles)
        for i, largest in enumerate(lax.fori_loop(0, count, accumulate, (zeros,) * len(rotations))):
            out_gmem[i, row_tile, column] = jnp.max(jnp.max(amax_of_rank(largest), axis=1), axis=0)

    grid = (row_tiles, k // columns)
    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((len(rotations), *grid), jnp.float32),
        grid=grid,
        grid_names=("row_tile", "column"),
        kernel_name=kernel_name("amax"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    partial_amaxes = call_exported(("amax of blocks", rotations, block), run, x.reshape(m, k // block, block))
    return jnp.max(partial_amaxes, axis=(1, 2))


# Threads read only what TMA loaded and write only to GMEM, so no barriers between them are needed.
_PARAMETERS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True)


def _vector(block: int, dtype) -> int:
    """Returns the number of neighbouring columns that a thread holds: 16 bytes, or 8 bytes of 16-bit NVFP4 inputs."""
    return 8 if block == 32 and dtype.itemsize == 2 else 4


def _load_row(ref, vector: int) -> jax.Array:
    """Loads blocks of a row as float32 (blocks, elements of a block)."""
    return load(ref, row_vector_layout(ref.shape[-1], vector), optimized=False).astype(jnp.float32)


def _load_paired_row(ref, vector: int) -> tuple[jax.Array, jax.Array]:
    """Loads even and odd columns of a row of bfloat16 pairs as float32, whose upper halves are the bits of bfloat16."""
    words = load(ref, row_vector_layout(ref.shape[-1], vector), optimized=False)
    return float_of(words << 16), float_of(words & np.uint32(0xFFFF0000))


Row = tuple[jax.Array, ...]  # float32 (blocks, elements of a block); if columns are paired, even and odd ones
IndexedRows = list[tuple[Any, Row]]  # rows of a CTA tile, with their indices in it


class Tile(NamedTuple):
    """The tile of a CTA in SMEM: (rows of a block, blocks along a row, elements of a block).

    first_row, first_block: the position of the tile in x, in rows and blocks. vector, paired: see `CastParameters`.
    first_smem_block: index of the first block in SMEM to read; as many are read as threads hold with this `vector`.
    """

    smem: Any
    first_row: Any
    first_block: Any
    vector: int
    paired: bool = False
    first_smem_block: Any = 0

    @property
    def block(self) -> int:
        return self.smem.shape[0]

    @property
    def block_elements(self) -> int:
        return self.smem.shape[-1]

    @property
    def layout(self) -> Any:
        return row_vector_layout(self.block_elements, self.vector)

    @property
    def row_shape(self) -> tuple[int, int]:
        """The shape of a row in registers, (blocks, elements of a block)."""
        return THREADS * self.vector // self.block_elements, self.block_elements

    @property
    def blocks(self) -> Any:
        """The blocks of the tile along a row of x."""
        return pl.ds(self.first_block + self.first_smem_block, self.row_shape[0])

    def load(self, i) -> Row:
        """Loads row i of the tile."""
        ref = self.smem.at[i, pl.ds(self.first_smem_block, self.row_shape[0])]
        return _load_paired_row(ref, self.vector) if self.paired else (_load_row(ref, self.vector),)

    def zero_ordered_bits(self) -> Row:
        """Returns the ordered bits of zero (see `ordered_bits_conversions`) for a row, to accumulate an amax from."""
        zeros = plgpu.layout_cast(jnp.zeros(self.row_shape, jnp.uint32), self.layout)
        return (zeros,) * (2 if self.paired else 1)

    def for_each_half(self, body) -> None:
        """Calls body(tile) for two halves of the tile, with half the columns of each thread."""

        @pl.loop(0, 2)
        def _(half):
            body(self._replace(vector=self.vector // 2, first_smem_block=half * (self.row_shape[0] // 2)))

    def for_each_step(self, body, carry):
        """Loops over steps of four rows: carry = body(indexed rows, carry)."""

        def step(i, carry):
            return body(
                [(i * ROWS_PER_STEP + j, self.load(i * ROWS_PER_STEP + j)) for j in range(ROWS_PER_STEP)], carry
            )

        return lax.fori_loop(0, self.block // ROWS_PER_STEP, step, carry)

    def broadcast(self, value: jax.Array) -> jax.Array:
        """Broadcasts one number per block, (blocks,), to its elements; returns a number per element unchanged."""
        if value.ndim == 2:
            return value
        return plgpu.layout_cast(lax.broadcast_in_dim(value, self.row_shape, (0,)), self.layout)


@dataclasses.dataclass(frozen=True, eq=False)
class OutputRefs:
    """An output: its index among all outputs, its spec, and the GMEM refs of its data and scales."""

    index: int
    spec: OutputSpec
    data: Any
    scale: Any

    def write(self, tile: Tile, rows: IndexedRows, scales: "list[RowScales]", uniforms: list[Row | None]) -> None:
        """Casts and stores some rows of the tile, with the scales of each; if rows are packed, an even number."""
        results = [
            [
                _encode(self.spec, values, scale, tile.broadcast, None if uniform is None else uniform[parity])
                for parity, (values, scale) in enumerate(zip(row, row_scales, strict=True))
            ]
            for (_, row), row_scales, uniform in zip(rows, scales, uniforms, strict=True)
        ]
        indices = [tile.first_row + i for i, _ in rows]
        if self.spec.packing == "rows":
            indices = [lax.div(index, 2) for index in indices[::2]]
            results = [even + odd for even, odd in zip(results[::2], results[1::2], strict=True)]
        for index, result in zip(indices, results, strict=True):
            self.data[index, tile.blocks] = (
                (result[0] | (result[1] << 4)).astype(jnp.uint8) if self.spec.packing else result[0]
            )

    def write_scale(self, tile: Tile, row, scales: "RowScales") -> None:
        """Stores the scales of a row of x, or of a row of blocks."""
        if self.scale is None:
            return
        if self.spec.blocks == "down" and tile.paired:
            for parity, scale in enumerate(scales):
                self.scale[row, parity, tile.blocks] = scale.stored
        else:
            self.scale[row, tile.blocks] = scales[0].stored


class Cast(NamedTuple):
    """A cast and the outputs that share its codes.

    tensor_multipliers: the quantisation multiplier of the tensor and its reciprocal, for a two-level format.
    uniform: a function of (tile, i) that returns random numbers in [0, 1) for row i, with stochastic rounding.
    """

    spec: OutputSpec
    tensor_multipliers: tuple[Any, Any] | None
    outputs: tuple[OutputRefs, ...]
    uniform: Any

    @property
    def to_ordered_bits(self) -> Any:
        return ordered_bits_conversions(self.spec.saturates)[0]

    def scale_of(self, ordered_bits: jax.Array) -> "Scale":
        """Returns the scale of blocks from the ordered bits of their amax."""
        return _scale_of(
            self.spec.format, ordered_bits_conversions(self.spec.saturates)[1](ordered_bits), self.tensor_multipliers
        )

    def write(self, tile: Tile, rows: IndexedRows, scales: "list[RowScales]") -> None:
        uniforms = [None if self.uniform is None else self.uniform(tile, i) for i, _ in rows]
        for output in self.outputs:
            output.write(tile, rows, scales, uniforms)

    def write_scale(self, tile: Tile, row, scales: "RowScales") -> None:
        for output in self.outputs:
            output.write_scale(tile, row, scales)


class Scale(NamedTuple):
    """The bytes of a scale, the quantisation multiplier, and the numbers that dequantise a code, applied in turn."""

    stored: jax.Array
    multiplier: jax.Array
    dequantizers: tuple[Any, ...]


RowScales = tuple[Scale, ...]  # one for each array of a Row


def _run_casts(casts: list[Cast], tile: Tile) -> None:
    """Runs all casts of a tile: first blocks along rows and amaxes of columns, then blocks down columns."""
    along = [cast for cast in casts if cast.spec.blocks == "along"]
    down = [cast for cast in casts if cast.spec.blocks != "along" and cast.spec.rotation is None]

    def cast_rows(rows: IndexedRows, largest: Row) -> Row:
        for cast in along:
            _cast_along(cast, tile, rows)
        return _accumulate_ordered_bits(down[0].to_ordered_bits, [row for _, row in rows], largest) if down else largest

    largest = tile.for_each_step(cast_rows, tile.zero_ordered_bits()) if along or down else tile.zero_ordered_bits()
    for cast in casts:
        if cast.spec.rotation is not None:  # in halves: a thread holds a whole block of each of its columns
            tile.for_each_half(functools.partial(_cast_down_rotated, cast, cast.spec.rotation))
    for cast in down:
        _cast_down(cast, tile, largest)


def _accumulate_ordered_bits(to_ordered_bits, rows: list[Row], largest: Row) -> Row:
    """Returns the elementwise maximum of `largest` and the ordered bits of all rows."""
    return tuple(
        functools.reduce(jnp.maximum, map(to_ordered_bits, arrays), most)
        for arrays, most in zip(zip(*rows, strict=True), largest, strict=True)
    )


def _cast_along(cast: Cast, tile: Tile, rows: IndexedRows) -> None:
    """Casts rows with blocks along them."""
    scales = []
    for i, row in rows:
        largest = functools.reduce(jnp.maximum, map(cast.to_ordered_bits, row))
        scales.append((cast.scale_of(jnp.max(largest, axis=1)),) * len(row))
        cast.write_scale(tile, tile.first_row + i, scales[-1])
    cast.write(tile, rows, scales)


def _cast_down_rotated(cast: Cast, rotation: Hadamard, tile: Tile) -> None:
    """Rotates a tile down its columns, and casts it with blocks down them."""
    loaded = [tile.load(i) for i in range(tile.block)]
    rows = list(zip(*(rotated(list(arrays), rotation) for arrays in zip(*loaded, strict=True)), strict=True))
    largest = (functools.reduce(jnp.maximum, map(cast.to_ordered_bits, arrays)) for arrays in zip(*rows, strict=True))
    scales = tuple(map(cast.scale_of, largest))
    cast.write_scale(tile, lax.div(tile.first_row, tile.block), scales)
    cast.write(tile, list(enumerate(rows)), [scales] * tile.block)


def _cast_down(cast: Cast, tile: Tile, largest: Row) -> None:
    """Casts a tile with blocks down its columns, or square ones; largest: ordered bits of the amax of each column."""
    if cast.spec.blocks == "square":
        scales = (cast.scale_of(jnp.max(functools.reduce(jnp.maximum, largest), axis=1)),) * len(largest)
    else:
        scales = tuple(map(cast.scale_of, largest))
    cast.write_scale(tile, lax.div(tile.first_row, tile.block), scales)

    def body(rows, carry):
        cast.write(tile, rows, [scales] * len(rows))
        return carry

    tile.for_each_step(body, jnp.int32(0))


def _scale_of(format: Format, amax: jax.Array, tensor_multipliers) -> Scale:
    """Returns the scale of blocks from their amax; NaN if it is infinite."""
    nan = np.float32(np.nan)
    if format.scale == "float8_e8m0fnu":
        code = e8m0_code(amax, format)
        multiplier = jnp.where(code == 255, nan, power_of_two(127 - code))
        return Scale(code.astype(jnp.uint8), multiplier, (CODE_MULTIPLIER, power_of_two(code - 119)))
    tensor_multiplier, reciprocal = tensor_multipliers
    relative = jnp.minimum(amax * (tensor_multiplier * np.float32(1 / format.max)), E4M3_MAX)
    relative = jnp.where(amax == np.float32(np.inf), nan, relative)
    stored = relative.astype(jnp.float8_e4m3fn)
    value = stored.astype(jnp.float32)
    multiplier = jnp.where(value == 0, np.float32(0), scale_reciprocal(value * reciprocal))
    multiplier = jnp.where(value == value, multiplier, nan)
    return Scale(lax.bitcast_convert_type(stored, jnp.uint8), multiplier, (value,))


def _encode(spec: OutputSpec, row: jax.Array, scale: Scale, broadcast, uniform: jax.Array | None) -> jax.Array:
    """Returns the codes of a row, as integers if they are packed, or its bfloat16 values; flushes subnormal inputs."""
    format = spec.format
    scaled = flush_subnormals(row) * broadcast(scale.multiplier)
    if spec.packing:
        return float_code(scaled, format, uniform)
    if format.bits == 8 and uniform is None:
        codes = to_float8(scaled, format.element_dtype, spec.saturates)
        if not spec.dequantized:
            return codes
        values = codes.astype(jnp.float32)
    else:
        values = round_to_element(scaled, format, uniform)
        if not spec.dequantized:
            return to_float8(values, format.element_dtype, spec.saturates)
    for dequantizer in scale.dequantizers:
        values = values * (dequantizer if dequantizer.ndim == 0 else broadcast(dequantizer))
    return values.astype(jnp.bfloat16)


def _uniform(seeds_gmem, index: int, row_length: int, tile: Tile, i) -> Row:
    """Returns random numbers in [0, 1) for the elements of row i of a tile; index: of the output."""
    block, element = (plgpu.broadcasted_iota(jnp.uint32, tile.row_shape, axis, layout=tile.layout) for axis in range(2))
    start = (tile.first_row + i) * np.int32(row_length)
    start = start + (tile.first_block + tile.first_smem_block) * np.int32(tile.block)
    start = start.astype(jnp.uint32) + block * np.uint32(tile.block)
    places = [start + 2 * element, start + 2 * element + 1] if tile.paired else [start + element]
    return tuple(uniform_at(place, seeds_gmem[index, 0], seeds_gmem[index, 1]) for place in places)
