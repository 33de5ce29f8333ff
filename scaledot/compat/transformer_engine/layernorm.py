"""layernorm: differentiable LayerNorm and RMSNorm over the last axis."""

import jax

from scaledot.compat.transformer_engine.cpp_extensions.normalization import normalize
from scaledot.compat.transformer_engine.quantize.quantizer_class import Quantizer
from scaledot.compat.transformer_engine.quantize.straight_through import quantize_dequantize


def canonicalize_norm_type(x: str) -> str:
    """Returns 'layernorm' or 'rmsnorm' for any capitalisation, with or without '-' and '_'.

    >>> canonicalize_norm_type("RMS-Norm")
    'rmsnorm'
    """
    name = x.lower().strip().replace("-", "").replace("_", "")
    if name not in ("layernorm", "rmsnorm"):
        raise ValueError(f"`norm_type` must be 'layernorm' or 'rmsnorm', not {x!r}")
    return name


def layernorm(
    x,
    gamma,
    beta,
    norm_type: str,
    zero_centered_gamma: bool = False,
    epsilon: float = 1e-6,
    quantizer: Quantizer | None = None,
) -> jax.Array:
    """Normalises x over its last axis, multiplies by gamma and adds beta (None for RMSNorm); the result is like x.

    zero_centered_gamma: multiplies by 1 + gamma instead of gamma.
    quantizer: quantises and dequantises the result; gradients are those of the unquantised result.

    >>> import jax.numpy as jnp
    >>> layernorm(jnp.array([[1.0, 3.0]]), jnp.ones(2), jnp.zeros(2), "layernorm", epsilon=0.0)
    Array([[-1.,  1.]], dtype=float32)
    """
    norm_type = canonicalize_norm_type(norm_type)
    return quantize_dequantize(normalize(x, gamma, beta, zero_centered_gamma, epsilon, norm_type)[0], quantizer)


__all__ = ["canonicalize_norm_type", "layernorm"]
