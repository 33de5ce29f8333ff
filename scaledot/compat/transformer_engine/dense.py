"""dense and grouped_dense: differentiable matmuls, quantised forward and backward by a QuantizerSet.

`te.dense` is this module, as in TransformerEngine; calling the module calls the function, `te.dense(x, kernel)`.
"""

import functools
import sys
import types
import warnings
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.core import Tracer

from scaledot.compat.transformer_engine.cpp_extensions.dims import Dims, check_bias, normalize_dims
from scaledot.compat.transformer_engine.cpp_extensions.gemm import (
    CollectiveOpSet,
    collective_specs,
    noop_collective_op_set,
)
from scaledot.compat.transformer_engine.cpp_extensions.quantization import check_untransposed
from scaledot.compat.transformer_engine.quantize.grouped import checked_group_sizes
from scaledot.compat.transformer_engine.quantize.quantizer_set import QuantizerSet, noop_quantizer_set
from scaledot.compat.transformer_engine.sharding import Names, constrain_by_names, global_mesh_resource
from scaledot.compat.transformer_engine.unsupported import module_getattr
from scaledot.contraction import from_dimension_numbers
from scaledot.ops.operands import float_operand
from scaledot.recipes import UNQUANTISED
from scaledot.state import State, is_zero, unchecked
from scaledot.train import ragged_dot
from scaledot.train.dot import contract_with_recipe
from scaledot.train.options import Keywords, Options


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
    """Computes x · kernel + bias, quantised forward and backward; the result has the dtype of x.

    With delayed scaling, the gradient with respect to `quantizer_set` is the set for the next step;
    `QuantizerSet.merge` merges the sets of several micro-batches. A set may be used once per step: to share one between
    layers use `scaledot.train`, which returns the updated state. If the kernel is differentiated and the set is not,
    amax histories stay constant, as in TransformerEngine; the first time, this warns.

    >>> from scaledot.compat.transformer_engine.quantize import QuantizerFactory
    >>> quantizers = QuantizerFactory.create_set(fp8_recipe="fp8_delayed")
    >>> loss = lambda kernel, quantizers: dense(jnp.ones((2, 32)), kernel, quantizer_set=quantizers).sum()
    >>> dkernel, quantizers = jax.grad(loss, argnums=(0, 1))(jnp.full((32, 4), 2.0), quantizers)
    >>> quantizers.kernel.scale
    Array([224.], dtype=float32)
    """
    check_untransposed(transpose_batch_sequence)
    _check_set(quantizer_set)
    x = constrain_by_names(float_operand(x, "x"), input_axes)
    kernel = constrain_by_names(float_operand(kernel, "kernel"), kernel_axes)
    bias = None if bias is None else float_operand(bias, "bias")
    axes = tuple(normalize_dims(d, a.ndim) for d, a in zip(contracting_dims, (x, kernel), strict=True))
    contraction = from_dimension_numbers((axes, ((), ())), x.ndim, kernel.ndim)
    check_bias(bias, tuple(size for axis, size in enumerate(kernel.shape) if axis not in axes[1]))
    recipe, state = quantizer_set.core or UNQUANTISED, _state_of(quantizer_set, kernel)
    specs, keywords = collective_specs(collective_op_set.forward, x, kernel, kernel_axes), Keywords()
    if specs is not None:
        keywords = Keywords(specs=specs, overlap=global_mesh_resource().tpsp_resource or (), on_indivisible="gather")
    keywords["residual_name"] = quantizer_set.checkpoint_name
    options = Options.of(recipe, x.dtype, None, keywords)
    with unchecked():  # `_state_of` warns instead of raising
        y = _without_state(contract_with_recipe(options, contraction, x, kernel, bias, state, quantizer_set.key))
    return constrain_by_names(y, output_axes)


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
    """Grouped matmul of x (m, k) with kernel (groups, k, n) to (m, n), plus bias (groups, n).

    Consecutive rows of x form groups of `group_sizes` rows, which sum to m; each is multiplied by its own matrix. With
    delayed scaling and quantizers of `n_groups`, each group has its own state, which is updated as that of `dense`.

    >>> from scaledot.compat.transformer_engine.quantize import QuantizerFactory
    >>> quantizers = QuantizerFactory.create_set(fp8_recipe="mxfp8", n_groups=2)
    >>> kernel = jnp.stack([jnp.ones((32, 2)), 3 * jnp.ones((32, 2))])
    >>> grouped_dense(jnp.ones((3, 32)), kernel, jnp.array([1, 2]), quantizer_set=quantizers)[:, 0]
    Array([32., 96., 96.], dtype=float32)
    """
    _check_set(quantizer_set)
    if group_offset is not None:
        raise ValueError("`group_offset` must be None; pass only the rows and group sizes of the local groups")
    if kernel_fsdp_info[0] is not None:
        raise ValueError("`kernel_fsdp_info` must be (None, -1); shard the kernel by jax.sharding instead")
    x, kernel = float_operand(x, "x"), float_operand(kernel, "kernel")
    x_axes, kernel_axes = (normalize_dims(d, a.ndim) for d, a in zip(contracting_dims, (x, kernel), strict=True))
    if x_axes != (1,) or kernel_axes not in ((1,), (2,)):
        raise ValueError(f"`contracting_dims` {contracting_dims} must be ((1,), (1,)) or ((1,), (2,))")
    kernel = kernel if kernel_axes == (1,) else jnp.swapaxes(kernel, 1, 2)
    groups = checked_group_sizes(group_sizes, x.shape[0])
    recipe, state = quantizer_set.core or UNQUANTISED, _state_of(quantizer_set, kernel)
    dtype = x.dtype if preferred_element_type is None else preferred_element_type
    options = {"recipe": recipe, "state": state, "key": quantizer_set.key}
    options["residual_name"] = quantizer_set.checkpoint_name
    with unchecked():
        return _without_state(ragged_dot(x, kernel, groups, bias, precision, dtype, **options))


