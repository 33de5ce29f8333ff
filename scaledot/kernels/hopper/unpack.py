"""Unpacks packed weights into bfloat16 A fragments of WGMMA, by format; see `registers` for the layouts.

A packed tile, int32 (64, 32), holds the codes of 64 elements along K and of the columns of 32 words; `registers`
interleaves its words along K. For each format there is a function from interleaved words to bfloat16 A fragments
(64, 64): shifts and masks put the bits of a code into the sign, exponent or mantissa of a bfloat16, and arithmetic
makes that the value of the code. For integers this is a subtraction, which removes the contribution of the other bits;
for FP4 it is a multiplication by a power of two, which corrects the exponent bias. Formats with a codebook are in
`codebook`.

A fragment has two columns of the weights from each of the 32 words, so a packed tile of 4-bit codes, eight per word,
becomes four fragments. `in_column_order` reorders the accumulators of several fragments by column.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import math, vector

from scaledot.formats import Format
from scaledot.kernels.hopper import support
from scaledot.kernels.hopper.memory_layouts import WARPS
from scaledot.kernels.hopper.registers import (
    COLUMN_GROUP_AXIS,
    FRAGMENT,
    HALF_AXIS,
    ROWS_PER_HALF,
    WORDS_PER_K,
    as_int32,
    broadcast_over_blocks,
    element,
    inline_mgpu,
    make_fragment,
    opaque_constant,
    per_word_layout,
    shift_right,
    times_power_of_two,
)

MX_BLOCK, NV_BLOCK = 32, 16  # elements along K that share a scale


@dataclasses.dataclass(frozen=True)
class Unpacker:
    """How the codes of one format are unpacked.

    per_word: codes in a word.
    unpack: (low, high, index), and scales if `block` is not 0 -> bfloat16 (64, 64) fragments, an iterator over `terms`
    fragments whose sum is the value. low, high: interleaved words, int32 (32, 32) each, of `registers.interleave_k`.
    index: of the fragment in its packed tile. scales: int32 (64 / block, 32 * 2), one word for each block along K and
    each half of a packed word; byte i of it, from the lowest on, is the 8-bit scale of the column that this half has in
    fragment i.
    block: elements along K that share a scale which `unpack` applies, or 0.
    terms: the number of fragments that `unpack` yields.
    by_bytes: whether words are interleaved by bytes. If so, the two columns of a word in a fragment are neighbours;
    otherwise they are half a word apart.
    """

    per_word: int
    unpack: Callable[..., Iterator[jax.Array]]
    block: int = 0
    terms: int = 1
    by_bytes: bool = False

    def column_shape(self, count: int) -> tuple[int, int]:
        """The dims of a word's columns, in order, over `count` neighbouring fragments: (count, 2) or (2, count)."""
        return (count, 2) if self.by_bytes else (2, count)

    @property
    def fragments_per_packed_tile(self) -> int:
        return self.per_word // 2

    def column(self, half: int, index: int) -> int:
        """The column within a word that fragment `index` has in rows 0-7 (half 0) or 8-15 (half 1) of a warp's rows."""
        return 2 * index + half if self.by_bytes else half * self.fragments_per_packed_tile + index


def unpack_int4(low: jax.Array, high: jax.Array, index: int) -> Iterator[jax.Array]:
    """Yields int4 codes. A code with its sign bit flipped, in the low bits of 128.0 (0x4300), is 128 + 8 + code."""
    mask = opaque_constant(0x000F000F)
    low, high = ((shift_right(half, 4 * index) & mask) ^ 0x43084308 for half in (low, high))
    yield make_fragment(low, high) - jnp.bfloat16(136)


def unpack_int8(low: jax.Array, high: jax.Array, index: int) -> Iterator[jax.Array]:
    """Yields int8 codes: 128 plus the lower seven bits, minus 128 or, if the sign bit is set, 256."""
    low, high = shift_right(low, 8 * index), shift_right(high, 8 * index)
    magnitude, sign = (
        make_fragment(*((half & mask) | 0x43004300 for half in (low, high))) for mask in (0x007F007F, 0x00800080)
    )
    yield magnitude - sign


def fp4_fragment(low: jax.Array, high: jax.Array, index: int) -> jax.Array:
    """Returns dequantised e2m1 codes times 2^-126.

    The bits of a code are put into bfloat16's sign, exponent and mantissa, and bfloat16's exponent bias is 126 larger.
    """
    low, high = (
        ((half << (12 - 4 * index)) & as_int32(0x80008000)) | (_shift(half, 4 * index - 6) & 0x01C001C0)
        for half in (low, high)
    )
    return make_fragment(low, high)


def unpack_mxfp4(low: jax.Array, high: jax.Array, index: int, scales: jax.Array) -> Iterator[jax.Array]:
    """Yields e2m1 codes times e8m0 scales, exactly. Scale code 0 is 2^-127, a subnormal bfloat16; code 255 is NaN."""
    code = shift_right(scales, 8 * index) & 0xFF
    # code << 7, the bits of 2^(code - 127), in both halves; 0 becomes 2^-127, a subnormal, and 255 NaN, not infinity.
    power = jnp.maximum(code * 0x00800080, 0x00400040) + ((code + 1) >> 8) * 0x00400040
    yield times_power_of_two(fp4_fragment(low, high, index), 126) * broadcast_over_blocks(power, MX_BLOCK)


