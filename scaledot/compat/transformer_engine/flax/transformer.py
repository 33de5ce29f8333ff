"""The names of transformer_engine.jax.flax.transformer, none of which is provided: errors name the replacements."""

from scaledot.compat.transformer_engine.unsupported import LAYER, module_getattr

__getattr__ = module_getattr(__name__, others=LAYER)
