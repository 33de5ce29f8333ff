"""NVIDIA ModelOpt: `X.weight` with `X.weight_scale`, and `X.weight_scale_2` of NVFP4; all scales multiply.

The configuration (`quantization_config`, or `hf_quant_config.json`) names an algorithm, or with MIXED_PRECISION one per
module in `quantized_layers`. Dtypes of codes and scales tell how a weight is stored; the algorithm must agree.

`X.pre_quant_scale` of AWQ, by which activations are multiplied before the matmul, is returned and not applied. So is
`X.weight_scale_2` of W4A8_AWQ: its weights are code * weight_scale, and runtimes that cast these to FP8 divide by it.
NVFP4_SVD, whose weights have a low-rank term in two other tensors, is refused.
"""

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from scaledot import format_variants
from scaledot.checkpoint import lazy
from scaledot.checkpoint.errors import CheckpointError, quoted
from scaledot.checkpoint.layouts.building import (
    as_e8m0,
    check_rank,
    checked_block,
    format_of,
    per_tensor,
    scaled,
    with_rank,
)
from scaledot.checkpoint.lazy import LazyArray
from scaledot.checkpoint.source import Source
from scaledot.checkpoint.tensors import Tensors
from scaledot.numerics import blocks

RESERVED = (".weight_scale", ".weight_scale_2", ".svdquant_lora_a", ".svdquant_lora_b")
_FLOATS = ("F32", "BF16", "F16")
_EXPONENTS = ("U8", "F8_E8M0")
_CODE_DTYPES = ("F8_E4M3", "U8", "I8")


class _Kind(NamedTuple):
    """How weights are stored: the dtypes of codes and scales, the element, and the block, if it is always the same."""

    dtype: str
    scale_dtypes: tuple[str, ...]
    element: str
    block: blocks.Block | None = None


_KINDS = {
    "FP8": _Kind("F8_E4M3", _FLOATS, "float8_e4m3fn"),
    "MXFP8": _Kind("F8_E4M3", _EXPONENTS, "float8_e4m3fn", (32,)),
    "NVFP4": _Kind("U8", ("F8_E4M3",), "float4_e2m1fn", (16,)),
    "MXFP4": _Kind("U8", _EXPONENTS, "float4_e2m1fn", (32,)),
    "INT4": _Kind("U8", _FLOATS, "int4"),
    "INT8": _Kind("I8", _FLOATS, "int8"),
}
_ALGORITHMS = {
    "FP8": "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN": "FP8",
    "NVFP4": "NVFP4",
    "W4A16_NVFP4": "NVFP4",
    "NVFP4_AWQ": "NVFP4",
    "W4A8_NVFP4_FP8": "NVFP4",
    "MXFP8": "MXFP8",
    "W4A8_MXFP4_FP8": "MXFP4",
    "W4A16_AWQ": "INT4",
    "W4A8_AWQ": "INT4",
    "W8A16": "INT8",
    "W8A8_SQ_PER_CHANNEL": "INT8",
}


def matches(source: Source) -> bool:
    if source.quantization:
        return source.quantization.get("quant_method") in ("modelopt", "modelopt_fp4")
    return any(name.endswith(".weight_scale_2") for name in source.tensors)


def weights(tensors: Tensors) -> dict[str, Any]:
    found: dict[str, Any] = {}
    settings_of = _Settings(tensors.source)
    for module in tensors.ending(".weight"):
        if tensors.info(f"{module}.weight").dtype in _CODE_DTYPES:
            found |= _weight(tensors, module, settings_of(module))
    return found


class _Settings:
    """The declared settings of each module: an object with `quant_algo` and perhaps `group_size`."""

    def __init__(self, source: Source):
        config = source.quantization
        config = config["quantization"] if isinstance(config.get("quantization"), dict) else config
        self._default = config
        self._by_module: dict[str, dict[str, Any]] = {}
        if config.get("quant_algo") == "MIXED_PRECISION":
            layers = config.get("quantized_layers") or {}
            if not isinstance(layers, dict) or not all(isinstance(layer, dict) for layer in layers.values()):
                raise CheckpointError(source.path, "`quantized_layers` must be an object of objects")
            self._default, self._by_module = {}, layers
        for settings in (self._default, *self._by_module.values()):
            _check_algorithm(source, settings.get("quant_algo"))

    def __call__(self, module: str) -> dict[str, Any]:
        return self._by_module.get(module, self._default)


