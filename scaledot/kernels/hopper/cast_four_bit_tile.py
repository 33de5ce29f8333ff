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

from scaledot.kernels.hopper.cast_arithmetic import butterflies
from scaledot.kernels.hopper.cast_four_bit_arithmetic import rows_of, sum_of
from scaledot.kernels.hopper.cast_four_bit_ptx import PAIRS_OF_ROWS, flushed_difference, flushed_product, load_for_all
from scaledot.kernels.hopper.memory_layouts import UNALIGNED_COLUMN_PER_THREAD as COLUMN_PER_THREAD
from scaledot.kernels.hopper.memory_layouts import load
from scaledot.kernels.hopper.scale_blocks import FOUR_BIT_BLOCK as BLOCK
from scaledot.kernels.hopper.scale_blocks import ROTATION
from scaledot.numerics.bits import bits_of, float_of
from scaledot.numerics.rounding import uniform_at

TILE = ROTATION  # rows and columns of a tile
PITCH = TILE + 1  # words from one row of a tile to the next
WARPGROUPS = 2
BLOCKS = TILE // BLOCK  # of a rotated group
OWN_BLOCKS = BLOCKS // WARPGROUPS  # of a thread
OWN_ELEMENTS = TILE // WARPGROUPS  # of a thread
E4M3_CODES = 128  # without a sign
MULTIPLIERS, VALUES = 0, 1  # rows of `Cta.scale_table`, each of which one warpgroup writes
LOADED_ROWS = WRITTEN_ROWS = 32  # in flight between GMEM and SMEM
# Neighbouring rows per step when columns are rotated: 2 × 8 blocks = 16 elements of each thread in flight, which leaves
# registers for three CTAs per SM.
FIRST_ROWS = 2


