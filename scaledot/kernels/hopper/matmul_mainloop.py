"""The main loop of a matmul on Hopper: TMA loads of operand tiles into SMEM, and the WGMMAs that consume them.

A `Pipeline` of SMEM stages connects the two. A stage holds one K step: 128 bytes along K of both operand tiles of a
CTA. The producer warpgroup waits until a stage is empty, then fills it by TMA; consumer warpgroups wait until it is
full, multiply, and release it. Steps are counted across all output tiles of a CTA, so that the producer loads the first
steps of a tile while the last steps of the tile before are multiplied.

A `MainLoop` accumulates one output tile, either over all of K in one WGMMA accumulator (`unpromoted`) or with the
partial accumulator of every step promoted to float32 registers (`promoted`).
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
from scaledot.kernels.hopper.memory_layouts import load
from scaledot.kernels.hopper.scale_blocks import SCALE_BLOCK
from scaledot.kernels.hopper.swizzle_atom import K_STEP_BYTES
from scaledot.kernels.hopper.tiles import Config, Tile, Warpgroup


class Inputs(NamedTuple):
    """GMEM refs of a kernel's inputs; see `matmul.matmul`. `table` is None without groups, a bias if there is none."""

    a: Any
    b: Any
    a_scales: Any
    b_scales: Any
    table: Any
    bias: Any
    bias_rows: Any


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Circular buffer of operand tiles in SMEM, filled by the producer warpgroup and read by the consumers.

    a, b: refs (stages, M or N, K) or, with `mn_major`, (stages, K, M or N).
    a_scales, b_scales: refs (stages, M or N) of scales that change along K; None if they do not, and `b_scales` also if
    b has 128×128 blocks.
    full, empty: one barrier for each stage. full: one arrival per TMA copy. empty: one per consumer warpgroup, of both
    CTAs in a cluster.
    """

    config: Config
    a: Any
    b: Any
    a_scales: Any
    b_scales: Any
    full: Any
    empty: Any
    mn_major: tuple[bool, bool]

    def stage(self, pipeline_step):
        return lax.rem(pipeline_step, self.config.stages)

    def load_tile(self, tile: Tile, inputs: Inputs) -> None:
        """Loads the operands of each K step of a tile, as soon as the step's stage is empty."""

        @pl.loop(0, tile.k_steps)
        def _(k_step):
            pipeline_step = tile.pipeline_step + k_step
            stage = self.stage(pipeline_step)
            pl.when(pipeline_step >= self.config.stages)(lambda: plgpu.barrier_wait(self.empty.at[stage]))
            if self.a_scales is not None:
                # Orders the consumers' reads of scales, by ld.shared in the generic proxy, before the TMA writes in the
                # async proxy. WGMMA reads operands through the async proxy, so they need no fence.
                plgpu.commit_smem()
            self._copy_operands(stage, tile, k_step, inputs)
            self._copy_scales(stage, tile, k_step, inputs)

    def _copy_operands(self, stage, tile: Tile, k_step, inputs: Inputs) -> None:
        a_rows, b_rows = self._rows(tile)
        tile_k = K_STEP_BYTES // self.a.dtype.itemsize
        ks = pl.ds((tile.k_start + k_step) * tile_k, tile_k)
        a_tile = inputs.a.at[ks, a_rows] if self.mn_major[0] else inputs.a.at[a_rows, ks]
        b_tile = inputs.b.at[ks, b_rows] if self.mn_major[1] else inputs.b.at[b_rows, ks]
        # The CTAs of a cluster multiply the same tile of one operand: each multicasts half of it to both.
        a_multicast, b_multicast = (
            "cta" if self.config.cluster_along == dimension else None for dimension in ("columns", "rows")
        )
        plgpu.copy_gmem_to_smem(a_tile, self.a.at[stage], self.full.at[stage], collective_axes=a_multicast)
        plgpu.copy_gmem_to_smem(b_tile, self.b.at[stage], self.full.at[stage], collective_axes=b_multicast)

    def _copy_scales(self, stage, tile: Tile, k_step, inputs: Inputs) -> None:
        a_rows, b_rows = self._rows(tile)
        scales = (inputs.a_scales, self.a_scales, a_rows), (inputs.b_scales, self.b_scales, b_rows)
        for gmem, smem, rows in scales:
            if smem is not None:
                plgpu.copy_gmem_to_smem(gmem.at[tile.k_start + k_step, rows], smem.at[stage], self.full.at[stage])

    def _rows(self, tile: Tile) -> tuple[Any, Any]:
        """The range of M that the CTA loads of a, and of N that it loads of b."""
        return pl.ds(tile.row, self.config.cta_m), pl.ds(tile.column, self.config.cta_n)

    def drain(self, pipeline_steps) -> None:
        """Waits until all stages are released.

        A CTA must not exit while its peer may still arrive on its empty barriers (CUTLASS `producer_tail`).
        """

        @pl.loop(lax.max(pipeline_steps - self.config.stages, 0), pipeline_steps)
        def _(pipeline_step):
            plgpu.barrier_wait(self.empty.at[self.stage(pipeline_step)])

    def wait(self, pipeline_step) -> None:
        """Waits until the operands of a step are in SMEM."""
        plgpu.barrier_wait(self.full.at[self.stage(pipeline_step)])

    def release(self, pipeline_step) -> None:
        """Releases the stage of a step to the producer."""
        plgpu.barrier_arrive(self.empty.at[self.stage(pipeline_step)])

    def operands(self, pipeline_step, first_row, rows: int, first_column, columns: int) -> tuple[Any, Any]:
        """SMEM refs for a WGMMA: a (rows, K) and b (K, columns)."""
        stage, a_rows, b_rows = self.stage(pipeline_step), pl.ds(first_row, rows), pl.ds(first_column, columns)
        a = self.a.at[stage, :, a_rows].T if self.mn_major[0] else self.a.at[stage, a_rows]
        b = self.b.at[stage, :, b_rows] if self.mn_major[1] else self.b.at[stage, b_rows].T
        return a, b

    def row_scales(self, pipeline_step, first_row, rows: int) -> Any:
        """Scales of rows of a in a step, (rows,) in registers; None if scales do not change along K."""
        if self.a_scales is None:
            return None
        ref = self.a_scales.at[self.stage(pipeline_step), pl.ds(first_row, rows)]
        return load(ref, plgpu.Layout.WGMMA.reduce(1), optimized=False)


