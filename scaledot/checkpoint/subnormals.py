"""Dequantises MX weights with tiny scales exactly.

`scaledot.dequantize` flushes subnormal numbers to zero, because XLA's CPU backend does. Files may have E8M0 scales down
to 2^-127, whose weights are subnormal; the library of a layout returns them as such. NumPy computes them exactly.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.core import Tracer

from scaledot.array import ScaledArray
from scaledot.numerics import blocks

# The exponent byte of E8M0 is biased by 127, and the least element of an MX format is 2^-16 (E5M2): scales from 2^-110
# on give normal numbers.
_LEAST_NORMAL = 17


def has_subnormals(q: ScaledArray) -> bool:
    """Whether a weight with E8M0 scales may have subnormal values; False if it is traced: its scales are unknown."""
    if (
        isinstance(q.scale, Tracer)
        or q.tensor_scale is not None
        or q.rotation is not None
        or q.scale.dtype != ml_dtypes.float8_e8m0fnu
    ):
        return False
    if not getattr(q.scale, "is_fully_addressable", True):
        return False
    return bool(jnp.min(jax.lax.bitcast_convert_type(q.scale, jnp.uint8), initial=255) < _LEAST_NORMAL)


def dequantize_on_host(q: ScaledArray, dtype) -> jax.Array:
    """The values code x scale, rounded once, to `dtype`."""
    codes = np.asarray(q.data).view(q.format.element_dtype)
    scale = np.asarray(q.scale).astype(np.float32)
    for axis, (size, block) in enumerate(zip(q.shape, blocks.expand(q.block, q.ndim), strict=True)):
        scale = np.repeat(scale, block or size, axis=axis).take(range(size), axis=axis)
    with np.errstate(over="ignore"):  # 448 x 2^127 is infinite
        return jnp.asarray((codes.astype(np.float32) * scale).astype(np.dtype(dtype)))