class Cta(NamedTuple):
    """What the warpgroups of a CTA share besides the tile. warpgroup: the index of this one.

    scales: the stored scales of the tile before their correction, float32 (8, 128), negative for codes of the second
    element. sums: bits of each warpgroup's sums for the correction, uint32 (4, 128). scale_table: the quantisation
    multiplier and the value of each E4M3 code, float32 (2, 128). barrier: an arrival of each warpgroup.
    """

    warpgroup: Any
    scales: Any
    sums: Any
    scale_table: Any
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
    """A tile of x in GMEM, of which a thread loads a column.

    mean: of its columns, (1, 128), or None. rows: of x from the first of the tile on, without its padding; None if that
    has none.
    """

    x: Any
    mean: jax.Array | None
    rows: Any

    def load(self, first, signs: jax.Array, block: int = 0) -> jax.Array:
        """Returns rows as float32 without subnormals, less the mean, times `signs`, which are 1 or -1, (count, 128).

        The first row is `first + 16 * block`. The second slice starts at a constant, which becomes the immediate
        offset of the load instruction.
        """
        count, offset = signs.shape[0], block * BLOCK
        ref = self.x.at[pl.ds(first, offset + count)].at[pl.ds(offset, count)]
        values = load(ref, COLUMN_PER_THREAD, optimized=False).astype(jnp.float32)
        if self.mean is None:
            values = flushed_product(values, signs)
        else:
            values = flushed_difference(values, jnp.concatenate([self.mean] * count)) * signs
        if self.rows is not None:
            row = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=COLUMN_PER_THREAD)
            values = jnp.where(row < self.rows - (first + offset), values, np.float32(0))
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

    def elements(self, first, count: int, offset: int = 0) -> Any:
        """The ref of `count` neighbouring elements of each thread from `first + offset` on, (count, 128)."""
        threads = pl.ds(0, TILE)
        if self.along:
            return self.smem.at[threads, pl.ds(first, offset + count)].at[threads, pl.ds(offset, count)].T
        return self.smem.at[pl.ds(first, offset + count), threads].at[pl.ds(offset, count), threads]

    def load(self, first, count: int, offset: int = 0) -> jax.Array:
        return load(self.elements(first, count, offset), COLUMN_PER_THREAD, optimized=False)

    def load_block(self, block) -> jax.Array:
        return self.load(block * BLOCK, BLOCK)

    def store_block(self, block, values: jax.Array) -> None:
        self.elements(block * BLOCK, BLOCK)[...] = values

    def store_pairs(self, block, pairs: jax.Array) -> None:
        """Stores words (8, 128) of a block once its warpgroup has loaded this block and those before it.

        The words of the k-th block of a warpgroup replace elements 8 k to 8 k + 7 of the 64 of each thread.
        """
        self.elements(self._first_pair(block), BLOCK // 2)[...] = float_of(pairs)

    def load_pairs(self, block) -> jax.Array:
        return bits_of(self.load(self._first_pair(block), BLOCK // 2))

    def _first_pair(self, block):
        first_block = self.cta.warpgroup * OWN_BLOCKS
        return first_block * BLOCK + (block - first_block) * (BLOCK // 2)

    def load_rows(self, first, count: int) -> jax.Array:
        """Rows of the tile, whatever the threads own."""
        return load(self.smem.at[pl.ds(first, count), pl.ds(0, TILE)], COLUMN_PER_THREAD, optimized=False)

    def load_rows_of_pairs(self, first, count: int, warpgroup: int) -> jax.Array:
        """The words (count, 32) of rows that a warpgroup stored by `store_pairs`."""
        words = self.smem.at[pl.ds(first, count), pl.ds(warpgroup * OWN_ELEMENTS, OWN_ELEMENTS // 2)]
        return bits_of(load(words, PAIRS_OF_ROWS, optimized=False))

    @property
    def columns(self) -> Any:
        """The columns of the tile in the matrix."""
        return pl.ds(self.column * TILE, TILE)

    def copy_from(self, x_gmem, mean_gmem, signs_gmem, row_count: int) -> jax.Array:
        """Copies the tile from x, as float32 without subnormals.

        mean_gmem: subtracted from the first `row_count` rows of x, or None. signs_gmem: float32 (1, 128), see
        `in_kernel_order`; the tile is then rotated, except for the stages of `add_neighbours`. None: it is not. Returns
        the sums over the rows that the warpgroup copied, (1, 128).
        """
        mean = None
        if mean_gmem is not None:
            mean = load(mean_gmem.at[pl.ds(0, 1), self.columns], COLUMN_PER_THREAD, optimized=False)
        x = x_gmem.at[pl.ds(self.row * TILE, TILE), self.columns]
        source = Source(x, mean, row_count - self.row * TILE if row_count % TILE else None)
        is_rotated = signs_gmem is not None
        if is_rotated and not self.along:
            count, copy = BLOCK // FIRST_ROWS, functools.partial(self._copy_rotated, source, signs_gmem)
        else:
            sign = load(signs_gmem, COLUMN_PER_THREAD, optimized=False) if is_rotated else splat(1)
            count, copy = TILE // LOADED_ROWS, functools.partial(self._copy_rows, source, sign)
        sums = lax.fori_loop(*self.cta.own(count), copy, splat(0))
        self.cta.sync()
        if is_rotated and self.along:
            pl.loop(*self.cta.own(BLOCK))(self._add_distant)
            self.cta.sync()
        return sums

    def _copy_rows(self, source: Source, sign: jax.Array, i, sums: jax.Array) -> jax.Array:
        """Copies LOADED_ROWS rows times the signs of columns (1, 128); returns `sums` plus the sum of these rows."""
        signs = jnp.concatenate([sign] * LOADED_ROWS)
        signed = source.load(i * LOADED_ROWS, signs)
        self.smem.at[pl.ds(i * LOADED_ROWS, LOADED_ROWS), pl.ds(0, TILE)][...] = signed
        return sums + sum_of(signed * signs)

    def _copy_rotated(self, source: Source, signs_gmem, i, sums: jax.Array) -> jax.Array:
        """Copies rows that are a multiple of 16 apart, and rotates over these distances, for FIRST_ROWS neighbours.

        Returns `sums` plus the sum of these rows.
        """
        first = i * FIRST_ROWS
        of_rows = [
            rows_of(load_for_all(signs_gmem.at[0, pl.ds((first + n) * BLOCKS, BLOCKS)])) for n in range(FIRST_ROWS)
        ]
        signed = []
        for block, of_block in enumerate(zip(*of_rows, strict=True)):
            signs = jnp.concatenate(of_block)
            signed.append(source.load(first, signs, block))
            sums = sums + sum_of(signed[-1] * signs)
        for n, elements in enumerate(zip(*map(rows_of, signed), strict=True)):
            for block, value in enumerate(butterflies(list(elements), neighbours_last=True)):
                self.elements(first, 1, n + block * BLOCK)[...] = value
        return sums

    def _add_distant(self, first) -> None:
        """Rotates elements that are a multiple of 16 apart, from `first` on, in place."""
        values = butterflies([self.load(first, 1, i * BLOCK) for i in range(BLOCKS)], neighbours_last=True)
        for i, value in enumerate(values):
            self.elements(first, 1, i * BLOCK)[...] = value

    def add_neighbours(self, block) -> jax.Array:
        """The elements of a block after the remaining stages of the rotation."""
        return jnp.concatenate(
            [
                value * np.float32(TILE**-0.5)
                for value in butterflies(rows_of(self.load_block(block)), neighbours_last=True)
            ]
        )


def in_kernel_order(signs: jax.Array, along: bool) -> jax.Array:
    """The signs of a rotation, 1 or -1 in float32 (128,), as the kernel reads them.

    along: blocks run along rows; the order is then that of elements. Otherwise that of
    element i + 16 j is at 8 i + j.
    """
    return signs if along else signs.reshape(BLOCKS, BLOCK).T.reshape(TILE)


def splat(value, dtype=jnp.float32) -> jax.Array:
    """One number for all threads, (1, 128)."""
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
