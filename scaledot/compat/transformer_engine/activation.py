"""activation: differentiable activations, gated or not."""

from collections.abc import Sequence

import jax

from scaledot.compat.transformer_engine.cpp_extensions.activation import Activation, ActivationParams, activate
from scaledot.compat.transformer_engine.quantize.quantizer_class import Quantizer
from scaledot.compat.transformer_engine.quantize.straight_through import quantize_dequantize


def activation(
    x,
    activation_type: Sequence[Activation],
    quantizer: Quantizer | None = None,
    act_params: ActivationParams | None = None,
) -> jax.Array:
    """Returns the product of the activated slices of x (..., functions, n), of shape (..., n).

    activation_type: one function for each slice, by name or callable: ("gelu",), or ("silu", "linear") for SwiGLU.
    quantizer: quantises and dequantises the result; gradients are those of the unquantised activation.

    >>> import jax.numpy as jnp
    >>> activation(jnp.array([[-1.0, 2.0], [3.0, 4.0]]), ("relu", "linear"))
    Array([0., 8.], dtype=float32)
    """
    return quantize_dequantize(activate(x, activation_type, act_params), quantizer)


__all__ = ["activation"]
