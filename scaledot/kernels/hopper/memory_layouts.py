"""SMEM and register layouts that the Mosaic kernels share, and the load from SMEM or GMEM to registers."""

from typing import Any

import jax
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from scaledot.kernels.hopper.swizzle_atom import ATOM_BYTES, ATOM_ROWS

LANES, WARPS = 32, 4
THREADS = LANES * WARPS  # of a warpgroup
COLUMN_PER_THREAD = plgpu.Layout.TILED(  # of (rows, 128)
    plgpu.Tiling(((1, THREADS), (LANES,), (1,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
)
# The same elements per thread, in a tiling that Mosaic does not lower to ldmatrix. ldmatrix needs rows aligned to 16
# bytes, which Mosaic does not check.
UNALIGNED_COLUMN_PER_THREAD = plgpu.Layout.TILED(
    plgpu.Tiling(((1, THREADS), (LANES,), (2,), (1,))), warp_dims=(-4,), lane_dims=(-3, -2), vector_dim=-1
)


def swizzle_transforms(columns: int, dtype) -> tuple[Any, Any]:
    """Returns the tiling and swizzle transforms of an SMEM ref whose minor dim has `columns` elements.

    The swizzle is 128 bytes, or the length of a row if that is 32 or 64 bytes.
    """
    itemsize = np.dtype(dtype).itemsize
    swizzle = min(ATOM_BYTES, columns * itemsize)
    return plgpu.TilingTransform((ATOM_ROWS, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)


def row_vector_layout(size: int, vector: int) -> Any:
    """Returns the register layout of arrays (rows, size) in which a thread holds `vector` neighbours of a row.

    `size // vector` neighbouring lanes hold a row; the lanes of a warp, and then the warps, hold consecutive rows.
    """
    lanes = size // vector
    tiling = plgpu.Tiling(((THREADS // lanes, size), (LANES // lanes, size), (vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def row_per_warp_layout(vector: int) -> Any:
    """Returns the register layout of arrays (rows, 32 * vector) whose rows 4 i + w are held by warp w.

    Each lane holds `vector` neighbours of a row. As in `UNALIGNED_COLUMN_PER_THREAD`, the additional tile of two lanes
    keeps Mosaic from using ldmatrix.
    """
    tiling = plgpu.Tiling(((WARPS, LANES * vector), (2 * vector,), (vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-4,), lane_dims=(-3, -2), vector_dim=-1)


def load(ref: Any, layout: Any, optimized: bool = True) -> jax.Array:
    """Loads a ref into registers; `optimized`: compilation fails if Mosaic has no load without bank conflicts."""
    return plgpu.load(ref, layout=layout, optimized=optimized)  # pyright: ignore[reportCallIssue]  (before jax 0.11)
