"""Weight-only matmuls on Hopper's tensor cores: few bfloat16 rows times packed weights, which are read once.

Such a matmul is bound by memory bandwidth, so weights stay packed until they are in registers. There they are unpacked
to the A operand of WGMMA. A and B are swapped (swapAB): columns of the weights are rows of the transposed result, and
the few rows of x, in SMEM, are its columns.

A CTA computes a column tile, 256 columns of the weights, over its share of K (split-K; `weight_only_mainloop`). Its
warpgroups write their totals to SMEM in the order of the columns; the epilogue adds those of the K slices and stores
the result. The caller adds the results of the CTAs that share a column tile.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from scaledot.kernels.hopper.launch import call_exported
from scaledot.kernels.hopper.memory_layouts import THREADS, load
from scaledot.kernels.hopper.registers import WORDS_PER_K
from scaledot.kernels.hopper.support import kernel_name
from scaledot.kernels.hopper.unpack import Unpacker, in_column_order
from scaledot.kernels.hopper.weight_only_mainloop import (
    CTA_COLUMNS,
    CTA_FRAGMENTS,
    PRODUCER_REGISTERS,
    SLICE_K,
    Config,
    Pipeline,
    StageLayout,
)

MAX_CONSUMERS = 4  # consumer warpgroups of a CTA


def config_for(rows: int, columns: int, k: int, unpacker: Unpacker, sm_count: int) -> Config:
    """Returns the config of a matmul (rows, k) × (k, columns).

    Column tiles are split along K until every SM has a CTA, if there are enough K steps; a CTA has as many pipeline
    stages as fit its SMEM.
    """
    rows = _padded_rows(rows)
    consumers = MAX_CONSUMERS if unpacker.terms <= 2 else MAX_CONSUMERS // 2  # more terms need more registers
    # With more rows than this, the accumulators of all 256 columns and the unpacking exceed a thread's registers.
    rows_per_n_warpgroup = 16 if unpacker.terms == 1 and not unpacker.block else 8
    warpgroups_n = min(max(1, rows // rows_per_n_warpgroup), consumers)
    config = Config(1, consumers // warpgroups_n, warpgroups_n, 1)
    steps, column_tiles = pl.cdiv(k, config.step_k), pl.cdiv(columns, CTA_COLUMNS)
    split_k = max(1, min(sm_count // column_tiles, steps))
    layout = StageLayout(config, unpacker, SLICE_K, rows, scaled=True)  # upper bound: smallest groups, with scales
    return dataclasses.replace(config, stages=layout.max_stages(), split_k=split_k)


def split_k_partials(
    x: jax.Array, words: jax.Array, scales: jax.Array | None, *, unpacker: Unpacker, group: int, config: Config
) -> jax.Array:
    """Returns partial results of x (rows, K) @ weights (K, N): float32 (split_k, packed tiles, rows, columns of each).

    words: int32 (K, N / unpacker.per_word). scales: float32 (K / group, N), with N padded to whole column tiles and
    `group` a multiple of 64; or the 8-bit scales that `unpacker` applies, int32 (K / unpacker.block, N / 4); or None.
    K is a multiple of 8, and a row of x or of words a multiple of 128 bytes.
    """
    rows, k = x.shape
    layout = StageLayout(config, unpacker, group, _padded_rows(rows), scales is not None)
    column_tiles = pl.cdiv(words.shape[1] * unpacker.per_word, CTA_COLUMNS)
    kernel = Kernel(layout, rows, steps=pl.cdiv(k, config.step_k), column_tiles=column_tiles)
    partials = kernel.call(x, words, *([] if scales is None else [scales]))
    return partials.reshape(*partials.shape[:3], -1)


def _padded_rows(rows: int) -> int:
    """Rows of x padded to 8, 16, 32 or 64, the N of a WGMMA."""
    return max(8, 1 << (rows - 1).bit_length())


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The kernel: its static parameters, its call, and its body.

    rows: of x, without padding. steps: K steps. column_tiles: of the result, 256 columns each.
    """

    layout: StageLayout
    rows: int
    steps: int
    column_tiles: int

    @property
    def packed_tiles(self) -> int:
        """Packed tiles of a column tile."""
        return CTA_FRAGMENTS // self.layout.unpacker.fragments_per_packed_tile

    @property
    def column_shape(self) -> tuple[int, int, int]:
        """The columns of a packed tile as three dims: words, and the two dims of a word's columns."""
        unpacker = self.layout.unpacker
        return WORDS_PER_K, *unpacker.column_shape(unpacker.fragments_per_packed_tile)

    def call(self, *operands: jax.Array) -> jax.Array:
        config = self.layout.config
        out = (config.split_k, self.column_tiles * self.packed_tiles, self.rows, *self.column_shape)
        kernel = plgpu.kernel(
            self.body,
            out_type=jax.ShapeDtypeStruct(out, jnp.float32),
            grid=(config.split_k, self.column_tiles),
            grid_names=("split_k", "column_tile"),
            kernel_name=kernel_name("matmul_weight_only"),
            num_threads=config.consumers + 1,
            thread_name="warpgroup",
            scratch_types=self.scratch(),
            compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        )
        return call_exported(self, kernel, *operands)

    def scratch(self) -> list[Any]:
        """SMEM and barriers of a CTA, in the order of the kernel's refs."""
        config = self.layout.config
        totals = (config.warpgroups_k, self.packed_tiles, self.layout.rows, *self.column_shape)
        return [
            *self.layout.smem_types(),
            plgpu.SMEM(totals, jnp.float32),
            plgpu.Barrier(num_arrivals=self.layout.tma_loads, num_barriers=config.stages),  # full
            plgpu.Barrier(num_arrivals=config.consumers, num_barriers=config.stages),  # empty
            plgpu.Barrier(num_arrivals=config.consumers),  # totals_written
        ]

    def body(self, *refs) -> None:
        """The kernel of every warpgroup of a CTA; the last one is the producer."""
        *gmem, out, x, words, scales, totals, full, empty, totals_written = refs
        config = self.layout.config
        column_tile, split = lax.axis_index("column_tile"), lax.axis_index("split_k")
        first_step, steps = _k_steps_of_split(self.steps, config.split_k, split)
        pipeline = Pipeline(self.layout, x, words, scales, full, empty, steps)
        warpgroup = lax.axis_index("warpgroup")

        def produce():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            pipeline.load(gmem, column_tile, first_step)

        def consume(n_index: int):
            plgpu.set_max_registers(config.consumer_registers, action="increase")
            self._multiply(pipeline, first_step, totals, warpgroup, n_index)
            plgpu.barrier_arrive(totals_written)
            plgpu.barrier_wait(totals_written)
            packed_tiles = pl.ds(column_tile * self.packed_tiles, self.packed_tiles)
            _reduce_k_slices(config, totals, warpgroup, out.at[split, packed_tiles])

        pl.when(warpgroup == config.consumers)(produce)
        # Unpacking needs static indices of fragments, so there is a branch for each index along N.
        for n_index in range(config.warpgroups_n):
            has_index = (warpgroup < config.consumers) & (lax.rem(warpgroup, config.warpgroups_n) == n_index)
            pl.when(has_index)(functools.partial(consume, n_index))

    def _multiply(self, pipeline: Pipeline, first_step, totals, warpgroup, n_index: int) -> None:
        """Accumulates a warpgroup's fragments over its K slices, and writes them to `totals` in SMEM."""
        k_index = lax.div(warpgroup, self.layout.config.warpgroups_n)
        count = self.layout.warpgroup_fragments
        fragment_range = range(n_index * count, (n_index + 1) * count)
        accumulators = pipeline.accumulate(first_step, k_index, fragment_range)
        _write_totals(totals.at[k_index], self.layout.unpacker, fragment_range, accumulators)


