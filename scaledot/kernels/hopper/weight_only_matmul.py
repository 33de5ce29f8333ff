"""Weight-only matmuls on Hopper's tensor cores: few bfloat16 rows times packed weights, which are read once.

Such a matmul is bound by memory bandwidth, so weights stay packed until they are in registers. There they are unpacked
to the left operand of WGMMA: columns of the weights are rows of the transposed result, and the few rows of x, in SMEM,
are its columns.

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

from scaledot.kernels.hopper.launch import launch
from scaledot.kernels.hopper.memory import THREADS, load
from scaledot.kernels.hopper.registers import WORDS
from scaledot.kernels.hopper.support import kernel_name
from scaledot.kernels.hopper.unpack import Unpacker, in_column_order
from scaledot.kernels.hopper.weight_only_mainloop import (
    CTA_COLUMNS,
    CTA_TILES,
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
    consumers = MAX_CONSUMERS if unpacker.slices <= 2 else MAX_CONSUMERS // 2  # more slices need more registers
    # With more rows than this, the accumulators of all 256 columns and the unpacking exceed a thread's registers.
    max_rows = 16 if unpacker.slices == 1 and not unpacker.block else 8
    warpgroups_n = min(max(1, rows // max_rows), consumers)
    config = Config(1, consumers // warpgroups_n, warpgroups_n, 1)
    steps, column_tiles = pl.cdiv(k, config.step_k), pl.cdiv(columns, CTA_COLUMNS)
    split_k = max(1, min(sm_count // column_tiles, steps))
    layout = StageLayout(config, unpacker, SLICE_K, rows, scaled=True)
    return dataclasses.replace(config, stages=layout.max_stages(), split_k=split_k)


def decode(
    x: jax.Array, words: jax.Array, scales: jax.Array | None, *, unpacker: Unpacker, group: int, config: Config
) -> jax.Array:
    """Returns partial results of x (rows, K) @ weights (K, N): float32 (split_k, word tiles, rows, columns of each).

    words: int32 (K, N / unpacker.per_word). scales: float32 (K / group, N), with N padded to whole column tiles and
    `group` a multiple of 64; or the 8-bit scales that `unpacker` applies, int32 (K / unpacker.block, N / 4); or None.
    K is a multiple of 8, and a row of x or of words is a multiple of 128 bytes, or shorter.
    """
    rows, k = x.shape
    layout = StageLayout(config, unpacker, group, _padded_rows(rows), scales is not None)
    column_tiles = pl.cdiv(words.shape[1] * unpacker.per_word, CTA_COLUMNS)
    kernel = Kernel(layout, rows, steps=pl.cdiv(k, config.step_k), column_tiles=column_tiles)
    partials = kernel.launch(x, words, *([] if scales is None else [scales]))
    return partials.reshape(*partials.shape[:3], -1)


def _padded_rows(rows: int) -> int:
    """Rows of x padded to 8, 16, 32 or 64, the N of a WGMMA."""
    return max(8, 1 << (rows - 1).bit_length())


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The kernel: its static parameters, its launch, and its body.

    rows: of x, without padding. steps: K steps. column_tiles: of the result, 256 columns each.
    """

    layout: StageLayout
    rows: int
    steps: int
    column_tiles: int

    @property
    def word_tiles(self) -> int:
        """Word tiles of a column tile."""
        return CTA_TILES // self.layout.unpacker.word_tile_operands

    @property
    def column_shape(self) -> tuple[int, int, int]:
        """The columns of a word tile as three dims: words, and the two dims of a word's columns."""
        unpacker = self.layout.unpacker
        return WORDS, *unpacker.column_shape(unpacker.word_tile_operands)

    def launch(self, *operands: jax.Array) -> jax.Array:
        config = self.layout.config
        out = (config.split_k, self.column_tiles * self.word_tiles, self.rows, *self.column_shape)
        run = plgpu.kernel(
            self.kernel,
            out_type=jax.ShapeDtypeStruct(out, jnp.float32),
            grid=(config.split_k, self.column_tiles),
            grid_names=("split_k", "column_tile"),
            kernel_name=kernel_name("matmul_weight_only"),
            num_threads=config.consumers + 1,
            thread_name="warpgroup",
            scratch_types=self.scratch(),
            compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        )
        return launch(self, run, *operands)

    def scratch(self) -> list[Any]:
        """SMEM and barriers of a CTA, in the order of the kernel's refs."""
        config = self.layout.config
        totals = (config.warpgroups_k, self.word_tiles, self.layout.rows, *self.column_shape)
        return [
            *self.layout.smem_types(),
            plgpu.SMEM(totals, jnp.float32),
            plgpu.Barrier(num_arrivals=self.layout.copies, num_barriers=config.stages),  # full
            plgpu.Barrier(num_arrivals=config.consumers, num_barriers=config.stages),  # empty
            plgpu.Barrier(num_arrivals=config.consumers),  # totals_written
        ]

    def kernel(self, *refs) -> None:
        """The body of every warpgroup of a CTA; the last one is the producer."""
        *gmem, out, x, words, scales, totals, full, empty, totals_written = refs
        config = self.layout.config
        column_tile, split = lax.axis_index("column_tile"), lax.axis_index("split_k")
        first, steps = _share(self.steps, config.split_k, split)
        pipeline = Pipeline(self.layout, x, words, scales, full, empty, steps)
        warpgroup = lax.axis_index("warpgroup")

        def produce():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            pipeline.load(gmem, column_tile, first)

        def consume(n_index: int):
            plgpu.set_max_registers(config.registers, action="increase")
            self._multiply(pipeline, first, totals, warpgroup, n_index)
            plgpu.barrier_arrive(totals_written)
            plgpu.barrier_wait(totals_written)
            word_tiles = pl.ds(column_tile * self.word_tiles, self.word_tiles)
            _reduce_k_slices(config, totals, warpgroup, out.at[split, word_tiles])

        pl.when(warpgroup == config.consumers)(produce)
        # Unpacking needs static indices of operand tiles, so there is a branch for each index along N.
        for n_index in range(config.warpgroups_n):
            has_index = (warpgroup < config.consumers) & (lax.rem(warpgroup, config.warpgroups_n) == n_index)
            pl.when(has_index)(functools.partial(consume, n_index))

    def _multiply(self, pipeline: Pipeline, first, totals, warpgroup, n_index: int) -> None:
        """Accumulates a warpgroup's operand tiles over its K slices, and writes them to `totals` in SMEM."""
        k_index = lax.div(warpgroup, self.layout.config.warpgroups_n)
        tiles = range(n_index * self.layout.warpgroup_tiles, (n_index + 1) * self.layout.warpgroup_tiles)
        accumulators = pipeline.accumulate(first, k_index, tiles)
        _write_totals(totals.at[k_index], self.layout.unpacker, tiles, accumulators)


