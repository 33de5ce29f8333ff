"""compressed-tensors (llm-compressor, vLLM): eight formats of `X.weight` or `X.weight_packed` with `X.weight_scale`.

The configuration declares schemes, and the tensors of a module tell which of them it has: schemes that agree with the
dtypes and shapes of its codes and scales have the same values, whatever the module is called.

All scales multiply except `X.weight_global_scale` of NVFP4, by which block scales are divided. A ScaledArray has its
reciprocal as tensor scale. That is exact in two respects only with help:

* `load(..., dequantize=...)` divides block scales by the stored number, as compressed-tensors does, because
  float32(1 / global) has a rounding error (`building.with_divided_scales`).
* If the reciprocal of the reciprocal is another number, `X.weight_global_scale` is returned as well, so that a writer
  can store the same bits again.

`X.weight_shape` and `X.weight_global_scale` (16 and 4 bytes) are read when tensors are listed: the number of inputs and
the names of the result depend on them.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from scaledot import format_variants
from scaledot.array import ScaledArray
from scaledot.checkpoint import lazy
from scaledot.checkpoint.layouts import compressed_tensors_integers as integers
from scaledot.checkpoint.layouts.building import (
    as_e8m0,
    check_rank,
    checked_block,
    per_tensor,
    scaled,
    with_rank,
    with_scale_dtype,
)
from scaledot.checkpoint.layouts.compressed_tensors_config import Scheme, schemes
from scaledot.checkpoint.lazy import LazyArray
from scaledot.checkpoint.source import Source
from scaledot.checkpoint.tensors import Tensors
from scaledot.formats import Format
from scaledot.numerics import blocks

RESERVED = (
    ".weight_packed",
    ".weight_scale",
    ".weight_global_scale",
    ".weight_zero_point",
    ".weight_shape",
    ".weight_g_idx",
)
_FLOATS = ("BF16", "F16", "F32")
_EXPONENTS = ("U8", "F8_E8M0")
_ROWS = format_variants.compressed_tensors
_LEAST_DIVISOR = float(np.finfo(np.float32).tiny)  # 2^-126; its reciprocal is finite


class _Storage(NamedTuple):
    """How a format stores codes: the end of the tensor's name, its dtypes, those of scales, and the row of formats.

    format: None if the dtype or the scheme tells.
    """

    suffix: str
    dtypes: tuple[str, ...]
    scale_dtypes: tuple[str, ...]
    format: Format | None = None

    @property
    def is_integer_words(self) -> bool:
        return self.dtypes == ("I32",)


_STORAGE = {
    "float-quantized": _Storage(".weight", ("F8_E4M3",), _FLOATS),
    "int-quantized": _Storage(".weight", ("I8",), _FLOATS),
    "naive-quantized": _Storage(".weight", ("F8_E4M3", "I8"), _FLOATS),
    "pack-quantized": _Storage(".weight_packed", ("I32",), _FLOATS),
    "nvfp4-pack-quantized": _Storage(".weight_packed", ("U8",), ("F8_E4M3",), _ROWS.nvfp4),
    "mxfp4-pack-quantized": _Storage(".weight_packed", ("U8",), _EXPONENTS, _ROWS.mxfp4),
    "mxfp6-pack-quantized": _Storage(".weight_packed", ("U8",), _EXPONENTS, _ROWS.mxfp6),
    "mxfp8-quantized": _Storage(".weight", ("F8_E4M3",), _EXPONENTS, _ROWS.mxfp8),
}


def matches(source: Source) -> bool:
    if source.quantization:
        return source.quantization.get("quant_method") == "compressed-tensors"
    has_scales = any(name.endswith(".weight_scale") for name in source.tensors)
    return has_scales and not any(name.endswith(".weight_scale_2") for name in source.tensors)


def weights(tensors: Tensors) -> dict[str, Any]:
    for module in tensors.ending(".weight_g_idx"):
        tensors.fail(f"{module}.weight_g_idx", "groups of permuted inputs (`actorder`) are not supported")
    declared = schemes(tensors.source)
    modules = [(module, ".weight_packed") for module in tensors.ending(".weight_packed")]
    modules += [(module, ".weight") for module in tensors.ending(".weight") if _is_quantized(tensors, module)]
    found: dict[str, Any] = {}
    for module, suffix in modules:
        _check_codes(tensors, module, suffix)
        scheme = _scheme_of(tensors, module, suffix, declared)
        found[f"{module}.weight"] = weight = _weight(tensors, module, scheme)
        divisor = None if weight.tensor_scale is None else weight.tensor_scale.reciprocal_of
        if divisor is not None and not _survives(divisor.numpy()):
            name = f"{module}.weight_global_scale"
            found[name] = tensors.info(name).array(tensors.source.reader)
    return found


def _check_codes(tensors: Tensors, module: str, suffix: str) -> None:
    name, other = f"{module}{suffix}", f"{module}.weight"
    if name != other and other in tensors:
        tensors.fail(name, f"{other!r} is another tensor of the same weight")
    check_rank(tensors, name)


def _is_quantized(tensors: Tensors, module: str) -> bool:
    return tensors.info(f"{module}.weight").dtype in ("F8_E4M3", "I8")


def _survives(divisor: np.ndarray) -> bool:
    """Whether a divisor can be computed from its float32 reciprocal."""
    one = np.float32(1)
    return np.array_equal(one / (one / divisor), divisor)


def _scheme_of(tensors: Tensors, module: str, suffix: str, declared: tuple[Scheme, ...]) -> Scheme:
    """The scheme that agrees with the tensors of a module; a single one is not compared, so that its errors say why."""
    name, scale_name = f"{module}{suffix}", f"{module}.weight_scale"
    if not declared:
        tensors.fail(name, "`config_groups` of the configuration declares no quantised weights")
    if len(declared) == 1:
        return declared[0]
    if scale_name not in tensors:
        tensors.fail(name, f"{scale_name!r}, which belongs to it, is missing")
    dtype, scale_dtype = tensors.info(name).dtype, tensors.info(scale_name).dtype
    stored = [s for s in declared if _stores(_STORAGE[s.format], suffix, dtype, scale_dtype)]
    if not stored:
        formats = ", ".join(dict.fromkeys(scheme.format for scheme in declared))
        tensors.fail(
            name, f"none of the formats {formats} has codes of dtype {dtype} and scales of dtype {scale_dtype}"
        )
    return next((scheme for scheme in stored if _fits(tensors, module, scheme)), stored[0])


def _stores(storage: _Storage, suffix: str, dtype: str, scale_dtype: str) -> bool:
    return storage.suffix == suffix and dtype in storage.dtypes and scale_dtype in storage.scale_dtypes


def _fits(tensors: Tensors, module: str, scheme: Scheme) -> bool:
    """Whether the scheme has as many scales as the module, and as many words in a packed row."""
    storage = _STORAGE[scheme.format]
    stored, scale = tensors.info(f"{module}{storage.suffix}"), tensors.info(f"{module}.weight_scale")
    if storage.is_integer_words:
        shape = integers.declared_shape(tensors, module)
        if scheme.bits is not None and stored.shape[-1] != integers.words(shape[-1], scheme.bits):
            return False
    else:
        bits = 8 if storage.format is None else storage.format.bits
        shape = (*stored.shape[:-1], 8 * stored.shape[-1] // bits)
    block = _declared_block(scheme)
    return block is None or math.prod(blocks.grid(shape, block)) == math.prod(scale.shape)


def _declared_block(scheme: Scheme) -> blocks.Block | None:
    format = _STORAGE[scheme.format].format
    return scheme.block if scheme.block is not None or format is None else format.block


def _weight(tensors: Tensors, module: str, scheme: Scheme) -> ScaledArray:
    storage = _STORAGE[scheme.format]
    name, dtype = f"{module}{storage.suffix}", tensors.model_dtype()
    stored = tensors.take(name, *storage.dtypes)
    if storage.is_integer_words:
        codes, format = integers.unpacked(tensors, module, stored, scheme)
    else:
        format = storage.format or (_ROWS.int8 if stored.dtype == np.int8 else _ROWS.fp8)
        codes = _unpacked_bytes(tensors, name, stored, format)
    scale = as_e8m0(tensors.take(f"{module}.weight_scale", *storage.scale_dtypes, required_by=name))
    scale = with_rank(scale, codes.ndim)
    block = checked_block(tensors, f"{module}.weight_scale", codes.shape, scale.shape, _declared_block(scheme))
    zero = integers.zero_point(tensors, module, scale.shape, scheme, format) if format.is_integer else None
    divisor = _divisor(tensors, module, name, codes.shape) if format.two_level else None
    format = with_scale_dtype(format, scale.dtype, dtype)
    tensor_scale = None if divisor is None else lazy.reciprocal(divisor)
    return scaled(codes, scale, format, block, dtype, zero=zero, tensor_scale=tensor_scale)


def _unpacked_bytes(tensors: Tensors, name: str, stored: LazyArray, format: Format) -> LazyArray:
    """The codes of a tensor of 8-bit codes, or of bytes that hold codes of 4 or 6 bits."""
    if format.bits == 8:
        return stored
    if format.bits == 4:
        return lazy.nibbles(stored, format.code_dtype)
    octets = stored.shape[-1]
    if octets % 3:
        tensors.fail(name, f"rows have {octets} bytes; those of 6-bit codes are multiples of 3 bytes")
    return lazy.bit_stream(stored, 6, octets // 3 * 4, format.code_dtype)


def _divisor(tensors: Tensors, module: str, weight_name: str, shape: tuple[int, ...]) -> LazyArray:
    """`X.weight_global_scale`, by which block scales are divided."""
    name = f"{module}.weight_global_scale"
    divisor = per_tensor(tensors, name, tensors.take(name, "F32", required_by=weight_name), shape)
    values = divisor.numpy()
    is_invertible = (values >= _LEAST_DIVISOR) & (values <= 1 / _LEAST_DIVISOR)
    if not np.all(is_invertible):
        tensors.fail(name, f"{values[~is_invertible].flat[0]} is no divisor with a finite and normal reciprocal")
    return divisor
