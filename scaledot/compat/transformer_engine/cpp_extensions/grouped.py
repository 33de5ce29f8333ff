"""grouped_gemm: grouped matmuls of quantised and unquantised grouped tensors.

| lhs | rhs | `contracting_dims` | result |
|---|---|---|---|
| (m, k) in groups of rows | (groups, k, n) | ((1,), (1,)) | (m, n) |
| (m, k) in groups of rows | (groups, n, k) | ((1,), (2,)) | (m, n) |
| (m, k) in groups of rows | (m, n) in the same groups | ((0,), (0,)) | (groups, k, n) |
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scaledot.compat.transformer_engine.cpp_extensions.dims import Dims, normalize_dims
from scaledot.compat.transformer_engine.quantize.grouped import checked_group_sizes
from scaledot.compat.transformer_engine.quantize.grouped_tensors import GroupedNoScaleTensor, GroupedScaledTensor1x
from scaledot.compat.transformer_engine.quantize.quantizer_class import Quantizer
from scaledot.compat.transformer_engine.quantize.quantizer_set import QuantizerSet, noop_quantizer_set
from scaledot.compat.transformer_engine.quantize.tensor_classes import ScaledTensor2x
from scaledot.kernels.spec import accumulation_dtype
from scaledot.numerics.grouped import group_of
from scaledot.ops.ragged import ragged_dot_general

GroupedTensor = GroupedNoScaleTensor | GroupedScaledTensor1x
_OUTER = ((0,), (0,))


def grouped_gemm(
    lhs,
    rhs,
    contracting_dims: Dims = ((1,), (2,)),
    bias=None,
    precision=None,
    preferred_element_type=None,
    group_offset=None,
    quantizer_set: QuantizerSet = noop_quantizer_set,
    use_async_d2h_group_sizes: bool = False,
) -> jax.Array:
    """Multiplies grouped tensors group by group, adds a bias (groups, n), and rounds once, to the dtype of lhs.

    lhs, rhs: GroupedNoScaleTensor or GroupedScaledTensor1x, or a ScaledTensor2x of the latter. Unquantised ones are
      quantised by `quantizer_set.x` and `quantizer_set.kernel`, in the orientation of the contracting dims.
    use_async_d2h_group_sizes: ignored; group sizes stay on the device.

    >>> x = GroupedNoScaleTensor(jnp.ones((3, 2)), first_dims=jnp.array([1, 2]))
    >>> w = GroupedNoScaleTensor(jnp.stack([jnp.eye(2), 3 * jnp.eye(2)]))
    >>> grouped_gemm(x, w, contracting_dims=((1,), (1,)))[:, 0]
    Array([1., 3., 3.], dtype=float32)
    """
    if group_offset is not None:
        raise ValueError("`group_offset` must be None; pass only the rows and group sizes of the local groups")
    dims = _checked_dims(lhs, rhs, contracting_dims)
    lhs = _in_orientation(lhs, dims[0], quantizer_set.x, "lhs")
    rhs = _in_orientation(rhs, dims[1], quantizer_set.kernel, "rhs")
    groups = checked_group_sizes(lhs.first_dims, lhs.original_shape[0])
    dtype = _dtype(lhs) if preferred_element_type is None else np.dtype(preferred_element_type)
    numbers = lax.RaggedDotDimensionNumbers((dims, ((), ())), [0], [] if dims == _OUTER else [0])
    options: dict[str, Any] = {"precision": precision, "preferred_element_type": dtype}
    if bias is not None:
        options["preferred_element_type"] = accumulation_dtype(dtype)
    y = ragged_dot_general(_operand(lhs), _operand(rhs), groups, numbers, **options)
    return y if bias is None else _with_bias(y, jnp.asarray(bias), groups, dims).astype(dtype)


def grouped_gemm_copy_group_sizes(group_sizes, num_gemms: int) -> jax.Array:
    """Returns `group_sizes`: they are read on the device, and no copy to the host is needed.

    >>> grouped_gemm_copy_group_sizes(jnp.array([1, 2]), num_gemms=2)
    Array([1, 2], dtype=int32)
    """
    if jnp.shape(group_sizes) != (num_gemms,):
        raise ValueError(f"`group_sizes` {jnp.shape(group_sizes)} must have one size for each of {num_gemms} GEMMs")
    return jnp.asarray(group_sizes)


def _checked_dims(lhs: Any, rhs: Any, contracting_dims: Dims) -> Dims:
    for name, tensor in (("lhs", lhs), ("rhs", rhs)):
        if not isinstance(_rowwise(tensor), GroupedTensor):
            raise TypeError(f"`{name}` must be a grouped tensor, not {type(tensor).__name__}; see `grouped_quantize`")
    lhs, rhs = _rowwise(lhs), _rowwise(rhs)
    if lhs.first_dims is None:
        raise ValueError("`lhs` must have `first_dims`, the number of rows of each group")
    if (lhs.last_dims, rhs.last_dims) != (None, None):
        raise ValueError("`last_dims` must be None: groups are along the first dim")
    sides = zip(contracting_dims, (lhs, rhs), strict=True)
    lhs_dims, rhs_dims = (normalize_dims(dims, len(tensor.original_shape)) for dims, tensor in sides)
    allowed = ([((1,), (1,)), ((1,), (2,))], [_OUTER])[rhs.first_dims is not None]
    if (lhs_dims, rhs_dims) not in allowed:
        shapes = f"{lhs.original_shape} and {rhs.original_shape}"
        expected = " or ".join(map(str, allowed))
        raise ValueError(f"`contracting_dims` {contracting_dims} of grouped {shapes} must be {expected}")
    return lhs_dims, rhs_dims


def _rowwise(tensor: Any) -> Any:
    return tensor.rowwise_tensor if isinstance(tensor, ScaledTensor2x) else tensor


def _in_orientation(tensor: Any, dims: tuple[int, ...], quantizer: Quantizer | None, name: str) -> Any:
    """Returns the tensor, quantised if there is a quantizer, with blocks along the contracting dims."""
    rowwise = _rowwise(tensor).data.ndim - 1 in dims
    if isinstance(tensor, GroupedNoScaleTensor):
        if quantizer is None:
            return tensor
        return quantizer.quantize(
            tensor.data, is_rowwise=rowwise, is_colwise=not rowwise, group_sizes=tensor.first_dims
        )
    if isinstance(tensor, ScaledTensor2x):
        return tensor.rowwise_tensor if rowwise else tensor.colwise_tensor
    if tensor.scaling_mode.is_1d_block_scaling() and tensor.is_colwise == rowwise:
        missing = "rowwise" if rowwise else "colwise"
        raise ValueError(f"`{name}` is contracted over dims {dims}, which needs its {missing} orientation")
    return tensor


def _operand(tensor: GroupedTensor) -> Any:
    return tensor.data if isinstance(tensor, GroupedNoScaleTensor) else tensor.array


def _dtype(tensor: GroupedTensor) -> np.dtype:
    return np.dtype(tensor.data.dtype if isinstance(tensor, GroupedNoScaleTensor) else tensor.dq_dtype)


def _with_bias(y: jax.Array, bias: jax.Array, groups: jax.Array, dims: Dims) -> jax.Array:
    if dims == _OUTER or bias.shape != (groups.shape[0], y.shape[1]):
        raise ValueError(f"`bias` {bias.shape} must be (groups, n) for a result (m, n); the result is {y.shape}")
    return y + bias.astype(y.dtype)[group_of(groups, y.shape[0])]
