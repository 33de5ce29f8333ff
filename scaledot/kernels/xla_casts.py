"""Casts as programs that XLA compiles: the reference, which makes every cast on every device.

Rows in groups are cast as if each group were alone. Along features that needs nothing new. Down the rows, blocks and
rotations must not straddle groups whose sizes are known only at run time: rows are first moved so that every group
starts at a whole block, with zeros between. What is one number for a whole group (a scale per tensor or per channel,
the tensor scale of a two-level format) is kept per group, beside the codes (`layouts.PerGroup`).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from scaledot.array import ScaledArray
from scaledot.kernels.layouts import PerGroup
from scaledot.kernels.spec import CastArguments, CastProblem, CastResult, View
from scaledot.numerics import blocks
from scaledot.numerics.cast import CastSpec, Parts, quantize_parts
from scaledot.numerics.grouped import (
    first_rows,
    group_of,
    members,
    pad_groups,
    quantize_grouped_parts,
    quantize_tiles_parts,
    whole_groups,
)
from scaledot.numerics.rounding import uniform_of

# Traced once per Plan and shape, however many problems have that cast.
_quantize = jax.jit(quantize_parts, static_argnums=0)
_quantize_grouped = jax.jit(quantize_grouped_parts, static_argnums=(0, 3))
_quantize_tiles = jax.jit(quantize_tiles_parts, static_argnums=(0, 3))


def problem_reason(problem: CastProblem) -> str | None:
    return None


def how(problem: CastProblem) -> str:
    casts = len({(view.spec, view.key) for view in problem.views})
    return f"{casts} cast{'s' if casts > 1 else ''} in float32 and integer arithmetic, fused by XLA"


def run(problem: CastProblem, x: jax.Array, given: CastArguments) -> CastResult:
    made: dict[tuple[CastSpec, int | None], Any] = {}
    for view in problem.views:
        if (view.spec, view.key) not in made:
            made[view.spec, view.key] = _cast(problem, view, x, given)
    return CastResult(tuple(made[view.spec, view.key] for view in problem.views))


def _cast(problem: CastProblem, view: View, x: jax.Array, given: CastArguments) -> Any:
    if problem.groups is not None:
        return _cast_groups(problem, view, x, given)
    x, spec = padded(x, view.spec), view.spec
    key, uniform = given.key(view), given.uniform(view)
    if key is not None and given.offset is not None:
        key, uniform = None, uniform_of(key, x.shape, problem.row_length, given.offset)
    parts = _quantize(spec, x, given.scale, given.tensor_scale, given.zero, given.multiplier, uniform, key)
    return scaled_array(spec, parts)


def scaled_array(spec: CastSpec, parts: Parts) -> ScaledArray:
    return ScaledArray(*parts, format=spec.format, block=spec.block, dtype=spec.dtype, rotation=spec.rotation)


def padded(x: jax.Array, spec: CastSpec) -> jax.Array:
    """Zeros at the end of the rotated axis, up to whole groups of the rotation; they add nothing to what is summed."""
    rotation = spec.rotation
    if rotation is None or not x.shape[rotation.axis] % rotation.size:
        return x
    missing = [(0, 0)] * x.ndim
    missing[rotation.axis] = (0, -x.shape[rotation.axis] % rotation.size)
    return jnp.pad(x, missing)


def _cast_groups(problem: CastProblem, view: View, x: jax.Array, given: CastArguments) -> PerGroup | ScaledArray:
    spec, multiple = view.spec, problem.group_multiple
    assert given.group_sizes is not None
    x, sizes = pad_groups(x, given.group_sizes, multiple), whole_groups(given.group_sizes, multiple)
    key, uniform = given.key(view), given.uniform(view)
    if given.multiplier is not None:
        parts = _quantize(spec, members(x, sizes), multiplier=given.multiplier, uniform=uniform, key=key)
        return scaled_array(spec, parts)
    row_block, features = blocks.expand(spec.block, 2)
    is_along_features = view.contracted != 0 or (row_block == features == 0 and spec.rotation is None)
    if row_block and not is_along_features:
        return _cast_down_rows(spec, x, sizes, multiple, key, uniform)
    along = dataclasses.replace(spec, block=blocks.trim((1, features)))
    q = scaled_array(along, _quantize_grouped(along, padded(x, spec), sizes, row_block, key, uniform))
    return q if row_block or view.contracted is None else _per_group(q, sizes)


def _per_group(q: ScaledArray, sizes: jax.Array) -> PerGroup:
    """Scales that all rows of a group share, once for each group."""
    scale = q.scale[first_rows(sizes, q.shape[0])]  # a group without rows has found that of another, which may be NaN
    scale = jnp.where((sizes > 0)[:, None], scale, jnp.ones_like(scale))
    return PerGroup(dataclasses.replace(q, scale=jnp.ones((1, 1), q.scale.dtype), block=(0, 0)), scale)


def _cast_down_rows(
    spec: CastSpec, x: jax.Array, sizes: jax.Array, multiple: int, key, uniform
) -> PerGroup | ScaledArray:
    """Blocks that run down rows which come in whole blocks of one group."""
    tiles = x.reshape(-1, multiple, x.shape[1])
    group = group_of(sizes // multiple, tiles.shape[0])
    uniform = None if uniform is None else uniform.reshape(tiles.shape)
    parts = _quantize_tiles(spec, tiles, group, sizes.shape[0] + 1, key, uniform)
    flat = parts._replace(
        data=parts.data.reshape(x.shape), scale=parts.scale.reshape(-1, parts.scale.shape[-1]), tensor_scale=None
    )
    q = scaled_array(spec, flat)
    if parts.tensor_scale is None:
        return q
    scale = parts.tensor_scale[first_rows(sizes // multiple, tiles.shape[0])][:, None]
    return PerGroup(dataclasses.replace(q, tensor_scale=jnp.ones((), jnp.float32)), scale)
