"""The static parameters of a launch of the 8-bit cast kernel, and the types of its outputs and scratch memory.

Outputs are row-wise codes, whose blocks run along the rows of x, and column-wise codes, whose blocks run down its
columns and which are stored transposed. Either may be omitted.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from scaledot.formats import Format
from scaledot.kernels.hopper.memory_layouts import swizzle_transforms
from scaledot.kernels.hopper.scale_blocks import SCALE_BLOCK
from scaledot.kernels.hopper.swizzle_atom import ATOM_BYTES
from scaledot.numerics.hadamard import Hadamard

ROWWISE, COLUMNWISE = 0, 1  # indices of the two outputs
ROW_PAIRS = SCALE_BLOCK // 2  # pairs of an even and an odd row in a CTA tile
CHUNK = 64  # columns of the CTA tile that are in registers at a time
# Elements between rows of a rotated tile in SMEM: 272 bytes, so that the eight 16-byte rows of an 8×8 matrix (of
# `stmatrix`, or of a warp in the WGMMA layout) are in different banks.
ROW_PITCH = SCALE_BLOCK + 8
Rotations = tuple[Hadamard | None, Hadamard | None]


class TensorMultiplier(NamedTuple):
    """Delayed scaling: one quantisation multiplier for the whole matrix, float32 (1,)."""

    multiplier: jax.Array


class TensorAmax(NamedTuple):
    """Current scaling: one scale, computed from partial amaxes; NaN if one of them is infinite.

    ordered_bits: of the partial amaxes, as `cast_support.partial_amaxes` returns them, uint32 (128,).
    """

    ordered_bits: jax.Array


class RowMultipliers(NamedTuple):
    """One quantisation multiplier for each row of the row-wise output, float32 (rows,)."""

    multipliers: jax.Array


class BlockAmax(NamedTuple):
    """Block scaling: a scale for each 1×128 block, or for each 128×128 block, computed from the block's amax."""

    square: bool


Scaling = TensorMultiplier | TensorAmax | RowMultipliers | BlockAmax


class OutputFlags(NamedTuple):
    """Which outputs a launch writes in addition to scales."""

    rowwise: bool = True
    columnwise: bool = True
    amax: bool = False
    column_sums: bool = False


class Outputs(NamedTuple):
    """The outputs of a launch, as arrays or as GMEM refs; None for those that are not written.

    rowwise: codes (rows, columns). columnwise: codes (columns, rows).
    amax: one of each CTA tile, (rows / 128, tiles along a row).
    column_sums: sums over the 128 rows of each CTA tile, (rows / 128, columns).
    rowwise_scale: (1,) with one scale, (rows / 128, columns / 128) for 128×128 blocks, (rows, columns / 128) for 1×128
    blocks. columnwise_scale: (columns, rows / 128) for 1×128 blocks of the transposed matrix.
    """

    rowwise: Any
    columnwise: Any
    amax: Any
    column_sums: Any
    rowwise_scale: Any
    columnwise_scale: Any


