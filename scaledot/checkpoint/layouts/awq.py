"""AWQ, version "gemm": `X.qweight` (inputs, outputs / 8), `X.qzeros` (groups, outputs / 8), `X.scales`.

A word holds the unsigned 4-bit codes of eight outputs, in an order that suits the CUDA kernel. Other versions pack
words in other ways and are refused.
"""

from scaledot.array import ScaledArray
from scaledot.checkpoint import lazy
from scaledot.checkpoint.layouts.building import format_of, scaled
from scaledot.checkpoint.layouts.settings import group_size, setting
from scaledot.checkpoint.lazy import LazyArray
from scaledot.checkpoint.source import Source
from scaledot.checkpoint.tensors import Tensors

RESERVED = (".qweight", ".qzeros", ".scales")
_SLOT_OF_OUTPUT = (0, 4, 1, 5, 2, 6, 3, 7)  # within the eight outputs of a word, slot 0 in its lowest bits


def matches(source: Source) -> bool:
    return source.quantization.get("quant_method") == "awq"


def weights(tensors: Tensors) -> dict[str, ScaledArray]:
    source = tensors.source
    setting(source, "bits", "w_bit", among=(4,), default=4)
    setting(source, "version", "format", among=("gemm", "GEMM"), default="gemm")
    setting(source, "zero_point", among=(True,), default=True)
    group = group_size(source, "group_size", "q_group_size")
    return {f"{module}.weight": _weight(tensors, module, group) for module in tensors.ending(".qweight")}


def _weight(tensors: Tensors, module: str, group: int) -> ScaledArray:
    name = f"{module}.qweight"
    words = tensors.take(name, "I32")
    if words.ndim != 2 or not words.size:
        tensors.fail(name, f"the shape is {list(words.shape)}; expected [inputs, outputs / 8]")
    inputs, outputs = words.shape[0], 8 * words.shape[1]
    group = inputs if group == -1 else group
    groups = -(-inputs // group)
    scale = tensors.take(f"{module}.scales", "F16", "BF16", "F32", shape=(groups, outputs), required_by=name)
    zeros = tensors.take(f"{module}.qzeros", "I32", shape=(groups, words.shape[1]), required_by=name)
    format = format_of("int4", scale.dtype)
    codes, zero = _unpacked(words, format.code_dtype).T, _unpacked(zeros, format.code_dtype).T
    return scaled(codes, scale.T, format, (group,), tensors.model_dtype(), zero=zero)


def _unpacked(words: LazyArray, dtype) -> LazyArray:
    return lazy.reorder_last(lazy.bit_stream(words, 4, 8 * words.shape[1], dtype, offset=-8), _SLOT_OF_OUTPUT)
