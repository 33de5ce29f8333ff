"""Tiles in shared memory, and loads into registers."""

from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

SWIZZLE = 128  # bytes of a row of a tile in shared memory
ROW_TILE = 8  # rows of such a tile


def tiled(row_bytes: int, itemsize: int) -> tuple[Any, Any]:
    """The layout in shared memory of rows of that many bytes, or of pieces of them."""
    swizzle = min(SWIZZLE, row_bytes)
    return plgpu.TilingTransform((ROW_TILE, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)


def load(ref: Any, layout: Any, optimized: bool = True) -> jax.Array:
    """A reference's elements in registers; `optimized`: through shared memory without bank conflicts, or not at all."""
    return plgpu.load(ref, layout=layout, optimized=optimized)  # pyright: ignore[reportCallIssue]  (before jax 0.11)
