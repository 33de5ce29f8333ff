"""Where the elements of a device's shard are in the whole array.

Stochastic rounding hashes the index of an element in the whole array, so that every mesh draws the same numbers.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scaledot.numerics.rounding import Positions, flat_index
from scaledot.parallel.divisibility import misfit
from scaledot.parallel.specs import device_count
from scaledot.parallel.transfers import Axes

Sharding = Mapping[str, Axes]  # by label, the mesh axes that it is sharded over
Sizes = tuple[int, ...]


def positions(shard: int, size: int, axes: Axes) -> Positions:
    """Of a device's `shard` elements of an axis of `size` that is sharded over mesh axes, or over none."""
    at = jnp.arange(shard, dtype=jnp.uint32)
    return Positions(at + (lax.axis_index(axes) * shard).astype(jnp.uint32) if axes else at, size)


def flattened(axes: list[Positions]) -> Positions:
    """Those along the axis that several are flattened to, row-major."""
    size = int(np.prod([each.size for each in axes], dtype=object)) if axes else 1
    return Positions(flat_index(axes).reshape(-1), size)


def padded(axis: Positions, multiple: int) -> Positions:
    """With the zeros that pad an axis to a multiple behind its last element."""
    missing = -axis.size % multiple
    zeros = np.uint32(axis.size % 2**32) + jnp.arange(missing, dtype=jnp.uint32)
    return Positions(jnp.concatenate([axis.at, zeros]), axis.size + missing)


class Axis(NamedTuple):
    """A dim of a matrix: labels and sizes of the array dims that were collapsed to it, its members, major to minor.

    multiple: what the sizes of its shards must be multiples of.
    """

    labels: str
    sizes: Sizes
    multiple: int = 1

    @property
    def size(self) -> int:
        return math.prod(self.sizes)

    def cut_member(self, sharding: Sharding, mesh) -> str | None:
        """The label of a member that does not divide by its devices, or whose sharding would cut blocks, if any."""
        for i in reversed(range(len(self.labels))):
            devices = device_count(mesh, sharding.get(self.labels[i], ()))
            if devices > 1:
                behind = math.prod(self.sizes[i + 1 :])
                whole_blocks = misfit(self.sizes[i] * behind, devices, self.multiple) is None
                if misfit(self.sizes[i], devices) is not None or not whole_blocks:
                    return self.labels[i]
        return None

    def scattered_member(self, sharding: Sharding, mesh) -> str | None:
        """The last sharded member, if shards are not contiguous in the collapsed dim; else None."""
        sizes = self.shard(sharding, mesh).sizes
        cut = [i for i, (part, whole) in enumerate(zip(sizes, self.sizes, strict=True)) if part < whole]
        return self.labels[cut[-1]] if cut and math.prod(sizes[: cut[-1]]) > 1 else None

    def first(self, sharding: Sharding, mesh) -> jax.Array:
        """The index of a shard's first element, uint32 (), modulo 2^32."""
        found = jnp.uint32(0)
        for c, size in zip(self.labels, self.shard(sharding, mesh).sizes, strict=True):
            axes = sharding.get(c, ())
            index = lax.axis_index(axes).astype(jnp.uint32) if axes else jnp.uint32(0)
            count = device_count(mesh, axes)
            found = found * jnp.uint32(size * count) + index * jnp.uint32(size)
        return found

    def shard(self, sharding: Sharding, mesh) -> "Axis":
        """The axis of a device's shard."""
        counts = (device_count(mesh, sharding.get(c, ())) for c in self.labels)
        return self._replace(sizes=tuple(size // count for size, count in zip(self.sizes, counts, strict=True)))

    def open(self, size: int) -> Sizes:
        """The sizes of the members, in blocks: `size` blocks in all, as a dim of a scale has.

        Only of a single member may the last block be short.
        """
        return (size,) if len(self.sizes) == 1 else (*self.sizes[:-1], self.sizes[-1] // (self.size // size))

    @classmethod
    def of(cls, fresh: Iterator[str], sizes: Sizes, multiple: int) -> "Axis":
        """With fresh labels. Where blocks would cross from one index of a member to the next, there is one member."""
        sizes = sizes if sizes[-1] % multiple == 0 else (math.prod(sizes),)
        return cls("".join(next(fresh) for _ in sizes), sizes, multiple)


def first_index(axes: Sequence[Axis], sharding: Sharding, mesh) -> jax.Array:
    """The flat index of a shard's first element in the whole array, uint32 (), modulo 2^32."""
    index = jnp.uint32(0)
    for axis in axes:
        index = index * jnp.uint32(axis.size % 2**32) + axis.first(sharding, mesh)
    return index
