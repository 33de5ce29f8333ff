"""Quantisation of one array to codes and scales, and back: rotate, calibrate, compute scales, encode.

A CastSpec has everything about a cast except the data. It is hashable and the static argument of one jitted function,
so that eager calls and calls under a user's jit run the same arithmetic.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scaledot.formats import Format
from scaledot.hashing import hash_once
from scaledot.numerics import bits, blocks, calibrate, eden
from scaledot.numerics.bits import computed_once, divide, flush
from scaledot.numerics.calibrate import Calibration
from scaledot.numerics.encode import decode, encode, encode_affine, narrow
from scaledot.numerics.hadamard import Hadamard, rotate, unrotate
from scaledot.numerics.rounding import Key, flushed_float32, round_to, uniform_of
from scaledot.numerics.scale import (
    Candidate,
    Scales,
    is_second_grid,
    scale_values,
    scales_from_multiplier,
    scales_from_stored,
    scales_of,
    with_nan,
    zero_point,
)
from scaledot.numerics.scale_search import LARGEST_ERROR, candidates_of, fraction_bits, squared_error

# Factors of the amax that calibration "mse" tries. The largest comes first: of equal errors, it clips least.
_MSE_CANDIDATES = np.linspace(1.0, 0.2, 41, dtype=np.float32)
_CANDIDATE_DTYPES = (np.int32, np.int32, np.float32)  # of the fields of Candidate


@hash_once
@dataclasses.dataclass(frozen=True)
class CastSpec:
    """The static parameters of a cast.

    dtype: the dtype of the resulting ScaledArray, which `dequantize` returns.
    amax_axes: mesh axes of a surrounding shard_map that shard a block of a whole axis or tensor; amax is all-reduced
        over them.
    eden: codes are rounded to nearest, and block scales are corrected and rounded stochastically (`numerics.eden`).
    nonfinite: how NaN and infinities are encoded. Finite scales are computed from finite elements only.
        "saturate": infinities as the largest code; NaN as NaN in 8-bit floats, as 0 in other elements.
        "nan_codes": both as NaN codes, for 8-bit floats only.
        "nan_scales": by a NaN scale for the block that contains them.
    """

    format: Format
    block: blocks.Block
    input_dtype: np.dtype
    dtype: np.dtype
    calibration: Calibration
    rotation: Hadamard | None = None
    amax_axes: tuple[str, ...] = ()
    nonfinite: str = "saturate"
    eden: bool = False


class QuantizedLeaves(NamedTuple):
    """The leaves of a ScaledArray."""

    data: jax.Array
    scale: jax.Array
    tensor_scale: jax.Array | None
    zero: jax.Array | None


def quantize_leaves(
    spec: CastSpec,
    x: jax.Array,
    scale=None,
    tensor_scale=None,
    zero=None,
    multiplier=None,
    uniform=None,
    key=None,
    signs=None,
) -> QuantizedLeaves:
    """Quantises x. `scale` (with `tensor_scale`, `zero`) or `multiplier` replace the computed scales.

    Stochastic rounding takes a `key` or, if it is None, `uniform` numbers in [0, 1) in the shape of x. signs: those of
    a rotation that draws them.
    """
    (x, source), uniform = prepare(spec, x, signs), uniforms(spec, x, key, uniform)
    if spec.calibration.is_range:
        low, high = calibrate.extremes(x, spec.calibration, spec.block)
        scales, zero = zero_point(low, high, spec.format, spec.input_dtype)
        return _cast_affine(spec, x, _mark_nonfinite(spec, x, scales), zero, uniform)
    if scale is not None:
        scales = _mark_nonfinite(spec, x, scales_from_stored(scale, spec.format, tensor_scale))
        if zero is not None:
            return _cast_affine(spec, x, scales, zero.astype(jnp.float32), uniform)
    elif multiplier is not None:
        scales = _mark_nonfinite(spec, x, scales_from_multiplier(multiplier))
    else:
        scales = calibrated_scales(spec, x, tensor_scale, source=source)
    return cast(spec, x, scales, uniform)


class Prepared(NamedTuple):
    """An array to cast, and the one whose amax determines its tensor scale; None: the same array."""

    x: jax.Array
    source: jax.Array | None


def prepare(spec: CastSpec, x: jax.Array, signs: jax.Array | None = None) -> Prepared:
    """Converts x to float32, flushes subnormals, rotates, and replaces infinities by NaN for "nan_codes".

    The tensor scale of a rotation with drawn `signs` follows from the amax before the rotation, see `bounded_amax`.
    """
    unrotated = x = flushed_float32(x)
    x = x if spec.rotation is None else rotate(x, spec.rotation, signs)
    x = jnp.where(jnp.isinf(x), np.float32(np.nan), x) if spec.nonfinite == "nan_codes" else x
    return Prepared(x, None if signs is None else unrotated)


def bounded_amax(amax: jax.Array, rotation: Hadamard) -> jax.Array:
    """An upper bound of the amax after a rotation: the bound of a group with a single element other than 0.

    Casts with drawn signs use it for their tensor scale, because the amax itself would take another pass of rotations
    over the tensor, and all casts of a tensor then share one amax. A tensor scale that is too large by a few powers of
    two changes nothing but the smallest block scales, of which E4M3 has 17 octaves.
    """
    return jnp.minimum(amax * np.float32(rotation.size**0.5), bits.FLOAT32_MAX)


def subtract_mean(x: jax.Array, mean: jax.Array) -> jax.Array:
    """x - mean in float32, not rounded to the dtype of x; subnormals of both and of the result are flushed."""
    return flush(flushed_float32(x) - flush(mean))


def uniforms(spec: CastSpec, x: jax.Array, key: Key | None, uniform: jax.Array | None) -> jax.Array | None:
    """The random numbers of a cast of x: one for each element, or with `eden` for each block; None without any.

    uniform: numbers in the shape of x, if the caller has them instead of a key.
    """
    if key is not None:
        return eden.scale_uniforms(key, x.shape, spec.block) if spec.eden else uniform_of(key, x.shape)
    return eden.first_of_blocks(uniform, spec.block) if spec.eden and uniform is not None else uniform


def cast(spec: CastSpec, x: jax.Array, scales: Scales, uniform: jax.Array | None) -> QuantizedLeaves:
    """Quantises an array from `prepare` with the given scales; uniform: from `uniforms`."""
    grid = _second_grid_mask(scales.scale, spec.format, x.shape, spec.block)
    scaled = _scaled(spec, x, scales)
    codes, scale = encode(scaled, spec.format, None if spec.eden else uniform, grid), scales.scale
    if spec.eden and uniform is not None:
        block, group = blocks.expand(spec.block, x.ndim), _rotated_group(spec, x.ndim)
        scale = eden.corrected_scale(scaled, decode(codes, spec.format, grid), scale, block, group, uniform)
    return QuantizedLeaves(codes, scale, scales.tensor_scale, None)


def _rotated_group(spec: CastSpec, ndim: int) -> blocks.Block:
    """The block of elements that are rotated together."""
    assert spec.rotation is not None
    group = list(blocks.expand(spec.block, ndim))
    group[spec.rotation.axis] = spec.rotation.size
    return tuple(group)


def decode_blocks(codes: jax.Array, scale: jax.Array, format: Format, block: blocks.Block) -> jax.Array:
    """Decodes codes to float32, without scales; with `grids`, the sign of the block scale says in which."""
    return decode(codes, format, _second_grid_mask(scale, format, codes.shape, block))


def _second_grid_mask(scale: jax.Array, format: Format, shape: tuple[int, ...], block: blocks.Block) -> Any:
    return None if format.grids is None else blocks.repeat_scale(is_second_grid(scale), shape, block)


def dequantize_values(
    leaves: QuantizedLeaves, format: Format, block: blocks.Block, rotation: Hadamard | None
) -> jax.Array:
    """The dequantised values in float32; subnormals are flushed to 0 on every backend."""
    values = decode_blocks(leaves.data, leaves.scale, format, block)
    if format.quirks.unsigned_zero:
        values = jnp.where(values == 0, np.float32(0), values)
    if leaves.zero is not None:
        values = values - blocks.repeat_scale(leaves.zero.astype(jnp.float32), values.shape, block)
    for multiplier in scale_values(leaves.scale, leaves.tensor_scale, format):
        values = values * blocks.repeat_scale(computed_once(multiplier), values.shape, block)
    if rotation is not None:
        return unrotate(flush(values), rotation)
    # An integer times one scale, which is a normal number, is never subnormal.
    return values if format.is_integer and format.scale in ("float32", "input") else flush(values)


def _tensor_amax(block_amax: jax.Array) -> jax.Array:
    return jnp.max(block_amax, initial=0)


def all_reduce_max(amax: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The maximum over all devices along some mesh axes of a shard_map."""
    return lax.pmax(amax, axes) if axes else amax


