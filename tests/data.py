"""Random arrays, drawn and rounded by NumPy, because jax.random compiles a program for each new shape."""

import jax
import jax.numpy as jnp
import numpy as np


def normal(seed: int, shape, dtype=jnp.float32, spread: float = 1.0) -> jax.Array:
    """Normal with standard deviation `spread`."""
    x = spread * np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(x.astype(np.float32).astype(dtype))


def normal_by_axis(seed: int, shape, dtype=jnp.float32) -> jax.Array:
    """Normal with rows and columns of different magnitudes, so that a scale along the wrong axis is detected."""
    x = np.random.default_rng(seed).standard_normal(shape)
    for axis, size in enumerate(shape):
        steps = np.exp2(np.arange(size) % 5 - 2.0)
        x = x * steps.reshape([-1 if a == axis else 1 for a in range(len(shape))])
    return jnp.asarray(x.astype(np.float32).astype(dtype))
