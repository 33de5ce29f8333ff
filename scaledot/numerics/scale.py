"""Scales from block maxima: the rules of every format, to the bit.

A rule turns the largest magnitude of each block into what is stored (`scale`, and `tensor_scale` for
two-level formats) and into what the cast applies to the data. All of it works on arrays of the scale's
shape, which are small, so divisions can afford to be correctly rounded.
"""

import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scaledot.formats import FORMATS, Format
from scaledot.numerics import bits
from scaledot.numerics.bits import ONE, divide
from scaledot.numerics.encode import encode
from scaledot.numerics.rounding import round_integer, round_to

E4M3_MAX = np.float32(448.0)
_GUARD = np.float32(17 / 16)


class Scales(NamedTuple):
    """The stored scales and how the cast applies them: x * factors, or x / divisor where that is given."""

    scale: jax.Array
    tensor_scale: jax.Array | None
    multipliers: tuple[jax.Array, ...]
    divisor: jax.Array | None = None


def scales_of(amax: jax.Array, format: Format, dtype, tensor_scale=None, tensor_amax=None) -> Scales:
    """Scales of blocks whose largest magnitudes are `amax`.

    A two-level format needs the given `tensor_scale`, or the `tensor_amax` to make one from; both have one
    entry per leading index (none: one for all).
    """
    if format.quirks.least_amax:
        amax = jnp.maximum(amax, np.float32(format.quirks.least_amax))
    if format.scale == "float8_e8m0fnu":
        return _e8m0_levels(e8m0_code(amax, format), two_multipliers=format.max < 2)
    if format.scale == "float8_e4m3fn":
        return _e4m3_levels(amax, format, dtype, tensor_scale, tensor_amax)
    return _float_levels(amax, format, dtype)


def scales_or_nan(amax: jax.Array, format: Format, dtype, tensor_scale=None, tensor_amax=None) -> Scales:
    """`scales_of`, with a NaN scale where `amax` is infinite, as it is for a block that holds NaN or infinities."""
    return with_nan(scales_of(amax, format, dtype, tensor_scale, tensor_amax), amax == np.float32(np.inf))


def with_nan(levels: Scales, where: jax.Array) -> Scales:
    """The levels with NaN for some blocks: for what is stored, and for what the cast applies to their elements.

    So codes there are NaN in 8-bit floats and 0 in every other element, whatever the data.
    """
    nan = np.float32(np.nan)
    return levels._replace(
        scale=_nan_where(where, levels.scale),
        multipliers=tuple(jnp.where(where, nan, multiplier) for multiplier in levels.multipliers),
        divisor=None if levels.divisor is None else jnp.where(where, nan, levels.divisor),
    )


def _nan_where(where: jax.Array, scale: jax.Array) -> jax.Array:
    nan = np.array(np.nan, scale.dtype)
    if scale.dtype.itemsize > 1:
        return jnp.where(where, nan[()], scale)
    stored = lax.bitcast_convert_type(scale, jnp.uint8)
    return lax.bitcast_convert_type(jnp.where(where, nan.view(np.uint8)[()], stored), scale.dtype)


def scales_from_given(scale: jax.Array, format: Format, tensor_scale=None) -> Scales:
    """The same for scales that the caller brings."""
    if format.scale == "float8_e8m0fnu":
        code = lax.bitcast_convert_type(scale, jnp.uint8).astype(jnp.int32)
        return _e8m0_levels(code, two_multipliers=True)
    value = scale.astype(jnp.float32)
    if tensor_scale is not None:
        value = value * beside(tensor_scale, value.ndim)
    if format.quirks.divide:
        return Scales(scale, tensor_scale, (), value)
    empty = value == 0
    return Scales(scale, tensor_scale, tuple(jnp.where(empty, np.float32(0), f) for f in _reciprocal(value, 0)))


def scales_from_multiplier(multiplier: jax.Array) -> Scales:
    """The same for float32 factors that the caller brings, as delayed scaling does; what is stored is 1 / factor."""
    return Scales(divide(ONE, multiplier), None, (multiplier,))


def scale_values(scale: jax.Array, tensor_scale: jax.Array | None, format: Format) -> tuple[jax.Array, ...]:
    """What codes are multiplied by, in turn, to give values."""
    if format.scale == "float8_e8m0fnu":
        code = lax.bitcast_convert_type(scale, jnp.uint8).astype(jnp.int32)
        first, second = bits.power_of_two_multipliers(code - 127)
        return jnp.where(code == 255, np.float32(np.nan), first), second
    value = scale.astype(jnp.float32)
    if tensor_scale is None:
        return (value,)
    second = beside(tensor_scale, scale.ndim)
    return (value * second,) if format.quirks.scales_first else (value, second)


