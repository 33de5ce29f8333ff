"""The main loop of the weight-only matmul: TMA loads of codes, scales and x into SMEM, unpacking and WGMMAs.

A and B are swapped (swapAB): columns of the weights (N) are M of the WGMMAs, and rows of x, the tokens, are their N. So
the weights are the A operand, which WGMMA can take from registers, and as few as 8 tokens fill a WGMMA.

The last warpgroup of a CTA, the producer, fills a pipeline of SMEM stages. A stage holds one K step of x, of the packed
weights and of their scales; steps are long, because the cost of starting a TMA load does not depend on its size.

The other warpgroups, the consumers, are arranged along K and N (`warpgroups_k` × `warpgroups_n`). A K step consists of
one slice of 64 elements for each warpgroup along K (sliced-K); warpgroups along N multiply the same slice by different
columns of the CTA's 256 columns of weights. The epilogue adds the totals of the K slices.

The accumulators of a K slice are added to float32 totals, first multiplied by the scales of their group along K if the
weights have group scales.

The terms are those of `registers`: a word is an int32 of packed codes, a packed tile is 64 elements along K × 32 words,
and a fragment of operand A, of the bfloat16 weights, is (64, 64), in the registers of one warpgroup.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from scaledot.kernels.hopper import support
from scaledot.kernels.hopper.memory_layouts import load, swizzle_transforms
from scaledot.kernels.hopper.registers import FRAGMENT, PACKED_TILE_LAYOUT, WORDS_PER_K, interleave_k, per_word_layout
from scaledot.kernels.hopper.unpack import Unpacker, add_scaled

CTA_FRAGMENTS = 4  # fragments of operand A in a CTA, along the columns of the weights
CTA_COLUMNS = CTA_FRAGMENTS * FRAGMENT  # columns of the weights that a CTA computes
SLICE_K = 64  # elements of a K step that a warpgroup multiplies
SMEM_BYTES = 227 * 1024 - 1024  # of a CTA, less what barriers take
PRODUCER_REGISTERS = 32  # setmaxnreg of the producer warpgroup


@dataclasses.dataclass(frozen=True)
class Config:
    """How a matmul is divided among CTAs and warpgroups.

    stages: pipeline stages in SMEM. warpgroups_k, warpgroups_n: consumer warpgroups along K and along the columns of
    the weights (N).
    split_k: CTAs that share the K of a column tile.
    """

    stages: int
    warpgroups_k: int
    warpgroups_n: int
    split_k: int

    @property
    def step_k(self) -> int:
        """Elements along K of a K step."""
        return self.warpgroups_k * SLICE_K

    @property
    def consumers(self) -> int:
        """Consumer warpgroups of a CTA."""
        return self.warpgroups_k * self.warpgroups_n

    @property
    def consumer_registers(self) -> int:
        """The setmaxnreg of consumers.

        An SM has 65536 registers: 512 per thread if there were one warpgroup, of 128 threads. At launch they are
        divided equally among the CTA's warpgroups. The producer then keeps 32 per thread, and consumers share the rest.
        Both numbers, at launch and after setmaxnreg, must be multiples of 8.
        """
        at_launch = 512 // (self.consumers + 1) // 8 * 8
        return (at_launch * (self.consumers + 1) - PRODUCER_REGISTERS) // self.consumers // 8 * 8


@dataclasses.dataclass(frozen=True)
class StageLayout:
    """The contents of a pipeline stage: x (rows, K), packed codes of the weights (K, words) and scales of a K step.

    group: elements along K that share a scale which is applied to accumulators. rows: of x, padded. scaled: whether a
    stage has scales: of groups, or of the blocks that `unpacker` applies.
    """

    config: Config
    unpacker: Unpacker
    group: int
    rows: int
    scaled: bool

    @property
    def warpgroup_fragments(self) -> int:
        """The number of fragments of operand A of one warpgroup."""
        return CTA_FRAGMENTS // self.config.warpgroups_n

    @property
    def words_per_k(self) -> int:
        """The number of words with the codes of a CTA's columns, for one element along K."""
        return CTA_COLUMNS // self.unpacker.per_word

    @property
    def tma_loads(self) -> int:
        """TMA loads that fill a stage."""
        return 2 + self.scaled

    @property
    def scale_rows(self) -> int:
        """The largest number of groups that a K step overlaps."""
        step_k, group = self.config.step_k, self.group
        return pl.cdiv(group - math.gcd(step_k, group) + step_k, group)

    def max_stages(self) -> int:
        """The number of stages that fit into the SMEM of a CTA next to the totals."""
        config, block = self.config, self.unpacker.block
        scales = config.step_k // block * CTA_COLUMNS if block else 4 * CTA_COLUMNS * self.scale_rows * self.scaled
        stage = 2 * self.rows * config.step_k + 4 * self.words_per_k * config.step_k + scales
        totals = 4 * config.warpgroups_k * CTA_COLUMNS * self.rows
        return (SMEM_BYTES - totals) // stage

    def smem_types(self) -> list[Any]:
        """SMEM types of x, words and scales, for all stages; None for scales if there are none."""
        stages, step_k = self.config.stages, self.config.step_k
        words_per_k, block = self.words_per_k, self.unpacker.block
        x = plgpu.SMEM((stages, self.rows, step_k), jnp.bfloat16, transforms=swizzle_transforms(step_k, jnp.bfloat16))
        words = plgpu.SMEM(
            (stages, step_k, words_per_k), jnp.int32, transforms=swizzle_transforms(words_per_k, jnp.int32)
        )
        if not self.scaled:
            return [x, words, None]
        if block:
            return [x, words, plgpu.SMEM((stages, step_k // block, CTA_COLUMNS // 4), jnp.int32)]
        return [x, words, plgpu.SMEM((stages, self.scale_rows, CTA_COLUMNS), jnp.float32)]


class KSlice(NamedTuple):
    """The K slice of a warpgroup: its pipeline stage, its index in the K step, and the step, counted from K = 0."""

    stage: Any
    index: Any
    step: Any


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Circular buffer of K steps in SMEM, filled by the producer warpgroup and read by the consumers.

    x, words, scales: refs with a leading stage dim. full, empty: one barrier for each stage. full: one arrival per TMA
    load. empty: one per consumer warpgroup. steps: K steps of the CTA.
    """

    layout: StageLayout
    x: Any
    words: Any
    scales: Any
    full: Any
    empty: Any
    steps: Any

    def stage(self, step):
        return lax.rem(step, self.layout.config.stages)

    def load(self, gmem, column_tile, first_step) -> None:
        """Loads each K step as soon as its stage is empty, and waits until all stages are released.

        first_step: the first K step of the CTA.
        """
        stages = self.layout.config.stages

        @pl.loop(0, self.steps)
        def _(step):
            stage = self.stage(step)
            pl.when(step >= stages)(lambda: plgpu.barrier_wait(self.empty.at[stage]))
            # Orders the consumers' reads of words and scales (generic proxy) before the TMA writes (async proxy).
            plgpu.commit_smem()
            self._load_step(gmem, column_tile, first_step + step, stage)

        @pl.loop(lax.max(self.steps - stages, 0), self.steps)
        def _(step):
            plgpu.barrier_wait(self.empty.at[self.stage(step)])

    def _load_step(self, gmem, column_tile, step, stage) -> None:
        step_k, words = self.layout.config.step_k, self.layout.words_per_k
        x_gmem, words_gmem, *scales_gmem = gmem
        full = self.full.at[stage]
        ks = pl.ds(step * step_k, step_k)
        plgpu.copy_gmem_to_smem(words_gmem.at[ks, pl.ds(column_tile * words, words)], self.words.at[stage], full)
        # A dynamic start, although it is 0, so that the slice may be longer than x; TMA reads zeros beyond x.
        rows = pl.ds(column_tile * 0, self.layout.rows)
        plgpu.copy_gmem_to_smem(x_gmem.at[rows, ks], self.x.at[stage], full)
        if self.layout.scaled:
            plgpu.copy_gmem_to_smem(self._scales_of(scales_gmem[0], column_tile, step), self.scales.at[stage], full)

    def _scales_of(self, gmem, column_tile, step) -> Any:
        """The GMEM ref of a step's scales: 8-bit block scales, four in a word, or float32 group scales."""
        step_k, block = self.layout.config.step_k, self.layout.unpacker.block
        if block:
            blocks, words = step_k // block, CTA_COLUMNS // 4
            return gmem.at[pl.ds(step * blocks, blocks), pl.ds(column_tile * words, words)]
        groups = pl.ds(lax.div(step * step_k, self.layout.group), self.layout.scale_rows)
        return gmem.at[groups, pl.ds(column_tile * CTA_COLUMNS, CTA_COLUMNS)]

    def accumulate(self, first_step, k_index, fragment_range: range) -> list[jax.Array]:
        """Returns float32 totals (64, rows of x) of a warpgroup's fragments, over its K slice of every step.

        first_step: the first K step of the CTA. k_index: the warpgroup's index along K. fragment_range: the indices of
        its fragments among those of the CTA.
        """

        def body(step, totals):
            stage = self.stage(step)
            plgpu.barrier_wait(self.full.at[stage])
            totals = self._add_slice(KSlice(stage, k_index, first_step + step), fragment_range, totals)
            plgpu.barrier_arrive(self.empty.at[stage])
            return totals

        zeros = plgpu.layout_cast(jnp.zeros((FRAGMENT, self.layout.rows), jnp.float32), plgpu.Layout.WGMMA)
        return lax.fori_loop(0, self.steps, body, [zeros] * len(fragment_range))

    def _add_slice(self, k_slice: KSlice, fragment_range: range, totals: list[jax.Array]) -> list[jax.Array]:
        """Adds the accumulators of one K slice to the totals, multiplied by group scales if there are any."""
        unpacker, group = self.layout.unpacker, self.layout.group
        accumulators = self._multiply(k_slice, fragment_range)
        if not self.layout.scaled or unpacker.block:
            return [total + accumulator for total, accumulator in zip(totals, accumulators, strict=True)]
        first_k = k_slice.step * self.layout.config.step_k
        row = lax.div(first_k + k_slice.index * SLICE_K, group) - lax.div(first_k, group)
        new_totals, scales = [], {}
        for fragment, total, accumulator in zip(fragment_range, totals, accumulators, strict=True):
            packed_tile, index = divmod(fragment, unpacker.fragments_per_packed_tile)
            if packed_tile not in scales:
                columns = WORDS_PER_K * unpacker.per_word
                ref = self.scales.at[k_slice.stage, row, pl.ds(packed_tile * columns, columns)]
                scales[packed_tile] = load(ref, per_word_layout(unpacker.per_word), optimized=False)
            new_totals.append(add_scaled(total, accumulator, scales[packed_tile], unpacker, index))
        return new_totals

    def _multiply(self, k_slice: KSlice, fragment_range: range) -> list[jax.Array]:
        """Accumulators (64, rows of x) of one K slice, for each fragment."""
        shape = (FRAGMENT, self.layout.rows)
        if support.is_interpreted():  # the interpreter's WGMMA takes no operand from registers
            results = [jnp.zeros(shape, jnp.float32) for _ in fragment_range]
            for position, weights, x in self._operands(k_slice, fragment_range):
                results[position] += jnp.dot(weights, x[...], preferred_element_type=jnp.float32)
            return results

        def multiply(*accumulators):
            for position, weights, x in self._operands(k_slice, fragment_range):
                plgpu.wgmma(accumulators[position], weights, x)
                plgpu.wgmma_wait(1)  # one WGMMA stays in flight; the one before it has read its registers
            return [accumulator[...] for accumulator in accumulators]

        return pl.run_scoped(multiply, *(plgpu.WGMMAAccumulatorRef(shape, jnp.float32) for _ in fragment_range))

    def _operands(self, k_slice: KSlice, fragment_range: range):
        """Yields (position in `fragment_range`, a fragment of the weights, SMEM ref of x transposed) for each WGMMA."""
        unpacker = self.layout.unpacker
        ks = pl.ds(k_slice.index * SLICE_K, SLICE_K)
        x = self.x.at[k_slice.stage, :, ks].T
        per_packed_tile = unpacker.fragments_per_packed_tile
        for packed_tile in sorted({fragment // per_packed_tile for fragment in fragment_range}):
            words = self.words.at[k_slice.stage, ks, pl.ds(packed_tile * WORDS_PER_K, WORDS_PER_K)]
            low, high = interleave_k(load(words, PACKED_TILE_LAYOUT), unpacker.by_bytes)
            scales = []
            if unpacker.block:
                blocks = SLICE_K // unpacker.block
                ref = self.scales.at[k_slice.stage, pl.ds(k_slice.index * blocks, blocks)]
                scales = [load(ref, per_word_layout(2), optimized=False)]
            for position, fragment in enumerate(fragment_range):
                if fragment // per_packed_tile == packed_tile:
                    for weights in unpacker.unpack(low, high, fragment % per_packed_tile, *scales):
                        yield position, weights, x
