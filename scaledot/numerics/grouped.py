"""The cast of a matrix whose rows come in groups, each as if it were alone.

Group sizes may be traced, so the number of row blocks is not known before the data: every row looks up the block
it belongs to, and scales are stored per row.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scaledot.numerics import calibrate
from scaledot.numerics.cast import CastSpec, Parts, anywhere, calibrated_scales, cast, prepare
from scaledot.numerics.rounding import uniform_of
from scaledot.numerics.scale import scales_of, scales_or_nan


def quantize_grouped_parts(
    spec: CastSpec, x: jax.Array, group_sizes: jax.Array, row_block: int, key=None, uniform=None
) -> Parts:
    """A matrix whose rows come in groups; `spec.block` is that of one row, scales are stored per row."""
    group, segment, count = group_rows(group_sizes, x.shape[0], row_block)
    inside = (group < group_sizes.shape[0])[:, None]
    x = jnp.where(inside, prepare(spec, x), np.float32(0))
    uniform = uniform if key is None else uniform_of(key, x.shape)

    def largest(amax: jax.Array) -> jax.Array:
        return _segment_amax(jnp.max(amax, axis=1, initial=0), group, group_sizes.shape[0] + 1)

    if row_block == 1:
        return cast(spec, x, calibrated_scales(spec, x, largest=largest), uniform)
    row_amax, levels = calibrate.block_amax, scales_of
    if spec.nonfinite == "nan_scales":
        row_amax, levels = calibrate.block_amax_or_inf, scales_or_nan
    amax = _segment_amax(row_amax(x, spec.block), segment, count)
    amax = anywhere(amax, spec.amax_axes) if 0 in spec.block else amax
    tensor_amax = None
    if spec.format.two_level:
        tensor_amax = anywhere(largest(calibrate.block_amax(x, spec.block)), spec.amax_axes)
    return cast(spec, x, levels(amax, spec.format, spec.input_dtype, None, tensor_amax), uniform)


def quantize_tiles_parts(spec: CastSpec, x: jax.Array, group: jax.Array, groups: int, key=None, uniform=None) -> Parts:
    """An array (tiles, rows, features) whose tiles belong to groups; the tensor scale has one entry per tile."""
    x = prepare(spec, x)
    uniform = uniform if key is None else uniform_of(key, x.shape)

    def largest(amax: jax.Array) -> jax.Array:
        return _segment_amax(jnp.max(amax, axis=(1, 2), initial=0), group, groups)

    return cast(spec, x, calibrated_scales(spec, x, largest=largest), uniform)


def group_of(sizes: jax.Array, rows: int) -> jax.Array:
    """The group of each row; as many as there are groups for rows past the last."""
    return group_rows(sizes, rows, 0)[0]


def first_rows(sizes: jax.Array, rows: int) -> jax.Array:
    """The first row of each group."""
    return jnp.minimum(jnp.cumsum(sizes) - sizes, rows - 1)


def members(x: jax.Array, sizes: jax.Array) -> jax.Array:
    """x with zeros in rows of no group."""
    inside = jnp.arange(x.shape[0]) < jnp.sum(sizes)
    return jnp.where(inside[:, None], x, jnp.zeros_like(x))


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


def _segment_amax(amax: jax.Array, segment: jax.Array, count: int) -> jax.Array:
    """For each row the largest entry of its segment."""
    largest = jax.ops.segment_max(amax, segment, num_segments=count)
    return jnp.maximum(largest, 0)[segment]


def whole_groups(group_sizes: Any, row_alignment: int) -> Any:
    """Sizes rounded up to multiples."""
    return -(-group_sizes // row_alignment) * row_alignment


def padded_capacity(rows: int, groups: int, row_alignment: int) -> int:
    """How many rows there can be when sizes are rounded up to multiples."""
    return whole_groups(rows + min(groups, rows) * (row_alignment - 1), row_alignment)


def row_tiles(group_sizes: jax.Array, rows: int, row_alignment: int) -> jax.Array:
    """The first row of every tile of `row_alignment` rows, and how many of them belong to a group; int32 (tiles, 2).

    >>> row_tiles(jnp.array([3, 2]), rows=8, row_alignment=4)
    Array([[0, 4],
           [4, 1]], dtype=int32)
    """
    first = row_alignment * jnp.arange(-(-rows // row_alignment))
    return jnp.stack([first, jnp.clip(jnp.sum(group_sizes) - first, 0, row_alignment)], axis=1).astype(jnp.int32)


def aligned_row_tiles(group_sizes: jax.Array, rows: int, row_alignment: int) -> jax.Array:
    """The same for the result of `spaced`, by the rows that they are before: every group begins with a strip.

    >>> aligned_row_tiles(jnp.array([3, 2]), rows=5, row_alignment=4)
    Array([[0, 3],
           [3, 2],
           [0, 0]], dtype=int32)
    """
    count = group_sizes.shape[0]
    pieces = -(-group_sizes // row_alignment)
    index = jnp.arange(padded_capacity(rows, count, row_alignment) // row_alignment)
    group = group_rows(pieces, index.size, 0)[0]
    sizes, starts, before = (
        jnp.append(each, 0)
        for each in (group_sizes, jnp.cumsum(group_sizes) - group_sizes, jnp.cumsum(pieces) - pieces)
    )
    within = (index - before[group]) * row_alignment
    taken = jnp.clip(sizes[group] - within, 0, row_alignment)
    return jnp.stack([jnp.where(taken > 0, starts[group] + within, 0), taken], axis=1).astype(jnp.int32)


def spaced(x: jax.Array, group_sizes: jax.Array, row_alignment: int) -> jax.Array:
    """Rows moved so that every group starts at a multiple of `row_alignment`, with zeros between.

    How many rows there will be is not known before the data; the result has room for the worst case.
    """
    if row_alignment == 1:
        return x
    count, whole = group_sizes.shape[0], whole_groups(group_sizes, row_alignment)
    worst = padded_capacity(x.shape[0], count, row_alignment)
    group = group_rows(whole, worst, 0)[0]
    starts, targets = (jnp.append(jnp.cumsum(s) - s, 0) for s in (group_sizes, whole))
    within = jnp.arange(worst, dtype=targets.dtype) - targets[group]
    valid = (group < count) & (within < jnp.append(group_sizes, 0)[group])
    return jnp.where(valid[:, None], x[jnp.where(valid, starts[group] + within, 0)], jnp.zeros((), x.dtype))
