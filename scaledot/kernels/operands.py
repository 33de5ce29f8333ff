"""Operands on their way into a product, and scales on their way onto its result."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from scaledot.array import ScaledArray
from scaledot.numerics import blocks
from scaledot.numerics.bits import flush
from scaledot.numerics.cast import QuantizedLeaves, dequantize_values
from scaledot.numerics.encode import decode
from scaledot.numerics.scale import scale_values, with_trailing_axes

Tiles = dict[str, int]  # label -> elements of one tile along it


class LabeledScale(NamedTuple):
    """What a product is multiplied by: one axis per label, of full size, of size 1, or with one entry per tile."""

    values: jax.Array
    labels: str

    def varies(self, labels) -> bool:
        return any(size > 1 for c, size in zip(self.labels, self.values.shape, strict=True) if c in labels)


def unpacked(q: ScaledArray) -> ScaledArray:
    """The array with 4-bit integers as bytes.

    Behind a barrier, because XLA's GPU has miscompiled products that unpack them inside: under jax 0.11.2 a float32
    product with an int4 (256, 16) times its scales came out as zeros.
    """
    if q.data.dtype != jnp.int4:
        return q
    return dataclasses.replace(q, data=lax.optimization_barrier(q.data.astype(jnp.int8)))


def code_values(q: ScaledArray, dtype) -> jax.Array:
    """Codes, less their zero point, without any scale."""
    return _codes(q).astype(dtype)


def block_values(q: ScaledArray, dtype) -> jax.Array:
    """Codes times their block scales; the tensor scale is left for the result."""
    values = _codes(q)
    for factor in scale_values(q.scale, None, q.format):
        values = values * blocks.repeat_scale(factor, values.shape, q.block)
    return flush(values).astype(dtype)


def _codes(q: ScaledArray) -> jax.Array:
    values = decode(unpacked(q).data, q.format)
    if q.zero is None:
        return values
    return values - blocks.repeat_scale(q.zero.astype(jnp.float32), values.shape, q.block)


def all_values(q: ScaledArray, dtype, unrotate: bool) -> jax.Array:
    """Codes times all their scales."""
    parts = QuantizedLeaves(unpacked(q).data, q.scale, q.tensor_scale, q.zero)
    return dequantize_values(parts, q.format, q.block, q.rotation if unrotate else None).astype(dtype)


def block_scales(q: ScaledArray, labels: str, tiles: Tiles) -> list[LabeledScale]:
    """The block scale, spread over its blocks; along tiled labels it has one entry per tile."""
    return [LabeledScale(_spread(f, q, labels, tiles), labels) for f in scale_values(q.scale, None, q.format)]


def tensor_scales(q: ScaledArray, labels: str) -> list[LabeledScale]:
    """The tensor scale."""
    return [] if q.tensor_scale is None else [LabeledScale(with_trailing_axes(q.tensor_scale, q.ndim), labels)]


def zero_points(q: ScaledArray, labels: str, tiles: Tiles) -> LabeledScale | None:
    """The zero point as int32, laid out as the block scale is."""
    return None if q.zero is None else LabeledScale(_spread(q.zero.astype(jnp.int32), q, labels, tiles), labels)


def _spread(grid: jax.Array, q: ScaledArray, labels: str, tiles: Tiles) -> jax.Array:
    """A grid of blocks as full axes; along a tiled label as tiles, which blocks consist of."""
    shape, block = [], []
    for label, size, b in zip(labels, q.shape, blocks.expand(q.block, q.ndim), strict=True):
        tile = tiles.get(label, 1)
        shape.append(-(-size // tile))
        block.append(b // tile)
    return blocks.repeat_scale(grid, tuple(shape), tuple(block))


def scaled(total: jax.Array, lhs: list[jax.Array], rhs: list[jax.Array]) -> jax.Array:
    """A result times the factors of both sides, which are laid on it.

    A result of ordinary size can have one operand near 1e37 and the other near 1e-20: the smaller scale goes first, or
    the product would pass through infinity on the way.
    """
    factors = [*lhs[:-1], *rhs[:-1], *lhs[-1:], *rhs[-1:]]
    if lhs and rhs:
        factors[-2:] = jnp.minimum(lhs[-1], rhs[-1]), jnp.maximum(lhs[-1], rhs[-1])
    for factor in factors:
        total = total * factor.astype(total.dtype)
    return total


def lay(factor: LabeledScale, out: str) -> jax.Array:
    """A factor as an array that broadcasts against a result with labels `out`; other axes must have size 1."""
    kept = [c for c in factor.labels if c in out]
    values = jnp.squeeze(factor.values, tuple(a for a, c in enumerate(factor.labels) if c not in out))
    values = values.transpose(sorted(range(len(kept)), key=lambda a: out.index(kept[a])))
    return jnp.expand_dims(values, tuple(a for a, c in enumerate(out) if c not in kept))


def cut(values: jax.Array, labels: str, tiles: Tiles) -> jax.Array:
    """The tiles of an operand along a new leading axis; a short last one is filled with zeros."""
    short = [-size % tiles.get(c, 1) for c, size in zip(labels, values.shape, strict=True)]
    if any(short):
        values = jnp.pad(values, [(0, missing) for missing in short])
    shape: list[int] = []
    counts: list[int] = []
    for c, size in zip(labels, values.shape, strict=True):
        counts += [len(shape)] if c in tiles else []
        shape += [size // tiles[c], tiles[c]] if c in tiles else [size]
    return _merge_front(values.reshape(shape), counts)


def tile_scales(factor: LabeledScale, tiles: Tiles, counts: dict[str, int]) -> jax.Array:
    """The entries of a factor for each tile along a new leading axis; along tiled labels it keeps axes of 1."""
    full = [counts.get(c, size) for c, size in zip(factor.labels, factor.values.shape, strict=True)]
    left = [1 if c in tiles else size for c, size in zip(factor.labels, full, strict=True)]
    spread = jnp.broadcast_to(factor.values, full)
    merged = _merge_front(spread, [a for a, c in enumerate(factor.labels) if c in tiles])
    return merged.reshape(merged.shape[0], *left)


def filled_up(x: jax.Array, rows: int, columns: int) -> jax.Array:
    """A matrix with zeros at its ends, up to multiples of so many rows and columns."""
    missing = (0, -x.shape[0] % rows), (0, -x.shape[1] % columns)
    return jnp.pad(x, missing) if any(more for _, more in missing) else x


def _merge_front(x: jax.Array, axes: list[int]) -> jax.Array:
    moved = jnp.moveaxis(x, axes, range(len(axes)))
    return moved.reshape(math.prod(moved.shape[: len(axes)]), *moved.shape[len(axes) :])
