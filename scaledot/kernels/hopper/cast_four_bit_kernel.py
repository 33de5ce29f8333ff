"""Casts a matrix to 4-bit codes with E4M3 scales per 16 elements, which are searched or corrected, after rotations.

It computes what `cast_microscaled_kernel` does not: scales of the least squared error, by both searches of
`numerics.scale_search`, blocks that choose between two elements, rotations of 128 elements whose signs are drawn, and
scales that MS-EDEN corrects (`numerics.eden`). Outputs are packed codes and the bytes of their scales, or bfloat16
values (code times block scale, which is exact).

Grid and CTA: one CTA of two warpgroups (of 128 threads) for a tile of 128×128 elements, a whole number of rotated
groups in both directions. For each output, the CTA loads the tile from GMEM (from L2 after the first), converts it to
float32 and stores it to SMEM in rows of 129 words. A thread of each warpgroup then owns half a column of the tile, or
half a row if blocks run along rows; with that row length neither has bank conflicts, so one code path serves both. The
thread works on blocks of its 16 neighbouring elements in registers:

    rotation     adds elements 64, 32 and 16 apart between GMEM and SMEM, or in place in SMEM if blocks run along rows,
                 and 8, 4, 2 and 1 apart in the registers of a block
    scale        of the block amax, or of the candidate with the least error
    codes        written back to SMEM: 4-bit codes in 32-bit words, or their decoded values
    MS-EDEN      accumulates two sums over the 8 blocks of a group, 4 in each warpgroup, and corrects their scales
    output       all threads write rows of the tile to GMEM: packed codes, two rows to a byte, or bfloat16 values; the
                 values of threads that own columns are written from registers instead

XLA computes the amax of the tensor, which its tensor scale needs, before the cast.

Codes and scales are bit-identical to the reference, except that intermediate values of a rotation below 2^-126 are not
flushed to zero. NaN and infinities give a NaN scale, in a rotation to all blocks of the group.

Example: a gradient (8192, 14336) in bfloat16 for dgrad and wgrad has two outputs, along rows and down columns. The grid
is (64, 112), a CTA uses 72 KB of SMEM, and three CTAs run on an SM.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from scaledot.formats import FORMATS
from scaledot.kernels.hopper import support
from scaledot.kernels.hopper.cast_arithmetic import butterflies, flush_subnormals, scale_reciprocal
from scaledot.kernels.hopper.launch import call_exported
from scaledot.kernels.hopper.memory_layouts import UNALIGNED_COLUMN_PER_THREAD as COLUMN_PER_THREAD
from scaledot.kernels.hopper.memory_layouts import load
from scaledot.kernels.hopper.scale_blocks import FOUR_BIT_BLOCK as BLOCK
from scaledot.kernels.hopper.scale_blocks import ROTATION
from scaledot.kernels.hopper.support import kernel_name
from scaledot.numerics.bits import (
    INFINITY,
    SIGN,
    amax_of_bits,
    bits_of,
    float_of,
    magnitude_bits,
)
from scaledot.numerics.eden import CODE_STEPS, STEPS, correction
from scaledot.numerics.encode import decode_float, float_code
from scaledot.numerics.rounding import round_nonnegative, uniform_at
from scaledot.numerics.scale_search import LARGEST_ERROR, OFFSETS, RATIOS, fraction_bits

TILE = ROTATION  # rows and columns of a tile
PITCH = TILE + 1  # words from one row of a tile to the next
WARPGROUPS = 2
BLOCKS = TILE // BLOCK  # of a rotated group
OWN_BLOCKS = BLOCKS // WARPGROUPS  # of a thread
OWN_ROWS = TILE // WARPGROUPS  # that a warpgroup copies from GMEM to SMEM
LOADED_ROWS = 32  # in flight between GMEM and SMEM
FIRST_ROWS = 2  # the same for rotated columns: 8 times as many rows, in registers that three CTAs per SM have
E4M3 = FORMATS["fp8_e4m3"]
NAN_SCALE, LARGEST_SCALE = np.uint32(0x7F), np.uint32(0x7E)  # codes of E4M3
LARGEST_CODE = {grid.element: grid.largest_code for grid in FORMATS["if4"].grid_formats}
ERROR_UNIT = np.float32(2.0 ** fraction_bits(BLOCK))  # errors of a search are integers in units of 1 / ERROR_UNIT
# Adding it rounds a float32 below 2^22 to an integer, which is then the difference of the bits.
_ROUNDER = np.float32(1.5 * 2.0**23)
# Threads share SMEM only between the loads, the cast and the stores of a tile, which explicit barriers separate.
_PARAMETERS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True)


class OutputSpec(NamedTuple):
    """One output of the kernel.

    elements: dtype names of the codes; of two, each block uses the one with the smaller error. targets: for each, the
    magnitude that the block amax is mapped to. search: `Format.search`, which says which scales are tried. along:
    blocks run along rows, otherwise down columns. dequantized: bfloat16 values instead of codes and scales. rotated,
    corrected: see the module.
    """

    elements: tuple[str, ...]
    targets: tuple[float, ...]
    search: str | None
    along: bool
    dequantized: bool
    rotated: bool
    corrected: bool


class CodesAndScales(NamedTuple):
    """Codes packed by row pairs and the bytes of their scales; or bfloat16 values, and None."""

    data: jax.Array
    scale: jax.Array | None


def cast(
    x: jax.Array,
    outputs: tuple[OutputSpec, ...],
    tensor_multipliers: jax.Array,
    seeds: jax.Array | None,
    signs: jax.Array | None,
    mean: jax.Array | None,
    rows: int,
    row_length: int,
    column_sums: bool = False,
) -> tuple[tuple[CodesAndScales, ...], jax.Array | None]:
    """Casts x (M, K), multiples of 128, to these outputs; returns them and the sums of 64 rows each, (M / 64, K).

    tensor_multipliers: for each output, the quantisation multiplier of the tensor and its reciprocal, float32
    (outputs, 2). seeds: of corrected outputs, uint32 (outputs, 2). signs: of rotated ones, uint32 (outputs, 128), see
    `sign_words`. mean: float32 (1, K), subtracted from x first. rows: of x before its padding, whose elements stay 0.
    row_length: columns of the unpadded (global) array, for the flat index of an element. column_sums: whether to return
    sums, float32, of x less the mean.
    """
    m, k = x.shape
    has = tuple(each is not None for each in (seeds, signs, mean))
    rows = m if mean is None else rows

    def kernel(x_gmem, tensor_multipliers_gmem, *refs) -> None:
        *refs, smem, scales_smem, sums_smem, barrier = refs
        cta = Cta(lax.axis_index("warpgroup"), scales_smem, sums_smem, barrier)
        others = iter(refs)
        seeds_gmem, signs_gmem, mean_gmem = (next(others) if each else None for each in has)
        sums_gmem = next(others) if column_sums else None
        for index, spec in enumerate(outputs):
            data, scale = next(others), None if spec.dequantized else next(others)
            tile = Tile(cta, smem, spec.along, lax.axis_index("row"), lax.axis_index("column"))
            multipliers = tensor_multipliers_gmem[index, 0], tensor_multipliers_gmem[index, 1]
            output = Output(spec, tile, multipliers, data, scale)
            signs = signs_gmem.at[pl.ds(index, 1)] if signs_gmem is not None and spec.rotated else None
            sums = tile.copy_from(x_gmem, mean_gmem, signs, rows)
            if sums_gmem is not None and index == 0:
                sums_gmem[pl.ds(tile.row * WARPGROUPS + cta.warpgroup, 1), tile.columns] = sums
            output.run(
                None if seeds_gmem is None else functools.partial(_uniform, tile, seeds_gmem.at[index], row_length),
            )

    run = plgpu.kernel(
        kernel,
        out_type=(
            *([jax.ShapeDtypeStruct((m // OWN_ROWS, k), jnp.float32)] if column_sums else []),
            *(each for spec in outputs for each in _output_types(m, k, spec)),
        ),
        grid=(m // TILE, k // TILE),
        grid_names=("row", "column"),
        kernel_name=kernel_name("cast", "four_bit"),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((TILE, PITCH), jnp.float32),
            plgpu.SMEM((BLOCKS, TILE), jnp.float32),
            plgpu.SMEM((2 * WARPGROUPS, TILE), jnp.uint32),
            plgpu.Barrier(num_arrivals=WARPGROUPS),
        ],
        compiler_params=_PARAMETERS,
    )
    optional = [each for each in (seeds, signs, mean) if each is not None]
    key = "four bit", outputs, has, rows, row_length, column_sums
    arrays = iter(call_exported(key, run, x, tensor_multipliers, *optional))
    sums = next(arrays) if column_sums else None
    casts = (CodesAndScales(next(arrays), None if spec.dequantized else next(arrays)) for spec in outputs)
    return tuple(casts), sums


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


def _output_types(m: int, k: int, spec: OutputSpec) -> list[jax.ShapeDtypeStruct]:
    if spec.dequantized:
        return [jax.ShapeDtypeStruct((m, k), jnp.bfloat16)]
    scales = (m, k // BLOCK) if spec.along else (m // BLOCK, k)
    return [jax.ShapeDtypeStruct((m // 2, k), jnp.uint8), jax.ShapeDtypeStruct(scales, jnp.uint8)]


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
        return [_sum(lax.bitcast_convert_type(bits, each.dtype)) for bits, each in zip(loaded, own, strict=True)]


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
        sums = lax.fori_loop(*self.cta.own(count), copy, _per_thread(0, jnp.float32))
        self.cta.sync()
        if is_rotated and self.along:
            pl.loop(*self.cta.own(BLOCK))(self._add_distant)
            self.cta.sync()
        return sums

    def _copy_rows(self, source: "Source", signs: jax.Array | None, i, sums: jax.Array) -> jax.Array:
        """Copies LOADED_ROWS rows, with these bits of signs of columns flipped; returns `sums` plus their sum."""
        values = source.rows(i * LOADED_ROWS, LOADED_ROWS)
        signed = values if signs is None else float_of(bits_of(values) ^ jnp.concatenate([signs] * LOADED_ROWS))
        self.smem.at[pl.ds(i * LOADED_ROWS, LOADED_ROWS), pl.ds(0, TILE)][...] = signed
        return sums + _sum(values)

    def _copy_rotated(self, source: "Source", signs_gmem, i, sums: jax.Array) -> jax.Array:
        """Copies rows that are a multiple of 16 apart, and rotates over these distances, for FIRST_ROWS neighbours.

        Returns `sums` plus the sum of these rows.
        """
        chunks = [source.rows(i * FIRST_ROWS + block * BLOCK, FIRST_ROWS) for block in range(BLOCKS)]
        for n, elements in enumerate(zip(*map(_rows, chunks), strict=True)):
            first = i * FIRST_ROWS + n
            mask = signs_gmem[0, first]
            signs = ((mask << np.uint32(31 - block)) & SIGN for block in range(BLOCKS))
            signed = [float_of(bits_of(x) ^ sign) for x, sign in zip(elements, signs, strict=True)]
            for block, value in enumerate(butterflies(signed, neighbours_last=True)):
                self.elements(first + block * BLOCK, 1)[...] = value
        return sums + _sum(jnp.concatenate(chunks))

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
                for value in butterflies(_rows(self.load_block(block)), neighbours_last=True)
            ]
        )


class Scale(NamedTuple):
    """The scale of a block of each thread, (1, 128) each.

    code: of E4M3, uint32, without a sign. multiplier: the quantisation multiplier. is_second: whether the codes are of
    the second element; None if there is only one.
    """

    code: jax.Array
    multiplier: jax.Array
    is_second: jax.Array | None


class Output(NamedTuple):
    """An output of a tile, with the refs of its results.

    tensor_multipliers: the quantisation multiplier of the tensor and its reciprocal.
    """

    spec: OutputSpec
    tile: Tile
    tensor_multipliers: tuple[Any, Any]
    data: Any
    scale: Any

    def run(self, uniform) -> None:
        """Casts the tile in SMEM and writes the output. uniform: a function of a block, for corrected outputs."""
        cta, zeros = self.tile.cta, (_per_thread(0, jnp.uint32), _per_thread(0, jnp.float32))
        first, _ = cta.own(BLOCKS)
        sums = lax.fori_loop(0, OWN_BLOCKS, lambda i, sums: self._cast_block(first + i, sums), zeros)
        if self.spec.corrected:
            squares, projections = cta.total(sums)
            factor = correction(squares, projections * CODE_STEPS)
            pl.loop(*cta.own(BLOCKS))(functools.partial(self._correct, factor, uniform))
        if self.tile.along or not self.spec.dequantized:
            cta.sync()
            self._write()

    def _cast_block(self, block, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Replaces a block in SMEM by its codes or values; returns the sums over blocks for the correction.

        These are the squares of the scaled elements, in steps, and their products with the codes.
        """
        spec, tile = self.spec, self.tile
        x = tile.add_neighbours(block) if spec.rotated else tile.load_block(block)
        amax = amax_of_bits(_max(magnitude_bits(x)))
        scale = self._scale_of(x, amax)
        scaled = x * _spread(scale.multiplier)
        values, codes = self._encode(scaled, scale.is_second)
        stored = jnp.where(amax == np.float32(np.inf), NAN_SCALE, _signed(scale))
        if spec.corrected or not spec.dequantized:
            tile.store_block(block, values if spec.dequantized else float_of(codes))
        if not spec.corrected:
            self._finish_block(block, stored, values)
            return sums
        tile.cta.scales[pl.ds(block, 1)] = _decoded(stored)
        squares, projections = sums
        shifted = scaled * STEPS + _ROUNDER
        steps = lax.bitcast_convert_type(shifted, jnp.int32) - _ROUNDER.view(np.int32)
        squares = squares + _sum(lax.bitcast_convert_type(steps * steps, jnp.uint32))
        # Exact in float32: multiples of 1/2 below 2^23, and so are all partial sums.
        return squares, projections + _sum(_without_rounder(shifted) * values)

    def _correct(self, correction: jax.Array, uniform, block) -> None:
        """Rounds the corrected scale of a block stochastically, and applies it to dequantised values."""
        scale = load(self.tile.cta.scales.at[pl.ds(block, 1)], COLUMN_PER_THREAD, optimized=False)
        is_nan = scale != scale
        stored = jnp.where(is_nan, NAN_SCALE, float_code(scale * correction, E4M3, uniform(block)))
        self._finish_block(block, stored, self.tile.load_block(block) if self.spec.dequantized else None)

    def _finish_block(self, block, stored: jax.Array, values: jax.Array | None) -> None:
        """Writes the scales of a block to GMEM, or for dequantised outputs the values times their scales.

        The values of a thread that owns a row go to SMEM, from which `_write` writes them in rows.
        """
        tile, first = self.tile, self.tile.row * BLOCKS + block
        if self.spec.dequantized:
            assert values is not None
            values = values * _spread(jnp.abs(_decoded(stored)))
            if tile.along:
                tile.store_block(block, values)
            else:
                self.data.at[pl.ds(first * BLOCK, BLOCK), tile.columns][...] = values.astype(jnp.bfloat16)
        elif tile.along:
            rows, column = pl.ds(tile.row * TILE, TILE), pl.ds(tile.column * BLOCKS + block, 1)
            self.scale.at[rows, column].T[...] = stored.astype(jnp.uint8)
        else:
            self.scale.at[pl.ds(first, 1), tile.columns][...] = stored.astype(jnp.uint8)

    def _scale_of(self, x: jax.Array, amax: jax.Array) -> Scale:
        """The scale of a block (16, 128): that of its amax, or of the candidate with the least error."""
        spec = self.spec
        if spec.search is None and len(spec.elements) == 1:
            code = self._amax_code(amax, spec.targets[0])
            return Scale(code, self._multiplier(code), None)
        magnitude, best = jnp.abs(x), None
        for index, (element, target) in enumerate(zip(spec.elements, spec.targets, strict=True)):
            best = self._search(magnitude, amax, element, target, index, best)
        assert best is not None
        _, code, is_second = best
        return Scale(code, self._multiplier(code), is_second == 1 if len(spec.elements) > 1 else None)

    def _search(self, magnitude, amax, element: str, target: float, index: int, best):
        """Returns (least error, code, index of the element) of this element's candidates and of `best`."""
        values, code_of = self._candidates(amax, element, target)
        limit = np.float32(LARGEST_CODE[element] + LARGEST_ERROR)

        def compare(i, best):
            least, code, chosen = best
            candidate = code_of(_entry(values, i))
            multiplier, value = self._multiplier(candidate), decode_float(candidate, E4M3)
            errors = _error(magnitude * _spread(multiplier), element)
            error = _sum(errors * errors) * (value * value)
            largest = amax * multiplier
            error = jnp.where((largest > 0) & (largest <= limit), error, np.float32(np.inf))
            is_less = error < least
            return (
                jnp.where(is_less, error, least),
                jnp.where(is_less, candidate, code),
                jnp.where(is_less, np.uint32(index), chosen),
            )

        if best is None:
            best = _per_thread(np.inf, jnp.float32), code_of(values[0]), _per_thread(0, jnp.uint32)
        return lax.fori_loop(0, len(values), compare, best)

    def _candidates(self, amax, element: str, target: float) -> tuple[tuple[float, ...], Callable[..., jax.Array]]:
        """Returns what the search tries, and a function from one of these numbers to the E4M3 code of its scale."""
        if self.spec.search == "four_over_six":
            return RATIOS, lambda ratio: self._amax_code(amax * ratio, target)
        from_amax = self._amax_code(amax, target)
        offsets = OFFSETS[element] if self.spec.search == "scales" else (0,)
        return offsets, lambda offset: _neighbour(from_amax, offset, amax != 0)

    def _amax_code(self, amax: jax.Array, target: float) -> jax.Array:
        """The E4M3 code of the scale that maps the block amax to `target`."""
        return float_code(amax * (self.tensor_multipliers[0] * np.float32(1 / target)), E4M3)

    def _multiplier(self, code: jax.Array) -> jax.Array:
        """The quantisation multiplier for the E4M3 code of a scale; 0 for a scale of 0."""
        multiplier = scale_reciprocal(decode_float(code, E4M3) * self.tensor_multipliers[1])
        return jnp.where(code == 0, np.float32(0), multiplier)

    def _encode(self, scaled: jax.Array, is_second: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Returns the decoded values of the codes of scaled elements, and the codes, uint32."""
        results = [_encode(scaled, element) for element in self.spec.elements]
        if is_second is None:
            return results[0]
        uses_second = _spread(is_second.astype(jnp.uint32)) == 1
        (first, first_code), (second, second_code) = results
        return jnp.where(uses_second, second, first), jnp.where(uses_second, second_code, first_code)

    def _write(self) -> None:
        """Writes codes or values from SMEM to GMEM, in rows."""
        tile = self.tile

        @pl.loop(*tile.cta.own(BLOCKS))
        def _(i):
            rows = tile.load_rows(i * BLOCK, BLOCK)
            if self.spec.dequantized:
                self.data.at[pl.ds(tile.row * TILE + i * BLOCK, BLOCK), tile.columns][...] = rows.astype(jnp.bfloat16)
                return
            codes = _rows(bits_of(rows))
            pairs = [even | (odd << 4) for even, odd in zip(codes[::2], codes[1::2], strict=True)]
            packed = jnp.concatenate(pairs).astype(jnp.uint8)
            self.data.at[pl.ds(tile.row * TILE // 2 + i * BLOCK // 2, BLOCK // 2), tile.columns][...] = packed


def _per_thread(value: float, dtype) -> jax.Array:
    """One number per thread, (1, 128)."""
    return plgpu.layout_cast(jnp.full((1, TILE), value, dtype), COLUMN_PER_THREAD)


def _rows(x: jax.Array) -> list[jax.Array]:
    return [x[i : i + 1] for i in range(x.shape[0])]


def _spread(per_thread: jax.Array) -> jax.Array:
    """One number per thread, (1, 128), for all elements of its block, (16, 128)."""
    return jnp.concatenate([per_thread] * BLOCK)


def _max(x: jax.Array) -> jax.Array:
    return functools.reduce(jnp.maximum, _rows(x))


def _sum(x: jax.Array) -> jax.Array:
    return functools.reduce(jnp.add, _rows(x))


def _entry(values: tuple[float, ...], i) -> Any:
    """The number at index i, which is known at run time; up to 8 integers from -8 to 7 are packed into a word."""
    if all(isinstance(value, int) for value in values):
        packed = np.uint32(sum((int(value) + 8) << 4 * n for n, value in enumerate(values)))
        return ((packed >> (4 * i).astype(jnp.uint32)) & np.uint32(15)).astype(jnp.int32) - 8
    return functools.reduce(lambda found, n: jnp.where(i == n, values[n], found), range(1, len(values)), values[0])


def _signed(scale: Scale) -> jax.Array:
    """The stored code of a scale, whose sign bit says that the codes are of the second element."""
    if scale.is_second is None:
        return scale.code
    return scale.code | jnp.where(scale.is_second, np.uint32(0x80), np.uint32(0))


def _decoded(stored: jax.Array) -> jax.Array:
    """The value of a stored scale, with its sign."""
    return jnp.where(stored & np.uint32(0x7F) == NAN_SCALE, np.float32(np.nan), decode_float(stored, E4M3))


def _neighbour(code: jax.Array, offset, where: jax.Array) -> jax.Array:
    """The E4M3 code `offset` larger, at least that of the smallest scale above 0 and at most that of 448."""
    moved = jnp.maximum(code, np.uint32(1)).astype(jnp.int32) + offset
    moved = jnp.clip(moved, np.int32(1), LARGEST_SCALE.astype(np.int32))
    return jnp.where(where, moved.astype(jnp.uint32), code)


def _error(magnitude: jax.Array, element: str) -> jax.Array:
    """Rounding errors of scaled magnitudes to an element, integers in units of 1 / ERROR_UNIT, as float32.

    The same numbers as in `numerics.scale_search.squared_error`, in eleven instructions per candidate and element: both
    terms are rounded by the addition of a power of two, which cancels in their difference.
    """
    shift = np.float32(2.0**23)
    if element == "int4":
        nearest = round_nonnegative(jnp.minimum(magnitude, np.float32(LARGEST_CODE[element])))
    else:
        shifted, step_shift, _ = _shifted_e2m1(magnitude)
        nearest = shifted - step_shift
    return (magnitude * ERROR_UNIT + shift) - (nearest * ERROR_UNIT + shift)


def _shifted_e2m1(magnitude: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (saturated magnitudes + shift, shift, binade): a sum whose last bit is a step of E2M1, so it is rounded.

    Steps are half the power of two below the magnitude, and 1/2 below 1. The shift is 2^23 + 2 steps.
    """
    clipped = jnp.minimum(magnitude, np.float32(LARGEST_CODE["float4_e2m1fn"]))
    binade = bits_of(jnp.maximum(clipped, np.float32(1))) & INFINITY
    shift = float_of(binade) * np.float32(2.0**22 + 1)
    return clipped + shift, shift, binade


def _encode(scaled: jax.Array, element: str) -> tuple[jax.Array, jax.Array]:
    """Returns scaled elements rounded to values of an element, and their 4-bit codes, uint32; NaN has any code."""
    if element == "int4":
        integers = _int4(scaled)
        return integers.astype(jnp.float32), lax.bitcast_convert_type(integers, jnp.uint32) & np.uint32(15)
    shifted, shift, binade = _shifted_e2m1(jnp.abs(scaled))
    sign = bits_of(scaled) & SIGN
    # The low bits of the sum are the number of steps plus 2. Codes of the first two binades, [0, 1) and [1, 2), are the
    # number of steps; each further binade adds 2. Twice the exponent of the first, 2 · 127, is 6 modulo 8.
    code = bits_of(shifted) + (binade >> 22)
    return float_of(bits_of(shifted - shift) | sign), (code & np.uint32(7)) | (sign >> 28)


def _int4(scaled: jax.Array) -> jax.Array:
    finite = jnp.where(scaled == scaled, scaled, np.float32(0))
    return _integer(jnp.clip(finite, np.float32(-7), np.float32(7)))


def _integer(x: jax.Array) -> jax.Array:
    """Rounds |x| < 2^22 to int32, to nearest even."""
    return lax.bitcast_convert_type(x + _ROUNDER, jnp.int32) - _ROUNDER.view(np.int32)


def _without_rounder(shifted: jax.Array) -> jax.Array:
    """Returns x rounded to an integer, in float32, from x + _ROUNDER."""
    if support.is_interpreted():  # the or changes no bit; without it XLA would simplify the result to x
        shifted = float_of(bits_of(shifted) | np.uint32(0x4B000000))
    return shifted - _ROUNDER


def _uniform(tile: Tile, seeds_gmem, row_length: int, block) -> jax.Array:
    """Random numbers in [0, 1) for the scales of a block, those of its first element."""
    thread = plgpu.broadcasted_iota(jnp.int32, (1, TILE), 1, layout=COLUMN_PER_THREAD)
    row, column = tile.row * TILE, tile.column * TILE
    if tile.along:
        place = (row + thread) * np.int32(row_length) + (column + block * BLOCK)
    else:
        place = (row + block * BLOCK) * np.int32(row_length) + column + thread
    return uniform_at(place.astype(jnp.uint32), seeds_gmem[0], seeds_gmem[1])
