"""One cast of an array and back, as in a training step: with a new key, and new signs if the rotation draws them."""

import jax
import jax.numpy as jnp

from scaledot import Cast, ScaledArray
from scaledot.kernels.operands import dequantized_values
from scaledot.numerics.hadamard import random_signs, unrotate
from scaledot.train.resolved_cast import OperandDims, ResolvedCast

ROWS = OperandDims("kn", free="k", contracting="n")


def quantize_dequantize(cast: Cast, x: jax.Array, key: jax.Array, multiplier: jax.Array | None = None) -> jax.Array:
    """Returns x (rows, columns), cast with columns as the contracting dim and dequantised, in float32."""
    resolved = ResolvedCast.on(cast, ROWS)
    if cast.rotation is None or not cast.rotation.draws_signs:
        return _dequantized(resolved.quantize(x, multiplier, key))
    sign_key, cast_key = jax.random.split(key)
    signs = random_signs(sign_key, cast.rotation.size)
    q = resolved.quantize(x, multiplier, cast_key, signs=signs)
    assert q.rotation is not None
    return unrotate(dequantized_values(q, jnp.float32, unrotate=False), q.rotation, signs)


def _dequantized(q: ScaledArray) -> jax.Array:
    return dequantized_values(q, jnp.float32, unrotate=True)
