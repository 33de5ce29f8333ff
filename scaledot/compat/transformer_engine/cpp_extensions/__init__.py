"""The functions on tensors, where theirs has its compiled extensions; here they are calls of the core."""

from scaledot.compat.transformer_engine.cpp_extensions import quantization
from scaledot.compat.transformer_engine.cpp_extensions.gemm import (
    CollectiveOp,
    CollectiveOpSet,
    gemm,
    noop_collective_op_set,
)
from scaledot.compat.transformer_engine.cpp_extensions.quantization import (
    dequantize,
    grouped_quantize,
    quantize,
    quantize_dbias,
)
from scaledot.compat.transformer_engine.not_offered import refuse

__all__ = [
    "CollectiveOp",
    "CollectiveOpSet",
    "dequantize",
    "gemm",
    "grouped_quantize",
    "noop_collective_op_set",
    "quantization",
    "quantize",
    "quantize_dbias",
]
__getattr__ = refuse(__name__)
