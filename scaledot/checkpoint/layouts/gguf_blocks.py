"""GGUF: the types of tensors whose rows are cut into blocks of codes and scales, as ScaledArrays or `Offset` arrays.

A block is a record of bytes: float16 scales, or packed ones under a float16 scale (the K types), and then codes. Values
are code * scale, where the product of two stored scales is exact in float32, plus an offset for Q4_1, Q5_1, Q4_K and
Q5_K. Names are those of the file.

The tensor scale of an NVFP4 tensor `X.weight` is its sibling `X.scale`. Beside other types, a tensor `X.scale` is
returned and not applied. The E2M1 code of -0 means +0 in GGUF, and is read as such.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from scaledot.array import ScaledArray
from scaledot.checkpoint import lazy
from scaledot.checkpoint.forms import Offset
from scaledot.checkpoint.gguf import TYPES
from scaledot.checkpoint.layouts.building import format_of, scaled
from scaledot.checkpoint.lazy import LazyArray
from scaledot.checkpoint.source import Source
from scaledot.checkpoint.tensors import Tensors
from scaledot.checkpoint.unpacking import nibbles_as
from scaledot.formats import FORMATS, Format

RESERVED = ()
_INTEGERS = ("I8", "I16", "I32")
_ONE_LEVEL_NVFP4 = dataclasses.replace(FORMATS["nvfp4"], name="nvfp4_one_level", two_level=False)
_F16 = np.dtype(np.float16)
_F32 = np.dtype(np.float32)
_NAN_OF_INFINITY = np.errstate(invalid="ignore")  # a damaged scale: infinity times the code 0


def matches(source: Source) -> bool:
    return source.is_gguf


def weights(tensors: Tensors) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in tensors:
        if name in tensors and tensors.info(name).dtype in _LAYOUTS:
            found[name] = _weight(tensors, name)
        elif name in tensors and tensors.info(name).dtype in _INTEGERS:
            found[name] = tensors.take(name)
    return found


class _Part(NamedTuple):
    """Elements in the bytes of a block: `decode` returns `count` of them from the bytes `octets`."""

    octets: slice
    count: int
    decode: Callable[[np.ndarray], np.ndarray]

    def array(self, records: LazyArray, dtype: np.dtype) -> LazyArray:
        return lazy.fields(records, self.octets, self.count, dtype, self.decode)


class _Layout(NamedTuple):
    format: Format
    codes: _Part
    scale: _Part
    offset: _Part | None = None


def _weight(tensors: Tensors, name: str) -> ScaledArray | Offset:
    layout = _LAYOUTS[tensors.info(name).dtype]
    records = tensors.take(name)
    format, tensor_scale = layout.format, None
    if format.two_level:
        tensor_scale = _tensor_scale(tensors, name, records.shape[:-2])
        format = _ONE_LEVEL_NVFP4 if tensor_scale is None else format
    dtype = tensors.model_dtype()
    codes = layout.codes.array(records, format.code_dtype)
    scale = layout.scale.array(records, format.scale_dtype(dtype))
    block = (layout.codes.count // layout.scale.count,)
    array = scaled(codes, scale, format, block, dtype, tensor_scale=tensor_scale)
    return array if layout.offset is None else Offset(array, layout.offset.array(records, _F32))


def _tensor_scale(tensors: Tensors, name: str, leading: tuple[int, ...]) -> LazyArray | None:
    """The sibling `X.scale` of `X.weight`: one scale, or one for each matrix of a stack; None if there is none."""
    sibling = f"{name.removesuffix('.weight')}.scale"
    if sibling not in tensors:
        return None
    scale = tensors.take(sibling, "F32")
    if scale.size == 1:
        return scale.reshape(())
    if scale.shape != leading[:1] or len(leading) < 2:
        tensors.fail(sibling, f"the shape is {list(scale.shape)}; expected [1], or an entry per matrix of {name!r}")
    return scale


def _planes(octets: np.ndarray, bits: int, count: int) -> np.ndarray:
    """The lowest `bits` bits of each `count` bytes, then the next higher ones, and so on, along the last axis."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    *leading, size = octets.shape
    grouped = octets.reshape(*leading, size // count, 1, count)
    return ((grouped >> shifts) & np.uint8(2**bits - 1)).reshape(*leading, size * 8 // bits)


def _halves(octets: np.ndarray, count: int) -> np.ndarray:
    """The low nibbles of each `count` bytes, and then their high nibbles, along the last axis."""
    return _planes(octets, 4, count)


def _signed(codes: np.ndarray, half: int, dtype) -> np.ndarray:
    return (codes.astype(np.int8) - np.int8(half)).astype(dtype)


def _halfs(octets: np.ndarray) -> np.ndarray:
    return octets.view(_F16)


def _fifth_bits(octets: np.ndarray) -> np.ndarray:
    """Codes of 5 bits, whose highest ones are in the first 4 bytes."""
    high = np.unpackbits(octets[..., :4], axis=-1, bitorder="little")
    return _halves(octets[..., 4:], 16) | (high << np.uint8(4))


def _k_codes_of_5_bits(octets: np.ndarray) -> np.ndarray:
    """Codes whose highest bits are in the first 32 bytes, those of every 32 codes in another bit."""
    return _halves(octets[..., 32:], 32) | (_planes(octets[..., :32], 1, 32) << np.uint8(4))


def _k_codes_of_6_bits(octets: np.ndarray) -> np.ndarray:
    """Codes whose low nibbles are in the first 128 bytes and whose two highest bits in the other 64."""
    codes = _halves(octets[..., :128], 64) | (_planes(octets[..., 128:], 2, 32) << np.uint8(4))
    return _signed(codes, 32, np.int8)


@_NAN_OF_INFINITY
def _k_scales(octets: np.ndarray) -> np.ndarray:
    """Eight scales of 6 bits times the float16 number before them; bytes are d, dmin, and 12 of scales and minima."""
    scales, shared = octets[..., 4:], octets[..., :2].view(_F16).astype(_F32)
    low, tail = scales[..., :4], scales[..., 8:]
    codes = np.concatenate([low & 63, (tail & 15) | ((low >> 2) & 48)], axis=-1)
    return shared * codes.astype(_F32)


@_NAN_OF_INFINITY
def _k_offsets(octets: np.ndarray) -> np.ndarray:
    minima, shared = octets[..., 4:], octets[..., 2:4].view(_F16).astype(_F32)
    middle, tail = minima[..., 4:8], minima[..., 8:]
    codes = np.concatenate([middle & 63, (tail >> 4) | ((middle >> 2) & 48)], axis=-1)
    return -(shared * codes.astype(_F32))


@_NAN_OF_INFINITY
def _q6_k_scales(octets: np.ndarray) -> np.ndarray:
    """Sixteen int8 scales times the float16 number after them."""
    return octets[..., 16:].view(_F16).astype(_F32) * octets[..., :16].view(np.int8).astype(_F32)


def _e2m1(codes: np.ndarray) -> np.ndarray:
    return nibbles_as(np.where(codes == 8, np.uint8(0), codes), ml_dtypes.float4_e2m1fn)


def _unsigned_e4m3(octets: np.ndarray) -> np.ndarray:
    """E4M3 scales without a sign; the code of NaN means 0."""
    magnitude = octets & np.uint8(127)
    return np.where(magnitude == 127, np.uint8(0), magnitude).view(ml_dtypes.float8_e4m3fn)


_K_SCALES, _K_OFFSETS = _Part(slice(0, 16), 8, _k_scales), _Part(slice(0, 16), 8, _k_offsets)
_FIRST_HALF, _SECOND_HALF = _Part(slice(0, 2), 1, _halfs), _Part(slice(2, 4), 1, lambda o: _halfs(o).astype(_F32))
_LAYOUTS = {
    "Q8_0": _Layout(format_of("int8", _F16), _Part(slice(2, 34), 32, lambda o: o.view(np.int8)), _FIRST_HALF),
    "Q4_0": _Layout(
        format_of("int4", _F16),
        _Part(slice(2, 18), 32, lambda o: _signed(_halves(o, 16), 8, ml_dtypes.int4)),
        _FIRST_HALF,
    ),
    "Q4_1": _Layout(
        format_of("uint4", _F16),
        _Part(slice(4, 20), 32, lambda o: nibbles_as(_halves(o, 16), ml_dtypes.uint4)),
        _FIRST_HALF,
        _SECOND_HALF,
    ),
    "Q5_0": _Layout(
        format_of("int5", _F16), _Part(slice(2, 22), 32, lambda o: _signed(_fifth_bits(o), 16, np.int8)), _FIRST_HALF
    ),
    "Q5_1": _Layout(format_of("uint5", _F16), _Part(slice(4, 24), 32, _fifth_bits), _FIRST_HALF, _SECOND_HALF),
    "Q4_K": _Layout(
        format_of("uint4", _F32),
        _Part(slice(16, 144), 256, lambda o: nibbles_as(_halves(o, 32), ml_dtypes.uint4)),
        _K_SCALES,
        _K_OFFSETS,
    ),
    "Q5_K": _Layout(format_of("uint5", _F32), _Part(slice(16, 176), 256, _k_codes_of_5_bits), _K_SCALES, _K_OFFSETS),
    "Q6_K": _Layout(
        FORMATS["int6"], _Part(slice(0, 192), 256, _k_codes_of_6_bits), _Part(slice(192, 210), 16, _q6_k_scales)
    ),
    "MXFP4": _Layout(
        FORMATS["mxfp4"],
        _Part(slice(1, 17), 32, lambda o: _e2m1(_halves(o, 16))),
        _Part(slice(0, 1), 1, lambda o: o.view(ml_dtypes.float8_e8m0fnu)),
    ),
    "NVFP4": _Layout(
        FORMATS["nvfp4"],
        _Part(slice(4, 36), 64, lambda o: _e2m1(_halves(o, 8))),
        _Part(slice(0, 4), 4, _unsigned_e4m3),
    ),
}
assert set(_LAYOUTS) == {block_type.name for block_type in TYPES.values() if block_type.elements > 1}
