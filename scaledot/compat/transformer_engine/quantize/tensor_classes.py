"""TransformerEngine's tensor classes, as pytrees that convert to ScaledArray.

A ScaledTensor1x holds codes and scales in TransformerEngine's shapes; its property `array` is the equivalent
ScaledArray, which all computations use. Layout fields are static and do not count leading dims added by vmap, scan or
stacking (`rank`), so tensors work under these. For NVFP4, a (64, 128) tensor has rowwise codes (64, 128) with scales
(64, 8), and colwise codes stored transposed, (128, 64), with scales (128, 4).
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from scaledot.array import ScaledArray
from scaledot.compat.transformer_engine.quantize.scaling_modes import ScalingMode, TensorUsage
from scaledot.compat.transformer_engine.sharding import constrain_by_names
from scaledot.formats import Format
from scaledot.numerics import blocks
from scaledot.numerics.bits import ONE, SMALLEST_SCALE, divide
from scaledot.numerics.hadamard import Hadamard
from scaledot.ops.quantize import dequantize
from scaledot.train.residuals import as_bits, from_bits

ROTATION = Hadamard()  # the sign mask that TransformerEngine always uses
_STATIC: Any = {"static": True}


class AbstractBaseTensor(abc.ABC):
    """Interface of all tensor classes.

    >>> isinstance(NoScaleTensor(jnp.ones((2, 4))), AbstractBaseTensor)
    True
    """

    @property
    @abc.abstractmethod
    def ndim(self) -> int: ...

    @abc.abstractmethod
    def dequantize(self) -> Any:
        """Returns the dequantised values."""

    @abc.abstractmethod
    def get_tensor(self, usage: TensorUsage | None = None) -> Any:
        """Returns the codes or, if `usage` is passed, the tensor in the orientation for that GEMM operand."""

    @abc.abstractmethod
    def apply_sharding_constraint_by_logical_axes(self, logical_axis_names: Sequence[str | None] | None) -> Any:
        """Constrains the tensor's sharding; names refer to the untransposed dims."""

    @abc.abstractmethod
    def checkpoint(self, quantizer: Any) -> Any:
        """Tags the tensor with the quantizer's `checkpoint_name`, for jax.checkpoint policies that save by name."""


class AbstractBaseTensor1x(AbstractBaseTensor):
    """A tensor of one orientation, with `data` and `amax`.

    >>> isinstance(NoScaleTensor(jnp.ones((2, 4))), AbstractBaseTensor1x)
    True
    """

    data: Any
    amax: Any

    @property
    def ndim(self) -> int:
        return self.data.ndim


