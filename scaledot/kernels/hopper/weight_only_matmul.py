"""Matmuls of few rows with packed weights on Hopper's tensor cores; weights are read once, as they are stored.

Such a matmul is bound by memory, so weights stay codes until they are in registers. There they become the left operand
of WGMMA: columns of the weights are rows of the transposed result, and the few rows of x, in SMEM, are its columns.

A CTA computes a strip, 256 columns of the weights, over its share of K (`weight_only_mainloop`). Its consumers
work in teams, each on a part of every step along K. They write their totals to SMEM, in the order of the columns, and
the epilogue adds those of all teams and stores the sum. The results of CTAs that share a strip are left to the caller
to add.
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
from scaledot.kernels.hopper.unpack import Codes, joined
from scaledot.kernels.hopper.weight_only_mainloop import FETCH_REGISTERS, PART, STRIP, TILES, Config, Pipeline, Slots

WARPGROUPS = 4  # consumers of a CTA


def config_for(rows: int, columns: int, terms: int, codes: Codes, programs: int) -> Config:
    """Returns the config of a matmul (rows, terms) by (terms, columns) on so many SMs (`programs`).

    Strips are split along K until every SM has a CTA, if there are steps enough; a CTA has the slots that fit its SMEM.
    """
    rows = _filled(rows)
    warpgroups = WARPGROUPS if codes.parts <= 2 else WARPGROUPS // 2  # to unpack more parts takes more registers
    # A thread has registers for the accumulators of a whole strip at so many rows, beside those that unpack codes.
    strip_rows = 16 if codes.parts == 1 and not codes.block else 8
    members = min(max(1, rows // strip_rows), warpgroups)
    config = Config(1, warpgroups // members, members, 1)
    steps, row_tiles = pl.cdiv(terms, config.depth), pl.cdiv(columns, STRIP)
    splits = max(1, min(programs // row_tiles, steps))
    slots = Slots(config, codes, PART, rows, scaled=True)
    return dataclasses.replace(config, slots=slots.that_fit(), splits=splits)


def decode(
    x: jax.Array, words: jax.Array, scales: jax.Array | None, *, codes: Codes, group: int, config: Config
) -> jax.Array:
    """Returns partial sums of x (rows, K) times weights (K, N): float32 (splits, lines, rows, columns of a line).

    words: int32 (K, N / codes.per_word). scales: float32 (K / group, N), with N padded to whole strips and `group` a
    multiple of 64; or the bytes of scales that `codes` applies, as int32 (K / codes.block, N / 4); or None. K is a
    multiple of 8, and a row of x or of words is a multiple of 128 bytes, or shorter than that.
    """
    rows, depth = x.shape
    slots = Slots(config, codes, group, _filled(rows), scales is not None)
    row_tiles = pl.cdiv(words.shape[1] * codes.per_word, STRIP)
    kernel = Kernel(slots, rows, steps=pl.cdiv(depth, config.depth), row_tiles=row_tiles)
    sums = kernel.launch(x, words, *([] if scales is None else [scales]))
    return sums.reshape(*sums.shape[:3], -1)


def _filled(rows: int) -> int:
    """Rows of x padded to 8, 16, 32 or 64: they are the columns of WGMMA's right operand."""
    return max(8, 1 << (rows - 1).bit_length())


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The kernel: all that is known when it is traced, its launch, and its body.

    rows: of x, without padding. steps: along K. strips: of the result.
    """

    slots: Slots
    rows: int
    steps: int
    row_tiles: int

    @property
    def lines(self) -> int:
        """Lines of words in a strip."""
        return TILES // self.slots.codes.line_tiles

    @property
    def line(self) -> tuple[int, int, int]:
        """The shape of a line's columns: words, and columns of a word."""
        codes = self.slots.codes
        return WORDS, *codes.in_word(codes.line_tiles)

    def launch(self, *operands: jax.Array) -> jax.Array:
        config = self.slots.config
        out = (config.splits, self.row_tiles * self.lines, self.rows, *self.line)
        run = plgpu.kernel(
            self.kernel,
            out_type=jax.ShapeDtypeStruct(out, jnp.float32),
            grid=(config.splits, self.row_tiles),
            grid_names=("split", "strip"),
            kernel_name=kernel_name("matmul_weight_only"),
            num_threads=config.groups + 1,
            thread_name="warpgroup",
            scratch_types=self.scratch(),
            compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        )
        return launch(self, run, *operands)

    def scratch(self) -> list[Any]:
        """SMEM and barriers of a CTA, in the order in which the kernel names them."""
        config = self.slots.config
        return [
            *self.slots.rings(),
            plgpu.SMEM((config.teams, self.lines, self.slots.rows, *self.line), jnp.float32),  # totals
            plgpu.Barrier(num_arrivals=self.slots.copies, num_barriers=config.slots),  # full
            plgpu.Barrier(num_arrivals=config.groups, num_barriers=config.slots),  # empty
            plgpu.Barrier(num_arrivals=config.groups),  # totals_written
        ]

    def kernel(self, *refs) -> None:
        """The body of every warpgroup of a CTA: the last is the producer, the others are members of teams."""
        *gmem, out, x_ring, words_ring, scales_ring, totals, full, empty, totals_written = refs
        config = self.slots.config
        strip, split = lax.axis_index("strip"), lax.axis_index("split")
        first, count = _share(self.steps, config.splits, split)
        ring = Pipeline(self.slots, x_ring, words_ring, scales_ring, full, empty, count)
        warpgroup = lax.axis_index("warpgroup")

        def fetch():
            plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")
            ring.fetch(gmem, strip, first)

        def multiply(member: int):
            plgpu.set_max_registers(config.registers, action="increase")
            self._multiply(ring, first, totals, warpgroup, member)
            plgpu.barrier_arrive(totals_written)
            plgpu.barrier_wait(totals_written)
            _add_teams(config, totals, warpgroup, out.at[split, pl.ds(strip * self.lines, self.lines)])

        pl.when(warpgroup == config.groups)(fetch)
        # A member's tiles are known when the kernel is traced, so there is a branch for each member.
        for member in range(config.members):
            is_member = (warpgroup < config.groups) & (lax.rem(warpgroup, config.members) == member)
            pl.when(is_member)(functools.partial(multiply, member))

    def _multiply(self, ring: Pipeline, first, totals, warpgroup, member: int) -> None:
        """Accumulates a member's tiles over its team's part of every step, and writes them to the team's totals."""
        team = lax.div(warpgroup, self.slots.config.members)
        mine = range(member * self.slots.tiles, (member + 1) * self.slots.tiles)
        _write_totals(totals.at[team], self.slots.codes, mine, ring.multiply(first, team, mine))


