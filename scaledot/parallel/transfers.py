"""Collectives on plain and quantised arrays, to be called inside a shard_map.

A quantised array is transferred as its codes, with the scales that belong to the transferred shard. Elements of at most
16 bits are bitcast to integers first, 4-bit codes two to a byte: not every backend has collectives for narrow dtypes,
and XLA's CPU backend widens collectives of bfloat16.

The rings (`fold_ring`, `ring_reduce_scatter`) are collective-permutes in both directions, one neighbour at a time, so
that the matmul of one shard overlaps the transfer of the next. They are unrolled Python loops, so that XLA schedules
every collective-permute; optimization barriers keep it from starting all of them at once.
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


def all_gather(x: Any, axis: int, over: Axes) -> Any:
    """Concatenates the shards of x along `axis` over mesh axes, on every device (`lax.all_gather(tiled=True)`)."""
    _check_scales_replicated(x, axis, over)

    def gather(leaf: jax.Array) -> jax.Array:
        return _as_integers(leaf, lambda bits: lax.all_gather(bits, over, axis=axis, tiled=True), max_bits=16)

    return _map_leaves_along(x, axis, gather)


def shard_at(x: Any, axis: int, index: Any, count: int) -> Any:
    """Shard `index` of `count` equal shards of x along an axis; raises if shards would cut blocks."""
    found = misfit(x.shape[axis], count, block_along(x, axis))
    if found is not None:
        raise ValueError(
            f"axis {axis} of {x} has {found.size} elements on each device, which cannot be cut into {count} shards of "
            f"whole blocks of {found.block}, one for each device; {found.fitting_size} would fit. Give the operand the "
            "sharding of the matmul, or do not `overlap` along that mesh axis"
        )

    def take(leaf: jax.Array) -> jax.Array:
        size = leaf.shape[axis] // count
        return lax.dynamic_slice_in_dim(leaf, index * size, size, axis)

    return _map_leaves_along(x, axis, take)


def block_along(x: Any, axis: int) -> int:
    """The block size of x along an axis; 1 for plain arrays, and where one scale covers the whole axis."""
    return max(blocks.expand(x.block, x.ndim)[axis], 1) if isinstance(x, ScaledArray) else 1


def own_shard(x: Any, axis: int, over: Axes) -> Any:
    """This device's shard along an axis of an array that is replicated over mesh axes."""
    return shard_at(x, axis, lax.axis_index(over), math.prod(lax.axis_size(name) for name in over))