class ScaledTensor:
    """Base class of tensors with codes and scales.

    >>> issubclass(ScaledTensor1x, ScaledTensor), issubclass(NoScaleTensor, ScaledTensor)
    (True, False)
    """


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class NoScaleTensor(AbstractBaseTensor1x):
    """An unquantised array with the interface of a tensor.

    >>> NoScaleTensor(jnp.ones(2)[None]).dequantize()
    Array([[1., 1.]], dtype=float32)
    """

    data: Any
    amax: Any = None

    def dequantize(self) -> jax.Array:
        return self.data

    def get_tensor(self, usage: TensorUsage | None = None) -> Any:
        return self.data if usage is None else self

    def apply_sharding_constraint_by_logical_axes(self, logical_axis_names):
        return dataclasses.replace(self, data=constrain_by_names(self.data, logical_axis_names))

    def checkpoint(self, quantizer: Any) -> "NoScaleTensor":
        return _checkpoint_named(self, quantizer)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ScaledTensor1x(AbstractBaseTensor1x, ScaledTensor):
    """Codes and scales of one orientation; created by `quantize` and `ScaledTensorFactory.create_1x`.

    data: codes; with data_layout "T" they are stored transposed: a tensor (a..., b...) is stored as (b..., a...).
    scale_inv: the scale, which multiplies codes; (1,) for one scale per tensor, otherwise one entry per block; those of
      square blocks may be repeated for each row, and `quantize` does so for NVFP4_2D_SCALING.
    amax: float32 of shape (1,), or None if scales do not depend on it.
    tensor_scale: the tensor scale of NVFP4; if None, amax / 2688.
    flatten_axis: the number of dims of `data`, as stored, that form the rows of its matrix (b... for data_layout "T"),
      without leading dims added by vmap, scan or stacking.
    rank: the number of dims, without the same leading dims.

    >>> codes, scale = jnp.full((2, 4), 3, jnp.float8_e4m3fn), jnp.full(1, 0.5)
    >>> tensor = ScaledTensor1x(codes, scale, scaling_mode=ScalingMode.CURRENT_TENSOR_SCALING)
    >>> tensor.array
    ScaledArray(fp8_e4m3[2,4], block=(0, 0), dtype=bfloat16)
    >>> tensor.dequantize()[0]
    Array([1.5, 1.5, 1.5, 1.5], dtype=bfloat16)
    """

    data: Any
    scale_inv: Any
    amax: Any = None
    tensor_scale: Any = None
    _: dataclasses.KW_ONLY
    scaling_mode: ScalingMode = dataclasses.field(metadata=_STATIC)
    dq_dtype: Any = dataclasses.field(default=jnp.bfloat16, metadata=_STATIC)
    is_colwise: bool = dataclasses.field(default=False, metadata=_STATIC)
    data_layout: str = dataclasses.field(default="N", metadata=_STATIC)
    flatten_axis: int = dataclasses.field(default=1, metadata=_STATIC)
    has_rht_applied: bool = dataclasses.field(default=False, metadata=_STATIC)
    rank: int | None = dataclasses.field(default=None, metadata=_STATIC)
    format: Format | None = dataclasses.field(default=None, metadata=_STATIC)

    @property
    def stored_array(self) -> ScaledArray:
        """The tensor as a ScaledArray with the dims of `data`, transposed if `data_layout` is "T"."""
        format = self.format or self.scaling_mode.format_of(self.data.dtype)
        rotation = ROTATION if self.has_rht_applied else None
        fields = {"format": format, "block": self._block(), "dtype": np.dtype(self.dq_dtype), "rotation": rotation}
        return ScaledArray(self.data, self._scale(), self._tensor_scale() if format.two_level else None, **fields)

    @property
    def array(self) -> ScaledArray:
        """The tensor as a ScaledArray with untransposed dims."""
        if self.data_layout == "N":
            return self.stored_array
        batch = self.data.ndim - self._rank
        split = batch + self.flatten_axis
        return self.stored_array.transpose(*range(batch), *range(split, self.data.ndim), *range(batch, split))

    def dequantize(self) -> jax.Array:
        """Returns the dequantised values, with the shape of `data`."""
        return dequantize(self.stored_array, self.dq_dtype)

    def get_tensor(self, usage: TensorUsage | None = None) -> Any:
        if usage is None:
            return self.data
        if self.scaling_mode.get_quantize_layout(usage).is_colwise_only != self.is_colwise:
            present, missing = ("colwise", "rowwise") if self.is_colwise else ("rowwise", "colwise")
            raise ValueError(
                f"{usage} needs the {missing} orientation, but this {self.scaling_mode.name} tensor has only the "
                f"{present} one; quantise with q_layout=QuantizeLayout.ROWWISE_COLWISE"
            )
        return self

    def apply_sharding_constraint_by_logical_axes(self, logical_axis_names):
        if not logical_axis_names:
            return self
        names = tuple(logical_axis_names)
        if len(names) != self.data.ndim:
            raise ValueError(f"`logical_axis_names` {names} must have one name for each axis of {self.data.shape}")
        if self.data_layout == "T":
            batch, split = self.data.ndim - self._rank, self.data.ndim - self.flatten_axis
            names = (*names[:batch], *names[split:], *names[batch:split])
        scale = constrain_by_names(self.scale_inv, names) if self.scaling_mode.is_block_scaling else self.scale_inv
        return dataclasses.replace(self, data=constrain_by_names(self.data, names), scale_inv=scale)

    def checkpoint(self, quantizer: Any) -> Any:
        return _checkpoint_named(self, quantizer)

    @property
    def _rank(self) -> int:
        return self.data.ndim if self.rank is None else self.rank

    @property
    def _batch_shape(self) -> tuple[int, ...]:
        return self.data.shape[: self.data.ndim - self._rank]

    def _block(self) -> blocks.Block:
        mode_block, rank = self.scaling_mode.spec.block, self._rank
        if mode_block is None:
            return (0,) * rank
        block = [1] * rank
        for axis, size in zip(self._block_axes(), mode_block, strict=True):
            block[axis] = size
        return blocks.trim(tuple(block))

    def _block_axes(self) -> tuple[int, int]:
        """The dims (free, contracting) along which blocks have the sizes of the mode."""
        last, left = self._rank - 1, self.flatten_axis - 1
        return (last, left) if self.is_colwise and self.data_layout == "N" else (left, last)

    def _scale(self) -> jax.Array:
        if self.scaling_mode.is_tensor_scaling():
            return self.scale_inv.reshape(*self._batch_shape, *(1,) * self._rank)
        free, size = self._block_axes()[0], (self.scaling_mode.spec.block or (1, 1))[0]
        axis = free - self._rank
        if size == 1 or self.scale_inv.shape[axis] != self.data.shape[axis]:
            return self.scale_inv
        return self.scale_inv[..., ::size, *(slice(None),) * (-axis - 1)]  # square blocks, repeated for each row

    def _tensor_scale(self) -> jax.Array:
        if self.tensor_scale is not None:
            return self.tensor_scale.reshape(self._batch_shape)
        if self.amax is None:
            raise ValueError(
                f"`amax` of a {self.scaling_mode.name} tensor must be set: its tensor scale is amax / 2688"
            )
        return tensor_scale_of(self.amax).reshape(self._batch_shape)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ScaledTensor2x(AbstractBaseTensor, ScaledTensor):
    """Both orientations of a tensor, each quantised from the same high-precision array.

    >>> from scaledot.compat.transformer_engine.quantize import QuantizerFactory
    >>> quantizer = QuantizerFactory.create(1, ScalingMode.MXFP8_1D_SCALING, jnp.float8_e4m3fn)
    >>> tensor = quantizer.quantize(jnp.ones((64, 32)))
    >>> tensor.rowwise.scale_inv.shape, tensor.colwise.scale_inv.shape
    ((64, 1), (2, 32))
    >>> tensor.get_tensor(TensorUsage.LHS_TRANS) is tensor.colwise
    True
    """

    rowwise_tensor: Any
    colwise_tensor: Any

    @property
    def rowwise(self) -> Any:
        return self.rowwise_tensor

    @property
    def colwise(self) -> Any:
        return self.colwise_tensor

    @property
    def ndim(self) -> int:
        return self.rowwise_tensor.ndim

    def dequantize(self) -> Any:
        """Returns the dequantised values of the rowwise orientation."""
        return self.rowwise_tensor.dequantize()

    def get_tensor(self, usage: TensorUsage | None = None) -> Any:
        if usage is None:
            return self.rowwise_tensor.data
        colwise = self.rowwise_tensor.scaling_mode.get_quantize_layout(usage).is_colwise_only
        return self.colwise_tensor if colwise else self.rowwise_tensor

    def apply_sharding_constraint_by_logical_axes(self, logical_axis_names):
        both = (self.rowwise_tensor, self.colwise_tensor)
        return ScaledTensor2x(*(t.apply_sharding_constraint_by_logical_axes(logical_axis_names) for t in both))

    def checkpoint(self, quantizer: Any) -> "ScaledTensor2x":
        return _checkpoint_named(self, quantizer)


