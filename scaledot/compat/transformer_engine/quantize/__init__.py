"""Quantizers, scaling modes and quantised tensors, under the names of transformer_engine.jax.quantize."""

from scaledot.compat.transformer_engine.quantize import device_utils, helper, tensor
from scaledot.compat.transformer_engine.quantize.device_utils import (
    get_device_compute_capability,
    is_fp8_gemm_with_all_layouts_supported,
)
from scaledot.compat.transformer_engine.quantize.helper import (
    NVTE_FP8_COLLECTION_NAME,
    TensorSource,
    autocast,
    fp8_autocast,
    get_global_quantize_recipe,
    get_quantization_recipe,
    get_quantize_config_with_recipe,
    get_supported_quantization_recipes,
    get_supported_scaling_modes,
    is_fp8_available,
    is_quantize_recipe_supported,
    update_collections,
)
from scaledot.compat.transformer_engine.quantize.metadata import QuantizeMeta, QuantizeMetaSet
from scaledot.compat.transformer_engine.quantize.quantizer_class import Quantizer
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
    "NVTE_FP8_COLLECTION_NAME",
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
    "TensorSource",
    "TensorUsage",
    "autocast",
    "device_utils",
    "fp8_autocast",
    "get_device_compute_capability",
    "get_global_quantize_recipe",
    "get_quantization_recipe",
    "get_quantize_config_with_recipe",
    "get_supported_quantization_recipes",
    "get_supported_scaling_modes",
    "helper",
    "is_fp8_available",
    "is_fp8_gemm_with_all_layouts_supported",
    "is_quantize_recipe_supported",
    "is_scaling_mode_supported",
    "noop_quantizer_set",
    "tensor",
    "update_collections",
    "with_sharding_constraint_by_logical_axes",
]
__getattr__ = module_getattr(__name__)
