"""gemm of quantised tensors and arrays, and the enumeration of collective matmuls."""

import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from scaledot.compat.transformer_engine.cpp_extensions.dims import Dims, check_bias, normalize_dims
from scaledot.compat.transformer_engine.cpp_extensions.grouped import grouped_gemm, grouped_gemm_copy_group_sizes
from scaledot.compat.transformer_engine.cpp_extensions.quantization import check_untransposed
from scaledot.compat.transformer_engine.quantize.quantizer_class import Quantizer
from scaledot.compat.transformer_engine.quantize.tensor_classes import NoScaleTensor, ScaledTensor1x, ScaledTensor2x
from scaledot.compat.transformer_engine.sharding import (
    Names,
    batch_axis,
    constrain_to_axes,
    global_mesh_resource,
    mesh_axes,
)
from scaledot.compat.transformer_engine.unsupported import module_getattr
from scaledot.kernels.spec import accumulation_dtype
from scaledot.numerics import blocks
from scaledot.ops.dot import dot_general
from scaledot.train import Specs


class CollectiveOp(enum.Enum):
    """The collective of a matmul along the mesh axis of tensor and sequence parallelism (tpsp).

    ALL_GATHER: x (dp, tpsp, -) · w (-, tpsp) -> y (dp, -, tpsp); REDUCE_SCATTER: x (dp, -, tpsp) · w (tpsp, -) ->
    y (dp, tpsp, -). `dense` overlaps the matmul with collective-permute rings of codes or float32 partial results
    (`scaledot.collective_matmul`), forward and backward; `gemm` only constrains the sharding of y, and XLA inserts the
    collective. Without a mesh the collective is ignored; `gemm` still requires a result (batch, sequence, features).

    >>> CollectiveOp.ALL_GATHER.is_all_gather
    True
    """

    NONE = "none"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"

    @property
    def is_none(self) -> bool:
        return self is CollectiveOp.NONE

    @property
    def is_all_gather(self) -> bool:
        return self is CollectiveOp.ALL_GATHER

    @property
    def is_reduce_scatter(self) -> bool:
        return self is CollectiveOp.REDUCE_SCATTER


def collective_gemm_bootstrap(*args, **kwargs) -> None:
    """Does nothing, whatever its arguments: XLA's collectives need no communicators of their own.

    >>> collective_gemm_bootstrap(num_total_devices=8, tensor_parallel_size=4)
    """


@dataclasses.dataclass(frozen=True)
class CollectiveOpSet:
    """The collectives of a layer's forward and backward matmuls.

    >>> CollectiveOpSet.create(CollectiveOp.ALL_GATHER).backward
    <CollectiveOp.REDUCE_SCATTER: 'reduce_scatter'>
    """

    forward: CollectiveOp = CollectiveOp.NONE
    backward: CollectiveOp = CollectiveOp.NONE

    @staticmethod
    def create(forward_collective_op: CollectiveOp) -> "CollectiveOpSet":
        opposite = {
            CollectiveOp.NONE: CollectiveOp.NONE,
            CollectiveOp.ALL_GATHER: CollectiveOp.REDUCE_SCATTER,
            CollectiveOp.REDUCE_SCATTER: CollectiveOp.ALL_GATHER,
        }
        return CollectiveOpSet(forward_collective_op, opposite[forward_collective_op])


noop_collective_op_set = CollectiveOpSet()


def collective_specs(op: CollectiveOp, x: jax.Array, kernel: jax.Array, kernel_axes: Names) -> Specs | None:
    """Returns the PartitionSpecs of x (batch, sequence, k), kernel (k, n) and y; None without collective or mesh."""
    tpsp = global_mesh_resource().tpsp_resource
    if op.is_none or tpsp is None or jax.sharding.get_abstract_mesh().empty:
        return None
    if x.ndim != 3 or kernel.ndim != 2:
        raise ValueError(
            "a collective matmul takes `x` (batch, sequence, k) and `kernel` (k, n), "
            f"not shapes {x.shape} and {kernel.shape}"
        )
    batch = batch_axis()
    kernel_spec = mesh_axes(kernel_axes) if kernel_axes else (None, tpsp) if op.is_all_gather else (tpsp, None)
    sequence_sharded, feature_sharded = PartitionSpec(batch, tpsp, None), PartitionSpec(batch, None, tpsp)
    x_spec, y_spec = (sequence_sharded, feature_sharded) if op.is_all_gather else (feature_sharded, sequence_sharded)
    return Specs(x_spec, PartitionSpec(*kernel_spec), y_spec)