@dataclasses.dataclass(frozen=True)
class CastParameters:
    """The static parameters of a launch.

    shape: (rows, columns) of the row-wise output. scaling: one of the classes in `Scaling`.
    square_blocks: whether blocks are 128×128.
    has_source_rows: whether a table gives the first row and the row count of each CTA tile.
    row_length: columns of the unpadded (global) array, for the flat index of an element (stochastic rounding).
    saturates: see `cast_8bit_kernel`.
    """

    shape: tuple[int, int]
    input_dtype: Any
    format: Format
    scaling: type
    square_blocks: bool
    requested: OutputFlags
    stochastic: bool
    has_source_rows: bool
    row_length: int
    rotations: Rotations
    saturates: bool

    @property
    def is_blockwise(self) -> bool:
        return self.scaling is BlockAmax

    @property
    def has_1d_blocks(self) -> bool:
        return self.is_blockwise and not self.square_blocks

    @property
    def rotated_outputs(self) -> list[int]:
        """The outputs, ROWWISE or COLUMNWISE, that are Hadamard-rotated before the cast."""
        return [output for output, rotation in enumerate(self.rotations) if rotation is not None]

    @property
    def chunks(self) -> int:
        """Chunks of 64 columns in a CTA tile, which is 128×128 with block scaling and 128×64 otherwise."""
        return SCALE_BLOCK // CHUNK if self.is_blockwise else 1

    @property
    def grid(self) -> tuple[int, int]:
        return self.shape[0] // SCALE_BLOCK, self.shape[1] // (self.chunks * CHUNK)

    @property
    def copies(self) -> int:
        """TMA copies for the even (or odd) rows of a chunk: with source rows, rows in SMEM have at most 128 bytes."""
        return CHUNK * self.input_dtype.itemsize // ATOM_BYTES if self.has_source_rows else 1

    @property
    def shares_codes(self) -> bool:
        """Whether both outputs have the same codes, so that each element is quantised once."""
        return not self.has_1d_blocks and not self.stochastic

    @property
    def written(self) -> tuple[bool, ...]:
        """Which fields of `Outputs` are written."""
        has_scale = self.scaling in (TensorMultiplier, TensorAmax, BlockAmax)
        has_scale = has_scale and (self.requested.rowwise or not self.has_1d_blocks)
        return *self.requested, has_scale, self.has_1d_blocks and self.requested.columnwise

    @property
    def output_types(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The types of the fields of `Outputs` as the kernel writes them; `to_outputs` reshapes them."""
        (rows, columns), (tile_rows, tile_columns) = self.shape, self.grid
        if self.scaling in (TensorMultiplier, TensorAmax):
            scale = (1,)
        else:
            scale = (tile_columns, tile_rows, SCALE_BLOCK) if self.has_1d_blocks else (tile_rows, tile_columns)
        return (
            jax.ShapeDtypeStruct((rows // 2, 2, columns), self.format.code_dtype),
            jax.ShapeDtypeStruct((columns, rows // 2), jnp.uint16),
            jax.ShapeDtypeStruct((tile_rows, tile_columns), jnp.float32),
            jax.ShapeDtypeStruct((tile_rows, columns), jnp.float32),
            jax.ShapeDtypeStruct(scale, jnp.float32),
            jax.ShapeDtypeStruct((tile_rows, tile_columns, SCALE_BLOCK), jnp.float32),
        )

    @property
    def scratch(self) -> list[Any]:
        """SMEM of a CTA, None for buffers that are not needed, and the barrier that counts the TMA copies.

        The buffers: the tile of x; row-wise codes; column-wise codes as 16-bit words of two rows; multipliers of 128
        rows and of 128 columns; rotated tiles.
        """
        chunks, copies, dtype = self.chunks, self.copies, self.format.code_dtype
        transforms = swizzle_transforms(CHUNK // copies, self.input_dtype)[1 if self.has_source_rows else 0 :]
        has_multipliers = self.has_1d_blocks or self.scaling is RowMultipliers
        rowwise = plgpu.SMEM((chunks, 2, ROW_PAIRS, CHUNK), dtype, transforms=swizzle_transforms(CHUNK, dtype))
        columnwise = plgpu.SMEM(
            (chunks, CHUNK, ROW_PAIRS), jnp.uint16, transforms=swizzle_transforms(ROW_PAIRS, jnp.uint16)
        )
        rotated = len(self.rotated_outputs)
        return [
            plgpu.SMEM((chunks, 2, copies, ROW_PAIRS, CHUNK // copies), self.input_dtype, transforms=transforms),
            rowwise if self.requested.rowwise else None,
            columnwise if self.requested.columnwise else None,
            plgpu.SMEM((2, SCALE_BLOCK), jnp.float32) if has_multipliers else None,
            plgpu.SMEM((rotated, SCALE_BLOCK, ROW_PITCH), jnp.bfloat16) if rotated else None,
            plgpu.Barrier(num_arrivals=2 * chunks * copies),
        ]

    def scaling_arrays(self, scaling: Scaling) -> list[jax.Array]:
        """Returns the array of a scaling, or none for BlockAmax; row multipliers have even rows of a tile first."""
        if isinstance(scaling, BlockAmax):
            return []
        if not isinstance(scaling, RowMultipliers):
            return [scaling[0]]
        tile_rows = self.grid[0]
        return [scaling.multipliers.reshape(tile_rows, ROW_PAIRS, 2).transpose(0, 2, 1).reshape(tile_rows, SCALE_BLOCK)]

    def to_outputs(self, rowwise, columnwise, amax, column_sums, scale, columnwise_scale) -> Outputs:
        """Reshapes arrays of `output_types` to the shapes in `Outputs`."""
        (rows, columns), (tile_rows, tile_columns) = self.shape, self.grid
        if self.has_1d_blocks and scale is not None:  # even rows come first in each tile
            scale = (
                scale.reshape(tile_columns, tile_rows, 2, ROW_PAIRS).transpose(1, 3, 2, 0).reshape(rows, tile_columns)
            )
        code_dtype = self.format.code_dtype
        return Outputs(
            None if rowwise is None else rowwise.reshape(rows, columns),
            None if columnwise is None else lax.bitcast_convert_type(columnwise, code_dtype).reshape(columns, rows),
            amax,
            column_sums,
            scale,
            None if columnwise_scale is None else columnwise_scale.reshape(tile_rows, columns).T,
        )
