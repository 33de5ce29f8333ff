"""Block geometry: which elements share a scale.

A block is a tuple aligned to the trailing axes, as in broadcasting: an entry of 0 is the whole axis, missing leading
entries are 1. The scale of an array of shape (d0, d1, ...) has the same rank and ceil(d / block) entries along each
axis; the last block of an axis may be short. For example, an array (8, 200, 256) with block (128, 0) has scales of
shape (8, 2, 1), and the second block of axis 1 has 72 elements.
"""

import math
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from scaledot.parallel.types import check_blocks, explicit_axes, reshape_sharded

Block = tuple[int, ...]


def trim(block: Sequence[int]) -> Block:
    """Removes leading ones, so that equivalent blocks compare equal."""
    block = tuple(block)
    while block and block[0] == 1:
        block = block[1:]
    return block


def expand(block: Block, ndim: int) -> Block:
    """The block with one entry per axis, by prepending ones."""
    return (1,) * (ndim - len(block)) + tuple(block)


def block_on_axes(block: Block | None, axis: int | tuple[int, ...], ndim: int) -> Block:
    """The block of an array with `ndim` axes for a format's `block`: its last entry on `axis`, the others before it.

    `axis` may also be a tuple that names the axis of each entry. None is one block for the whole array.
    """
    if block is None:
        return (0,) * ndim
    axes = _axes_of(block, axis, ndim)
    entries = [1] * ndim
    for size, a in zip(block, axes, strict=True):
        entries[a] = size
    return trim(entries)


def _axes_of(block: Block, axis: int | tuple[int, ...], ndim: int) -> tuple[int, ...]:
    if isinstance(axis, tuple):
        if len(axis) != len(block):
            raise ValueError(f"`axis` {axis} names {len(axis)} axes but `block` {block} has {len(block)} entries")
        axes = tuple(positive_axis(a, ndim) for a in axis)
    else:
        last = positive_axis(axis, ndim)
        axes = tuple(range(last - len(block) + 1, last + 1))
        if axes and axes[0] < 0:
            raise ValueError(
                f"`block` {block} has {len(block)} entries ending at `axis` {axis}, but the array has {ndim} axes; "
                f"use an `axis` of at least {len(block) - 1}"
            )
    if len(set(axes)) != len(axes):
        raise ValueError(f"`axis` {axis} names the same axis of a {ndim}-d array twice")
    return axes


def positive_axis(axis: int, ndim: int) -> int:
    try:
        axis = operator.index(axis)
    except TypeError:
        raise TypeError(f"`axis` must be an integer, not {axis!r}") from None
    if not -ndim <= axis < ndim:
        raise ValueError(f"`axis` {axis} is out of range for an array with {ndim} axes")
    return axis % ndim


def check_divides(shape: tuple[int, ...], block: Block) -> None:
    """Raises ValueError unless every axis is a multiple of its block entry."""
    for axis, (size, b) in enumerate(zip(shape, expand(block, len(shape)), strict=True)):
        if b > 1 and size % b:
            padded = math.ceil(size / b) * b
            divisor = max(d for d in range(1, min(b, size) + 1) if size % d == 0)
            raise ValueError(
                f"cannot cut axis {axis - len(shape)} of {size} into blocks of {b}; pass pad=True "
                f"(counts as {padded}), pad the array, or use a `block` of {divisor} there"
            )


def covers_axis(size: int, block: int) -> bool:
    """Whether one block covers an axis of `size` elements."""
    return block == 0 or block >= size > 0


def grid(shape: tuple[int, ...], block: Block) -> tuple[int, ...]:
    """The number of blocks along each axis: the shape of the scale."""
    sizes = zip(shape, expand(block, len(shape)), strict=True)
    return tuple(1 if b == 0 else -(-size // b) for size, b in sizes)


def split(x: jax.Array, block: Block) -> tuple[jax.Array, tuple[int, ...]]:
    """Reshapes each axis of n elements with block entry b > 1 to (ceil(n / b), b), zero-padded at its end.

    Returns the array and its within-block axes, those of size b. An array (4, 100) with block (32,) becomes
    (4, 4, 32), with within-block axes (2,).
    """
    pads, shape, spec, within_axes = [], [], [], []
    for axis, (size, b) in enumerate(zip(x.shape, expand(block, x.ndim), strict=True)):
        mesh_axes = explicit_axes(x, axis)
        if b == 1:
            pads.append((0, 0))
            shape.append(size)
            spec.append(mesh_axes)
            continue
        count, b = (1, size) if covers_axis(size, b) else (-(-size // b), b)
        if count > 1:
            check_blocks(x, axis, b)
        pads.append((0, count * b - size))
        within_axes.append(len(shape) + 1)
        shape += [count, b]
        spec += [None, mesh_axes] if count == 1 else [mesh_axes, None]
    if any(after for _, after in pads):
        x = jnp.pad(x, pads)
    return reshape_sharded(x, shape, spec), tuple(within_axes)


def repeat_scale(scale: jax.Array, shape: tuple[int, ...], block: Block) -> jax.Array:
    """Repeats each scale over its block, giving an array that broadcasts against `shape`; axes of size 1 are kept."""
    unrepeated, repeated_shape, merged, spec = [], [], [], []
    for axis, (count, b) in enumerate(zip(scale.shape, expand(block, len(shape)), strict=True)):
        repeats = [b] if b > 1 and count > 1 else []  # in this order, `count` may be symbolic if b is 1
        unrepeated += [count, *(1 for _ in repeats)]
        repeated_shape += [count, *repeats]
        merged.append(count * math.prod(repeats))
        spec += [explicit_axes(scale, axis), *(None for _ in repeats)]
    if repeated_shape == list(scale.shape):
        return scale
    repeated = jnp.broadcast_to(reshape_sharded(scale, unrepeated, spec), repeated_shape)
    repeated = reshape_sharded(repeated, merged, [explicit_axes(scale, axis) for axis in range(scale.ndim)])
    return repeated[tuple(slice(0, size) if m > size else slice(None) for m, size in zip(merged, shape, strict=True))]