def unpack_nvfp4(low: jax.Array, high: jax.Array, index: int, scales: jax.Array) -> Iterator[jax.Array]:
    """Yields e2m1 codes times e4m3 scales, exactly.

    The bits of a scale are put into a bfloat16, whose exponent bias is 120 larger. The NaN code of e4m3 would become
    480 * 2^-120, so the remaining exponent bits are set.
    """
    code = shift_right(scales, 8 * index) & 0xFF
    sign, magnitude = code & 0x80, code & 0x7F
    # The sign in bit 15, exponent and mantissa in bits 4 to 10; for NaN, magnitude 0x7F, all exponent bits are set.
    bits = (sign << 8) + (magnitude << 4) + ((magnitude + 1) >> 7) * 0x7800
    scale = times_power_of_two(broadcast_over_blocks(bits * 0x00010001, NV_BLOCK), 120)
    yield times_power_of_two(fp4_fragment(low, high, index), 126) * scale


def _shift(word: jax.Array, bits: int) -> jax.Array:
    """A word shifted right, or left if `bits` is negative."""
    return shift_right(word, bits) if bits >= 0 else word << -bits


INT4 = Unpacker(8, unpack_int4)
INT8 = Unpacker(4, unpack_int8)
MXFP4 = Unpacker(8, unpack_mxfp4, MX_BLOCK)
NVFP4 = Unpacker(8, unpack_nvfp4, NV_BLOCK)


def unpacker_for(format: Format) -> Unpacker:
    """The unpacker of a format without a codebook."""
    if format.code_dtype == jnp.int4:
        return INT4
    if format.code_dtype == jnp.int8:
        return INT8
    return MXFP4 if format.scale == "float8_e8m0fnu" else NVFP4


def add_scaled(
    total: jax.Array, accumulator: jax.Array, scales: jax.Array, unpacker: Unpacker, index: int
) -> jax.Array:
    """Returns total + accumulator * scales by fused multiply-add: float32 (64, rows of x).

    scales: the scales of all columns of a packed tile, (32 * per_word,). index: of the fragment in the packed tile.
    """
    if support.is_interpreted():
        by_word = scales.reshape(WARPS, ROWS_PER_HALF, unpacker.per_word)
        by_half = jnp.stack([by_word[..., unpacker.column(half, index)] for half in range(2)], axis=1)
        return total + accumulator * lax.broadcast_in_dim(by_half.reshape(FRAGMENT), accumulator.shape, (0,))

    result_type = plgpu.ShapeDtypeStruct(total.shape, jnp.float32, layout=plgpu.Layout.WGMMA)

    @inline_mgpu((plgpu.Layout.WGMMA, plgpu.Layout.WGMMA, per_word_layout(unpacker.per_word)), result_type)
    def add(_, total, accumulator, scales):
        registers = np.empty_like(total.registers)
        for place, register in np.ndenumerate(accumulator.registers):
            column = unpacker.column(place[HALF_AXIS], index)
            scale = element(scales.registers.flat[column // 4], column % 4)
            registers[place] = math.fma(register, vector.broadcast(register.type, scale), total.registers[place])
        return mgpu.FragmentedArray(_registers=registers, _layout=total.layout, _is_signed=None)

    return add(total, accumulator, scales)


def in_column_order(accumulators: list[jax.Array], unpacker: Unpacker) -> jax.Array:
    """Reorders accumulators (64, rows of x) of neighbouring fragments of a packed tile by column of the weights.

    The result is (rows of x, words, *unpacker.column_shape(len(accumulators))).
    """
    rows, count = accumulators[0].shape[1], len(accumulators)
    shape = rows, WORDS_PER_K, *unpacker.column_shape(count)
    if support.is_interpreted():
        stacked = jnp.stack(accumulators, axis=-1).reshape(WARPS, 2, ROWS_PER_HALF, rows, count)
        return stacked.transpose(3, 0, 2, *((4, 1) if unpacker.by_bytes else (1, 4))).reshape(shape)
    layout = _column_order_layout(*shape[2:])
    result = plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=layout)

    @inline_mgpu((plgpu.Layout.WGMMA,) * count, result)
    def reorder(_, *accumulators):
        return _reorder_registers(accumulators, unpacker, shape, layout.to_mgpu())

    return reorder(*accumulators)


def _reorder_registers(accumulators: tuple[Any, ...], unpacker: Unpacker, shape: tuple[int, ...], layout: Any) -> Any:
    """`in_column_order` in terms of a thread's registers.

    A register of an accumulator holds two rows of x; a register of the result is a vector along columns, whose elements
    are taken from one register of each accumulator. No data is exchanged between threads.
    """
    registers = np.empty(layout.registers_shape(shape), dtype=object)
    columns = ir.VectorType.get(shape[-1:], ir.F32Type.get())
    for place in np.ndindex(registers.shape):
        # Of the result: eight rows of x; which of a thread's two rows; the major one of the two column dims.
        row_group, row, major = place[0], place[-4], place[-2]
        sources = [(major, minor) if unpacker.by_bytes else (minor, major) for minor in range(shape[-1])]
        pairs = [_accumulator_register(accumulators[index], row_group, half) for index, half in sources]
        registers[place] = vector.from_elements(columns, [element(pair, row) for pair in pairs])
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def _accumulator_register(accumulator: Any, row_group: int, half: int) -> Any:
    """A thread's register of an accumulator (64 columns of the weights, rows of x).

    row_group: the index of the eight rows of x that include the register's two. half: 0 if its column of the weights is
    among the first eight of the 16 that its warp holds, 1 if it is among the last eight.
    """
    place = [0] * accumulator.registers.ndim
    place[COLUMN_GROUP_AXIS], place[HALF_AXIS] = row_group, half
    return accumulator.registers[tuple(place)]


def _column_order_layout(major: int, minor: int) -> Any:
    """The layout of (rows of x, words, major, minor): 4 lanes of a warp along pairs of rows, and 8 along words."""
    tiling = plgpu.Tiling(((8, WORDS_PER_K, major, minor), (8, ROWS_PER_HALF, major, minor), (2, 1, major, minor)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-11,), lane_dims=(-7, -8), vector_dim=-1)
