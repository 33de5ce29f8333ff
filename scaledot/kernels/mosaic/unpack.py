"""Packed codes as operands of Hopper's tensor cores: from words in registers to bfloat16 tiles there, by their bits.

A line of 32 int32 words holds the codes of neighbouring columns of the weights; a chunk is such lines of 64 terms. Two
words of neighbouring terms are zipped, so that a shift and a mask leave two numbers in a register, side by side as
tensor cores want them. The lower half words then belong to rows 0 to 7 of every 16 rows of a tile, the upper ones to
rows 8 to 15, and each shift is a tile. Codes that are looked up (`codebook`) are zipped by bytes instead, of which each
is a tile. `joined` puts the columns of the weights in order again.

Functions that name registers have a second form for the interpreter, which knows arrays only.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import math, vector

from scaledot.formats import Format
from scaledot.kernels.mosaic import support

TILE = 64  # rows of a tile, and the terms of a chunk
WORDS = 32  # of a line, 128 bytes

MX_BLOCK, NV_BLOCK = 32, 16
MIDDLE = 128  # of bytes

_WARPS, _ROWS = 4, 8  # a tile's rows are 4 warps of 2 x 8

# (terms, words): 8 lanes of a warp along words and 4 along pairs of terms, as along rows and columns of an operand.
WORDS_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((8, WORDS), (8, _ROWS), (2, 1))), warp_dims=(-5,), lane_dims=(-3, -4), vector_dim=-1
)
_PAIRS_LAYOUT = plgpu.Layout.TILED(  # (pairs of terms, words), likewise
    plgpu.Tiling(((4, WORDS), (4, _ROWS), (1,))), warp_dims=(-4,), lane_dims=(-2, -3), vector_dim=-1
)


def beside_words(size: int) -> Any:
    """A layout of rows of 32 x size: what belongs to a word, in every thread that has the word."""
    vector = min(size, 4)
    tiles = (WORDS * size,), (_ROWS * size,), *([] if size == vector else [(size,)]), (vector,)
    return plgpu.Layout.TILED(
        plgpu.Tiling(tiles), warp_dims=(-len(tiles),), lane_dims=(1 - len(tiles), plgpu.Replicated(4)), vector_dim=-1
    )


def zipped(words: jax.Array, by_bytes: bool) -> tuple[jax.Array, jax.Array]:
    """The lower half words of even and odd terms (64, 32) and the upper ones, (32, 32), side by side or by bytes."""
    even, odd = _even_and_odd(words)
    low, high = (0x5140, 0x7362) if by_bytes else (0x5410, 0x7632)
    return permuted(even, odd, low), permuted(even, odd, high)


def _even_and_odd(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    if support.is_interpreted():
        return words[0::2], words[1::2]

    @_inlined((WORDS_LAYOUT,), (_pairs_type(), _pairs_type()))
    def split(_, words):
        return tuple(_pairs(registers) for registers in words.registers.reshape(-1, 2).T)

    return split(words)


def permuted(a: jax.Array | int, b: jax.Array | int, selectors: jax.Array | int) -> jax.Array:
    """For each of the lower four nibbles of selectors, the byte of a and b that its lower three bits count.

    Where the nibble's highest bit is set, that byte's highest bit takes the place of all eight.
    """
    if not support.is_interpreted():
        return _by_word(mgpu_utils.prmt, a, b, selectors)
    shape = TILE // 2, WORDS
    a, b, selectors = (jnp.full(shape, _signed(x), jnp.int32) if isinstance(x, int) else x for x in (a, b, selectors))
    result = jnp.zeros(shape, jnp.int32)
    for place in range(4):
        nibble = shifted(selectors, 4 * place) & 0xF
        byte = lax.shift_right_logical(jnp.where(nibble & 4, b, a), 8 * (nibble & 3)) & 0xFF
        result |= jnp.where(nibble & 8, 0xFF * (byte >> 7), byte) << (8 * place)
    return result


def operand(low: jax.Array, high: jax.Array) -> jax.Array:
    """A tile (64, 64) from words (32, 32) of two bfloat16 numbers each, of the upper and of the lower eight rows."""
    if support.is_interpreted():
        pairs = lax.bitcast_convert_type(jnp.stack([low, high]), jnp.bfloat16)  # half, terms / 2, words, 2
        rows = pairs.reshape(2, TILE // 2, _WARPS, _ROWS, 2).transpose(2, 0, 3, 1, 4)
        return rows.reshape(TILE, TILE)

    @_inlined((_PAIRS_LAYOUT, _PAIRS_LAYOUT), _tile_type())
    def join(_, low, high):
        return _tile(lambda group, half: _two((low, high)[half].registers.flat[group]))

    return join(low, high)


def spread(pairs: jax.Array, block: int) -> jax.Array:
    """A tile from words (blocks, 32 x 2): numbers of a block of terms and of a row, which are the same twice."""
    if support.is_interpreted():
        values = lax.bitcast_convert_type(pairs, jnp.bfloat16)[..., 0]
        rows = values.reshape(-1, _WARPS, _ROWS, 2).transpose(1, 3, 2, 0).reshape(TILE, -1)
        return jnp.repeat(rows, block, axis=1)

    @_inlined((beside_words(2),), _tile_type())
    def join(_, pairs):
        registers = pairs.registers.reshape(-1)
        return _tile(lambda group, half: _two(_vector(_element(registers[group * _ROWS // block], half))))

    return join(pairs)


def add_scaled(total: jax.Array, sums: jax.Array, factors: jax.Array, codes: "Codes", index: int) -> jax.Array:
    """total + sums * factors; of the factors of a line's columns, those of its tile `index`."""
    if support.is_interpreted():
        of_words = factors.reshape(_WARPS, _ROWS, codes.per_word)
        by_half = jnp.stack([of_words[..., codes.column(half, index)] for half in range(2)], axis=1)
        return total + sums * lax.broadcast_in_dim(by_half.reshape(TILE), sums.shape, (0,))

    accumulator = plgpu.ShapeDtypeStruct(total.shape, jnp.float32, layout=plgpu.Layout.WGMMA)

    @_inlined((plgpu.Layout.WGMMA, plgpu.Layout.WGMMA, beside_words(codes.per_word)), accumulator)
    def add(_, total, sums, factors):
        grown = np.empty_like(total.registers)
        for at, register in np.ndenumerate(sums.registers):
            place = codes.column(at[4], index)
            factor = _element(factors.registers.flat[place // 4], place % 4)
            grown[at] = math.fma(register, vector.broadcast(register.type, factor), total.registers[at])
        return mgpu.FragmentedArray(_registers=grown, _layout=total.layout, _is_signed=None)

    return add(total, sums, factors)


def joined(tiles: list[jax.Array], codes: "Codes") -> jax.Array:
    """Neighbouring tiles (64, rows of x) of a line's sums, as (rows of x, words, columns of a word in order)."""
    rows, count = tiles[0].shape[1], len(tiles)
    shape = rows, WORDS, *codes.in_word(count)
    if support.is_interpreted():
        stacked = jnp.stack(tiles, axis=-1).reshape(_WARPS, 2, _ROWS, rows, count)
        return stacked.transpose(3, 0, 2, *((4, 1) if codes.by_bytes else (1, 4))).reshape(shape)
    kind = plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=_joined_layout(*shape[2:]))

    @_inlined((plgpu.Layout.WGMMA,) * count, kind)
    def join(_, *tiles):
        layout = kind.layout.to_mgpu()
        registers = np.empty(layout.registers_shape(shape), dtype=object)
        together = ir.VectorType.get(shape[-1:], ir.F32Type.get())
        for at in np.ndindex(registers.shape):
            eight, row, major = at[0], at[-4], at[-2]
            places = [(major, minor) if codes.by_bytes else (minor, major) for minor in range(shape[-1])]
            pairs = [tiles[tile].registers[0, eight, 0, 0, half, 0, 0, 0, 0] for tile, half in places]
            registers[at] = vector.from_elements(together, [_element(pair, row) for pair in pairs])
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return join(*tiles)


def _joined_layout(major: int, minor: int) -> Any:
    """(rows, words, major, minor): 4 lanes along pairs of rows and 8 along words."""
    tiling = plgpu.Tiling(((8, WORDS, major, minor), (8, _ROWS, major, minor), (2, 1, major, minor)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-11,), lane_dims=(-7, -8), vector_dim=-1)


def int4_tiles(low: jax.Array, high: jax.Array, index: int) -> Iterator[jax.Array]:
    """Codes: four bits below the leading one of 128, with their sign turned, are 136 more than the code."""
    mask = in_register(0x000F000F)
    low, high = ((shifted(half, 4 * index) & mask) ^ 0x43084308 for half in (low, high))
    yield operand(low, high) - jnp.bfloat16(136)


def int8_tiles(low: jax.Array, high: jax.Array, index: int) -> Iterator[jax.Array]:
    """Codes: 128 and the lower seven bits, less 128 or, where the sign is set, 256."""
    low, high = shifted(low, 8 * index), shifted(high, 8 * index)
    seven, sign = (operand(*((half & mask) | 0x43004300 for half in (low, high))) for mask in (0x007F007F, 0x00800080))
    yield seven - sign


def fp4_tile(low: jax.Array, high: jax.Array, index: int) -> jax.Array:
    """Values of e2m1 codes times 2^-126: their sign, exponent and mantissa in place in a bfloat16."""
    low, high = (
        ((half << (12 - 4 * index)) & np.int32(-0x7FFF8000)) | (_shifted_by(half, 4 * index - 6) & 0x01C001C0)
        for half in (low, high)
    )
    return operand(low, high)


def mxfp4_tiles(low: jax.Array, high: jax.Array, index: int, scales: jax.Array) -> Iterator[jax.Array]:
    """Values: a power of two is exact, so its smallest (2^-127, code 0) and its NaN (code 255) are, too."""
    code = shifted(scales, 8 * index) & 0xFF
    power = jnp.maximum(code * 0x00800080, 0x00400040) + ((code + 1) >> 8) * 0x00400040
    yield times_power(fp4_tile(low, high, index), 126) * spread(power, MX_BLOCK)


def nvfp4_tiles(low: jax.Array, high: jax.Array, index: int, scales: jax.Array) -> Iterator[jax.Array]:
    """Values; the bits of e4m3 scales are placed as those of codes are, and 480 stands for their NaN."""
    code = shifted(scales, 8 * index) & 0xFF
    sign, rest = code & 0x80, code & 0x7F
    bits = (sign << 8) + (rest << 4) + ((rest + 1) >> 7) * 0x7800
    yield times_power(fp4_tile(low, high, index), 126) * times_power(spread(bits * 0x00010001, NV_BLOCK), 120)


def in_register(constant: int, of_thread: bool = False) -> jax.Array:
    """A constant in a register: one that the assembler can see through it makes again for every use.

    What it does not know is that there are fewer than 2^31 multiprocessors; nor that a warp has fewer lanes, where the
    register is to be one of a thread, as some instructions want it, and not of a warp.
    """
    shape = (TILE // 2, WORDS)
    if support.is_interpreted():
        return jnp.full(shape, _signed(constant), jnp.int32)
    kind = plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=plgpu.Layout.WG_SPLAT(shape))

    @_inlined((), kind)
    def make(_):
        i32 = ir.IntegerType.get_signless(32)
        small = "%laneid" if of_thread else "%nsmid"
        ptx = f"{{ .reg .b32 r; mov.u32 r, {small}; shr.u32 r, r, 31; add.u32 $0, r, $1; }}"
        known = mgpu_utils.c(_signed(constant), i32)
        value = mgpu_utils.inline_ptx(ptx, known, result_types=i32)  # pyright: ignore  (before jax 0.11)
        return mgpu.FragmentedArray.splat(value, shape, is_signed=True)

    return make()


def shifted(word: jax.Array, bits: int) -> jax.Array:
    return lax.shift_right_logical(word, np.int32(bits)) if bits else word


def _shifted_by(word: jax.Array, bits: int) -> jax.Array:
    return shifted(word, bits) if bits >= 0 else word << -bits


def times_power(x: jax.Array, power: int) -> jax.Array:
    """bfloat16 times a power of two that makes its subnormals normal; a CPU would take those for zeros."""
    if not support.is_interpreted():
        return x * jnp.bfloat16(2.0**power)
    bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.int32)
    exponent, mantissa = (bits >> 7) & 0xFF, bits & 0x7F
    normal = x.astype(jnp.float32) * np.float32(2.0**power)
    grown = jnp.where(bits >> 15, -mantissa, mantissa).astype(jnp.float32) * np.float32(2.0 ** (power - 133))
    return jnp.where(exponent == 0, grown, normal).astype(jnp.bfloat16)


