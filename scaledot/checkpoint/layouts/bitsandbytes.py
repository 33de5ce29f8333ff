"""bitsandbytes: NF4 and FP4 codes with a scale per block of the flattened weight, and LLM.int8.

`X.weight` has two codes per byte, the first one in the high nibble, in any dtype (`quant_storage`). Shape, dtype and
block size are in JSON in `X.weight.quant_state.bitsandbytes__nf4` (or `__fp4`), the dequantised value of each code in
`X.weight.quant_map`. Scales are `X.weight.absmax`; with double quantisation it has 8-bit codes, which are decoded to
float32. If rows are no multiple of a block, the weight is a `Flat` array.

LLM.int8: `X.weight` has int8 codes and `X.SCB` the amax of each row, with values (code * SCB) * float32(1 / 127). The
float32 number 1 / 127 is the tensor scale, so that results are rounded as in bitsandbytes.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from scaledot.array import ScaledArray
from scaledot.checkpoint import dtypes, lazy
from scaledot.checkpoint.errors import quoted
from scaledot.checkpoint.forms import Flat
from scaledot.checkpoint.json_text import parse_object
from scaledot.checkpoint.layouts.building import scaled
from scaledot.checkpoint.lazy import LazyArray
from scaledot.checkpoint.reader import Index
from scaledot.checkpoint.source import Source
from scaledot.checkpoint.tensors import Tensors
from scaledot.formats import FORMATS, Format

RESERVED = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", ".SCB", ".weight_format")
_STATES = {quant_type: f".quant_state.bitsandbytes__{quant_type}" for quant_type in ("nf4", "fp4")}
_MAX_STATE_BYTES = 2**16
_ROW_MAJOR = 0  # of `weight_format`; others are tiled for tensor cores


def matches(source: Source) -> bool:
    if source.quantization:
        return source.quantization.get("quant_method") == "bitsandbytes"
    return any(name.endswith(tuple(_STATES.values())) for name in source.tensors)


def weights(tensors: Tensors) -> dict[str, ScaledArray | Flat]:
    found: dict[str, ScaledArray | Flat] = {
        name: _four_bit(tensors, name, suffix) for suffix in _STATES.values() for name in tensors.ending(suffix)
    }
    return found | {f"{module}.weight": _eight_bit(tensors, module) for module in tensors.ending(".SCB")}


class _State(NamedTuple):
    quant_type: str
    block: int
    dtype: np.dtype
    shape: tuple[int, ...]
    nested_block: int | None
    nested_offset: float | None


def _four_bit(tensors: Tensors, name: str, suffix: str) -> ScaledArray | Flat:
    state = _read_state(tensors, name, name + suffix)
    *leading, inputs = state.shape
    is_flat = inputs % state.block != 0
    size = math.prod(state.shape)
    shape = (size + size % 2,) if is_flat else state.shape
    count = -(-size // state.block)
    table = tensors.take(f"{name}.quant_map", "F32", shape=(16,), required_by=name).numpy()
    if not np.isfinite(table).all():
        tensors.fail(f"{name}.quant_map", "the values of codes must be finite")
    order = np.argsort(table, kind="stable")
    packed = tensors.take_bytes(name, (*shape[:-1], shape[-1] // 2), required_by=name + suffix)
    reordered = _reordered_bytes(np.argsort(order).astype(np.uint8))
    codes = lazy.nibbles(packed.map(lambda octets: reordered[octets], np.uint8), ml_dtypes.uint4)
    scale = _scales(tensors, name, state, (count,) if is_flat else (*leading, inputs // state.block))
    array = scaled(codes, scale, _format(state.quant_type, table[order]), (state.block,), state.dtype)
    return Flat(array, state.shape) if is_flat else array


def _reordered_bytes(rank: np.ndarray) -> np.ndarray:
    """For each byte, that with exchanged nibbles and each code replaced by its rank among dequantised values."""
    octets = np.arange(256)
    return rank[octets >> 4] | (rank[octets & 15] << 4)


def _format(quant_type: str, codebook: np.ndarray) -> Format:
    values = tuple(map(float, codebook))
    if values == tuple(np.float32(value) for value in FORMATS["nf4"].codebook or ()):
        return FORMATS["nf4"]
    return dataclasses.replace(FORMATS["nf4"], name=f"bitsandbytes.{quant_type}", codebook=values)


def _scales(tensors: Tensors, name: str, state: _State, shape: tuple[int, ...]) -> LazyArray:
    """The float32 scales in `shape`, decoded if they are quantised as well."""
    absmax, flat = f"{name}.absmax", (math.prod(shape),)
    if f"{name}.nested_absmax" not in tensors and state.nested_block is None:
        return tensors.take(absmax, "F32", shape=flat, view=shape, required_by=name)
    if state.nested_block is None or state.nested_offset is None:
        tensors.fail(name, "`nested_blocksize` and `nested_offset` are missing for its `nested_absmax`")
    nested_count = (-(-flat[0] // state.nested_block),)
    nested = tensors.take(f"{name}.nested_absmax", "F32", shape=nested_count, required_by=name)
    table = tensors.take(f"{name}.nested_quant_map", "F32", shape=(256,), required_by=name)
    codes = tensors.take(absmax, "U8", shape=flat, view=shape, required_by=name)
    return _decoded(codes, table, nested, state.nested_block, state.nested_offset)


def _decoded(codes: LazyArray, table: LazyArray, nested: LazyArray, block: int, offset: float) -> LazyArray:
    """Scales table[code] * nested[flat index // block] + offset, in float32."""
    strides = [math.prod(codes.shape[axis + 1 :]) for axis in range(codes.ndim)]

    def read(index: Index) -> np.ndarray:
        axes = (np.arange(s.start, s.stop) * stride for s, stride in zip(index, strides, strict=True))
        flat_index = sum(np.ix_(*axes))
        values = table.numpy()[codes.read(index)] * nested.numpy()[flat_index // block]
        return values + np.float32(offset)

    return LazyArray(codes.shape, np.dtype(np.float32), read)


def _read_state(tensors: Tensors, name: str, state_name: str) -> _State:
    nbytes = tensors.info(state_name).nbytes
    if nbytes > _MAX_STATE_BYTES:
        tensors.fail(state_name, f"the state has {nbytes} bytes; at most {_MAX_STATE_BYTES} are supported")
    text = tensors.take(state_name, "U8").numpy().tobytes()
    state = parse_object(text, tensors.info(state_name).path, f"tensor {state_name!r}")

    def check(key: str, is_valid: bool, expected: str) -> None:
        if not is_valid:
            tensors.fail(state_name, f"`{key}` must be {expected}, not {quoted(state.get(key))}")

    shape: Any = state.get("shape")
    block: Any = state.get("blocksize")
    dtype = dtypes.named(state.get("dtype"))
    nested_block, offset = state.get("nested_blocksize"), state.get("nested_offset")
    is_shape = isinstance(shape, list) and bool(shape) and all(_is_positive(n) for n in shape)
    check("shape", is_shape and math.prod(shape) < 2**62, "a list of positive integers")
    check("blocksize", _is_positive(block) and block % 2 == 0, "a positive even integer")
    check("dtype", dtype is not None, "float32, float16 or bfloat16")
    check("nested_blocksize", nested_block is None or _is_positive(nested_block), "a positive integer")
    check("nested_offset", offset is None or type(offset) in (int, float), "a number")
    assert dtype is not None
    return _State(state_name.rpartition("__")[2], block, dtype, tuple(shape), nested_block, offset)


def _is_positive(value: Any) -> bool:
    return type(value) is int and value > 0


def _eight_bit(tensors: Tensors, module: str) -> ScaledArray:
    name, format_name = f"{module}.weight", f"{module}.weight_format"
    codes = tensors.take(name, "I8", required_by=f"{module}.SCB")
    if codes.ndim != 2:
        tensors.fail(name, f"the shape is {list(codes.shape)}; expected [outputs, inputs]")
    if format_name in tensors:
        order = tensors.take(format_name, "U8").numpy().reshape(-1).tolist()
        if order != [_ROW_MAJOR]:
            tensors.fail(format_name, f"the format is {order}; only row-major weights ([{_ROW_MAJOR}]) are supported")
    scale = tensors.take(f"{module}.SCB", "F32", shape=codes.shape[:1]).reshape((codes.shape[0], 1))
    one_over_127 = lazy.constant(np.array(1 / 127, np.float32))
    return scaled(codes, scale, FORMATS["int8"], (0,), tensors.model_dtype(), tensor_scale=one_over_127)