def fold_ring(step: Callable[[Any, jax.Array, Any], Any], x: Any, axis: int, over: str) -> Any:
    """Folds `carry = step(carry, device index, shard of x on that device)` over all devices of a mesh axis.

    The initial carry is None. A device starts with its own shard; the others arrive around the ring from both
    directions. While `step` runs on the shards that have arrived, only the next ones are transferred, so that a device
    never holds all shards.
    """
    _check_scales_replicated(x, axis, (over,))
    count, device = lax.axis_size(over), lax.axis_index(over)
    carry, arrived, last = None, {0: x}, {1: x, -1: x}
    for distance in range(count // 2 + 1):
        directions = (1, -1) if 2 * distance + 2 < count else (1,) if 2 * distance + 2 == count else ()
        last = {direction: _permute(last[direction], axis, over, direction) for direction in directions}
        for direction, shard in arrived.items():
            carry = step(carry, (device - direction * distance) % count, shard)
        carry, last = lax.optimization_barrier((carry, last))
        arrived = last
    return carry


def _permute(x: Any, axis: int, over: str, direction: int) -> Any:
    """The shard of the neighbour on the ring; differentiable for a plain array."""

    def permute(leaf: jax.Array) -> jax.Array:
        return _as_integers(leaf, lambda bits: _ppermute(bits, over, direction), max_bits=8)

    return _map_leaves_along(x, axis, permute)


def ring_reduce_scatter(partial: Callable[[Any, Any], jax.Array], operands: Any, over: str) -> jax.Array:
    """The sum over all devices of `partial(operands, index of this device)`.

    Every device computes the partial results for all devices. Accumulators start at the far side of the ring, move in
    both directions towards the device that they belong to, and every device on the way adds its partial result, which
    it computes while the accumulator is transferred.
    """
    count, device = lax.axis_size(over), lax.axis_index(over)
    accumulators: dict[int, jax.Array] = {}
    for distance in range(count // 2, 0, -1):
        for direction in (1, -1):
            if distance <= (count if direction == 1 else count - 1) // 2:
                own = partial(operands, (device + direction * distance) % count)
                started = direction in accumulators
                accumulators[direction] = _ppermute(accumulators[direction], over, direction) + own if started else own
        accumulators, operands = lax.optimization_barrier((accumulators, operands))
    arrived = (_ppermute(accumulator, over, direction) for direction, accumulator in accumulators.items())
    return sum(arrived, start=partial(operands, device))


def _ppermute(x: jax.Array, over: str, direction: int) -> jax.Array:
    """One step of a ring: `lax.ppermute` to the next device (direction 1) or to the previous one (-1)."""
    count = lax.axis_size(over)
    return lax.ppermute(x, over, [(i, (i + direction) % count) for i in range(count)])


def _map_leaves_along(x: Any, axis: int, f: Callable[[jax.Array], jax.Array]) -> Any:
    """Applies f to the codes of x and to each scale that has several entries, or one per block, along the axis."""
    if not isinstance(x, ScaledArray):
        return f(x)
    scale, zero = (f(leaf) if _is_blocked(x, axis) and leaf is not None else leaf for leaf in (x.scale, x.zero))
    tensor_scale = x.tensor_scale
    if tensor_scale is not None and axis < tensor_scale.ndim:
        tensor_scale = f(tensor_scale)
    return dataclasses.replace(x, data=f(x.data), scale=scale, zero=zero, tensor_scale=tensor_scale)


def _is_blocked(x: ScaledArray, axis: int) -> bool:
    """Whether x has one scale per block along the axis, not one for the whole axis."""
    return blocks.expand(x.block, x.ndim)[axis] != 0


def _check_scales_replicated(x: Any, axis: int, over: Axes) -> None:
    """Raises if codes would be transferred along mesh axes without their scale, which differs between devices."""
    if not isinstance(x, ScaledArray):
        return
    not_transferred = [] if _is_blocked(x, axis) else [x.scale, x.zero]
    if x.tensor_scale is not None and axis >= x.tensor_scale.ndim:
        not_transferred.append(x.tensor_scale)
    differing = [name for leaf in not_transferred if leaf is not None for name in over if name in varying(leaf)]
    if differing:
        raise ValueError(
            f"{x} has a different scale on each device of {differing[0]!r}, along which its codes are transferred "
            f"without it; quantize with amax_axes=({differing[0]!r},), so that all devices have the same scale"
        )


def _as_integers(x: jax.Array, collective: Callable[[jax.Array], jax.Array], max_bits: int) -> jax.Array:
    """Runs a collective on x, bitcast to integers if its elements have at most `max_bits` bits."""
    bits = (jnp.finfo if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo)(x.dtype).bits
    if bits > max_bits:
        return collective(x)
    if bits >= 8:
        integers = lax.bitcast_convert_type(x, jnp.uint16 if bits == 16 else jnp.uint8)
        return lax.bitcast_convert_type(collective(integers), x.dtype)
    if x.shape[-1] % 2:
        unpacked = lax.bitcast_convert_type(x, jnp.uint4).astype(jnp.uint8)
        return lax.bitcast_convert_type(collective(unpacked).astype(jnp.uint4), x.dtype)
    pairs = lax.bitcast_convert_type(x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2), jnp.uint8)
    codes = lax.bitcast_convert_type(collective(pairs), x.dtype)
    return codes.reshape(*codes.shape[:-2], codes.shape[-2] * 2)
