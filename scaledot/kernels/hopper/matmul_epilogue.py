"""The epilogue of a matmul on Hopper: scales float32 accumulators, adds the bias, rounds once and stores to GMEM.

Blockwise scales, which change along K, were applied in the main loop; others are applied here. The result is staged in
SMEM and stored by asynchronous TMA copies, while the warpgroup continues.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from scaledot.kernels.hopper.memory import load
from scaledot.kernels.hopper.tiles import Tile, Warpgroup


class EpilogueScales:
    """Scales of a and b that are applied to accumulators: GMEM refs (M,) and (N,), or (1,) for per-tensor scales."""

    def __init__(self, rows_ref, columns_ref):
        self.rows_ref, self.columns_ref = rows_ref, columns_ref
        self.scalars = rows_ref.shape == columns_ref.shape == (1,)
        if self.scalars:
            left, right = rows_ref[0], columns_ref[0]
            self.smaller, self.larger = jnp.minimum(left, right), jnp.maximum(left, right)

    def apply(self, accumulators: jax.Array, first_row, first_column) -> jax.Array:
        """Multiplies by both scales, the smaller one first so that the intermediate result does not overflow."""
        if self.scalars:
            return accumulators * self.smaller * self.larger
        left = along_rows(self.rows_ref, first_row, accumulators.shape)
        right = along_columns(self.columns_ref, first_column, accumulators.shape)
        return accumulators * jnp.minimum(left, right) * jnp.maximum(left, right)


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """The epilogue of one consumer warpgroup's part of an output tile.

    row, column: the first row and column of the part in the result.
    scales: per-tensor, row and column scales, or None if scales are blockwise.
    bias: GMEM ref (N,) or None.
    out: GMEM ref (M, N), the group's result if K is in groups.
    staging: SMEM (consumers, 2, rows, columns), a double buffer for each consumer.
    edge_staging: SMEM (consumers, rows, columns) for tiles that a group of rows fills only in part; None without
    groups of rows.
    """

    tile: Tile
    warpgroup: Warpgroup
    row: Any
    column: Any
    scales: EpilogueScales | None
    bias: Any
    out: Any
    staging: Any
    edge_staging: Any

    def store(self, offset: int, accumulators: jax.Array) -> None:
        """Stores accumulators (rows, columns), which start at column `offset` of the warpgroup's part of the tile."""
        if self.tile.rows is None:
            self._store_all_rows(offset, accumulators)
            return
        low, high = (jnp.clip(end - self.warpgroup.row, 0, self._rows) for end in self.tile.rows)
        lax.cond(
            high - low == self._rows,
            lambda: self._store_all_rows(offset, accumulators),
            lambda: self._store_some_rows(offset, accumulators, low, high),
        )

    def _store_all_rows(self, offset: int, accumulators: jax.Array) -> None:
        columns, warpgroup = self.staging.shape[-1], self.warpgroup.index
        for piece in range(accumulators.shape[1] // columns):
            buffer = (offset // columns + piece) % 2
            first = self.column + offset + piece * columns
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # only the copy from the other buffer is in flight
            self.staging[warpgroup, buffer] = self._finished(_columns(accumulators, piece, columns), first)
            plgpu.commit_smem()
            target = self._target(self.row, self._rows, first, columns)
            plgpu.copy_smem_to_gmem(self.staging.at[warpgroup, buffer], target)

    def _store_some_rows(self, offset: int, accumulators: jax.Array, low, high) -> None:
        """Stores rows [low, high); the other rows belong to other groups, whose tiles store them."""
        columns, warpgroup = self.edge_staging.shape[-1], self.warpgroup.index
        for piece in range(accumulators.shape[1] // columns):
            first = self.column + offset + piece * columns
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self.edge_staging[warpgroup] = self._finished(_columns(accumulators, piece, columns), first)
            plgpu.commit_smem()
            self._copy_some_rows(first, low, high)

    def _copy_some_rows(self, first, low, high) -> None:
        """Copies rows [low, high) of `edge_staging` to the result, from column `first` on.

        The number of rows is dynamic but the shape of a TMA copy is static, so there is a predicated copy for each bit
        of the number. A copy of a single row is a bulk copy of contiguous bytes, which, unlike a tensor copy, is not
        clipped to the bounds of the result; hence the test of `first`.
        """
        row, size = low, self._rows // 2
        while size:
            copy = functools.partial(self._copy_rows, row, size, first)
            pl.when(((high - low) & size != 0) & (first < self.out.shape[-1]))(copy)
            row, size = row + ((high - low) & size), size // 2

    def _copy_rows(self, row, rows: int, first) -> None:
        source = self.edge_staging.at[self.warpgroup.index, pl.ds(row, rows)]
        plgpu.copy_smem_to_gmem(source, self._target(self.row + row, rows, first, source.shape[-1]))

    def _finished(self, accumulators: jax.Array, first_column) -> jax.Array:
        """Scales accumulators, adds the bias and rounds once, to the output dtype."""
        result = self._scaled(accumulators, first_column)
        if self.bias is not None:
            result += along_columns(self.bias, first_column, result.shape)
        return result.astype(self.out.dtype)

    def _scaled(self, accumulators: jax.Array, first_column) -> jax.Array:
        if self.scales is None:
            return accumulators
        apply = functools.partial(self.scales.apply, accumulators, self.row, first_column)
        if self.tile.rows is None:
            return apply()
        # Rows after the last group have no K steps. They are zero, even if a scale is NaN.
        return lax.cond(self.tile.steps > 0, apply, lambda: accumulators)

    def _target(self, row, rows: int, column, columns: int) -> Any:
        return self.out.at[pl.ds(row, rows), pl.ds(column, columns)]

    @property
    def _rows(self) -> int:
        return self.staging.shape[-2]


def _columns(values: jax.Array, piece: int, columns: int) -> jax.Array:
    return values[:, piece * columns : (piece + 1) * columns]


def along_rows(ref, first, shape: tuple[int, ...]) -> jax.Array:
    """Loads a scalar (ref of shape (1,)) or elements [first, first + shape[0]), and broadcasts along columns."""
    return _broadcast(ref, first, shape, axis=0)


def along_columns(ref, first, shape: tuple[int, ...]) -> jax.Array:
    """Loads a scalar (ref of shape (1,)) or elements [first, first + shape[1]), and broadcasts along rows."""
    return _broadcast(ref, first, shape, axis=1)


def _broadcast(ref, first, shape: tuple[int, ...], axis: int) -> jax.Array:
    if ref.shape == (1,):
        return plgpu.layout_cast(jnp.full(shape, ref[0]), plgpu.Layout.WGMMA)
    layout = plgpu.Layout.WGMMA.reduce(1 - axis)
    values = load(ref.at[pl.ds(first, shape[axis])], layout, optimized=False)
    return lax.broadcast_in_dim(values, shape, (axis,))
