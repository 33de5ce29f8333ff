"""Unpacks words of packed codes, in registers, into bfloat16 operands of Hopper's tensor cores.

A warpgroup holds a word tile, int32 (64, 32): 64 elements along K, and for each of them 32 words (128 bytes) of codes
of neighbouring columns of the weights. WGMMA takes its left operand from registers as a tile (64, 64), whose rows are
columns of the weights and whose columns are elements along K. In that operand a 32-bit register holds two bfloat16
values, neighbours along K, and a thread holds rows r and r + 8 of every 16 rows.

`interleave_k` puts the codes of two neighbours along K into one word; a shift and a mask then leave one code in each
half of it. `operand_tile` makes an operand of such words: words from the lower halves of the weights' words are rows 0
to 7 of every 16, words from the upper halves rows 8 to 15. Each shift gives another operand tile.

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
from jax.extend.mlir.dialects import vector

from scaledot.kernels.hopper import support

TILE = 64  # rows of an operand tile, and its elements along K
WORDS = 32  # words of a word tile for one element along K, 128 bytes
ZERO_BYTE = 128  # the byte that `bytes_to_bfloat16` converts to zero
WARPS, ROWS = 4, 8  # each of 4 warps holds 2 × 8 rows of an operand tile

# (K, words): 8 lanes of a warp along words and 4 along pairs along K, like the rows and columns of a WGMMA operand.
WORDS_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((8, WORDS), (8, ROWS), (2, 1))), warp_dims=(-5,), lane_dims=(-3, -4), vector_dim=-1
)
_PAIRS_LAYOUT = plgpu.Layout.TILED(  # (K / 2, words), with the same lanes
    plgpu.Tiling(((4, WORDS), (4, ROWS), (1,))), warp_dims=(-4,), lane_dims=(-2, -3), vector_dim=-1
)


def per_word_layout(size: int) -> Any:
    """The register layout of arrays (..., 32 * size), which have `size` elements for each word of a word tile.

    The thread that holds a word in `WORDS_LAYOUT` also holds the elements of that word.
    """
    vector = min(size, 4)
    tiles = (WORDS * size,), (ROWS * size,), *([] if size == vector else [(size,)]), (vector,)
    return plgpu.Layout.TILED(
        plgpu.Tiling(tiles), warp_dims=(-len(tiles),), lane_dims=(1 - len(tiles), plgpu.Replicated(4)), vector_dim=-1
    )


def interleave_k(words: jax.Array, by_bytes: bool) -> tuple[jax.Array, jax.Array]:
    """Interleaves neighbours along K of words (64, 32): returns words (32, 32) of their lower and their upper halves.

    A result word has the half of the even element of K in its lower half, and that of the odd one in its upper half;
    with `by_bytes`, bytes of the two alternate.
    """
    even, odd = _even_and_odd_k(words)
    low, high = (0x5140, 0x7362) if by_bytes else (0x5410, 0x7632)
    return permute_bytes(even, odd, low), permute_bytes(even, odd, high)


def _even_and_odd_k(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    if support.is_interpreted():
        return words[0::2], words[1::2]

    @inline_mgpu((WORDS_LAYOUT,), (_pairs_type(), _pairs_type()))
    def split(_, words):
        return tuple(_pairs(registers) for registers in words.registers.reshape(-1, 2).T)

    return split(words)


def permute_bytes(a: jax.Array | int, b: jax.Array | int, selectors: jax.Array | int) -> jax.Array:
    """The PRMT instruction on words (32, 32): selects four of the bytes of `a` (0 to 3) and `b` (4 to 7).

    Each of the lower four nibbles of `selectors` selects a byte by its lower three bits. If the nibble's highest bit is
    set, the byte is replaced by eight copies of its sign bit.
    """
    if not support.is_interpreted():
        return _map_words(mgpu_utils.prmt, a, b, selectors)
    shape = TILE // 2, WORDS
    a, b, selectors = (jnp.full(shape, _as_int32(x), jnp.int32) if isinstance(x, int) else x for x in (a, b, selectors))
    result = jnp.zeros(shape, jnp.int32)
    for place in range(4):
        nibble = shift_right(selectors, 4 * place) & 0xF
        byte = lax.shift_right_logical(jnp.where(nibble & 4, b, a), 8 * (nibble & 3)) & 0xFF
        result |= jnp.where(nibble & 8, 0xFF * (byte >> 7), byte) << (8 * place)
    return result


def operand_tile(low: jax.Array, high: jax.Array) -> jax.Array:
    """Returns a bfloat16 operand tile (64, 64) from words (32, 32), each of two bfloat16 values.

    `low` holds rows 0 to 7 of every 16 rows of the tile, and `high` rows 8 to 15.
    """
    if support.is_interpreted():
        pairs = lax.bitcast_convert_type(jnp.stack([low, high]), jnp.bfloat16)  # half, K / 2, words, 2
        rows = pairs.reshape(2, TILE // 2, WARPS, ROWS, 2).transpose(2, 0, 3, 1, 4)
        return rows.reshape(TILE, TILE)

    @inline_mgpu((_PAIRS_LAYOUT, _PAIRS_LAYOUT), _tile_type())
    def join(_, low, high):
        return _tile(lambda column_group, half: _bfloat16_pair((low, high)[half].registers.flat[column_group]))

    return join(low, high)


def broadcast_over_blocks(pairs: jax.Array, block: int) -> jax.Array:
    """Broadcasts a bfloat16 value for each row and block along K to an operand tile (64, 64).

    pairs: int32 (64 / block, 32 * 2), two for each word of the weights, for its lower and upper half; each holds the
    value twice.
    """
    if support.is_interpreted():
        values = lax.bitcast_convert_type(pairs, jnp.bfloat16)[..., 0]
        rows = values.reshape(-1, WARPS, ROWS, 2).transpose(1, 3, 2, 0).reshape(TILE, -1)
        return jnp.repeat(rows, block, axis=1)

    @inline_mgpu((per_word_layout(2),), _tile_type())
    def join(_, pairs):
        registers = pairs.registers.reshape(-1)
        return _tile(
            lambda column_group, half: _bfloat16_pair(
                _vector_of_one(element(registers[column_group * ROWS // block], half))
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
    ptx = "fma.rn.bf16x2 $0, $1, $2, $3;"
    return mgpu_utils.inline_ptx(ptx, *words, result_types=words[0].type)  # pyright: ignore  (before jax 0.11)


def opaque_constant(constant: int, per_thread: bool = False) -> jax.Array:
    """Returns words (32, 32) of a constant that ptxas keeps in a register instead of rematerialising it at every use.

    To hide the constant from ptxas, a zero that it cannot fold is added: the highest bit of the number of SMs. With
    `per_thread`, that zero is the highest bit of the lane's index, so that the constant is in a register of each thread
    and not in a uniform register of the warp, which some instructions cannot read.
    """
    shape = (TILE // 2, WORDS)
    if support.is_interpreted():
        return jnp.full(shape, _as_int32(constant), jnp.int32)
    kind = plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=plgpu.Layout.WG_SPLAT(shape))

    @inline_mgpu((), kind)
    def make(_):
        i32 = ir.IntegerType.get_signless(32)
        special = "%laneid" if per_thread else "%nsmid"  # both are less than 2^31
        ptx = f"{{ .reg .b32 r; mov.u32 r, {special}; shr.u32 r, r, 31; add.u32 $0, r, $1; }}"
        value = mgpu_utils.inline_ptx(ptx, mgpu_utils.c(_as_int32(constant), i32), result_types=i32)  # pyright: ignore  (before jax 0.11)
        return mgpu.FragmentedArray.splat(value, shape, is_signed=True)

    return make()


def _as_int32(word: int) -> int:
    """The int32 with the bits of an unsigned word."""
    return int(np.uint32(word).view(np.int32))


def inline_mgpu(layouts: tuple, return_type: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates f(launch context, *FragmentedArrays) as a function of JAX arrays in these register layouts."""
    return plgpu.inline_mgpu(arg_types=layouts, return_type=return_type)