def _check_set(quantizer_set: QuantizerSet) -> None:
    if not isinstance(quantizer_set, QuantizerSet):
        raise TypeError(f"`quantizer_set` must come from QuantizerFactory.create_set, not {quantizer_set!r}")


def _state_of(quantizer_set: QuantizerSet, kernel: jax.Array) -> State | None:
    """Returns the delayed-scaling state of a quantizer set.

    `scaledot.train` raises if the kernel is differentiated and the state is not. TransformerEngine allows that, so here
    it only warns.
    """
    state = quantizer_set.state
    return cast(State, _constant_allowed(state, kernel)) if state and isinstance(kernel, Tracer) else state


@jax.custom_jvp
def _constant_allowed(state: State, kernel: jax.Array) -> State:
    """Returns the state; differentiating with respect to the kernel but not the state warns."""
    return state


@functools.partial(_constant_allowed.defjvp, symbolic_zeros=True)
def _constant_allowed_jvp(primals: tuple[State, jax.Array], tangents: tuple[Any, Any]):
    state, kernel = tangents
    if not is_zero(kernel) and all(map(is_zero, jax.tree.leaves(state))):
        _warn_about_constant_set()
    return primals[0], state


@functools.cache
def _warn_about_constant_set() -> None:
    warnings.warn(
        "a kernel is differentiated without its `quantizer_set`, so its amax histories and scales are not updated. The "
        "gradient of a set is the set for the next step: jax.grad(loss, argnums=(0, 1))(kernel, quantizer_set). "
        "This warning is shown once",
        stacklevel=2,
    )


class _CallableModule(types.ModuleType):
    """The class of this module, which calls `dense`."""

    def __call__(self, *args, **kwargs) -> jax.Array:
        return dense(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule


def _without_state(result: jax.Array | tuple[jax.Array, State]) -> jax.Array:
    """Drops the returned delayed-scaling state; the gradient with respect to the input state still updates it."""
    return result[0] if isinstance(result, tuple) else result


__all__ = ["dense", "grouped_dense"]
__getattr__ = module_getattr(__name__)
