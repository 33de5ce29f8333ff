"""The SMEM tile of the four-bit cast kernel: copied from GMEM by two warpgroups, rotated, and read in blocks.

`cast_four_bit_kernel` describes the steps of a CTA.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from scaledot.kernels.hopper.cast_arithmetic import butterflies, flush_subnormals
from scaledot.kernels.hopper.cast_four_bit_arithmetic import rows_of, sum_of
from scaledot.kernels.hopper.memory_layouts import UNALIGNED_COLUMN_PER_THREAD as COLUMN_PER_THREAD
from scaledot.kernels.hopper.memory_layouts import load
from scaledot.kernels.hopper.scale_blocks import FOUR_BIT_BLOCK as BLOCK
from scaledot.kernels.hopper.scale_blocks import ROTATION
from scaledot.numerics.bits import SIGN, bits_of, float_of
from scaledot.numerics.rounding import uniform_at

TILE = ROTATION  # rows and columns of a tile
PITCH = TILE + 1  # words from one row of a tile to the next
WARPGROUPS = 2
BLOCKS = TILE // BLOCK  # of a rotated group
OWN_BLOCKS = BLOCKS // WARPGROUPS  # of a thread
OWN_ROWS = TILE // WARPGROUPS  # that a warpgroup copies from GMEM to SMEM
LOADED_ROWS = 32  # in flight between GMEM and SMEM
# Neighbouring rows per step when columns are rotated: 2 × 8 blocks = 16 elements of each thread in flight, which leaves
# registers for three CTAs per SM.
FIRST_ROWS = 2


class Cta(NamedTuple):
    """What the warpgroups of a CTA share besides the tile. warpgroup: the index of this one.

    scales: the stored scales of the tile before their correction, float32 (8, 128), negative for codes of the second
    element. sums: bits of each warpgroup's sums for the correction, uint32 (4, 128). barrier: an arrival of each
    warpgroup.
    """

    warpgroup: Any
    scales: Any
    sums: Any
    barrier: Any

    def sync(self) -> None:
        """Waits until all threads of the CTA have finished their accesses to SMEM."""
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.barrier)
        plgpu.barrier_wait(self.barrier)

    def own(self, count: int) -> tuple[Any, Any]:
        """The bounds of this warpgroup's share of `count` items."""
        share = count // WARPGROUPS
        return self.warpgroup * share, (self.warpgroup + 1) * share

    def total(self, own: tuple[jax.Array, ...]) -> list[jax.Array]:
        """Returns the sum over warpgroups of each of these arrays, (1, 128)."""
        for index, each in enumerate(own):
            self.sums[pl.ds(index * WARPGROUPS + self.warpgroup, 1)] = lax.bitcast_convert_type(each, jnp.uint32)
        self.sync()
        rows = (self.sums.at[pl.ds(index * WARPGROUPS, WARPGROUPS)] for index in range(len(own)))
        loaded = (load(each, COLUMN_PER_THREAD, optimized=False) for each in rows)
        return [sum_of(lax.bitcast_convert_type(bits, each.dtype)) for bits, each in zip(loaded, own, strict=True)]


class Source(NamedTuple):
    """Columns of x in GMEM, from a row on, of which a thread loads one. mean, row_count: see `Tile.copy_from`."""

    x: Any
    mean: Any
    columns: Any
    row: Any
    row_count: int

    def rows(self, first, count: int) -> jax.Array:
        """Returns rows as float32 without subnormals, less the mean, (count, 128)."""
        rows = pl.ds(self.row + first, count)
        values = load(self.x.at[rows, self.columns], COLUMN_PER_THREAD, optimized=False).astype(jnp.float32)
        values = flush_subnormals(values)
        if self.mean is not None:
            mean = load(self.mean.at[pl.ds(0, 1), self.columns], COLUMN_PER_THREAD, optimized=False)
            values = flush_subnormals(values - jnp.concatenate([mean] * count))
        if self.row_count % TILE:
            row = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=COLUMN_PER_THREAD)
            values = jnp.where(row < self.row_count - (self.row + first), values, np.float32(0))
        return values


