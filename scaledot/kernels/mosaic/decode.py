"""Products of few rows with packed weights on Hopper's tensor cores; weights are read once, in the form they have.

Memory is what such a product waits for, so weights stay codes until they are in registers. There they become the left
operand of the tensor cores: columns of the weights are rows of the transposed result, and the few rows of x, in shared
memory, its columns.

A program computes 256 columns over a part of the sum. Its last warpgroup fetches steps of the sum into a ring of slots:
few large copies, as each costs the same to start. The others are teams, each of which multiplies its part of every
step, and members of a team that share a part and have different tiles. A part's sums are added, in float32 and times
the factors of its group, to the totals; those of the teams are added at the end, and those of programs are left to the
caller.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from scaledot.kernels.mosaic import support
from scaledot.kernels.mosaic.memory import THREADS, load, tiled
from scaledot.kernels.mosaic.registers import TILE, WORDS, WORDS_LAYOUT, beside_words, zipped
from scaledot.kernels.mosaic.unpack import Codes, add_scaled, joined

TILES = 4
STRIP = TILES * TILE  # columns of a program
WARPGROUPS = 4  # that multiply
PART = 64  # terms of a step that a team multiplies
SHARED_BYTES = 227 * 1024 - 1024  # of a program, but for barriers
FETCH_REGISTERS = 32


@dataclasses.dataclass(frozen=True)
class Config:
    """How a product is cut up.

    slots: of the ring. teams, members: the warpgroups that multiply. splits: programs that share the sum.
    """

    slots: int
    teams: int
    members: int
    splits: int

    @property
    def depth(self) -> int:
        """Terms of a step."""
        return self.teams * PART

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
    # All tiles of so many rows have room in the registers of a thread, beside what codes are made of.
    together = 16 if codes.parts == 1 and not codes.block else 8
    members = min(max(1, rows // together), warpgroups)
    config = Config(1, warpgroups // members, members, 1)
    steps, strips = pl.cdiv(terms, config.depth), pl.cdiv(columns, STRIP)
    splits = max(1, min(programs // strips, steps))
    slots = Slots(config, codes, PART, rows, scaled=True)
    return dataclasses.replace(config, slots=slots.that_fit(), splits=splits)


def decode(
    x: jax.Array, words: jax.Array, scales: jax.Array | None, *, codes: Codes, group: int, config: Config
) -> jax.Array:
    """Partial sums of x (rows, K) times weights (K, N), float32 (splits, lines, rows, columns of a line).

    words: int32 (K, N / codes of a word). scales: float32 (groups, N), N filled up to whole strips, each for `group`
    terms, which is a multiple of 64; or bytes that are folded into codes, as int32 (blocks, N / 4); or None. K is a
    multiple of 8, and lines of x and words have whole multiples of 128 bytes, or less than that.
    """
    wanted, terms = x.shape
    rows = _filled(wanted)
    strips = pl.cdiv(words.shape[1] * codes.per_word, STRIP)
    line = WORDS, *codes.in_word(codes.line_tiles)
    lines = TILES // codes.line_tiles
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
            _leave(totals.at[team], codes, mine, ring.multiply(first, team, mine))
            plgpu.barrier_arrive(added)
            plgpu.barrier_wait(added)
            _add_teams(config, totals, warpgroup, out_gmem.at[split, pl.ds(strip * lines, lines)])

        pl.when(warpgroup == config.groups)(fetch)
        for member in range(config.members):
            is_member = (warpgroup < config.groups) & (lax.rem(warpgroup, config.members) == member)
            pl.when(is_member)(functools.partial(multiply, member))

    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((config.splits, strips * lines, wanted, *line), jnp.float32),
        grid=(config.splits, strips),
        grid_names=("split", "strip"),
        num_threads=config.groups + 1,
        thread_name="warpgroup",
        scratch_types=[
            *slots.rings(),
            plgpu.SMEM((config.teams, lines, rows, *line), jnp.float32),
            plgpu.Barrier(num_arrivals=slots.copies, num_barriers=config.slots),
            plgpu.Barrier(num_arrivals=config.groups, num_barriers=config.slots),
            plgpu.Barrier(num_arrivals=config.groups),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    sums = run(x, words, *([] if scales is None else [scales]))
    return sums.reshape(*sums.shape[:3], -1)


def _filled(rows: int) -> int:
    """Columns of the transposed result that are computed: 8, 16, 32 or 64."""
    return max(8, 1 << (rows - 1).bit_length())


def _share(steps: int, splits: int, split) -> tuple[Any, Any]:
    """The first of a program's steps, and their number."""
    share = pl.cdiv(steps, splits)
    return split * share, lax.max(lax.min(share, steps - split * share), 0)


