"""Hugging Face's `fp8` (DeepSeek-V3): E4M3 codes with a scale per block, per tensor, or E8M0 scales; and DeepSeek-V4.

`X.weight_scale_inv` multiplies, in spite of its name; other names are `X.scale` and `X.qscale_weight`, and stacked
experts `X.gate_up_proj` have `X.gate_up_proj_scale_inv`. Block sizes follow from the shapes of weights and scales, as
in the `transformers` package, because the configuration does not describe the experts of DeepSeek-V4: two E2M1 codes
per int8, with E8M0 scales. `X.scale` in full precision, of a module without codes, is a parameter of the model.
"""

import ml_dtypes
import numpy as np

from scaledot.array import ScaledArray
from scaledot.checkpoint import lazy
from scaledot.checkpoint.errors import CheckpointError, quoted
from scaledot.checkpoint.layouts.building import (
    USUAL_BLOCK,
    as_e8m0,
    block_of,
    check_rank,
    format_of,
    scaled,
    with_rank,
)
from scaledot.checkpoint.source import Source
from scaledot.checkpoint.tensors import Tensors

RESERVED = ("_scale_inv", ".qscale_weight")
_CODE_DTYPES = ("F8_E4M3", "F8_E5M2", "I8")
_EXPONENTS = ("F8_E8M0", "U8")
_SCALE_DTYPES = ("F32", "BF16", "F16", *_EXPONENTS)


def matches(source: Source) -> bool:
    if source.quantization:
        return source.quantization.get("quant_method") == "fp8"
    return any(name.endswith(".weight_scale_inv") for name in source.tensors)


def weights(tensors: Tensors) -> dict[str, ScaledArray]:
    declared = _declared_block(tensors.source)
    return {name: _weight(tensors, name, declared) for name in tensors if tensors.info(name).dtype in _CODE_DTYPES}


def _weight(tensors: Tensors, name: str, declared: tuple[int, ...] | None) -> ScaledArray:
    scale_name = _scale_name(tensors, name)
    check_rank(tensors, name)
    codes = tensors.take(name)
    is_packed = codes.dtype == np.int8
    scale = as_e8m0(tensors.take(scale_name, *(_EXPONENTS if is_packed else _SCALE_DTYPES)))
    if is_packed:
        codes = lazy.nibbles(codes, ml_dtypes.float4_e2m1fn)
    scale = with_rank(scale, codes.ndim)
    block = block_of(tensors, name, codes.shape, scale.shape, declared)
    return scaled(codes, scale, format_of(codes.dtype.name, scale.dtype), block, tensors.model_dtype())


def _scale_name(tensors: Tensors, name: str) -> str:
    names = [f"{name}_scale_inv"]
    if name.endswith(".weight"):
        module = name.removesuffix(".weight")
        names += [f"{module}.scale", f"{module}.qscale_weight"]
    found = [scale_name for scale_name in names if scale_name in tensors]
    if len(found) != 1:
        known = ", ".join(found) if found else f"none of {', '.join(names)}"
        tensors.fail(name, f"expected one tensor of scales, found {known}")
    return found[0]


def _declared_block(source: Source) -> tuple[int, ...] | None:
    if not source.quantization:
        return USUAL_BLOCK
    size = source.quantization.get("weight_block_size")
    if size is None:
        return None
    if not isinstance(size, list) or len(size) != 2 or not all(type(n) is int and n > 0 for n in size):
        raise CheckpointError(source.path, f"`weight_block_size` must be two positive integers, not {quoted(size)}")
    return tuple(size)
