"""float32 arithmetic that gives the same bits on every backend.

XLA's CPU flushes subnormals and its GPU does not; it turns divisions into multiplications by a
reciprocal on one and into a not-quite-rounded divide on the other; exp2 and log2 miss at powers of two.
So subnormals are flushed here on purpose, divisions are finished in integers, and powers of two are
made from their exponent bits.
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
    """float32 with subnormals turned into zeros of the same sign."""
    bits = bits_of(x)
    return float_of(jnp.where((bits & MAGNITUDE) < MIN_NORMAL, bits & SIGN, bits))


def finite_magnitude(x: jax.Array) -> jax.Array:
    """int32 bits of |x|, 0 where x is subnormal, infinite or NaN; they order as the magnitudes do."""
    magnitude = bits_of(x) & MAGNITUDE
    counts = (magnitude >= MIN_NORMAL) & (magnitude < INFINITY)
    return jnp.where(counts, magnitude, np.uint32(0)).astype(jnp.int32)


def magnitude_rank(x: jax.Array) -> jax.Array:
    """uint32 that order as magnitudes do, with what is not finite below all else; cheaper to compare many of.

    Twice the magnitude's bits, plus one in the exponent: infinities and NaN run over to the bottom.
    """
    return (bits_of(x) << 1) + RANK_OF_ZERO


def amax_of_rank(rank: jax.Array) -> jax.Array:
    """The float32 magnitude of the largest rank; 0 where that is subnormal or nothing is finite."""
    magnitude = (jnp.maximum(rank, RANK_OF_ZERO) - RANK_OF_ZERO) >> 1
    return float_of(jnp.where(magnitude < MIN_NORMAL, np.uint32(0), magnitude))


def magnitude_bits(x: jax.Array) -> jax.Array:
    """uint32 bits of |x|; they order as magnitudes do, with infinities and NaN above all else."""
    return bits_of(x) & MAGNITUDE


def amax_of_bits(largest: jax.Array) -> jax.Array:
    """The float32 magnitude of the largest bits: infinite where anything is not finite, 0 where it is subnormal."""
    return float_of(jnp.where(largest < MIN_NORMAL, np.uint32(0), jnp.minimum(largest, INFINITY)))


def power_of_two(exponent: jax.Array) -> jax.Array:
    """2^exponent for int32 exponents in [-126, 127]."""
    return float_of((exponent + 127).astype(jnp.uint32) << 23)


def power_of_two_multipliers(exponent: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two normal numbers whose product is 2^exponent, for exponents that reach where 2^exponent is subnormal."""
    half = exponent >> 1
    return power_of_two(half), power_of_two(exponent - half)


def floor_power_of_two(x: jax.Array) -> jax.Array:
    return float_of(bits_of(x) & INFINITY)


def floor_power_of_two_by_log2(x: jax.Array) -> jax.Array:
    """exp2(floor(log2(x))) as float32 library calls give it: log2 of a number just below 2^n rounds to n itself.

    That happens when the distance, j units in the last place, is at most half a step of the floats below n:
    j * 2^-24 / ln 2 <= step / 2. Positive powers of two have the smaller step of the binade below them.
    """
    pattern = bits_of(x)
    exponent = (pattern >> 23).astype(jnp.int32) - 126  # n: the next power of two above x
    distance = (MIN_NORMAL - (pattern & MANTISSA)).astype(jnp.int32)
    size = jnp.abs(exponent)
    binade = 31 - lax.clz(jnp.maximum(size, 1))
    halved = (exponent > 0) & (size == 1 << binade)
    reach = np.float32(math.log(2)) * power_of_two(binade - halved.astype(jnp.int32))
    rounds_up = (exponent != 0) & (distance.astype(jnp.float32) <= reach)
    return float_of((pattern & INFINITY) + (rounds_up.astype(jnp.uint32) << 23))


def ceil_power_of_two(x: jax.Array) -> jax.Array:
    return float_of((bits_of(x) + MANTISSA) & INFINITY)


@jax.jit  # traced and lowered once per shape instead of once per call
def divide(a: jax.Array | np.float32, b: jax.Array | np.float32) -> jax.Array:
    """Correctly rounded float32 a / b.

    Subnormal operands and results are flushed to 0, x / 0 is an infinity. The hardware's quotient of the significands
    is within 2 ulp; the integer remainder, small enough to be exact modulo 2^32, gives the correction.
    """
    a, b = jnp.broadcast_arrays(jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32))
    a_bits, b_bits = (lax.bitcast_convert_type(x, jnp.int32) for x in (a, b))
    a_exponent, b_exponent = ((bits >> 23) & 255 for bits in (a_bits, b_bits))
    numerator, denominator = ((bits & MANTISSA.astype(np.int32)) | _HIDDEN_BIT for bits in (a_bits, b_bits))

    # A 24-bit quotient, as wide as a float32 significand.
    is_below_one = numerator < denominator
    # Added, not selected: Mosaic takes the result of a select for unsigned, and then the remainder, too.
    shift = np.int32(23) + is_below_one.astype(jnp.int32)
    ratio = numerator.astype(jnp.float32) / denominator.astype(jnp.float32)
    quotient = (ratio * jnp.where(is_below_one, np.float32(2.0**24), np.float32(2.0**23))).astype(jnp.int32)
    remainder = (numerator << shift) - quotient * denominator
    twice = 2 * jnp.abs(remainder)
    off_by = (twice > denominator).astype(jnp.int32) + (twice > 3 * denominator).astype(jnp.int32)  # never a tie
    quotient += lax.sign(remainder) * off_by

    # Added, not or-ed: the quotient's hidden bit, and a carry when it was rounded up to 2^24, increment the exponent.
    exponent = a_exponent - b_exponent + (149 - shift)
    magnitude = (exponent << 23) + quotient
    magnitude = jnp.where((magnitude < _HIDDEN_BIT) | (a_exponent == 0), np.int32(0), magnitude)
    magnitude = jnp.where((exponent > 253) | (b_exponent == 0), INFINITY.astype(np.int32), magnitude)
    finite = lax.bitcast_convert_type(magnitude | ((a_bits ^ b_bits) & SIGN.astype(np.int32)), jnp.float32)
    either = jnp.where(jnp.maximum(a_exponent, b_exponent) == 255, a / b, finite)  # inf and NaN operands: IEEE division
    return jnp.where((a_exponent | b_exponent) == 0, np.float32(np.nan), either)


def computed_once(x: jax.Array) -> jax.Array:
    """A float32 array unchanged, kept as an array of its own.

    XLA would otherwise fuse the arithmetic behind a scale into the loop over the data and repeat it for every
    element of the block. It never repeats a division, so this ends in one, by 1; a barrier does not survive
    to the fusion pass in every version.
    """
    pattern = bits_of(x)
    one = jnp.where(pattern == np.uint32(0xFFFFFFFF), np.uint32(2), np.uint32(1))  # no scale has that pattern
    return float_of(lax.div(pattern, one))
