"""The main loop of the weight-only matmul: copies of codes, scales and x into SMEM, and what multiplies them.

The last warpgroup of a CTA, the producer, fills a ring of SMEM slots, each of which holds one step along K: few large
copies, as each costs the same to start. The others, the consumers, work in teams. A step has a part of 64 elements
along K for each team; the members of a team multiply the same part, but different tiles of the CTA's strip of 256
columns of the weights.

The accumulators of a part are added to float32 totals. They are first multiplied by the scales of their group of
elements along K, where the weights have such scales.
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
from scaledot.kernels.hopper.memory import load, tiled
from scaledot.kernels.hopper.registers import TILE, WORDS, WORDS_LAYOUT, beside_words, zipped
from scaledot.kernels.hopper.unpack import Codes, add_scaled

TILES = 4  # of a strip
STRIP = TILES * TILE  # columns of the weights that a CTA computes
PART = 64  # elements along K of a step that a team multiplies
SHARED_BYTES = 227 * 1024 - 1024  # SMEM of a CTA, without what barriers take
FETCH_REGISTERS = 32


@dataclasses.dataclass(frozen=True)
class Config:
    """How a matmul is cut up.

    slots: of the ring. teams, members: of consumer warpgroups; every team has so many members. splits: CTAs that share
    the K of a strip.
    """

    slots: int
    teams: int
    members: int
    splits: int

    @property
    def depth(self) -> int:
        """Elements along K of a step."""
        return self.teams * PART

    @property
    def groups(self) -> int:
        """Consumer warpgroups."""
        return self.teams * self.members

    @property
    def registers(self) -> int:
        """Of a consumer's thread: its share of those that the CTA is launched with and the producer does not keep.

        Registers of a thread are a multiple of 8, at the launch and later.
        """
        at_start = 512 // (self.groups + 1) // 8 * 8
        return (at_start * (self.groups + 1) - FETCH_REGISTERS) // self.groups // 8 * 8


@dataclasses.dataclass(frozen=True)
class Slots:
    """What a slot holds: x (rows, K), words (K, words) and scales of a step.

    group: elements along K that share a scale which is applied to accumulators. rows: of x, padded. scaled: whether
    slots have scales at all, of groups or of the blocks of `codes`.
    """

    config: Config
    codes: Codes
    group: int
    rows: int
    scaled: bool

    @property
    def tiles(self) -> int:
        """Tiles of one member of a team."""
        return TILES // self.config.members

    @property
    def words(self) -> int:
        """Words of a strip, for one element along K."""
        return STRIP // self.codes.per_word

    @property
    def copies(self) -> int:
        """Copies that fill a slot."""
        return 2 + self.scaled

    @property
    def scale_rows(self) -> int:
        """The most groups that one step has elements of."""
        depth, group = self.config.depth, self.group
        return pl.cdiv(group - math.gcd(depth, group) + depth, group)

    def that_fit(self) -> int:
        """How many slots fit into the SMEM of a CTA, beside the totals."""
        config, codes = self.config, self.codes
        scales = config.depth // codes.block * STRIP if codes.block else 4 * STRIP * self.scale_rows * self.scaled
        slot = 2 * self.rows * config.depth + 4 * self.words * config.depth + scales
        totals = 4 * config.teams * STRIP * self.rows
        return (SHARED_BYTES - totals) // slot

    def rings(self) -> list[Any]:
        """SMEM types of x, words and scales, for all slots; None for scales that there are not."""
        config, codes = self.config, self.codes
        x = plgpu.SMEM(
            (config.slots, self.rows, config.depth), jnp.bfloat16, transforms=tiled(config.depth, jnp.bfloat16)
        )
        words = plgpu.SMEM((config.slots, config.depth, self.words), jnp.int32, transforms=tiled(self.words, jnp.int32))
        if not self.scaled:
            return [x, words, None]
        if codes.block:
            return [x, words, plgpu.SMEM((config.slots, config.depth // codes.block, STRIP // 4), jnp.int32)]
        return [x, words, plgpu.SMEM((config.slots, self.scale_rows, STRIP), jnp.float32)]


class WorkItem(NamedTuple):
    """A team's part of a step, which is in `slot`; `step` is counted from the beginning of K."""

    slot: Any
    team: Any
    step: Any


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """SMEM slots, filled by the producer warpgroup and consumed by the others, in turn.

    x, words, scales: refs whose first axis is that of slots. full, empty: a barrier for each slot. count: steps of the
    CTA.
    """

    slots: Slots
    x: Any
    words: Any
    scales: Any
    full: Any
    empty: Any
    count: Any

    def slot(self, step):
        return lax.rem(step, self.slots.config.slots)

    def fetch(self, gmem, strip, first) -> None:
        """Fills a slot for each step, as soon as it is empty, and waits until all are empty again."""
        size = self.slots.config.slots

        @pl.loop(0, self.count)
        def _(step):
            slot = self.slot(step)
            pl.when(step >= size)(lambda: plgpu.barrier_wait(self.empty.at[slot]))
            # Threads have read words and scales from this slot, and copies overwrite them through the async proxy.
            plgpu.commit_smem()
            self._fetch_step(gmem, strip, first + step, slot)

        @pl.loop(lax.max(self.count - size, 0), self.count)
        def _(step):
            plgpu.barrier_wait(self.empty.at[self.slot(step)])

    def _fetch_step(self, gmem, strip, step, slot) -> None:
        depth, words = self.slots.config.depth, self.slots.words
        x_gmem, words_gmem, *scales_gmem = gmem
        full = self.full.at[slot]
        along = pl.ds(step * depth, depth)
        plgpu.copy_gmem_to_smem(words_gmem.at[along, pl.ds(strip * words, words)], self.words.at[slot], full)
        rows = pl.ds(strip * 0, self.slots.rows)  # not a constant: rows that x does not have are read as zeros
        plgpu.copy_gmem_to_smem(x_gmem.at[rows, along], self.x.at[slot], full)
        if self.slots.scaled:
            plgpu.copy_gmem_to_smem(self._scales_of(scales_gmem[0], strip, step), self.scales.at[slot], full)

    def _scales_of(self, gmem, strip, step) -> Any:
        """The GMEM ref of a step's scales: bytes of blocks, four in a word, or float32 scales of groups."""
        depth, block = self.slots.config.depth, self.slots.codes.block
        if block:
            return gmem.at[pl.ds(step * (depth // block), depth // block), pl.ds(strip * (STRIP // 4), STRIP // 4)]
        groups = pl.ds(lax.div(step * depth, self.slots.group), self.slots.scale_rows)
        return gmem.at[groups, pl.ds(strip * STRIP, STRIP)]

    def multiply(self, first, team, mine: range) -> list[jax.Array]:
        """Returns the totals of the tiles `mine`, (64, rows of x) each, over a team's part of every step.

        first: the first of the CTA's steps.
        """

        def turn(step, totals):
            slot = self.slot(step)
            plgpu.barrier_wait(self.full.at[slot])
            totals = self._step(WorkItem(slot, team, first + step), mine, totals)
            plgpu.barrier_arrive(self.empty.at[slot])
            return totals

        zeros = plgpu.layout_cast(jnp.zeros((TILE, self.slots.rows), jnp.float32), plgpu.Layout.WGMMA)
        return lax.fori_loop(0, self.count, turn, [zeros] * len(mine))

    def _step(self, part: WorkItem, mine: range, totals: list[jax.Array]) -> list[jax.Array]:
        """Totals with those of one part added, times the scales of its group where these are for accumulators."""
        codes, group = self.slots.codes, self.slots.group
        sums = self._products(part, mine)
        if not self.slots.scaled or codes.block:
            return [total + added for total, added in zip(totals, sums, strict=True)]
        first = part.step * self.slots.config.depth
        row = lax.div(first + part.team * PART, group) - lax.div(first, group)
        grown, factors = [], {}
        for tile, total, added in zip(mine, totals, sums, strict=True):
            line, index = divmod(tile, codes.line_tiles)
            if line not in factors:
                ref = self.scales.at[part.slot, row, pl.ds(line * WORDS * codes.per_word, WORDS * codes.per_word)]
                factors[line] = load(ref, beside_words(codes.per_word), optimized=False)
            grown.append(add_scaled(total, added, factors[line], codes, index))
        return grown

    def _products(self, part: WorkItem, mine: range) -> list[jax.Array]:
        """Accumulators of one part, (64, rows of x) for each of the tiles `mine`."""
        shape = (TILE, self.slots.rows)
        if support.is_interpreted():  # whose WGMMA takes no operand from registers
            sums = [jnp.zeros(shape, jnp.float32) for _ in mine]
            for at, tile, x in self._tiles(part, mine):
                sums[at] += jnp.dot(tile, x[...], preferred_element_type=jnp.float32)
            return sums

        def multiply(*sums):
            for at, tile, x in self._tiles(part, mine):
                plgpu.wgmma(sums[at], tile, x)
                plgpu.wgmma_wait(1)  # one WGMMA stays in flight; that of the tile before has read its registers
            return [accumulator[...] for accumulator in sums]

        return pl.run_scoped(multiply, *(plgpu.WGMMAAccumulatorRef(shape, jnp.float32) for _ in mine))

    def _tiles(self, part: WorkItem, mine: range):
        """Yields (position in `mine`, tile of the weights, SMEM ref of x transposed) for each WGMMA of a part."""
        codes = self.slots.codes
        along = pl.ds(part.team * PART, PART)
        x = self.x.at[part.slot, :, along].T
        for line in sorted({tile // codes.line_tiles for tile in mine}):
            words = self.words.at[part.slot, along, pl.ds(line * WORDS, WORDS)]
            pairs = zipped(load(words, WORDS_LAYOUT), codes.by_bytes)
            scales = []
            if codes.block:
                blocks = PART // codes.block
                ref = self.scales.at[part.slot, pl.ds(part.team * blocks, blocks)]
                scales = [load(ref, beside_words(2), optimized=False)]
            for at, tile in enumerate(mine):
                if tile // codes.line_tiles == line:
                    for summand in codes.tiles(*pairs, tile % codes.line_tiles, *scales):
                        yield at, summand, x
