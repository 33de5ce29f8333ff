"""dense and grouped_dense: differentiated products by a set of quantizers."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from scaledot.compat.transformer_engine.cpp_extensions.gemm import (
    CollectiveOpSet,
    Dims,
    axes_of,
    laid_out,
    noop_collective_op_set,
)
from scaledot.compat.transformer_engine.cpp_extensions.quantization import check_untransposed
from scaledot.compat.transformer_engine.quantize.grouped import summing_groups
from scaledot.compat.transformer_engine.quantize.quantizer_factory import QuantizerSet, noop_quantizer_set
from scaledot.compat.transformer_engine.sharding import constrained
from scaledot.ops.contraction import from_dimension_numbers
from scaledot.ops.operands import float_operand
from scaledot.recipes import Gemm, Recipe
from scaledot.state import State
from scaledot.train import ragged_dot
from scaledot.train.dots import contract_under

_PLAIN = Recipe("unquantised", Gemm(), Gemm(), Gemm())
Names = Sequence[str | None] | None


def dense(
    x,
    kernel,
    bias=None,
    contracting_dims: Dims = ((1,), (0,)),
    transpose_batch_sequence: bool = False,
    input_axes: Names = None,
    kernel_axes: Names = None,
    output_axes: Names = None,
    collective_op_set: CollectiveOpSet = noop_collective_op_set,
    quantizer_set: QuantizerSet = noop_quantizer_set,
) -> jax.Array:
    """x times kernel plus bias, quantised forward and backward; the result has the dtype of x.

    The gradient of a quantizer set with delayed scaling is the set of the next step; of a set used twice in one step,
    merge the two gradients with `scaledot.state.merge` or use `scaledot.train`, which hands states on.

    >>> from scaledot.compat.transformer_engine.quantize import QuantizerFactory
    >>> quantizers = QuantizerFactory.create_set(fp8_recipe="fp8_delayed")
    >>> loss = lambda kernel, quantizers: dense(jnp.ones((2, 32)), kernel, quantizer_set=quantizers).sum()
    >>> dkernel, quantizers = jax.grad(loss, argnums=(0, 1))(jnp.full((32, 4), 2.0), quantizers)
    >>> quantizers.kernel.scale
    Array([224.], dtype=float32)
    """
    check_untransposed(transpose_batch_sequence)
    x = constrained(float_operand(x, "x"), input_axes)
    kernel = constrained(float_operand(kernel, "kernel"), kernel_axes)
    bias = None if bias is None else float_operand(bias, "bias")
    axes = tuple(axes_of(d, a.ndim) for d, a in zip(contracting_dims, (x, kernel), strict=True))
    contraction = from_dimension_numbers((axes, ((), ())), x.ndim, kernel.ndim)
    recipe, state = quantizer_set.core or _PLAIN, quantizer_set.state
    plain = {"precision": None, "out_sharding": None}
    y = _result(contract_under(recipe, contraction, x, kernel, bias, x.dtype, state, quantizer_set.key, **plain))
    return laid_out(constrained(y, output_axes), collective_op_set.forward)


def grouped_dense(
    x,
    kernel,
    group_sizes,
    contracting_dims: Dims = ((1,), (1,)),
    bias=None,
    precision=None,
    preferred_element_type=None,
    group_offset=None,
    quantizer_set: QuantizerSet = noop_quantizer_set,
    kernel_fsdp_info: tuple[str | None, int] = (None, -1),
) -> jax.Array:
    """Rows of x (m, k) in consecutive groups, each times its own matrix of kernel (groups, k, n), plus its bias.

    >>> from scaledot.compat.transformer_engine.quantize import QuantizerFactory
    >>> quantizers = QuantizerFactory.create_set(fp8_recipe="mxfp8", n_groups=2)
    >>> kernel = jnp.stack([jnp.ones((32, 2)), 3 * jnp.ones((32, 2))])
    >>> grouped_dense(jnp.ones((3, 32)), kernel, jnp.array([1, 2]), quantizer_set=quantizers)[:, 0]
    Array([32., 96., 96.], dtype=float32)
    """
    if group_offset is not None:
        raise ValueError("`group_offset` can only be None; give the rows and sizes of the groups that are here")
    if kernel_fsdp_info[0] is not None:
        raise ValueError("`kernel_fsdp_info` can only be (None, -1); shard the kernel by jax.sharding instead")
    x, kernel = float_operand(x, "x"), float_operand(kernel, "kernel")
    x_axes, kernel_axes = (axes_of(d, a.ndim) for d, a in zip(contracting_dims, (x, kernel), strict=True))
    if x_axes != (1,) or kernel_axes not in ((1,), (2,)):
        raise ValueError(f"`contracting_dims` {contracting_dims} must be ((1,), (1,)) or ((1,), (2,))")
    kernel = kernel if kernel_axes == (1,) else jnp.swapaxes(kernel, 1, 2)
    groups = summing_groups(group_sizes, x.shape[0])
    recipe, state = quantizer_set.core or _PLAIN, quantizer_set.state
    dtype = x.dtype if preferred_element_type is None else preferred_element_type
    how = {"recipe": recipe, "state": state, "key": quantizer_set.key}
    return _result(ragged_dot(x, kernel, groups, bias, precision, dtype, **how))


def _result(returned: jax.Array | tuple[jax.Array, State]) -> jax.Array:
    """A product without the state that it hands on, whose gradient is the next one all the same."""
    return returned[0] if isinstance(returned, tuple) else returned
