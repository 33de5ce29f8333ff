"""Products of few rows with packed weights on Hopper's tensor cores; weights are read once, in the form they have.

Memory is what such a product waits for, so weights stay codes until they are in registers. There they become the left
operand of the tensor cores: columns of the weights are rows of the transposed result, and the few rows of x, in shared
memory, its columns.

A program computes 256 columns over a part of the sum. Its last warpgroup fetches steps of the sum into a ring of slots.
The others are teams that multiply these steps in turn, and members of a team that share a step and have different
tiles. Every step's sums are added, in float32 and times the factors of its group, to the totals; those of the teams are
added at the end, and those of programs are left to the caller.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from scaledot.kernels.mosaic import support
from scaledot.kernels.mosaic.memory import load, tiled
from scaledot.kernels.mosaic.unpack import TILE, WORDS, WORDS_LAYOUT, Codes, add_scaled, beside_words, zipped

TILES = 4
STRIP = TILES * TILE  # columns of a program
WARPGROUPS = 4  # that multiply
DEPTH = 64  # terms of a step
SHARED_BYTES = 227 * 1024 - 1024  # of a program, but for barriers
FETCH_REGISTERS = 32


@dataclasses.dataclass(frozen=True)
class Config:
    """How a product is cut up.

    depth: terms of a step. slots: of the ring, a multiple of the teams, so that each slot is always the same team's.
    teams, members: the warpgroups that multiply. splits: programs that share the sum.
    """

    depth: int
    slots: int
    teams: int
    members: int
    splits: int

    @property
    def groups(self) -> int:
        return self.teams * self.members

    @property
    def registers(self) -> int:
        """Of a thread that multiplies: its share of those that the program starts with, in eights for every thread."""
        at_start = 512 // (self.groups + 1) // 8 * 8
        return (at_start * (self.groups + 1) - FETCH_REGISTERS) // self.groups // 8 * 8


def config_for(rows: int, columns: int, terms: int, codes: Codes, programs: int) -> Config:
    """A program for each multiprocessor where there are steps enough, and the slots that its memory holds."""
    rows = _filled(rows)
    warpgroups = WARPGROUPS if codes.parts <= 2 else WARPGROUPS // 2  # what makes more parts fills more registers
    members = min(warpgroups, rows // 8)  # totals and sums of a thread fill the same registers for any rows up to 32
    config = Config(DEPTH, 1, warpgroups // members, members, 1)
    steps, strips = pl.cdiv(terms, config.depth), pl.cdiv(columns, STRIP)
    splits = max(1, min(programs // strips, steps // config.teams))
    slots = Slots(config, codes, DEPTH, rows, scaled=True)
    return dataclasses.replace(config, slots=slots.that_fit(), splits=splits)


def decode(
    x: jax.Array, words: jax.Array, scales: jax.Array | None, *, codes: Codes, group: int, config: Config
) -> jax.Array:
    """Partial sums of x (rows, K) times weights (K, N), float32 (splits, strips, tiles, 64, rows filled up).

    `unpack.placed` puts their columns in order. words: int32 (K, N / codes of a word). scales: float32 (groups, N), N
    filled up to whole strips, each for `group` terms, which is a multiple of the depth; or bytes that are folded into
    codes, as int32 (blocks, N / 4); or None. K is a multiple of 8, and lines of x and words have whole multiples of 128
    bytes, or less than that.
    """
    rows, terms = _filled(x.shape[0]), x.shape[1]
    strips = pl.cdiv(words.shape[1] * codes.per_word, STRIP)
    steps = pl.cdiv(terms, config.depth)
    slots = Slots(config, codes, group, rows, scales is not None)

    def kernel(*refs):
        *gmem, out_gmem, x_ring, words_ring, scales_ring, totals, full, empty, added = refs
        strip, split = lax.axis_index("strip"), lax.axis_index("split")
        first, count = _share(steps, config.splits, split)
        ring = Ring(slots, x_ring, words_ring, scales_ring, full, empty, count)
        warpgroup = lax.axis_index("warpgroup")

        def fetch():
            plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")
            ring.fetch(gmem, strip, first)

        def multiply(member: int):
            plgpu.set_max_registers(config.registers, action="increase")
            team = lax.div(warpgroup, config.members)
            mine = range(member * slots.tiles, (member + 1) * slots.tiles)
            _add_teams(config, team, totals, added, mine, ring.multiply(team, mine))

            @pl.when(team == 0)
            def _():
                plgpu.commit_smem()
                for tile in mine:
                    plgpu.copy_smem_to_gmem(totals.at[0, tile], out_gmem.at[split, strip, tile])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        pl.when(warpgroup == config.groups)(fetch)
        for member in range(config.members):
            is_member = (warpgroup < config.groups) & (lax.rem(warpgroup, config.members) == member)
            pl.when(is_member)(functools.partial(multiply, member))

    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((config.splits, strips, TILES, TILE, rows), jnp.float32),
        grid=(config.splits, strips),
        grid_names=("split", "strip"),
        num_threads=config.groups + 1,
        thread_name="warpgroup",
        scratch_types=[
            *slots.rings(),
            plgpu.SMEM((config.teams, TILES, TILE, rows), jnp.float32, transforms=tiled(rows, jnp.float32)),
            plgpu.Barrier(num_arrivals=slots.copies, num_barriers=config.slots),
            plgpu.Barrier(num_arrivals=config.members, num_barriers=config.slots),
            plgpu.Barrier(num_arrivals=(config.teams - 1) * config.members) if config.teams > 1 else None,
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return run(x, words, *([] if scales is None else [scales]))


def _filled(rows: int) -> int:
    """Columns of the transposed result that are computed: 8, 16, 32 or 64."""
    return max(8, 1 << (rows - 1).bit_length())


def _share(steps: int, splits: int, split) -> tuple[Any, Any]:
    """The first of a program's steps, and their number."""
    share = pl.cdiv(steps, splits)
    return split * share, lax.max(lax.min(share, steps - split * share), 0)