def stepped(counts: jax.Array, step: float) -> jax.Array:
    """So many steps, two bfloat16 numbers, from words of two bytes, which count from the middle one.

    As the bits of a bfloat16 a byte is that many 2^-133, and what it counts takes one instruction and one rounding.
    """
    if not support.is_interpreted():
        return _by_word(_multiply_and_add, counts, _twice(step * 2.0**133), _twice(-step * MIDDLE))
    count = lax.bitcast_convert_type(counts, jnp.uint16).astype(jnp.int32) - MIDDLE
    steps = (count.astype(jnp.float32) * np.float32(step)).astype(jnp.bfloat16)
    return lax.bitcast_convert_type(steps, jnp.int32)


def _twice(value: float) -> int:
    """The word of a bfloat16 number and itself."""
    return int(np.full(2, value, jnp.bfloat16).view(np.uint32)[0])


def _multiply_and_add(*words: Any) -> Any:
    """Of two bfloat16 numbers in each; MLIR's own would be one of float32."""
    ptx = "fma.rn.bf16x2 $0, $1, $2, $3;"
    return mgpu_utils.inline_ptx(ptx, *words, result_types=words[0].type)  # pyright: ignore  (before jax 0.11)


def _signed(word: int) -> int:
    """The signed number that has these 32 bits."""
    return int(np.uint32(word).view(np.int32))


