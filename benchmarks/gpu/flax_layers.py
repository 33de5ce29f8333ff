"""A training step of Flax's nn.Dense with a replaceable dot_general; imported only if Flax is installed."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn


class Layer(nn.Module):
    """The layer of TransformerEngine's tutorial: bfloat16 computation with a float32 weight."""

    features: int
    dot_general_cls: Any = None

    @nn.compact
    def __call__(self, x):
        dot_general = {} if self.dot_general_cls is None else {"dot_general": self.dot_general_cls()}
        return nn.Dense(self.features, use_bias=False, dtype=jnp.bfloat16, name="dense", **dot_general)(x)


def dense_step(features: int, dot_general_cls: Any, w: jax.Array) -> tuple[Any, Any]:
    """Returns step(variables, x, dy) -> (loss, gradients), and variables whose `kernel` parameter is w."""
    layer = Layer(features, dot_general_cls)
    variables = layer.init(jax.random.key(0), jnp.ones((1, w.shape[0]), jnp.bfloat16))
    variables = {**variables, "params": {"dense": {"kernel": w}}}

    def step(variables, x, dy):
        def loss(variables, x):
            y: Any = layer.apply(variables, x)
            return jnp.vdot(y, dy)

        return jax.value_and_grad(loss, argnums=(0, 1))(variables, x)

    return step, variables
