"""Writes the layout of compressed-tensors, which vLLM serves: FP8, integers of 2 to 8 bits, NVFP4 and MX formats."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
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
    unsupported,
)
from scaledot.numerics import pack

_LAYOUT = "compressed-tensors"
_SUPPORTED = (
    "float8_e4m3fn with float scales per tensor, output channel or 2-D block; int2 to int8 with scales per tensor, "
    "output channel or group of inputs; nvfp4, mxfp4, mxfp6_e2m3 and mxfp8"
)
_WORD_BITS = 32
_VERSION = "0.20.0"  # of compressed-tensors, whose layout this is


@dataclasses.dataclass(frozen=True)
class Scheme:
    """One way to store a weight: the name of the format, its `weights` section, and the parts of a weight.

    activations: "dynamic", "static" or None, if only the weight is quantised.
    """

    format: str
    weights: tuple[tuple[str, Any], ...]
    parts: Callable[[str, ScaledArray], list[Part]] = dataclasses.field(compare=False)
    activations: str | None = None

    def section(self, **arguments: Any) -> dict[str, Any]:
        common = {"symmetric": True, "group_size": None, "dynamic": False}
        return common | dict(self.weights) | arguments


def plan(contents: Contents) -> Written:
    weights = contents.weights
    schemes = {name: _scheme(name, q, _activations_of(name, q, contents)) for name, q in weights.items()}
    distinct = list(dict.fromkeys(schemes.values()))
    groups = {}
    for number, scheme in enumerate(distinct):
        modules = [module_of(name) for name, found in schemes.items() if found == scheme]
        groups[f"group_{number}"] = {
            "targets": ["Linear"] if len(distinct) == 1 else modules,
            "weights": scheme.section(),
            "input_activations": _input_activations(scheme),
            "output_activations": None,
            "format": scheme.format,
        }
    formats = {scheme.format for scheme in distinct}
    config = {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "version": _VERSION,
        "config_groups": groups,
        "ignore": contents.unquantized,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
    parts = {name: schemes[name].parts(name, q) for name, q in weights.items()}
    return Written(parts, config if weights else None)


def _scheme(name: str, q: ScaledArray, activations: str | None) -> Scheme:
    block, scale = matrix_block(name, q, _LAYOUT), np.dtype(q.scale.dtype)
    found = None
    if q.tensor_scale is not None:
        found = _nvfp4_scheme(q, block)
    elif q.format.is_integer:
        found = _integer_scheme(q, block, activations)
    elif scale == E8M0:
        found = _mx_scheme(q, block)
    elif q.format.element == "float8_e4m3fn":
        found = _fp8_scheme(block)
    if found is None:
        raise unsupported(name, q, _LAYOUT, _SUPPORTED)
    return dataclasses.replace(found, activations=activations)


def _activations_of(name: str, q: ScaledArray, contents: Contents) -> str | None:
    if q.tensor_scale is None:
        return contents.activations_of(name)
    mode = contents.activations_of(name, ".input_global_scale")
    if mode == "dynamic" and f"{module_of(name)}.input_global_scale" not in contents.names:
        raise ValueError(
            f"NVFP4 activations have a static scale per tensor: add {module_of(name)}.input_global_scale "
            "(2688 / amax, float32, of shape (1,)) to the tree, or omit `activations` for a weight-only model"
        )
    return mode


def _fp8_scheme(block: tuple[int, int]) -> Scheme | None:
    numbers = ("num_bits", 8), ("type", "float")
    if block == (0, 0):
        return Scheme("float-quantized", (*numbers, ("strategy", "tensor")), _codes_and_scale((1,)))
    if block == (1, 0):
        return Scheme("float-quantized", (*numbers, ("strategy", "channel")), _codes_and_scale())
    if min(block) > 1:
        structure = ("strategy", "block"), ("block_structure", block)
        return Scheme("float-quantized", (*numbers, *structure), _codes_and_scale())
    return None


def _codes_and_scale(scale_shape: tuple[int, ...] | None = None, scale_dtype: str | None = None):
    def parts(name: str, q: ScaledArray) -> list[Part]:
        scale = scale_part(f"{module_of(name)}.weight_scale", q, scale_shape, scale_dtype)
        return [array_part(name, q.data, lambda q: q.data), scale]

    return parts


_MX_FORMATS = {
    "float8_e4m3fn": "mxfp8-quantized",
    "float6_e2m3fn": "mxfp6-pack-quantized",
    "float4_e2m1fn": "mxfp4-pack-quantized",
}


def _mx_scheme(q: ScaledArray, block: tuple[int, int]) -> Scheme | None:
    rows, inputs = block
    if q.format.element not in _MX_FORMATS or inputs != 32 or rows == 0:
        return None
    numbers = ("num_bits", q.format.bits), ("type", "float"), ("strategy", "group"), ("group_size", 32)
    return Scheme(_MX_FORMATS[q.format.element], (*numbers, ("scale_dtype", "torch.uint8")), _mx_parts)


def _mx_parts(name: str, q: ScaledArray) -> list[Part]:
    module = module_of(name)
    scale = row_scale_part(f"{module}.weight_scale", q, dtype="U8")
    if q.format.bits == 8:
        return [array_part(name, q.data, lambda q: q.data), scale]
    if q.format.bits == 4:
        return [packed_codes(f"{module}.weight_packed", q), scale]
    rows, inputs = q.shape
    packed = Part(f"{module}.weight_packed", "U8", (rows, inputs * 6 // 8), lambda q: np.asarray(_packed_6_bit(q.data)))
    return [packed, scale]


_packed_6_bit = jax.jit(functools.partial(pack.pack_bits, bits=6, word=jnp.uint8))


def _nvfp4_scheme(q: ScaledArray, block: tuple[int, int]) -> Scheme | None:
    rows, inputs = block
    if q.format.element != "float4_e2m1fn" or inputs != 16 or rows == 0:
        return None
    numbers = ("num_bits", 4), ("type", "float"), ("strategy", "tensor_group"), ("group_size", 16)
    return Scheme("nvfp4-pack-quantized", (*numbers, ("scale_dtype", "torch.float8_e4m3fn")), _nvfp4_parts)


def _nvfp4_parts(name: str, q: ScaledArray) -> list[Part]:
    module = module_of(name)
    return [
        packed_codes(f"{module}.weight_packed", q),
        row_scale_part(f"{module}.weight_scale", q),
        Part(f"{module}.weight_global_scale", "F32", (1,), _global_scale),  # values are divided by it
    ]


def _global_scale(q: ScaledArray) -> np.ndarray:
    """The float32 whose reciprocal is the tensor scale, or differs from it by 1 ulp if there is none."""
    tensor_scale = np.asarray(q.tensor_scale, np.float32).reshape(1)
    nearest = np.float32(1) / tensor_scale
    candidates = [nearest, np.nextafter(nearest, np.float32(0)), np.nextafter(nearest, np.float32(np.inf))]
    return next((c for c in candidates if np.float32(1) / c == tensor_scale), nearest)


def _integer_scheme(q: ScaledArray, block: tuple[int, int], activations: str | None) -> Scheme | None:
    rows, inputs = block
    if rows > 1 or (rows == 0 and inputs != 0):
        return None
    strategy = ("tensor" if rows == 0 else "channel") if inputs == 0 else "group"
    numbers = ("num_bits", q.format.bits), ("type", "int"), ("symmetric", q.zero is None), ("strategy", strategy)
    if strategy == "group":
        numbers = (*numbers, ("group_size", inputs))
    if activations is not None and q.format.bits == 8 and strategy != "group":
        return Scheme("int-quantized", numbers, functools.partial(_int8_parts, strategy))
    return Scheme("pack-quantized", numbers, functools.partial(_packed_parts, strategy))


def _int8_parts(strategy: str, name: str, q: ScaledArray) -> list[Part]:
    shape = (1,) if strategy == "tensor" else None
    parts = _codes_and_scale(shape)(name, q)
    if q.zero is not None:
        zero_shape = tuple(q.zero.shape) if shape is None else shape
        zero_name = f"{module_of(name)}.weight_zero_point"
        parts.append(
            Part(zero_name, "I8", zero_shape, lambda q: np.asarray(q.zero).astype(np.int8).reshape(zero_shape))
        )
    return parts


def _packed_parts(strategy: str, name: str, q: ScaledArray) -> list[Part]:
    module, bits = module_of(name), q.format.bits
    rows, inputs = q.shape
    packed = Part(
        f"{module}.weight_packed",
        "I32",
        (rows, -(-inputs * bits // _WORD_BITS)),
        lambda q: np.asarray(_packed_words(q.data, bits, 1)),
    )
    shape = Part(f"{module}.weight_shape", "I64", (2,), lambda _: np.array([rows, inputs], np.int64))
    parts = [packed, shape, scale_part(f"{module}.weight_scale", q, (1,) if strategy == "tensor" else None)]
    if q.zero is not None:
        zero_shape = (-(-q.zero.shape[0] * bits // _WORD_BITS), q.zero.shape[1])
        zero = Part(
            f"{module}.weight_zero_point", "I32", zero_shape, lambda q: np.asarray(_packed_words(q.zero, bits, 0))
        )
        parts.append(zero)
    return parts


@functools.partial(jax.jit, static_argnums=(1, 2))
def _packed_words(codes: jax.Array, bits: int, axis: int) -> jax.Array:
    """Signed codes in offset binary, as a dense stream of int32 words; codes may be bytes of `with_packed_codes`."""
    if codes.dtype == jnp.uint8 or (bits == 4 and axis == 1 and codes.shape[1] % 8 == 0):
        octets = codes if codes.dtype == jnp.uint8 else pack.pack_nibbles(codes)
        words = (octets ^ np.uint8(0x88)).reshape(octets.shape[0], octets.shape[1] // 4, 4)
        return jax.lax.bitcast_convert_type(words, jnp.int32)
    return pack.pack_bits(codes.astype(jnp.int8), bits, axis=axis)


def _input_activations(scheme: Scheme) -> dict[str, Any] | None:
    """The `input_activations` section: 8 bits per token for integers, otherwise the numbers of the weights."""
    if scheme.activations is None:
        return None
    dynamic, weights = scheme.activations == "dynamic", dict(scheme.weights)
    token = "token" if dynamic else "tensor"
    if weights["type"] == "int":
        return scheme.section(num_bits=8, symmetric=True, strategy=token, group_size=None, dynamic=dynamic)
    if weights["strategy"] in ("tensor", "channel"):
        return scheme.section(strategy=token, dynamic=dynamic)
    if weights["strategy"] == "block":
        group = {"strategy": "group", "group_size": weights["block_structure"][1]}
        return {
            key: value for key, value in scheme.section(**group, dynamic=dynamic).items() if key != "block_structure"
        }
    if weights["strategy"] == "tensor_group":  # one static scale per tensor; scales of groups are computed at run time
        return scheme.section(dynamic="local")
    return scheme.section(dynamic=dynamic)
