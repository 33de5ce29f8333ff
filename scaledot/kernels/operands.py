"""Decodes operands of a contraction, splits, broadcasts and applies their scales, and aligns biases with its result.

Arrays have labelled dims: "mk" is an array whose dims are m and k. Scales may be applied to the codes before the
contraction, to the result, or to the partial result of each K tile. For example, a (2, 16) scale of a (256, 16) operand
"kn", in blocks of 128 along k, becomes (256, 16) without tiles, (2, 16) for tiles of 128 along k, and (2, 1, 16) once
split into one entry per tile.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from scaledot.array import ScaledArray
from scaledot.contraction import Contraction
from scaledot.numerics import blocks
from scaledot.numerics.bits import flush
from scaledot.numerics.cast import QuantizedLeaves, decode_blocks, dequantize_values
from scaledot.numerics.scale import scale_values, with_trailing_axes

Tiles = dict[str, int]  # label -> elements of a tile along it


class LabeledArray(NamedTuple):
    """An array with labelled dims, such as a scale; a dim has the operand's size, size 1, or one entry per tile."""

    values: jax.Array
    labels: str

    def varies_along(self, labels) -> bool:
        return any(size > 1 for c, size in zip(self.labels, self.values.shape, strict=True) if c in labels)


class OuterProduct(NamedTuple):
    """The term rows[i] * columns[j] of a result: `rows` along the free dims of lhs, `columns` along those of rhs."""

    rows: jax.Array
    columns: jax.Array


Bias = jax.Array | OuterProduct  # added to a result; an array is along the free dims of rhs, equal for all rows


def widen_int4(q: ScaledArray) -> ScaledArray:
    """Converts int4 codes to int8; returns arrays of other codes unchanged.

    The optimisation barrier keeps XLA from fusing the conversion: under jax 0.11.2 on a GPU, a float32 matmul with a
    fused int4 (256, 16) operand and its scales returned zeros.
    """
    if q.data.dtype != jnp.int4:
        return q
    return dataclasses.replace(q, data=lax.optimization_barrier(q.data.astype(jnp.int8)))


def unscaled_values(q: ScaledArray, dtype) -> jax.Array:
    """Returns decoded codes minus their zero points, with no scale applied."""
    return _decode(q).astype(dtype)


def block_scaled_values(q: ScaledArray, dtype) -> jax.Array:
    """Returns codes times their block scales, without the tensor scale."""
    values = _decode(q)
    for scale in scale_values(q.scale, None, q.format):
        values = values * blocks.repeat_scale(scale, values.shape, q.block)
    return flush(values).astype(dtype)


def _decode(q: ScaledArray) -> jax.Array:
    values = decode_blocks(widen_int4(q).data, q.scale, q.format, q.block)
    if q.zero is None:
        return values
    return values - blocks.repeat_scale(q.zero.astype(jnp.float32), values.shape, q.block)


def dequantized_values(q: ScaledArray, dtype, unrotate: bool) -> jax.Array:
    """Returns codes times all their scales; `unrotate`: with the Hadamard rotation undone."""
    parts = QuantizedLeaves(widen_int4(q).data, q.scale, q.tensor_scale, q.zero)
    return dequantize_values(parts, q.format, q.block, q.rotation if unrotate else None).astype(dtype)


def block_scales(q: ScaledArray, labels: str, tiles: Tiles) -> list[LabeledArray]:
    """Returns the block scale broadcast over its blocks; along tiled labels it has one entry per tile."""
    return [LabeledArray(_broadcast_blocks(f, q, labels, tiles), labels) for f in scale_values(q.scale, None, q.format)]


def tensor_scales(q: ScaledArray, labels: str) -> list[LabeledArray]:
    """Returns the tensor scale, in a list that is empty if there is none."""
    return [] if q.tensor_scale is None else [LabeledArray(with_trailing_axes(q.tensor_scale, q.ndim), labels)]


def zero_points(q: ScaledArray, labels: str, tiles: Tiles) -> LabeledArray | None:
    """Returns the zero point as int32, with the dims of the block scale, or None if there is none."""
    if q.zero is None:
        return None
    return LabeledArray(_broadcast_blocks(q.zero.astype(jnp.int32), q, labels, tiles), labels)


