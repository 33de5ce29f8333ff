"""Arithmetic of casts on float32 registers: flushing, scaling, conversion to codes, Hadamard transform.

The results are bit-identical to those of `numerics`, except the NaN code of `to_float8`, which is optional.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scaledot.formats import Format
from scaledot.kernels.hopper import support
from scaledot.numerics.bits import (
    FLOAT32_MAX,
    LARGEST_MULTIPLIER,
    MIN_NORMAL,
    amax_of_bits,
    amax_of_rank,
    magnitude_bits,
    magnitude_rank,
)
from scaledot.numerics.hadamard import Hadamard

MIN_NORMAL_F32 = MIN_NORMAL.view(np.float32)
_MANTISSA, _HIDDEN_BIT = np.int32(0x7FFFFF), np.int32(0x800000)
_HARDWARE_NAN = 0x7F  # the code that PTX's cvt to E4M3 and E5M2 returns for NaN


def flush_subnormals(x: jax.Array) -> jax.Array:
    """Flushes float32 subnormals to zeros of the same sign, in two instructions: FSET.BF (0.0 or 1.0) and FMUL."""
    return x * jnp.where(jnp.abs(x) < MIN_NORMAL_F32, np.float32(0), np.float32(1))


def scaled_or_nan(x: jax.Array, multiplier: jax.Array) -> jax.Array:
    """Returns float32 x * multiplier, with subnormals of x flushed to zeros of the same sign and infinities to NaN.

    x * 0 is NaN for infinities and NaN, and otherwise a zero of x's sign, so adding it changes no finite result. On an
    H200 the latency of the fused multiply-add is hidden behind other instructions; a second comparison made casts from
    bfloat16 to float8 10% slower.
    """
    zero = np.float32(0)
    return x * jnp.where(jnp.abs(x) < MIN_NORMAL_F32, zero, multiplier) + x * zero


def ordered_bits_conversions(finite: bool) -> tuple[Callable[[jax.Array], jax.Array], Callable[[jax.Array], jax.Array]]:
    """Returns (to_ordered_bits, from_ordered_bits): float32 to uint32 bits that are ordered as magnitudes, and back.

    An amax is reduced as an integer maximum of such bits. finite: NaN and infinities are ordered below all other values
    (`bits.magnitude_rank`), as in casts that saturate them; otherwise above them, and they are converted back to
    infinity (`bits.magnitude_bits`).
    """
    return (magnitude_rank, amax_of_rank) if finite else (magnitude_bits, amax_of_bits)


def scale_reciprocal(x: jax.Array) -> jax.Array:
    """Returns 1 / x of positive float32 scales as `numerics.scale` computes it: correctly rounded, subnormals flushed.

    Of subnormal x and 0 it is the largest float32.
    """
    nearest = nearest_reciprocal(x, np.float32(1) / x)
    nearest = jnp.where(x > LARGEST_MULTIPLIER, np.float32(0), nearest)  # 2^126: larger ones have subnormal reciprocals
    return jnp.where(x < MIN_NORMAL_F32, FLOAT32_MAX, nearest)


def nearest_reciprocal(x: jax.Array, approximate: jax.Array) -> jax.Array:
    """Returns 1 / x, correctly rounded, from an approximation that is at most one ulp off.

    Mosaic divides 1 by rcp.approx, which may be an ulp off. The product of both significands is 2^47, or 2^46 for
    powers of two, plus a remainder, which is exact modulo 2^32 and says whether a neighbour is nearer.
    """
    significand, inverse = (
        (lax.bitcast_convert_type(a, jnp.int32) & _MANTISSA) | _HIDDEN_BIT for a in (x, approximate)
    )
    twice = 2 * (significand * inverse)
    ulps = (twice < -significand).astype(jnp.int32) - (twice > significand).astype(jnp.int32)
    return lax.bitcast_convert_type(lax.bitcast_convert_type(approximate, jnp.int32) + ulps, jnp.float32)


def to_float8(x: jax.Array, dtype, reference_nan: bool = False) -> jax.Array:
    """Converts float32 to float8, rounded to nearest even and saturated.

    On the GPU, PTX's cvt.satfinite saturates. The interpreter's conversion overflows to NaN, so x is clipped first.
    reference_nan: NaN becomes the code of `numerics.encode`. E5M2 has several NaNs, and the GPU's cvt returns another.
    Casts pass `saturates`: if NaN propagates instead, any NaN code will do.
    """
    limit = float(jnp.finfo(dtype).max)
    codes = (jnp.clip(x, -limit, limit) if support.is_interpreted() else x).astype(dtype)
    nan = np.array(np.nan, dtype).view(np.uint8)
    if not reference_nan or nan == _HARDWARE_NAN:
        return codes
    bits = lax.bitcast_convert_type(codes, jnp.uint8).astype(jnp.uint32)  # Mosaic selects among words, not bytes
    return lax.bitcast_convert_type(jnp.where(x == x, bits, np.uint32(nan)).astype(jnp.uint8), dtype)


def to_int8(x: jax.Array, format: Format, uniform: jax.Array | None) -> jax.Array:
    """Converts float32 to the int8 codes of `numerics.encode`: saturated, NaN to 0, rounded to nearest.

    With `uniform`, random numbers in [0, 1), it uses stochastic rounding instead.
    """
    x = jnp.where(x == x, jnp.clip(x, *map(np.float32, format.integer_range)), np.float32(0))
    if uniform is None:  # adding 1.5 * 2^23 rounds to an integer, which is then in the low bits of the mantissa
        return lax.bitcast_convert_type(x + np.float32(1.5 * 2.0**23), jnp.int32).astype(jnp.int8)
    towards_zero = x.astype(jnp.int32).astype(jnp.float32)
    below = jnp.where(x < towards_zero, towards_zero - 1, towards_zero)
    return jnp.where(x - below > uniform, below + 1, below).astype(jnp.int32).astype(jnp.int8)


def rotated(rows: list[jax.Array], rotation: Hadamard) -> list[jax.Array]:
    """Applies the Hadamard transform along a list of `rotation.size` arrays, one for each element of a group.

    Bit-identical to `numerics.hadamard`: the same order of additions and the same roundings to bfloat16.
    """

    def round_bfloat16(x: jax.Array) -> jax.Array:
        return x.astype(jnp.bfloat16).astype(jnp.float32)

    values = [round_bfloat16(row) * np.float32(sign) for row, sign in zip(rows, rotation.signs, strict=True)]
    return [round_bfloat16(value * np.float32(rotation.size**-0.5)) for value in butterflies(values)]


def butterflies(values: list[jax.Array], neighbours_last: bool = False) -> list[jax.Array]:
    """Returns the product of a list of arrays with the Sylvester matrix, in the order of `numerics.hadamard`."""
    strides = [1 << bit for bit in range(len(values).bit_length() - 1)]
    for stride in reversed(strides) if neighbours_last else strides:
        pairs = [(i & ~stride, i | stride) for i in range(len(values))]
        values = [
            values[low] - values[high] if i == high else values[low] + values[high]
            for i, (low, high) in enumerate(pairs)
        ]
    return values
