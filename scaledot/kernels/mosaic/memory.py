"""Tiles in shared memory, loads into registers, and conversions there."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from scaledot.kernels.mosaic import support
from scaledot.numerics.bits import MIN_NORMAL

SWIZZLE = 128  # bytes of a row of a tile in shared memory
ROW_TILE = 8  # rows of such a tile
LEAST = MIN_NORMAL.view(np.float32)


def tiled(row_bytes: int, itemsize: int) -> tuple[Any, Any]:
    """The layout in shared memory of rows of that many bytes, or of pieces of them."""
    swizzle = min(SWIZZLE, row_bytes)
    return plgpu.TilingTransform((ROW_TILE, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)


def load(ref: Any, layout: Any, optimized: bool = True) -> jax.Array:
    """A reference's elements in registers; `optimized`: through shared memory without bank conflicts, or not at all."""
    return plgpu.load(ref, layout=layout, optimized=optimized)  # pyright: ignore[reportCallIssue]  (before jax 0.11)


def scaled(x: jax.Array, factor: jax.Array) -> jax.Array:
    """x times a factor; subnormal numbers are zeros."""
    return x * jnp.where(jnp.abs(x) < LEAST, np.float32(0), factor)


def to_float8(x: jax.Array, dtype) -> jax.Array:
    """float32 to nearest, saturated. A GPU's conversion does both; that of the interpreter overflows to NaN."""
    limit = float(jnp.finfo(dtype).max)
    return (jnp.clip(x, -limit, limit) if support.is_interpreted() else x).astype(dtype)
