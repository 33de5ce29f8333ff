"""Collectives on plain and quantised arrays inside a shard_map.

A quantised array travels as codes, and as scales where each shard has its own. Narrow numbers travel as integers of the
same bits, two of 4 bits in a byte: not every backend has collectives for them, and XLA's for CPUs widens those of
bfloat16.

Rings go both ways around, one neighbour at a time, so that a matmul of what has arrived runs while the next shards are
on their way. They are Python loops, in which the compiler sees every hop; barriers keep it from starting all at once.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from scaledot.array import ScaledArray
from scaledot.numerics import blocks
from scaledot.parallel.divisibility import misfit
from scaledot.parallel.types import varying

Axes = tuple[str, ...]


def gathered(x: Any, axis: int, over: Axes) -> Any:
    """The shards of all devices along some mesh axes, concatenated."""
    _check_shared(x, axis, over)

    def put_together(leaf: jax.Array) -> jax.Array:
        return _as_integers(leaf, lambda bits: lax.all_gather(bits, over, axis=axis, tiled=True), widest=16)

    return _parts_mapped(x, axis, put_together)


def part(x: Any, axis: int, index: Any, count: int) -> Any:
    """One of so many equal parts of an axis; raises where these would cut blocks."""
    found = misfit(x.shape[axis], count, block_along(x, axis))
    if found is not None:
        raise ValueError(
            f"axis {axis} of {x} has {found.size} elements on each device, which cannot be cut into {count} parts of "
            f"whole blocks of {found.block}, one for each device; {found.fitting_size} would do. Shard it as the work "
            "is, or do not `overlap` along that mesh axis"
        )

    def cut(leaf: jax.Array) -> jax.Array:
        size = leaf.shape[axis] // count
        return lax.dynamic_slice_in_dim(leaf, index * size, size, axis)

    return _parts_mapped(x, axis, cut)


def block_along(x: Any, axis: int) -> int:
    """Elements of an axis that must stay together; 1 for plain arrays, and where one scale covers the whole axis."""
    return max(blocks.expand(x.block, x.ndim)[axis], 1) if isinstance(x, ScaledArray) else 1


def own_part(x: Any, axis: int, over: Axes) -> Any:
    return part(x, axis, lax.axis_index(over), math.prod(lax.axis_size(name) for name in over))


def fold_parts(step: Callable[[Any, jax.Array, Any], Any], x: Any, axis: int, over: str) -> Any:
    """`total = step(total, index of a device, its part)` over all devices' parts of an axis; total is None at first.

    A device's own part comes first, then the others from both sides. While some are used, the next are on their way,
    and no more than that: it never holds them all.
    """
    _check_shared(x, axis, (over,))
    count, place = lax.axis_size(over), lax.axis_index(over)
    total, here, ways = None, {0: x}, {1: x, -1: x}
    for distance in range(count // 2 + 1):
        ahead = (1, -1) if 2 * distance + 2 < count else (1,) if 2 * distance + 2 == count else ()
        ways = {way: _hopped(ways[way], axis, over, way) for way in ahead}
        for way, part in here.items():
            total = step(total, (place - way * distance) % count, part)
        total, ways = lax.optimization_barrier((total, ways))
        here = ways
    return total


def _hopped(x: Any, axis: int, over: str, way: int) -> Any:
    """The neighbour's shard; differentiable for a plain array."""
    return _parts_mapped(x, axis, lambda leaf: _as_integers(leaf, lambda bits: _hop(bits, over, way), widest=8))


def summed_on_the_way(term: Callable[[Any, Any], jax.Array], operands: Any, over: str) -> jax.Array:
    """The sum over devices of `term(operands, index of this device)`; each computes terms for all others, too.

    Sums travel towards the device that they are for, from the far side of the ring both ways, and every device on the
    way adds its term. A term is computed while the sum that it is added to arrives, and not before.
    """
    count, place = lax.axis_size(over), lax.axis_index(over)
    moving: dict[int, jax.Array] = {}
    for distance in range(count // 2, 0, -1):
        for way in (1, -1):
            if distance <= (count if way == 1 else count - 1) // 2:
                own = term(operands, (place + way * distance) % count)
                moving[way] = own if way not in moving else _hop(moving[way], over, way) + own
        moving, operands = lax.optimization_barrier((moving, operands))
    return sum((_hop(each, over, way) for way, each in moving.items()), start=term(operands, place))


def _hop(x: jax.Array, over: str, way: int) -> jax.Array:
    """One step of a ring: ppermute to the next device (way 1) or to the previous one (-1)."""
    count = lax.axis_size(over)
    return lax.ppermute(x, over, [(i, (i + way) % count) for i in range(count)])


def _parts_mapped(x: Any, axis: int, f: Callable[[jax.Array], jax.Array]) -> Any:
    """x with f applied to the codes and to every scale that has an entry per index or block of the axis."""
    if not isinstance(x, ScaledArray):
        return f(x)
    scale, zero = (f(leaf) if _has_own_scales(x, axis) and leaf is not None else leaf for leaf in (x.scale, x.zero))
    tensor_scale = x.tensor_scale
    if tensor_scale is not None and axis < tensor_scale.ndim:
        tensor_scale = f(tensor_scale)
    return dataclasses.replace(x, data=f(x.data), scale=scale, zero=zero, tensor_scale=tensor_scale)


def _has_own_scales(x: ScaledArray, axis: int) -> bool:
    return blocks.expand(x.block, x.ndim)[axis] != 0


def _check_shared(x: Any, axis: int, over: Axes) -> None:
    """Raise where codes would move along mesh axes and leave a scale behind that differs from device to device."""
    if not isinstance(x, ScaledArray):
        return
    staying = [] if _has_own_scales(x, axis) else [x.scale, x.zero]
    if x.tensor_scale is not None and axis >= x.tensor_scale.ndim:
        staying.append(x.tensor_scale)
    differing = [name for leaf in staying if leaf is not None for name in over if name in varying(leaf)]
    if differing:
        raise ValueError(
            f"{x} has a scale of its own on each device of {differing[0]!r}, along which its codes travel without it; "
            f"quantize with amax_axes=({differing[0]!r},), so that devices share the scale"
        )


def _as_integers(x: jax.Array, move: Callable[[jax.Array], jax.Array], widest: int) -> jax.Array:
    """The collective `move` on x, bitcast to integers if its elements have at most `widest` bits."""
    bits = (jnp.finfo if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo)(x.dtype).bits
    if bits > widest:
        return move(x)
    if bits >= 8:
        integers = lax.bitcast_convert_type(x, jnp.uint16 if bits == 16 else jnp.uint8)
        return lax.bitcast_convert_type(move(integers), x.dtype)
    if x.shape[-1] % 2:
        wide = lax.bitcast_convert_type(x, jnp.uint4).astype(jnp.uint8)
        return lax.bitcast_convert_type(move(wide).astype(jnp.uint4), x.dtype)
    pairs = lax.bitcast_convert_type(x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2), jnp.uint8)
    moved = lax.bitcast_convert_type(move(pairs), x.dtype)
    return moved.reshape(*moved.shape[:-2], moved.shape[-2] * 2)
