"""Scales from block amaxes: the scale rules of every format, bit for bit.

A rule (listed in `formats`) computes from the amax of each block what is stored (`scale`, and `tensor_scale` for
two-level formats) and what the cast applies to the data (quantisation multipliers, or a divisor). All arrays here have
the shape of the scale and are small, so divisions are correctly rounded (`bits.divide`). F is `Format.max`.

Example: an fp8_e4m3 block with amax 3 has the multiplier 448 / 3 and the scale 1 / (448 / 3); its codes are
round(x * multiplier).
"""

import functools
import operator
from typing import Any, NamedTuple

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
_E4M3_MAX_CODE = 126
_GUARD = np.float32(17 / 16)


class Scales(NamedTuple):
    """The stored scales, and how the cast applies them: x * multipliers in turn, or x / divisor if that is not None.

    There are two multipliers where their product, 1 / scale, may be subnormal in float32.
    """

    scale: jax.Array
    tensor_scale: jax.Array | None
    multipliers: tuple[jax.Array, ...]
    divisor: jax.Array | None = None


class Candidate(NamedTuple):
    """An E4M3 scale that a search tries: numbers, or int32 and float32 arrays with one entry per block.

    offset: added to the E4M3 code of the abs-max scale. grid: the index of the element in `Format.grids`, else 0.
    ratio: the amax is multiplied by it before the scale is computed.
    """

    offset: int | jax.Array = 0
    grid: int | jax.Array = 0
    ratio: float | jax.Array = 1.0


def scales_of(
    amax: jax.Array,
    format: Format,
    dtype,
    tensor_scale=None,
    tensor_amax=None,
    candidate: Candidate | None = None,
) -> Scales:
    """Scales of blocks with the given `amax`, in its shape.

    A two-level format needs a `tensor_scale`, or the `tensor_amax` to compute it from: scalars, or one entry per index
    of the leading axes. `dtype` is that of the array that is quantised. `candidate` selects E4M3 scales other than
    those of the amax.
    """
    if candidate is not None and format.search == "four_over_six":
        # `computed_once` keeps XLA from merging the ratio with constants of the scale rule, which rounds differently.
        amax = bits.computed_once(amax * candidate.ratio)
    if format.quirks.least_amax:
        amax = jnp.maximum(amax, np.float32(format.quirks.least_amax))
    if format.scale == "float8_e8m0fnu":
        # The reciprocal of code 254 (2^127) is subnormal. Rules round amax / F up to that power only if F < 4.
        return _e8m0_scales(e8m0_code(amax, format), two_multipliers=format.max < 4)
    if format.scale == "float8_e4m3fn":
        return _e4m3_scales(amax, format, dtype, tensor_scale, tensor_amax, candidate)
    return _float_scales(amax, format, dtype)


def scales_or_nan(amax: jax.Array, format: Format, dtype, tensor_scale=None, tensor_amax=None) -> Scales:
    """`scales_of`, with a NaN scale where `amax` is infinite, which marks a block that contains NaN or infinities."""
    return with_nan(scales_of(amax, format, dtype, tensor_scale, tensor_amax), amax == np.float32(np.inf))


def with_nan(scales: Scales, where: jax.Array) -> Scales:
    """Replaces the scales, multipliers and divisors of the blocks in `where` by NaN.

    The codes of these blocks are then NaN in 8-bit floats and 0 in every other element type.
    """
    nan = np.float32(np.nan)
    return scales._replace(
        scale=_nan_where(where, scales.scale),
        multipliers=tuple(jnp.where(where, nan, multiplier) for multiplier in scales.multipliers),
        divisor=None if scales.divisor is None else jnp.where(where, nan, scales.divisor),
    )


def _nan_where(where: jax.Array, scale: jax.Array) -> jax.Array:
    nan = np.array(np.nan, scale.dtype)
    if scale.dtype.itemsize > 1:
        return jnp.where(where, nan[()], scale)
    raw = lax.bitcast_convert_type(scale, jnp.uint8)
    return lax.bitcast_convert_type(jnp.where(where, nan.view(np.uint8)[()], raw), scale.dtype)


def scales_from_stored(scale: jax.Array, format: Format, tensor_scale=None) -> Scales:
    """Scales for stored scales that the caller passes, in the format's scale dtype."""
    if format.scale == "float8_e8m0fnu":
        code = lax.bitcast_convert_type(scale, jnp.uint8).astype(jnp.int32)
        return _e8m0_scales(code, two_multipliers=True)
    value = _magnitude(scale, format)
    if tensor_scale is not None:
        value = value * with_trailing_axes(tensor_scale, value.ndim)
    if format.quirks.divide:
        return Scales(scale, tensor_scale, (), value)
    is_zero = value == 0
    return Scales(scale, tensor_scale, tuple(jnp.where(is_zero, np.float32(0), m) for m in _reciprocal(value, 0)))


