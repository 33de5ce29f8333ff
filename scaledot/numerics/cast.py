"""The cast itself: calibrate, scale, round. From one array to codes and scales, and back.

A Plan is everything about a cast that is known before data: hashable, so that it is the static argument of
one jitted function, and eager calls and calls under a user's jit run the same program.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scaledot.formats import Format
from scaledot.hashing import hash_once
from scaledot.numerics import blocks, calibrate
from scaledot.numerics.bits import computed_once, divide, flush
from scaledot.numerics.calibrate import Calibration
from scaledot.numerics.encode import decode, encode, encode_affine, narrow
from scaledot.numerics.hadamard import Hadamard, rotate, unrotate
from scaledot.numerics.rounding import round_to, uniform_of
from scaledot.numerics.scale import (
    Scales,
    scale_values,
    scales_from_given,
    scales_from_multiplier,
    scales_of,
    with_nan,
    zero_point,
)

# Clipping factors that `mse` tries, largest first so that a tie clips least.
_MSE_GRID = np.linspace(1.0, 0.2, 41, dtype=np.float32)
_FOUR_OVER_SIX = np.array([1.0, 1.5], np.float32)


@hash_once
@dataclasses.dataclass(frozen=True)
class CastSpec:
    """A cast, before data.

    amax_axes: those of a surrounding shard_map over which a whole axis or tensor is split.
    nonfinite: how NaN and infinities are stored; a scale that is finite follows from finite elements alone.
    "saturate": infinities as the largest code, NaN as NaN in 8-bit floats and as 0 in every other element.
    "nan_codes": both as NaN, which takes an 8-bit float. "nan_scales": by a NaN scale of the block that holds them.
    """

    format: Format
    block: blocks.Block
    input_dtype: np.dtype
    dtype: np.dtype  # what the result stands for
    calibration: Calibration
    rotation: Hadamard | None = None
    amax_axes: tuple[str, ...] = ()
    nonfinite: str = "saturate"


class Parts(NamedTuple):
    """The leaves of a ScaledArray."""

    data: jax.Array
    scale: jax.Array
    tensor_scale: jax.Array | None
    zero: jax.Array | None


def quantize_parts(
    spec: CastSpec, x: jax.Array, scale=None, tensor_scale=None, zero=None, multiplier=None, uniform=None, key=None
) -> Parts:
    """Codes and scales of x; scales that are given are used as they are."""
    x = prepare(spec, x)
    if key is not None:
        uniform = uniform_of(key, x.shape)
    if spec.calibration.is_range:
        low, high = calibrate.extremes(x, spec.calibration, spec.block)
        levels, zero = zero_point(low, high, spec.format, spec.input_dtype)
        return _cast_affine(spec, x, _marked(spec, x, levels), zero, uniform)
    if scale is not None:
        levels = _marked(spec, x, scales_from_given(scale, spec.format, tensor_scale))
        if zero is not None:
            return _cast_affine(spec, x, levels, zero.astype(jnp.float32), uniform)
    elif multiplier is not None:
        levels = _marked(spec, x, scales_from_multiplier(multiplier))
    else:
        levels = calibrated_scales(spec, x, tensor_scale)
    return cast(spec, x, levels, uniform)


def prepare(spec: CastSpec, x: jax.Array) -> jax.Array:
    """float32, rotated, without subnormals, and without infinities where they become NaN codes."""
    x = flush(x.astype(jnp.float32))
    x = x if spec.rotation is None else rotate(x, spec.rotation)
    return jnp.where(jnp.isinf(x), np.float32(np.nan), x) if spec.nonfinite == "nan_codes" else x


def cast(spec: CastSpec, x: jax.Array, levels: Scales, uniform: jax.Array | None) -> Parts:
    """Codes of a prepared array under scales that are already decided."""
    codes = encode(_scaled(spec, x, levels), spec.format, uniform)
    return Parts(codes, levels.scale, levels.tensor_scale, None)


def dequantize_values(parts: Parts, format: Format, block: blocks.Block, rotation: Hadamard | None) -> jax.Array:
    """The float32 values that codes and scales stand for; subnormal ones are 0 on every backend."""
    values = decode(parts.data, format)
    if parts.zero is not None:
        values = values - blocks.spread(parts.zero.astype(jnp.float32), values.shape, block)
    for multiplier in scale_values(parts.scale, parts.tensor_scale, format):
        values = values * blocks.spread(computed_once(multiplier), values.shape, block)
    if rotation is not None:
        return unrotate(flush(values), rotation)
    # A whole number times a scale, which is normal, is never subnormal.
    return values if format.is_integer else flush(values)


def _largest(amax: jax.Array) -> jax.Array:
    return jnp.max(amax, initial=0)


def anywhere(amax: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The largest of all devices along some mesh axes."""
    return lax.pmax(amax, axes) if axes else amax


