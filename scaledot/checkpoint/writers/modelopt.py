"""Writes ModelOpt's layout: FP8, NVFP4 and MXFP8.

`quant_algo` also says how activations are quantised. With an `input_scale` of every weight among the arrays it is FP8
or NVFP4, whose activations have static scales; without, W4A16_NVFP4, or, for dynamic activations,
FP8_PER_CHANNEL_PER_TOKEN, which has one scale per output channel.
"""

from typing import Any

import numpy as np

from scaledot.array import ScaledArray
from scaledot.checkpoint.writers.parts import (
    E8M0,
    Contents,
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
_SUPPORTED = "float8_e4m3fn with float32 scales per tensor or output channel, NVFP4 and MXFP8"
_PRODUCER = {"name": "scaledot"}


def plan(contents: Contents) -> Written:
    kinds = {name: _kind(name, q) for name, q in contents.weights.items()}
    kind = shared(kinds, _LAYOUT)
    if kind is None:
        return Written({})
    algorithm = _algorithm(kind, contents)
    parts = {name: _PARTS[algorithm](name, q) for name, q in contents.weights.items()}
    own, mirrored = (config(algorithm, contents.unquantized) for config in (_own_config, _mirrored_config))
    return Written(parts, mirrored, {"hf_quant_config.json": own})


def _kind(name: str, q: ScaledArray) -> str:
    rows, inputs = matrix_block(name, q, _LAYOUT)
    element, scale = q.format.element, np.dtype(q.scale.dtype)
    if element == "float8_e4m3fn" and (rows, inputs) in ((0, 0), (1, 0)) and scale == np.float32:
        return "FP8 scales per tensor" if rows == 0 else "FP8 scales per channel"
    if element == "float8_e4m3fn" and inputs == 32 and rows > 0 and scale == E8M0:
        return "MXFP8"
    if element == "float4_e2m1fn" and inputs == 16 and rows > 0 and q.tensor_scale is not None:
        return "NVFP4"
    raise unsupported(name, q, _LAYOUT, _SUPPORTED)


def _algorithm(kind: str, contents: Contents) -> str:
    if kind == "MXFP8":
        return kind
    for name in contents.weights:
        contents.activations_of(name)  # raises if static activations lack a scale
    is_static = all(f"{module_of(name)}.input_scale" in contents.names for name in contents.weights)
    if kind == "NVFP4":
        return kind if is_static else "W4A16_NVFP4"
    if kind == "FP8 scales per tensor" and is_static:
        return "FP8"
    if contents.activations == "dynamic":
        return "FP8_PER_CHANNEL_PER_TOKEN"
    raise ValueError(
        "ModelOpt's FP8 also quantises activations: pass activations='dynamic', or add a static `X.input_scale` for "
        "each `X.weight` with one scale per tensor"
    )


def _fp8(name: str, q: ScaledArray) -> list[Part]:
    return [array_part(name, q.data, lambda q: q.data), scale_part(f"{module_of(name)}.weight_scale", q, ())]


def _fp8_per_channel(name: str, q: ScaledArray) -> list[Part]:
    outputs = q.shape[0]
    scale = Part(
        f"{module_of(name)}.weight_scale",
        "F32",
        (outputs,),
        lambda q: np.broadcast_to(np.asarray(q.scale)[:, 0], (outputs,)),
    )
    return [array_part(name, q.data, lambda q: q.data), scale]


def _mxfp8(name: str, q: ScaledArray) -> list[Part]:
    scale = row_scale_part(f"{module_of(name)}.weight_scale", q, dtype="U8")
    return [array_part(name, q.data, lambda q: q.data), scale]


def _nvfp4(name: str, q: ScaledArray) -> list[Part]:
    module = module_of(name)
    tensor_scale = Part(
        f"{module}.weight_scale_2", "F32", (), lambda q: np.asarray(q.tensor_scale, np.float32).reshape(())
    )
    return [packed_codes(name, q), row_scale_part(f"{module}.weight_scale", q), tensor_scale]


_PARTS = {
    "FP8": _fp8,
    "FP8_PER_CHANNEL_PER_TOKEN": _fp8_per_channel,
    "MXFP8": _mxfp8,
    "NVFP4": _nvfp4,
    "W4A16_NVFP4": _nvfp4,
}
_GROUP_SIZES = {"NVFP4": 16, "W4A16_NVFP4": 16, "MXFP8": 32}


def _own_config(algorithm: str, unquantized: list[str]) -> dict[str, Any]:
    quantization: dict[str, Any] = {"quant_algo": algorithm, "kv_cache_quant_algo": None}
    if algorithm in _GROUP_SIZES:
        quantization["group_size"] = _GROUP_SIZES[algorithm]
    return {"producer": _PRODUCER, "quantization": quantization | {"exclude_modules": unquantized}}


def _mirrored_config(algorithm: str, unquantized: list[str]) -> dict[str, Any]:
    """The `quantization_config` of config.json, which repeats hf_quant_config.json in other words."""
    config = {"quant_method": "modelopt", "quant_algo": algorithm, "producer": _PRODUCER, "ignore": unquantized}
    if algorithm not in ("FP8", "NVFP4"):  # ModelOpt describes the others by their names only
        return config
    numbers: dict[str, Any] = {"dynamic": False, "num_bits": 4 if algorithm == "NVFP4" else 8, "type": "float"}
    if algorithm in _GROUP_SIZES:
        numbers["group_size"] = _GROUP_SIZES[algorithm]
    group = {"weights": numbers, "input_activations": numbers, "targets": ["Linear"]}
    return config | {"config_groups": {"group_0": group}}
