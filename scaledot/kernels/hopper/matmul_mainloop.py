"""The main loop of a matmul on Hopper: TMA loads of operand tiles into SMEM, and the WGMMAs that consume them.

A `Pipeline` of SMEM stages connects the two. A stage holds one K step: 128 bytes along K of both operand tiles of a
CTA. The producer warpgroup waits until a stage is empty, then fills it by TMA; consumer warpgroups wait until it is
full, multiply, and release it. Steps are counted across all output tiles of a CTA, so that the producer loads the first
steps of a tile while the last steps of the tile before are multiplied.

A `MainLoop` accumulates one output tile, either over all of K in the tensor cores' own accumulator (`chained`) or with
the partial accumulator of every step promoted to float32 registers (`promoted`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from scaledot.kernels.hopper.matmul_epilogue import along_columns
from scaledot.kernels.hopper.memory import SWIZZLE, load
from scaledot.kernels.hopper.sizes import BLOCK
from scaledot.kernels.hopper.tiles import Config, Tile, Warpgroup


class Inputs(NamedTuple):
    """GMEM refs of a kernel's inputs. `table` is None without groups, and `bias` where there is none."""

    a: Any
    b: Any
    row_scales: Any
    column_scales: Any
    table: Any
    bias: Any


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Circular buffer of operand tiles in SMEM, filled by the producer warpgroup and read by the consumers.

    a, b: refs (stages, rows, K) or, with `k_first`, (stages, K, rows). a_scales, b_scales: refs (stages, rows) of
    blockwise scales; None if scales do not change along K, and `b_scales` also if b has 128×128 blocks.
    full, empty: one barrier for each stage.
    """

    config: Config
    a: Any
    b: Any
    a_scales: Any
    b_scales: Any
    full: Any
    empty: Any
    k_first: tuple[bool, bool]

    def stage(self, step):
        return lax.rem(step, self.config.stages)

    def load_tile(self, tile: Tile, inputs: Inputs) -> None:
        """Loads the operands of each K step of a tile, as soon as the step's stage is empty."""

        @pl.loop(0, tile.steps)
        def _(step):
            stage = self.stage(tile.first + step)
            pl.when(tile.first + step >= self.config.stages)(lambda: plgpu.barrier_wait(self.empty.at[stage]))
            if self.a_scales is not None:
                # Orders the consumers' reads of scales (generic proxy) before the TMA writes (async proxy).
                plgpu.commit_smem()
            self._copy_operands(stage, tile, step, inputs)
            self._copy_scales(stage, tile, step, inputs)

    def _copy_operands(self, stage, tile: Tile, step, inputs: Inputs) -> None:
        a_rows, b_rows = self._rows(tile)
        tile_k = SWIZZLE // self.a.dtype.itemsize
        ks = pl.ds((tile.start + step) * tile_k, tile_k)
        a_tile = inputs.a.at[ks, a_rows] if self.k_first[0] else inputs.a.at[a_rows, ks]
        b_tile = inputs.b.at[ks, b_rows] if self.k_first[1] else inputs.b.at[b_rows, ks]
        # The CTAs of a cluster multiply the same tile of one operand: each multicasts half of it to both.
        a_multicast, b_multicast = (
            "cta" if self.config.cluster_dimension == dimension else None for dimension in ("columns", "rows")
        )
        plgpu.copy_gmem_to_smem(a_tile, self.a.at[stage], self.full.at[stage], collective_axes=a_multicast)
        plgpu.copy_gmem_to_smem(b_tile, self.b.at[stage], self.full.at[stage], collective_axes=b_multicast)

    def _copy_scales(self, stage, tile: Tile, step, inputs: Inputs) -> None:
        a_rows, b_rows = self._rows(tile)
        scales = (inputs.row_scales, self.a_scales, a_rows), (inputs.column_scales, self.b_scales, b_rows)
        for gmem, smem, rows in scales:
            if smem is not None:
                plgpu.copy_gmem_to_smem(gmem.at[tile.start + step, rows], smem.at[stage], self.full.at[stage])

    def _rows(self, tile: Tile) -> tuple[Any, Any]:
        """The rows of a and of b (columns of the result) that the CTA loads."""
        return pl.ds(tile.row, self.config.cta_rows), pl.ds(tile.column, self.config.cta_columns)

    def drain(self, steps) -> None:
        """Waits until all stages are released: a CTA must not exit while the other one of its cluster signals it."""

        @pl.loop(lax.max(steps - self.config.stages, 0), steps)
        def _(step):
            plgpu.barrier_wait(self.empty.at[self.stage(step)])

    def wait(self, step) -> None:
        """Waits until the operands of a step are in SMEM."""
        plgpu.barrier_wait(self.full.at[self.stage(step)])

    def release(self, step) -> None:
        """Releases the stage of a step to the producer."""
        plgpu.barrier_arrive(self.empty.at[self.stage(step)])

    def operands(self, step, first_row, rows: int, first_column, columns: int) -> tuple[Any, Any]:
        """SMEM refs for a WGMMA: a (rows, K) and b (K, columns)."""
        stage, a_rows, b_rows = self.stage(step), pl.ds(first_row, rows), pl.ds(first_column, columns)
        left = self.a.at[stage, :, a_rows].T if self.k_first[0] else self.a.at[stage, a_rows]
        right = self.b.at[stage, :, b_rows] if self.k_first[1] else self.b.at[stage, b_rows].T
        return left, right

    def row_scales(self, step, first_row, rows: int) -> Any:
        """Blockwise scales of rows of a in a step, (rows,) in registers; None if scales do not change along K."""
        if self.a_scales is None:
            return None
        ref = self.a_scales.at[self.stage(step), pl.ds(first_row, rows)]
        return load(ref, plgpu.Layout.WGMMA.reduce(1), optimized=False)


