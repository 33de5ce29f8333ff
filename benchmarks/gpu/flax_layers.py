"""A step of Flax's nn.Dense with a hook for its product; loaded where Flax is installed."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn


class Layer(nn.Module):
    """The tutorial's layer: bfloat16 arithmetic on a float32 kernel."""

    features: int
    product: Any = None

    @nn.compact
    def __call__(self, x):
        hook = {} if self.product is None else {"dot_general": self.product()}
        return nn.Dense(self.features, use_bias=False, dtype=jnp.bfloat16, name="dense", **hook)(x)


def dense_step(features: int, product: Any, kernel: jax.Array) -> tuple[Any, Any]:
    """step(variables, x, dy) -> loss and gradients, and the variables around the given kernel."""
    layer = Layer(features, product)
    variables = layer.init(jax.random.key(0), jnp.ones((1, kernel.shape[0]), jnp.bfloat16))
    variables = {**variables, "params": {"dense": {"kernel": kernel}}}

    def step(variables, x, dy):
        def loss(variables, x):
            y: Any = layer.apply(variables, x)
            return jnp.vdot(y, dy)

        return jax.value_and_grad(loss, argnums=(0, 1))(variables, x)

    return step, variables
