"""One pass from a matrix to 8-bit floats under one factor, row-major and transposed, with what else that pass can see.

Bytes cannot be transposed in shared memory on Hopper, pairs of bytes can. So a program takes the even and the odd rows
of its tile apart, and packs the codes of two rows that belong to one column into one 16-bit word: the transposed matrix
of words is the transposed matrix of codes.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from scaledot.formats import Format
from scaledot.kernels.mosaic.memory import load, scaled, tiled, to_float8
from scaledot.numerics.bits import amax_of_rank, magnitude_rank
from scaledot.numerics.scale import levels_of

THREADS = 128  # of a program: one warpgroup
PAIRS = 64  # pairs of rows in a tile
WHOLE = 128  # what rows and columns must be multiples of
LANE_COLUMNS = 8  # columns over which a warpgroup's layout repeats


@dataclasses.dataclass(frozen=True)
class Config:
    """columns: of a tile. stages: tiles that are fetched ahead. resident: programs on one multiprocessor. walk: tiles
    that a program takes below each other, while its neighbours take those beside."""

    columns: int = 128
    stages: int = 3
    resident: int = 1
    walk: int = 16


class Wanted(NamedTuple):
    """Which results to write: codes as they lie, codes transposed, the largest magnitude, sums of each column."""

    rows: bool = True
    transposed: bool = True
    amax: bool = False
    sums: bool = False


class Result(NamedTuple):
    """What was wanted, None elsewhere. amax: one number of each program; sums: one row of each strip of rows."""

    rows: Any
    transposed: Any
    amax: Any
    sums: Any
    scale: Any


def config_for(dtype, wanted: Wanted) -> Config:
    """Tiles of 256 bytes across; half of that where nothing is transposed or sums of columns need registers."""
    if dtype.itemsize == 4:
        return Config(columns=64, stages=2, resident=2)
    narrow = wanted.sums or not (wanted.rows or wanted.transposed)
    return Config(columns=64, stages=4, resident=2) if narrow else Config()


def amax(x: jax.Array, *, multiprocessors: int) -> jax.Array:
    """Largest finite magnitudes of x (M, K), one of each program."""
    wanted = Wanted(rows=False, transposed=False, amax=True)
    config = config_for(x.dtype, wanted)
    return _pass(x, None, None, x.dtype, wanted=wanted, config=config, multiprocessors=multiprocessors).amax


def cast(x: jax.Array, factor: jax.Array, dtype, *, wanted: Wanted, config: Config, multiprocessors: int) -> Result:
    """Codes of x (M, K) times a float32 factor (1,); M and K must be multiples of 128."""
    return _pass(x, factor, None, dtype, wanted=wanted, config=config, multiprocessors=multiprocessors)


def cast_by_amax(
    x: jax.Array, seen: jax.Array, format: Format, *, wanted: Wanted, config: Config, multiprocessors: int
) -> Result:
    """The same with the factor that a format makes of the largest magnitude, from what `amax` saw; and its scale."""
    dtype = format.element_dtype
    return _pass(x, seen, format, dtype, wanted=wanted, config=config, multiprocessors=multiprocessors)


def _pass(
    x: jax.Array,
    given: jax.Array | None,
    format: Format | None,
    dtype,
    *,
    wanted: Wanted,
    config: Config,
    multiprocessors: int,
) -> Result:
    m, k = x.shape
    columns, programs = config.columns, multiprocessors * config.resident
    grid_m, grid_k = m // (2 * PAIRS), k // columns
    walk = math.gcd(grid_m, config.walk)
    units = grid_m // walk * grid_k
    slots = pl.cdiv(programs, THREADS) * THREADS
    writes = (*wanted, format is not None)

    def kernel(x_gmem, *others):
        refs: Any = iter(others)
        given_gmem = None if given is None else next(refs)
        outs: tuple[Any, ...] = tuple(next(refs) if want else None for want in writes)
        rows_gmem, words_gmem, amax_gmem, sums_gmem, scale_gmem = outs
        x_ring, rows_smem, words_smem, full = refs
        program = lax.axis_index("program")
        count = pl.cdiv(units - program, programs) * walk

        def place(step):
            unit = program + lax.div(step, walk) * programs
            strip, column = lax.div(unit, grid_k), lax.rem(unit, grid_k)
            row = strip * walk + lax.rem(step, walk)
            return strip, pl.ds(row * PAIRS, PAIRS), pl.ds(column * columns, columns)

        def fetch(step):
            _, pairs, along = place(step)
            slot = lax.rem(step, config.stages)
            for parity in range(2):
                plgpu.copy_gmem_to_smem(x_gmem.at[pairs, parity, along], x_ring.at[slot, parity], full.at[slot])

        for step in range(config.stages):
            pl.when(step < count)(lambda step=step: fetch(step))
        factor = None if given is None else _factor(given_gmem, format, scale_gmem, program)

        def step_of(step, seen):
            largest, total = seen
            slot = lax.rem(step, config.stages)
            strip, pairs, along = place(step)
            plgpu.barrier_wait(full.at[slot])
            values = [load(x_ring.at[slot, parity], plgpu.Layout.WGMMA).astype(jnp.float32) for parity in range(2)]
            if wanted.amax:
                largest = _larger(largest, values)
            codes = [] if factor is None else [_codes(v, factor, dtype) for v in values]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if wanted.rows:
                for parity in range(2):
                    rows_smem[parity] = codes[parity]
            if wanted.transposed:
                even, odd = (lax.bitcast_convert_type(c, jnp.uint8).astype(jnp.uint16) for c in codes)
                words_smem.T[...] = even | (odd << 8)
            if wanted.sums:
                pair = values[0] + values[1]
                total = jnp.where(lax.rem(step, walk) == 0, pair, total + pair)

                @pl.when(lax.rem(step, walk) == walk - 1)
                def _():
                    sums_gmem[strip, along] = jnp.sum(total, axis=0)

            plgpu.commit_smem()
            if wanted.rows:
                for parity in range(2):
                    plgpu.copy_smem_to_gmem(rows_smem.at[parity], rows_gmem.at[pairs, parity, along])
            if wanted.transposed:
                plgpu.copy_smem_to_gmem(words_smem, words_gmem.at[along, pairs])

            @pl.when(step + config.stages < count)
            def _():
                fetch(step + config.stages)

            return largest, total

        no_ranks = plgpu.layout_cast(jnp.zeros((PAIRS, LANE_COLUMNS), jnp.uint32), plgpu.Layout.WGMMA)
        no_sums = plgpu.layout_cast(jnp.zeros((PAIRS, columns), jnp.float32), plgpu.Layout.WGMMA)
        largest, _ = lax.fori_loop(0, count, step_of, (no_ranks, no_sums if wanted.sums else 0.0))
        if wanted.amax:
            most = jnp.max(jnp.max(amax_of_rank(largest), axis=1), axis=0)
            for slot in range(0, slots, programs):  # those that no program has are written, too
                pl.when(program + slot < slots)(lambda slot=slot: amax_gmem.__setitem__(program + slot, most))
        plgpu.wait_smem_to_gmem(0)

    outputs = (
        jax.ShapeDtypeStruct((m // 2, 2, k), dtype),
        jax.ShapeDtypeStruct((k, m // 2), jnp.uint16),
        jax.ShapeDtypeStruct((slots,), jnp.float32),
        jax.ShapeDtypeStruct((grid_m // walk, k), jnp.float32),
        jax.ShapeDtypeStruct((1,), jnp.float32),
    )
    run = plgpu.kernel(
        kernel,
        out_type=tuple(output for output, want in zip(outputs, writes, strict=True) if want),
        grid=(programs,),
        grid_names=("program",),
        scratch_types=[
            plgpu.SMEM((config.stages, 2, PAIRS, columns), x.dtype, transforms=_tiled(columns, x.dtype)),
            plgpu.SMEM((2, PAIRS, columns), dtype, transforms=_tiled(columns, dtype)) if wanted.rows else None,
            plgpu.SMEM((columns, PAIRS), jnp.uint16, transforms=_tiled(PAIRS, jnp.uint16))
            if wanted.transposed
            else None,
            plgpu.Barrier(num_arrivals=2, num_barriers=config.stages),
        ],
        compiler_params=_PARAMETERS,
    )
    written = iter(run(x.reshape(m // 2, 2, k), *([] if given is None else [given])))
    rows, words, seen, sums, scale = (next(written) if want else None for want in writes)
    return Result(
        None if rows is None else rows.reshape(m, k),
        None if words is None else lax.bitcast_convert_type(words, dtype).reshape(k, m),
        seen,
        sums,
        scale,
    )


_PARAMETERS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)


def _factor(given_gmem, format: Format | None, scale_gmem, program) -> jax.Array:
    """The factor that was given, or that of the largest magnitude; then the first program writes the scale."""
    if format is None:
        return given_gmem[0]
    seen = load(given_gmem, plgpu.Layout.WG_STRIDED(given_gmem.shape, vec_size=1))
    levels = levels_of(jnp.max(seen), format, np.dtype(np.float32))
    pl.when(program == 0)(lambda: scale_gmem.__setitem__(0, levels.scale))
    return levels.factors[0]


def _codes(values: jax.Array, factor: jax.Array, dtype) -> jax.Array:
    return to_float8(scaled(values, factor), dtype)


def _tiled(columns: int, dtype):
    itemsize = np.dtype(dtype).itemsize
    return tiled(columns * itemsize, itemsize)


def _larger(largest: jax.Array, values: list[jax.Array]) -> jax.Array:
    """The ranks of the largest magnitudes so far, one for each place of the layout."""
    for value in values:
        rank = magnitude_rank(value)
        for first in range(0, value.shape[1], LANE_COLUMNS):
            largest = jnp.maximum(largest, rank[:, first : first + LANE_COLUMNS])
    return largest
