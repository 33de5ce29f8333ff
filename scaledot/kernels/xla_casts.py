"""The reference casts, compiled by XLA: every cast on every device.

Row groups are cast as if each were an array of its own. With blocks along features, each row is cast independently.
With blocks or rotations down the rows, these must not straddle groups, whose sizes are known only at run time: rows are
first moved so that each group starts at a multiple of the block, with zeros between groups. For example, groups of 3
and 5 rows in blocks of 4 are moved to rows 0 to 2 and 4 to 8 of an array of padded size. A scale of a whole group (per
tensor or per channel, or the tensor scale of a two-level format) is stored per group (`layouts.PerGroup`).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from scaledot.array import ScaledArray
from scaledot.kernels.layouts import PerGroup
from scaledot.kernels.spec import CastArguments, CastOutput, CastProblem, CastResult
from scaledot.numerics import blocks
from scaledot.numerics.cast import CastSpec, QuantizedLeaves, quantize_leaves, subtract_mean
from scaledot.numerics.grouped import (
    align_groups,
    aligned_group_sizes,
    first_rows,
    group_of,
    quantize_grouped_leaves,
    quantize_tiles_leaves,
    rows_of_groups,
    zero_ungrouped_rows,
)
from scaledot.numerics.rounding import uniform_of

# Jitted, so that all problems with equal CastSpecs and shapes share one trace.
_quantize = jax.jit(quantize_leaves, static_argnums=0)
_quantize_grouped = jax.jit(quantize_grouped_leaves, static_argnums=(0, 3))
_quantize_tiles = jax.jit(quantize_tiles_leaves, static_argnums=(0, 3))


def problem_reason(problem: CastProblem) -> str | None:
    """Returns None: the reference supports every problem."""
    return None


def describe(problem: CastProblem) -> str:
    casts = len({output.codes_key for output in problem.outputs})
    return f"{casts} cast{'s' if casts > 1 else ''} in float32 and integer arithmetic, fused by XLA"


def run(problem: CastProblem, x: jax.Array, arguments: CastArguments) -> CastResult:
    arrays: dict[tuple[CastSpec, int | None, int | None], Any] = {}
    for output in problem.outputs:
        if output.codes_key not in arrays:
            arrays[output.codes_key] = _cast(problem, output, x, arguments)
    return CastResult(tuple(arrays[output.codes_key] for output in problem.outputs))


def _cast(problem: CastProblem, output: CastOutput, x: jax.Array, arguments: CastArguments) -> Any:
    if problem.groups is not None:
        return _cast_groups(problem, output, x, arguments)
    if arguments.mean is not None:  # before the padding, whose elements stay 0
        x = subtract_mean(x, arguments.mean)
    x, spec = padded(x, output.spec), output.spec
    key, uniform = arguments.key(output), arguments.uniform(output)
    if key is not None and arguments.offset is not None:
        key, uniform = None, uniform_of(key, x.shape, problem.row_length, arguments.offset)
    scales = arguments.scale, arguments.tensor_scale, arguments.zero, arguments.multiplier
    parts = _quantize(spec, x, *scales, uniform, key, arguments.signs_of(output))
    return scaled_array(spec, parts)


def scaled_array(spec: CastSpec, parts: QuantizedLeaves) -> ScaledArray:
    return ScaledArray(*parts, format=spec.format, block=spec.block, dtype=spec.dtype, rotation=spec.rotation)


def padded(x: jax.Array, spec: CastSpec) -> jax.Array:
    """Pads the rotated dim, which is contracted, with zeros to a multiple of the rotation's size."""
    rotation = spec.rotation
    if rotation is None or not x.shape[rotation.axis] % rotation.size:
        return x
    padding = [(0, 0)] * x.ndim
    padding[rotation.axis] = (0, -x.shape[rotation.axis] % rotation.size)
    return jnp.pad(x, padding)


