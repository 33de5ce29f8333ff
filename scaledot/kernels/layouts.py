"""Physical layouts of quantised matrices, as cast kernels write them and matmuls read them.

A matmul kernel may want its contracted axis last, or two 4-bit codes of neighbouring rows in one byte. Such a matrix is
stored as the kernel writes it, and `logical` presents it as an ordinary ScaledArray where it is multiplied: XLA cancels
a transposition against that of the kernel which consumes it, so nothing is copied.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scaledot.array import ScaledArray
from scaledot.formats import Format
from scaledot.kernels.operands import block_values
from scaledot.numerics import blocks
from scaledot.numerics.bits import flush
from scaledot.numerics.encode import decode_float
from scaledot.numerics.hadamard import Hadamard
from scaledot.numerics.scale import scale_values

# The format of an operand that a cast kernel has already dequantised: bfloat16 values times one float32 scale. MXFP8
# and NVFP4 values, with their block scales applied, are exact in bfloat16, so that the matmul loses nothing.
VALUES = Format("values", element="bfloat16")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Transposed:
    """A quantised matrix that is stored with its axes exchanged."""

    stored: ScaledArray

    def logical(self) -> ScaledArray:
        return self.stored.T


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowPairs:
    """A matrix of 4-bit codes, two rows to a byte, the even row's in the low nibble; `rows` of them are not padding."""

    stored: ScaledArray
    rows: int = dataclasses.field(metadata={"static": True})

    def logical(self) -> ScaledArray:
        """The values that the codes stand for, under the tensor scale."""
        q, format = self.stored, self.stored.format
        down, across = blocks.expand(q.block, 2)
        (scale,) = scale_values(q.scale, None, format)
        scales = (scale[::2], scale[1::2]) if down == 1 else (scale, scale)

        def values(bits: jax.Array, scale: jax.Array) -> jax.Array:
            spread = blocks.repeat_scale(scale, q.shape, (max(down // 2, 1), across))
            return flush(decode_float(bits.astype(jnp.uint32), format) * spread).astype(jnp.bfloat16)

        nibbles = q.data & np.uint8(15), q.data >> 4
        pairs = jnp.stack([values(bits, scale) for bits, scale in zip(nibbles, scales, strict=True)], axis=1)
        data = pairs.reshape(2 * q.shape[0], q.shape[1])[: self.rows]
        return as_values(data, q.tensor_scale, q.dtype, q.rotation)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PerGroup:
    """Codes of rows in groups, in any layout, and the scales that each group has: (groups, 1 or features)."""

    codes: Any
    scale: jax.Array


def as_values(data: jax.Array, scale: jax.Array, dtype, rotation: Hadamard | None = None) -> ScaledArray:
    """A matrix of bfloat16 values under one scale."""
    return ScaledArray(data, scale.reshape(1, 1), format=VALUES, block=(0, 0), dtype=dtype, rotation=rotation)


def values_of(q: ScaledArray) -> jax.Array:
    """The bfloat16 values of codes under their block scales, without the tensor scale."""
    return block_values(q, jnp.bfloat16)


def stored(q: Any, labels: str) -> tuple[Any, str]:
    """A quantised matrix of such labels as it is stored, and the labels of its axes then."""
    return (q.stored, labels[::-1]) if isinstance(q, Transposed) else (logical(q), labels)


def logical(q: Any) -> Any:
    """A quantised matrix with its axes in their own order, one element each; anything else as it is."""
    return q.logical() if isinstance(q, Transposed | RowPairs) else q