def _check_algorithm(source: Source, algorithm: Any) -> None:
    if algorithm is not None and (not isinstance(algorithm, str) or algorithm not in _ALGORITHMS):
        known = ", ".join((*_ALGORITHMS, "MIXED_PRECISION"))
        raise CheckpointError(source.path, f"`quant_algo` {quoted(algorithm)} is not supported; there are {known}")


def _weight(tensors: Tensors, module: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the quantised weight of a module by name, and the tensors of the module that are not applied to it."""
    name, scale_name, second_name = (f"{module}.{end}" for end in ("weight", "weight_scale", "weight_scale_2"))
    kind = _kind(tensors, name, scale_name, settings.get("quant_algo"))
    codes = _codes(tensors, name, kind)
    scale = with_rank(as_e8m0(tensors.take(scale_name)), codes.ndim)
    block = _block(tensors, scale_name, codes.shape, scale.shape, kind, settings.get("group_size"))
    dtype = tensors.model_dtype()
    if kind == "NVFP4":
        second = per_tensor(tensors, second_name, tensors.take(second_name, "F32", required_by=name), codes.shape)
        format = format_variants.modelopt.nvfp4
        return {name: scaled(codes, scale, format, block, dtype, tensor_scale=second)}
    weight = scaled(codes, scale, format_of(_KINDS[kind].element, scale.dtype), block, dtype)
    if kind == "INT4" and second_name in tensors:
        return {name: weight, second_name: tensors.take(second_name)}
    return {name: weight}


def _kind(tensors: Tensors, name: str, scale_name: str, algorithm: str | None) -> str:
    """How a weight is stored, by the dtypes of codes and scales."""
    if scale_name not in tensors:
        tensors.fail(name, f"{scale_name!r}, which belongs to it, is missing")
    dtype, scale_dtype = tensors.info(name).dtype, tensors.info(scale_name).dtype
    stored = f"codes of dtype {dtype} with scales of dtype {scale_dtype}"
    found = next((k for k, row in _KINDS.items() if dtype == row.dtype and scale_dtype in row.scale_dtypes), None)
    if found is None:
        tensors.fail(name, f"ModelOpt does not write {stored}")
    if algorithm is not None and _ALGORITHMS[algorithm] != found:
        expected = _KINDS[_ALGORITHMS[algorithm]]
        tensors.fail(
            name,
            f"{stored} are {found}, but the configuration declares {algorithm}, which has codes of dtype "
            f"{expected.dtype} with scales of dtype {' or '.join(expected.scale_dtypes)}",
        )
    return found


def _codes(tensors: Tensors, name: str, kind: str) -> LazyArray:
    check_rank(tensors, name)
    stored = tensors.take(name)
    if kind == "INT4":
        return lazy.row_nibbles(stored, ml_dtypes.int4)
    return lazy.nibbles(stored, ml_dtypes.float4_e2m1fn) if stored.dtype == np.uint8 else stored


def _block(
    tensors: Tensors,
    scale_name: str,
    shape: tuple[int, ...],
    scale_shape: tuple[int, ...],
    kind: str,
    group_size: Any,
) -> blocks.Block:
    """The block of a weight: the declared group size, or that of the format, or that of the shapes."""
    declared = _KINDS[kind].block
    if kind in ("FP8", "INT8"):  # a scale per tensor or per output
        declared = (0, 0) if scale_shape[-2] == 1 else (0,)
    elif type(group_size) is int and group_size > 0:
        declared = (group_size,)
    return checked_block(tensors, scale_name, shape, scale_shape, declared)
