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
from scaledot.numerics import blocks, calibrate
from scaledot.numerics.bits import computed_once, divide, flush
from scaledot.numerics.calibrate import Calibration
from scaledot.numerics.encode import decode, encode, encode_affine, narrow
from scaledot.numerics.hadamard import Hadamard, rotate, unrotate
from scaledot.numerics.rounding import round_to, uniform_of
from scaledot.numerics.scale import Levels, levels_from_scale, levels_of, multipliers, zero_point

# Clipping factors that `mse` tries, largest first so that a tie clips least.
_MSE_GRID = np.linspace(1.0, 0.2, 41, dtype=np.float32)
_FOUR_OVER_SIX = np.array([1.0, 1.5], np.float32)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A cast, before data."""

    format: Format
    block: blocks.Block
    dtype: np.dtype
    calibration: Calibration
    rotation: Hadamard | None = None


class Parts(NamedTuple):
    """The leaves of a ScaledArray."""

    data: jax.Array
    scale: jax.Array
    tensor_scale: jax.Array | None
    zero: jax.Array | None


def quantize_parts(plan: Plan, x: jax.Array, scale=None, tensor_scale=None, key=None) -> Parts:
    """Codes and scales of x; scales that are given are used as they are."""
    input_dtype = x.dtype
    x = prepare(x, plan.rotation)
    uniform = None if key is None else uniform_of(key, x.shape)
    if plan.calibration.is_range:
        return _quantize_affine(plan, x, input_dtype, uniform)
    if scale is not None:
        levels = levels_from_scale(scale, plan.format, tensor_scale)
    else:
        levels = _calibrated_levels(plan, x, input_dtype, tensor_scale)
    return cast(plan, x, levels, input_dtype, uniform)


def prepare(x: jax.Array, rotation: Hadamard | None) -> jax.Array:
    """float32, rotated, without subnormals."""
    x = flush(x.astype(jnp.float32))
    return x if rotation is None else rotate(x, rotation)


def cast(plan: Plan, x: jax.Array, levels: Levels, input_dtype, uniform: jax.Array | None) -> Parts:
    codes = encode(_scaled(plan, x, levels, input_dtype), plan.format, uniform)
    return Parts(codes, levels.scale, levels.tensor_scale, None)


def dequantize_values(parts: Parts, format: Format, block: blocks.Block, rotation: Hadamard | None) -> jax.Array:
    """The float32 values that codes and scales stand for; subnormal ones are 0 on every backend."""
    values = decode(parts.data, format)
    if parts.zero is not None:
        values = values - blocks.spread(parts.zero.astype(jnp.float32), values.shape, block)
    for factor in multipliers(parts.scale, parts.tensor_scale, format):
        values = values * blocks.spread(computed_once(factor), values.shape, block)
    values = flush(values)
    return values if rotation is None else unrotate(values, rotation)


def _calibrated_levels(plan: Plan, x: jax.Array, input_dtype, tensor_scale) -> Levels:
    amax = calibrate.magnitude(x, plan.calibration, plan.block)
    tensor_amax = jnp.max(amax, initial=0) if plan.format.two_level and tensor_scale is None else None

    def levels(magnitude: jax.Array) -> Levels:
        return levels_of(magnitude, plan.format, input_dtype, tensor_scale, tensor_amax)

    if plan.calibration.method == "mse":
        amax = _search(plan, x, amax, levels, input_dtype, _MSE_GRID)
    if plan.format.search == "four_over_six":
        amax = _search(plan, x, amax, levels, input_dtype, _FOUR_OVER_SIX)
    return levels(amax)


def _search(plan: Plan, x, amax, levels, input_dtype, candidates: np.ndarray) -> jax.Array:
    """amax times the candidate whose codes give each block the smallest squared error; the first wins a tie."""
    # Errors in units of the block maximum, so that squares neither overflow nor vanish.
    unit = blocks.spread(divide(np.float32(1), jnp.maximum(amax, np.float32(2.0**-100))), x.shape, plan.block)

    def step(best, candidate):
        parts = cast(plan, x, levels(amax * candidate), input_dtype, None)
        error = (jnp.nan_to_num(x) - dequantize_values(parts, plan.format, plan.block, None)) * unit
        error = calibrate.block_sum(error * error, plan.block)
        least, chosen = best
        return (jnp.minimum(least, error), jnp.where(error < least, candidate, chosen)), None

    best = (jnp.full(amax.shape, np.inf, jnp.float32), jnp.ones(amax.shape, jnp.float32))
    # Few candidates are unrolled, so that XLA fuses their casts; many would make the program long.
    (_, chosen), _ = lax.scan(step, best, jnp.asarray(candidates), unroll=len(candidates) <= 4)
    return amax * chosen


def _scaled(plan: Plan, x: jax.Array, levels: Levels, input_dtype) -> jax.Array:
    """x in units of the element's grid."""
    if levels.divisor is not None:
        x = divide(x, blocks.spread(levels.divisor, x.shape, plan.block))
        return round_to(x, input_dtype) if plan.format.quirks.own_dtype else x
    for factor in levels.factors:
        x = x * blocks.spread(computed_once(factor), x.shape, plan.block)
    return x