def zero_point(low: jax.Array, high: jax.Array, format: Format, dtype) -> tuple[Scales, jax.Array]:
    """Scale and float32 zero point of an integer format whose blocks span low..high."""
    steps = np.float32(2**format.bits - 1)
    own = functools.partial(round_to, dtype=format.arithmetic_dtype(dtype))
    width = own(jnp.minimum(high - low, bits.FLOAT32_MAX))
    levels = _ratio_levels(width, steps, format, dtype)
    scaled = functools.reduce(operator.mul, levels.multipliers, low)
    if levels.divisor is not None:
        scaled = divide(low, levels.divisor)
    # Kept apart, the product and the difference are each rounded; fused they would be rounded once.
    below = bits.computed_once(own(-scaled))
    half = 2 ** (format.bits - 1)
    zero = jnp.clip(round_integer(own(below - np.float32(half))), -half, half - 1)
    return levels, zero


def _float_levels(amax: jax.Array, format: Format, dtype) -> Scales:
    largest = np.float32(format.max)
    if format.rule == "amax_over_f":
        return _ratio_levels(amax, largest, format, dtype)
    multiplier = jnp.clip(divide(largest, amax), bits.SMALLEST_SCALE, bits.LARGEST_MULTIPLIER)
    if format.pow2:
        floor = bits.floor_power_of_two_by_log2 if format.quirks.log2_pow2 else bits.floor_power_of_two
        multiplier = floor(multiplier)
    multiplier = jnp.where(amax == 0, ONE, multiplier)
    scale = divide(ONE, multiplier)
    return Scales(round_to(scale, format.scale_dtype(dtype)).astype(format.scale_dtype(dtype)), None, (multiplier,))


def _ratio_levels(covered: jax.Array, steps: np.float32, format: Format, dtype) -> Scales:
    """Levels whose stored scale is covered / steps, rounded to the scale's dtype."""
    stored = format.scale_dtype(dtype)
    ratio = divide(covered, steps)
    scale = jnp.maximum(bits.ceil_power_of_two(ratio) if format.pow2 else ratio, bits.SMALLEST_SCALE)
    scale = jnp.minimum(scale, np.float32(jnp.finfo(stored).max))
    scale = round_to(jnp.where(covered == 0, np.float32(0), scale), stored)
    empty = jnp.finfo(stored).eps if format.quirks.empty_scale == "eps" else format.quirks.empty_scale or 1
    scale = jnp.where(scale == 0, np.float32(empty), scale)
    if format.quirks.divide:
        return Scales(scale.astype(stored), None, (), scale)
    return Scales(scale.astype(stored), None, _reciprocal(scale, format.max))


def _reciprocal(scale: jax.Array, largest: float) -> tuple[jax.Array, ...]:
    """Factors that make 1 / scale, at most 2^126.

    The scale of an element that reaches 4 is at most 2^126, whose reciprocal is normal. Others may have a larger
    one: then data and factor meet half way.
    """
    if largest >= 4:
        return (jnp.minimum(divide(ONE, scale), bits.LARGEST_MULTIPLIER),)
    first = jnp.where(scale > np.float32(2.0**64), np.float32(2.0**-32), ONE)
    second = divide(jnp.where(scale > np.float32(2.0**64), np.float32(2.0**32), ONE), scale)
    return first, jnp.minimum(second, bits.LARGEST_MULTIPLIER)


def e8m0_code(amax: jax.Array, format: Format) -> jax.Array:
    """int32 code (exponent + 127) of the power-of-two scale, by the format's rule; 255, which is NaN, of infinity."""
    pattern = bits.bits_of(amax).astype(jnp.int32)
    mantissa = pattern & bits.MANTISSA.astype(np.int32)
    if format.rule == "ceil":
        return _ceil_code(amax, np.float32(1 / format.max))
    if format.rule == "floor":
        field = pattern >> 23
    elif format.rule == "ceil_log2":
        field = (pattern >> 23) + (mantissa != 0).astype(jnp.int32)
    else:
        kept = 1 if format.rule == "even1" else format.mantissa_bits
        field = (pattern + (1 << (22 - kept))) >> 23
    return jnp.where(pattern == bits.INFINITY.astype(np.int32), 255, jnp.clip(field - format.emax, 0, 254))