def scales_from_multiplier(multiplier: jax.Array) -> Scales:
    """Scales for float32 quantisation multipliers that the caller passes, as in delayed scaling: 1 / multiplier."""
    return Scales(divide(ONE, multiplier), None, (multiplier,))


def scale_values(scale: jax.Array, tensor_scale: jax.Array | None, format: Format) -> tuple[jax.Array, ...]:
    """The float32 arrays that decoded codes are multiplied by, one after the other, to dequantise them."""
    if format.scale == "float8_e8m0fnu":
        code = lax.bitcast_convert_type(scale, jnp.uint8).astype(jnp.int32)
        first, second = bits.power_of_two_multipliers(code - 127)
        return jnp.where(code == 255, np.float32(np.nan), first), second
    value = _magnitude(scale, format)
    if tensor_scale is None:
        return (value,)
    second = with_trailing_axes(tensor_scale, scale.ndim)
    return (value * second,) if format.quirks.scales_first else (value, second)


def _magnitude(scale: jax.Array, format: Format) -> jax.Array:
    value = scale.astype(jnp.float32)
    return value if format.grids is None else jnp.abs(value)


def is_second_grid(scale: jax.Array) -> jax.Array:
    """A mask of the blocks of a format with `grids` that use the second one: those with a negative scale."""
    return bits.bits_of(bits.computed_once(scale.astype(jnp.float32))) >> 31 == 1


def zero_point(low: jax.Array, high: jax.Array, format: Format, dtype) -> tuple[Scales, jax.Array]:
    """Scales and float32 zero points of an integer format for blocks with values in [low, high]."""
    steps = np.float32(2**format.bits - 1)
    round_arithmetic = functools.partial(round_to, dtype=format.arithmetic_dtype(dtype))
    width = round_arithmetic(jnp.minimum(high - low, bits.FLOAT32_MAX))
    scales = _ratio_scales(width, steps, format, dtype)
    scaled_low = functools.reduce(operator.mul, scales.multipliers, low)
    if scales.divisor is not None:
        scaled_low = divide(low, scales.divisor)
    # `computed_once` keeps XLA from contracting the multiplication and the subtraction to an FMA, which rounds once.
    offset = bits.computed_once(round_arithmetic(-scaled_low))
    half = 2 ** (format.bits - 1)
    zero = jnp.clip(round_integer(round_arithmetic(offset - np.float32(half))), -half, half - 1)
    return scales, zero


def _float_scales(amax: jax.Array, format: Format, dtype) -> Scales:
    largest = np.float32(format.max)
    if format.rule == "amax_over_f":
        return _ratio_scales(amax, largest, format, dtype)
    multiplier = jnp.clip(divide(largest, amax), bits.SMALLEST_SCALE, bits.LARGEST_MULTIPLIER)
    if format.pow2:
        floor = bits.floor_power_of_two_by_log2 if format.quirks.log2_pow2 else bits.floor_power_of_two
        multiplier = floor(multiplier)
    multiplier = jnp.where(amax == 0, ONE, multiplier)
    scale = divide(ONE, multiplier)
    return Scales(round_to(scale, format.scale_dtype(dtype)).astype(format.scale_dtype(dtype)), None, (multiplier,))


def _ratio_scales(width: jax.Array, steps: np.float32, format: Format, dtype) -> Scales:
    """Scales width / steps, rounded to the format's scale dtype, for an amax or a range of `width`."""
    scale_dtype = format.scale_dtype(dtype)
    ratio = divide(width, steps)
    scale = jnp.maximum(bits.ceil_power_of_two(ratio) if format.pow2 else ratio, bits.SMALLEST_SCALE)
    scale = jnp.minimum(scale, np.float32(jnp.finfo(scale_dtype).max))
    scale = round_to(jnp.where(width == 0, np.float32(0), scale), scale_dtype)
    empty = jnp.finfo(scale_dtype).eps if format.quirks.empty_scale == "eps" else format.quirks.empty_scale or 1
    scale = jnp.where(scale == 0, np.float32(empty), scale)
    if format.quirks.divide:
        return Scales(scale.astype(scale_dtype), None, (), scale)
    return Scales(scale.astype(scale_dtype), None, _reciprocal(scale, format.max))