def calibrated_scales(spec: CastSpec, x: jax.Array, tensor_scale=None, largest=_largest) -> Scales:
    """Scales of a prepared array; `largest` gives the tensor's magnitude from those of blocks."""
    amax, spoilt = _magnitudes(spec, x)
    tensor_amax = None
    if spec.format.two_level and tensor_scale is None:
        tensor_amax = anywhere(largest(amax), spec.amax_axes)

    def levels(magnitude: jax.Array) -> Scales:
        return scales_of(magnitude, spec.format, spec.input_dtype, tensor_scale, tensor_amax)

    if spec.calibration.method == "mse":
        amax = _search(spec, x, amax, levels, _MSE_GRID)
    if spec.format.search == "four_over_six":
        amax = _search(spec, x, amax, levels, _FOUR_OVER_SIX)
    return levels(amax) if spoilt is None else with_nan(levels(amax), spoilt)


def _magnitudes(spec: CastSpec, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """The magnitude that each block's codes must reach, and which blocks get a NaN scale; None for none of them.

    One reduction gives both where the magnitude is the largest one: that of a block with a NaN scale does not matter,
    unless the scale of the tensor follows from it.
    """
    if spec.nonfinite != "nan_scales":
        return _shared(spec, calibrate.magnitude(x, spec.calibration, spec.block)), None
    largest = _largest_or_inf(spec, x)
    if spec.calibration == Calibration("absmax") and not spec.format.two_level:
        return largest, largest == np.float32(np.inf)
    amax = _shared(spec, calibrate.magnitude(x, spec.calibration, spec.block))
    return amax, largest == np.float32(np.inf)


def _marked(spec: CastSpec, x: jax.Array, levels: Scales) -> Scales:
    """Levels that do not follow from the magnitudes of x, with a NaN scale for the blocks that get one."""
    if spec.nonfinite != "nan_scales":
        return levels
    return with_nan(levels, _largest_or_inf(spec, x) == np.float32(np.inf))


def _largest_or_inf(spec: CastSpec, x: jax.Array) -> jax.Array:
    return _shared(spec, calibrate.block_amax_or_inf(x, spec.block))


def _shared(spec: CastSpec, amax: jax.Array) -> jax.Array:
    """Magnitudes of blocks, of all devices where a block is a whole axis that is split over them."""
    return anywhere(amax, spec.amax_axes) if 0 in spec.block else amax


def _search(spec: CastSpec, x, amax, levels, candidates: np.ndarray) -> jax.Array:
    """amax times the candidate whose codes give each block the smallest squared error; the first wins a tie."""
    # Errors in units of the block maximum, so that squares neither overflow nor vanish.
    unit = blocks.spread(divide(np.float32(1), jnp.maximum(amax, np.float32(2.0**-100))), x.shape, spec.block)

    def step(best, candidate):
        parts = cast(spec, x, levels(amax * candidate), None)
        error = x - dequantize_values(parts, spec.format, spec.block, None)
        error = jnp.where(jnp.isfinite(x), error, 0) * unit
        error = calibrate.block_sum(error * error, spec.block)
        least, chosen = best
        return (jnp.minimum(least, error), jnp.where(error < least, candidate, chosen)), None

    best = (jnp.full_like(amax, np.inf), jnp.ones_like(amax))
    # Few candidates are unrolled, so that XLA fuses their casts; many would make the program long.
    (_, chosen), _ = lax.scan(step, best, jnp.asarray(candidates), unroll=len(candidates) <= 4)
    return amax * chosen


def _scaled(spec: CastSpec, x: jax.Array, levels: Scales) -> jax.Array:
    """x in units of the element's grid."""
    if levels.divisor is not None:
        x = divide(x, blocks.spread(levels.divisor, x.shape, spec.block))
        return round_to(x, spec.format.arithmetic_dtype(spec.input_dtype))
    for multiplier in levels.multipliers:
        x = x * blocks.spread(computed_once(multiplier), x.shape, spec.block)
    return x


def _cast_affine(spec: CastSpec, x: jax.Array, levels: Scales, zero: jax.Array, uniform: jax.Array | None) -> Parts:
    """Integer codes around a zero point that is already decided."""
    around = blocks.spread(zero, x.shape, spec.block)
    codes = encode_affine(_scaled(spec, x, levels), around, spec.format, spec.input_dtype, uniform)
    return Parts(codes, levels.scale, None, narrow(zero.astype(jnp.int8), spec.format.code_dtype))
