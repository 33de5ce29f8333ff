"""Writes ModelOpt's layout: FP8 with one scale per tensor, NVFP4 and MXFP8."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from scaledot.array import ScaledArray
from scaledot.checkpoint.writers.parts import (
    E8M0,
    Part,
    Written,
    array_part,
    matrix_block,
    module_of,
    packed_codes,
    row_scale_part,
    scale_part,
    shared,
    unsupported,
)

_LAYOUT = "modelopt"
_SUPPORTED = "float8_e4m3fn with a float32 scale per tensor (FP8), NVFP4 and MXFP8"
_PRODUCER = {"name": "scaledot"}


def plan(weights: Mapping[str, ScaledArray], unquantized: list[str], activations: str | None) -> Written:
    algorithms = {name: _algorithm(name, q) for name, q in weights.items()}
    algorithm = shared(algorithms, _LAYOUT)
    parts = {name: _PARTS[algorithms[name]](name, q) for name, q in weights.items()}
    if algorithm is None:
        return Written(parts)
    return Written(
        parts,
        _mirrored_config(algorithm, unquantized),
        {"hf_quant_config.json": _own_config(algorithm, unquantized)},
    )


def _algorithm(name: str, q: ScaledArray) -> str:
    rows, inputs = matrix_block(name, q, _LAYOUT)
    element, scale = q.format.element, np.dtype(q.scale.dtype)
    if element == "float8_e4m3fn" and (rows, inputs) == (0, 0) and scale == np.float32:
        return "FP8"
    if element == "float8_e4m3fn" and inputs == 32 and rows > 0 and scale == E8M0:
        return "MXFP8"
    if element == "float4_e2m1fn" and inputs == 16 and rows > 0 and q.tensor_scale is not None:
        return "NVFP4"
    raise unsupported(name, q, _LAYOUT, _SUPPORTED)


def _fp8(name: str, q: ScaledArray) -> list[Part]:
    return [array_part(name, q.data, lambda q: q.data), scale_part(f"{module_of(name)}.weight_scale", q, ())]


def _mxfp8(name: str, q: ScaledArray) -> list[Part]:
    scale = row_scale_part(f"{module_of(name)}.weight_scale", q, dtype="U8")
    return [array_part(name, q.data, lambda q: q.data), scale]


def _nvfp4(name: str, q: ScaledArray) -> list[Part]:
    module = module_of(name)
    tensor_scale = Part(
        f"{module}.weight_scale_2", "F32", (), lambda q: np.asarray(q.tensor_scale, np.float32).reshape(())
    )
    return [packed_codes(name, q), row_scale_part(f"{module}.weight_scale", q), tensor_scale]


_PARTS = {"FP8": _fp8, "MXFP8": _mxfp8, "NVFP4": _nvfp4}
_GROUP_SIZES = {"NVFP4": 16, "MXFP8": 32}


def _own_config(algorithm: str, unquantized: list[str]) -> dict[str, Any]:
    quantization: dict[str, Any] = {"quant_algo": algorithm, "kv_cache_quant_algo": None}
    if algorithm in _GROUP_SIZES:
        quantization["group_size"] = _GROUP_SIZES[algorithm]
    return {"producer": _PRODUCER, "quantization": quantization | {"exclude_modules": unquantized}}


def _mirrored_config(algorithm: str, unquantized: list[str]) -> dict[str, Any]:
    """The `quantization_config` of config.json, which repeats hf_quant_config.json in other words."""
    config = {"quant_method": "modelopt", "quant_algo": algorithm, "producer": _PRODUCER, "ignore": unquantized}
    if algorithm == "MXFP8":  # ModelOpt describes it by its name only
        return config
    numbers: dict[str, Any] = {"dynamic": False, "num_bits": 4 if algorithm == "NVFP4" else 8, "type": "float"}
    if algorithm in _GROUP_SIZES:
        numbers["group_size"] = _GROUP_SIZES[algorithm]
    group = {"weights": numbers, "input_activations": numbers, "targets": ["Linear"]}
    return config | {"config_groups": {"group_0": group}}
