"""Functions on quantised tensors. TransformerEngine implements them in C++; here they call scaledot's JAX code."""

from scaledot.compat.transformer_engine.cpp_extensions import activation, normalization, quantization
from scaledot.compat.transformer_engine.cpp_extensions.activation import act_lu, dact_lu, quantize_dact_dbias
from scaledot.compat.transformer_engine.cpp_extensions.gemm import (
    CollectiveOp,
    CollectiveOpSet,
    collective_gemm_bootstrap,
    gemm,
    grouped_gemm,
    grouped_gemm_copy_group_sizes,
    noop_collective_op_set,
)
from scaledot.compat.transformer_engine.cpp_extensions.normalization import (
    layernorm_bwd,
    layernorm_fwd,
    normalization_bwd,
    normalization_fwd,
    rmsnorm_bwd,
    rmsnorm_fwd,
)
from scaledot.compat.transformer_engine.cpp_extensions.quantization import (
    dequantize,
    grouped_dbias,
    grouped_quantize,
    quantize,
    quantize_dbias,
)
from scaledot.compat.transformer_engine.unsupported import module_getattr

__all__ = [
    "CollectiveOp",
    "CollectiveOpSet",
    "act_lu",
    "activation",
    "collective_gemm_bootstrap",
    "dact_lu",
    "dequantize",
    "gemm",
    "grouped_dbias",
    "grouped_gemm",
    "grouped_gemm_copy_group_sizes",
    "grouped_quantize",
    "layernorm_bwd",
    "layernorm_fwd",
    "noop_collective_op_set",
    "normalization",
    "normalization_bwd",
    "normalization_fwd",
    "quantization",
    "quantize",
    "quantize_dact_dbias",
    "quantize_dbias",
    "rmsnorm_bwd",
    "rmsnorm_fwd",
]
__getattr__ = module_getattr(__name__)
