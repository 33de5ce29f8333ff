"""Unpacks words of packed codes, in registers, into A fragments: bfloat16 register operands of WGMMA.

A warpgroup holds a packed tile, int32 (64, 32): 64 elements along K, and for each of them 32 words (128 bytes) of codes
of neighbouring columns of the weights. An A fragment is bfloat16 (64, 64), the register operand of four WGMMAs m64k16:
its rows are columns of the weights, its columns are elements along K. Each register holds two neighbours along K.

A packed tile is loaded in a layout in which each thread has the codes of its own part of the fragments, so that no data
is exchanged between threads. With g = 0, ..., 7, k = 8g + 2 (l % 4), lane l of warp w holds:

    packed tile (k, word)               A fragment (row, k)
    (k,     8w + l / 4)  low 16 bits    (16w + l / 4,     k)      low half of a register
    (k + 1, 8w + l / 4)  low 16 bits    (16w + l / 4,     k + 1)  high half of that register
    (k,     8w + l / 4)  high 16 bits   (16w + l / 4 + 8, k)      low half of another register
    (k + 1, 8w + l / 4)  high 16 bits   (16w + l / 4 + 8, k + 1)  high half of that register

The codes in the low 16 bits of a packed word become fragment rows 0-7 of its warp, those in the high 16 bits rows 8-15.
`interleave_k` puts the low (or high) 16 bits of both neighbours along K into one word; a mask then leaves one code in
each half, and shifting right by one code width yields the next fragment. `make_fragment` makes a fragment of these
words. (`codebook` interleaves bytes instead: the low nibbles of a byte become rows 0-7, the high nibbles rows 8-15.)

Functions that address registers have a second implementation in array arithmetic, for JAX's interpreter.
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

from scaledot.kernels.hopper import support
from scaledot.kernels.hopper.inline import bfloat16_pair, element, inline_mgpu, ptx, vector_of_one
from scaledot.kernels.hopper.memory_layouts import WARPS

FRAGMENT = 64  # rows of an A fragment, and its elements along K
WORDS_PER_K = 32  # words of a packed tile for one element along K, 128 bytes
ZERO_BYTE = 128  # the byte that `bytes_to_bfloat16` converts to zero
ROWS_PER_HALF = 8  # a warp holds 16 rows of a fragment: 0-7, from the low halves of packed words, and 8-15

# (K, words): 8 lanes of a warp along words and 4 along pairs of K, as along rows and columns of an A fragment.
PACKED_TILE_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((8, WORDS_PER_K), (8, ROWS_PER_HALF), (2, 1))), warp_dims=(-5,), lane_dims=(-3, -4), vector_dim=-1
)
_K_PAIRS_LAYOUT = plgpu.Layout.TILED(  # (K / 2, words), with the same lanes
    plgpu.Tiling(((4, WORDS_PER_K), (4, ROWS_PER_HALF), (1,))), warp_dims=(-4,), lane_dims=(-2, -3), vector_dim=-1
)

# Axes of a FragmentedArray's registers in the WGMMA layout, whose tiling is ((64, 8), (16, 8), (8, 8), (2,)): axis 1 is
# the group of 8 columns, and axis 4 the half of a warp's 16 rows. Axes 2, 3 and 5 to 8 have size 1, and so has axis 0
# for 64 rows.
COLUMN_GROUP_AXIS, HALF_AXIS = 1, 4


def per_word_layout(size: int) -> Any:
    """Returns the register layout of arrays (..., 32 * size), with `size` elements for each word of a packed tile.

    The thread that holds a word in `PACKED_TILE_LAYOUT` also holds the elements of that word.
    """
    vector = min(size, 4)
    tiles = (WORDS_PER_K * size,), (ROWS_PER_HALF * size,), *([] if size == vector else [(size,)]), (vector,)
    return plgpu.Layout.TILED(
        plgpu.Tiling(tiles), warp_dims=(-len(tiles),), lane_dims=(1 - len(tiles), plgpu.Replicated(4)), vector_dim=-1
    )


def interleave_k(words: jax.Array, by_bytes: bool) -> tuple[jax.Array, jax.Array]:
    """Interleaves even and odd elements of K of a packed tile (64, 32); returns (low, high), each int32 (32, 32).

    A word of low is [even k's low 16 bits | odd k's low 16 bits], from bit 0 on, and a word of high has their high 16
    bits. With `by_bytes`, bytes alternate: [e0 | o0 | e1 | o1] in low and [e2 | o2 | e3 | o3] in high, if e0 and o0 are
    the lowest bytes of the words of an even and an odd k.
    """
    even, odd = _even_and_odd_k(words)
    low_selector, high_selector = (0x5140, 0x7362) if by_bytes else (0x5410, 0x7632)
    return permute_bytes(even, odd, low_selector), permute_bytes(even, odd, high_selector)


def _even_and_odd_k(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    if support.is_interpreted():
        return words[0::2], words[1::2]

    @inline_mgpu((PACKED_TILE_LAYOUT,), (_k_pairs_type(), _k_pairs_type()))
    def split(_, words):
        return tuple(_k_pairs(registers) for registers in words.registers.reshape(-1, 2).T)

    return split(words)


def permute_bytes(a: jax.Array | int, b: jax.Array | int, selectors: jax.Array | int) -> jax.Array:
    """The PRMT instruction on words (32, 32): selects four of the bytes of `a` (0 to 3) and `b` (4 to 7).

    Each of the lower four nibbles of `selectors` selects a byte by its lower three bits. If the nibble's highest bit is
    set, the byte is replaced by eight copies of its sign bit.
    """
    if not support.is_interpreted():
        return _map_words(mgpu_utils.prmt, a, b, selectors)
    shape = FRAGMENT // 2, WORDS_PER_K
    a, b, selectors = (jnp.full(shape, as_int32(x), jnp.int32) if isinstance(x, int) else x for x in (a, b, selectors))
    result = jnp.zeros(shape, jnp.int32)
    for place in range(4):
        nibble = shift_right(selectors, 4 * place) & 0xF
        byte = lax.shift_right_logical(jnp.where(nibble & 4, b, a), 8 * (nibble & 3)) & 0xFF
        result |= jnp.where(nibble & 8, 0xFF * (byte >> 7), byte) << (8 * place)
    return result


def make_fragment(low: jax.Array, high: jax.Array) -> jax.Array:
    """Returns a bfloat16 A fragment (64, 64) from words (32, 32), each of two bfloat16 values, neighbours along K.

    `low` holds rows 0-7 of each warp's 16 rows, and `high` rows 8-15.
    """
    if support.is_interpreted():
        pairs = lax.bitcast_convert_type(jnp.stack([low, high]), jnp.bfloat16)  # half, K / 2, words, 2
        rows = pairs.reshape(2, FRAGMENT // 2, WARPS, ROWS_PER_HALF, 2).transpose(2, 0, 3, 1, 4)
        return rows.reshape(FRAGMENT, FRAGMENT)

    @inline_mgpu((_K_PAIRS_LAYOUT, _K_PAIRS_LAYOUT), _fragment_type())
    def join(_, low, high):
        return _fragment(lambda column_group, half: bfloat16_pair((low, high)[half].registers.flat[column_group]))

    return join(low, high)


def broadcast_over_blocks(pairs: jax.Array, block: int) -> jax.Array:
    """Broadcasts a bfloat16 value for each row and block along K to an A fragment (64, 64).

    pairs: int32 (64 / block, 32 * 2), two for each packed word, for its low and its high 16 bits; each holds the value
    twice.
    """
    if support.is_interpreted():
        values = lax.bitcast_convert_type(pairs, jnp.bfloat16)[..., 0]
        rows = values.reshape(-1, WARPS, ROWS_PER_HALF, 2).transpose(1, 3, 2, 0).reshape(FRAGMENT, -1)
        return jnp.repeat(rows, block, axis=1)

    @inline_mgpu((per_word_layout(2),), _fragment_type())
    def join(_, pairs):
        registers = pairs.registers.reshape(-1)
        return _fragment(
            lambda column_group, half: bfloat16_pair(
                vector_of_one(element(registers[column_group * ROWS_PER_HALF // block], half))
            )
        )

    return join(pairs)


def shift_right(word: jax.Array, bits: int) -> jax.Array:
    """The logical right shift of a word."""
    return lax.shift_right_logical(word, np.int32(bits)) if bits else word


def times_power_of_two(x: jax.Array, power: int) -> jax.Array:
    """Returns bfloat16 x * 2^power, exact for subnormals too."""
    if not support.is_interpreted():
        return x * jnp.bfloat16(2.0**power)
    # XLA's CPU backend would flush subnormals to zero.
    bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.int32)
    exponent, mantissa = (bits >> 7) & 0xFF, bits & 0x7F
    normal = x.astype(jnp.float32) * np.float32(2.0**power)
    from_subnormal = jnp.where(bits >> 15, -mantissa, mantissa).astype(jnp.float32) * np.float32(2.0 ** (power - 133))
    return jnp.where(exponent == 0, from_subnormal, normal).astype(jnp.bfloat16)


def bytes_to_bfloat16(words: jax.Array, step: float) -> jax.Array:
    """Converts both halves of words, bytes zero-extended to 16 bits, to bfloat16 (byte - 128) * step.

    Read as bfloat16, a byte is the subnormal byte * 2^-133, so one fused multiply-add gives the result, rounded once.
    """
    if not support.is_interpreted():
        return _map_words(_fma_bf16x2, words, _repeated(step * 2.0**133), _repeated(-step * ZERO_BYTE))
    count = lax.bitcast_convert_type(words, jnp.uint16).astype(jnp.int32) - ZERO_BYTE
    values = (count.astype(jnp.float32) * np.float32(step)).astype(jnp.bfloat16)
    return lax.bitcast_convert_type(values, jnp.int32)


def _repeated(value: float) -> int:
    """The word whose halves are both `value` as bfloat16."""
    return int(np.full(2, value, jnp.bfloat16).view(np.uint32)[0])


def _fma_bf16x2(*words: Any) -> Any:
    """A packed fused multiply-add of bfloat16 pairs; MLIR would lower math.fma to float32."""
    return ptx("fma.rn.bf16x2 $0, $1, $2, $3;", *words, result_type=words[0].type)


def opaque_constant(constant: int, per_thread: bool = False) -> jax.Array:
    """Returns words (32, 32) of a constant that ptxas keeps in a register instead of rematerialising it at every use.

    To hide the constant from ptxas, a zero that it cannot fold is added: the highest bit of the number of SMs. With
    `per_thread`, that zero is the highest bit of the lane's index, so that the constant is in a register of each thread
    and not in a uniform register of the warp, which some instructions cannot read.
    """
    shape = (FRAGMENT // 2, WORDS_PER_K)
    if support.is_interpreted():
        return jnp.full(shape, as_int32(constant), jnp.int32)
    kind = plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=plgpu.Layout.WG_SPLAT(shape))

    @inline_mgpu((), kind)
    def make(_):
        i32 = ir.IntegerType.get_signless(32)
        special = "%laneid" if per_thread else "%nsmid"  # both are less than 2^31
        instructions = f"{{ .reg .b32 r; mov.u32 r, {special}; shr.u32 r, r, 31; add.u32 $0, r, $1; }}"
        value = ptx(instructions, mgpu_utils.c(as_int32(constant), i32), result_type=i32)
        return mgpu.FragmentedArray.splat(value, shape, is_signed=True)

    return make()


def as_int32(word: int) -> int:
    """Returns the int32 with the bits of an unsigned word."""
    return int(np.uint32(word).view(np.int32))


def _map_words(instruction: Callable[..., Any], *operands: jax.Array | int) -> jax.Array:
    """Applies an instruction to each word of arrays (32, 32); int operands are constants."""
    arrays = [plgpu.layout_cast(x, _K_PAIRS_LAYOUT) for x in operands if not isinstance(x, int)]

    @inline_mgpu((_K_PAIRS_LAYOUT,) * len(arrays), _k_pairs_type())
    def apply(_, *arrays):
        i32 = ir.IntegerType.get_signless(32)
        results = []
        for registers in zip(*(array.registers.flat for array in arrays), strict=True):
            words = iter(registers)
            scalars = (
                mgpu_utils.c(as_int32(x), i32) if isinstance(x, int) else element(next(words), 0) for x in operands
            )
            results.append(vector_of_one(instruction(*scalars)))
        return _k_pairs(results)

    return apply(*arrays)


def _k_pairs_type() -> Any:
    return plgpu.ShapeDtypeStruct((FRAGMENT // 2, WORDS_PER_K), jnp.int32, layout=_K_PAIRS_LAYOUT)


def _k_pairs(registers: Any) -> Any:
    """A FragmentedArray of words (32, 32) from the list of a thread's registers."""
    layout = _K_PAIRS_LAYOUT.to_mgpu()
    array = np.empty(len(registers), dtype=object)
    array[:] = registers
    array = array.reshape(layout.registers_shape((FRAGMENT // 2, WORDS_PER_K)))
    return mgpu.FragmentedArray(_registers=array, _layout=layout, _is_signed=True)


def _fragment_type() -> Any:
    return plgpu.ShapeDtypeStruct((FRAGMENT, FRAGMENT), jnp.bfloat16, layout=plgpu.Layout.WGMMA)


def _fragment(register: Callable[[int, int], Any]) -> Any:
    """A FragmentedArray of a bfloat16 A fragment (64, 64) from a thread's registers, register(column_group, half).

    column_group: the index of the eight columns that include the register's two. half: 0 if its row is among rows 0-7
    of the warp's 16, 1 if among rows 8-15. They are axes of the array of registers, `COLUMN_GROUP_AXIS`, `HALF_AXIS`.
    """
    layout = plgpu.Layout.WGMMA.to_mgpu()
    registers = np.empty(layout.registers_shape((FRAGMENT, FRAGMENT)), dtype=object)
    for index in np.ndindex(registers.shape):
        registers[index] = register(index[COLUMN_GROUP_AXIS], index[HALF_AXIS])
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)