def tensor_amax_from(spec: CastSpec, block_amax: jax.Array, source: jax.Array | None, amax_of) -> jax.Array:
    """The amax for a tensor scale; amax_of computes it from the amaxes of blocks, of `source` if that is not None."""
    if source is None:
        return all_reduce_max(amax_of(block_amax), spec.amax_axes)
    assert spec.rotation is not None
    of_blocks = calibrate.block_amax(source, spec.block)
    return bounded_amax(all_reduce_max(amax_of(of_blocks), spec.amax_axes), spec.rotation)


def calibrated_scales(
    spec: CastSpec, x: jax.Array, tensor_scale=None, tensor_amax_of=_tensor_amax, source: jax.Array | None = None
) -> Scales:
    """Scales of an array from `prepare`; `tensor_amax_of` computes the amax of the tensor from those of blocks."""
    amax, is_nonfinite = _block_magnitudes(spec, x)
    tensor_amax = None
    if spec.format.two_level and tensor_scale is None:
        tensor_amax = tensor_amax_from(spec, amax, source, tensor_amax_of)

    def scales_for(magnitude: jax.Array, candidate: Candidate | None = None) -> Scales:
        return scales_of(magnitude, spec.format, spec.input_dtype, tensor_scale, tensor_amax, candidate)

    if spec.calibration.method == "mse":
        amax = _mse_amax(spec, x, amax, scales_for)
    is_searched = spec.format.search is not None or spec.format.grids is not None
    scales = _searched_scales(spec, x, amax, scales_for) if is_searched else scales_for(amax)
    return scales if is_nonfinite is None else with_nan(scales, is_nonfinite)


