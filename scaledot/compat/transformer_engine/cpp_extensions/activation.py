"""act_lu, dact_lu and quantize_dact_dbias: activations, gated or not, with the quantisation of their result.

An activation type is a tuple of functions, such as ("gelu",) or, gated, ("silu", "linear"). The input has one slice for
each of them along axis -2, and the result is the product of the activated slices. Arithmetic is in float32.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from scaledot.compat.transformer_engine.cpp_extensions.quantization import quantize, quantize_dbias
from scaledot.compat.transformer_engine.quantize.quantizer_class import Quantizer
from scaledot.compat.transformer_engine.quantize.tensor_classes import NoScaleTensor

Activation = str | Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class ClampedSwigluParams:
    """The constants of the clamped SwiGLU of GPT-OSS: min(a, limit) · sigmoid(alpha · a) · (clip(b, ±limit) + offset).

    >>> ClampedSwigluParams().alpha
    1.702
    """

    limit: float = 7.0
    alpha: float = 1.702
    glu_linear_offset: float = 1.0


@dataclasses.dataclass(frozen=True)
class ActivationParams:
    """The constants of activations that have some.

    >>> ActivationParams.create(("clamped_silu", "clamped_linear"), limit=5.0).clamped_swiglu.limit
    5.0
    """

    clamped_swiglu: ClampedSwigluParams = ClampedSwigluParams()

    @staticmethod
    def create(activation_type: Any, **constants: float) -> "ActivationParams":
        """Returns the constants of a clamped SwiGLU; those of other activation types have no effect."""
        types = (activation_type,) if isinstance(activation_type, str) else tuple(activation_type)
        clamped = set(types) <= {"clamped_silu", "clamped_linear"}
        return ActivationParams(ClampedSwigluParams(**constants)) if clamped else ActivationParams()


def activate(x, activation_type: Sequence[Activation], act_params: ActivationParams | None = None) -> jax.Array:
    """Returns the product of the activated slices of x (..., functions, n), of shape (..., n) and the dtype of x.

    >>> activate(jnp.array([[-1.0, 2.0], [3.0, 4.0]]), ("relu", "linear"))
    Array([0., 8.], dtype=float32)
    """
    x = jnp.asarray(x)
    if x.ndim < 2 or x.shape[-2] != len(activation_type):
        raise ValueError(
            f"axis -2 of x {x.shape} must have {len(activation_type)} slices, one for each of {tuple(activation_type)}"
        )
    constants = (act_params or ActivationParams()).clamped_swiglu
    slices = x.astype(jnp.float32)
    activated = [_function(name, constants)(slices[..., i, :]) for i, name in enumerate(activation_type)]
    return functools.reduce(operator.mul, activated).astype(x.dtype)


def _function(activation: Activation, constants: ClampedSwigluParams) -> Callable[[jax.Array], jax.Array]:
    """The function of a name that TransformerEngine defines, or of jax.nn."""
    if callable(activation):
        return activation
    limit, alpha, offset = constants.limit, constants.alpha, constants.glu_linear_offset
    own: dict[str, Callable[[jax.Array], jax.Array]] = {
        "linear": lambda x: x,
        "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
        "squared_relu": lambda x: jnp.square(jax.nn.relu(x)),
        "clamped_linear": lambda x: jnp.clip(x, -limit, limit) + offset,
        "clamped_silu": lambda x: jnp.minimum(x, limit) * jax.nn.sigmoid(alpha * jnp.minimum(x, limit)),
    }
    function = own.get(activation) or getattr(jax.nn, activation, None)
    if function is None:
        raise ValueError(f"activation {activation!r} is neither a function of jax.nn nor one of {', '.join(own)}")
    return function


def act_lu(
    x,
    activation_type: Sequence[Activation],
    quantizer: Quantizer | None = None,
    act_params: ActivationParams | None = None,
    amax_scope=None,
    transpose_batch_sequence: bool = False,
    output_amax_when_no_scaling: bool = False,
) -> Any:
    """Returns the activation of x (..., functions, n) as a quantised tensor, or as a NoScaleTensor without a quantizer.

    >>> act_lu(jnp.array([[-1.0, 2.0]]), ("relu",)).data
    Array([0., 2.], dtype=float32)
    """
    y = activate(x, activation_type, act_params)
    if quantizer is None and output_amax_when_no_scaling:
        return NoScaleTensor(y, jnp.max(jnp.abs(y)).astype(jnp.float32).reshape(1))
    return quantize(y, quantizer, -1, amax_scope, transpose_batch_sequence)


def quantize_dact_dbias(
    dz,
    x,
    activation_type: Sequence[Activation] = ("gelu",),
    is_dbias: bool = True,
    quantizer: Quantizer | None = None,
    act_params: ActivationParams | None = None,
    amax_scope=None,
    transpose_batch_sequence: bool = False,
    output_amax_when_no_scaling: bool = False,
) -> tuple[Any, jax.Array | None]:
    """Returns (dx, dbias) of the activation of x (..., functions, n): dx quantised, dbias its sum over leading axes.

    >>> dx, dbias = quantize_dact_dbias(jnp.ones((2, 2)), jnp.array([[[1.0, -1.0]], [[1.0, 2.0]]]), ("relu",))
    >>> dbias
    Array([[2., 1.]], dtype=float32)
    """
    x = jnp.asarray(x)
    dz = dz.data if isinstance(dz, NoScaleTensor) else jnp.asarray(dz)
    _, vjp = jax.vjp(lambda x: activate(x, activation_type, act_params), x.astype(jnp.float32))
    dx = vjp(dz.astype(jnp.float32))[0].astype(x.dtype)
    amax = jnp.max(jnp.abs(dx)).astype(jnp.float32).reshape(1) if output_amax_when_no_scaling else None
    dx = NoScaleTensor(dx, amax) if quantizer is None else dx
    return quantize_dbias(dx, quantizer, is_dbias, -2, amax_scope, transpose_batch_sequence)


def dact_lu(
    dz,
    x,
    activation_type: Sequence[Activation],
    quantizer: Quantizer | None = None,
    act_params: ActivationParams | None = None,
    amax_scope=None,
    transpose_batch_sequence: bool = False,
    output_amax_when_no_scaling: bool = False,
) -> Any:
    """Returns the gradient of the activation with respect to x, quantised; the first result of quantize_dact_dbias.

    >>> dact_lu(jnp.array([3.0, 3.0]), jnp.array([[1.0, -1.0]]), ("relu",)).data
    Array([[3., 0.]], dtype=float32)
    """
    options = (amax_scope, transpose_batch_sequence, output_amax_when_no_scaling)
    return quantize_dact_dbias(dz, x, activation_type, False, quantizer, act_params, *options)[0]


__all__ = ["ActivationParams", "act_lu", "dact_lu", "quantize_dact_dbias"]
