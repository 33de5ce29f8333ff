"""Where the elements of a device's shard are in the whole array.

Stochastic rounding hashes the index of an element in the whole array, so that every mesh draws the same numbers.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from scaledot.numerics.rounding import Positions, flat_index
from scaledot.parallel.transfers import Axes


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
