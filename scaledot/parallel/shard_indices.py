"""Global indices of the elements of a device's shard.

Stochastic rounding hashes the global index of an element, so that sharded quantisation is bit-identical to
single-device, on every mesh.

A matrix dim is often several collapsed array dims, such as (batch, sequence) (`CollapsedDim`). With 2 sequences of 4
tokens on 2 devices that shard tokens, device 1 holds rows 2, 3, 6 and 7 of the matrix (8, k).
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scaledot.numerics.rounding import Positions, flat_index
from scaledot.parallel.divisibility import misfit
from scaledot.parallel.specs import device_count
from scaledot.parallel.transfer_plan import AxesByLabel
from scaledot.parallel.transfers import Axes

Sizes = tuple[int, ...]


def positions(shard: int, size: int, axes: Axes) -> Positions:
    """The global positions of a device's `shard` elements of an axis of `size` elements, sharded over mesh axes."""
    at = jnp.arange(shard, dtype=jnp.uint32)
    return Positions(at + (lax.axis_index(axes) * shard).astype(jnp.uint32) if axes else at, size)


def flattened(axes: list[Positions]) -> Positions:
    """The positions along the axis that several axes are flattened to, row-major."""
    size = int(np.prod([each.size for each in axes], dtype=object)) if axes else 1
    return Positions(flat_index(axes).reshape(-1), size)


def padded(axis: Positions, multiple: int) -> Positions:
    """The positions along an axis that is zero-padded at its end to a multiple."""
    missing = -axis.size % multiple
    zeros = np.uint32(axis.size % 2**32) + jnp.arange(missing, dtype=jnp.uint32)
    return Positions(jnp.concatenate([axis.at, zeros]), axis.size + missing)


class CollapsedDim(NamedTuple):
    """A dim of a matrix: labels and sizes of the array dims that were collapsed to it (members), major to minor.

    multiple: what the sizes of its shards must be multiples of.
    """

    labels: str
    sizes: Sizes
    multiple: int = 1

    @property
    def size(self) -> int:
        return math.prod(self.sizes)

    def indivisible_member(self, sharding: AxesByLabel, mesh) -> str | None:
        """The label of a member whose sharding is uneven or cuts blocks; None if there is none."""
        for i in reversed(range(len(self.labels))):
            devices = device_count(mesh, sharding.get(self.labels[i], ()))
            if devices > 1:
                minor = math.prod(self.sizes[i + 1 :])
                cuts_blocks = misfit(self.sizes[i] * minor, devices, self.multiple) is not None
                if misfit(self.sizes[i], devices) is not None or cuts_blocks:
                    return self.labels[i]
        return None

    def noncontiguous_member(self, sharding: AxesByLabel, mesh) -> str | None:
        """The label of the minormost sharded member if shards are not contiguous in the collapsed dim, else None."""
        sizes = self.shard(sharding, mesh).sizes
        sharded = [i for i, (shard, size) in enumerate(zip(sizes, self.sizes, strict=True)) if shard < size]
        return self.labels[sharded[-1]] if sharded and math.prod(sizes[: sharded[-1]]) > 1 else None

    def first(self, sharding: AxesByLabel, mesh) -> jax.Array:
        """The global index of a shard's first element along the dim, uint32 (), modulo 2^32."""
        first = jnp.uint32(0)
        for c, size in zip(self.labels, self.shard(sharding, mesh).sizes, strict=True):
            axes = sharding.get(c, ())
            index = lax.axis_index(axes).astype(jnp.uint32) if axes else jnp.uint32(0)
            count = device_count(mesh, axes)
            first = first * jnp.uint32(size * count) + index * jnp.uint32(size)
        return first

    def shard(self, sharding: AxesByLabel, mesh) -> "CollapsedDim":
        """The dim of a device's shard."""
        counts = (device_count(mesh, sharding.get(c, ())) for c in self.labels)
        return self._replace(sizes=tuple(size // count for size, count in zip(self.sizes, counts, strict=True)))

    def expand(self, size: int) -> Sizes:
        """The member sizes of a dim of `size`: of this dim, or of the scales of its blocks.

        Blocks divide the minormost member; only if there is a single member may the last block be short.
        """
        return (size,) if len(self.sizes) == 1 else (*self.sizes[:-1], self.sizes[-1] // (self.size // size))

    @classmethod
    def of(cls, fresh: Iterator[str], sizes: Sizes, multiple: int) -> "CollapsedDim":
        """With labels taken from `fresh`; with a single member if blocks would extend beyond the minormost one."""
        sizes = sizes if sizes[-1] % multiple == 0 else (math.prod(sizes),)
        return cls("".join(next(fresh) for _ in sizes), sizes, multiple)


def first_index(dims: Sequence[CollapsedDim], sharding: AxesByLabel, mesh) -> jax.Array:
    """The global flat index of a shard's first element, uint32 (), modulo 2^32."""
    index = jnp.uint32(0)
    for dim in dims:
        index = index * jnp.uint32(dim.size % 2**32) + dim.first(sharding, mesh)
    return index