def _reciprocal(scale: jax.Array, largest: float) -> tuple[jax.Array, ...]:
    """Multipliers whose product is 1 / scale, at most 2^126, for elements with maximum `largest`.

    If `largest` is at least 4, a scale is at most 2^126, whose reciprocal is a normal float32. A larger scale has a
    subnormal reciprocal, which is split in two multipliers so that neither step is subnormal.
    """
    if largest >= 4:
        return (jnp.minimum(divide(ONE, scale), bits.LARGEST_MULTIPLIER),)
    first = jnp.where(scale > np.float32(2.0**64), np.float32(2.0**-32), ONE)
    second = divide(jnp.where(scale > np.float32(2.0**64), np.float32(2.0**32), ONE), scale)
    return first, jnp.minimum(second, bits.LARGEST_MULTIPLIER)


def e8m0_code(amax: jax.Array, format: Format) -> jax.Array:
    """int32 E8M0 code (exponent + 127) of the scale for `amax`, by the format's rule; 255 (NaN) for infinity."""
    pattern = bits.bits_of(amax).astype(jnp.int32)
    mantissa = pattern & bits.MANTISSA.astype(np.int32)
    if format.rule == "ceil":
        return _ceil_code(amax, np.float32(1 / format.max))
    if format.rule == "floor":
        field = pattern >> 23
    elif format.rule == "ceil_log2":
        field = (pattern >> 23) + (mantissa != 0).astype(jnp.int32)
    else:
        mantissa_bits = 1 if format.rule == "even1" else format.mantissa_bits
        field = (pattern + (1 << (22 - mantissa_bits))) >> 23
    return jnp.where(pattern == bits.INFINITY.astype(np.int32), 255, jnp.clip(field - format.emax, 0, 254))


def _ceil_code(amax: jax.Array, reciprocal: np.float32) -> jax.Array:
    """ceil(log2(amax * (1 / F))) + 127 from the bits of that product, computed times 2^64 where it is subnormal."""
    small = amax < np.float32(2.0**-60)
    ratio = amax * jnp.where(small, np.float32(2.0**64), ONE) * reciprocal
    pattern = bits.bits_of(ratio).astype(jnp.int32)
    field = pattern >> 23
    code = field + ((pattern & bits.MANTISSA.astype(np.int32) != 0) & (field < 254)).astype(jnp.int32)
    # Without the factor 2^64, a product of at most 2^-127 plus half a subnormal step would round to at most 2^-127,
    # code 0.
    rounds_to_code_0 = ratio <= np.float32((0x400000 + 0.5) * 2.0 ** (64 - 149))
    return jnp.where(small, jnp.where(rounds_to_code_0, 0, jnp.maximum(code - 64, 0)), code)


def _e8m0_scales(code: jax.Array, two_multipliers: bool) -> Scales:
    scale = lax.bitcast_convert_type(code.astype(jnp.uint8), jnp.float8_e8m0fnu)
    if two_multipliers:
        return Scales(scale, None, bits.power_of_two_multipliers(127 - code))
    return Scales(scale, None, (bits.power_of_two(127 - code),))


def _e4m3_scales(amax, format: Format, dtype, tensor_scale, tensor_amax, candidate: Candidate | None) -> Scales:
    grids = [grid.max for grid in format.grid_formats]
    largest, reciprocal = (_of_grid(each, candidate) for each in (grids, [1 / largest for largest in grids]))
    multiplier, stored_tensor_scale = tensor_level(format, dtype, tensor_scale, tensor_amax)
    tensor_multiplier = with_trailing_axes(multiplier, amax.ndim)
    tensor_scale = with_trailing_axes(stored_tensor_scale, amax.ndim)
    if format.rule == "multiply":
        relative = amax * (tensor_multiplier * reciprocal)
    elif format.rule == "divide_multiply":
        relative = divide(amax, largest) * tensor_multiplier
    elif format.rule == "divide_divide":
        # Nested divisions of searched scales, fused into one loop, take XLA's CPU backend minutes to compile.
        relative = divide(bits.computed_once(divide(amax, largest)), tensor_scale)
    elif format.rule == "divide_by_product":
        relative = divide(amax, largest * tensor_scale)
    else:
        relative = tensor_multiplier * round_to(divide(amax, largest), dtype)
    if format.guard:
        relative = relative * _GUARD
    stored, value = _e4m3_scale(relative, amax, format, candidate)
    multipliers, divisor = _e4m3_cast(value, tensor_multiplier, tensor_scale, format)
    return Scales(stored, stored_tensor_scale if format.two_level else None, multipliers, divisor)


