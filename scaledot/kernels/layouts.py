"""Physical layouts of quantised matrices, written by cast kernels and read by matmul kernels.

8-bit WGMMA takes operands with the contracting dim last, and 4-bit codes are cheapest to pack from neighbouring rows. A
cast kernel writes these layouts, and `logical` returns the ScaledArray that a matmul expects: for a matrix x (m, k)
that wgrad contracts along m, `Transposed` stores codes (k, m) and `logical()` returns their transpose (m, k). XLA
cancels that transpose against the one in front of the matmul kernel, so nothing is copied.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from scaledot.array import ScaledArray
from scaledot.formats import Format
from scaledot.kernels.operands import block_scaled_values
from scaledot.numerics import blocks
from scaledot.numerics.bits import flush
from scaledot.numerics.cast import decode_blocks
from scaledot.numerics.hadamard import Hadamard
from scaledot.numerics.scale import scale_values

# The format of an operand that a cast kernel has already dequantised: bfloat16 values times one float32 scale. MXFP8
# and NVFP4 codes times their block scales are exact in bfloat16.
DEQUANTIZED = Format("dequantized", element="bfloat16")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Transposed:
    """A quantised matrix (m, k) that is stored transposed, (k, m)."""

    stored: ScaledArray

    def logical(self) -> ScaledArray:
        return self.stored.T


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowPairs:
    """A matrix (rows, k) of 4-bit codes, stored as bytes (rows / 2, k) with even rows in low nibbles.

    rows: the number of rows without padding. The block scales of `stored` are those of the unpacked matrix.
    """

    stored: ScaledArray
    rows: int = dataclasses.field(metadata={"static": True})

    def logical(self) -> ScaledArray:
        """Returns a ScaledArray of codes times block scales, bfloat16 (rows, k); its one scale is the tensor scale."""
        q, format = self.stored, self.stored.format
        shape = 2 * q.shape[0], q.shape[1]
        (scale,) = scale_values(q.scale, None, format)
        # XLA:GPU compiles a shift to an elementwise loop, which is faster than its concatenation of even and odd rows.
        pairs = jnp.broadcast_to(q.data[:, None], (q.shape[0], 2, q.shape[1])).astype(jnp.uint32)
        nibbles = pairs >> (4 * lax.broadcasted_iota(jnp.uint32, pairs.shape, 1))
        codes = decode_blocks(nibbles.reshape(shape), q.scale, format, q.block)
        values = codes * blocks.repeat_scale(scale, shape, q.block)
        values = values if format.two_level else flush(values)  # codes times E4M3 scales are never subnormal
        return bfloat16_operand(values.astype(jnp.bfloat16)[: self.rows], q.tensor_scale, q.dtype, q.rotation)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PerGroup:
    """Codes of a matrix with row groups, in any layout, and the scales of each group, (groups, 1 or features)."""

    codes: Any
    scale: jax.Array


def bfloat16_operand(data: jax.Array, scale: jax.Array, dtype, rotation: Hadamard | None = None) -> ScaledArray:
    """Returns a matrix of bfloat16 values times one scale as a ScaledArray."""
    return ScaledArray(data, scale.reshape(1, 1), format=DEQUANTIZED, block=(0, 0), dtype=dtype, rotation=rotation)


def bfloat16_values(q: ScaledArray) -> jax.Array:
    """Returns codes times their block scales in bfloat16, without the tensor scale."""
    return block_scaled_values(q, jnp.bfloat16)


def stored_operand(q: Any, labels: str) -> tuple[Any, str]:
    """Returns a quantised matrix with dims in the order in which it is stored, and their labels."""
    return (q.stored, labels[::-1]) if isinstance(q, Transposed) else (logical(q), labels)


def logical(q: Any) -> Any:
    """Returns the ScaledArray that a layout stands for; returns other arrays unchanged."""
    return q.logical() if isinstance(q, Transposed | RowPairs) else q