def _block_magnitudes(spec: CastSpec, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """The magnitude of each block that is mapped to the largest code, and a mask of blocks with NaN scales, or None.

    One reduction gives both if the magnitude is the amax: it is infinite for a block that contains NaN or infinities,
    whose scale is NaN anyway. A two-level format needs finite amaxes as well, for the tensor scale.
    """
    if spec.nonfinite != "nan_scales":
        return _over_shards(spec, calibrate.magnitude(x, spec.calibration, spec.block)), None
    amax_or_inf = _amax_or_inf(spec, x)
    if spec.calibration == Calibration("absmax") and not spec.format.two_level:
        return amax_or_inf, amax_or_inf == np.float32(np.inf)
    amax = _over_shards(spec, calibrate.magnitude(x, spec.calibration, spec.block))
    return amax, amax_or_inf == np.float32(np.inf)


def _mark_nonfinite(spec: CastSpec, x: jax.Array, scales: Scales) -> Scales:
    """Replaces the scales of blocks that contain NaN or infinities by NaN for "nan_scales"."""
    if spec.nonfinite != "nan_scales":
        return scales
    return with_nan(scales, _amax_or_inf(spec, x) == np.float32(np.inf))


def _amax_or_inf(spec: CastSpec, x: jax.Array) -> jax.Array:
    return _over_shards(spec, calibrate.block_amax_or_inf(x, spec.block))


def _over_shards(spec: CastSpec, amax: jax.Array) -> jax.Array:
    """All-reduces block amaxes if blocks are whole axes, which `amax_axes` may shard."""
    return all_reduce_max(amax, spec.amax_axes) if 0 in spec.block else amax


def _mse_amax(spec: CastSpec, x, amax, scales_for) -> jax.Array:
    """amax times the candidate that gives each block the smallest squared error; the first candidate wins a tie."""
    # Errors relative to the block amax, so that squares neither overflow nor underflow.
    unit = blocks.repeat_scale(divide(np.float32(1), jnp.maximum(amax, np.float32(2.0**-100))), x.shape, spec.block)

    def step(best, candidate):
        leaves = cast(spec, x, scales_for(amax * candidate), None)
        error = x - dequantize_values(leaves, spec.format, spec.block, None)
        error = jnp.where(jnp.isfinite(x), error, 0) * unit
        error = calibrate.block_sum(error * error, spec.block)
        least, chosen = best
        return (jnp.minimum(least, error), jnp.where(error < least, candidate, chosen)), None

    best = (jnp.full_like(amax, np.inf), jnp.ones_like(amax))
    (_, chosen), _ = lax.scan(step, best, jnp.asarray(_MSE_CANDIDATES))
    return amax * chosen


def _searched_scales(spec: CastSpec, x: jax.Array, amax: jax.Array, scales_for) -> Scales:
    """The scales, among those of `candidates_of`, that give each block the smallest squared error.

    `scales_for` computes scales from amaxes and a Candidate.
    """
    x = jnp.where(jnp.isfinite(x), x, np.float32(0))
    first, *others = candidates_of(spec.format)
    least = _candidate_error(spec, x, amax, scales_for(amax, first), first)
    chosen = Candidate(*(jnp.full(amax.shape, a, dtype) for a, dtype in zip(first, _CANDIDATE_DTYPES, strict=True)))
    for candidate in others:  # unrolled: a scan compiles in half the time, but reads x once per candidate
        error = _candidate_error(spec, x, amax, scales_for(amax, candidate), candidate)
        is_less = error < least
        fields = zip(candidate, chosen, _CANDIDATE_DTYPES, strict=True)
        chosen = Candidate(*(jnp.where(is_less, dtype(a), b) for a, b, dtype in fields))
        least = jnp.minimum(least, error)
    return scales_for(amax, chosen)


def _candidate_error(spec: CastSpec, x, amax, scales: Scales, candidate: Candidate) -> jax.Array:
    """The squared error of each block of finite x, relative to the tensor scale.

    It is infinite for a scale of 0, and for one that saturates the amax by more than `LARGEST_ERROR` codes, whose sum
    may be inexact.
    """
    grid = spec.format.grid_formats[candidate.grid]
    sizes = zip(x.shape, blocks.expand(spec.block, x.ndim), strict=True)
    squares = squared_error(_scaled(spec, x, scales), grid, fraction_bits(math.prod(b or size for size, b in sizes)))
    scale = scales.scale.astype(jnp.float32)
    # Integers, because XLA:CPU would store the float squares of all candidates before it adds them.
    error = calibrate.block_sum(squares, spec.block).astype(jnp.float32) * (scale * scale)
    largest = _scaled(dataclasses.replace(spec, block=()), amax, scales)
    is_in_range = (largest > 0) & (largest <= grid.largest_code + LARGEST_ERROR)
    return jnp.where(is_in_range, error, np.float32(np.inf))


def _scaled(spec: CastSpec, x: jax.Array, scales: Scales) -> jax.Array:
    """x / scale, before it is rounded to the element type."""
    if scales.divisor is not None:
        x = divide(x, blocks.repeat_scale(computed_once(scales.divisor), x.shape, spec.block))
        return round_to(x, spec.format.arithmetic_dtype(spec.input_dtype))
    for multiplier in scales.multipliers:
        x = x * blocks.repeat_scale(computed_once(multiplier), x.shape, spec.block)
    return x


def _cast_affine(
    spec: CastSpec, x: jax.Array, scales: Scales, zero: jax.Array, uniform: jax.Array | None
) -> QuantizedLeaves:
    """Quantises to integer codes with the given scales and zero points."""
    zero_per_element = blocks.repeat_scale(zero, x.shape, spec.block)
    codes = encode_affine(_scaled(spec, x, scales), zero_per_element, spec.format, spec.input_dtype, uniform)
    return QuantizedLeaves(codes, scales.scale, None, narrow(zero.astype(jnp.int8), spec.format.code_dtype))
