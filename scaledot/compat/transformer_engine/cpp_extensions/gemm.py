"""gemm of tensors and arrays, and the names of collective products."""

import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from scaledot.compat.transformer_engine.cpp_extensions.quantization import check_untransposed
from scaledot.compat.transformer_engine.quantize.quantizer import Quantizer
from scaledot.compat.transformer_engine.quantize.views import NoScaleTensor, ScaledTensor1x, ScaledTensor2x
from scaledot.compat.transformer_engine.sharding import (
    Names,
    batch_axis,
    constrained_to,
    global_mesh_resource,
    mesh_axes,
)
from scaledot.kernels.spec import accumulation_dtype
from scaledot.numerics import blocks
from scaledot.ops.dot import dot_general
from scaledot.train import Specs

Dims = tuple[Any, Any]


class CollectiveOp(enum.Enum):
    """What a product over the axis of tensor and sequence parallelism does besides.

    ALL_GATHER: x (dp, tpsp, -) · w (-, tpsp) -> y (dp, -, tpsp); REDUCE_SCATTER: x (dp, -, tpsp) · w (tpsp, -) ->
    y (dp, tpsp, -). `dense` moves codes and float32 sums in rings meanwhile (`scaledot.collective_matmul`), forward and
    backward; `gemm` leaves it to XLA to lay the result out so. Without a mesh there is nothing to move.

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


@dataclasses.dataclass(frozen=True)
class CollectiveOpSet:
    """The collectives of a layer's forward and backward products.

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
    """How x (batch, sequence, k), kernel (k, n) and their collective product lie; None without a mesh to lie on."""
    tpsp = global_mesh_resource().tpsp_resource
    if op.is_none or tpsp is None or jax.sharding.get_abstract_mesh().empty:
        return None
    if x.ndim != 3 or kernel.ndim != 2:
        words = f"x {x.shape} and a kernel {kernel.shape}"
        raise ValueError(f"a collective product takes (batch, sequence, k) and (k, n), not {words}")
    batch = batch_axis()
    of_kernel = mesh_axes(kernel_axes) if kernel_axes else (None, tpsp) if op.is_all_gather else (tpsp, None)
    by_sequence, by_features = PartitionSpec(batch, tpsp, None), PartitionSpec(batch, None, tpsp)
    x_spec, y_spec = (by_sequence, by_features) if op.is_all_gather else (by_features, by_sequence)
    return Specs(x_spec, PartitionSpec(*of_kernel), y_spec)


def laid_out(y: jax.Array, op: CollectiveOp) -> jax.Array:
    """A result of (batch, sequence, features) laid out over the mesh as a collective product leaves it."""
    if op.is_none:
        return y
    if y.ndim != 3:
        raise ValueError(f"a collective product gives (batch, sequence, features), not {y.shape}")
    tpsp = global_mesh_resource().tpsp_resource
    sequence, features = (None, tpsp) if op.is_all_gather else (tpsp, None)
    return constrained_to(y, (batch_axis(), sequence, features))


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
) -> jax.Array:
    """The product of tensors, arrays, or arrays that quantizers quantise first; plus a bias, rounded once.

    The result has the dtype of lhs. `contracting_dims` count the untransposed axes. A tensor that holds both
    orientations gives the one that is needed. What is quantised has no gradient: `dense` is the one to differentiate.

    >>> from scaledot.compat.transformer_engine.quantize import QuantizerFactory, ScalingMode
    >>> quantizer = QuantizerFactory.create(1, ScalingMode.MXFP8_1D_SCALING, jnp.float8_e4m3fn)
    >>> gemm(jnp.ones((2, 32)), quantizer.quantize(jnp.ones((32, 3))), lhs_quantizer=quantizer)
    Array([[32., 32., 32.],
           [32., 32., 32.]], dtype=float32)
    """
    check_untransposed(transpose_batch_sequence)
    if quantizer_set is not None:
        lhs_quantizer, rhs_quantizer = lhs_quantizer or quantizer_set.x, rhs_quantizer or quantizer_set.kernel
    left = _operand(lhs, contracting_dims[0], lhs_quantizer, "lhs")
    right = _operand(rhs, contracting_dims[1], rhs_quantizer, "rhs")
    numbers = (tuple(axes_of(d, q.ndim) for d, q in zip(contracting_dims, (left, right), strict=True)), ((), ()))
    dtype = np.dtype(left.dtype)
    wide = accumulation_dtype(dtype)
    y = dot_general(left, right, numbers, preferred_element_type=dtype if bias is None else wide)
    if bias is not None:
        bias = jnp.asarray(bias, wide)
        check_bias(bias, y.shape[left.ndim - len(numbers[0][0]) :])
        y = (y + bias.reshape((1,) * (y.ndim - bias.ndim) + bias.shape)).astype(dtype)
    return laid_out(y, collective_op)


def check_bias(bias: Any, shape: tuple[int, ...]) -> None:
    if bias is not None and bias.shape != shape:
        raise ValueError(f"`bias` {bias.shape} must have the shape of the kernel's other axes, {shape}")


def axes_of(dims: Any, ndim: int) -> tuple[int, ...]:
    return tuple(blocks.positive_axis(d, ndim) for d in (dims if isinstance(dims, (tuple, list)) else (dims,)))


def _operand(x: Any, dims: Any, quantizer: Quantizer | None, name: str) -> Any:
    """What our product takes: an array or a ScaledArray in the orientation that it sums over."""
    if isinstance(x, NoScaleTensor):
        x = x.data
    if not isinstance(x, (ScaledTensor1x, ScaledTensor2x)):
        x = jnp.asarray(x)
        if quantizer is None:
            return x
        axes = axes_of(dims, x.ndim)
        rowwise = x.ndim - 1 in axes
        cut = min(axes) if rowwise else max(axes) + 1
        x = quantizer.quantize(x, is_rowwise=rowwise, is_colwise=not rowwise, flatten_axis=cut)
    if isinstance(x, ScaledTensor2x):
        x = x.rowwise_tensor if x.ndim - 1 in axes_of(dims, x.ndim) else x.colwise_tensor
    q, summed = x.array, axes_of(dims, x.ndim)
    blocked = [axis for axis, size in enumerate(blocks.expand(q.block, q.ndim)) if size > 1]
    if x.scaling_mode.is_1d_block_scaling() and blocked and blocked[0] not in summed:
        held, missing = ("colwise", "rowwise") if x.is_colwise else ("rowwise", "colwise")
        raise ValueError(
            f"`{name}` is summed over axes {summed}, which needs its {missing} orientation; it holds the {held} one, "
            f"with blocks along axis {blocked[0]}"
        )
    return q