def _ceil_code(amax: jax.Array, reciprocal: np.float32) -> jax.Array:
    """ceil(log2(amax / F)) + 127 from the bits of the product, which must not become subnormal on the way."""
    small = amax < np.float32(2.0**-60)
    ratio = amax * jnp.where(small, np.float32(2.0**64), ONE) * reciprocal
    pattern = bits.bits_of(ratio).astype(jnp.int32)
    field = pattern >> 23
    code = field + ((pattern & bits.MANTISSA.astype(np.int32) != 0) & (field < 254)).astype(jnp.int32)
    # What float32 would round to 2^-127 itself, code 0, although it lies half a subnormal step above.
    nearly = ratio <= np.float32((0x400000 + 0.5) * 2.0 ** (64 - 149))
    return jnp.where(small, jnp.where(nearly, 0, jnp.maximum(code - 64, 0)), code)


def _e8m0_levels(code: jax.Array, two_multipliers: bool) -> Scales:
    """Only elements that hold nothing above 2 can meet code 254, whose reciprocal is subnormal."""
    scale = lax.bitcast_convert_type(code.astype(jnp.uint8), jnp.float8_e8m0fnu)
    if two_multipliers:
        return Scales(scale, None, bits.power_of_two_multipliers(127 - code))
    return Scales(scale, None, (bits.power_of_two(127 - code),))


def _e4m3_levels(amax, format: Format, dtype, tensor_scale, tensor_amax) -> Scales:
    largest = np.float32(format.max)
    up, down = tensor_level(format, dtype, tensor_scale, tensor_amax)
    wide_up, wide_down = beside(up, amax.ndim), beside(down, amax.ndim)
    if format.rule == "multiply":
        relative = amax * (wide_up * np.float32(1 / format.max))
    elif format.rule == "divide_multiply":
        relative = divide(amax, largest) * wide_up
    elif format.rule == "divide_divide":
        relative = divide(divide(amax, largest), wide_down)
    elif format.rule == "divide_by_product":
        relative = divide(amax, largest * wide_down)
    else:
        relative = wide_up * round_to(divide(amax, largest), dtype)
    if format.guard:
        relative = relative * _GUARD
    stored, value = _e4m3_scale(relative, amax, format)
    return Scales(stored, down if format.two_level else None, *_e4m3_cast(value, wide_up, wide_down, format))


def tensor_level(format: Format, dtype, tensor_scale, tensor_amax) -> tuple[jax.Array, jax.Array]:
    """What block maxima are multiplied by to reach e4m3's range, and what block scales are multiplied by to return."""
    if not format.two_level:
        return jnp.ones((), jnp.float32), jnp.ones((), jnp.float32)
    if tensor_scale is not None:
        return divide(ONE, tensor_scale), tensor_scale
    reach = np.float32(format.max) * E4M3_MAX
    empty = tensor_amax == 0
    up = jnp.clip(divide(reach, tensor_amax), bits.SMALLEST_SCALE, bits.LARGEST_MULTIPLIER)
    if format.rule == "round_divide_multiply":
        up = round_to(up, dtype)
        down = divide(ONE, up)
    else:
        down = jnp.maximum(divide(tensor_amax, reach), bits.SMALLEST_SCALE)
    return jnp.where(empty, ONE, up), jnp.where(empty, ONE, down)


def _e4m3_scale(relative: jax.Array, amax: jax.Array, format: Format) -> tuple[jax.Array, jax.Array]:
    """The block scale as stored, and its value."""
    if format.quirks.least_scale:
        relative = jnp.maximum(relative, np.float32(format.quirks.least_scale))
    stored = encode(relative, FORMATS["fp8_e4m3"])
    if format.quirks.empty_scale is not None:
        empty = (amax == 0) | (stored.astype(jnp.float32) == 0)
        stored = jnp.where(empty, jnp.asarray(format.quirks.empty_scale, stored.dtype), stored)
    return stored, stored.astype(jnp.float32)


def _e4m3_cast(value, up, down, format: Format) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """Factors or divisor of the cast; a block whose scale rounds to 0 gets codes 0."""
    if format.rule == "round_divide_multiply":
        return (), divide(value, up)
    if format.quirks.divide:
        return (), value * down
    twice = format.rule == "divide_divide"
    multiplier = divide(divide(ONE, down), value) if twice else divide(ONE, value * divide(ONE, up))
    return (jnp.where(value == 0, np.float32(0), jnp.minimum(multiplier, bits.FLOAT32_MAX)),), None


def beside(per_leading: jax.Array, ndim: int) -> jax.Array:
    """One entry per leading index, shaped to broadcast against an array of `ndim` axes."""
    return per_leading.reshape(per_leading.shape + (1,) * (ndim - per_leading.ndim))
