"""The modules of transformer_engine.jax.flax.module, with the fields and parameter names of TransformerEngine."""

from scaledot.compat.transformer_engine.flax.base import TransformerEngineBase
from scaledot.compat.transformer_engine.flax.hooks import make_dot_general_cls, make_grouped_dense_cls
from scaledot.compat.transformer_engine.unsupported import module_getattr

__all__ = ["TransformerEngineBase", "make_dot_general_cls", "make_grouped_dense_cls"]
__getattr__ = module_getattr(__name__)
