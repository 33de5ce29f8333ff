"""Packed codes in registers: how words of them become bfloat16 operands of Hopper's tensor cores.

A warpgroup holds int32 words (64, 32) of weights: 64 elements along K, and for each of them a line of 32 words, whose
codes belong to neighbouring columns of the weights. WGMMA takes its left operand from registers as a tile (64, 64):
rows are columns of the weights, and columns are elements along K. In that operand a 32-bit register holds two bfloat16
numbers, neighbours along K, and a thread has rows r and r + 8 of every 16 rows.

So `zipped` puts the codes of two neighbours along K into one word, and a shift and a mask leave one code in either half
of it. `operand` makes a tile of such words: those from the lower half words of the weights are rows 0 to 7 of every 16,
those from the upper half words rows 8 to 15. Each shift gives another tile.

Functions that name registers have a second form in array arithmetic, which JAX's interpreter runs.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import vector

from scaledot.kernels.hopper import support

TILE = 64  # rows of a tile, and its elements along K
WORDS = 32  # of a line, 128 bytes
MIDDLE = 128  # the byte that stands for zero steps (`stepped`)
WARPS, ROWS = 4, 8  # a tile's 64 rows belong to 4 warps, 2 x 8 rows to each

# (K, words): 8 lanes of a warp along words and 4 along pairs of elements of K, as in an operand along rows and columns.
WORDS_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((8, WORDS), (8, ROWS), (2, 1))), warp_dims=(-5,), lane_dims=(-3, -4), vector_dim=-1
)
_PAIRS_LAYOUT = plgpu.Layout.TILED(  # (K / 2, words), likewise
    plgpu.Tiling(((4, WORDS), (4, ROWS), (1,))), warp_dims=(-4,), lane_dims=(-2, -3), vector_dim=-1
)


def beside_words(size: int) -> Any:
    """Returns the layout of arrays (..., 32 * size), `size` elements for each word of a line.

    A thread that holds a word in `WORDS_LAYOUT` holds the elements of that word.
    """
    vector = min(size, 4)
    tiles = (WORDS * size,), (ROWS * size,), *([] if size == vector else [(size,)]), (vector,)
    return plgpu.Layout.TILED(
        plgpu.Tiling(tiles), warp_dims=(-len(tiles),), lane_dims=(1 - len(tiles), plgpu.Replicated(4)), vector_dim=-1
    )


def zipped(words: jax.Array, by_bytes: bool) -> tuple[jax.Array, jax.Array]:
    """Returns the lower half words of words (64, 32) in words (32, 32) of two neighbours along K, and the upper ones.

    The half word of the first neighbour is the lower half of the result; with `by_bytes` the bytes of both alternate.
    """
    even, odd = _even_and_odd(words)
    low, high = (0x5140, 0x7362) if by_bytes else (0x5410, 0x7632)
    return permuted(even, odd, low), permuted(even, odd, high)


def _even_and_odd(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    if support.is_interpreted():
        return words[0::2], words[1::2]

    @inlined((WORDS_LAYOUT,), (_pairs_type(), _pairs_type()))
    def split(_, words):
        return tuple(_pairs(registers) for registers in words.registers.reshape(-1, 2).T)

    return split(words)


def permuted(a: jax.Array | int, b: jax.Array | int, selectors: jax.Array | int) -> jax.Array:
    """Returns words (32, 32) of bytes of `a` (numbers 0 to 3) and `b` (4 to 7): the instruction PRMT.

    Each of the lower four nibbles of `selectors` chooses a byte by its lower three bits. If the nibble's highest bit is
    set, the chosen byte's highest bit takes the place of all eight.
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
    """Returns a bfloat16 tile (64, 64) from words (32, 32) of two numbers each.

    `low` has rows 0 to 7 of every 16 rows of the tile, and `high` rows 8 to 15.
    """
    if support.is_interpreted():
        pairs = lax.bitcast_convert_type(jnp.stack([low, high]), jnp.bfloat16)  # half, K / 2, words, 2
        rows = pairs.reshape(2, TILE // 2, WARPS, ROWS, 2).transpose(2, 0, 3, 1, 4)
        return rows.reshape(TILE, TILE)

    @inlined((_PAIRS_LAYOUT, _PAIRS_LAYOUT), _tile_type())
    def join(_, low, high):
        return _tile(lambda group, half: _two((low, high)[half].registers.flat[group]))

    return join(low, high)


def spread(pairs: jax.Array, block: int) -> jax.Array:
    """Returns a bfloat16 tile (64, 64) of one number for each row and `block` elements along K.

    `pairs` are int32 (64 / block, 32 * 2), the number twice in a word; a word of weights has one for either half.
    """
    if support.is_interpreted():
        values = lax.bitcast_convert_type(pairs, jnp.bfloat16)[..., 0]
        rows = values.reshape(-1, WARPS, ROWS, 2).transpose(1, 3, 2, 0).reshape(TILE, -1)
        return jnp.repeat(rows, block, axis=1)

    @inlined((beside_words(2),), _tile_type())
    def join(_, pairs):
        registers = pairs.registers.reshape(-1)
        return _tile(lambda group, half: _two(_vector(element(registers[group * ROWS // block], half))))

    return join(pairs)


def shifted(word: jax.Array, bits: int) -> jax.Array:
    """The word shifted right, filled with zeros."""
    return lax.shift_right_logical(word, np.int32(bits)) if bits else word


def times_power(x: jax.Array, power: int) -> jax.Array:
    """Multiplies bfloat16 numbers by 2^power, which makes subnormal ones normal."""
    if not support.is_interpreted():
        return x * jnp.bfloat16(2.0**power)
    # XLA's CPU backend would flush subnormals to zero.
    bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.int32)
    exponent, mantissa = (bits >> 7) & 0xFF, bits & 0x7F
    normal = x.astype(jnp.float32) * np.float32(2.0**power)
    grown = jnp.where(bits >> 15, -mantissa, mantissa).astype(jnp.float32) * np.float32(2.0 ** (power - 133))
    return jnp.where(exponent == 0, grown, normal).astype(jnp.bfloat16)


def stepped(counts: jax.Array, step: float) -> jax.Array:
    """Returns words of two bfloat16 numbers, (byte - 128) * step, from words whose halves are bytes.

    As the bits of a bfloat16 number a byte is a subnormal, byte * 2^-133: one fused multiply-add gives the result, with
    one rounding.
    """
    if not support.is_interpreted():
        return _by_word(_multiply_and_add, counts, _twice(step * 2.0**133), _twice(-step * MIDDLE))
    count = lax.bitcast_convert_type(counts, jnp.uint16).astype(jnp.int32) - MIDDLE
    steps = (count.astype(jnp.float32) * np.float32(step)).astype(jnp.bfloat16)
    return lax.bitcast_convert_type(steps, jnp.int32)


def _twice(value: float) -> int:
    """The word whose halves are both this bfloat16 number."""
    return int(np.full(2, value, jnp.bfloat16).view(np.uint32)[0])


def _multiply_and_add(*words: Any) -> Any:
    """A fused multiply-add of words of two bfloat16 numbers; MLIR would compute its own in float32."""
    ptx = "fma.rn.bf16x2 $0, $1, $2, $3;"
    return mgpu_utils.inline_ptx(ptx, *words, result_types=words[0].type)  # pyright: ignore  (before jax 0.11)


def in_register(constant: int, of_thread: bool = False) -> jax.Array:
    """Returns words (32, 32) of a constant that stays in a register: ptxas makes one that it knows anew for every use.

    So it is a sum with a zero that ptxas does not know: the highest bit of the number of SMs. With `of_thread` it is
    that of the lane's index, which puts the constant in a register of each thread, as some instructions need it, and
    not in a uniform register of the warp.
    """
    shape = (TILE // 2, WORDS)
    if support.is_interpreted():
        return jnp.full(shape, _signed(constant), jnp.int32)
    kind = plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=plgpu.Layout.WG_SPLAT(shape))

    @inlined((), kind)
    def make(_):
        i32 = ir.IntegerType.get_signless(32)
        below_2_31 = "%laneid" if of_thread else "%nsmid"
        ptx = f"{{ .reg .b32 r; mov.u32 r, {below_2_31}; shr.u32 r, r, 31; add.u32 $0, r, $1; }}"
        known = mgpu_utils.c(_signed(constant), i32)
        value = mgpu_utils.inline_ptx(ptx, known, result_types=i32)  # pyright: ignore  (before jax 0.11)
        return mgpu.FragmentedArray.splat(value, shape, is_signed=True)

    return make()


def _signed(word: int) -> int:
    """The int32 that has these 32 bits."""
    return int(np.uint32(word).view(np.int32))


def inlined(layouts: tuple, returned: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a function f(launch context, *fragmented arrays) one of JAX arrays in these register layouts."""
    return plgpu.inline_mgpu(arg_types=layouts, return_type=returned)


def _by_word(instruction: Callable[..., Any], *operands: jax.Array | int) -> jax.Array:
    """Applies an instruction to each word of arrays (32, 32); an int among the operands is a constant."""
    arrays = [plgpu.layout_cast(x, _PAIRS_LAYOUT) for x in operands if not isinstance(x, int)]

    @inlined((_PAIRS_LAYOUT,) * len(arrays), _pairs_type())
    def apply(_, *arrays):
        i32 = ir.IntegerType.get_signless(32)
        results = []
        for registers in zip(*(array.registers.flat for array in arrays), strict=True):
            words = iter(registers)
            given = (mgpu_utils.c(_signed(x), i32) if isinstance(x, int) else element(next(words), 0) for x in operands)
            results.append(_vector(instruction(*given)))
        return _pairs(results)

    return apply(*arrays)


def _pairs_type() -> Any:
    return plgpu.ShapeDtypeStruct((TILE // 2, WORDS), jnp.int32, layout=_PAIRS_LAYOUT)


def _pairs(registers: Any) -> Any:
    """Words (32, 32) from the list of a thread's registers."""
    layout = _PAIRS_LAYOUT.to_mgpu()
    shaped = np.empty(len(registers), dtype=object)
    shaped[:] = registers
    shaped = shaped.reshape(layout.registers_shape((TILE // 2, WORDS)))
    return mgpu.FragmentedArray(_registers=shaped, _layout=layout, _is_signed=True)


def _tile_type() -> Any:
    return plgpu.ShapeDtypeStruct((TILE, TILE), jnp.bfloat16, layout=plgpu.Layout.WGMMA)


def _tile(register: Callable[[int, int], Any]) -> Any:
    """A bfloat16 tile (64, 64) of the registers register(eight, half).

    eight: which eight columns the register's two numbers are among. half: whether their row is one of the lower or of
    the upper eight of 16.
    """
    layout = plgpu.Layout.WGMMA.to_mgpu()
    registers = np.empty(layout.registers_shape((TILE, TILE)), dtype=object)
    for at in np.ndindex(registers.shape):
        registers[at] = register(at[1], at[4])
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def _two(word: Any) -> Any:
    """The two bfloat16 numbers of a word."""
    return vector.bitcast(ir.VectorType.get((2,), ir.BF16Type.get()), word)


def _vector(scalar: Any) -> Any:
    """A vector of one element."""
    return vector.broadcast(ir.VectorType.get((1,), scalar.type), scalar)


def element(values: Any, index: int) -> Any:
    """An element of a vector in a register."""
    return vector.extract(values, [], [index])
