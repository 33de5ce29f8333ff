"""Quantizers and their factory, under the module name that TransformerEngine has for them."""

from scaledot.compat.transformer_engine.quantize.quantizer_class import Quantizer
from scaledot.compat.transformer_engine.quantize.quantizer_factory import QuantizerFactory
from scaledot.compat.transformer_engine.quantize.quantizer_set import QuantizerSet, noop_quantizer_set
from scaledot.compat.transformer_engine.unsupported import module_getattr

__all__ = ["Quantizer", "QuantizerFactory", "QuantizerSet", "noop_quantizer_set"]
__getattr__ = module_getattr(__name__)
