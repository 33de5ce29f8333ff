"""The random Hadamard transform, which distributes an outlier over its group of elements before quantisation.

H = n^-1/2 * diag(s) * Sylvester_n with Sylvester[r, c] = (-1)^popcount(r & c) and random signs s. Applied along the
contracting dim of both operands of a matmul it cancels, because H is orthogonal. It is computed by butterflies, so that
every backend adds in the same order and results are bit-identical; subnormals are flushed after each stage, because
only some backends flush them. Rotations with fixed signs add neighbours first. Those with drawn signs add neighbours
last, so that a kernel's last stages work on blocks of neighbours, which it then casts without moving them again.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scaledot.numerics.bits import flush
from scaledot.numerics.rounding import Key, round_bfloat16, uniform_of


@dataclasses.dataclass(frozen=True)
class Hadamard:
    """A random Hadamard transform of each group of `size` consecutive elements along `axis`.

    mask: the random signs: bit i makes the sign of element i negative. The default is a fixed draw for `size` 16. None,
      in a recipe: both operands of a matmul draw the same new signs from the key of each step.
    """

    size: int = 16
    mask: int | None = 0xD7E8
    axis: int = -1

    def __post_init__(self):
        if not isinstance(self.size, int) or not isinstance(self.mask, int | None):
            raise TypeError(f"`size` and `mask` of a Hadamard must be integers, not {self.size!r} and {self.mask!r}")
        if self.size < 2 or self.size & (self.size - 1):
            raise ValueError(f"`size` of a Hadamard must be a power of two of at least 2, not {self.size}")
        if self.mask is not None and not 0 <= self.mask < 1 << self.size:
            raise ValueError(f"`mask` {self.mask:#x} of a Hadamard does not fit in `size` {self.size} bits")

    @property
    def draws_signs(self) -> bool:
        """Whether signs are drawn from a key instead of fixed by `mask`."""
        return self.mask is None

    @property
    def signs(self) -> np.ndarray:
        if self.mask is None:
            raise ValueError(
                "the signs of a Hadamard with mask=None are drawn in each training step and not stored; use an integer "
                "`mask` to undo the rotation or to quantise outside of training"
            )
        return np.array([-1.0 if self.mask >> i & 1 else 1.0 for i in range(self.size)], np.float32)


def random_signs(key: Key, size: int) -> jax.Array:
    """Random signs, float32 (size,), for a Hadamard with mask=None."""
    uniform = uniform_of(key, (size,))
    return jnp.where(uniform < np.float32(0.5), np.float32(-1), np.float32(1))


def rotate(x: jax.Array, rotation: Hadamard, signs: jax.Array | None = None) -> jax.Array:
    """x @ H in groups along the axis, in float32.

    signs: (size,), for a rotation with mask=None. Without them, x and the result are rounded to bfloat16 precision, as
    TransformerEngine's kernels do.
    """
    if signs is not None:
        groups = _grouped(x, rotation)
        rotated = _butterflies(groups * _broadcast(signs, groups), neighbours_last=True)
        return _ungrouped(rotated, x.shape, rotation)
    groups = _grouped(round_bfloat16(x), rotation)
    rotated = _butterflies(groups * _broadcast(rotation.signs, groups))
    return _ungrouped(round_bfloat16(rotated), x.shape, rotation)


def unrotate(x: jax.Array, rotation: Hadamard, signs: jax.Array | None = None) -> jax.Array:
    """x @ H.T in groups along the axis, in float32: the inverse of `rotate` up to its rounding."""
    groups = _butterflies(_grouped(x, rotation))
    return _ungrouped(groups * _broadcast(rotation.signs if signs is None else signs, groups), x.shape, rotation)


def _broadcast(signs: Any, groups: jax.Array) -> Any:
    return signs.reshape((1,) * (groups.ndim - 1) + signs.shape)


def _grouped(x: jax.Array, rotation: Hadamard) -> jax.Array:
    x = jnp.moveaxis(x, rotation.axis, -1)
    return x.reshape(*x.shape[:-1], x.shape[-1] // rotation.size, rotation.size)


def _ungrouped(groups: jax.Array, shape: tuple[int, ...], rotation: Hadamard) -> jax.Array:
    flat = groups.reshape(*groups.shape[:-2], shape[rotation.axis])
    return jnp.moveaxis(flat, -1, rotation.axis)


def _butterflies(groups: jax.Array, neighbours_last: bool = False) -> jax.Array:
    """Multiplies the last axis by the normalised Sylvester matrix, with one butterfly stage per bit of the index."""
    size = groups.shape[-1]
    strides = [1 << bit for bit in range(size.bit_length() - 1)]
    for stride in reversed(strides) if neighbours_last else strides:
        pairs = groups.reshape(*groups.shape[:-1], size // (2 * stride), 2, stride)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        groups = flush(jnp.stack([low + high, low - high], axis=-2).reshape(groups.shape))
    return flush(groups * np.float32(size**-0.5))
