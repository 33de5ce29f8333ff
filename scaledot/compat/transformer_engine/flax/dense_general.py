"""DenseGeneral and LayerNormDenseGeneral: TransformerEngine's linear layers."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from scaledot.compat.transformer_engine.dense import dense
from scaledot.compat.transformer_engine.flax.base import TransformerEngineBase
from scaledot.compat.transformer_engine.flax.parameters import (
    Axes,
    Initializer,
    as_tuple,
    kernel_init_or_default,
    low_rank_parameters,
    low_rank_product,
    norm_parameters,
    normalize_axes,
    operand_kernel,
    parameter,
    scale_init_or_default,
)
from scaledot.compat.transformer_engine.layernorm import layernorm
from scaledot.compat.transformer_engine.sharding import with_sharding_constraint_by_logical_axes


class DenseGeneral(TransformerEngineBase):
    """x · kernel + bias over one or several axes, under the recipe of `autocast`.

    features: the sizes of the output axes, which replace the contracted ones.
    axis: the contracted axes of x.
    kernel_axes, bias_axes, input_axes: logical axis names of kernel, bias and x, for sharding.
    enable_low_rank_adaptation: adds x · lora_a_kernel · lora_b_kernel, of rank `low_rank_adaptation_dim`, times
      `low_rank_adaptation_alpha` / rank unless alpha is None.
    dtype: that of the parameters; the result has that of x.
    quantization_checkpoint_name: the `jax.ad_checkpoint` name of the residuals.

    >>> y, variables = DenseGeneral((2, 4)).init_with_output(jax.random.key(0), jnp.ones((3, 32)))
    >>> y.shape, jax.tree.map(jnp.shape, nn.unbox(variables))
    ((3, 2, 4), {'params': {'bias': (2, 4), 'kernel': (32, 2, 4)}})
    """

    features: Iterable[int] | int
    kernel_init: Any = None
    kernel_axes: Axes = ()
    use_bias: bool = True
    bias_init: Initializer = nn.initializers.zeros
    bias_axes: Axes = ()
    enable_low_rank_adaptation: bool = False
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    axis: Iterable[int] | int = -1
    dtype: Any = jnp.float32
    input_axes: Axes = ()
    transpose_batch_sequence: bool = False
    quantization_checkpoint_name: str | None = None

    def __post_init__(self):
        self.kernel_init = kernel_init_or_default(self.kernel_init, self.dtype)
        super().__post_init__()

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        features, axis = as_tuple(self.features), normalize_axes(as_tuple(self.axis), inputs.ndim)
        shape = (*(inputs.shape[i] for i in axis), *features)
        if self.kernel_axes and len(self.kernel_axes) != len(shape):
            raise ValueError(f"`kernel_axes` {self.kernel_axes} must have one name for each axis of the kernel {shape}")
        kernel = parameter(self, "kernel", self.kernel_init, self.kernel_axes, shape, self.dtype)
        quantizers = self.generate_quantizer_set(quantization_checkpoint_name=self.quantization_checkpoint_name)
        bias = _bias(self, features, inputs.dtype)
        y = dense(
            inputs,
            operand_kernel(kernel, quantizers, inputs.dtype),
            bias,
            contracting_dims=(axis, tuple(range(len(axis)))),
            transpose_batch_sequence=self.transpose_batch_sequence,
            input_axes=self.input_axes,
            kernel_axes=self.kernel_axes,
            quantizer_set=quantizers,
        )
        return y + _low_rank(self, inputs, axis, features) if self.enable_low_rank_adaptation else y


class LayerNormDenseGeneral(TransformerEngineBase):
    """norm(x) · kernel + bias over the last axis, under the recipe of `autocast`; returns (result, norm(x) or None).

    Fields as in LayerNorm and DenseGeneral.

    enable_layernorm: False leaves out the normalisation and its parameters.
    return_layernorm_output: whether norm(x) is returned.
    depth_scaling: divides the result, unless None.

    >>> layer = LayerNormDenseGeneral(4, layernorm_type="rmsnorm", return_layernorm_output=True)
    >>> (y, normalised), variables = layer.init_with_output(jax.random.key(0), jnp.ones((3, 32)))
    >>> y.shape, normalised.shape, jax.tree.map(jnp.shape, nn.unbox(variables))
    ((3, 4), (3, 32), {'params': {'kernel': (32, 4), 'scale': (32,)}})
    """

    features: Iterable[int] | int
    enable_layernorm: bool = True
    layernorm_type: str = "layernorm"
    epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    scale_init: Any = None
    scale_axes: Axes = ("embed",)
    ln_bias_init: Initializer = nn.initializers.zeros
    ln_bias_axes: Axes = ("embed",)
    kernel_init: Any = None
    kernel_axes: Axes = ()
    use_bias: bool = False
    bias_init: Initializer = nn.initializers.zeros
    bias_axes: Axes = ()
    return_layernorm_output: bool = False
    enable_low_rank_adaptation: bool = False
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    axis: Iterable[int] | int = -1
    dtype: Any = jnp.float32
    layernorm_input_axes: Axes | None = None
    dot_input_axes: Axes | None = None
    depth_scaling: float | None = None
    transpose_batch_sequence: bool = False
    quantization_checkpoint_name: str | None = None

    def __post_init__(self):
        self.kernel_init = kernel_init_or_default(self.kernel_init, self.dtype)
        self.scale_init = scale_init_or_default(self.scale_init, self.zero_centered_gamma)
        super().__post_init__()

    @nn.compact
    def __call__(self, inputs: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        check_last_axis(self.axis)
        features, axis = as_tuple(self.features), (inputs.ndim - 1,)
        quantizers = self.generate_quantizer_set(quantization_checkpoint_name=self.quantization_checkpoint_name)
        x = normalized_if_enabled(self, inputs)
        shape = (inputs.shape[-1], *features)
        kernel = parameter(self, "kernel", self.kernel_init, self.kernel_axes, shape, self.dtype)
        lora = _low_rank(self, x, axis, features) if self.enable_low_rank_adaptation else None
        y = dense(
            x,
            operand_kernel(kernel, quantizers, inputs.dtype),
            _bias(self, features, inputs.dtype),
            contracting_dims=(axis, (0,)),
            transpose_batch_sequence=self.transpose_batch_sequence,
            input_axes=self.dot_input_axes,
            kernel_axes=self.kernel_axes,
            quantizer_set=quantizers,
        )
        y = y if lora is None else y + lora
        y = y if self.depth_scaling is None else y / self.depth_scaling
        return y, x if self.return_layernorm_output else None


def check_last_axis(axis: Iterable[int] | int) -> None:
    if as_tuple(axis) != (-1,):
        raise ValueError(f"`axis` must be -1, not {axis!r}; use LayerNorm and DenseGeneral for other axes")


def normalized_if_enabled(module, x: jax.Array) -> jax.Array:
    """The normalised input of a module with the fields of LayerNormDenseGeneral."""
    if not module.enable_layernorm:
        return x
    x = with_sharding_constraint_by_logical_axes(x, module.layernorm_input_axes)
    gamma, beta = norm_parameters(module, x, module.ln_bias_init, module.ln_bias_axes)
    return layernorm(x, gamma, beta, module.layernorm_type, module.zero_centered_gamma, module.epsilon)


def _bias(module, features: tuple[int, ...], dtype) -> jax.Array | None:
    if not module.use_bias:
        return None
    return parameter(module, "bias", module.bias_init, module.bias_axes, features, module.dtype).astype(dtype)


def _low_rank(module, x: jax.Array, axis: tuple[int, ...], features: tuple[int, ...]) -> jax.Array:
    sizes = tuple(x.shape[i] for i in axis)
    a, b = low_rank_parameters(module, "", sizes, features, x.dtype)
    return low_rank_product(x, axis, features, a, b, module.low_rank_adaptation_alpha)