@dataclasses.dataclass(frozen=True)
class MainLoop:
    """Accumulation over K of one consumer warpgroup's part of an output tile.

    b_block_scales: GMEM ref (K / 128, N / 128) of scales of 128×128 blocks of b, or None.
    """

    config: Config
    pipeline: Pipeline
    tile: Tile
    warpgroup: Warpgroup
    b_block_scales: Any

    def run(self, promote: bool, store: Callable[[int, jax.Array], None]) -> None:
        """Calls store(first column, accumulators) for each of the `n_splits` parts of the warpgroup's tile."""
        (self._promoted if promote else self._unpromoted)(store)

    def _unpromoted(self, store: Callable[[int, jax.Array], None]) -> None:
        """Accumulates all of K in the WGMMA accumulator."""
        assert self.b_block_scales is None, "scales that change along K need promoted accumulators"
        pipeline, tile = self.pipeline, self.tile

        @functools.partial(pl.run_scoped, accumulator=self._accumulator(self.config.wg_n))
        def _(accumulator):
            pl.loop(0, tile.k_steps)(functools.partial(self._unpromoted_step, accumulator))
            plgpu.wgmma_wait(0)
            pl.when(tile.k_steps > 0)(lambda: pipeline.release(tile.pipeline_step + tile.k_steps - 1))
            store(0, accumulator[...].astype(jnp.float32))

    def _unpromoted_step(self, accumulator, k_step) -> None:
        pipeline_step = self.tile.pipeline_step + k_step
        self.pipeline.wait(pipeline_step)
        plgpu.wgmma(accumulator, *self._operands(pipeline_step, self.warpgroup.column, self.config.wg_n))
        plgpu.wgmma_wait(1)  # one WGMMA stays in flight; the one of the step before has read its stage
        pl.when(k_step > 0)(lambda: self.pipeline.release(pipeline_step - 1))

    def _promoted(self, store: Callable[[int, jax.Array], None]) -> None:
        """Accumulates each K step in the tensor cores, and promotes its accumulators to float32 registers.

        Two sets of accumulators of a 64 × 256 tile exceed the registers of a thread, hence `n_splits`.
        """
        columns, splits = self._split_columns, self.config.n_splits
        spans = f"{columns} columns span several 128×128 blocks"
        assert self.b_block_scales is None or SCALE_BLOCK % columns == 0, spans
        zeros = plgpu.layout_cast(jnp.zeros((self.config.wg_m, columns), jnp.float32), plgpu.Layout.WGMMA)
        init = (zeros,) * splits, self._b_block_scales(jnp.int32(0))
        totals, _ = lax.fori_loop(0, self.tile.k_steps, self._promoted_step, init)
        for split, total in enumerate(totals):
            store(split * columns, total)

    def _promoted_step(self, k_step, carry):
        """Adds the partial accumulators of one step, times its scales, to the totals of all splits."""
        totals, b_block_scales = carry
        pipeline_step = self.tile.pipeline_step + k_step
        next_scales = self._b_block_scales(k_step + 1)  # one step ahead, to hide the latency of GMEM
        self.pipeline.wait(pipeline_step)
        row_scales = self.pipeline.row_scales(pipeline_step, self.warpgroup.row, self.config.wg_m)
        new_totals = []
        for split, (total, b_block_scale) in enumerate(zip(totals, b_block_scales, strict=True)):
            partial = self._partial(pipeline_step, split)
            new_totals.append(total + self._scaled(partial, pipeline_step, split, row_scales, b_block_scale))
        self.pipeline.release(pipeline_step)
        return tuple(new_totals), next_scales

    def _partial(self, pipeline_step, split: int) -> jax.Array:
        """The accumulators of one step as float32, (rows, columns of a split)."""

        def multiply(accumulator):
            column = self.warpgroup.column + split * self._split_columns
            plgpu.wgmma(accumulator, *self._operands(pipeline_step, column, self._split_columns))
            return accumulator[...]

        return pl.run_scoped(multiply, self._accumulator(self._split_columns)).astype(jnp.float32)

    def _scaled(
        self, accumulators: jax.Array, pipeline_step, split: int, row_scales: Any, b_block_scale: Any
    ) -> jax.Array:
        """Returns the accumulators of one step times the scales that change along K, if there are any."""
        if row_scales is not None:
            scales = row_scales if b_block_scale is None else row_scales * b_block_scale
            accumulators = accumulators * lax.broadcast_in_dim(scales, accumulators.shape, (0,))
        if self.pipeline.b_scales is not None:
            column_scales = self.pipeline.b_scales.at[self.pipeline.stage(pipeline_step)]
            column = self.warpgroup.column + split * self._split_columns
            accumulators = accumulators * along_columns(column_scales, column, accumulators.shape)
        return accumulators

    def _b_block_scales(self, k_step) -> tuple[Any, ...]:
        """The scale of the 128×128 block of b that each split multiplies in a step (clamped to the last step)."""
        if self.b_block_scales is None:
            return (None,) * self.config.n_splits
        k_block = self.tile.k_start + lax.max(lax.min(k_step, self.tile.k_steps - 1), 0)
        offsets = [split * self._split_columns for split in range(self.config.n_splits)]
        first_columns = (self.tile.column + self.warpgroup.column + offset for offset in offsets)
        return tuple(self.b_block_scales[k_block, lax.div(column, SCALE_BLOCK)] for column in first_columns)

    @property
    def _split_columns(self) -> int:
        return self.config.wg_n // self.config.n_splits

    def _operands(self, pipeline_step, column, columns: int) -> tuple[Any, Any]:
        return self.pipeline.operands(pipeline_step, self.warpgroup.row, self.config.wg_m, column, columns)

    def _accumulator(self, columns: int) -> Any:
        """An int32 accumulator for int8 operands, float32 otherwise."""
        dtype = jnp.int32 if self.pipeline.a.dtype == jnp.int8 else jnp.float32
        return plgpu.WGMMAAccumulatorRef((self.config.wg_m, columns), dtype)
