"""The epilogue of a matmul on Hopper: scales float32 accumulators, adds the bias, rounds once and stores to GMEM.

Scales that change along K were applied in the main loop; others are applied here. The result is staged in SMEM and
stored by asynchronous TMA copies, while the warpgroup continues.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from scaledot.kernels.hopper.memory_layouts import load
from scaledot.kernels.hopper.tiles import Tile, Warpgroup


class EpilogueScales:
    """Scales of a and b that are applied to accumulators: GMEM refs (M,) and (N,), or (1,) for per-tensor scales."""

    def __init__(self, a_scales, b_scales):
        self.a_scales, self.b_scales = a_scales, b_scales
        self.is_per_tensor = a_scales.shape == b_scales.shape == (1,)
        if self.is_per_tensor:
            a_scale, b_scale = a_scales[0], b_scales[0]
            self.smaller, self.larger = jnp.minimum(a_scale, b_scale), jnp.maximum(a_scale, b_scale)

    def apply(self, accumulators: jax.Array, first_row, first_column) -> jax.Array:
        """Multiplies by both scales, the smaller one first so that the intermediate result does not overflow.

        The intermediate result is subnormal, and may lose bits, only if |accumulator| * smaller scale < 2^-126. Nonzero
        products of FP8 codes are at least 2^-32, so a scale of less than 2^-94 is needed for that.
        """
        if self.is_per_tensor:
            return accumulators * self.smaller * self.larger
        a_scales = along_rows(self.a_scales, first_row, accumulators.shape)
        b_scales = along_columns(self.b_scales, first_column, accumulators.shape)
        return accumulators * jnp.minimum(a_scales, b_scales) * jnp.maximum(a_scales, b_scales)


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """The epilogue of one consumer warpgroup's part of an output tile.

    row, column: the first row and column of the part in the result.
    scales: scales of a and b, or None if the main loop has applied them.
    bias, bias_rows: GMEM refs (N,) and (M,) or None; their outer product is added, or without bias_rows the bias.
    out: GMEM ref (M, N), the group's result if K is in groups.
    staging: SMEM (consumers, 2, rows, columns), a double buffer for each consumer.
    edge_staging: SMEM (consumers, rows, 128 bytes of columns), unswizzled, one buffer for each consumer, for tiles that
    a group of rows fills only in part; None without groups of rows.
    """

    tile: Tile
    warpgroup: Warpgroup
    row: Any
    column: Any
    scales: EpilogueScales | None
    bias: Any
    bias_rows: Any
    out: Any
    staging: Any
    edge_staging: Any

    def store(self, offset: int, accumulators: jax.Array) -> None:
        """Stores accumulators (rows, columns), which start at column `offset` of the warpgroup's part of the tile."""
        if self.tile.rows is None:
            self._store_all_rows(offset, accumulators)
            return
        low, high = (jnp.clip(bound - self.warpgroup.row, 0, self._rows) for bound in self.tile.rows)
        lax.cond(
            high - low == self._rows,
            lambda: self._store_all_rows(offset, accumulators),
            lambda: self._store_some_rows(offset, accumulators, low, high),
        )

    def _store_all_rows(self, offset: int, accumulators: jax.Array) -> None:
        columns, warpgroup = self.staging.shape[-1], self.warpgroup.index
        for chunk in range(accumulators.shape[1] // columns):
            buffer = (offset // columns + chunk) % 2
            first = self.column + offset + chunk * columns
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # only the copy from the other buffer is in flight
            self.staging[warpgroup, buffer] = self._scale_bias_round(_columns(accumulators, chunk, columns), first)
            plgpu.commit_smem()
            out = self._out_slice(self.row, self._rows, first, columns)
            plgpu.copy_smem_to_gmem(self.staging.at[warpgroup, buffer], out)

    def _store_some_rows(self, offset: int, accumulators: jax.Array, low, high) -> None:
        """Stores rows [low, high); the other rows belong to other groups, whose tiles store them."""
        columns, warpgroup = self.edge_staging.shape[-1], self.warpgroup.index
        for chunk in range(accumulators.shape[1] // columns):
            first = self.column + offset + chunk * columns
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self.edge_staging[warpgroup] = self._scale_bias_round(_columns(accumulators, chunk, columns), first)
            plgpu.commit_smem()
            self._copy_some_rows(first, low, high)

    def _copy_some_rows(self, first, low, high) -> None:
        """Copies rows [low, high) of `edge_staging` to the result, from column `first` on.

        The number of rows is dynamic but the shape of a TMA copy is static, so there is a predicated copy for each bit
        of the number. Mosaic copies a single row by `cp.async.bulk`, a copy of contiguous bytes that, unlike a tensor
        copy, is clipped at the end of the array only: past the end of a row it would write into the next one. Hence the
        test of `first`; N is a multiple of the columns of a copy.
        """
        row, size = low, self._rows // 2
        while size:
            copy = functools.partial(self._copy_rows, row, size, first)
            pl.when(((high - low) & size != 0) & (first < self.out.shape[-1]))(copy)
            row, size = row + ((high - low) & size), size // 2

    def _copy_rows(self, row, rows: int, first) -> None:
        source = self.edge_staging.at[self.warpgroup.index, pl.ds(row, rows)]
        plgpu.copy_smem_to_gmem(source, self._out_slice(self.row + row, rows, first, source.shape[-1]))

    def _scale_bias_round(self, accumulators: jax.Array, first_column) -> jax.Array:
        """Scales accumulators, adds the bias and rounds once, to the output dtype."""
        result = self._scaled(accumulators, first_column)
        if self.bias is not None:
            bias = along_columns(self.bias, first_column, result.shape)
            result += bias if self.bias_rows is None else along_rows(self.bias_rows, self.row, result.shape) * bias
        return result.astype(self.out.dtype)

    def _scaled(self, accumulators: jax.Array, first_column) -> jax.Array:
        if self.scales is None:
            return accumulators
        apply = functools.partial(self.scales.apply, accumulators, self.row, first_column)
        if self.tile.rows is None:
            return apply()
        # Rows after the last group have no K steps. They are zero, even if a scale is NaN.
        return lax.cond(self.tile.k_steps > 0, apply, lambda: accumulators)

    def _out_slice(self, row, rows: int, column, columns: int) -> Any:
        return self.out.at[pl.ds(row, rows), pl.ds(column, columns)]

    @property
    def _rows(self) -> int:
        return self.staging.shape[-2]


def _columns(values: jax.Array, chunk: int, columns: int) -> jax.Array:
    return values[:, chunk * columns : (chunk + 1) * columns]


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
