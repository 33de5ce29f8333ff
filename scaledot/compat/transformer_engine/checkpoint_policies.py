"""TransformerEngine's names of the policies in `scaledot.checkpoint_policies`.

>>> import jax
>>> import jax.numpy as jnp
>>> from scaledot import train
>>> block = jax.checkpoint(lambda x, w: train.dense(x, w, recipe="mxfp8"), policy=checkpoint_dots_and_te_gemms)
>>> jax.grad(lambda w: block(jnp.ones((4, 32)), w).sum())(jnp.ones((32, 2))).shape
(32, 2)
"""

from scaledot.checkpoint_policies import (
    checkpoint_dots_and_quantized_gemms as checkpoint_dots_and_te_gemms,
)
from scaledot.checkpoint_policies import (
    dots_and_quantized_gemms_with_no_batch_dims as dots_and_te_gemms_with_no_batch_dims,
)
from scaledot.compat.transformer_engine.unsupported import module_getattr

__all__ = ["checkpoint_dots_and_te_gemms", "dots_and_te_gemms_with_no_batch_dims"]
__getattr__ = module_getattr(__name__)
