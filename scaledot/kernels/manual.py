"""Inside a user's shard_map: the mesh axes along which values differ from device to device.

JAX tracks them in types. What JAX cannot type itself (a primitive without a rule, a custom_vjp) is mended here.
"""

from typing import Any

import jax
from jax import lax


def varying(x: jax.Array) -> frozenset:
    """The manual mesh axes along which x differs."""
    return varying_of(jax.typeof(x))


def varying_of(type: Any) -> frozenset:
    """The same for an array of that type, as jax.typeof gives it."""
    return type.manual_axis_type.varying


def vary_as(x: jax.Array, *others: jax.Array) -> jax.Array:
    """x, typed to differ along every axis that the others differ along."""
    axes = frozenset().union(*map(varying, others)) - varying(x)
    return lax.pcast(x, tuple(axes), to="varying") if axes else x


def summed_as(cotangent: jax.Array, primal_type: Any) -> jax.Array:
    """A cotangent summed over the axes along which its primal, of that type, is the same everywhere."""
    axes = varying(cotangent) - varying_of(primal_type)
    return lax.psum(cotangent, tuple(axes)) if axes else cotangent
