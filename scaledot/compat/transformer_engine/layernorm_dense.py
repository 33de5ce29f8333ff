"""layernorm_dense: a normalisation followed by a quantised matmul."""

import jax

from scaledot.compat.transformer_engine.dense import dense
from scaledot.compat.transformer_engine.layernorm import layernorm
from scaledot.compat.transformer_engine.quantize.quantizer_set import QuantizerSet, noop_quantizer_set
from scaledot.compat.transformer_engine.sharding import Names, with_sharding_constraint_by_logical_axes


def layernorm_dense(
    x,
    kernel,
    gamma,
    beta,
    bias=None,
    norm_type: str = "layernorm",
    zero_centered_gamma: bool = False,
    epsilon: float = 1e-6,
    transpose_batch_sequence: bool = False,
    layernorm_input_axes: Names = None,
    dot_input_axes: Names = None,
    kernel_axes: Names = None,
    quantizer_set: QuantizerSet = noop_quantizer_set,
) -> jax.Array:
    """Returns norm(x) · kernel + bias for x (..., k), kernel (k, ...), gamma and beta (k,); beta is None for RMSNorm.

    Under jit, XLA fuses the normalisation into the quantisation of the matmul's operand.

    >>> import jax.numpy as jnp
    >>> x, kernel = jnp.array([[1.0, 3.0]]), jnp.eye(2)
    >>> layernorm_dense(x, kernel, jnp.ones(2), jnp.zeros(2), epsilon=0.0)
    Array([[-1.,  1.]], dtype=float32)
    """
    x = with_sharding_constraint_by_logical_axes(x, layernorm_input_axes)
    y = layernorm(x, gamma, beta, norm_type, zero_centered_gamma, epsilon)
    return dense(
        y,
        kernel if quantizer_set.core is not None else kernel.astype(y.dtype),
        bias,
        contracting_dims=((-1,), (0,)),
        transpose_batch_sequence=transpose_batch_sequence,
        input_axes=dot_input_axes,
        kernel_axes=kernel_axes,
        quantizer_set=quantizer_set,
    )


__all__ = ["layernorm_dense"]
