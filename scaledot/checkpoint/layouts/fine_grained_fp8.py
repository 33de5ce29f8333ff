"""Hugging Face's `fp8` (DeepSeek-V3): E4M3 codes with a scale per block, per tensor, or E8M0 scales; and DeepSeek-V4.

`X.weight_scale_inv` multiplies, in spite of its name; other names of it are `X.scale` and `X.qscale_weight`. Block sizes
follow from the shapes of weights and scales, as in the `transformers` package, because the configuration does not
describe the experts of DeepSeek-V4: two E2M1 codes per int8, with E8M0 scales.
"""

import ml_dtypes

from scaledot.array import ScaledArray
from scaledot.checkpoint import lazy
from scaledot.checkpoint.errors import CheckpointError, quoted
from scaledot.checkpoint.layouts.building import as_e8m0, block_of, format_of, scaled
from scaledot.checkpoint.source import Source
from scaledot.checkpoint.tensors import Tensors

RESERVED = (".weight_scale_inv", ".qscale_weight", ".scale")
_SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0", "U8")


def matches(source: Source) -> bool:
    if source.quantization:
        return source.quantization.get("quant_method") == "fp8"
    return any(name.endswith(".weight_scale_inv") for name in source.tensors)


def weights(tensors: Tensors) -> dict[str, ScaledArray]:
    declared = _declared_block(tensors.source)
    return {
        f"{module}.weight": _weight(tensors, f"{module}.weight", module + suffix, declared)
        for suffix in RESERVED
        for module in tensors.ending(suffix)
        if f"{module}.weight" in tensors
    }


def _weight(tensors: Tensors, name: str, scale_name: str, declared: tuple[int, ...] | None) -> ScaledArray:
    codes = tensors.take(name, "F8_E4M3", "F8_E5M2", "I8")
    if codes.ndim == 0:
        tensors.fail(name, "a quantised weight has at least one axis, this one has shape []")
    if tensors.info(name).dtype == "I8":
        codes = lazy.nibbles(codes, ml_dtypes.float4_e2m1fn)
    scale = as_e8m0(tensors.take(scale_name, *_SCALE_DTYPES))
    if scale.ndim == 0:
        scale = scale.reshape((1,) * codes.ndim)
    block = block_of(tensors, name, codes.shape, scale.shape, declared)
    return scaled(codes, scale, format_of(codes.dtype.name, scale.dtype), block, tensors.model_dtype())


def _declared_block(source: Source) -> tuple[int, ...] | None:
    size = source.quantization.get("weight_block_size")
    if size is None:
        return None
    if not isinstance(size, list) or len(size) != 2 or not all(type(n) is int and n > 0 for n in size):
        raise CheckpointError(source.path, f"`weight_block_size` must be two positive integers, not {quoted(size)}")
    return tuple(size)
