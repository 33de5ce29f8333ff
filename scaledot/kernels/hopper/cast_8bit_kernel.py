"""One read of a matrix, 8-bit codes as they lie and transposed: one scale for all, for tiles or for lines of 128.

Lines run along the rows for codes that are written as they lie, and down the columns for those that are written
transposed, so a matmul finds them along its contracted axis either way. So do the groups of a rotation, which a second
tile in shared memory is for: there they run down the columns in any case, and a thread has a column.

A program (CTA) has one tile of 128 rows. Bytes cannot be transposed in shared memory on Hopper, pairs of bytes can: the
even and the odd rows of a tile are read apart, and the codes of two rows that belong to one column are packed into one
16-bit word. The transposed matrix of words is the transposed matrix of codes.

Rows may also come in strips that a table names, each from any row on and no longer than a tile. Shared memory then has
them in rows of 128 bytes, swizzled, because copies in tiles of eight rows begin at every eighth row only.

NaN and infinities either propagate or saturate. Propagating, the codes of both are NaN where one scale is for a whole
matrix of 8-bit floats; elsewhere the scale of what holds one is NaN. Saturating, scales follow from finite elements,
infinities become the largest code, and NaN the NaN code of a float or the integer 0.

The last rows come first: the cache may still have them from the search for the largest magnitude, and then has the
first codes for the matmul.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from scaledot.formats import Format
from scaledot.kernels.hopper import cast_8bit_cta
from scaledot.kernels.hopper.cast_8bit_cta import largest_of
from scaledot.kernels.hopper.cast_8bit_launch import (
    CastLaunch,
    FromAmax,
    GivenMultiplier,
    Outputs,
    PerBlock,
    PerRow,
    Result,
    Rotations,
    Scaling,
)
from scaledot.kernels.hopper.cast_arithmetic import amax_codec
from scaledot.kernels.hopper.launch import call_exported
from scaledot.kernels.hopper.memory_layouts import LANES, THREADS, load, row_vector_layout
from scaledot.kernels.hopper.scale_blocks import SCALE_BLOCK
from scaledot.kernels.hopper.support import kernel_name

__all__ = ["FromAmax", "GivenMultiplier", "Outputs", "PerBlock", "PerRow", "Result", "amax", "cast"]

SEARCHERS = 1024  # programs that look for the largest magnitude
READS = 8  # loads that one of them has in flight
_PARAMETERS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)


def amax(x: jax.Array, finite: bool) -> jax.Array:
    """Largest magnitudes of x, whose rows and columns are multiples of 128: one of each program.

    finite: of its finite elements; otherwise infinite where a program has found NaN or infinities.
    """
    ordered, amax_of = amax_codec(finite)
    vector = 16 // x.dtype.itemsize
    layout = row_vector_layout(LANES, vector)
    read = THREADS * vector // LANES, LANES
    chunks = x.size // (READS * math.prod(read))

    def kernel(x_gmem, out_gmem):
        program = lax.axis_index("program")

        def larger(step, most):
            first = (program + step * SEARCHERS) * READS
            parts = [load(x_gmem.at[first + i], layout, optimized=False) for i in range(READS)]
            return functools.reduce(jnp.maximum, [ordered(part.astype(jnp.float32)) for part in parts], most)

        nothing = plgpu.layout_cast(jnp.zeros(read, jnp.uint32), layout)
        most = lax.fori_loop(0, lax.div(chunks - program + SEARCHERS - 1, SEARCHERS), larger, nothing)
        out_gmem[program] = amax_of(largest_of(most))

    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((SEARCHERS,), jnp.float32),
        grid=(SEARCHERS,),
        grid_names=("program",),
        kernel_name=kernel_name("amax"),
        compiler_params=_PARAMETERS,
    )
    return call_exported(("amax", finite), run, x.reshape(-1, *read))


def cast(
    x: jax.Array,
    format: Format,
    scaling: Scaling,
    wanted: Outputs,
    seeds: jax.Array | None = None,
    width: int = 0,
    rotations: Rotations = (None, None),
    row_tiles: jax.Array | None = None,
    saturates: bool = False,
) -> Result:
    """Codes of x (M, K), which must be multiples of 128; of 2 and 128 where there are strips.

    strips: for every 128 rows of the results, the first row of x that they have and how many, the rest being zeros;
    int32 (M / 128, 2), with the M of the results. None: all rows as they come.
    seeds: the words of two keys, uint32 (2, 2), for codes as they lie and for transposed ones; None rounds to nearest.
    width: the length of rows by which elements are counted for stochastic rounding. rotations: along the lines of codes
    as they lie and of transposed ones, before the cast. saturates: what becomes of NaN and infinities.
    """
    rows = x.shape[0] if row_tiles is None else row_tiles.shape[0] * SCALE_BLOCK
    call = CastLaunch(
        (rows, x.shape[1]),
        x.dtype,
        format,
        type(scaling),
        isinstance(scaling, PerBlock) and scaling.square,
        wanted,
        seeds is not None,
        row_tiles is not None,
        width,
        rotations,
        saturates,
    )
    assert call.of_lines or not call.turns

    def kernel(*refs) -> None:
        cast_8bit_cta.run(call, *refs)

    run = plgpu.kernel(
        kernel,
        out_type=tuple(output for output, want in zip(call.outputs, call.writes, strict=True) if want),
        grid=call.grid,
        grid_names=("row", "column"),
        kernel_name=kernel_name("cast", format.name),
        scratch_types=call.scratch,
        compiler_params=_PARAMETERS,
    )
    optional = (*call.multipliers(scaling), seeds, row_tiles)
    given = (each for each in optional if each is not None)
    written = iter(call_exported(call, run, x.reshape(-1, 2, x.shape[1]), *given))
    return call.result(*(next(written) if want else None for want in call.writes))
