"""The round trip through a quantizer whose gradient is that of the identity."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scaledot.compat.transformer_engine.quantize.quantizer_class import Quantizer


@jax.custom_vjp
def quantize_dequantize(x: jax.Array, quantizer: Quantizer | None) -> jax.Array:
    """Returns x quantised and dequantised; without a quantizer, x.

    The gradient with respect to x is the cotangent, and that with respect to a quantizer of delayed scaling is the
    quantizer for the next step.

    >>> from scaledot.compat.transformer_engine.quantize import QuantizerFactory, ScalingMode
    >>> quantizer = QuantizerFactory.create(1, ScalingMode.CURRENT_TENSOR_SCALING, jnp.float8_e4m3fn)
    >>> quantize_dequantize(jnp.array([[448.0, 1.1]]), quantizer)
    Array([[448.   ,   1.125]], dtype=float32)
    """
    return _forward(x, quantizer)[0]


def _forward(x: jax.Array, quantizer: Quantizer | None) -> tuple[jax.Array, Quantizer | None]:
    if quantizer is None:
        return x, None
    tensor: Any = quantizer.quantize(x, is_rowwise=True, is_colwise=False)
    return tensor.dequantize(), quantizer.update(tensor.amax)


def _backward(quantizer: Quantizer | None, g: jax.Array):
    return g, jax.tree.map(_as_cotangent, quantizer)


def _as_cotangent(leaf: jax.Array):
    """A leaf of the next quantizer; zero for stochastic-rounding keys, which are not differentiable."""
    return leaf if jnp.issubdtype(leaf.dtype, jnp.floating) else np.zeros(leaf.shape, jax.dtypes.float0)


quantize_dequantize.defvjp(_forward, _backward)