def constrain_output(y: jax.Array, op: CollectiveOp) -> jax.Array:
    """Constrains y (batch, sequence, features) to the sharding that the collective produces."""
    if op.is_none:
        return y
    if y.ndim != 3:
        raise ValueError(f"the result of a collective matmul must be (batch, sequence, features), not {y.shape}")
    tpsp = global_mesh_resource().tpsp_resource
    sequence, features = (None, tpsp) if op.is_all_gather else (tpsp, None)
    return constrain_to_axes(y, (batch_axis(), sequence, features))


def gemm(
    lhs,
    rhs,
    bias=None,
    contracting_dims: Dims = ((-1,), (0,)),
    lhs_quantizer: Quantizer | None = None,
    rhs_quantizer: Quantizer | None = None,
    transpose_batch_sequence: bool = False,
    collective_op: CollectiveOp = CollectiveOp.NONE,
    quantizer_set=None,
    **_ignored,
) -> jax.Array:
    """Contracts two quantised tensors or arrays and adds a bias; rounds once, to the dtype of lhs.

    Arrays are quantised first if their quantizer is passed. `contracting_dims` refer to untransposed dims; of a
    ScaledTensor2x, the orientation with blocks along the contracting dims is used. Quantised operands have no gradient:
    differentiate `dense` instead. Other keyword arguments are ignored, as TransformerEngine does.

    >>> from scaledot.compat.transformer_engine.quantize import QuantizerFactory, ScalingMode
    >>> quantizer = QuantizerFactory.create(1, ScalingMode.MXFP8_1D_SCALING, jnp.float8_e4m3fn)
    >>> gemm(jnp.ones((2, 32)), quantizer.quantize(jnp.ones((32, 3))), lhs_quantizer=quantizer)
    Array([[32., 32., 32.],
           [32., 32., 32.]], dtype=float32)
    """
    check_untransposed(transpose_batch_sequence)
    if quantizer_set is not None:
        lhs_quantizer, rhs_quantizer = lhs_quantizer or quantizer_set.x, rhs_quantizer or quantizer_set.kernel
    lhs = _operand(lhs, contracting_dims[0], lhs_quantizer, "lhs")
    rhs = _operand(rhs, contracting_dims[1], rhs_quantizer, "rhs")
    dims = tuple(normalize_dims(d, q.ndim) for d, q in zip(contracting_dims, (lhs, rhs), strict=True))
    dimension_numbers = (dims, ((), ()))
    dtype = np.dtype(lhs.dtype)
    accumulator = accumulation_dtype(dtype)
    y = dot_general(lhs, rhs, dimension_numbers, preferred_element_type=dtype if bias is None else accumulator)
    if bias is not None:
        bias = jnp.asarray(bias, accumulator)
        check_bias(bias, y.shape[lhs.ndim - len(dims[0]) :])
        y = (y + bias.reshape((1,) * (y.ndim - bias.ndim) + bias.shape)).astype(dtype)
    return constrain_output(y, collective_op)


def _operand(x: Any, dims: Any, quantizer: Quantizer | None, name: str) -> Any:
    """Converts an operand to an array or to a ScaledArray with blocks along the contracting dims."""
    if isinstance(x, NoScaleTensor):
        x = x.data
    if not isinstance(x, (ScaledTensor1x, ScaledTensor2x)):
        x = jnp.asarray(x)
        if quantizer is None:
            return x
        axes = normalize_dims(dims, x.ndim)
        rowwise = x.ndim - 1 in axes
        flatten_axis = min(axes) if rowwise else max(axes) + 1
        x = quantizer.quantize(x, is_rowwise=rowwise, is_colwise=not rowwise, flatten_axis=flatten_axis)
    if isinstance(x, ScaledTensor2x):
        x = x.rowwise_tensor if x.ndim - 1 in normalize_dims(dims, x.ndim) else x.colwise_tensor
    q, contracting = x.array, normalize_dims(dims, x.ndim)
    block_axes = [axis for axis, size in enumerate(blocks.expand(q.block, q.ndim)) if size > 1]
    if x.scaling_mode.is_1d_block_scaling() and block_axes and block_axes[0] not in contracting:
        present, missing = ("colwise", "rowwise") if x.is_colwise else ("rowwise", "colwise")
        raise ValueError(
            f"`{name}` is contracted over dims {contracting}, which needs its {missing} orientation; it has only the "
            f"{present} one, with blocks along axis {block_axes[0]}"
        )
    return q


__all__ = [
    "CollectiveOp",
    "CollectiveOpSet",
    "gemm",
    "grouped_gemm",
    "grouped_gemm_copy_group_sizes",
    "noop_collective_op_set",
]
__getattr__ = module_getattr(__name__)
