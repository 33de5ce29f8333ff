"""Instructions of the four-bit cast kernel that Pallas does not offer.

They gather from SMEM, flush subnormals (`.ftz`), and multiply and add packed bfloat16 pairs. Arrays have shape (n, 128)
and the register layout `memory_layouts.UNALIGNED_COLUMN_PER_THREAD`: thread t of a warpgroup holds column t in n
registers. `rows_from_pairs` has another layout. Each function has a second implementation in array arithmetic, for
Pallas' interpret mode.
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
from jax.extend.mlir.dialects import arith, memref, vector

from scaledot.kernels.hopper import support
from scaledot.kernels.hopper.inline import bfloat16_pair, element, inline_mgpu, ptx, vector_of_one
from scaledot.kernels.hopper.memory_layouts import THREADS, load, row_per_warp_layout
from scaledot.kernels.hopper.memory_layouts import UNALIGNED_COLUMN_PER_THREAD as COLUMN_PER_THREAD
from scaledot.numerics.bits import bits_of, flush

PAIRS_OF_ROWS = row_per_warp_layout(1)  # words (n, 32)


def look_up(table: Any, index: jax.Array) -> jax.Array:
    """Returns table[index] for uint32 indices (n, 128) of a float32 ref (size,) in SMEM."""
    if support.is_interpreted():
        return load(table, COLUMN_PER_THREAD, optimized=False)[index]

    @inline_mgpu((plgpu.RefType(), COLUMN_PER_THREAD), _type(index.shape, jnp.float32))
    def gather(_, table, index):
        def entry(word):
            return memref.load(table, [arith.index_castui(ir.IndexType.get(), word)])

        return _map(entry, index)

    return gather(table, index)


def load_for_all(ref: Any) -> jax.Array:
    """Loads a float32 ref (n,) to every thread: the result (n, 128) has equal columns. n must be a multiple of 4."""
    (count,) = ref.shape
    if support.is_interpreted():
        return jnp.broadcast_to(ref[...][:, None], (count, THREADS))

    @inline_mgpu((plgpu.RefType(),), _type((count, THREADS), jnp.float32))
    def broadcast(_, ref):
        kind, index = ir.VectorType.get((4,), ir.F32Type.get()), ir.IndexType.get()
        loaded = [vector.load(kind, ref, [mgpu_utils.c(first, index)]) for first in range(0, count, 4)]
        return _columns([element(numbers, i) for numbers in loaded for i in range(4)])

    return broadcast(ref)


def flushed_product(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns float32 x * y, with subnormals of the operands and the result flushed to zeros of the same sign."""
    if support.is_interpreted():
        return flush(flush(x) * flush(y))
    return _ftz("mul", x, y)