def _quantize_affine(plan: Plan, x: jax.Array, input_dtype, uniform: jax.Array | None) -> Parts:
    low, high = calibrate.extremes(x, plan.calibration, plan.block)
    levels, zero = zero_point(low, high, plan.format, input_dtype)
    codes = encode_affine(
        _scaled(plan, x, levels, input_dtype),
        blocks.spread(zero, x.shape, plan.block),
        plan.format,
        uniform,
        input_dtype,
    )
    return Parts(codes, levels.scale, None, narrow(zero.astype(jnp.int8), plan.format.code_dtype))


def group_rows(group_sizes: jax.Array, rows: int, row_block: int) -> tuple[jax.Array, jax.Array, int]:
    """For each row its group (G where it is past the last) and the block of rows it shares scales with.

    Blocks of rows start afresh in each group; the third result bounds how many there can be.
    """
    groups = group_sizes.shape[0]
    ends = jnp.cumsum(group_sizes)
    row = jnp.arange(rows, dtype=ends.dtype)
    group = jnp.searchsorted(ends, row, side="right").astype(jnp.int32)
    if row_block == 0:
        return group, group, groups + 1
    sizes = jnp.append(group_sizes, 0)
    starts, counts = jnp.append(ends, ends[-1:]) - sizes, -(-sizes // row_block)
    bound = -(-rows // row_block) + groups + 1
    block = (jnp.cumsum(counts) - counts)[group] + (row - starts[group]) // row_block
    return group, jnp.minimum(block, bound - 1).astype(jnp.int32), bound


def quantize_grouped_parts(plan: Plan, x: jax.Array, group_sizes: jax.Array, row_block: int, key=None) -> Parts:
    """A matrix whose rows come in groups; `plan.block` is that of one row, scales are stored per row."""
    input_dtype = x.dtype
    group, segment, count = group_rows(group_sizes, x.shape[0], row_block)
    inside = (group < group_sizes.shape[0])[:, None]
    x = jnp.where(inside, prepare(x, plan.rotation), np.float32(0))
    uniform = None if key is None else uniform_of(key, x.shape)
    row_amax = calibrate.block_amax(x, plan.block)
    amax = _segment_amax(row_amax, segment, count)
    tensor_amax = None
    if plan.format.two_level:
        tensor_amax = _segment_amax(jnp.max(row_amax, axis=1, initial=0), group, group_sizes.shape[0] + 1)
    return cast(plan, x, levels_of(amax, plan.format, input_dtype, None, tensor_amax), input_dtype, uniform)


def _segment_amax(amax: jax.Array, segment: jax.Array, count: int) -> jax.Array:
    """For each row the largest entry of its segment."""
    largest = jax.ops.segment_max(amax, segment, num_segments=count)
    return jnp.maximum(largest, 0)[segment]
