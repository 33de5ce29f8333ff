"""Their tensor classes, as views over ScaledArray.

A ScaledTensor1x holds codes and scales in the shapes that TransformerEngine gives them; `array` is the same numbers as
a ScaledArray, and everything that computes is asked of that. Fields that say how codes are laid out are static and
counted without batch axes in front (`rank`), so tensors survive vmap, scan and stacking.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer

from scaledot.array import ScaledArray
from scaledot.compat.transformer_engine.quantize.scaling_modes import ScalingMode, TensorUsage
from scaledot.compat.transformer_engine.sharding import constrained
from scaledot.formats import Format
from scaledot.numerics import blocks
from scaledot.numerics.bits import ONE, SMALLEST_SCALE, divide
from scaledot.numerics.hadamard import Hadamard
from scaledot.ops.quantize import dequantize
from scaledot.train.residuals import as_bits, from_bits

ROTATION = Hadamard()  # the one sign mask that they have
_STATIC: Any = {"static": True}


class AbstractBaseTensor(abc.ABC):
    """What every tensor can do.

    >>> isinstance(NoScaleTensor(jnp.ones((2, 4))), AbstractBaseTensor)
    True
    """

    @property
    @abc.abstractmethod
    def ndim(self) -> int: ...

    @abc.abstractmethod
    def dequantize(self) -> Any:
        """The values in high precision."""

    @abc.abstractmethod
    def get_tensor(self, usage: TensorUsage | None = None) -> Any:
        """The codes; with a usage, the tensor in the orientation that it needs."""

    @abc.abstractmethod
    def apply_sharding_constraint_by_logical_axes(self, logical_axis_names: Sequence[str | None] | None) -> Any:
        """The tensor laid out over the mesh; names are those of the untransposed axes."""

    @abc.abstractmethod
    def checkpoint(self, quantizer: Any) -> Any:
        """The tensor under the quantizer's `checkpoint_name`, for policies of jax.checkpoint that save by name."""


class AbstractBaseTensor1x(AbstractBaseTensor):
    """A tensor in one orientation: it has `data` and `amax`.

    >>> isinstance(NoScaleTensor(jnp.ones((2, 4))), AbstractBaseTensor1x)
    True
    """

    data: Any
    amax: Any

    @property
    def ndim(self) -> int:
        return self.data.ndim