def _map_words(instruction: Callable[..., Any], *operands: jax.Array | int) -> jax.Array:
    """Applies an instruction to each word of arrays (32, 32); int operands are constants."""
    arrays = [plgpu.layout_cast(x, _PAIRS_LAYOUT) for x in operands if not isinstance(x, int)]

    @inline_mgpu((_PAIRS_LAYOUT,) * len(arrays), _pairs_type())
    def apply(_, *arrays):
        i32 = ir.IntegerType.get_signless(32)
        results = []
        for registers in zip(*(array.registers.flat for array in arrays), strict=True):
            words = iter(registers)
            scalars = (
                mgpu_utils.c(_as_int32(x), i32) if isinstance(x, int) else element(next(words), 0) for x in operands
            )
            results.append(_vector_of_one(instruction(*scalars)))
        return _pairs(results)

    return apply(*arrays)


def _pairs_type() -> Any:
    return plgpu.ShapeDtypeStruct((TILE // 2, WORDS), jnp.int32, layout=_PAIRS_LAYOUT)


def _pairs(registers: Any) -> Any:
    """A FragmentedArray of words (32, 32) from the list of a thread's registers."""
    layout = _PAIRS_LAYOUT.to_mgpu()
    array = np.empty(len(registers), dtype=object)
    array[:] = registers
    array = array.reshape(layout.registers_shape((TILE // 2, WORDS)))
    return mgpu.FragmentedArray(_registers=array, _layout=layout, _is_signed=True)


def _tile_type() -> Any:
    return plgpu.ShapeDtypeStruct((TILE, TILE), jnp.bfloat16, layout=plgpu.Layout.WGMMA)


def _tile(register: Callable[[int, int], Any]) -> Any:
    """A FragmentedArray of a bfloat16 operand tile (64, 64) from a thread's registers, register(column_group, half).

    column_group: the index of the eight columns that include the register's two. half: 0 if its row is among rows 0 to
    7 of 16, 1 if among rows 8 to 15.
    """
    layout = plgpu.Layout.WGMMA.to_mgpu()
    registers = np.empty(layout.registers_shape((TILE, TILE)), dtype=object)
    for at in np.ndindex(registers.shape):
        registers[at] = register(at[1], at[4])
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def _bfloat16_pair(word: Any) -> Any:
    """A word as a vector of two bfloat16 values."""
    return vector.bitcast(ir.VectorType.get((2,), ir.BF16Type.get()), word)


def _vector_of_one(scalar: Any) -> Any:
    """A vector of one element."""
    return vector.broadcast(ir.VectorType.get((1,), scalar.type), scalar)


def element(values: Any, index: int) -> Any:
    """An element of a vector in a register."""
    return vector.extract(values, [], [index])
