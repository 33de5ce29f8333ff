"""Quantizers, scaling modes and quantised tensors, under the names of transformer_engine.jax.quantize."""

from scaledot.compat.transformer_engine.quantize import tensor
from scaledot.compat.transformer_engine.quantize.metadata import QuantizeMeta, QuantizeMetaSet
from scaledot.compat.transformer_engine.quantize.quantizer import Quantizer
from scaledot.compat.transformer_engine.quantize.quantizer_factory import QuantizerFactory
from scaledot.compat.transformer_engine.quantize.quantizer_set import QuantizerSet, noop_quantizer_set
from scaledot.compat.transformer_engine.quantize.scaling_modes import (
    QuantizeLayout,
    ScalingMode,
    TensorUsage,
    is_scaling_mode_supported,
)
from scaledot.compat.transformer_engine.quantize.tensor import (
    AbstractBaseTensor,
    AbstractBaseTensor1x,
    GroupedNoScaleTensor,
    GroupedScaledTensor1x,
    NoScaleTensor,
    ScaledTensor,
    ScaledTensor1x,
    ScaledTensor2x,
    ScaledTensorFactory,
)
from scaledot.compat.transformer_engine.sharding import with_sharding_constraint_by_logical_axes
from scaledot.compat.transformer_engine.unsupported import module_getattr

__all__ = [
    "AbstractBaseTensor",
    "AbstractBaseTensor1x",
    "GroupedNoScaleTensor",
    "GroupedScaledTensor1x",
    "NoScaleTensor",
    "QuantizeLayout",
    "QuantizeMeta",
    "QuantizeMetaSet",
    "Quantizer",
    "QuantizerFactory",
    "QuantizerSet",
    "ScaledTensor",
    "ScaledTensor1x",
    "ScaledTensor2x",
    "ScaledTensorFactory",
    "ScalingMode",
    "TensorUsage",
    "is_scaling_mode_supported",
    "noop_quantizer_set",
    "tensor",
    "with_sharding_constraint_by_logical_axes",
]
__getattr__ = module_getattr(__name__)
