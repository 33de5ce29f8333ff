"""Functions on quantised tensors. TransformerEngine implements them in C++; here they call scaledot's JAX code."""

from scaledot.compat.transformer_engine.cpp_extensions import quantization
from scaledot.compat.transformer_engine.cpp_extensions.gemm import (
    CollectiveOp,
    CollectiveOpSet,
    gemm,
    grouped_gemm,
    grouped_gemm_copy_group_sizes,
    noop_collective_op_set,
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
    "dequantize",
    "gemm",
    "grouped_dbias",
    "grouped_gemm",
    "grouped_gemm_copy_group_sizes",
    "grouped_quantize",
    "noop_collective_op_set",
    "quantization",
    "quantize",
    "quantize_dbias",
]
__getattr__ = module_getattr(__name__)
