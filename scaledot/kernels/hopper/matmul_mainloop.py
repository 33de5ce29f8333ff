"""The main loop of a matmul on Hopper: copies of operand tiles into SMEM, and the WGMMAs that consume them.

A `Pipeline` of SMEM slots (stages) connects the two. A slot holds one K step: 128 bytes along K of both operand
tiles of a CTA. The producer warpgroup waits until a slot is empty, then fills it by TMA; consumer warpgroups wait until
it is full, multiply, and release it. Steps are counted across all output tiles of a CTA, so that the producer fetches
the first steps of a tile while the last ones of the tile before are multiplied.

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
from scaledot.kernels.hopper.sizes import LINE
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
    """SMEM slots of operand tiles, filled by the producer warpgroup and consumed by the others, in turn.

    a, b: refs (stages, rows, K) or, with `k_first`, (stages, K, rows). a_factors, b_factors: refs (stages, rows)
    of scales that change along K; None where scales do not, and for b also where it has one for each 128×128 block.
    full, empty: one barrier for each slot.
    """

    config: Config
    a: Any
    b: Any
    a_scales: Any
    b_scales: Any
    full: Any
    empty: Any
    k_first: tuple[bool, bool]

    def slot(self, step):
        return lax.rem(step, self.config.stages)

    def fetch_tile(self, tile: Tile, inputs: Inputs) -> None:
        """Fills a slot for each K step of a tile, as soon as it is empty."""

        @pl.loop(0, tile.steps)
        def _(step):
            slot = self.slot(tile.first + step)
            pl.when(tile.first + step >= self.config.stages)(lambda: plgpu.barrier_wait(self.empty.at[slot]))
            if self.a_scales is not None:
                # Threads have read scales from this slot, and the copy overwrites them through the async proxy.
                plgpu.commit_smem()
            self._copy_operands(slot, tile, step, inputs)
            self._copy_scales(slot, tile, step, inputs)

    def _copy_operands(self, slot, tile: Tile, step, inputs: Inputs) -> None:
        a_rows, b_rows = self._rows(tile)
        depth = SWIZZLE // self.a.dtype.itemsize
        along = pl.ds((tile.start + step) * depth, depth)
        a_tile = inputs.a.at[along, a_rows] if self.k_first[0] else inputs.a.at[a_rows, along]
        b_tile = inputs.b.at[along, b_rows] if self.k_first[1] else inputs.b.at[b_rows, along]
        # CTAs of a pair multiply the same tile of one operand: each copies half of it into the SMEM of both.
        a_shared, b_shared = ("member" if self.config.pair == by else None for by in ("columns", "rows"))
        plgpu.copy_gmem_to_smem(a_tile, self.a.at[slot], self.full.at[slot], collective_axes=a_shared)
        plgpu.copy_gmem_to_smem(b_tile, self.b.at[slot], self.full.at[slot], collective_axes=b_shared)

    def _copy_scales(self, slot, tile: Tile, step, inputs: Inputs) -> None:
        a_rows, b_rows = self._rows(tile)
        factors = (inputs.row_scales, self.a_scales, a_rows), (inputs.column_scales, self.b_scales, b_rows)
        for gmem, smem, rows in factors:
            if smem is not None:
                plgpu.copy_gmem_to_smem(gmem.at[tile.start + step, rows], smem.at[slot], self.full.at[slot])

    def _rows(self, tile: Tile) -> tuple[Any, Any]:
        """The rows of a and of b (the columns of the result) that the CTA multiplies."""
        return pl.ds(tile.row, self.config.program_rows), pl.ds(tile.column, self.config.program_columns)

    def drain(self, steps) -> None:
        """Waits until all slots are released: a CTA may not exit while the other of its pair still signals it."""

        @pl.loop(lax.max(steps - self.config.stages, 0), steps)
        def _(step):
            plgpu.barrier_wait(self.empty.at[self.slot(step)])

    def wait(self, step) -> None:
        """Waits until the operands of a step are in SMEM."""
        plgpu.barrier_wait(self.full.at[self.slot(step)])

    def release(self, step) -> None:
        """Gives the slot of a step back to the producer."""
        plgpu.barrier_arrive(self.empty.at[self.slot(step)])

    def operands(self, step, first_row, rows: int, first_column, columns: int) -> tuple[Any, Any]:
        """SMEM refs for a WGMMA: a (rows, K) and b (K, columns)."""
        slot, a_rows, b_rows = self.slot(step), pl.ds(first_row, rows), pl.ds(first_column, columns)
        left = self.a.at[slot, :, a_rows].T if self.k_first[0] else self.a.at[slot, a_rows]
        right = self.b.at[slot, :, b_rows] if self.k_first[1] else self.b.at[slot, b_rows].T
        return left, right

    def row_scales(self, step, first_row, rows: int) -> Any:
        """Scales of rows of a in a step, (rows,) in registers; None where they do not change along K."""
        if self.a_scales is None:
            return None
        ref = self.a_scales.at[self.slot(step), pl.ds(first_row, rows)]
        return load(ref, plgpu.Layout.WGMMA.reduce(1), optimized=False)


@dataclasses.dataclass(frozen=True)
class MainLoop:
    """Accumulation over K of one consumer warpgroup's part of an output tile.

    square_factors: GMEM ref (K / 128, N / 128) of scales of 128×128 blocks of b, or None.
    """

    config: Config
    ring: Pipeline
    tile: Tile
    warpgroup: Warpgroup
    square_scales: Any

    def run(self, promote: bool, store: Callable[[int, jax.Array], None]) -> None:
        """Calls store(first column, accumulators) for each piece of the warpgroup's part of the tile."""
        (self._promoted if promote else self._chained)(store)

    def _chained(self, store: Callable[[int, jax.Array], None]) -> None:
        """Accumulates all of K in the tensor cores' accumulator."""
        assert self.square_scales is None, "scales that change along K need promoted accumulators"
        ring, tile = self.ring, self.tile

        @functools.partial(pl.run_scoped, accumulator=self._accumulator(self.config.columns))
        def _(accumulator):
            pl.loop(0, tile.steps)(functools.partial(self._chained_step, accumulator))
            plgpu.wgmma_wait(0)
            pl.when(tile.steps > 0)(lambda: ring.release(tile.first + tile.steps - 1))
            store(0, accumulator[...].astype(jnp.float32))

    def _chained_step(self, accumulator, step) -> None:
        at = self.tile.first + step
        self.ring.wait(at)
        plgpu.wgmma(accumulator, *self._operands(at, self.warpgroup.column, self.config.columns))
        plgpu.wgmma_wait(1)  # one WGMMA stays in flight; that of the step before has read its slot
        pl.when(step > 0)(lambda: self.ring.release(at - 1))

    def _promoted(self, store: Callable[[int, jax.Array], None]) -> None:
        """Accumulates each step in the tensor cores, and promotes it to float32 registers.

        A thread has no registers for two accumulators of its whole tile, so the tile is multiplied in parts.
        """
        columns, parts = self._part_columns, self.config.parts
        assert self.square_scales is None or LINE % columns == 0, f"{columns} columns have more than one scale"
        zeros = plgpu.layout_cast(jnp.zeros((self.config.rows, columns), jnp.float32), plgpu.Layout.WGMMA)
        start = (zeros,) * parts, self._square_scales(jnp.int32(0))
        totals, _ = lax.fori_loop(0, self.tile.steps, self._promoted_step, start)
        for part, total in enumerate(totals):
            store(part * columns, total)

    def _promoted_step(self, step, carry):
        """Adds the partial accumulators of one step, times its scales, to the totals of all parts."""
        totals, square_scales = carry
        at = self.tile.first + step
        following = self._square_scales(step + 1)  # a step ahead, to hide the latency of the loads
        self.ring.wait(at)
        row_scales = self.ring.row_scales(at, self.warpgroup.row, self.config.rows)
        grown = []
        for part, (total, square) in enumerate(zip(totals, square_scales, strict=True)):
            grown.append(total + self._scaled(self._partial(at, part), at, part, row_scales, square))
        self.ring.release(at)
        return tuple(grown), following

    def _partial(self, at, part: int) -> jax.Array:
        """float32 accumulators (rows, columns of a part) of one step."""

        def multiply(accumulator):
            column = self.warpgroup.column + part * self._part_columns
            plgpu.wgmma(accumulator, *self._operands(at, column, self._part_columns))
            return accumulator[...]

        return pl.run_scoped(multiply, self._accumulator(self._part_columns)).astype(jnp.float32)

    def _scaled(self, accumulators: jax.Array, at, part: int, row_scales: Any, square_factor: Any) -> jax.Array:
        """The accumulators of one step times the scales of that step, where scales change along K."""
        if row_scales is not None:
            factors = row_scales if square_factor is None else row_scales * square_factor
            accumulators = accumulators * lax.broadcast_in_dim(factors, accumulators.shape, (0,))
        if self.ring.b_scales is not None:
            column_scales = self.ring.b_scales.at[self.ring.slot(at)]
            column = self.warpgroup.column + part * self._part_columns
            accumulators = accumulators * along_columns(column_scales, column, accumulators.shape)
        return accumulators

    def _square_scales(self, step) -> tuple[Any, ...]:
        """The scale of each part's 128×128 block of b, in a step or in the last one for steps after it."""
        if self.square_scales is None:
            return (None,) * self.config.parts
        block = self.tile.start + lax.max(lax.min(step, self.tile.steps - 1), 0)
        columns = [part * self._part_columns for part in range(self.config.parts)]
        lefts = (self.tile.column + self.warpgroup.column + column for column in columns)
        return tuple(self.square_scales[block, lax.div(left, LINE)] for left in lefts)

    @property
    def _part_columns(self) -> int:
        return self.config.columns // self.config.parts

    def _operands(self, at, column, columns: int) -> tuple[Any, Any]:
        return self.ring.operands(at, self.warpgroup.row, self.config.rows, column, columns)

    def _accumulator(self, columns: int) -> Any:
        """Integers are accumulated in int32, exactly."""
        dtype = jnp.int32 if self.ring.a.dtype == jnp.int8 else jnp.float32
        return plgpu.WGMMAAccumulatorRef((self.config.rows, columns), dtype)
