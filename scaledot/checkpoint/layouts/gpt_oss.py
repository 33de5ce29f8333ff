"""gpt-oss: MXFP4 experts, as (experts, rows, groups, 16) bytes of two E2M1 codes and (experts, rows, groups) exponents.

Hugging Face's files have `X_blocks` and `X_scales`, OpenAI's original files `X.blocks` and `X.scales`; both give the
weight `X` of shape (experts, outputs, inputs). The `transformers` package returns it transposed, as (experts, inputs,
outputs). The outputs of `gate_up_proj` (`mlp1_weight`) are interleaved: even rows belong to the gate, odd ones to `up`.
"""

import ml_dtypes

from scaledot.array import ScaledArray
from scaledot.checkpoint import lazy
from scaledot.checkpoint.layouts.building import as_e8m0, scaled
from scaledot.checkpoint.source import Source
from scaledot.checkpoint.tensors import Tensors
from scaledot.formats import FORMATS

RESERVED = ("_blocks", "_scales", ".blocks", ".scales")
_SEPARATORS = ("_", ".")
_BLOCK = 32


def matches(source: Source) -> bool:
    if source.quantization:
        return source.quantization.get("quant_method") == "mxfp4"
    return any(
        name.endswith(("_blocks", ".blocks")) and tensor.dtype == "U8" and f"{name[:-6]}scales" in source.tensors
        for name, tensor in source.tensors.items()
    )


def weights(tensors: Tensors) -> dict[str, ScaledArray]:
    return {
        name: _weight(tensors, f"{name}{separator}blocks", f"{name}{separator}scales")
        for separator in _SEPARATORS
        for name in tensors.ending(f"{separator}blocks")
    }


def _weight(tensors: Tensors, blocks_name: str, scales_name: str) -> ScaledArray:
    packed = tensors.take(blocks_name, "U8")
    if packed.ndim < 3 or packed.shape[-1] != _BLOCK // 2:
        tensors.fail(blocks_name, f"the shape is {list(packed.shape)}; expected [..., rows, groups, {_BLOCK // 2}]")
    scale = as_e8m0(tensors.take(scales_name, "U8", "F8_E8M0", shape=packed.shape[:-1], required_by=blocks_name))
    codes = lazy.merge_last(lazy.nibbles(packed, ml_dtypes.float4_e2m1fn), _BLOCK)
    return scaled(codes, scale, FORMATS["mxfp4"], (_BLOCK,), tensors.model_dtype())
