"""Reads LazyArrays onto devices: whole, or each process its shards."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from scaledot.checkpoint.lazy import LazyArray
from scaledot.checkpoint.reader import Index


def materialize(array: LazyArray, sharding: Sharding | None = None) -> Any:
    """Reads an array onto the default device, or the shards of this process onto its devices.

    A 64-bit array stays a NumPy array unless `jax_enable_x64` is set, because JAX would round it.
    """
    if jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
        return array.numpy()
    if sharding is not None:
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array.read(_bounded(index, array)))
    if array.packed is not None and array.size:
        return _unpack(jax.device_put(array.packed.numpy()), array.dtype.name)
    return jax.device_put(array.numpy())


def _bounded(index: Index | None, array: LazyArray) -> Index:
    assert index is not None
    return tuple(slice(*s.indices(size)[:2]) for s, size in zip(index, array.shape, strict=True))


@functools.partial(jax.jit, static_argnums=1)
def _unpack(octets: jax.Array, dtype: str) -> jax.Array:
    pairs = jax.lax.bitcast_convert_type(octets, jnp.dtype(dtype))
    return pairs.reshape(*octets.shape[:-1], 2 * octets.shape[-1])
