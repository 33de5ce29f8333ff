"""LayerNormMLP: TransformerEngine's linen module of a normalisation and a multi-layer perceptron."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from scaledot.compat.transformer_engine.activation import activation
from scaledot.compat.transformer_engine.cpp_extensions.activation import ActivationParams
from scaledot.compat.transformer_engine.dense import dense
from scaledot.compat.transformer_engine.flax.base import TransformerEngineBase
from scaledot.compat.transformer_engine.flax.dense_general import check_last_axis, normalized_if_enabled
from scaledot.compat.transformer_engine.flax.parameters import (
    Axes,
    Initializer,
    kernel_init_or_default,
    low_rank_parameters,
    low_rank_product,
    operand_kernel,
    parameter,
    scale_init_or_default,
)
from scaledot.compat.transformer_engine.layernorm_mlp import dot_1_output_axes


class LayerNormMLP(TransformerEngineBase):
    """activation(norm(x) · wi_kernel + wi_bias) · wo_kernel + wo_bias, under the recipe of `autocast`.

    Returns (result, norm(x) or None). Fields as in LayerNormDenseGeneral, and:

    intermediate_dim: the size between the two matmuls; `wi_kernel` has the shape (hidden, functions, intermediate_dim).
    activations: the function of each slice of the first result, which are multiplied: ("gelu",), or ("silu", "linear")
      for SwiGLU. A "linear" in front is moved to the end.
    activation_params: the constants of ("clamped_silu", "clamped_linear").
    intermediate_dropout_rate, intermediate_dropout_rng_name, intermediate_hidden_dropout_dims: dropout after the
      activation.
    ffn1_ckpt_name, ffn2_ckpt_name: the `jax.ad_checkpoint` names of the results of the two matmuls.

    >>> layer = LayerNormMLP(16, activations=("silu", "linear"))
    >>> (y, _), variables = layer.init_with_output(jax.random.key(0), jnp.ones((3, 32)))
    >>> {name: leaf.shape for name, leaf in nn.unbox(variables)["params"].items()}
    {'ln_bias': (32,), 'scale': (32,), 'wi_kernel': (32, 2, 16), 'wo_kernel': (16, 32)}
    """

    intermediate_dim: int = 2048
    enable_layernorm: bool = True
    layernorm_type: str = "layernorm"
    epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    scale_init: Any = None
    scale_axes: Axes = ("embed",)
    ln_bias_init: Initializer = nn.initializers.zeros
    ln_bias_axes: Axes = ("embed",)
    kernel_init: Any = None
    kernel_axes_1: Axes = ("embed", "act", "mlp")
    kernel_axes_2: Axes = ("mlp", "embed")
    use_bias: bool = False
    bias_init: Initializer = nn.initializers.zeros
    bias_axes_1: Axes = ("act", "mlp")
    bias_axes_2: Axes = ("embed",)
    return_layernorm_output: bool = False
    activations: Sequence[str | Callable] = ("gelu",)
    activation_params: Mapping[str, float] | None = None
    intermediate_dropout_rng_name: str = "dropout"
    intermediate_dropout_rate: float = 0.0
    intermediate_hidden_dropout_dims: Sequence[int] = ()
    enable_low_rank_adaptation: bool = False
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    axis: Iterable[int] | int = -1
    dtype: Any = jnp.float32
    layernorm_input_axes: Axes | None = None
    dot_1_input_axes: Axes | None = None
    dot_2_input_axes: Axes | None = None
    ffn1_ckpt_name: str = "ffn1"
    ffn2_ckpt_name: str = "ffn2"
    transpose_batch_sequence: bool = False
    quantization_checkpoint_name: str | None = None

    def __post_init__(self):
        self.kernel_init = kernel_init_or_default(self.kernel_init, self.dtype)
        self.scale_init = scale_init_or_default(self.scale_init, self.zero_centered_gamma)
        super().__post_init__()

    @nn.compact
    def __call__(self, inputs: jax.Array, deterministic: bool = False) -> tuple[jax.Array, jax.Array | None]:
        check_last_axis(self.axis)
        quantizers = [
            self.generate_quantizer_set(postfix, quantization_checkpoint_name=self.quantization_checkpoint_name)
            for postfix in ("_0", "_1")
        ]
        activations = _ordered(self.activations)
        x = normalized_if_enabled(self, inputs)
        kernels = self._kernels(inputs.shape[-1], len(activations))
        wi, wo = (operand_kernel(k, q, inputs.dtype) for k, q in zip(kernels, quantizers, strict=True))
        wi_bias, wo_bias = self._biases(inputs.shape[-1], len(activations), inputs.dtype)
        shared: dict[str, Any] = {
            "contracting_dims": ((-1,), (0,)),
            "transpose_batch_sequence": self.transpose_batch_sequence,
        }

        y = dense(
            x,
            wi,
            wi_bias,
            input_axes=self.dot_1_input_axes,
            kernel_axes=self.kernel_axes_1,
            output_axes=dot_1_output_axes(self.dot_2_input_axes),
            quantizer_set=quantizers[0],
            **shared,
        )
        y = checkpoint_name(self._adapted(y, "wi_", x, (len(activations), self.intermediate_dim)), self.ffn1_ckpt_name)
        params = ActivationParams.create(activations, **self.activation_params) if self.activation_params else None
        z = self._dropout(activation(y, activations, act_params=params), deterministic)
        y = dense(
            z,
            wo,
            wo_bias,
            input_axes=self.dot_2_input_axes,
            kernel_axes=self.kernel_axes_2,
            quantizer_set=quantizers[1],
            **shared,
        )
        y = checkpoint_name(self._adapted(y, "wo_", z, (inputs.shape[-1],)), self.ffn2_ckpt_name)
        return y, x if self.return_layernorm_output else None

    @nn.nowrap
    def _kernels(self, hidden: int, functions: int) -> tuple[jax.Array, jax.Array]:
        """The two kernels; each function's slice of the first is initialised by a key of its own."""

        def stacked_init(key, shape, dtype):
            slices = []
            for _ in range(functions):
                key, slice_key = jax.random.split(key)
                slices.append(self.kernel_init(slice_key, shape, dtype))
            return jnp.stack(slices, axis=-2)

        first, second = (hidden, self.intermediate_dim), (self.intermediate_dim, hidden)
        return (
            parameter(self, "wi_kernel", stacked_init, self.kernel_axes_1, first, self.dtype),
            parameter(self, "wo_kernel", self.kernel_init, self.kernel_axes_2, second, self.dtype),
        )

    @nn.nowrap
    def _biases(self, hidden: int, functions: int, dtype) -> tuple[jax.Array | None, jax.Array | None]:
        if not self.use_bias:
            return None, None
        first = parameter(
            self, "wi_bias", self.bias_init, self.bias_axes_1, (functions, self.intermediate_dim), self.dtype
        )
        second = parameter(self, "wo_bias", self.bias_init, self.bias_axes_2, (hidden,), self.dtype)
        return first.astype(dtype), second.astype(dtype)

    @nn.nowrap
    def _adapted(self, y: jax.Array, prefix: str, x: jax.Array, features: tuple[int, ...]) -> jax.Array:
        """The result y of a matmul of x, plus its low-rank adaptation if enabled."""
        if not self.enable_low_rank_adaptation:
            return y
        a, b = low_rank_parameters(self, prefix, (x.shape[-1],), features, x.dtype)
        return y + low_rank_product(x, (x.ndim - 1,), features, a, b, self.low_rank_adaptation_alpha)

    @nn.nowrap
    def _dropout(self, z: jax.Array, deterministic: bool) -> jax.Array:
        dropout = nn.Dropout(
            rate=self.intermediate_dropout_rate,
            broadcast_dims=self.intermediate_hidden_dropout_dims,
            rng_collection=self.intermediate_dropout_rng_name,
        )
        return dropout(z, deterministic=deterministic)


def _ordered(activations: Sequence[str | Callable]) -> tuple[str | Callable, ...]:
    """The activations by lower-case names, gated function first."""
    names = tuple(a.lower() if isinstance(a, str) else a for a in activations)
    return names[::-1] if names[0] in ("linear", "clamped_linear") else names
