"""TransformerEngine's Flax linen modules, and its factories of quantised matmuls for the layers of Flax."""

from scaledot.compat.transformer_engine.flax import module
from scaledot.compat.transformer_engine.flax.module import make_dot_general_cls, make_grouped_dense_cls
from scaledot.compat.transformer_engine.unsupported import module_getattr

__all__ = ["make_dot_general_cls", "make_grouped_dense_cls", "module"]
__getattr__ = module_getattr(__name__)
