"""The epilogue of a matmul on Hopper: float32 accumulators in registers become rows and columns of the result in GMEM.

Accumulators are multiplied by the scales of both operands, unless those change along K and were applied in the main
loop; the bias is added; and the sum is rounded once, to the output dtype. The result passes through SMEM, from which
asynchronous copies take it to GMEM while the warpgroup goes on.
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
    """Scales of a and b that accumulators are multiplied by: GMEM refs (M,) and (N,), or (1,) for one scale of all."""

    def __init__(self, rows_ref, columns_ref):
        self.rows_ref, self.columns_ref = rows_ref, columns_ref
        self.scalars = rows_ref.shape == columns_ref.shape == (1,)
        if self.scalars:
            left, right = rows_ref[0], columns_ref[0]
            self.smaller, self.larger = jnp.minimum(left, right), jnp.maximum(left, right)

    def apply(self, accumulators: jax.Array, first_row, first_column) -> jax.Array:
        """Multiplies by the smaller scale first, so that accumulators of ordinary size do not overflow in between."""
        if self.scalars:
            return accumulators * self.smaller * self.larger
        left = along_rows(self.rows_ref, first_row, accumulators.shape)
        right = along_columns(self.columns_ref, first_column, accumulators.shape)
        return accumulators * jnp.minimum(left, right) * jnp.maximum(left, right)


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """How one consumer warpgroup finishes its part of an output tile and stores it.

    row, column: where the part begins in the result. factors: scales that do not change along K, or None. bias: GMEM
    ref (N,) or None. out: GMEM ref (M, N), of the tile's group where each has a result. staging: SMEM (warpgroups, 2,
    rows, columns), of which one half is filled while the other is copied. edge_staging: SMEM (warpgroups, rows,
    columns) for tiles of which only some rows belong to their group; None unless rows come in groups.
    """

    tile: Tile
    warpgroup: Warpgroup
    row: Any
    column: Any
    factors: EpilogueScales | None
    bias: Any
    out: Any
    staging: Any
    edge_staging: Any

    def store(self, offset: int, accumulators: jax.Array) -> None:
        """Stores accumulators (rows, columns) that begin `offset` columns into the warpgroup's part of the tile."""
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
            half = (offset // columns + piece) % 2
            first = self.column + offset + piece * columns
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # only the copy from the other half is in flight
            self.staging[warpgroup, half] = self._finished(_columns(accumulators, piece, columns), first)
            plgpu.commit_smem()
            target = self._target(self.row, self._rows, first, columns)
            plgpu.copy_smem_to_gmem(self.staging.at[warpgroup, half], target)

    def _store_some_rows(self, offset: int, accumulators: jax.Array, low, high) -> None:
        """Stores rows `low` to `high`, and leaves the others to the tiles of their groups."""
        columns, warpgroup = self.edge_staging.shape[-1], self.warpgroup.index
        for piece in range(accumulators.shape[1] // columns):
            first = self.column + offset + piece * columns
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self.edge_staging[warpgroup] = self._finished(_columns(accumulators, piece, columns), first)
            plgpu.commit_smem()
            self._copy_some_rows(first, low, high)

    def _copy_some_rows(self, first, low, high) -> None:
        """Copies rows `low` to `high` of `edge_staging` to the columns of the result from `first` on.

        The number of rows is data, but the shape of a copy is not: there is a copy for each power of two in that
        number. A copy of one row is one of contiguous bytes, not clipped to the columns of the result as others are:
        none may begin behind them.
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
        """Scaled, with the bias added, and rounded once."""
        result = self._scaled(accumulators, first_column)
        if self.bias is not None:
            result += along_columns(self.bias, first_column, result.shape)
        return result.astype(self.out.dtype)

    def _scaled(self, accumulators: jax.Array, first_column) -> jax.Array:
        if self.factors is None:
            return accumulators
        apply = functools.partial(self.factors.apply, accumulators, self.row, first_column)
        if self.tile.rows is None:
            return apply()
        # Rows of no group have no K steps. They stay zeros, even where a scale is NaN.
        return lax.cond(self.tile.steps > 0, apply, lambda: accumulators)

    def _target(self, row, rows: int, column, columns: int) -> Any:
        return self.out.at[pl.ds(row, rows), pl.ds(column, columns)]

    @property
    def _rows(self) -> int:
        return self.staging.shape[-2]


def _columns(values: jax.Array, piece: int, columns: int) -> jax.Array:
    return values[:, piece * columns : (piece + 1) * columns]


def along_rows(ref, first, shape: tuple[int, ...]) -> jax.Array:
    """One number, or those of `shape[0]` rows from `first` on, broadcast along the columns."""
    return _broadcast(ref, first, shape, axis=0)


def along_columns(ref, first, shape: tuple[int, ...]) -> jax.Array:
    """One number, or those of `shape[1]` columns from `first` on, broadcast along the rows."""
    return _broadcast(ref, first, shape, axis=1)


def _broadcast(ref, first, shape: tuple[int, ...], axis: int) -> jax.Array:
    if ref.shape == (1,):
        return plgpu.layout_cast(jnp.full(shape, ref[0]), plgpu.Layout.WGMMA)
    layout = plgpu.Layout.WGMMA.reduce(1 - axis)
    values = load(ref.at[pl.ds(first, shape[axis])], layout, optimized=False)
    return lax.broadcast_in_dim(values, shape, (axis,))
