"""Packed weights as operands of Hopper's tensor cores, format by format.

A line of 32 words holds the codes of neighbouring columns of the weights; `registers` says how such words are zipped
and become operands. Here each format has a function from zipped words to bfloat16 tiles. Shifts and masks put the bits
of a code into the sign, exponent or mantissa of a bfloat16 number, and arithmetic removes what the other bits add to
it. Codes that are looked up in a table are in `codebook`.

A tile has two columns of the weights from each of the 32 words, and a line has as many tiles as half a word has codes.
`joined` puts the accumulators of several tiles in the order of the columns again.
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
from scaledot.kernels.hopper.registers import (
    ROWS,
    TILE,
    WARPS,
    WORDS,
    beside_words,
    element,
    in_register,
    inlined,
    operand,
    shifted,
    spread,
    times_power,
)

MX_BLOCK, NV_BLOCK = 32, 16  # elements along K that share a scale


@dataclasses.dataclass(frozen=True)
class Codes:
    """How codes of one format become tiles.

    per_word: codes in a word. tiles: a function of zipped words (lower and upper halves), of a tile's index in its line
    and, with `block`, of words of scales; it yields tiles to be added up. block: elements along K that share a scale
    which `tiles` applies, or 0. parts: how many tiles it yields. by_bytes: how words are zipped; if so, the two columns
    of a tile from one word are neighbours, and otherwise they are half a word apart.
    """

    per_word: int
    tiles: Callable[..., Iterator[jax.Array]]
    block: int = 0
    parts: int = 1
    by_bytes: bool = False

    def in_word(self, tiles: int) -> tuple[int, int]:
        """How the columns of a word are numbered in so many neighbouring tiles: (tiles, halves) or (halves, tiles)."""
        return (tiles, 2) if self.by_bytes else (2, tiles)

    @property
    def line_tiles(self) -> int:
        """Tiles of a line."""
        return self.per_word // 2

    def column(self, half: int, index: int) -> int:
        """Which column of a word is in tile `index`, in the lower (0) or upper (1) eight of 16 rows."""
        return 2 * index + half if self.by_bytes else half * self.line_tiles + index


def int4_tiles(low: jax.Array, high: jax.Array, index: int) -> Iterator[jax.Array]:
    """Yields the codes. In the low bits of 128 (0x4300), a code with its sign bit flipped makes 128 + 8 + code."""
    mask = in_register(0x000F000F)
    low, high = ((shifted(half, 4 * index) & mask) ^ 0x43084308 for half in (low, high))
    yield operand(low, high) - jnp.bfloat16(136)


def int8_tiles(low: jax.Array, high: jax.Array, index: int) -> Iterator[jax.Array]:
    """Yields the codes: 128 plus the lower seven bits, minus 128 or, if the sign bit is set, 256."""
    low, high = shifted(low, 8 * index), shifted(high, 8 * index)
    seven, sign = (operand(*((half & mask) | 0x43004300 for half in (low, high))) for mask in (0x007F007F, 0x00800080))
    yield seven - sign


def fp4_tile(low: jax.Array, high: jax.Array, index: int) -> jax.Array:
    """Returns the e2m1 codes moved to bfloat16's sign, exponent and mantissa: their values times 2^-126, because
    bfloat16's exponent bias is 126 larger."""
    low, high = (
        ((half << (12 - 4 * index)) & np.int32(-0x7FFF8000)) | (_shifted_by(half, 4 * index - 6) & 0x01C001C0)
        for half in (low, high)
    )
    return operand(low, high)


def mxfp4_tiles(low: jax.Array, high: jax.Array, index: int, scales: jax.Array) -> Iterator[jax.Array]:
    """Yields values times e8m0 scales, exactly. Code 0 is 2^-127, a subnormal bfloat16, and code 255 is NaN."""
    code = shifted(scales, 8 * index) & 0xFF
    power = jnp.maximum(code * 0x00800080, 0x00400040) + ((code + 1) >> 8) * 0x00400040
    yield times_power(fp4_tile(low, high, index), 126) * spread(power, MX_BLOCK)


def nvfp4_tiles(low: jax.Array, high: jax.Array, index: int, scales: jax.Array) -> Iterator[jax.Array]:
    """Yields values times e4m3 scales. The bits of a scale are put in place, too; bfloat16's bias is 120 larger.

    Read so, the code of NaN is 480 * 2^-120: it gets the exponent bits that it lacks.
    """
    code = shifted(scales, 8 * index) & 0xFF
    sign, rest = code & 0x80, code & 0x7F
    bits = (sign << 8) + (rest << 4) + ((rest + 1) >> 7) * 0x7800
    yield times_power(fp4_tile(low, high, index), 126) * times_power(spread(bits * 0x00010001, NV_BLOCK), 120)


