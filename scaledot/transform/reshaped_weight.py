"""`ReshapedWeight`: a quantised parameter that a program stores in another shape than it multiplies by."""

import dataclasses

import jax
import numpy as np

from scaledot.array import ScaledArray
from scaledot.ops.quantize import dequantize


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReshapedWeight:
    """A parameter of `shape` in a rewritten program; `operand` holds its codes in the shape of the operand.

    Where the program reshapes the parameter to the shape of `operand`, the codes are multiplied as they are; where it
    reads it otherwise, it is dequantised. A scale per channel of the operand need not be a scale per block of `shape`,
    so the codes could not be reshaped from there.
    """

    operand: ScaledArray
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype:
        return self.operand.dtype

    def astype(self, dtype) -> "ReshapedWeight":
        return dataclasses.replace(self, operand=self.operand.astype(dtype))

    def reshape(self, shape: tuple[int, ...]) -> ScaledArray | None:
        """The operand; None if it has another shape."""
        return self.operand if tuple(shape) == self.operand.shape else None

    def dequantized(self) -> jax.Array:
        return dequantize(self.operand).reshape(self.shape)
