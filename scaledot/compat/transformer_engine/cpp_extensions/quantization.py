"""quantize, quantize_dbias, grouped_quantize and dequantize."""

from typing import Any

import jax
import jax.numpy as jnp

from scaledot.compat.transformer_engine.quantize.grouped import checked_group_sizes
from scaledot.compat.transformer_engine.quantize.grouped_tensors import GroupedNoScaleTensor
from scaledot.compat.transformer_engine.quantize.quantizer_class import Quantizer
from scaledot.compat.transformer_engine.quantize.tensor_classes import (
    AbstractBaseTensor,
    NoScaleTensor,
    normalize_flatten_axis,
)
from scaledot.compat.transformer_engine.unsupported import module_getattr
from scaledot.numerics.grouped import group_of
from scaledot.ops.cast_spec import float_array


def quantize(x, quantizer: Quantizer | None, flatten_axis: int = -1, amax_scope=None, transpose_batch_sequence=False):
    """Quantises x in the orientations of the quantizer; without a quantizer, returns x as a NoScaleTensor.

    >>> from scaledot.compat.transformer_engine.quantize import QuantizeLayout, QuantizerFactory, ScalingMode
    >>> quantizer = QuantizerFactory.create(1, ScalingMode.MXFP8_1D_SCALING, jnp.float8_e4m3fn, QuantizeLayout.ROWWISE)
    >>> tensor = quantize(jnp.full((2, 64), 3.0), quantizer)
    >>> tensor.data.dtype, tensor.scale_inv.shape, tensor.dequantize()[0, 0]
    (dtype(float8_e4m3fn), (2, 2), Array(3., dtype=float32))
    """
    check_untransposed(transpose_batch_sequence)
    if amax_scope is not None:
        raise ValueError("`amax_scope` must be None: `quantize` uses the amax of the global array, for any sharding")
    if quantizer is None:
        return x if isinstance(x, NoScaleTensor) else NoScaleTensor(jnp.asarray(x))
    return quantizer.quantize(x, flatten_axis=flatten_axis)


def quantize_dbias(
    dz,
    quantizer: Quantizer | None,
    is_dbias: bool = True,
    flatten_axis: int = -1,
    amax_scope=None,
    transpose_batch_sequence=False,
) -> tuple[Any, jax.Array | None]:
    """Returns (quantised dz, dbias): dbias sums the unquantised dz over the dims left of flatten_axis, in dz's dtype.

    >>> from scaledot.compat.transformer_engine.quantize import QuantizerFactory, ScalingMode
    >>> quantizer = QuantizerFactory.create(1, ScalingMode.CURRENT_TENSOR_SCALING, jnp.float8_e5m2)
    >>> tensor, dbias = quantize_dbias(jnp.ones((3, 4)), quantizer)
    >>> dbias
    Array([3., 3., 3., 3.], dtype=float32)
    """
    unquantized = dz.data if isinstance(dz, NoScaleTensor) else jnp.asarray(dz)
    tensor = quantize(dz, quantizer, flatten_axis, amax_scope, transpose_batch_sequence)
    if not is_dbias:
        return tensor, None
    leading = tuple(range(normalize_flatten_axis(flatten_axis, unquantized.ndim)))
    return tensor, jnp.sum(unquantized.astype(jnp.float32), axis=leading).astype(unquantized.dtype)


def grouped_quantize(x, quantizer: Quantizer | None, group_sizes=None, flatten_axis: int = -1) -> Any:
    """Quantises consecutive row groups of x (m, k) independently; without `group_sizes`, x is (groups, m, k).

    >>> from scaledot.compat.transformer_engine.quantize import QuantizeLayout, QuantizerFactory, ScalingMode
    >>> mode = ScalingMode.CURRENT_TENSOR_SCALING
    >>> quantizer = QuantizerFactory.create(1, mode, jnp.float8_e4m3fn, QuantizeLayout.ROWWISE, n_groups=2)
    >>> tensor = grouped_quantize(jnp.array([[1.0, 2.0], [30.0, 40.0]]), quantizer, jnp.array([1, 1]))
    >>> tensor.scale_inv.ravel() * 448
    Array([ 2., 40.], dtype=float32)
    """
    if quantizer is None:
        return GroupedNoScaleTensor(jnp.asarray(x), first_dims=group_sizes)
    groups = jnp.shape(x)[0] if group_sizes is None else jnp.shape(group_sizes)[0]
    return _for_groups(quantizer, groups).quantize(x, flatten_axis=flatten_axis, group_sizes=group_sizes)


def grouped_dbias(grad, group_sizes) -> jax.Array:
    """Returns the bias gradients (groups, n) of a gradient (m, n): sums over each group's rows, in grad's dtype.

    >>> grouped_dbias(jnp.ones((4, 2)), jnp.array([1, 3]))
    Array([[1., 1.],
           [3., 3.]], dtype=float32)
    """
    grad = float_array(grad)
    groups = checked_group_sizes(group_sizes, grad.shape[0])
    sums = jax.ops.segment_sum(grad.astype(jnp.float32), group_of(groups, grad.shape[0]), groups.shape[0])
    return sums.astype(grad.dtype)


def _for_groups(quantizer: Quantizer, groups: int) -> Quantizer:
    if quantizer.n_groups is not None:
        return quantizer
    raise ValueError(f"`quantizer` has no n_groups; create it by QuantizerFactory.create(..., n_groups={groups})")


def dequantize(tensor: AbstractBaseTensor) -> Any:
    """Dequantises a tensor; a grouped tensor gives a list with one array per group.

    >>> from scaledot.compat.transformer_engine.quantize import ScaledTensorFactory, ScalingMode
    >>> mode = ScalingMode.CURRENT_TENSOR_SCALING
    >>> dequantize(ScaledTensorFactory.create_1x(jnp.ones((1, 2), jnp.float8_e4m3fn), jnp.full(1, 0.5), None, mode))
    Array([[0.5, 0.5]], dtype=bfloat16)
    """
    if not isinstance(tensor, AbstractBaseTensor):
        raise TypeError(f"`tensor` must be a quantised tensor or NoScaleTensor, not {type(tensor).__name__}")
    return tensor.dequantize()


def check_untransposed(transpose_batch_sequence: bool) -> None:
    if transpose_batch_sequence:
        raise ValueError("`transpose_batch_sequence` must be False; transpose x instead, by jnp.swapaxes(x, 0, 1)")


__all__ = ["dequantize", "grouped_dbias", "grouped_quantize", "quantize", "quantize_dbias"]
__getattr__ = module_getattr(__name__)
