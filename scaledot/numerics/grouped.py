"""Quantisation of a ragged matrix, whose rows are partitioned into groups, such as the tokens of each expert.

Every group is quantised as if it were an array of its own. Group sizes may be traced, so the number of row blocks is
not static: each row looks up the block it belongs to, and scales are stored per row. For example, with row blocks of 4
and `group_sizes` [3, 2], rows 0 to 2 form one block, rows 3 and 4 another, and later rows belong to no group.

wgrad contracts over the rows of each group. For it `align_groups` pads groups to multiples of `row_alignment` rows, so
that neither blocks nor K tiles span two groups; `aligned_row_tiles` describes the same layout without moving rows.
"""

from typing import Any

import jax
import jax.numpy as jnp

from scaledot.numerics import calibrate
from scaledot.numerics.cast import (
    CastSpec,
    QuantizedLeaves,
    all_reduce_max,
    calibrated_scales,
    cast,
    prepare,
    tensor_amax_from,
    uniforms,
)
from scaledot.numerics.scale import scales_of, scales_or_nan


def quantize_grouped_leaves(
    spec: CastSpec, x: jax.Array, group_sizes: jax.Array, row_block: int, key=None, uniform=None, signs=None
) -> QuantizedLeaves:
    """Quantises a matrix (rows, features) by groups of rows, in blocks of `row_block` rows (0: the whole group).

    Returns the leaves of a ScaledArray. Scales, and tensor scales of two-level formats, have one entry per row. Rows of
    no group are quantised as zeros.

    spec.block is the block within one row.
    key, uniform: stochastic rounding takes a key or, if it is None, random numbers in [0, 1) in the shape of x. If both
    are None, codes are rounded to nearest. signs: those of a rotation that draws them.
    """
    group, row_block_index, count = group_rows(group_sizes, x.shape[0], row_block)
    in_group = (group < group_sizes.shape[0])[:, None]
    x, source = prepare(spec, jnp.where(in_group, x, jnp.zeros((), x.dtype)), signs)
    uniform = uniforms(spec, x, key, uniform)

    def group_amax(block_amax: jax.Array) -> jax.Array:
        return _segment_amax(jnp.max(block_amax, axis=1, initial=0), group, group_sizes.shape[0] + 1)

    if row_block == 1:
        return cast(spec, x, calibrated_scales(spec, x, tensor_amax_of=group_amax, source=source), uniform)
    row_amax, scales_from = calibrate.block_amax, scales_of
    if spec.nonfinite == "nan_scales":
        row_amax, scales_from = calibrate.block_amax_or_inf, scales_or_nan
    amax = _segment_amax(row_amax(x, spec.block), row_block_index, count)
    amax = all_reduce_max(amax, spec.amax_axes) if 0 in spec.block else amax
    tensor_amax = None
    if spec.format.two_level:
        tensor_amax = tensor_amax_from(spec, calibrate.block_amax(x, spec.block), source, group_amax)
    return cast(spec, x, scales_from(amax, spec.format, spec.input_dtype, None, tensor_amax), uniform)


def quantize_tiles_leaves(
    spec: CastSpec, x: jax.Array, group: jax.Array, groups: int, key=None, uniform=None, signs=None
) -> QuantizedLeaves:
    """Quantises an array (tiles, rows, features), tile i of which belongs to group[i] of `groups`.

    Returns the leaves of a ScaledArray. Scales have one entry per block of `spec.block`, which may be several rows of a
    tile. The tensor scale of a two-level format has one entry per tile, computed from the amax of the tile's group.

    key, uniform, signs: as in `quantize_grouped_leaves`.
    """
    (x, source), uniform = prepare(spec, x, signs), uniforms(spec, x, key, uniform)

    def group_amax(block_amax: jax.Array) -> jax.Array:
        return _segment_amax(jnp.max(block_amax, axis=(1, 2), initial=0), group, groups)

    return cast(spec, x, calibrated_scales(spec, x, tensor_amax_of=group_amax, source=source), uniform)


def clipped_sizes(group_sizes: jax.Array, rows: int) -> jax.Array:
    """Returns group sizes clipped so that no group ends after the last row, as in `jax.lax.ragged_dot`.

    >>> clipped_sizes(jnp.array([3, 2, 1]), 4)
    Array([3, 1, 0], dtype=int32)
    """
    ends = jnp.minimum(jnp.cumsum(group_sizes, axis=-1, dtype=jnp.int32), rows)
    return jnp.diff(ends, axis=-1, prepend=jnp.zeros_like(ends[..., :1]))


def group_of(sizes: jax.Array, rows: int) -> jax.Array:
    """The group index of each row; the number of groups for rows after the last group."""
    return group_rows(sizes, rows, 0)[0]