@dataclasses.dataclass(frozen=True)
class Codes:
    """How codes of one kind become tiles.

    per_word: codes of a word. tiles: those whose sum codes stand for, from zipped words and their index in a line, and
    from words of scales where `block`, the terms that share one, is not 0. parts: the number of those tiles. by_bytes:
    how words are zipped, and so whether a word's two columns of a tile are neighbours or half a word apart.
    """

    per_word: int
    tiles: Callable[..., Iterator[jax.Array]]
    block: int = 0
    parts: int = 1
    by_bytes: bool = False

    def in_word(self, tiles: int) -> tuple[int, int]:
        """The columns of a word that some of its tiles hold: by tile and half, the slower one first."""
        return (tiles, 2) if self.by_bytes else (2, tiles)

    @property
    def line_tiles(self) -> int:
        return self.per_word // 2

    def column(self, half: int, index: int) -> int:
        """Of a word: the one in that half of 16 rows of the tile `index`."""
        return 2 * index + half if self.by_bytes else half * self.line_tiles + index


def codes_for(format: Format) -> Codes:
    if format.code_dtype == jnp.int4:
        return INT4
    if format.code_dtype == jnp.int8:
        return INT8
    return MXFP4 if format.scale == "float8_e8m0fnu" else NVFP4


INT4 = Codes(8, int4_tiles)
INT8 = Codes(4, int8_tiles)
MXFP4 = Codes(8, mxfp4_tiles, MX_BLOCK)
NVFP4 = Codes(8, nvfp4_tiles, NV_BLOCK)


