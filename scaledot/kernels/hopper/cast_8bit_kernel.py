"""Casts a matrix to 8-bit codes with float32 scales, row-wise and column-wise, in one pass over memory.

Row-wise codes have blocks along rows. Column-wise codes have blocks down columns and are stored transposed, because
8-bit WGMMA takes operands with the contracting dim last: the codes of x (rows, columns) are (rows, columns) for a
matmul that contracts columns, and (columns, rows) for one that contracts rows. There is one scale for the matrix, for
each row, for each 1×128 block of either output, or for each 128×128 block.

Grid and CTA: one CTA of one warpgroup (128 threads) for each tile of 128 rows and 64 columns; with block scaling, 128
rows and 128 columns. A CTA loads its tile by TMA, computes multipliers, quantises chunks of 64 columns in registers,
writes the codes to SMEM and stores them by TMA. There is no pipeline in a CTA: several CTAs on an SM overlap loads,
arithmetic and stores. CTAs start with the last rows: these may still be in L2 after the amax, and when the cast ends
the first codes are in L2 for the matmul.

Transpose: Hopper transposes 16-bit elements between registers and SMEM, but not bytes. So even and odd rows of a tile
are loaded separately, and the codes of rows 2i and 2i + 1 in one column are packed into a 16-bit word. The transposed
matrix of words, (columns, rows / 2), is the transposed matrix of codes, (columns, rows).

Scales: with one scale from the amax, XLA computes partial amaxes first (`cast_support.partial_amaxes`), and every CTA
reduces these and computes the scale. Scales of blocks are computed from amaxes of the tile in SMEM, which holds whole
blocks of both outputs.

Rotations (Hadamard transforms of up to 16 elements along blocks) use a second tile in SMEM, which is transposed for the
row-wise output: blocks then run down its columns for either output, and a thread rotates one column.

Row groups: a table lists, for each tile of the outputs, the first row of x and the number of rows, at most 128. Tiles
may start at any row. Rows in SMEM then have 128 bytes with a swizzle but without tiling, because a tiled copy moves
eight rows and can start only at multiples of eight.

NaN and infinities propagate or saturate. If they propagate: with one scale for a matrix of 8-bit floats, their codes
are NaN; in all other cases the scale of their block is NaN. If they saturate: scales are computed from the finite
elements, infinities become the largest code, and NaN becomes the NaN code of a float or the integer 0.

Example: x bfloat16 (512, 1024), E4M3 in 1×128 blocks, both outputs. The grid is (4, 8), a CTA tile 128×128, 32 KiB of
SMEM for x and 16 KiB for the codes of each output. Outputs are row-wise codes (512, 1024) with scales (512, 8), and
column-wise codes (1024, 512) with scales (1024, 4). The kernel reads 1 MiB and writes 1 MiB of codes.
"""

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from scaledot.formats import Format
from scaledot.kernels.hopper import cast_8bit_cta
from scaledot.kernels.hopper.cast_8bit_launch import (
    BlockAmax,
    CastParameters,
    OutputFlags,
    Outputs,
    Rotations,
    RowMultipliers,
    Scaling,
    TensorAmax,
    TensorMultiplier,
)
from scaledot.kernels.hopper.launch import call_exported
from scaledot.kernels.hopper.scale_blocks import SCALE_BLOCK
from scaledot.kernels.hopper.support import kernel_name

__all__ = ["BlockAmax", "OutputFlags", "Outputs", "RowMultipliers", "TensorAmax", "TensorMultiplier", "cast"]

_PARAMETERS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)


def cast(
    x: jax.Array,
    format: Format,
    scaling: Scaling,
    requested: OutputFlags,
    seeds: jax.Array | None = None,
    row_length: int = 0,
    rotations: Rotations = (None, None),
    source_rows: jax.Array | None = None,
    saturates: bool = False,
) -> Outputs:
    """Casts x (rows, columns), multiples of 128, to 8-bit codes; with `source_rows`, rows are a multiple of 2.

    seeds: two words of a random key for the row-wise and for the column-wise output, uint32 (2, 2); None rounds to
    nearest. row_length: columns of the unpadded (global) array, for the flat index of an element.
    rotations: Hadamard rotations along the blocks of the row-wise and of the column-wise output, before the cast.
    source_rows: for each 128 rows of the outputs, the first row of x and the number of rows, int32 (tiles, 2); the
    remaining rows are zeros. None casts the rows of x in order. saturates: see the module docstring.
    """
    rows = x.shape[0] if source_rows is None else source_rows.shape[0] * SCALE_BLOCK
    params = CastParameters(
        (rows, x.shape[1]),
        x.dtype,
        format,
        type(scaling),
        isinstance(scaling, BlockAmax) and scaling.square,
        requested,
        seeds is not None,
        source_rows is not None,
        row_length,
        rotations,
        saturates,
    )
    assert params.has_1d_blocks or not params.rotated_outputs

    def kernel(*refs) -> None:
        cast_8bit_cta.run(params, *refs)

    types = zip(params.output_types, params.written, strict=True)
    run = plgpu.kernel(
        kernel,
        out_type=tuple(output for output, is_written in types if is_written),
        grid=params.grid,
        grid_names=("row", "column"),
        kernel_name=kernel_name("cast", format.name),
        scratch_types=params.scratch,
        compiler_params=_PARAMETERS,
    )
    optional = (*params.scaling_arrays(scaling), seeds, source_rows)
    inputs = (each for each in optional if each is not None)
    outputs = iter(call_exported(params, run, x.reshape(-1, 2, x.shape[1]), *inputs))
    return params.to_outputs(*(next(outputs) if is_written else None for is_written in params.written))
