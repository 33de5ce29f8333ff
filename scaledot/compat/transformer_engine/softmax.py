"""The names of transformer_engine.jax.softmax, none of which is provided: errors name the replacement."""

from scaledot.compat.transformer_engine.unsupported import SOFTMAX, module_getattr

__getattr__ = module_getattr(__name__, others=SOFTMAX)