def _inlined(layouts: tuple, returned: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A function of registers, after the launch context, as one of arrays."""
    return plgpu.inline_mgpu(arg_types=layouts, return_type=returned)


def _by_word(instruction: Callable[..., Any], *operands: jax.Array | int) -> jax.Array:
    """An instruction for each word of arrays (32, 32), with constants among its operands."""
    arrays = [plgpu.layout_cast(x, _PAIRS_LAYOUT) for x in operands if not isinstance(x, int)]

    @_inlined((_PAIRS_LAYOUT,) * len(arrays), _pairs_type())
    def apply(_, *arrays):
        i32 = ir.IntegerType.get_signless(32)
        results = []
        for registers in zip(*(array.registers.flat for array in arrays), strict=True):
            words = iter(registers)
            given = (
                mgpu_utils.c(_signed(x), i32) if isinstance(x, int) else _element(next(words), 0) for x in operands
            )
            results.append(_vector(instruction(*given)))
        return _pairs(results)

    return apply(*arrays)


def _pairs_type() -> Any:
    return plgpu.ShapeDtypeStruct((TILE // 2, WORDS), jnp.int32, layout=_PAIRS_LAYOUT)


def _pairs(registers: Any) -> Any:
    """Words (32, 32) of the registers of a thread."""
    layout = _PAIRS_LAYOUT.to_mgpu()
    shaped = np.empty(len(registers), dtype=object)
    shaped[:] = registers
    shaped = shaped.reshape(layout.registers_shape((TILE // 2, WORDS)))
    return mgpu.FragmentedArray(_registers=shaped, _layout=layout, _is_signed=True)


def _tile_type() -> Any:
    return plgpu.ShapeDtypeStruct((TILE, TILE), jnp.bfloat16, layout=plgpu.Layout.WGMMA)


def _tile(register: Callable[[int, int], Any]) -> Any:
    """A bfloat16 tile whose registers are told by eight columns and the half of 16 rows."""
    layout = plgpu.Layout.WGMMA.to_mgpu()
    registers = np.empty(layout.registers_shape((TILE, TILE)), dtype=object)
    for at in np.ndindex(registers.shape):
        registers[at] = register(at[1], at[4])
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def _two(word: Any) -> Any:
    """A word as two bfloat16 numbers."""
    return vector.bitcast(ir.VectorType.get((2,), ir.BF16Type.get()), word)


def _vector(scalar: Any) -> Any:
    return vector.broadcast(ir.VectorType.get((1,), scalar.type), scalar)


def _element(values: Any, index: int) -> Any:
    return vector.extract(values, [], [index])
