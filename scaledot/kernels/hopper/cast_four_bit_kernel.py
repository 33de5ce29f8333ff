"""Casts a matrix to 4-bit codes with one E4M3 scale per 16 elements, for recipes with scale searches or MS-EDEN.

It supports what `cast_microscaled_kernel` does not: block scales of least squared error, by both searches of
`numerics.scale_search`; a choice between two element dtypes per block; Hadamard rotations of 128 elements with drawn
signs; and the scale correction of MS-EDEN (`numerics.eden`). Outputs are packed codes with E4M3 scales as bytes, or
dequantised bfloat16 values (code times block scale, which is exact).

Grid and CTA: one CTA of two warpgroups (of 128 threads) for a tile of 128×128 elements, a whole number of rotated
groups in both directions. For each output, the CTA loads the tile from GMEM (from L2 after the first), converts it to
float32 and stores it to SMEM with a pitch of 129 words. Each thread then owns half a column of the tile, or half a row
if blocks run along rows; that pitch avoids bank conflicts in both, so one code path serves both. A thread loads one
block of 16 elements at a time to registers:

    rotation     adds elements 64, 32 and 16 apart between GMEM and SMEM, or in place in SMEM if blocks run along rows,
                 and 8, 4, 2 and 1 apart in the registers of a block
    scale        of the block amax, or of the candidate with the least error; its quantisation multiplier is looked up
                 in a table of the E4M3 codes, which the CTA fills once per output
    codes        of the scaled elements; for dequantised outputs their values as bfloat16, two to a word
    MS-EDEN      accumulates two sums over the 8 blocks of a group, 4 in each warpgroup, and corrects their scales
    output       threads that own columns write packed codes, two rows to a byte, or bfloat16 values to GMEM. Threads
                 that own rows write them to SMEM, codes in 32-bit words, and all threads write rows from there to GMEM.
                 Under MS-EDEN, bfloat16 values stay in SMEM until the scales of their group are corrected

The kernel is limited by instruction issue, not by HBM bandwidth. XLA computes the amax of the tensor, for the tensor
scale, before the cast.

Codes and scales are bit-identical to the reference, except that intermediate values of a rotation below 2^-126 are not
flushed to zero. NaN and infinities give a NaN scale, in a rotation to all blocks of the group.

Example: a gradient (8192, 14336) in bfloat16 for dgrad and wgrad has two outputs, along rows and down columns. The grid
is (64, 112), a CTA uses 72 KB of SMEM, and three CTAs run on an SM.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from scaledot.kernels.hopper.cast_arithmetic import scale_reciprocal
from scaledot.kernels.hopper.cast_four_bit_arithmetic import (
    E4M3,
    LARGEST_CODE,
    NAN_SCALE,
    ROUNDER,
    SECOND_ELEMENT,
    after,
    encode,
    encode_either,
    entry,
    error_of,
    max_of,
    packed,
    spread,
    sum_of,
    sum_of_squares,
    without_rounder,
)
from scaledot.kernels.hopper.cast_four_bit_ptx import from_pairs, look_up, rows_from_pairs, scaled_pairs, to_pairs
from scaledot.kernels.hopper.cast_four_bit_tile import (
    BLOCKS,
    E4M3_CODES,
    MULTIPLIERS,
    OWN_BLOCKS,
    OWN_ELEMENTS,
    PITCH,
    TILE,
    VALUES,
    WARPGROUPS,
    WRITTEN_ROWS,
    Cta,
    Tile,
    splat,
    uniform_of_block,
)
from scaledot.kernels.hopper.launch import call_exported
from scaledot.kernels.hopper.memory_layouts import UNALIGNED_COLUMN_PER_THREAD as COLUMN_PER_THREAD
from scaledot.kernels.hopper.memory_layouts import load
from scaledot.kernels.hopper.scale_blocks import FOUR_BIT_BLOCK as BLOCK
from scaledot.kernels.hopper.support import kernel_name
from scaledot.numerics.bits import SIGN, amax_of_bits, bits_of, float_of
from scaledot.numerics.eden import CODE_STEPS, STEPS, correction
from scaledot.numerics.encode import decode_float, float_code
from scaledot.numerics.scale import e4m3_neighbour
from scaledot.numerics.scale_search import LARGEST_ERROR, OFFSETS, RATIOS

# Threads read what others wrote to SMEM only after an explicit barrier, `Cta.sync`.
_PARAMETERS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True)


class OutputSpec(NamedTuple):
    """One output of the kernel.

    elements: one element dtype name, or two, of which each block uses the one with the smaller error. targets: for each
    element dtype, the magnitude that the block amax is mapped to. search: `Format.search`. along: blocks run along
    rows, otherwise down columns. dequantized: bfloat16 values instead of codes and scales. rotated: by a Hadamard
    matrix in groups of 128. corrected: MS-EDEN corrects the block scales.
    """

    elements: tuple[str, ...]
    targets: tuple[float, ...]
    search: str | None
    along: bool
    dequantized: bool
    rotated: bool
    corrected: bool


class CodesAndScales(NamedTuple):
    """Codes, two rows to a byte, and E4M3 scales as bytes; or dequantised bfloat16 values, and None."""

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
    """Casts x (M, K), both multiples of 128; returns the outputs, and partial column sums (M / 64, K) or None.

    tensor_multipliers: for each output, the quantisation multiplier of the tensor and its reciprocal, float32
    (outputs, 2). seeds: of corrected outputs, uint32 (outputs, 2). signs: of rotated ones, float32 (outputs, 128), see
    `in_kernel_order`. mean: float32 (1, K), subtracted from x first, except from padding. rows: the number of rows of x
    without padding. row_length: columns of the unpadded (global) array, for the flat index of an element. column_sums:
    whether to return the float32 sums, each over 64 rows.
    """
    m, k = x.shape
    has = tuple(each is not None for each in (seeds, signs, mean))
    rows = m if mean is None else rows

    def kernel(x_gmem, tensor_multipliers_gmem, *refs) -> None:
        *refs, smem, scales_smem, sums_smem, scale_table_smem, barrier = refs
        cta = Cta(lax.axis_index("warpgroup"), scales_smem, sums_smem, scale_table_smem, barrier)
        others = iter(refs)
        seeds_gmem, signs_gmem, mean_gmem = (next(others) if each else None for each in has)
        sums_gmem = next(others) if column_sums else None
        for index, spec in enumerate(outputs):
            data, scale = next(others), None if spec.dequantized else next(others)
            tile = Tile(cta, smem, spec.along, lax.axis_index("row"), lax.axis_index("column"))
            multipliers = tensor_multipliers_gmem[index, 0], tensor_multipliers_gmem[index, 1]
            output = Output(spec, tile, multipliers, data, scale)
            signs = signs_gmem.at[pl.ds(index, 1)] if signs_gmem is not None and spec.rotated else None
            if index:
                cta.sync()  # all threads have finished with the previous output
            output.tabulate_scales()
            sums = tile.copy_from(x_gmem, mean_gmem, signs, rows)
            if sums_gmem is not None and index == 0:
                sums_gmem[pl.ds(tile.row * WARPGROUPS + cta.warpgroup, 1), tile.columns] = sums
            uniform = None
            if seeds_gmem is not None:
                uniform = functools.partial(uniform_of_block, tile, seeds_gmem.at[index], row_length)
            output.run(uniform)

    run = plgpu.kernel(
        kernel,
        out_type=(
            *([jax.ShapeDtypeStruct((m // TILE * WARPGROUPS, k), jnp.float32)] if column_sums else []),
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
            plgpu.SMEM((2, E4M3_CODES), jnp.float32),
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


def _output_types(m: int, k: int, spec: OutputSpec) -> list[jax.ShapeDtypeStruct]:
    if spec.dequantized:
        return [jax.ShapeDtypeStruct((m, k), jnp.bfloat16)]
    scales = (m, k // BLOCK) if spec.along else (m // BLOCK, k)
    return [jax.ShapeDtypeStruct((m // 2, k), jnp.uint8), jax.ShapeDtypeStruct(scales, jnp.uint8)]


class Scale(NamedTuple):
    """The block scale of each thread; all arrays are (1, 128).

    code: the E4M3 code without its sign bit, uint32. multiplier: the quantisation multiplier. is_second: whether the
    block uses the second element dtype; None if there is only one.
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

    def tabulate_scales(self) -> None:
        """Writes the quantisation multiplier and the value of each E4M3 code to SMEM, a row by each warpgroup."""
        cta = self.tile.cta
        code = plgpu.broadcasted_iota(jnp.uint32, (1, E4M3_CODES), 1, layout=COLUMN_PER_THREAD)

        @pl.when(cta.warpgroup == MULTIPLIERS)
        def _() -> None:
            multiplier = scale_reciprocal(decode_float(code, E4M3) * self.tensor_multipliers[1])
            cta.scale_table[pl.ds(MULTIPLIERS, 1)] = jnp.where(code == 0, np.float32(0), multiplier)

        @pl.when(cta.warpgroup == VALUES)
        def _() -> None:
            value = decode_float(code, E4M3)
            cta.scale_table[pl.ds(VALUES, 1)] = jnp.where(code == NAN_SCALE, np.float32(np.nan), value)

    def run(self, uniform) -> None:
        """Casts the tile in SMEM and writes the output. uniform: a function of a block, for corrected outputs."""
        cta, zeros = self.tile.cta, (splat(0, jnp.uint32), splat(0))
        first, _ = cta.own(BLOCKS)
        sums = lax.fori_loop(0, OWN_BLOCKS, lambda i, sums: self._cast_block(first + i, sums), zeros)
        if self.spec.corrected:
            squares, projections = cta.total(sums)
            factor = correction(squares, projections * CODE_STEPS)
            pl.loop(*cta.own(BLOCKS))(functools.partial(self._correct, factor, uniform))
        if self.tile.along:
            cta.sync()
            self._write()

    def _cast_block(self, block, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Writes the codes and the scale of a block, or its values; returns updated sums for the correction of MS-EDEN.

        sums: of the squares of the scaled elements, in units of 1 / STEPS, and of their products with the values.
        """
        spec, tile = self.spec, self.tile
        x = tile.add_neighbours(block) if spec.rotated else tile.load_block(block)
        amax = amax_of_bits(bits_of(max_of(jnp.abs(x))))
        scale = self._scale_of(x, amax)
        scaled = x * spread(scale.multiplier)
        values, codes = self._encode(scaled, scale.is_second)
        stored = jnp.where(amax == np.float32(np.inf), NAN_SCALE, _signed(scale))
        pairs = to_pairs(values) if spec.dequantized else None
        if not spec.dequantized:
            self._store_codes(block, codes)
        if not spec.corrected:
            self._finish_block(block, stored, pairs)
            return sums
        if pairs is not None:
            tile.store_pairs(block, pairs)
        tile.cta.scales[pl.ds(block, 1)] = float_of(bits_of(self._value(stored)) | ((stored & SECOND_ELEMENT) << 24))
        squares, projections = sums
        shifted = scaled * STEPS + ROUNDER
        squares = squares + sum_of_squares(shifted)
        # Exact in float32: multiples of 1/2 below 2^23, and so are all partial sums.
        return squares, projections + sum_of(without_rounder(shifted) * values)

    def _correct(self, correction: jax.Array, uniform, block) -> None:
        """Rounds the corrected scale of a block stochastically, and applies it to dequantised values."""
        scale = load(self.tile.cta.scales.at[pl.ds(block, 1)], COLUMN_PER_THREAD, optimized=False)
        is_nan = scale != scale
        stored = jnp.where(is_nan, NAN_SCALE, float_code(scale * correction, E4M3, uniform(block)))
        self._finish_block(block, stored, self.tile.load_pairs(block) if self.spec.dequantized else None)

    def _store_codes(self, block, codes: jax.Array) -> None:
        """Writes packed codes to GMEM if a thread has both codes of a byte; otherwise to SMEM, a code in each word."""
        tile = self.tile
        if tile.along:
            tile.store_block(block, float_of(codes))
        else:
            rows = pl.ds((tile.row * BLOCKS + block) * (BLOCK // 2), BLOCK // 2)
            self.data.at[rows, tile.columns][...] = packed(codes)

    def _finish_block(self, block, stored: jax.Array, pairs: jax.Array | None) -> None:
        """Writes the scales of a block to GMEM, or for dequantised outputs the values times their scales.

        pairs: the values, see `to_pairs`. Those of a thread that owns a row go to SMEM; `_write` writes them in rows.
        """
        tile, first = self.tile, self.tile.row * BLOCKS + block
        if pairs is not None:
            pairs = scaled_pairs(pairs, self._value(stored), self._zero(stored))
            if tile.along:
                tile.store_pairs(block, pairs)
            else:
                self.data.at[pl.ds(first * BLOCK, BLOCK), tile.columns][...] = from_pairs(pairs)
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
        magnitude = jnp.abs(x)
        least, code = self._search(magnitude, amax, spec.elements[0], spec.targets[0])
        is_second = None
        if len(spec.elements) > 1:
            error, second = self._search(magnitude, amax, spec.elements[1], spec.targets[1])
            is_second = error < least
            code = jnp.where(is_second, second, code)
        return Scale(code, self._multiplier(code), is_second)

    def _search(
        self, magnitude: jax.Array, amax: jax.Array, element: str, target: float
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the least error of this element dtype's candidates, and the E4M3 code of its scale."""
        from_amax = self._amax_code(amax, target)
        is_ratio = self.spec.search == "four_over_six"

        def code_of(candidate) -> jax.Array:
            if is_ratio:
                return self._amax_code(amax * candidate, target)
            return e4m3_neighbour(from_amax, candidate.astype(jnp.int32), amax != 0)

        def compare(candidates: tuple[float, ...], saturates: bool, i, best):
            least, chosen = best
            candidate = entry(candidates, i)
            error = self._error(magnitude, amax, element, code_of(candidate), saturates)
            is_less = error < least
            return jnp.where(is_less, error, least), jnp.where(is_less, candidate.astype(chosen.dtype), chosen)

        if is_ratio:
            passes, first = [(RATIOS, True)], splat(RATIOS[0])
        else:
            offsets = OFFSETS[element] if self.spec.search == "scales" else (0,)
            falling, rising = (tuple(offset for offset in offsets if (offset > 0) == above) for above in (False, True))
            assert offsets == falling + rising, "OFFSETS must end with those above 0: the first of equal errors is kept"
            # Scales above that of the amax saturate no element, unless `target` is above the largest code.
            passes, first = [(falling, True), (rising, target > LARGEST_CODE[element])], splat(0, jnp.uint32)
        best = splat(np.inf), first
        for candidates, saturates in passes:
            if candidates:
                best = lax.fori_loop(0, len(candidates), functools.partial(compare, candidates, saturates), best)
        least, chosen = best
        return least, code_of(chosen)

    def _error(
        self, magnitude: jax.Array, amax: jax.Array, element: str, code: jax.Array, saturates: bool
    ) -> jax.Array:
        """Returns the squared error of a block with the scale of an E4M3 code; infinity if it is not considered.

        saturates: whether the scale may saturate elements; if not, the error of one that does is infinity. A scale
        above that of the amax does so only if it is the largest of E4M3 or its multiplier the largest float32; its
        error is then not smaller than that of an earlier candidate. The errors of the second half of the block are
        computed after those of the first (`after`).
        """
        multiplier, value, squares = self._multiplier(code), self._scale_value(code), splat(0)
        zero = bits_of(splat(self.tensor_multipliers[0])) & SIGN  # of a positive number, which the compiler cannot know
        for half in (magnitude[: BLOCK // 2], magnitude[BLOCK // 2 :]):
            errors = error_of(half * spread(after(squares, multiplier, zero), BLOCK // 2), element, saturates)
            squares = squares + sum_of(errors * errors)
        error, largest = squares * (value * value), amax * multiplier
        limit = np.float32(LARGEST_CODE[element] + (LARGEST_ERROR if saturates else 0))
        return jnp.where((largest > 0) & (largest <= limit), error, np.float32(np.inf))

    def _amax_code(self, amax: jax.Array, target: float) -> jax.Array:
        """The E4M3 code of the scale that maps the block amax to `target`."""
        return float_code(amax * (self.tensor_multipliers[0] * np.float32(1 / target)), E4M3)

    def _multiplier(self, code: jax.Array) -> jax.Array:
        """The quantisation multiplier for the E4M3 code of a scale; 0 for a scale of 0."""
        return look_up(self.tile.cta.scale_table.at[MULTIPLIERS], code)

    def _scale_value(self, code: jax.Array) -> jax.Array:
        return look_up(self.tile.cta.scale_table.at[VALUES], code)

    def _value(self, stored: jax.Array) -> jax.Array:
        """The value of a stored scale, without its sign."""
        return self._scale_value(stored & ~SECOND_ELEMENT)

    def _zero(self, stored: jax.Array) -> jax.Array:
        """A pair of bfloat16 zeros that, added to values of a block with this stored scale, changes -0 of int4 to 0."""
        is_int4 = self._is_int4((stored & SECOND_ELEMENT) != 0)
        return jnp.where(is_int4, np.uint32(0), np.uint32(0x80008000))

    def _is_int4(self, is_second: jax.Array) -> jax.Array:
        """Whether blocks have int4 codes instead of E2M1, from whether they use the second element dtype."""
        first, second = self.spec.elements[0], self.spec.elements[-1]
        if first == second:
            return splat(first == "int4", jnp.uint32) != 0
        return is_second if second == "int4" else ~is_second

    def _encode(self, scaled: jax.Array, is_second: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Returns the decoded values of the codes of scaled elements, and the codes, uint32."""
        if is_second is None:
            return encode(scaled, self.spec.elements[0])
        return encode_either(scaled, self._is_int4(is_second))

    def _write(self) -> None:
        """Writes codes or values of threads that own rows from SMEM to GMEM, in rows."""
        tile = self.tile

        @pl.loop(*tile.cta.own(TILE // WRITTEN_ROWS))
        def _(i):
            first = i * WRITTEN_ROWS
            if not self.spec.dequantized:
                codes = packed(bits_of(tile.load_rows(first, WRITTEN_ROWS)))
                rows = pl.ds(tile.row * (TILE // 2) + i * (WRITTEN_ROWS // 2), WRITTEN_ROWS // 2)
                self.data.at[rows, tile.columns][...] = codes
                return
            for half in range(WARPGROUPS):
                columns = pl.ds(tile.column * TILE + half * OWN_ELEMENTS, OWN_ELEMENTS)
                values = rows_from_pairs(tile.load_rows_of_pairs(first, WRITTEN_ROWS, half))
                self.data.at[pl.ds(tile.row * TILE + first, WRITTEN_ROWS), columns][...] = values


def _signed(scale: Scale) -> jax.Array:
    """The stored code of a scale, whose sign bit says that the codes are of the second element."""
    if scale.is_second is None:
        return scale.code
    return scale.code | jnp.where(scale.is_second, SECOND_ELEMENT, np.uint32(0))
