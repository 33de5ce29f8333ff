"""Block geometry: which elements share a scale.

A block is a tuple aligned to the trailing axes, as in broadcasting: entry 0 means the whole axis, missing
leading entries mean 1. The scale of an array of shape (d0, d1, ...) has the same rank and
ceil(d / block) entries along each axis; a last block may be short.
"""

import math
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from scaledot.parallel.types import check_blocks, explicit_axes, reshape_sharded

Block = tuple[int, ...]


def trim(block: Sequence[int]) -> Block:
    """The canonical form, without leading ones, so that equal blocks compare equal."""
    block = tuple(block)
    while block and block[0] == 1:
        block = block[1:]
    return block


def expand(block: Block, ndim: int) -> Block:
    """One entry per axis."""
    return (1,) * (ndim - len(block)) + tuple(block)


def block_on_axes(block: Block | None, axis: int | tuple[int, ...], ndim: int) -> Block:
    """The block of a format laid on an array: its last entry lies on `axis`, the others left of it."""
    if block is None:
        return (0,) * ndim
    axes = _axes_of(block, axis, ndim)
    laid = [1] * ndim
    for size, a in zip(block, axes, strict=True):
        laid[a] = size
    return trim(laid)


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
    """Raise unless every axis is cut into whole blocks."""
    for axis, (size, b) in enumerate(zip(shape, expand(block, len(shape)), strict=True)):
        if b > 1 and size % b:
            padded = math.ceil(size / b) * b
            fits = max(d for d in range(1, min(b, size) + 1) if size % d == 0)
            raise ValueError(
                f"cannot cut axis {axis - len(shape)} of {size} into blocks of {b}; pass pad=True "
                f"(counts as {padded}), pad the array, or use a `block` of {fits} there"
            )


def whole(size: int, block: int) -> bool:
    """Whether one block covers the axis."""
    return block == 0 or block >= size > 0


def grid(shape: tuple[int, ...], block: Block) -> tuple[int, ...]:
    """The shape of the scale."""
    sizes = zip(shape, expand(block, len(shape)), strict=True)
    return tuple(1 if b == 0 else -(-size // b) for size, b in sizes)


def split(x: jax.Array, block: Block) -> tuple[jax.Array, tuple[int, ...]]:
    """x with each cut axis turned into (blocks, inside), zero-padded at its end; and the inside axes."""
    pads, shape, spec, inside = [], [], [], []
    for axis, (size, b) in enumerate(zip(x.shape, expand(block, x.ndim), strict=True)):
        over = explicit_axes(x, axis)
        if b == 1:
            pads.append((0, 0))
            shape.append(size)
            spec.append(over)
            continue
        count, b = (1, size) if whole(size, b) else (-(-size // b), b)
        if count > 1:
            check_blocks(x, axis, b)
        pads.append((0, count * b - size))
        inside.append(len(shape) + 1)
        shape += [count, b]
        spec += [None, over] if count == 1 else [over, None]
    if any(after for _, after in pads):
        x = jnp.pad(x, pads)
    return reshape_sharded(x, shape, spec), tuple(inside)


def spread(scale: jax.Array, shape: tuple[int, ...], block: Block) -> jax.Array:
    """The scale repeated over its blocks, as an array that broadcasts against `shape`; axes of 1 are left alone."""
    inner, outer, merged, spec = [], [], [], []
    for axis, (count, b) in enumerate(zip(scale.shape, expand(block, len(shape)), strict=True)):
        repeats = [b] if count > 1 and b > 1 else []
        inner += [count, *(1 for _ in repeats)]
        outer += [count, *repeats]
        merged.append(count * math.prod(repeats))
        spec += [explicit_axes(scale, axis), *(None for _ in repeats)]
    if outer == list(scale.shape):
        return scale
    spread_out = jnp.broadcast_to(reshape_sharded(scale, inner, spec), outer)
    repeated = reshape_sharded(spread_out, merged, [explicit_axes(scale, axis) for axis in range(scale.ndim)])
    cut = tuple(slice(0, size) if m > size else slice(None) for m, size in zip(merged, shape, strict=True))
    return repeated[cut]