def _shifted_by(word: jax.Array, bits: int) -> jax.Array:
    """Shifted right, or left by a negative number of bits."""
    return shifted(word, bits) if bits >= 0 else word << -bits


INT4 = Codes(8, int4_tiles)
INT8 = Codes(4, int8_tiles)
MXFP4 = Codes(8, mxfp4_tiles, MX_BLOCK)
NVFP4 = Codes(8, nvfp4_tiles, NV_BLOCK)


def codes_for(format: Format) -> Codes:
    """Those of a format without a codebook."""
    if format.code_dtype == jnp.int4:
        return INT4
    if format.code_dtype == jnp.int8:
        return INT8
    return MXFP4 if format.scale == "float8_e8m0fnu" else NVFP4


def add_scaled(total: jax.Array, sums: jax.Array, factors: jax.Array, codes: Codes, index: int) -> jax.Array:
    """Returns total + sums * scales, with one rounding: float32 (64, rows of x), for tile `index` of a line.

    factors: the scales of all columns of the line, (32 * codes.per_word,).
    """
    if support.is_interpreted():
        of_words = factors.reshape(WARPS, ROWS, codes.per_word)
        by_half = jnp.stack([of_words[..., codes.column(half, index)] for half in range(2)], axis=1)
        return total + sums * lax.broadcast_in_dim(by_half.reshape(TILE), sums.shape, (0,))

    accumulator = plgpu.ShapeDtypeStruct(total.shape, jnp.float32, layout=plgpu.Layout.WGMMA)

    @inlined((plgpu.Layout.WGMMA, plgpu.Layout.WGMMA, beside_words(codes.per_word)), accumulator)
    def add(_, total, sums, factors):
        grown = np.empty_like(total.registers)
        for at, register in np.ndenumerate(sums.registers):
            place = codes.column(at[4], index)
            factor = element(factors.registers.flat[place // 4], place % 4)
            grown[at] = math.fma(register, vector.broadcast(register.type, factor), total.registers[at])
        return mgpu.FragmentedArray(_registers=grown, _layout=total.layout, _is_signed=None)

    return add(total, sums, factors)


def joined(tiles: list[jax.Array], codes: Codes) -> jax.Array:
    """Returns accumulators of neighbouring tiles of a line, (64, rows of x) each, in the order of the columns.

    The result is (rows of x, words, *codes.in_word(tiles)).
    """
    rows, count = tiles[0].shape[1], len(tiles)
    shape = rows, WORDS, *codes.in_word(count)
    if support.is_interpreted():
        stacked = jnp.stack(tiles, axis=-1).reshape(WARPS, 2, ROWS, rows, count)
        return stacked.transpose(3, 0, 2, *((4, 1) if codes.by_bytes else (1, 4))).reshape(shape)
    layout = _joined_layout(*shape[2:])
    result = plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=layout)

    @inlined((plgpu.Layout.WGMMA,) * count, result)
    def join(_, *tiles):
        return _join_registers(tiles, codes, shape, layout.to_mgpu())

    return join(*tiles)


def _join_registers(tiles: tuple[Any, ...], codes: Codes, shape: tuple[int, ...], layout: Any) -> Any:
    """`joined` in terms of a thread's registers. A register of a tile holds a pair of rows of x; one of the result is a
    vector along columns, whose elements come from one register of each tile."""
    registers = np.empty(layout.registers_shape(shape), dtype=object)
    columns = ir.VectorType.get(shape[-1:], ir.F32Type.get())
    for at in np.ndindex(registers.shape):
        eight, row, major = at[0], at[-4], at[-2]  # which eight rows of x, which of a thread's two, and major column
        places = [(major, minor) if codes.by_bytes else (minor, major) for minor in range(shape[-1])]
        pairs = [tiles[tile].registers[0, eight, 0, 0, half, 0, 0, 0, 0] for tile, half in places]
        registers[at] = vector.from_elements(columns, [element(pair, row) for pair in pairs])
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def _joined_layout(major: int, minor: int) -> Any:
    """Of (rows of x, words, major, minor): 4 lanes of a warp along pairs of rows, and 8 along words."""
    tiling = plgpu.Tiling(((8, WORDS, major, minor), (8, ROWS, major, minor), (2, 1, major, minor)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-11,), lane_dims=(-7, -8), vector_dim=-1)