def _add_teams(config: Config, team, totals, added, mine: range, sums: list[jax.Array]) -> None:
    """Leave the sums of all teams in the first one's place."""

    def leave():
        for tile, values in zip(mine, sums, strict=True):
            totals[team, tile] = values
        plgpu.barrier_arrive(added)

    def add():
        if config.teams > 1:
            plgpu.barrier_wait(added)
        for tile, values in zip(mine, sums, strict=True):
            for other in range(1, config.teams):
                values = values + load(totals.at[other, tile], plgpu.Layout.WGMMA)
            totals[0, tile] = values

    if config.teams > 1:
        pl.when(team > 0)(leave)
    pl.when(team == 0)(add)


@dataclasses.dataclass(frozen=True)
class Slots:
    """What a slot holds: rows of x, words and scales of a step."""

    config: Config
    codes: Codes
    group: int
    rows: int
    scaled: bool

    @property
    def tiles(self) -> int:
        """Of one member."""
        return TILES // self.config.members

    @property
    def words(self) -> int:
        """Of a term."""
        return STRIP // self.codes.per_word

    @property
    def copies(self) -> int:
        return 2 + self.scaled

    def that_fit(self) -> int:
        """How many the memory of a program has room for."""
        config, codes = self.config, self.codes
        scales = config.depth // codes.block * STRIP if codes.block else 4 * STRIP * self.scaled
        slot = 2 * self.rows * config.depth + 4 * self.words * config.depth + scales
        totals = 4 * config.teams * STRIP * self.rows
        return (SHARED_BYTES - totals) // (slot * config.teams) * config.teams

    def rings(self) -> list[Any]:
        config, codes = self.config, self.codes
        x = plgpu.SMEM(
            (config.slots, self.rows, config.depth), jnp.bfloat16, transforms=tiled(config.depth, jnp.bfloat16)
        )
        words = plgpu.SMEM((config.slots, config.depth, self.words), jnp.int32, transforms=tiled(self.words, jnp.int32))
        if not self.scaled:
            return [x, words, None]
        if codes.block:
            return [x, words, plgpu.SMEM((config.slots, config.depth // codes.block, STRIP // 4), jnp.int32)]
        return [x, words, plgpu.SMEM((config.slots, STRIP), jnp.float32)]


@dataclasses.dataclass(frozen=True)
class Ring:
    """Slots that are fetched, multiplied and given back in turn; `count`: the steps that pass through them."""

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
        size = self.slots.config.slots

        @pl.loop(0, self.count)
        def _(step):
            slot = self.slot(step)
            pl.when(step >= size)(lambda: plgpu.barrier_wait(self.empty.at[slot]))
            plgpu.commit_smem()  # words and scales are read by threads: before they are overwritten
            self._fetch_step(gmem, strip, first + step, slot)

        @pl.loop(lax.max(self.count - size, 0), self.count)
        def _(step):
            plgpu.barrier_wait(self.empty.at[self.slot(step)])

    def _fetch_step(self, gmem, strip, step, slot) -> None:
        config, codes, words = self.slots.config, self.slots.codes, self.slots.words
        x_gmem, words_gmem, *scales_gmem = gmem
        full = self.full.at[slot]
        terms = pl.ds(step * config.depth, config.depth)
        plgpu.copy_gmem_to_smem(words_gmem.at[terms, pl.ds(strip * words, words)], self.words.at[slot], full)
        rows = pl.ds(strip * 0, self.slots.rows)  # not a constant: rows that x does not have are read as zeros
        plgpu.copy_gmem_to_smem(x_gmem.at[rows, terms], self.x.at[slot], full)
        if self.slots.scaled:
            if codes.block:
                blocks = config.depth // codes.block
                scales = scales_gmem[0].at[pl.ds(step * blocks, blocks), pl.ds(strip * (STRIP // 4), STRIP // 4)]
            else:
                scales = scales_gmem[0].at[lax.div(step * config.depth, self.slots.group), pl.ds(strip * STRIP, STRIP)]
            plgpu.copy_gmem_to_smem(scales, self.scales.at[slot], full)

    def multiply(self, team, mine: range) -> list[jax.Array]:
        """Sums of some tiles over the steps of a team."""
        teams = self.slots.config.teams

        def turn(i, totals):
            slot = self.slot(team + i * teams)
            plgpu.barrier_wait(self.full.at[slot])
            totals = self._step(slot, mine, totals)
            plgpu.barrier_arrive(self.empty.at[slot])
            return totals

        zeros = plgpu.layout_cast(jnp.zeros((TILE, self.slots.rows), jnp.float32), plgpu.Layout.WGMMA)
        turns = lax.max(lax.div(self.count - team + teams - 1, teams), 0)
        return lax.fori_loop(0, turns, turn, [zeros] * len(mine))

    def _step(self, slot, mine: range, totals: list[jax.Array]) -> list[jax.Array]:
        codes = self.slots.codes
        sums = self._products(slot, mine)
        if not self.slots.scaled or codes.block:
            return [total + added for total, added in zip(totals, sums, strict=True)]
        grown, factors = [], {}
        for tile, total, added in zip(mine, totals, sums, strict=True):
            line, index = divmod(tile, codes.line_tiles)
            if line not in factors:
                ref = self.scales.at[slot, pl.ds(line * WORDS * codes.per_word, WORDS * codes.per_word)]
                factors[line] = load(ref, beside_words(codes.per_word), optimized=False)
            grown.append(add_scaled(total, added, factors[line], codes, index))
        return grown

    def _products(self, slot, mine: range) -> list[jax.Array]:
        """Sums of a step."""
        shape = (TILE, self.slots.rows)
        if support.is_interpreted():  # its tensor cores take no operand from registers
            sums = [jnp.zeros(shape, jnp.float32) for _ in mine]
            for at, tile, x in self._tiles(slot, mine):
                sums[at] += jnp.dot(tile, x[...], preferred_element_type=jnp.float32)
            return sums

        def multiply(*sums):
            for at, tile, x in self._tiles(slot, mine):
                plgpu.wgmma(sums[at], tile, x)
                plgpu.wgmma_wait(1)  # the tile before this one may leave its registers
            return [accumulator[...] for accumulator in sums]

        return pl.run_scoped(multiply, *(plgpu.WGMMAAccumulatorRef(shape, jnp.float32) for _ in mine))

    def _tiles(self, slot, mine: range):
        """(position in `mine`, tile, the terms of x that it is multiplied with), for all that a step has."""
        codes = self.slots.codes
        for first in range(0, self.slots.config.depth, TILE):
            x = self.x.at[slot, :, pl.ds(first, TILE)].T
            for line in sorted({tile // codes.line_tiles for tile in mine}):
                words = pl.ds(line * WORDS, WORDS)
                pairs = zipped(load(self.words.at[slot, pl.ds(first, TILE), words], WORDS_LAYOUT), codes.by_bytes)
                scales = []
                if codes.block:
                    blocks = pl.ds(first // codes.block, TILE // codes.block)
                    ref = self.scales.at[slot, blocks]
                    scales = [load(ref, beside_words(2), optimized=False)]
                for at, tile in enumerate(mine):
                    if tile // codes.line_tiles == line:
                        for part in codes.tiles(*pairs, tile % codes.line_tiles, *scales):
                            yield at, part, x
