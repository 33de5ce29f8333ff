"""Tensor classes of row groups of a matrix, and of one matrix per group; see `tensor_classes`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from scaledot.compat.transformer_engine.quantize.tensor_classes import NoScaleTensor, ScaledTensor1x
from scaledot.numerics import blocks
from scaledot.ops.quantize import dequantize


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class GroupedScaledTensor1x(ScaledTensor1x):
    """Codes of (m, k) in groups of rows, or of (groups, m, k); each group is quantised independently.

    `data` has `original_shape` and is never transposed. first_dims: the number of rows of each group, which may be
    traced, so that scales are stored per row, not per group; None for (groups, m, k).

    >>> from scaledot.compat.transformer_engine.cpp_extensions import grouped_quantize
    >>> from scaledot.compat.transformer_engine.quantize import QuantizerFactory, ScalingMode
    >>> quantizer = QuantizerFactory.create(1, ScalingMode.MXFP8_1D_SCALING, jnp.float8_e4m3fn, n_groups=2)
    >>> tensor = grouped_quantize(jnp.ones((4, 32)), quantizer, jnp.array([1, 3]))
    >>> [group.shape for group in tensor.rowwise.dequantize()]
    [(1, 32), (3, 32)]
    """

    first_dims: Any = None
    _: dataclasses.KW_ONLY
    original_shape: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})

    @property
    def last_dims(self) -> None:
        """None: groups are never along the last dim."""
        return None

    @property
    def group_sizes(self) -> jax.Array:
        """The sizes of groups along the first dim; ones for (groups, m, k)."""
        return group_sizes_of(self)

    def dequantize(self) -> list[jax.Array]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns one dequantised array per group; `first_dims` must be concrete."""
        dequantized = dequantize(self.stored_array, self.dq_dtype)
        if self.first_dims is None:
            return list(dequantized)
        if isinstance(self.first_dims, Tracer):
            raise TypeError("dequantize returns one array per group and needs concrete sizes; use `array` under jit")
        return jnp.split(dequantized, np.cumsum(np.asarray(self.first_dims)))[:-1]

    def _block(self) -> blocks.Block:
        free, contracting = self.scaling_mode.spec.block or (0, 0)
        if self.first_dims is not None:
            return blocks.trim((1, free if self.is_colwise else contracting))
        return blocks.trim((1, contracting, free) if self.is_colwise else (1, free, contracting))

    def _scale(self) -> jax.Array:
        return self.scale_inv

    def _tensor_scale(self) -> jax.Array:
        return self.tensor_scale


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class GroupedNoScaleTensor(NoScaleTensor):
    """An unquantised grouped array: (m, k) in groups of `first_dims` rows, or (groups, m, k) if that is None.

    >>> GroupedNoScaleTensor(jnp.ones((3, 2)), first_dims=jnp.array([1, 2])).original_shape
    (3, 2)
    """

    first_dims: Any = None
    last_dims: Any = None
    original_shape: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})

    def __post_init__(self):
        if not self.original_shape:
            object.__setattr__(self, "original_shape", jnp.shape(self.data))

    @property
    def group_sizes(self) -> jax.Array:
        """The sizes of groups along the first dim; ones for (groups, m, k)."""
        return group_sizes_of(self)


def group_sizes_of(tensor: GroupedScaledTensor1x | GroupedNoScaleTensor) -> jax.Array:
    """Returns `first_dims` of a grouped tensor, or ones for one matrix per group."""
    return jnp.ones(tensor.original_shape[0], jnp.int32) if tensor.first_dims is None else tensor.first_dims
