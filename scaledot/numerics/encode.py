"""Codes from scaled float32 values, and values from codes.

Every encoder saturates. Float elements are rounded in the integer domain: XLA's casts overflow to NaN or
infinity, its cast to FP4 is slow, and on a GPU it deletes a cast to a narrow type and back as excess
precision, which nothing can do to arithmetic on bits.
"""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from scaledot.formats import Format
from scaledot.numerics.bits import INFINITY, MAGNITUDE, SIGN, bits_of, float_of
from scaledot.numerics.rounding import round_count, round_float, round_integer, round_to


def encode(w: jax.Array, format: Format, uniform: jax.Array | None = None) -> jax.Array:
    """Codes of scaled values: nearest, ties to even; or stochastic where `uniform` numbers are given.

    NaN stays NaN in 8-bit floats and becomes 0 in every other element.
    """
    if format.is_float:
        return _encode_float(w, format, uniform)
    if format.codebook is not None:
        return _encode_codebook(w, format.codebook, format.code_dtype, uniform)
    # XLA's conversion to int8 saturates and takes NaN to 0.
    low, high = format.integer_range
    codes = jnp.maximum(round_integer(w, uniform).astype(jnp.int8), low)
    return narrow(codes if high == 127 else jnp.minimum(codes, high), format.code_dtype)


def encode_affine(w, zero, format: Format, input_dtype, uniform: jax.Array | None) -> jax.Array:
    """Integer codes of scaled values around a zero point, both float32."""
    w = _nan_to_zero(w)
    half = 2 ** (format.bits - 1)
    if format.quirks.zero_first:
        codes = round_integer(round_to(w + zero, format.arithmetic_dtype(input_dtype)), uniform)
    else:
        codes = round_integer(w, uniform) + zero
    return narrow(jnp.clip(codes, -half, half - 1).astype(jnp.int8), format.code_dtype)


def decode(codes: jax.Array, format: Format) -> jax.Array:
    """The float32 values that codes stand for, before any scale."""
    if format.codebook is not None:
        return _look_up(widen(codes), format.codebook)
    if format.is_integer or format.bits >= 8:
        return codes.astype(jnp.float32)
    return decode_float(widen(codes), format)


def narrow(codes: jax.Array, dtype: np.dtype) -> jax.Array:
    """8-bit integers as a dtype of at most 8 bits; 4-bit floats are taken as raw bits.

    Fused with other arithmetic XLA's CPU stores nibbles one at a time; behind a barrier it can pack them.
    """
    if jnp.iinfo(codes.dtype).bits == _bits(dtype):
        return codes if codes.dtype == dtype else lax.bitcast_convert_type(codes, dtype)
    codes = lax.optimization_barrier(codes)
    if jnp.issubdtype(dtype, jnp.integer):
        return codes.astype(dtype)
    return lax.bitcast_convert_type(codes.astype(jnp.uint4), dtype)


def widen(codes: jax.Array) -> jax.Array:
    """Raw bits of unsigned or 4-bit float codes as uint32.

    Under jax 0.12 XLA's CPU cannot compile the bits of a slice of 4-bit floats, as scans take them, without a barrier.
    """
    if codes.dtype == jnp.float4_e2m1fn:
        codes = lax.bitcast_convert_type(lax.optimization_barrier(codes), jnp.uint4)
    return codes.astype(jnp.uint8).astype(jnp.uint32)


def _bits(dtype: np.dtype) -> int:
    return jnp.iinfo(dtype).bits if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype).bits


def _nan_to_zero(w: jax.Array) -> jax.Array:
    return jnp.where(jnp.isnan(w), np.float32(0), w)


def _encode_float(w: jax.Array, format: Format, uniform: jax.Array | None) -> jax.Array:
    return narrow(float_code(w, format, uniform).astype(jnp.uint8), format.code_dtype)


def float_code(w: jax.Array, format: Format, uniform: jax.Array | None = None) -> jax.Array:
    """uint32 bits of the codes of a float format, by arithmetic that kernels have, too."""
    info = ml_dtypes.finfo(format.element_dtype)
    mantissa, least_field = int(info.nmant), np.uint32(127 + int(info.minexp))
    bits = bits_of(w)
    sign = (w < 0).astype(jnp.uint32) if format.quirks.unsigned_zero else bits >> 31
    in_steps, field = _in_steps(bits, format)
    code = (round_count(in_steps, uniform) + ((field - least_field) << mantissa)) | (sign << (format.bits - 1))
    nan = np.array(np.nan, format.element_dtype).view(np.uint8) if format.bits == 8 else 0
    return jnp.where(_is_nan(bits), np.uint32(nan), code)