class Tile(NamedTuple):
    """A tile in SMEM, float32 (128, 129). along: whether threads own rows. row, column: of the tile in the matrix.

    Arrays in registers are (n, 128): n elements of each thread.
    """

    cta: Cta
    smem: Any
    along: bool
    row: Any
    column: Any

    def elements(self, first, count: int) -> Any:
        """The ref of `count` neighbouring elements of each thread, (count, 128)."""
        if self.along:
            return self.smem.at[pl.ds(0, TILE), pl.ds(first, count)].T
        return self.smem.at[pl.ds(first, count), pl.ds(0, TILE)]

    def load(self, first, count: int) -> jax.Array:
        return load(self.elements(first, count), COLUMN_PER_THREAD, optimized=False)

    def load_block(self, block) -> jax.Array:
        return self.load(block * BLOCK, BLOCK)

    def store_block(self, block, values: jax.Array) -> None:
        self.elements(block * BLOCK, BLOCK)[...] = values

    def load_rows(self, first, count: int) -> jax.Array:
        """Rows of the tile, whatever the threads own."""
        return load(self.smem.at[pl.ds(first, count), pl.ds(0, TILE)], COLUMN_PER_THREAD, optimized=False)

    @property
    def columns(self) -> Any:
        """The columns of the tile in the matrix."""
        return pl.ds(self.column * TILE, TILE)

    def copy_from(self, x_gmem, mean_gmem, signs_gmem, row_count: int) -> jax.Array:
        """Copies the tile from x, as float32 without subnormals, once all threads have finished with the last one.

        mean_gmem: subtracted from the first `row_count` rows of x, or None. signs_gmem: uint32 (1, 128), see
        `sign_words`; the tile is then rotated, except for the stages of `add_neighbours`. None: it is not. Returns the
        sums over the rows that the warpgroup copied, (1, 128).
        """
        self.cta.sync()
        source = Source(x_gmem, mean_gmem, self.columns, self.row * TILE, row_count)
        is_rotated = signs_gmem is not None
        if is_rotated and not self.along:
            count, copy = BLOCK // FIRST_ROWS, functools.partial(self._copy_rotated, source, signs_gmem)
        else:
            signs = load(signs_gmem, COLUMN_PER_THREAD, optimized=False) if is_rotated else None
            count, copy = TILE // LOADED_ROWS, functools.partial(self._copy_rows, source, signs)
        sums = lax.fori_loop(*self.cta.own(count), copy, per_thread(0, jnp.float32))
        self.cta.sync()
        if is_rotated and self.along:
            pl.loop(*self.cta.own(BLOCK))(self._add_distant)
            self.cta.sync()
        return sums

    def _copy_rows(self, source: Source, signs: jax.Array | None, i, sums: jax.Array) -> jax.Array:
        """Copies LOADED_ROWS rows, with these bits of signs of columns flipped; returns `sums` plus their sum."""
        values = source.rows(i * LOADED_ROWS, LOADED_ROWS)
        signed = values if signs is None else float_of(bits_of(values) ^ jnp.concatenate([signs] * LOADED_ROWS))
        self.smem.at[pl.ds(i * LOADED_ROWS, LOADED_ROWS), pl.ds(0, TILE)][...] = signed
        return sums + sum_of(values)

    def _copy_rotated(self, source: Source, signs_gmem, i, sums: jax.Array) -> jax.Array:
        """Copies rows that are a multiple of 16 apart, and rotates over these distances, for FIRST_ROWS neighbours.

        Returns `sums` plus the sum of these rows.
        """
        chunks = [source.rows(i * FIRST_ROWS + block * BLOCK, FIRST_ROWS) for block in range(BLOCKS)]
        for n, elements in enumerate(zip(*map(rows_of, chunks), strict=True)):
            first = i * FIRST_ROWS + n
            mask = signs_gmem[0, first]
            signs = ((mask << np.uint32(31 - block)) & SIGN for block in range(BLOCKS))
            signed = [float_of(bits_of(x) ^ sign) for x, sign in zip(elements, signs, strict=True)]
            for block, value in enumerate(butterflies(signed, neighbours_last=True)):
                self.elements(first + block * BLOCK, 1)[...] = value
        return sums + sum_of(jnp.concatenate(chunks))

    def _add_distant(self, first) -> None:
        """Rotates elements that are a multiple of 16 apart, from `first` on, in place."""
        indices = [first + i * BLOCK for i in range(BLOCKS)]
        values = butterflies([self.load(index, 1) for index in indices], neighbours_last=True)
        for index, value in zip(indices, values, strict=True):
            self.elements(index, 1)[...] = value

    def add_neighbours(self, block) -> jax.Array:
        """The elements of a block after the remaining stages of the rotation."""
        return jnp.concatenate(
            [
                value * np.float32(TILE**-0.5)
                for value in butterflies(rows_of(self.load_block(block)), neighbours_last=True)
            ]
        )


def sign_words(signs: jax.Array, along: bool) -> jax.Array:
    """Packs the signs of a rotation for the kernel: uint32 (128,), from float32 (128,).

    along: blocks run along rows; word i is then the sign bit of element i. Otherwise bit j of word i, for i below 16,
    is set if element i + 16 j is multiplied by -1.
    """
    negative = (signs < 0).astype(jnp.uint32)
    if along:
        return negative << 31
    masks = jnp.sum(negative.reshape(BLOCKS, BLOCK) << np.arange(BLOCKS, dtype=np.uint32)[:, None], axis=0)
    return jnp.pad(masks.astype(jnp.uint32), (0, TILE - BLOCK))


def per_thread(value: float, dtype) -> jax.Array:
    """One number per thread, (1, 128)."""
    return plgpu.layout_cast(jnp.full((1, TILE), value, dtype), COLUMN_PER_THREAD)


def uniform_of_block(tile: Tile, seeds_gmem, row_length: int, block) -> jax.Array:
    """Random numbers in [0, 1) for the scales of a block, those of its first element."""
    thread = plgpu.broadcasted_iota(jnp.int32, (1, TILE), 1, layout=COLUMN_PER_THREAD)
    row, column = tile.row * TILE, tile.column * TILE
    if tile.along:
        place = (row + thread) * np.int32(row_length) + (column + block * BLOCK)
    else:
        place = (row + block * BLOCK) * np.int32(row_length) + column + thread
    return uniform_at(place.astype(jnp.uint32), seeds_gmem[0], seeds_gmem[1])