def _broadcast_blocks(grid: jax.Array, q: ScaledArray, labels: str, tiles: Tiles) -> jax.Array:
    """Broadcasts one entry per block to one per element; along tiled labels to one per tile."""
    shape, block = [], []
    for label, size, b in zip(labels, q.shape, blocks.expand(q.block, q.ndim), strict=True):
        tile = tiles.get(label, 1)
        shape.append(-(-size // tile))
        block.append(b // tile)
    return blocks.repeat_scale(grid, tuple(shape), tuple(block))


def apply_scales(total: jax.Array, lhs: list[jax.Array], rhs: list[jax.Array]) -> jax.Array:
    """Multiplies a result by the scales of both operands, which broadcast against it.

    The smaller one of the two last scales is applied first: with scales of 1e37 and 1e-20 the result may be in range,
    but not its product with 1e37.
    """
    scales = [*lhs[:-1], *rhs[:-1], *lhs[-1:], *rhs[-1:]]
    if lhs and rhs:
        scales[-2:] = jnp.minimum(lhs[-1], rhs[-1]), jnp.maximum(lhs[-1], rhs[-1])
    for scale in scales:
        total = total * scale.astype(total.dtype)
    return total


def align_to(scale: LabeledArray, out: str) -> jax.Array:
    """Returns a scale that broadcasts against a result with labels `out`; dims with other labels must have size 1."""
    shared = [c for c in scale.labels if c in out]
    values = jnp.squeeze(scale.values, tuple(a for a, c in enumerate(scale.labels) if c not in out))
    values = values.transpose(sorted(range(len(shared)), key=lambda a: out.index(shared[a])))
    return jnp.expand_dims(values, tuple(a for a, c in enumerate(out) if c not in shared))


def aligned_bias(bias: Bias, contraction: Contraction, dtype) -> jax.Array:
    """Returns a bias in `dtype` that broadcasts against the result of the contraction."""
    rows, columns = bias if isinstance(bias, OuterProduct) else (None, bias)
    columns = align_to(LabeledArray(columns.astype(dtype), contraction.rhs_free), contraction.out)
    if rows is None:
        return columns
    return align_to(LabeledArray(rows.astype(dtype), contraction.lhs_free), contraction.out) * columns


def split_tiles(values: jax.Array, labels: str, tiles: Tiles) -> jax.Array:
    """Splits an operand into tiles along a new leading dim; a short last tile is padded with zeros."""
    padding = [-size % tiles.get(c, 1) for c, size in zip(labels, values.shape, strict=True)]
    if any(padding):
        values = jnp.pad(values, [(0, after) for after in padding])
    shape: list[int] = []
    count_axes: list[int] = []
    for c, size in zip(labels, values.shape, strict=True):
        count_axes += [len(shape)] if c in tiles else []
        shape += [size // tiles[c], tiles[c]] if c in tiles else [size]
    return _merge_to_front(values.reshape(shape), count_axes)


def split_scale(scale: LabeledArray, tiles: Tiles, counts: dict[str, int]) -> jax.Array:
    """Splits a scale into one entry per tile along a new leading dim; dims with tiled labels remain, with size 1.

    counts: the number of tiles along each tiled label.
    """
    full = [counts.get(c, size) for c, size in zip(scale.labels, scale.values.shape, strict=True)]
    remaining = [1 if c in tiles else size for c, size in zip(scale.labels, full, strict=True)]
    broadcast = jnp.broadcast_to(scale.values, full)
    merged = _merge_to_front(broadcast, [a for a, c in enumerate(scale.labels) if c in tiles])
    return merged.reshape(merged.shape[0], *remaining)


def pad_to_multiples(x: jax.Array, rows: int, columns: int) -> jax.Array:
    """Pads a matrix with zeros to a multiple of `rows` rows and of `columns` columns."""
    padding = (0, -x.shape[0] % rows), (0, -x.shape[1] % columns)
    return jnp.pad(x, padding) if any(after for _, after in padding) else x


def _merge_to_front(x: jax.Array, axes: list[int]) -> jax.Array:
    """Moves dims to the front and merges them into one."""
    moved = jnp.moveaxis(x, axes, range(len(axes)))
    return moved.reshape(math.prod(moved.shape[: len(axes)]), *moved.shape[len(axes) :])
