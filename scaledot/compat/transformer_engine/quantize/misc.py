"""QuantizeLayout, under the module name that TransformerEngine has for it."""

from scaledot.compat.transformer_engine.quantize.scaling_modes import QuantizeLayout
from scaledot.compat.transformer_engine.unsupported import module_getattr

__all__ = ["QuantizeLayout"]
__getattr__ = module_getattr(__name__)
