"""Quantised weights that are not one ScaledArray: with permuted inputs, blocks across rows, or offsets.

Each is a pytree of ScaledArrays and arrays that decodes exactly. None of them converts to an array implicitly, so that
codes cannot be used without the permutation or the offset by mistake.
"""

import dataclasses
import math
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from scaledot.array import ScaledArray
from scaledot.checkpoint.subnormals import dequantize_on_host, has_subnormals
from scaledot.numerics import blocks


def dequantize_scaled(q: ScaledArray, dtype=None) -> jax.Array:
    from scaledot.ops.quantize import dequantize  # slow to import, and not needed to list a checkpoint

    return dequantize(q, dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Permuted:
    """A weight (outputs, inputs) whose inputs are sorted so that blocks are contiguous (GPTQ with `desc_act`).

    array: the weight W[:, permutation], with blocks along the inputs.
    permutation: (inputs,), int32. x @ W.T equals x[..., permutation] @ array.T.
    """

    array: ScaledArray
    permutation: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def dequantize(self, dtype=None) -> jax.Array:
        return dequantize_scaled(self.array, dtype)[..., jnp.argsort(self.permutation)]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Flat:
    """A weight whose blocks run over the flattened weight and cross rows (bitsandbytes, inputs no multiple of a block).

    array: the weight as a vector.
    """

    array: ScaledArray
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    def dequantize(self, dtype=None) -> jax.Array:
        return dequantize_scaled(self.array, dtype)[: math.prod(self.shape)].reshape(self.shape)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Offset:
    """A weight with an offset per block that is no multiple of the scale (GGUF Q4_1, Q5_1, Q4_K, Q5_K).

    Values are dequantize(array) + offset. offset: float32, in the shape of `array.scale`.
    """

    array: ScaledArray
    offset: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def dequantize(self, dtype=None) -> jax.Array:
        values = dequantize_scaled(self.array, jnp.float32)
        offset = blocks.repeat_scale(self.offset, self.array.shape, self.array.block)
        return (values + offset).astype(self.array.dtype if dtype is None else dtype)


Weight = ScaledArray | Permuted | Flat | Offset


def is_weight(node: Any) -> TypeGuard[Weight]:
    """Whether a node of a tree is a quantised weight."""
    return isinstance(node, Weight)


def dtype_of(weight: Weight) -> np.dtype:
    """The dtype that a weight dequantises to by default."""
    return weight.dtype if isinstance(weight, ScaledArray) else weight.array.dtype


def dequantize(weight: Weight, dtype=None) -> jax.Array:
    """The dequantised values of a quantised weight of a checkpoint, in `dtype` (by default the weight's).

    >>> from scaledot.ops.quantize import quantize
    >>> dequantize(quantize(jnp.array([[1.0, 2.0, 4.0]]), "fp8_e4m3"))
    Array([[1., 2., 4.]], dtype=float32)
    """
    if not isinstance(weight, ScaledArray):
        return weight.dequantize(dtype)
    if has_subnormals(weight):
        return dequantize_on_host(weight, weight.dtype if dtype is None else dtype)
    return dequantize_scaled(weight, dtype)