def _cast_groups(
    problem: CastProblem, output: CastOutput, x: jax.Array, arguments: CastArguments
) -> PerGroup | ScaledArray:
    spec, multiple = output.spec, problem.group_multiple
    assert arguments.group_sizes is not None
    if arguments.mean is not None:  # before groups are aligned: rows of no group, and those between groups, stay 0
        x = subtract_mean(x, rows_of_groups(arguments.mean, arguments.group_sizes, x.shape[0]))
    x, sizes = align_groups(x, arguments.group_sizes, multiple), aligned_group_sizes(arguments.group_sizes, multiple)
    key, uniform = arguments.key(output), arguments.uniform(output)
    if arguments.multiplier is not None and arguments.multiplier.size > 1:
        return _cast_with_group_multipliers(output, x, sizes, arguments)
    if arguments.multiplier is not None:
        parts = _quantize(
            spec, zero_ungrouped_rows(x, sizes), multiplier=arguments.multiplier, uniform=uniform, key=key
        )
        return scaled_array(spec, parts)
    row_block, features = blocks.expand(spec.block, 2)
    is_along_features = output.contracted != 0 or (row_block == features == 0 and spec.rotation is None)
    if row_block and not is_along_features:
        return _cast_down_rows(spec, x, sizes, multiple, key, uniform, arguments.signs_of(output))
    along = dataclasses.replace(spec, block=blocks.trim((1, features)))
    signs = arguments.signs_of(output)
    q = scaled_array(along, _quantize_grouped(along, padded(x, spec), sizes, row_block, key, uniform, signs))
    return q if row_block or output.contracted is None else _per_group(q, sizes)


def _cast_with_group_multipliers(
    output: CastOutput, x: jax.Array, sizes: jax.Array, arguments: CastArguments
) -> PerGroup | ScaledArray:
    """Casts each row with the quantisation multiplier of its group, one of (groups, 1)."""
    assert arguments.multiplier is not None
    group = jnp.minimum(group_of(sizes, x.shape[0]), sizes.shape[0] - 1)
    spec = dataclasses.replace(output.spec, block=(0,))  # one scale for each row
    key, uniform = arguments.key(output), arguments.uniform(output)
    x, multiplier = zero_ungrouped_rows(x, sizes), arguments.multiplier[group]
    q = scaled_array(spec, _quantize(spec, x, multiplier=multiplier, uniform=uniform, key=key))
    return q if output.contracted is None else _per_group(q, sizes)


def _per_group(q: ScaledArray, sizes: jax.Array) -> PerGroup:
    """Moves scales that all rows of a group share into an array with one entry per group."""
    scale = q.scale[first_rows(sizes, q.shape[0])]  # an empty group reads the scale of another group, which may be NaN
    scale = jnp.where((sizes > 0)[:, None], scale, jnp.ones_like(scale))
    return PerGroup(dataclasses.replace(q, scale=jnp.ones((1, 1), q.scale.dtype), block=(0, 0)), scale)


def _cast_down_rows(
    spec: CastSpec, x: jax.Array, sizes: jax.Array, multiple: int, key, uniform, signs
) -> PerGroup | ScaledArray:
    """Casts with blocks down the rows, of which each block of `multiple` rows belongs to one group."""
    tiles = x.reshape(-1, multiple, x.shape[1])
    group = group_of(sizes // multiple, tiles.shape[0])
    uniform = None if uniform is None else uniform.reshape(tiles.shape)
    parts = _quantize_tiles(spec, tiles, group, sizes.shape[0] + 1, key, uniform, signs)
    flat = parts._replace(
        data=parts.data.reshape(x.shape), scale=parts.scale.reshape(-1, parts.scale.shape[-1]), tensor_scale=None
    )
    q = scaled_array(spec, flat)
    if parts.tensor_scale is None:
        return q
    scale = parts.tensor_scale[first_rows(sizes // multiple, tiles.shape[0])][:, None]
    return PerGroup(dataclasses.replace(q, tensor_scale=jnp.ones((), jnp.float32)), scale)