def tensor_scale_of(amax: Any) -> jax.Array:
    """Returns NVFP4's tensor scale, amax / (6 * 448): the largest FP4 code times the largest E4M3 block scale."""
    amax = jnp.asarray(amax, jnp.float32)
    return jnp.where(amax == 0, ONE, jnp.maximum(divide(amax, np.float32(6 * 448)), SMALLEST_SCALE))


def scale_per_row(mode: ScalingMode, q: ScaledArray, flatten_axis: int) -> jax.Array:
    """Returns the scales of q; those of NVFP4's 16×16 blocks are repeated for each row, as in TransformerEngine."""
    if mode is not ScalingMode.NVFP4_2D_SCALING or mode.spec.block is None:
        return q.scale
    axis = flatten_axis - 1
    repeated = jnp.repeat(q.scale, mode.spec.block[0], axis=axis)
    return lax.slice_in_dim(repeated, 0, q.shape[axis], axis=axis)


def _checkpoint_named(tensor: Any, quantizer: Any) -> Any:
    """Tags the leaves with the quantizer's `checkpoint_name`.

    Codes are tagged as integers of the same bits: jax.checkpoint applies lax.reduce_precision to floats that it saves,
    which turns an e4m3 code of 448 into NaN.
    """
    name = getattr(quantizer, "checkpoint_name", None)
    if name is None:
        return tensor
    return from_bits(jax.tree.map(lambda leaf: checkpoint_name(leaf, name), as_bits(tensor)))


def normalize_flatten_axis(flatten_axis: int, ndim: int) -> int:
    """Returns `flatten_axis` as a positive axis; raises unless it has dims on both sides."""
    axis = flatten_axis + ndim if flatten_axis < 0 else flatten_axis
    if not 0 < axis < ndim:
        raise ValueError(f"`flatten_axis` {flatten_axis} must have dims on both sides, and there are {ndim} dims")
    return axis