class ScaledTensor:
    """A tensor of codes and scales.

    >>> issubclass(ScaledTensor1x, ScaledTensor), issubclass(NoScaleTensor, ScaledTensor)
    (True, False)
    """


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class NoScaleTensor(AbstractBaseTensor1x):
    """An unquantised array in the place of a tensor.

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
        return dataclasses.replace(self, data=constrained(self.data, logical_axis_names))

    def checkpoint(self, quantizer: Any) -> "NoScaleTensor":
        return _named(self, quantizer)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ScaledTensor1x(AbstractBaseTensor1x, ScaledTensor):
    """Codes in one orientation; `ScaledTensorFactory.create_1x` and `quantize` make them.

    data: codes; with data_layout "T" the axes right of flatten_axis stand before those left of it.
    scale_inv: what codes are multiplied by; (1,) for one scale per tensor, otherwise one entry per block.
    amax: the largest magnitude, (1,) float32, or None where scales need none.
    tensor_scale: the exact second level of NVFP4; without one it is amax / 2688.
    flatten_axis: where the stored data are cut in two, of `rank` axes.

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
    def stored(self) -> ScaledArray:
        """The codes as they lie in `data`."""
        row = self.format or self.scaling_mode.format_of(self.data.dtype)
        rotation = ROTATION if self.has_rht_applied else None
        how = {"format": row, "block": self._block(), "dtype": np.dtype(self.dq_dtype), "rotation": rotation}
        return ScaledArray(self.data, self._scale(), self._tensor_scale() if row.two_level else None, **how)

    @property
    def array(self) -> ScaledArray:
        """The same numbers with axes in their logical order."""
        if self.data_layout == "N":
            return self.stored
        batch = self.data.ndim - self._rank
        cut = batch + self.flatten_axis
        return self.stored.transpose(*range(batch), *range(cut, self.data.ndim), *range(batch, cut))

    def dequantize(self) -> jax.Array:
        """The values, laid out as `data` is."""
        return dequantize(self.stored, self.dq_dtype)

    def get_tensor(self, usage: TensorUsage | None = None) -> Any:
        if usage is None:
            return self.data
        if self.scaling_mode.get_quantize_layout(usage).is_colwise_only != self.is_colwise:
            held, missing = ("colwise", "rowwise") if self.is_colwise else ("rowwise", "colwise")
            raise ValueError(
                f"{usage} needs the {missing} orientation, and this tensor of {self.scaling_mode.name} holds only the "
                f"{held} one; quantise with q_layout=QuantizeLayout.ROWWISE_COLWISE"
            )
        return self

    def apply_sharding_constraint_by_logical_axes(self, logical_axis_names):
        if not logical_axis_names:
            return self
        names = tuple(logical_axis_names)
        if len(names) != self.data.ndim:
            raise ValueError(f"`logical_axis_names` {names} must have one name for each axis of {self.data.shape}")
        if self.data_layout == "T":
            batch, cut = self.data.ndim - self._rank, self.data.ndim - self.flatten_axis
            names = (*names[:batch], *names[cut:], *names[batch:cut])
        scale = constrained(self.scale_inv, names) if self.scaling_mode.is_block_scaling else self.scale_inv
        return dataclasses.replace(self, data=constrained(self.data, names), scale_inv=scale)

    def checkpoint(self, quantizer: Any) -> Any:
        return _named(self, quantizer)

    @property
    def _rank(self) -> int:
        return self.data.ndim if self.rank is None else self.rank

    @property
    def _batch(self) -> tuple[int, ...]:
        return self.data.shape[: self.data.ndim - self._rank]

    def _block(self) -> blocks.Block:
        tile, rank = self.scaling_mode.row.tile, self._rank
        if tile is None:
            return (0,) * rank
        block, left = [1] * rank, self.flatten_axis - 1
        kept, summed = (rank - 1, left) if self.is_colwise and self.data_layout == "N" else (left, rank - 1)
        block[summed] = tile[1]
        if (
            self.scale_inv.shape[kept - rank] != self.data.shape[kept - rank]
        ):  # else repeated, as their products want it
            block[kept] = tile[0]
        return blocks.trim(tuple(block))

    def _scale(self) -> jax.Array:
        tensor_wide = self.scaling_mode.is_tensor_scaling()
        return self.scale_inv.reshape(*self._batch, *(1,) * self._rank) if tensor_wide else self.scale_inv

    def _tensor_scale(self) -> jax.Array:
        if self.tensor_scale is not None:
            return self.tensor_scale.reshape(self._batch)
        if self.amax is None:
            raise ValueError(f"`amax` of a {self.scaling_mode.name} tensor is missing; its tensor scale is amax / 2688")
        return tensor_scale_of(self.amax).reshape(self._batch)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class GroupedScaledTensor1x(ScaledTensor1x):
    """Codes of rows in consecutive groups, or of one matrix per group, each quantised as if it were alone.

    data has `original_shape` and is never transposed. Because group sizes may be traced, scales are stored per row
    (per matrix where `group_sizes` is None).

    >>> from scaledot.compat.transformer_engine.cpp_extensions import grouped_quantize
    >>> from scaledot.compat.transformer_engine.quantize import QuantizerFactory
    >>> quantizer = QuantizerFactory.create(1, ScalingMode.MXFP8_1D_SCALING, jnp.float8_e4m3fn, n_groups=2)
    >>> tensor = grouped_quantize(jnp.ones((4, 32)), quantizer, jnp.array([1, 3]))
    >>> [group.shape for group in tensor.rowwise.dequantize()]
    [(1, 32), (3, 32)]
    """

    group_sizes: Any = None
    _: dataclasses.KW_ONLY
    original_shape: tuple[int, ...] = dataclasses.field(default=(), metadata=_STATIC)

    def dequantize(self) -> list[jax.Array]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The values of each group; sizes must be concrete."""
        values = dequantize(self.stored, self.dq_dtype)
        if self.group_sizes is None:
            return list(values)
        if isinstance(self.group_sizes, Tracer):
            raise TypeError("dequantize gives one array per group, whose sizes must be known; use `array` under jit")
        return jnp.split(values, np.cumsum(np.asarray(self.group_sizes)))[:-1]

    def _block(self) -> blocks.Block:
        kept, summed = self.scaling_mode.row.tile or (0, 0)
        if self.group_sizes is not None:
            return blocks.trim((1, kept if self.is_colwise else summed))
        return blocks.trim((1, summed, kept) if self.is_colwise else (1, kept, summed))

    def _scale(self) -> jax.Array:
        return self.scale_inv

    def _tensor_scale(self) -> jax.Array:
        return self.tensor_scale


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ScaledTensor2x(AbstractBaseTensor, ScaledTensor):
    """Both orientations of a tensor, each cast from the same high-precision values.

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
        """The values of the rowwise orientation."""
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
        return _named(self, quantizer)


def tensor_scale_of(amax: Any) -> jax.Array:
    """The second level of NVFP4: the largest magnitude over that of codes and block scales."""
    amax = jnp.asarray(amax, jnp.float32)
    return jnp.where(amax == 0, ONE, jnp.maximum(divide(amax, np.float32(6 * 448)), SMALLEST_SCALE))


def _named(tensor: Any, quantizer: Any) -> Any:
    """Codes are named as bits: what jax.checkpoint saves of floats it rounds, and 448 would become NaN."""
    name = getattr(quantizer, "checkpoint_name", None)
    if name is None:
        return tensor
    return from_bits(jax.tree.map(lambda leaf: checkpoint_name(leaf, name), as_bits(tensor)))


def cut_at(flatten_axis: int, ndim: int) -> int:
    """A checked `flatten_axis` counted from the front."""
    cut = flatten_axis + ndim if flatten_axis < 0 else flatten_axis
    if not 0 < cut < ndim:
        raise ValueError(f"`flatten_axis` {flatten_axis} must have axes on both sides of it, and there are {ndim} axes")
    return cut
