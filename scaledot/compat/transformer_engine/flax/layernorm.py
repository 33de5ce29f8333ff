"""LayerNorm: TransformerEngine's linen module of LayerNorm and RMSNorm."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from scaledot.compat.transformer_engine.flax.parameters import Axes, Initializer, norm_parameters, scale_init_or_default
from scaledot.compat.transformer_engine.layernorm import layernorm


class LayerNorm(nn.Module):
    """LayerNorm or RMSNorm over the last axis, with the parameters `scale` and, for LayerNorm, `ln_bias`.

    layernorm_type: "layernorm" or "rmsnorm".
    zero_centered_gamma: multiplies by 1 + scale; the default `scale_init` is then zeros instead of ones.
    dtype: that of the parameters.

    >>> layer = LayerNorm(layernorm_type="rmsnorm", epsilon=0.0)
    >>> layer.init_with_output(jax.random.key(0), jnp.array([[2.0, -2.0]]))[0]
    Array([[ 1., -1.]], dtype=float32)
    """

    epsilon: float = 1e-6
    layernorm_type: str = "layernorm"
    zero_centered_gamma: bool = False
    scale_init: Any = None
    scale_axes: Axes = ("embed",)
    bias_init: Initializer = nn.initializers.zeros
    bias_axes: Axes = ("embed",)
    dtype: Any = jnp.float32

    def __post_init__(self):
        self.scale_init = scale_init_or_default(self.scale_init, self.zero_centered_gamma)
        super().__post_init__()

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        gamma, beta = norm_parameters(self, x, self.bias_init, self.bias_axes)
        return layernorm(x, gamma, beta, self.layernorm_type, self.zero_centered_gamma, self.epsilon)