@dataclasses.dataclass(frozen=True)
class MainLoop:
    """Accumulation over K of one consumer warpgroup's part of an output tile.

    square_scales: GMEM ref (K / 128, N / 128) of scales of 128×128 blocks of b, or None.
    """

    config: Config
    pipeline: Pipeline
    tile: Tile
    warpgroup: Warpgroup
    square_scales: Any

    def run(self, promote: bool, store: Callable[[int, jax.Array], None]) -> None:
        """Calls store(first column, accumulators) for each column part of the warpgroup's tile."""
        (self._promoted if promote else self._chained)(store)

    def _chained(self, store: Callable[[int, jax.Array], None]) -> None:
        """Accumulates all of K in the tensor cores' accumulator."""
        assert self.square_scales is None, "blockwise scales need promoted accumulators"
        pipeline, tile = self.pipeline, self.tile

        @functools.partial(pl.run_scoped, accumulator=self._accumulator(self.config.columns))
        def _(accumulator):
            pl.loop(0, tile.steps)(functools.partial(self._chained_step, accumulator))
            plgpu.wgmma_wait(0)
            pl.when(tile.steps > 0)(lambda: pipeline.release(tile.first + tile.steps - 1))
            store(0, accumulator[...].astype(jnp.float32))

    def _chained_step(self, accumulator, step) -> None:
        at = self.tile.first + step
        self.pipeline.wait(at)
        plgpu.wgmma(accumulator, *self._operands(at, self.warpgroup.column, self.config.columns))
        plgpu.wgmma_wait(1)  # one WGMMA stays in flight; the one of the step before has read its stage
        pl.when(step > 0)(lambda: self.pipeline.release(at - 1))

    def _promoted(self, store: Callable[[int, jax.Array], None]) -> None:
        """Accumulates each K step in the tensor cores, and promotes its accumulators to float32 registers.

        Two sets of accumulators of a 64 × 256 tile exceed the registers of a thread, hence the column parts.
        """
        columns, parts = self._part_columns, self.config.parts
        assert self.square_scales is None or BLOCK % columns == 0, f"{columns} columns span several 128×128 blocks"
        zeros = plgpu.layout_cast(jnp.zeros((self.config.rows, columns), jnp.float32), plgpu.Layout.WGMMA)
        start = (zeros,) * parts, self._square_scales(jnp.int32(0))
        totals, _ = lax.fori_loop(0, self.tile.steps, self._promoted_step, start)
        for part, total in enumerate(totals):
            store(part * columns, total)

    def _promoted_step(self, step, carry):
        """Adds the partial accumulators of one step, times its scales, to the totals of all column parts."""
        totals, square_scales = carry
        at = self.tile.first + step
        next_scales = self._square_scales(step + 1)  # one step ahead, to hide the latency of GMEM
        self.pipeline.wait(at)
        row_scales = self.pipeline.row_scales(at, self.warpgroup.row, self.config.rows)
        new_totals = []
        for part, (total, square_scale) in enumerate(zip(totals, square_scales, strict=True)):
            new_totals.append(total + self._scaled(self._partial(at, part), at, part, row_scales, square_scale))
        self.pipeline.release(at)
        return tuple(new_totals), next_scales

    def _partial(self, at, part: int) -> jax.Array:
        """The accumulators of one step as float32, (rows, columns of a part)."""

        def multiply(accumulator):
            column = self.warpgroup.column + part * self._part_columns
            plgpu.wgmma(accumulator, *self._operands(at, column, self._part_columns))
            return accumulator[...]

        return pl.run_scoped(multiply, self._accumulator(self._part_columns)).astype(jnp.float32)

    def _scaled(self, accumulators: jax.Array, at, part: int, row_scales: Any, square_scale: Any) -> jax.Array:
        """Returns the accumulators of one step times their blockwise scales, if there are any."""
        if row_scales is not None:
            scales = row_scales if square_scale is None else row_scales * square_scale
            accumulators = accumulators * lax.broadcast_in_dim(scales, accumulators.shape, (0,))
        if self.pipeline.b_scales is not None:
            column_scales = self.pipeline.b_scales.at[self.pipeline.stage(at)]
            column = self.warpgroup.column + part * self._part_columns
            accumulators = accumulators * along_columns(column_scales, column, accumulators.shape)
        return accumulators

    def _square_scales(self, step) -> tuple[Any, ...]:
        """The scale of the 128×128 block of b that each column part multiplies in a step (clamped to the last step)."""
        if self.square_scales is None:
            return (None,) * self.config.parts
        block = self.tile.start + lax.max(lax.min(step, self.tile.steps - 1), 0)
        columns = [part * self._part_columns for part in range(self.config.parts)]
        lefts = (self.tile.column + self.warpgroup.column + column for column in columns)
        return tuple(self.square_scales[block, lax.div(left, BLOCK)] for left in lefts)

    @property
    def _part_columns(self) -> int:
        return self.config.columns // self.config.parts

    def _operands(self, at, column, columns: int) -> tuple[Any, Any]:
        return self.pipeline.operands(at, self.warpgroup.row, self.config.rows, column, columns)

    def _accumulator(self, columns: int) -> Any:
        """An int32 accumulator for int8 operands, float32 otherwise."""
        dtype = jnp.int32 if self.pipeline.a.dtype == jnp.int8 else jnp.float32
        return plgpu.WGMMAAccumulatorRef((self.config.rows, columns), dtype)
