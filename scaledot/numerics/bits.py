"""float32 arithmetic that is bit-identical on every backend.

XLA:CPU flushes subnormals and XLA:GPU does not; XLA:CPU replaces divisions by multiplications with a reciprocal and
XLA:GPU uses a divide that is not correctly rounded; exp2 and log2 are inexact at powers of two. Therefore subnormals
are flushed explicitly, quotients are corrected by integer remainders, and powers of two are built from exponent bits.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

SIGN = np.uint32(0x80000000)
MAGNITUDE = np.uint32(0x7FFFFFFF)
INFINITY = np.uint32(0x7F800000)
MIN_NORMAL = np.uint32(0x00800000)
MANTISSA = np.uint32(0x007FFFFF)
_HIDDEN_BIT = np.int32(1 << 23)  # the implicit leading 1 of a float32 significand
RANK_OF_ZERO = np.uint32(0x01000000)
ONE = np.float32(1.0)
LARGEST_MULTIPLIER = np.float32(2.0**126)
SMALLEST_SCALE = np.float32(2.0**-126)
FLOAT32_MAX = np.finfo(np.float32).max


def bits_of(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint32)


def float_of(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def flush(x: jax.Array) -> jax.Array:
    """Replaces float32 subnormals by zeros of the same sign."""
    bits = bits_of(x)
    return float_of(jnp.where((bits & MAGNITUDE) < MIN_NORMAL, bits & SIGN, bits))


def finite_magnitude(x: jax.Array) -> jax.Array:
    """int32 bits of |x|, 0 where x is subnormal, infinite or NaN. Bits of magnitudes compare like the magnitudes."""
    magnitude = bits_of(x) & MAGNITUDE
    is_normal = (magnitude >= MIN_NORMAL) & (magnitude < INFINITY)
    return jnp.where(is_normal, magnitude, np.uint32(0)).astype(jnp.int32)


def magnitude_rank(x: jax.Array) -> jax.Array:
    """uint32 keys that compare like |x|, with infinities and NaN below all finite numbers.

    Twice the bits of |x| plus one exponent step, so that infinities and NaN wrap around to small keys. Kernels use it
    because it takes fewer instructions per element than `finite_magnitude`.
    """
    return (bits_of(x) << 1) + RANK_OF_ZERO


def amax_of_rank(rank: jax.Array) -> jax.Array:
    """The float32 magnitude for the maximum of `magnitude_rank`; 0 if it is subnormal or no element is finite."""
    magnitude = (jnp.maximum(rank, RANK_OF_ZERO) - RANK_OF_ZERO) >> 1
    return float_of(jnp.where(magnitude < MIN_NORMAL, np.uint32(0), magnitude))


def magnitude_bits(x: jax.Array) -> jax.Array:
    """uint32 bits of |x|, which compare like |x|, with infinities and NaN above all finite numbers."""
    return bits_of(x) & MAGNITUDE


def amax_of_bits(largest: jax.Array) -> jax.Array:
    """The float32 amax for the maximum of `magnitude_bits`: infinite if any element is not finite, 0 if subnormal."""
    return float_of(jnp.where(largest < MIN_NORMAL, np.uint32(0), jnp.minimum(largest, INFINITY)))


def power_of_two(exponent: jax.Array) -> jax.Array:
    """2^exponent for int32 exponents in [-126, 127]."""
    return float_of((exponent + 127).astype(jnp.uint32) << 23)


def power_of_two_multipliers(exponent: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two normal float32 numbers whose product is 2^exponent, which may be subnormal itself."""
    half = exponent >> 1
    return power_of_two(half), power_of_two(exponent - half)


def floor_power_of_two(x: jax.Array) -> jax.Array:
    return float_of(bits_of(x) & INFINITY)