def rows_of_groups(values: jax.Array, sizes: jax.Array, rows: int) -> jax.Array:
    """For each of `rows` rows, the row of values (groups, features) of its group; zeros for rows of no group."""
    return jnp.append(values, jnp.zeros_like(values[:1]), axis=0)[group_of(sizes, rows)]


def first_rows(sizes: jax.Array, rows: int) -> jax.Array:
    """The first row of each group, at most rows - 1."""
    return jnp.minimum(jnp.cumsum(sizes) - sizes, rows - 1)


def zero_ungrouped_rows(x: jax.Array, sizes: jax.Array) -> jax.Array:
    """Replaces the rows of x that belong to no group by zeros."""
    in_group = jnp.arange(x.shape[0]) < jnp.sum(sizes)
    return jnp.where(in_group[:, None], x, jnp.zeros_like(x))


def group_rows(group_sizes: jax.Array, rows: int, row_block: int) -> tuple[jax.Array, jax.Array, int]:
    """The group index and the row-block index of each row, and an upper bound of the number of row blocks.

    Row blocks start anew in each group. The group index is the number of groups for rows after the last group.
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
    """The maximum over the segment of each row, for each row."""
    largest = jax.ops.segment_max(amax, segment, num_segments=count)
    return jnp.maximum(largest, 0)[segment]


def aligned_group_sizes(group_sizes: Any, row_alignment: int) -> Any:
    """Group sizes rounded up to multiples of `row_alignment`."""
    return -(-group_sizes // row_alignment) * row_alignment


def padded_capacity(rows: int, groups: int, row_alignment: int) -> int:
    """An upper bound of the sum of `aligned_group_sizes` for `groups` groups of at most `rows` rows in total.

    It is a multiple of `row_alignment`, and exceeds the largest possible sum by at most one `row_alignment`.
    """
    return aligned_group_sizes(rows + min(groups, rows) * (row_alignment - 1), row_alignment)


def row_tiles(group_sizes: jax.Array, rows: int, tile_rows: int) -> jax.Array:
    """int32 (tiles, 2): the first row of each tile of `tile_rows` rows, and how many of its rows are in a group.

    >>> row_tiles(jnp.array([3, 2]), rows=8, tile_rows=4)
    Array([[0, 4],
           [4, 1]], dtype=int32)
    """
    first = tile_rows * jnp.arange(-(-rows // tile_rows))
    return jnp.stack([first, jnp.clip(jnp.sum(group_sizes) - first, 0, tile_rows)], axis=1).astype(jnp.int32)


def aligned_row_tiles(group_sizes: jax.Array, rows: int, row_alignment: int) -> jax.Array:
    """`row_tiles` of the layout of `align_groups`, in which every group starts a tile of `row_alignment` rows.

    rows: the number of rows before that padding. First rows are indices into the unpadded matrix, and 0 for the tiles
    after those of the last group.

    >>> aligned_row_tiles(jnp.array([3, 2]), rows=5, row_alignment=4)
    Array([[0, 3],
           [3, 2],
           [0, 0]], dtype=int32)
    """
    count = group_sizes.shape[0]
    tile_counts = -(-group_sizes // row_alignment)
    tile = jnp.arange(padded_capacity(rows, count, row_alignment) // row_alignment)
    group = group_rows(tile_counts, tile.size, 0)[0]
    sizes, first_row, first_tile = (
        jnp.append(each, 0)
        for each in (group_sizes, jnp.cumsum(group_sizes) - group_sizes, jnp.cumsum(tile_counts) - tile_counts)
    )
    within = (tile - first_tile[group]) * row_alignment
    rows_in_tile = jnp.clip(sizes[group] - within, 0, row_alignment)
    first = jnp.where(rows_in_tile > 0, first_row[group] + within, 0)
    return jnp.stack([first, rows_in_tile], axis=1).astype(jnp.int32)


def align_groups(x: jax.Array, group_sizes: jax.Array, row_alignment: int) -> jax.Array:
    """Pads every group with rows of zeros, so that it starts at a multiple of `row_alignment`.

    The padded number of rows depends on `group_sizes`, which may be traced; the result has `padded_capacity` rows.
    """
    if row_alignment == 1:
        return x
    count, padded_sizes = group_sizes.shape[0], aligned_group_sizes(group_sizes, row_alignment)
    capacity = padded_capacity(x.shape[0], count, row_alignment)
    group = group_rows(padded_sizes, capacity, 0)[0]
    source, target = (jnp.append(jnp.cumsum(sizes) - sizes, 0) for sizes in (group_sizes, padded_sizes))
    within = jnp.arange(capacity, dtype=target.dtype) - target[group]
    valid = (group < count) & (within < jnp.append(group_sizes, 0)[group])
    return jnp.where(valid[:, None], x[jnp.where(valid, source[group] + within, 0)], jnp.zeros((), x.dtype))
