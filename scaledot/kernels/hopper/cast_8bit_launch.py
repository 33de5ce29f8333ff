"""One launch of the tile cast before data: what scales follow from, which results are wanted, shapes of its memory."""

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

PAIRS = SCALE_BLOCK // 2  # pairs of rows in a tile
PART = 64  # columns that are in registers at a time
PITCH = SCALE_BLOCK + 8  # of rows in the tile of a rotation, so that those of a column lie in different banks
Rotations = tuple[Hadamard | None, Hadamard | None]


class GivenMultiplier(NamedTuple):
    """Delayed scaling: one given factor for the whole matrix, float32 (1,)."""

    multiplier: jax.Array


class FromAmax(NamedTuple):
    """Current scaling: the partial amaxes that `amax` returns, for one scale; NaN if one of them is infinite."""

    maxima: jax.Array


class PerRow(NamedTuple):
    """One given factor for each row of the output, float32 (M,)."""

    multipliers: jax.Array


class PerBlock(NamedTuple):
    """Block scaling: a scale for each 1x128 block, or for each 128x128 one, computed from the block's amax."""

    square: bool


Scaling = GivenMultiplier | FromAmax | PerRow | PerBlock


class Outputs(NamedTuple):
    """The outputs to write: row-major codes, transposed codes, amax, column sums."""

    rows: bool = True
    transposed: bool = True
    amax: bool = False
    sums: bool = False


class Result(NamedTuple):
    """What was wanted, None elsewhere.

    amax: one of each tile. sums: one row of each strip of tiles. Scales are (1,) for one factor, (M / 128,
    K / 128) for squares; for lines (M, K / 128) of the rows and (K, M / 128) of the transposed matrix.
    """

    rows: Any
    transposed: Any
    amax: Any
    sums: Any
    row_scale: Any
    column_scale: Any


@dataclasses.dataclass(frozen=True)
class CastLaunch:
    """One launch, before data: shapes of its grid, outputs and shared memory. shape: (M, K) of the results."""

    shape: tuple[int, int]
    input_dtype: Any
    format: Format
    scaling: type
    square: bool
    wanted: Outputs
    stochastic: bool
    has_strips: bool
    width: int
    rotations: Rotations
    saturates: bool

    @property
    def of_blocks(self) -> bool:
        return self.scaling is PerBlock

    @property
    def of_lines(self) -> bool:
        return self.of_blocks and not self.square

    @property
    def turns(self) -> list[int]:
        """The outputs whose input is Hadamard-rotated: 0 for row-major codes, 1 for transposed ones."""
        return [side for side, rotation in enumerate(self.rotations) if rotation is not None]

    @property
    def parts(self) -> int:
        """Parts of PART columns that a tile has."""
        return SCALE_BLOCK // PART if self.of_blocks else 1

    @property
    def grid(self) -> tuple[int, int]:
        return self.shape[0] // SCALE_BLOCK, self.shape[1] // (self.parts * PART)

    @property
    def pieces(self) -> int:
        """The number of TMA copies that fetch a part: with strips, rows in SMEM are at most 128 bytes long."""
        return PART * self.input_dtype.itemsize // ATOM_BYTES if self.has_strips else 1

    @property
    def casts_once(self) -> bool:
        """Whether the row-major and the transposed output hold the same codes, so that elements are quantised once."""
        return not self.of_lines and not self.stochastic

    @property
    def writes(self) -> tuple[bool, ...]:
        """Which of the outputs are written."""
        has_scale = self.scaling in (GivenMultiplier, FromAmax, PerBlock) and (self.wanted.rows or not self.of_lines)
        return *self.wanted, has_scale, self.of_lines and self.wanted.transposed

    @property
    def outputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        (m, k), (deep, wide) = self.shape, self.grid
        scales = (
            (1,)
            if self.scaling in (GivenMultiplier, FromAmax)
            else (wide, deep, SCALE_BLOCK)
            if self.of_lines
            else (deep, wide)
        )
        return (
            jax.ShapeDtypeStruct((m // 2, 2, k), self.format.code_dtype),
            jax.ShapeDtypeStruct((k, m // 2), jnp.uint16),
            jax.ShapeDtypeStruct((deep, wide), jnp.float32),
            jax.ShapeDtypeStruct((deep, k), jnp.float32),
            jax.ShapeDtypeStruct(scales, jnp.float32),
            jax.ShapeDtypeStruct((deep, wide, SCALE_BLOCK), jnp.float32),
        )

    @property
    def scratch(self) -> list[Any]:
        """Shared memory: the tile, its codes as they lie and as words, factors of lines, rotated tiles. A barrier."""
        parts, pieces, dtype = self.parts, self.pieces, self.format.code_dtype
        transforms = swizzle_transforms(PART // pieces, self.input_dtype)[1 if self.has_strips else 0 :]
        has_lines = self.of_lines or self.scaling is PerRow
        rows = plgpu.SMEM((parts, 2, PAIRS, PART), dtype, transforms=swizzle_transforms(PART, dtype))
        words = plgpu.SMEM((parts, PART, PAIRS), jnp.uint16, transforms=swizzle_transforms(PAIRS, jnp.uint16))
        return [
            plgpu.SMEM((parts, 2, pieces, PAIRS, PART // pieces), self.input_dtype, transforms=transforms),
            rows if self.wanted.rows else None,
            words if self.wanted.transposed else None,
            plgpu.SMEM((2, SCALE_BLOCK), jnp.float32) if has_lines else None,
            plgpu.SMEM((len(self.turns), SCALE_BLOCK, PITCH), jnp.bfloat16) if self.turns else None,
            plgpu.Barrier(num_arrivals=2 * parts * pieces),
        ]

    def multipliers(self, scaling: Scaling) -> list[jax.Array]:
        """The array of a scaling that has one; of each tile's rows the even ones come first."""
        if isinstance(scaling, PerBlock):
            return []
        if not isinstance(scaling, PerRow):
            return [scaling[0]]
        deep = self.grid[0]
        return [scaling.multipliers.reshape(deep, PAIRS, 2).transpose(0, 2, 1).reshape(deep, SCALE_BLOCK)]

    def result(self, rows, words, largest, sums, scale, column_scale) -> Result:
        """The outputs of the launch, reshaped to the fields of Result."""
        (m, k), (deep, wide) = self.shape, self.grid
        if self.of_lines and scale is not None:  # even rows come first in each tile
            scale = scale.reshape(wide, deep, 2, PAIRS).transpose(1, 3, 2, 0).reshape(m, wide)
        return Result(
            None if rows is None else rows.reshape(m, k),
            None if words is None else lax.bitcast_convert_type(words, self.format.code_dtype).reshape(k, m),
            largest,
            sums,
            scale,
            None if column_scale is None else column_scale.reshape(deep, k).T,
        )