def _share(steps: int, split_k: int, split) -> tuple[Any, Any]:
    """The first K step of one of `split_k` CTAs, and its number of steps, which may be 0."""
    share = pl.cdiv(steps, split_k)
    return split * share, lax.max(lax.min(share, steps - split * share), 0)


def _write_totals(totals, unpacker: Unpacker, tiles: range, accumulators: list[jax.Array]) -> None:
    """Writes the accumulators of operand tiles to SMEM (word tiles, rows, *column_shape), in the order of columns."""
    per_word_tile = unpacker.word_tile_operands
    for word_tile in sorted({tile // per_word_tile for tile in tiles}):
        members = [tile for tile in tiles if tile // per_word_tile == word_tile]
        positions = pl.ds(members[0] % per_word_tile, len(members))
        ref = totals.at[word_tile, :, :, positions] if unpacker.by_bytes else totals.at[word_tile, :, :, :, positions]
        ref[...] = in_column_order([accumulators[tile - tiles[0]] for tile in members], unpacker)


def _reduce_k_slices(config: Config, totals, warpgroup, out) -> None:
    """Stores the sum of the K slices' totals; consumer warpgroups take rows in turn."""
    word_tiles, rows, *columns = out.shape
    layout = plgpu.Layout.WG_STRIDED(tuple(columns), vec_size=math.prod(columns) // THREADS)

    @pl.loop(0, pl.cdiv(rows, config.consumers))
    def _(i):
        row = i * config.consumers + warpgroup

        @pl.when(row < rows)
        def _():
            for word_tile in range(word_tiles):
                slices = [load(totals.at[k, word_tile, row], layout) for k in range(config.warpgroups_k)]
                out[word_tile, row] = functools.reduce(jnp.add, slices)
