"""Encoding of scaled float32 values to codes, and decoding, before any scale is applied.

Every encoder saturates. Float elements are rounded by integer arithmetic on float32 bit patterns instead of XLA's
conversions: these overflow to NaN or infinity, are slow for FP4, and XLA:GPU removes a conversion to a narrow dtype and
back as excess precision, which it cannot do to bit arithmetic.
"""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from scaledot.formats import Format
from scaledot.numerics.bits import INFINITY, MAGNITUDE, SIGN, bits_of, float_of
from scaledot.numerics.rounding import round_integer, round_nonnegative, round_to, round_to_uint32


def encode(
    x: jax.Array, format: Format, uniform: jax.Array | None = None, in_second_grid: jax.Array | None = None
) -> jax.Array:
    """Rounds scaled values x to codes: to nearest even, or stochastically with `uniform` numbers in [0, 1).

    In a codebook, a value halfway between two entries is rounded to the lower one. NaN is encoded as NaN in 8-bit
    floats and as 0 in every other element. `in_second_grid` is a mask for formats with `grids`.
    """
    if format.grids is not None:
        assert in_second_grid is not None, f"codes of {format.name} depend on the sign of their scales"
        first, second = (widen(encode(x, grid, uniform)) for grid in format.grid_formats)
        return narrow(jnp.where(in_second_grid, second, first).astype(jnp.uint8), format.code_dtype)
    if format.is_float:
        return _encode_float(x, format, uniform)
    if format.codebook is not None:
        return _encode_codebook(x, format.codebook, format.code_dtype, uniform)
    if format.is_unsigned:
        codes = jnp.clip(round_integer(_nan_to_zero(x), uniform), *map(np.float32, format.integer_range))
        return narrow(codes.astype(jnp.uint8), format.code_dtype)
    # XLA's conversion to int8 saturates and converts NaN to 0.
    low, high = format.integer_range
    codes = jnp.maximum(round_integer(x, uniform).astype(jnp.int8), low)
    return narrow(codes if high == 127 else jnp.minimum(codes, high), format.code_dtype)


def encode_affine(x, zero, format: Format, input_dtype, uniform: jax.Array | None) -> jax.Array:
    """Integer codes of scaled float32 values x, shifted by the float32 zero points `zero`."""
    x = _nan_to_zero(x)
    half = 2 ** (format.bits - 1)
    if format.quirks.zero_first:
        codes = round_integer(round_to(x + zero, format.arithmetic_dtype(input_dtype)), uniform)
    else:
        codes = round_integer(x, uniform) + zero
    return narrow(jnp.clip(codes, -half, half - 1).astype(jnp.int8), format.code_dtype)


def decode(codes: jax.Array, format: Format, in_second_grid: jax.Array | None = None) -> jax.Array:
    """Decodes codes to float32, without scales. `in_second_grid` is a mask for formats with `grids`.

    4-bit codes may also be passed as uint32, with other bits above them.
    """
    if format.grids is not None:
        assert in_second_grid is not None, f"codes of {format.name} depend on the sign of their scales"
        first, second = (_decode_raw(widen(codes), grid) for grid in format.grid_formats)
        return jnp.where(in_second_grid, second, first)
    if codes.dtype == jnp.uint32:
        return _decode_raw(codes, format)
    if format.codebook is not None:
        return _look_up(widen(codes), format.codebook)
    if not format.is_float or format.bits >= 8:
        return codes.astype(jnp.float32)
    return decode_float(widen(codes), format)


def _decode_raw(bits: jax.Array, format: Format) -> jax.Array:
    """Decodes the raw bits of floats or of integers in two's complement."""
    if format.is_float:
        return decode_float(bits, format)
    sign = np.int32(1 << (format.bits - 1))
    return (((bits & np.uint32(2 * sign - 1)).astype(jnp.int32) ^ sign) - sign).astype(jnp.float32)


