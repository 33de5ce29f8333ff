"""The modules of transformer_engine.jax.flax.module, with the fields and parameter names of TransformerEngine."""

from scaledot.compat.transformer_engine.flax.base import TransformerEngineBase
from scaledot.compat.transformer_engine.flax.dense_general import DenseGeneral, LayerNormDenseGeneral
from scaledot.compat.transformer_engine.flax.hooks import (
    make_dot_general_cls,
    make_grouped_dense_cls,
    wrap_function_in_te_state_module,
)
from scaledot.compat.transformer_engine.flax.layernorm import LayerNorm
from scaledot.compat.transformer_engine.flax.layernorm_mlp import LayerNormMLP
from scaledot.compat.transformer_engine.unsupported import module_getattr

__all__ = [
    "DenseGeneral",
    "LayerNorm",
    "LayerNormDenseGeneral",
    "LayerNormMLP",
    "TransformerEngineBase",
    "make_dot_general_cls",
    "make_grouped_dense_cls",
    "wrap_function_in_te_state_module",
]
__getattr__ = module_getattr(__name__)