def _share(steps: int, splits: int, split) -> tuple[Any, Any]:
    """The first of a CTA's steps, and their number, where `splits` CTAs share them."""
    share = pl.cdiv(steps, splits)
    return split * share, lax.max(lax.min(share, steps - split * share), 0)


def _write_totals(totals, codes: Codes, mine: range, sums: list[jax.Array]) -> None:
    """Writes the accumulators of the tiles `mine` to a team's totals (lines, rows, *line) in SMEM, columns in order."""
    for line in sorted({tile // codes.line_tiles for tile in mine}):
        of_line = [tile for tile in mine if tile // codes.line_tiles == line]
        places = pl.ds(of_line[0] % codes.line_tiles, len(of_line))
        ref = totals.at[line, :, :, places] if codes.by_bytes else totals.at[line, :, :, :, places]
        ref[...] = joined([sums[tile - mine[0]] for tile in of_line], codes)


def _add_teams(config: Config, totals, warpgroup, out) -> None:
    """Stores the sum of all teams' totals; warpgroups take rows in turn."""
    lines, rows, *line = out.shape
    layout = plgpu.Layout.WG_STRIDED(tuple(line), vec_size=math.prod(line) // THREADS)

    @pl.loop(0, pl.cdiv(rows, config.groups))
    def _(turn):
        row = turn * config.groups + warpgroup

        @pl.when(row < rows)
        def _():
            for i in range(lines):
                parts = [load(totals.at[team, i, row], layout) for team in range(config.teams)]
                out[i, row] = functools.reduce(jnp.add, parts)
