"""layernorm_mlp: a normalisation followed by a multi-layer perceptron of two quantised matmuls."""

from collections.abc import Mapping, Sequence

import jax
from jax.ad_checkpoint import checkpoint_name

from scaledot.compat.transformer_engine.activation import activation
from scaledot.compat.transformer_engine.cpp_extensions.activation import Activation, ActivationParams
from scaledot.compat.transformer_engine.cpp_extensions.gemm import CollectiveOpSet, noop_collective_op_set
from scaledot.compat.transformer_engine.dense import dense
from scaledot.compat.transformer_engine.layernorm import layernorm
from scaledot.compat.transformer_engine.quantize.quantizer_set import QuantizerSet, noop_quantizer_set
from scaledot.compat.transformer_engine.sharding import Names, with_sharding_constraint_by_logical_axes


def layernorm_mlp(
    x,
    gamma,
    beta,
    kernels: Sequence[jax.Array],
    biases: Sequence[jax.Array | None],
    norm_type: str,
    zero_centered_gamma: bool = False,
    epsilon: float = 1e-6,
    transpose_batch_sequence: bool = False,
    norm_input_axes: Names = None,
    dot_1_input_axes: Names = None,
    dot_2_input_axes: Names = None,
    kernel_1_axes: Names = None,
    kernel_2_axes: Names = None,
    ffn1_ckpt_name: str = "ffn1",
    ffn2_ckpt_name: str = "ffn2",
    activation_type: Sequence[Activation] = ("gelu",),
    activation_params: Mapping[str, float] | None = None,
    collective_op_sets: tuple[CollectiveOpSet, CollectiveOpSet] = (noop_collective_op_set, noop_collective_op_set),
    quantizer_sets: tuple[QuantizerSet, QuantizerSet] = (noop_quantizer_set, noop_quantizer_set),
) -> jax.Array:
    """Returns activation(norm(x) · kernels[0] + biases[0]) · kernels[1] + biases[1], of the shape of x (..., hidden).

    Args:
      kernels: (hidden, functions, intermediate), with one function for each of `activation_type`, and (intermediate,
        hidden).
      biases: (functions, intermediate) and (hidden,), or None.
      ffn1_ckpt_name, ffn2_ckpt_name: the `jax.ad_checkpoint` names of the results of the two matmuls.
      activation_params: the constants of a clamped SwiGLU, see ClampedSwigluParams.
      quantizer_sets: those of the two matmuls. With delayed scaling, each has the history of its own gradient;
        TransformerEngine swaps the two.

    >>> import jax.numpy as jnp
    >>> x, kernels = jnp.array([[1.0, 3.0]]), (jnp.eye(2)[:, None], jnp.eye(2))
    >>> layernorm_mlp(x, jnp.ones(2), jnp.zeros(2), kernels, (None, None), "layernorm", activation_type=("relu",))
    Array([[0.       , 0.9999995]], dtype=float32)
    """
    kernel_1, kernel_2 = (
        kernel if quantizers.core is not None else kernel.astype(x.dtype)
        for kernel, quantizers in zip(kernels, quantizer_sets, strict=True)
    )
    if kernel_1.ndim != 3 or kernel_2.ndim != 2 or kernel_1.shape[1] != len(activation_type):
        raise ValueError(
            f"`kernels` must have shapes (hidden, {len(activation_type)}, intermediate) and (intermediate, hidden), "
            f"not {kernel_1.shape} and {kernel_2.shape}"
        )
    shared = {"contracting_dims": ((-1,), (0,)), "transpose_batch_sequence": transpose_batch_sequence}
    x = with_sharding_constraint_by_logical_axes(x, norm_input_axes)
    y = layernorm(x, gamma, beta, norm_type, zero_centered_gamma, epsilon)
    y = dense(
        y,
        kernel_1,
        biases[0],
        input_axes=dot_1_input_axes,
        kernel_axes=kernel_1_axes,
        output_axes=dot_1_output_axes(dot_2_input_axes),
        collective_op_set=collective_op_sets[0],
        quantizer_set=quantizer_sets[0],
        **shared,
    )
    y = checkpoint_name(y, ffn1_ckpt_name)
    params = ActivationParams.create(activation_type, **activation_params) if activation_params else None
    y = activation(y, activation_type, act_params=params)
    y = dense(
        y,
        kernel_2,
        biases[1],
        input_axes=dot_2_input_axes,
        kernel_axes=kernel_2_axes,
        output_axes=dot_1_input_axes,
        collective_op_set=collective_op_sets[1],
        quantizer_set=quantizer_sets[1],
        **shared,
    )
    return checkpoint_name(y, ffn2_ckpt_name)


def dot_1_output_axes(dot_2_input_axes: Names) -> Names:
    """The logical axes of the first matmul's result, which has one more axis than its activation.

    >>> dot_1_output_axes(("batch", "mlp"))
    ('batch', None, 'mlp')
    """
    return None if not dot_2_input_axes else (*dot_2_input_axes[:-1], None, dot_2_input_axes[-1])


__all__ = ["layernorm_mlp"]
