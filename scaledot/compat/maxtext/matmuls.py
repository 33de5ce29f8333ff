"""The linen modules that MaxText calls in place of `jax.lax.dot_general` and `jnp.einsum`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from scaledot import linen, train


class KeyOfStep(linen.Quantized):
    """Base class of matmuls under a recipe. folds_data: whether stochastic rounding draws keys with `key_of_step`."""

    folds_data: bool = False

    @nn.nowrap
    def under_recipe(self, function: Callable[..., Any], *args, **kwargs) -> jax.Array:
        if self.folds_data and self.recipe.stochastic and not self.is_initializing():
            key, x = self._key(), next(arg for arg in args if isinstance(arg, jax.Array))
            kwargs["key"] = None if key is None else key_of_step(key, x)
        return super().under_recipe(function, *args, **kwargs)


class DotGeneral(KeyOfStep, linen.DotGeneral):
    """`jax.lax.dot_general` under a recipe."""


class ExpertEinsum(KeyOfStep, linen.Einsum):
    """The einsum of all experts with all tokens, as MaxText calls it with `sparse_matmul=false`.

    Operands are converted to `dtype`, that of the result.
    """

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, subscripts, x, w):
        x, w = x.astype(self.dtype), w.astype(self.dtype)
        return self.under_recipe(train.einsum, subscripts, x, w, preferred_element_type=self.dtype)


def key_of_step(key: jax.Array, x: jax.Array) -> jax.Array:
    """The key with the bits of the sum of x's first row folded in.

    With `scan_layers=true` the RNG counters of MaxText's layers do not advance, so that every step would draw the same
    key, and stochastic rounding would round an element of the gradients in the same direction at every step. The
    activations differ from step to step, and are the same in a run that is resumed.
    """
    first_row = lax.stop_gradient(x).reshape(-1, x.shape[-1])[0]
    return jax.random.fold_in(key, lax.bitcast_convert_type(jnp.sum(first_row, dtype=jnp.float32), jnp.uint32))