def _k_steps_of_split(steps: int, split_k: int, split) -> tuple[Any, Any]:
    """The first K step of one of `split_k` CTAs, and its number of steps, which may be 0."""
    share = pl.cdiv(steps, split_k)
    return split * share, lax.max(lax.min(share, steps - split * share), 0)


def _write_totals(totals, unpacker: Unpacker, fragment_range: range, accumulators: list[jax.Array]) -> None:
    """Writes the accumulators of fragments to SMEM (packed tiles, rows, *column_shape), in the order of columns."""
    per_packed_tile = unpacker.fragments_per_packed_tile
    for packed_tile in sorted({fragment // per_packed_tile for fragment in fragment_range}):
        members = [fragment for fragment in fragment_range if fragment // per_packed_tile == packed_tile]
        positions = pl.ds(members[0] % per_packed_tile, len(members))
        by_bytes = unpacker.by_bytes
        ref = totals.at[packed_tile, :, :, positions] if by_bytes else totals.at[packed_tile, :, :, :, positions]
        ref[...] = in_column_order([accumulators[fragment - fragment_range[0]] for fragment in members], unpacker)


def _reduce_k_slices(config: Config, totals, warpgroup, out) -> None:
    """Stores the sum of the K slices' totals; consumer warpgroups take rows in turn."""
    packed_tiles, rows, *columns = out.shape
    layout = plgpu.Layout.WG_STRIDED(tuple(columns), vec_size=math.prod(columns) // THREADS)

    @pl.loop(0, pl.cdiv(rows, config.consumers))
    def _(i):
        row = i * config.consumers + warpgroup

        @pl.when(row < rows)
        def _():
            for packed_tile in range(packed_tiles):
                slices = [load(totals.at[k, packed_tile, row], layout) for k in range(config.warpgroups_k)]
                out[packed_tile, row] = functools.reduce(jnp.add, slices)
