"""Arrays whose types say how they are split over explicit mesh axes, and reshapes that say so for their results.

JAX finds most shardings of results itself; where a split axis is cut into blocks it wants to be told. Elsewhere, with
automatic axes or without a mesh, types say nothing and nothing is done.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec


def axes_of(x: jax.Array, axis: int) -> Any:
    """The explicit mesh axes that an axis is split over: a name, several, or None."""
    spec = jax.typeof(x).sharding.spec
    return spec[axis] if axis < len(spec) else None


def is_split(x: jax.Array) -> bool:
    return any(axes is not None for axes in jax.typeof(x).sharding.spec)


def parts(x: jax.Array, axis: int) -> int:
    """Devices that an axis is split over."""
    axes, mesh = axes_of(x, axis), jax.typeof(x).sharding.mesh
    names = () if axes is None else axes if isinstance(axes, tuple) else (axes,)
    return math.prod(mesh.shape[name] for name in names)


def check_whole(x: jax.Array, axis: int, block: int) -> None:
    """Raise where devices hold parts of blocks."""
    count, size = parts(x, axis), x.shape[axis]
    if count == 1 or not size % (count * block):
        return
    fitting = -(-size // (count * block)) * count * block
    fewer = max(p for p in range(1, count + 1) if not size % p and (p == 1 or not size // p % block))
    raise ValueError(
        f"axis {axis} of {size} is split over {axes_of(x, axis)!r} into {count} parts of {size // count}, which cut "
        f"blocks of {block}; split it in {fewer}, make it {fitting} long, or gather it first with jax.sharding.reshard"
    )


def reshape(x: jax.Array, shape: Sequence[int], spec: Sequence[Any]) -> jax.Array:
    """x in another shape, whose axes are split as `spec` says where those of x are split at all."""
    if not is_split(x):
        return x.reshape(shape)
    return lax.reshape(x, tuple(shape), out_sharding=NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec(*spec)))