def _of_grid(values: list[float], candidate: Candidate | None) -> Any:
    """The value of the candidate's grid, in float32."""
    grid = 0 if candidate is None else candidate.grid
    if isinstance(grid, int):
        return np.float32(values[grid])
    return jnp.where(grid == 1, np.float32(values[-1]), np.float32(values[0]))


def tensor_level(format: Format, dtype, tensor_scale, tensor_amax) -> tuple[jax.Array, jax.Array]:
    """The quantisation multiplier F * scale_max / amax of the tensor level, and its inverse, the tensor scale.

    Both are 1 for a format with one level and for a tensor of zeros. `tensor_scale` overrides `tensor_amax`.
    """
    if not format.two_level:
        return jnp.ones((), jnp.float32), jnp.ones((), jnp.float32)
    if tensor_scale is not None:
        return divide(ONE, tensor_scale), tensor_scale
    largest = np.float32(format.max) * np.float32(format.scale_max)
    is_empty = tensor_amax == 0
    multiplier = jnp.clip(divide(largest, tensor_amax), bits.SMALLEST_SCALE, bits.LARGEST_MULTIPLIER)
    if format.rule == "round_divide_multiply":
        multiplier = round_to(multiplier, dtype)
        scale = divide(ONE, multiplier)
    else:
        scale = jnp.maximum(divide(tensor_amax, largest), bits.SMALLEST_SCALE)
    return jnp.where(is_empty, ONE, multiplier), jnp.where(is_empty, ONE, scale)


def _e4m3_scale(
    relative: jax.Array, amax: jax.Array, format: Format, candidate: Candidate | None
) -> tuple[jax.Array, jax.Array]:
    """Rounds block scales, relative to the tensor scale, to E4M3; returns what is stored, and magnitudes in float32."""
    if format.quirks.least_scale:
        relative = jnp.maximum(relative, np.float32(format.quirks.least_scale))
    stored = encode(relative, FORMATS["fp8_e4m3"])
    if candidate is not None and format.search != "four_over_six":  # whose candidates may be 0
        stored = _neighbour_of_scale(stored, candidate.offset, amax != 0)
    if format.quirks.empty_scale is not None:
        is_empty = (amax == 0) | (stored.astype(jnp.float32) == 0)
        stored = jnp.where(is_empty, jnp.asarray(format.quirks.empty_scale, stored.dtype), stored)
    value = stored.astype(jnp.float32)
    if format.grids is not None and candidate is not None:
        sign = jnp.asarray(candidate.grid, jnp.uint8) << 7
        stored = lax.bitcast_convert_type(lax.bitcast_convert_type(stored, jnp.uint8) | sign, stored.dtype)
    return stored, value


def _neighbour_of_scale(scale: jax.Array, offset, where: jax.Array) -> jax.Array:
    """`e4m3_neighbour` of scales in E4M3."""
    code = e4m3_neighbour(lax.bitcast_convert_type(scale, jnp.uint8).astype(jnp.uint32), offset, where)
    return lax.bitcast_convert_type(code.astype(jnp.uint8), scale.dtype)


def e4m3_neighbour(code: jax.Array, offset, where: jax.Array) -> jax.Array:
    """The uint32 E4M3 code `offset` larger, from that of the smallest scale above 0 to that of 448."""
    moved = jnp.maximum(code, np.uint32(1)).astype(jnp.int32) + offset
    moved = jnp.clip(moved, np.int32(1), np.int32(_E4M3_MAX_CODE))
    return jnp.where(where, moved.astype(jnp.uint32), code)


def _e4m3_cast(
    scale, tensor_multiplier, tensor_scale, format: Format
) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """Multipliers or divisor of the cast, from block scales in float32; the codes of a block with scale 0 are 0."""
    if format.rule == "round_divide_multiply":
        return (), divide(scale, tensor_multiplier)
    if format.quirks.divide:
        return (), scale * tensor_scale
    if format.rule == "divide_divide":
        multiplier = divide(divide(ONE, tensor_scale), scale)
    else:
        multiplier = divide(ONE, scale * divide(ONE, tensor_multiplier))
    return (jnp.where(scale == 0, np.float32(0), jnp.minimum(multiplier, bits.FLOAT32_MAX)),), None


def with_trailing_axes(per_leading: jax.Array, ndim: int) -> jax.Array:
    """Appends axes of size 1 up to `ndim`, so that one entry per leading index broadcasts over the trailing axes."""
    return per_leading.reshape(per_leading.shape + (1,) * (ndim - per_leading.ndim))