def narrow(codes: jax.Array, dtype: np.dtype) -> jax.Array:
    """Converts 8-bit integers to a dtype of at most 8 bits; for a 4-bit float dtype, `codes` are its raw bits.

    The barrier lets XLA:CPU pack nibbles; fused with other arithmetic it stores them one at a time.
    """
    if jnp.iinfo(codes.dtype).bits == _bits(dtype):
        return codes if codes.dtype == dtype else lax.bitcast_convert_type(codes, dtype)
    codes = lax.optimization_barrier(codes)
    if jnp.issubdtype(dtype, jnp.integer):
        return codes.astype(dtype)
    return lax.bitcast_convert_type(codes.astype(jnp.uint4), dtype)


def widen(codes: jax.Array) -> jax.Array:
    """The raw bits of unsigned, int4 or 4-bit float codes as uint32.

    Without the barrier, XLA:CPU of jax 0.12 fails to compile a bitcast of a slice of 4-bit floats, as in a scan.
    """
    if codes.dtype == jnp.uint32:
        return codes
    if codes.dtype == jnp.float4_e2m1fn:
        codes = lax.bitcast_convert_type(lax.optimization_barrier(codes), jnp.uint4)
    if codes.dtype == jnp.int4:
        return (codes.astype(jnp.int8) & 15).astype(jnp.uint32)
    return codes.astype(jnp.uint8).astype(jnp.uint32)


def _bits(dtype: np.dtype) -> int:
    return jnp.iinfo(dtype).bits if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype).bits


def _nan_to_zero(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isnan(x), np.float32(0), x)


def _encode_float(x: jax.Array, format: Format, uniform: jax.Array | None) -> jax.Array:
    return narrow(float_code(x, format, uniform).astype(jnp.uint8), format.code_dtype)


def float_code(x: jax.Array, format: Format, uniform: jax.Array | None = None) -> jax.Array:
    """Codes of a float format as uint32, by operations that Pallas kernels support, too."""
    info = ml_dtypes.finfo(format.element_dtype)
    mantissa, min_exponent_field = int(info.nmant), np.uint32(127 + int(info.minexp))
    bits = bits_of(x)
    sign = (x < 0).astype(jnp.uint32) if format.quirks.unsigned_zero else bits >> 31
    in_ulps, field = _in_ulps(bits, format)
    magnitude = round_to_uint32(in_ulps, uniform) + ((field - min_exponent_field) << mantissa)
    if not format.has_negative_zero:
        sign = jnp.where(magnitude == 0, np.uint32(0), sign)
    code = magnitude | (sign << (format.bits - 1))
    nan = np.array(np.nan, format.element_dtype).view(np.uint8) if format.bits == 8 else 0
    return jnp.where(_is_nan(bits), np.uint32(nan), code)


def round_to_element(x: jax.Array, format: Format, uniform: jax.Array | None = None) -> jax.Array:
    """Rounds x to the element type, in float32: the same as decoding its codes, NaN included."""
    info = ml_dtypes.finfo(format.element_dtype)
    bits = bits_of(x)
    clipped = _clipped(bits, format)
    binade = jnp.maximum(clipped & INFINITY, np.float32(2.0 ** int(info.minexp)).view(np.uint32))
    in_ulps = float_of(clipped) * float_of(np.uint32((254 + int(info.nmant)) << 23) - binade)
    value = round_nonnegative(in_ulps, uniform) * (float_of(binade) * np.float32(2.0 ** -int(info.nmant)))
    nan = np.float32(np.nan).view(np.uint32) if format.bits == 8 else np.uint32(0)
    sign = bits & SIGN if format.has_negative_zero else jnp.where(value == 0, np.uint32(0), bits & SIGN)
    return float_of(jnp.where(_is_nan(bits), nan, bits_of(value) | sign))