def flushed_difference(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns float32 x - y, with subnormals of the operands and the result flushed to zeros of the same sign."""
    if support.is_interpreted():
        return flush(flush(x) - flush(y))
    return _ftz("sub", x, y)


def _ftz(instruction: str, x: jax.Array, y: jax.Array) -> jax.Array:
    @inline_mgpu((COLUMN_PER_THREAD, COLUMN_PER_THREAD), _type(x.shape, jnp.float32))
    def apply(_, x, y):
        def of_elements(x, y):
            return ptx(f"{instruction}.ftz.f32 $0, $1, $2;", x, y, result_type=x.type)

        return _map(of_elements, x, y)

    return apply(x, y)


def to_pairs(values: jax.Array) -> jax.Array:
    """Packs float32 numbers (2 n, 128) that are exact in bfloat16 to bfloat16 pairs in uint32 words (n, 128).

    Rows 2 i are the low halves of words, rows 2 i + 1 the high halves.
    """
    if support.is_interpreted():
        halves = bits_of(values) >> 16
        return halves[::2] | (halves[1::2] << 16)

    @inline_mgpu((COLUMN_PER_THREAD,), _type((values.shape[0] // 2, values.shape[1]), jnp.uint32))
    def pack(_, values):
        i32 = ir.IntegerType.get_signless(32)
        words = [mgpu_utils.bitcast(element(register, 0), i32) for register in values.registers.flat]
        high_halves = mgpu_utils.c(0x7632, i32)
        return _columns([mgpu_utils.prmt(*pair, high_halves) for pair in zip(words[::2], words[1::2], strict=True)])

    return pack(values)


def scaled_pairs(pairs: jax.Array, scale: jax.Array, zero: jax.Array) -> jax.Array:
    """Returns pairs * scale + zero in bfloat16: pairs in words (n, 128), as `to_pairs` packs them.

    scale: float32 (1, 128), exact in bfloat16. zero: a pair of zeros, uint32 (1, 128). Zeros of positive sign change
    -0 to 0; those of negative sign change nothing.
    """
    scales = to_pairs(jnp.concatenate([scale, scale]))
    if support.is_interpreted():
        x, y, z = (lax.bitcast_convert_type(each, jnp.bfloat16).astype(jnp.float32) for each in (pairs, scales, zero))
        return lax.bitcast_convert_type((x * y + z).astype(jnp.bfloat16), jnp.uint32)

    @inline_mgpu((COLUMN_PER_THREAD,) * 3, _type(pairs.shape, jnp.uint32))
    def multiply_add(_, *arrays):
        def of_words(pair, scale, zero):
            return ptx("fma.rn.bf16x2 $0, $1, $2, $3;", pair, scale, zero, result_type=pair.type)

        return _map(of_words, *arrays)

    return multiply_add(pairs, *(jnp.concatenate([each] * pairs.shape[0]) for each in (scales, zero)))


def from_pairs(pairs: jax.Array) -> jax.Array:
    """Unpacks bfloat16 pairs in words (n, 128), as `to_pairs` packs them, to bfloat16 (2 n, 128)."""
    shape = 2 * pairs.shape[0], pairs.shape[1]
    if support.is_interpreted():
        return lax.bitcast_convert_type(pairs, jnp.bfloat16).swapaxes(1, 2).reshape(shape)

    @inline_mgpu((COLUMN_PER_THREAD,), _type(shape, jnp.bfloat16))
    def unpack(_, pairs):
        both = [bfloat16_pair(register) for register in pairs.registers.flat]
        return _columns([element(pair, index) for pair in both for index in range(2)])

    return unpack(pairs)


def rows_from_pairs(pairs: jax.Array) -> jax.Array:
    """Unpacks words (n, 32), each a bfloat16 pair of neighbours in a row, to bfloat16 (n, 64).

    The layout of the words is `PAIRS_OF_ROWS`.
    """
    shape = pairs.shape[0], 2 * pairs.shape[1]
    if support.is_interpreted():
        return lax.bitcast_convert_type(pairs, jnp.bfloat16).reshape(shape)
    layout = row_per_warp_layout(2)

    @inline_mgpu((PAIRS_OF_ROWS,), plgpu.ShapeDtypeStruct(shape, jnp.bfloat16, layout=layout))
    def unpack(_, pairs):
        registers = np.empty(layout.to_mgpu().registers_shape(shape), dtype=object)
        for index, word in enumerate(pairs.registers.flat):
            registers.flat[index] = bfloat16_pair(word)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=None)

    return unpack(pairs)


def _type(shape: tuple[int, ...], dtype) -> Any:
    return plgpu.ShapeDtypeStruct(shape, dtype, layout=COLUMN_PER_THREAD)


def _map(f: Callable[..., Any], *arrays: Any) -> Any:
    """Applies f elementwise to FragmentedArrays of one shape."""
    registers = zip(*(array.registers.flat for array in arrays), strict=True)
    return _columns([f(*(element(register, 0) for register in each)) for each in registers])


def _columns(elements: list[Any]) -> Any:
    """Returns the FragmentedArray (n, 128) of which each thread holds these n scalars."""
    layout = COLUMN_PER_THREAD.to_mgpu()
    registers = np.empty(len(elements), dtype=object)
    registers[:] = [vector_of_one(each) for each in elements]
    is_signed = False if isinstance(elements[0].type, ir.IntegerType) else None
    shape = layout.registers_shape((len(elements), THREADS))
    return mgpu.FragmentedArray(_registers=registers.reshape(shape), _layout=layout, _is_signed=is_signed)