def rounded(w: jax.Array, format: Format, uniform: jax.Array | None = None) -> jax.Array:
    """The float32 values that the codes of w stand for; NaN as in codes."""
    info = ml_dtypes.finfo(format.element_dtype)
    bits = bits_of(w)
    clipped = _clipped(bits, format)
    binade = jnp.maximum(clipped & INFINITY, np.float32(2.0 ** int(info.minexp)).view(np.uint32))
    in_steps = float_of(clipped) * float_of(np.uint32((254 + int(info.nmant)) << 23) - binade)
    value = round_float(in_steps, uniform) * (float_of(binade) * np.float32(2.0 ** -int(info.nmant)))
    nan = np.float32(np.nan).view(np.uint32) if format.bits == 8 else np.uint32(0)
    return float_of(jnp.where(_is_nan(bits), nan, bits_of(value) | (bits & SIGN)))


def _in_steps(bits: jax.Array, format: Format) -> tuple[jax.Array, jax.Array]:
    """Clipped magnitudes in units of the element's steps where they lie, and the exponent field that decides those."""
    info = ml_dtypes.finfo(format.element_dtype)
    clipped = _clipped(bits, format)
    field = jnp.maximum(clipped >> 23, np.uint32(127 + int(info.minexp)))
    return float_of(clipped) * float_of((np.uint32(254 + int(info.nmant)) - field) << 23), field


def _clipped(bits: jax.Array, format: Format) -> jax.Array:
    """Bits of magnitudes, at most those of the largest element."""
    return jnp.minimum(bits & MAGNITUDE, np.float32(ml_dtypes.finfo(format.element_dtype).max).view(np.uint32))


def _is_nan(bits: jax.Array) -> jax.Array:
    return (bits & MAGNITUDE) > np.uint32(0x7F800000)


def decode_float(bits: jax.Array, format: Format) -> jax.Array:
    """The values of a float format's codes, given as uint32 bits."""
    info = ml_dtypes.finfo(format.element_dtype)
    mantissa, minexp = int(info.nmant), int(info.minexp)
    sign_bit = format.bits - 1
    magnitude = bits & np.uint32((1 << sign_bit) - 1)
    normal = float_of((magnitude << (23 - mantissa)) + np.uint32((126 + minexp) << 23))
    subnormal = magnitude.astype(jnp.int32).astype(jnp.float32) * np.float32(2.0 ** (minexp - mantissa))
    value = jnp.where(magnitude < np.uint32(1 << mantissa), subnormal, normal)
    return float_of(bits_of(value) | ((bits << (31 - sign_bit)) & SIGN))


def _encode_codebook(w, codebook, dtype, uniform):
    """Index of the nearest entry: how many midpoints lie below, so a tie takes the lower one."""
    entries = np.array(codebook, np.float32)
    w = _nan_to_zero(w)
    if uniform is None:
        index = _count_below(w, (entries[1:] + entries[:-1]) / np.float32(2))
    else:
        w = jnp.clip(w, entries[0], entries[-1])
        below = _count_below(w, np.nextafter(entries[1:], entries[:-1]))  # entries at or below w
        per_gap = _look_up(below, (*(1 / np.diff(entries)), 0.0))
        index = below + ((w - _look_up(below, codebook)) * per_gap > uniform).astype(jnp.uint32)
    return narrow(index.astype(jnp.uint8), dtype)


def _count_below(w: jax.Array, thresholds: np.ndarray) -> jax.Array:
    """How many of the sorted thresholds lie below w, by halving: one comparison per bit of the answer."""
    levels = len(thresholds).bit_length()
    padded = np.append(thresholds, np.full(2**levels - 1 - len(thresholds), np.inf, np.float32))
    index = jnp.zeros(w.shape, jnp.uint32)
    for bit in reversed(range(levels)):
        step = 2**bit
        middle = _look_up(index >> (bit + 1), tuple(padded[step - 1 :: 2 * step]))
        index = index + jnp.where(w > middle, np.uint32(step), np.uint32(0))
    return index


def _look_up(index: jax.Array, table: tuple[float, ...]) -> jax.Array:
    """table[index] as a tree of selects, one level per bit, which vectorises where a gather does not."""
    level: list[Any] = [np.float32(v) for v in table]
    bit = 0
    while len(level) > 1:
        if len(level) % 2:
            level.append(level[-1])
        chosen = (index >> bit) & 1 == 1
        level = [jnp.where(chosen, high, low) for low, high in zip(level[::2], level[1::2], strict=True)]
        bit += 1
    return jnp.asarray(level[0])
