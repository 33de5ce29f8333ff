"""Tiles in shared memory, layouts and loads of registers, and conversions there."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from scaledot.kernels.mosaic import support
from scaledot.numerics.bits import MIN_NORMAL

LANES, WARPS = 32, 4
THREADS = LANES * WARPS  # of a warpgroup
SWIZZLE = 128  # bytes of a row of a tile in shared memory
ROW_TILE = 8  # rows of such a tile
LEAST = MIN_NORMAL.view(np.float32)


def tiled(columns: int, dtype) -> tuple[Any, Any]:
    """The layout in shared memory of rows of that many elements, or of pieces of them."""
    itemsize = np.dtype(dtype).itemsize
    swizzle = min(SWIZZLE, columns * itemsize)
    return plgpu.TilingTransform((ROW_TILE, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)


def side_by_side(size: int, vector: int) -> Any:
    """A layout of (blocks, size): vectors, the lanes of a warp side by side, warps one after the other."""
    lanes = size // vector
    tiling = plgpu.Tiling(((THREADS // lanes, size), (LANES // lanes, size), (vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def load(ref: Any, layout: Any, optimized: bool = True) -> jax.Array:
    """A reference's elements in registers; `optimized`: through shared memory without bank conflicts, or not at all."""
    return plgpu.load(ref, layout=layout, optimized=optimized)  # pyright: ignore[reportCallIssue]  (before jax 0.11)


def flushed(x: jax.Array) -> jax.Array:
    """float32 with subnormals turned into zeros of the same sign, in two instructions."""
    return x * jnp.where(jnp.abs(x) < LEAST, np.float32(0), np.float32(1))


def to_float8(x: jax.Array, dtype) -> jax.Array:
    """float32 to nearest, saturated. A GPU's conversion does both; that of the interpreter overflows to NaN."""
    limit = float(jnp.finfo(dtype).max)
    return (jnp.clip(x, -limit, limit) if support.is_interpreted() else x).astype(dtype)
