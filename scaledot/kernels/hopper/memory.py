"""Tiles in shared memory, layouts and loads of registers, and arithmetic there."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from scaledot.formats import Format
from scaledot.kernels.hopper import support
from scaledot.numerics.bits import MIN_NORMAL, amax_of_bits, amax_of_rank, magnitude_bits, magnitude_rank
from scaledot.numerics.hadamard import Hadamard

LANES, WARPS = 32, 4
THREADS = LANES * WARPS  # of a warpgroup
SWIZZLE = 128  # bytes of a row of a tile in shared memory
ROW_TILE = 8  # rows of such a tile
LEAST = MIN_NORMAL.view(np.float32)
_HARDWARE_NAN = 0x7F  # what PTX's cvt to E4M3 and E5M2 makes of NaN


def tiled(columns: int, dtype) -> tuple[Any, Any]:
    """The layout in shared memory of rows of that many elements, or of pieces of them."""
    itemsize = np.dtype(dtype).itemsize
    swizzle = min(SWIZZLE, columns * itemsize)
    return plgpu.TilingTransform((ROW_TILE, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)


def side_by_side(size: int, vector: int) -> Any:
    """A layout of (blocks, size): vectors, the lanes of a warp side by side, warps one after the other."""
    lanes = size // vector
    tiling = plgpu.Tiling(((THREADS // lanes, size), (LANES // lanes, size), (vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def load(ref: Any, layout: Any, optimized: bool = True) -> jax.Array:
    """A reference's elements in registers; `optimized`: through shared memory without bank conflicts, or not at all."""
    return plgpu.load(ref, layout=layout, optimized=optimized)  # pyright: ignore[reportCallIssue]  (before jax 0.11)


def flushed(x: jax.Array) -> jax.Array:
    """float32 with subnormals turned into zeros of the same sign, in two instructions."""
    return x * jnp.where(jnp.abs(x) < LEAST, np.float32(0), np.float32(1))


def scaled_or_nan(x: jax.Array, multiplier: jax.Array) -> jax.Array:
    """float32 times a factor; subnormals become zeros of the same sign, and infinities NaN.

    x * 0 is NaN for infinities and NaN, and otherwise a zero of x's sign, which changes no sum. On an H200 the fused
    multiply-add costs nothing; a second comparison made casts of bfloat16 to float8 a tenth slower.
    """
    zero = np.float32(0)
    return x * jnp.where(jnp.abs(x) < LEAST, zero, multiplier) + x * zero


def magnitudes(finite: bool) -> tuple[Callable[[jax.Array], jax.Array], Callable[[jax.Array], jax.Array]]:
    """A function to uint32 that order as magnitudes do, and one from the largest of them back to float32.

    finite: NaN and infinities are below all else; otherwise above, and the largest magnitude is then infinite.
    """
    return (magnitude_rank, amax_of_rank) if finite else (magnitude_bits, amax_of_bits)


def to_float8(x: jax.Array, dtype, reference_nan: bool = False) -> jax.Array:
    """float32 to nearest, saturated. A GPU's conversion does both; that of the interpreter overflows to NaN.

    reference_nan: NaN as the bits that `encode` gives it. E5M2 has several, and a GPU's conversion gives another.
    """
    limit = float(jnp.finfo(dtype).max)
    codes = (jnp.clip(x, -limit, limit) if support.is_interpreted() else x).astype(dtype)
    nan = np.array(np.nan, dtype).view(np.uint8)
    if not reference_nan or nan == _HARDWARE_NAN:
        return codes
    bits = lax.bitcast_convert_type(codes, jnp.uint8).astype(jnp.uint32)  # Mosaic selects among words, not bytes
    return lax.bitcast_convert_type(jnp.where(x == x, bits, np.uint32(nan)).astype(jnp.uint8), dtype)


def to_int8(x: jax.Array, format: Format, uniform: jax.Array | None) -> jax.Array:
    """float32 to the codes of `encode`, saturated and NaN to 0: to nearest, or by chance where `uniform` is given."""
    x = jnp.where(x == x, jnp.clip(x, *map(np.float32, format.integer_range)), np.float32(0))
    if uniform is None:  # the sum's own rounding leaves the integer in its last bits
        return lax.bitcast_convert_type(x + np.float32(1.5 * 2.0**23), jnp.int32).astype(jnp.int8)
    towards_zero = x.astype(jnp.int32).astype(jnp.float32)
    below = jnp.where(x < towards_zero, towards_zero - 1, towards_zero)
    return jnp.where(x - below > uniform, below + 1, below).astype(jnp.int32).astype(jnp.int8)


def rotated(rows: list[jax.Array], rotation: Hadamard) -> list[jax.Array]:
    """Groups down the columns times the Hadamard matrix, in the order of sums and with the roundings of `hadamard`."""

    def round_bfloat16(x: jax.Array) -> jax.Array:
        return x.astype(jnp.bfloat16).astype(jnp.float32)

    values = [round_bfloat16(row) * np.float32(sign) for row, sign in zip(rows, rotation.signs, strict=True)]
    stride = 1
    while stride < rotation.size:
        following = list(values)
        for i in range(rotation.size):
            if not i & stride:
                low, high = values[i], values[i + stride]
                following[i], following[i + stride] = low + high, low - high
        values, stride = following, 2 * stride
    return [round_bfloat16(value * np.float32(rotation.size**-0.5)) for value in values]