def floor_power_of_two_by_log2(x: jax.Array) -> jax.Array:
    """exp2(floor(log2(x))) with a correctly rounded float32 log2, which rounds up to n for x just below 2^n.

    It does so for x = 2^n (1 - j 2^-24) if n - log2(x), which is j * 2^-24 / ln 2, is at most half the spacing of
    float32 below n. That spacing is half as large if n is itself a positive power of two.
    """
    pattern = bits_of(x)
    exponent = (pattern >> 23).astype(jnp.int32) - 126  # n: the next power of two above x
    distance = (MIN_NORMAL - (pattern & MANTISSA)).astype(jnp.int32)
    magnitude = jnp.abs(exponent)
    binade = 31 - lax.clz(jnp.maximum(magnitude, 1))
    has_half_spacing = (exponent > 0) & (magnitude == 1 << binade)
    limit = np.float32(math.log(2)) * power_of_two(binade - has_half_spacing.astype(jnp.int32))
    rounds_up = (exponent != 0) & (distance.astype(jnp.float32) <= limit)
    return float_of((pattern & INFINITY) + (rounds_up.astype(jnp.uint32) << 23))


def ceil_power_of_two(x: jax.Array) -> jax.Array:
    return float_of((bits_of(x) + MANTISSA) & INFINITY)


@jax.jit  # traced and lowered once per shape instead of once per call
def divide(a: jax.Array | np.float32, b: jax.Array | np.float32) -> jax.Array:
    """Correctly rounded float32 a / b.

    Subnormal operands and results are flushed to 0; x / 0 is an infinity, 0 / 0 is NaN. The hardware quotient of the
    significands is within 2 ulp; the integer remainder, small enough to be exact modulo 2^32, gives the correction.
    """
    a, b = jnp.broadcast_arrays(jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32))
    a_bits, b_bits = (lax.bitcast_convert_type(x, jnp.int32) for x in (a, b))
    a_exponent, b_exponent = ((bits >> 23) & 255 for bits in (a_bits, b_bits))
    numerator, denominator = ((bits & MANTISSA.astype(np.int32)) | _HIDDEN_BIT for bits in (a_bits, b_bits))

    # A quotient of 24 bits, the width of a float32 significand.
    is_below_one = numerator < denominator
    # An addition instead of a select: Mosaic treats the result of a select, and so the remainder, as unsigned.
    shift = np.int32(23) + is_below_one.astype(jnp.int32)
    ratio = numerator.astype(jnp.float32) / denominator.astype(jnp.float32)
    quotient = (ratio * jnp.where(is_below_one, np.float32(2.0**24), np.float32(2.0**23))).astype(jnp.int32)
    remainder = (numerator << shift) - quotient * denominator
    twice = 2 * jnp.abs(remainder)
    ulps = (twice > denominator).astype(jnp.int32) + (twice > 3 * denominator).astype(jnp.int32)  # ties cannot occur
    quotient += lax.sign(remainder) * ulps

    # An addition instead of an or: the quotient's hidden bit, and the carry of a quotient rounded up to 2^24, increment
    # the exponent.
    exponent = a_exponent - b_exponent + (149 - shift)
    magnitude = (exponent << 23) + quotient
    magnitude = jnp.where((magnitude < _HIDDEN_BIT) | (a_exponent == 0), np.int32(0), magnitude)
    magnitude = jnp.where((exponent > 253) | (b_exponent == 0), INFINITY.astype(np.int32), magnitude)
    finite = lax.bitcast_convert_type(magnitude | ((a_bits ^ b_bits) & SIGN.astype(np.int32)), jnp.float32)
    # Infinite and NaN operands: IEEE division.
    result = jnp.where(jnp.maximum(a_exponent, b_exponent) == 255, a / b, finite)
    return jnp.where((a_exponent | b_exponent) == 0, np.float32(np.nan), result)


def computed_once(x: jax.Array) -> jax.Array:
    """Returns a float32 array unchanged, and keeps XLA from recomputing it per element of a consumer.

    XLA would otherwise fuse the computation of a scale into the loop over the data and repeat it for every element of
    the block. It never duplicates an integer division, so this appends one, by 1. An optimisation barrier is removed
    before the fusion pass in some versions of XLA.
    """
    pattern = bits_of(x)
    one = jnp.where(pattern == np.uint32(0xFFFFFFFF), np.uint32(2), np.uint32(1))  # no scale has that pattern
    return float_of(lax.div(pattern, one))
