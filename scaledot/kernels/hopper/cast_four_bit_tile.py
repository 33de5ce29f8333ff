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
    """SMEM that the warpgroups of a CTA share besides the tile. warpgroup: the index of the calling one.

    scales: the block scales of the tile before MS-EDEN corrects them, float32 (8, 128), negative for blocks that use
    the second element dtype. sums: each warpgroup's two sums for the correction, as bits, uint32 (4, 128). scale_table:
    the quantisation multiplier and the value of each E4M3 code, float32 (2, 128). barrier: with one arrival per
    warpgroup.
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
    """A tile of x in GMEM, of which each thread loads a column.

    mean: of the tile's columns, (1, 128), or None. rows: the number of rows of x without padding, counted from the
    first row of the tile; None if x has no padding.
    """

    x: Any
    mean: jax.Array | None
    rows: Any

    def load(self, first, signs: jax.Array, block: int = 0) -> jax.Array:
        """Returns (x - mean) * signs of rows from first + 16 * block on, float32 (count, 128), with subnormals flushed.

        signs: 1 or -1, (count, 128). The ref is sliced twice because the constant start of the second slice becomes the
        immediate offset of the load instruction.
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
    """A tile in SMEM, float32 (128, 129). along: threads own rows, otherwise columns. row, column: its grid indices.

    Arrays in registers have shape (n, 128): n elements of each thread.
    """

    cta: Cta
    smem: Any
    along: bool
    row: Any
    column: Any

    def elements(self, first, count: int, offset: int = 0) -> Any:
        """The SMEM ref (count, 128) of `count` neighbouring elements of each thread, from `first + offset` on."""
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
        """Stores the 16 bfloat16 values of a block as words (8, 128), over elements that are no longer needed.

        The words of a warpgroup's k-th block replace elements 8 k to 8 k + 7 of the 64 of each thread: the warpgroup
        must have loaded blocks 0 to k.
        """
        self.elements(self._first_pair(block), BLOCK // 2)[...] = float_of(pairs)

    def load_pairs(self, block) -> jax.Array:
        return bits_of(self.load(self._first_pair(block), BLOCK // 2))

    def _first_pair(self, block):
        first_block = self.cta.warpgroup * OWN_BLOCKS
        return first_block * BLOCK + (block - first_block) * (BLOCK // 2)

    def load_rows(self, first, count: int) -> jax.Array:
        """Returns rows of the tile (count, 128), of which each thread gets a column, also if it owns a row."""
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
        """Copies the tile from x in GMEM to SMEM, as float32 with subnormals flushed.

        mean_gmem: subtracted from the first `row_count` rows of x, or None. signs_gmem: those of a rotation, float32
        (1, 128), see `in_kernel_order`, or None; the tile is rotated except for the stages of `add_neighbours`. Returns
        column sums, before the rotation, over the rows that this warpgroup copied, (1, 128).
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
    """Returns the signs of a rotation, 1 or -1 in float32 (128,), in the order in which the kernel reads them.

    They are unchanged if blocks run along rows (`along`). Otherwise the sign of element i + 16 j is at index 8 i + j.
    """
    return signs if along else signs.reshape(BLOCKS, BLOCK).T.reshape(TILE)


def splat(value, dtype=jnp.float32) -> jax.Array:
    """Returns (1, 128): the same number in all threads."""
    return plgpu.layout_cast(jnp.full((1, TILE), value, dtype), COLUMN_PER_THREAD)


def uniform_of_block(tile: Tile, seeds_gmem, row_length: int, block) -> jax.Array:
    """Returns random numbers in [0, 1) for the block scales, (1, 128), hashed from the index of the first element."""
    thread = plgpu.broadcasted_iota(jnp.int32, (1, TILE), 1, layout=COLUMN_PER_THREAD)
    row, column = tile.row * TILE, tile.column * TILE
    if tile.along:
        place = (row + thread) * np.int32(row_length) + (column + block * BLOCK)
    else:
        place = (row + block * BLOCK) * np.int32(row_length) + column + thread
    return uniform_at(place.astype(jnp.uint32), seeds_gmem[0], seeds_gmem[1])
