"""LayerNorm and RMSNorm over the last axis, forward and backward, with the quantisation of the result.

Arithmetic is in float32. mu and rsigma, the mean and the reciprocal of the standard deviation (of the root mean square
for RMSNorm), have the shape of x without its last axis.
"""

from typing import Any

import jax
import jax.numpy as jnp

from scaledot.compat.transformer_engine.cpp_extensions.quantization import quantize
from scaledot.compat.transformer_engine.quantize.quantizer_class import Quantizer
from scaledot.compat.transformer_engine.quantize.scaling_modes import ScalingMode
from scaledot.compat.transformer_engine.quantize.tensor_classes import NoScaleTensor

NORM_TYPES = ("layernorm", "rmsnorm")


def normalize(
    x, gamma, beta, zero_centered_gamma: bool, epsilon: float, norm_type: str
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Returns (y, mu, rsigma); y = (x - mu) · rsigma · gamma + beta in the dtype of x, mu is None for RMSNorm.

    zero_centered_gamma: multiplies by 1 + gamma instead of gamma.

    >>> y, mu, rsigma = normalize(jnp.array([1.0, 3.0]), jnp.ones(2), jnp.zeros(2), False, 0.0, "layernorm")
    >>> y, mu, rsigma
    (Array([-1.,  1.], dtype=float32), Array(2., dtype=float32), Array(1., dtype=float32))
    """
    y, mu, rsigma = _normalize_float32(x, gamma, beta, zero_centered_gamma, epsilon, norm_type)
    return y.astype(jnp.asarray(x).dtype), mu, rsigma


def _normalize_float32(x, gamma, beta, zero_centered_gamma: bool, epsilon: float, norm_type: str):
    """`normalize` without rounding of y to the dtype of x."""
    if norm_type not in NORM_TYPES:
        raise ValueError(f"`norm_type` must be 'layernorm' or 'rmsnorm', not {norm_type!r}")
    if norm_type == "rmsnorm" and beta is not None:
        raise ValueError("`beta` must be None for norm_type='rmsnorm'")
    x = jnp.asarray(x)
    values, gamma = x.astype(jnp.float32), _along_last_axis(gamma, x.ndim)
    mu = jnp.mean(values, axis=-1, keepdims=True) if norm_type == "layernorm" else None
    centred = values if mu is None else values - mu
    rsigma = jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + epsilon)
    y = centred * rsigma * (gamma + 1 if zero_centered_gamma else gamma)
    y = y if beta is None else y + _along_last_axis(beta, x.ndim)
    return y, None if mu is None else mu[..., 0], rsigma[..., 0]


def _along_last_axis(parameter, ndim: int) -> jax.Array:
    return jnp.asarray(parameter).astype(jnp.float32).reshape((1,) * (ndim - 1) + (-1,))


def normalization_fwd(
    x,
    gamma,
    beta,
    zero_centered_gamma: bool,
    epsilon: float,
    norm_type: str,
    quantizer: Quantizer | None = None,
    amax_scope=None,
    transpose_batch_sequence: bool = False,
) -> tuple[Any, jax.Array | None, jax.Array]:
    """Returns (y, mu, rsigma) with y quantised, or a NoScaleTensor without a quantizer; mu is None for RMSNorm.

    y is quantised from float32; with current scaling, from the dtype of x, as in TransformerEngine.

    >>> y, mu, rsigma = normalization_fwd(jnp.array([[3.0, 4.0]]), jnp.ones(2), None, False, 0.0, "rmsnorm")
    >>> y.data.shape, mu, rsigma.shape
    ((1, 2), None, (1,))
    """
    y, mu, rsigma = _normalize_float32(x, gamma, beta, zero_centered_gamma, epsilon, norm_type)
    dtype = jnp.asarray(x).dtype
    if quantizer is None or quantizer.scaling_mode is ScalingMode.CURRENT_TENSOR_SCALING:
        return quantize(y.astype(dtype), quantizer, -1, amax_scope, transpose_batch_sequence), mu, rsigma
    return quantizer.quantize(y, dq_dtype=dtype), mu, rsigma


def normalization_bwd(
    dz, x, mu, rsigma, gamma, beta, zero_centered_gamma: bool, epsilon: float, norm_type: str
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns (dx, dgamma, dbeta) for the cotangent dz of y; dbeta is None for RMSNorm. mu and rsigma are ignored.

    >>> x = jnp.array([[1.0, 3.0]])
    >>> normalization_bwd(jnp.ones((1, 2)), x, None, None, jnp.ones(2), jnp.zeros(2), False, 0.0, "layernorm")[1:]
    (Array([-1.,  1.], dtype=float32), Array([1., 1.], dtype=float32))
    """
    dz = dz.data if isinstance(dz, NoScaleTensor) else dz

    def y(x, gamma, beta):
        return normalize(x, gamma, beta, zero_centered_gamma, epsilon, norm_type)[0]

    return jax.vjp(y, x, gamma, beta)[1](dz)


def layernorm_fwd(
    x,
    gamma,
    beta,
    zero_centered_gamma: bool,
    epsilon: float,
    quantizer: Quantizer | None = None,
    amax_scope=None,
    transpose_batch_sequence: bool = False,
    output_amax_when_no_scaling: bool = False,
) -> tuple[Any, jax.Array | None, jax.Array]:
    """Returns (y, mu, rsigma) of LayerNorm, y quantised.

    >>> layernorm_fwd(jnp.array([[1.0, 3.0]]), jnp.ones(2), jnp.zeros(2), False, 0.0)[0].data
    Array([[-1.,  1.]], dtype=float32)
    """
    options = (zero_centered_gamma, epsilon, "layernorm", quantizer, amax_scope, transpose_batch_sequence)
    y, mu, rsigma = normalization_fwd(x, gamma, beta, *options)
    return _with_amax(y, output_amax_when_no_scaling), mu, rsigma


def rmsnorm_fwd(
    x,
    gamma,
    zero_centered_gamma: bool,
    epsilon: float,
    quantizer: Quantizer | None = None,
    amax_scope=None,
    transpose_batch_sequence: bool = False,
    output_amax_when_no_scaling: bool = False,
) -> tuple[Any, jax.Array]:
    """Returns (y, rsigma) of RMSNorm, y quantised.

    >>> rmsnorm_fwd(jnp.array([[2.0, -2.0]]), jnp.ones(2), False, 0.0)[0].data
    Array([[ 1., -1.]], dtype=float32)
    """
    options = (zero_centered_gamma, epsilon, "rmsnorm", quantizer, amax_scope, transpose_batch_sequence)
    y, _, rsigma = normalization_fwd(x, gamma, None, *options)
    return _with_amax(y, output_amax_when_no_scaling), rsigma


def _with_amax(y: Any, requested: bool) -> Any:
    """y with its amax if it is unquantised and the amax is requested."""
    if not requested or not isinstance(y, NoScaleTensor):
        return y
    return NoScaleTensor(y.data, jnp.max(jnp.abs(y.data)).astype(jnp.float32).reshape(1))


def layernorm_bwd(dz, x, mu, rsigma, gamma, beta, zero_centered_gamma: bool, epsilon: float):
    """Returns (dx, dgamma, dbeta) of LayerNorm.

    >>> layernorm_bwd(jnp.ones((1, 2)), jnp.array([[1.0, 3.0]]), None, None, jnp.ones(2), jnp.zeros(2), False, 0.0)[2]
    Array([1., 1.], dtype=float32)
    """
    return normalization_bwd(dz, x, mu, rsigma, gamma, beta, zero_centered_gamma, epsilon, "layernorm")


def rmsnorm_bwd(dz, x, rsigma, gamma, zero_centered_gamma: bool, epsilon: float):
    """Returns (dx, dgamma) of RMSNorm.

    >>> rmsnorm_bwd(jnp.ones((1, 2)), jnp.array([[2.0, -2.0]]), None, jnp.ones(2), False, 0.0)[1]
    Array([ 1., -1.], dtype=float32)
    """
    return normalization_bwd(dz, x, None, rsigma, gamma, None, zero_centered_gamma, epsilon, "rmsnorm")[:2]


__all__ = ["layernorm_bwd", "layernorm_fwd", "normalization_bwd", "normalization_fwd", "rmsnorm_bwd", "rmsnorm_fwd"]