def _leave(totals, codes: Codes, mine: range, sums: list[jax.Array]) -> None:
    """Put the sums of some tiles where a team's lines are gathered, columns in order."""
    for line in sorted({tile // codes.line_tiles for tile in mine}):
        of_line = [tile for tile in mine if tile // codes.line_tiles == line]
        places = pl.ds(of_line[0] % codes.line_tiles, len(of_line))
        ref = totals.at[line, :, :, places] if codes.by_bytes else totals.at[line, :, :, :, places]
        ref[...] = joined([sums[tile - mine[0]] for tile in of_line], codes)


def _add_teams(config: Config, totals, warpgroup, out) -> None:
    """Store sums of all teams; a warpgroup has its share of the rows."""
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

    @property
    def scale_rows(self) -> int:
        """Groups that a step can have terms of."""
        depth, group = self.config.depth, self.group
        return pl.cdiv(group - math.gcd(depth, group) + depth, group)

    def that_fit(self) -> int:
        """How many the memory of a program has room for."""
        config, codes = self.config, self.codes
        scales = config.depth // codes.block * STRIP if codes.block else 4 * STRIP * self.scale_rows * self.scaled
        slot = 2 * self.rows * config.depth + 4 * self.words * config.depth + scales
        totals = 4 * config.teams * STRIP * self.rows
        return (SHARED_BYTES - totals) // slot

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
        return [x, words, plgpu.SMEM((config.slots, self.scale_rows, STRIP), jnp.float32)]


class Part(NamedTuple):
    """A team's terms of a step, and the slot where they are."""

    slot: Any
    team: Any
    step: Any


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
                groups = pl.ds(lax.div(step * config.depth, self.slots.group), self.slots.scale_rows)
                scales = scales_gmem[0].at[groups, pl.ds(strip * STRIP, STRIP)]
            plgpu.copy_gmem_to_smem(scales, self.scales.at[slot], full)

    def multiply(self, first, team, mine: range) -> list[jax.Array]:
        """Sums of some tiles over a team's parts of the steps from the first one on."""

        def turn(step, totals):
            slot = self.slot(step)
            plgpu.barrier_wait(self.full.at[slot])
            totals = self._step(Part(slot, team, first + step), mine, totals)
            plgpu.barrier_arrive(self.empty.at[slot])
            return totals

        zeros = plgpu.layout_cast(jnp.zeros((TILE, self.slots.rows), jnp.float32), plgpu.Layout.WGMMA)
        return lax.fori_loop(0, self.count, turn, [zeros] * len(mine))

    def _step(self, part: Part, mine: range, totals: list[jax.Array]) -> list[jax.Array]:
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

    def _products(self, part: Part, mine: range) -> list[jax.Array]:
        """Sums of a part."""
        shape = (TILE, self.slots.rows)
        if support.is_interpreted():  # its tensor cores take no operand from registers
            sums = [jnp.zeros(shape, jnp.float32) for _ in mine]
            for at, tile, x in self._tiles(part, mine):
                sums[at] += jnp.dot(tile, x[...], preferred_element_type=jnp.float32)
            return sums

        def multiply(*sums):
            for at, tile, x in self._tiles(part, mine):
                plgpu.wgmma(sums[at], tile, x)
                plgpu.wgmma_wait(1)  # the tile before this one may leave its registers
            return [accumulator[...] for accumulator in sums]

        return pl.run_scoped(multiply, *(plgpu.WGMMAAccumulatorRef(shape, jnp.float32) for _ in mine))

    def _tiles(self, part: Part, mine: range):
        """(position in `mine`, tile, the terms of x that it is multiplied with), for all that a part has."""
        codes = self.slots.codes
        terms = pl.ds(part.team * PART, PART)
        x = self.x.at[part.slot, :, terms].T
        for line in sorted({tile // codes.line_tiles for tile in mine}):
            words = self.words.at[part.slot, terms, pl.ds(line * WORDS, WORDS)]
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
