"""Noise for stochastic rounding: uniform in [-0.5, 0.5], added to scaled values before they are rounded to integers."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

METHODS = ("uniform", "low_bit_uniform")


def uniform_noise(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns float32 noise in [-0.5, 0.5)."""
    return jax.random.uniform(key, shape, jnp.float32, -0.5, 0.5)


def low_bit_uniform_noise(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns float32 noise from 8 random bits: one of 256 equidistant numbers around 0, from -255/512 to 255/512.

    >>> bool(jnp.all(jnp.abs(low_bit_uniform_noise(jax.random.key(0), (64,))) <= 255 / 512))
    True
    """
    bits = jax.random.bits(key, shape, jnp.uint8).astype(jnp.float32)
    return (bits - np.float32(127.5)) * np.float32(1 / 256)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NoiseFn:
    """A function from a shape to noise, whose key is a leaf of a pytree.

    channelwise_noise_axes: axes along which noise differs; along all others it is shared.
    """

    key: Any
    method: str = dataclasses.field(metadata={"static": True})
    channelwise_noise_axes: Sequence[int] = dataclasses.field(metadata={"static": True})

    def __call__(self, shape: tuple[int, ...]) -> jax.Array:
        noise = uniform_noise if self.method == "uniform" else low_bit_uniform_noise
        axes = self.channelwise_noise_axes
        return noise(self.key, tuple(size if axis in axes else 1 for axis, size in enumerate(shape)))


def get_noise_fn(method: str, key: jax.Array, channelwise_noise_axes: Sequence[int] = (0,)) -> NoiseFn:
    """Returns the noise function of a method: "uniform" or "low_bit_uniform".

    >>> get_noise_fn("uniform", jax.random.key(0))((4, 8)).shape
    (4, 1)
    """
    check_method(method)
    return NoiseFn(key, method, tuple(channelwise_noise_axes))


def check_method(method: str) -> None:
    """Raises ValueError unless `method` is known."""
    if method not in METHODS:
        raise ValueError(f"`method` {method!r} of stochastic rounding is not known; use one of {', '.join(METHODS)}")
