"""TransformerEngine's Flax linen modules, and its factories of quantised matmuls for the layers of Flax.

    with te.autocast(enabled=True, recipe=MXFP8BlockScaling()):
        layer = te.flax.LayerNormMLP(intermediate_dim=4096, activations=("silu", "linear"))
        variables = layer.init(key, x)

Attention and whole transformer layers are not provided; accessing one raises an error that names the replacement.
"""

from scaledot.compat.transformer_engine.flax import module, transformer
from scaledot.compat.transformer_engine.flax.module import (
    DenseGeneral,
    LayerNorm,
    LayerNormDenseGeneral,
    LayerNormMLP,
    make_dot_general_cls,
    make_grouped_dense_cls,
    wrap_function_in_te_state_module,
)
from scaledot.compat.transformer_engine.unsupported import module_getattr

__all__ = [
    "DenseGeneral",
    "LayerNorm",
    "LayerNormDenseGeneral",
    "LayerNormMLP",
    "make_dot_general_cls",
    "make_grouped_dense_cls",
    "module",
    "transformer",
    "wrap_function_in_te_state_module",
]
__getattr__ = module_getattr(__name__)
