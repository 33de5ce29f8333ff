"""Tensor classes and their factory, under the module name that TransformerEngine has for them."""

from scaledot.compat.transformer_engine.quantize.grouped_tensors import GroupedNoScaleTensor, GroupedScaledTensor1x
from scaledot.compat.transformer_engine.quantize.scaling_modes import TensorUsage
from scaledot.compat.transformer_engine.quantize.tensor_classes import (
    AbstractBaseTensor,
    AbstractBaseTensor1x,
    NoScaleTensor,
    ScaledTensor,
    ScaledTensor1x,
    ScaledTensor2x,
)
from scaledot.compat.transformer_engine.quantize.tensor_factory import ScaledTensorFactory
from scaledot.compat.transformer_engine.sharding import with_sharding_constraint_by_logical_axes
from scaledot.compat.transformer_engine.unsupported import module_getattr

__all__ = [
    "AbstractBaseTensor",
    "AbstractBaseTensor1x",
    "GroupedNoScaleTensor",
    "GroupedScaledTensor1x",
    "NoScaleTensor",
    "ScaledTensor",
    "ScaledTensor1x",
    "ScaledTensor2x",
    "ScaledTensorFactory",
    "TensorUsage",
    "with_sharding_constraint_by_logical_axes",
]
__getattr__ = module_getattr(__name__)