def _in_ulps(bits: jax.Array, format: Format) -> tuple[jax.Array, jax.Array]:
    """Saturated magnitudes in ulps of the element in their binade, and the binade's float32 exponent field."""
    info = ml_dtypes.finfo(format.element_dtype)
    clipped = _clipped(bits, format)
    field = jnp.maximum(clipped >> 23, np.uint32(127 + int(info.minexp)))
    return float_of(clipped) * float_of((np.uint32(254 + int(info.nmant)) - field) << 23), field


def _clipped(bits: jax.Array, format: Format) -> jax.Array:
    """The bits of magnitudes, saturated at the element's maximum."""
    return jnp.minimum(bits & MAGNITUDE, np.float32(ml_dtypes.finfo(format.element_dtype).max).view(np.uint32))


def _is_nan(bits: jax.Array) -> jax.Array:
    return (bits & MAGNITUDE) > np.uint32(0x7F800000)


def decode_float(bits: jax.Array, format: Format) -> jax.Array:
    """Decodes codes of a float format, passed as uint32 with any bits above the sign, to float32.

    A subnormal 0.m 2^e is computed as 1.m 2^e - 1.0 2^e, which is exact and faster than converting the integer m.
    """
    info = ml_dtypes.finfo(format.element_dtype)
    mantissa, minexp = int(info.nmant), int(info.minexp)
    sign_bit = format.bits - 1
    magnitude = bits & np.uint32((1 << sign_bit) - 1)
    shifted = magnitude << (23 - mantissa)
    normal = float_of(shifted + np.uint32((126 + minexp) << 23))
    subnormal = float_of(shifted + np.uint32((127 + minexp) << 23)) - np.float32(2.0**minexp)
    value = jnp.where(magnitude < np.uint32(1 << mantissa), subnormal, normal)
    return float_of(bits_of(value) | ((bits << (31 - sign_bit)) & SIGN))


def _encode_codebook(x, codebook, dtype, uniform):
    """The index of the nearest entry, which is the number of midpoints below x; a tie takes the lower entry."""
    entries = np.array(codebook, np.float32)
    x = _nan_to_zero(x)
    if uniform is None:
        index = _count_below(x, (entries[1:] + entries[:-1]) / np.float32(2))
    else:
        x = jnp.clip(x, entries[0], entries[-1])
        below = _count_below(x, np.nextafter(entries[1:], entries[:-1]))  # the index of the last entry at or below x
        inverse_gap = _look_up(below, (*(1 / np.diff(entries)), 0.0))
        index = below + ((x - _look_up(below, codebook)) * inverse_gap > uniform).astype(jnp.uint32)
    return narrow(index.astype(jnp.uint8), dtype)


def _count_below(x: jax.Array, thresholds: np.ndarray) -> jax.Array:
    """The number of sorted thresholds below x, by binary search with one comparison per bit of the result."""
    bits = len(thresholds).bit_length()
    padded = np.append(thresholds, np.full(2**bits - 1 - len(thresholds), np.inf, np.float32))
    index = jnp.zeros(x.shape, jnp.uint32)
    for bit in reversed(range(bits)):
        step = 2**bit
        middle = _look_up(index >> (bit + 1), tuple(padded[step - 1 :: 2 * step]))
        index = index + jnp.where(x > middle, np.uint32(step), np.uint32(0))
    return index


def _look_up(index: jax.Array, table: tuple[float, ...]) -> jax.Array:
    """table[index] as a binary tree of selects, because XLA:CPU does not vectorise a gather."""
    nodes: list[Any] = [np.float32(v) for v in table]
    bit = 0
    while len(nodes) > 1:
        if len(nodes) % 2:
            nodes.append(nodes[-1])
        takes_odd = (index >> bit) & 1 == 1
        nodes = [jnp.where(takes_odd, odd, even) for even, odd in zip(nodes[::2], nodes[1::2], strict=True)]
        bit += 1
    return jnp.asarray(nodes[0])
