"""torchao: tensor subclasses, flattened to tensors, with their attributes as JSON in the metadata of the file.

The weight `a.weight` is stored as `a._weight_qdata`, `a._weight_scale` and so on; the metadata of that name has its
class and block size. Block scales of MXTensor and NVFP4Tensor are stored in 128 x 4 tiles (`is_swizzled_scales`). The
zero point of an Int4Tensor is an addend in the unit of values, so that the weight is an `Offset` array. Scales of
activations (`a._weight_act_*`) are returned. Classes whose codes are shuffled for one kind of device are refused.
"""

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from scaledot import format_variants
from scaledot.array import ScaledArray
from scaledot.checkpoint import dtypes, lazy
from scaledot.checkpoint.errors import CheckpointError, quoted
from scaledot.checkpoint.forms import Offset
from scaledot.checkpoint.json_text import parse_object
from scaledot.checkpoint.layouts.building import format_of, scaled
from scaledot.checkpoint.lazy import LazyArray
from scaledot.checkpoint.source import Source
from scaledot.checkpoint.tensors import Tensors
from scaledot.formats import Format
from scaledot.numerics import blocks

RESERVED = ("_qdata", "_weight_scale", "_weight_zero_point", "_weight_per_tensor_scale")
_FLOAT_SCALES = ("F32", "BF16", "F16")
_INTEGERS = ("I8", "I16", "I32", "I64")
_INTEGER_ELEMENTS = tuple(f"int{bits}" for bits in range(2, 9))


class _Flattened(NamedTuple):
    """A flattened tensor subclass: its name, class, attributes, and the ends of the names of its tensors."""

    tensors: Tensors
    name: str
    kind: str
    attributes: dict[str, Any]
    parts: list[str]

    def part_name(self, part: str) -> str:
        module, dot, leaf = self.name.rpartition(".")
        return f"{module}{dot}_{leaf}_{part}"

    def take(self, part: str, *dtype_names: str, **checks) -> LazyArray:
        return self.tensors.take(self.part_name(part), *dtype_names, required_by=self.part_name("qdata"), **checks)

    def fail(self, reason: str):
        raise CheckpointError(self.tensors.source.path, f"{self.kind}: {reason}", tensor=self.name)

    def dtype(self, key: str) -> np.dtype:
        value = self.attributes.get(key)
        dtype = dtypes.named(value.get("_data")) if isinstance(value, dict) else None
        return self.fail(f"`{key}` is {quoted(value)}, not a float dtype") if dtype is None else dtype

    def element(self, key: str) -> str:
        """The name of the dtype of codes, or the string that torchao has for those without a dtype."""
        value = self.attributes.get(key)
        return str(value.get("_data")) if isinstance(value, dict) else str(value)


def matches(source: Source) -> bool:
    if source.quantization:
        return source.quantization.get("quant_method") == "torchao"
    return not source.is_gguf and "tensor_names" in source.metadata


def weights(tensors: Tensors) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for flattened in _flattened(tensors):
        for part in flattened.parts:
            if part.startswith("act_"):
                found[flattened.part_name(part)] = flattened.take(part)
        found[flattened.name] = _READERS[flattened.kind](flattened)
    return found


def _flattened(tensors: Tensors):
    """The tensor subclasses of the metadata; shards have metadata of their own, so `tensor_names` are incomplete."""
    for name, text in tensors.source.metadata.items():
        if not text.lstrip().startswith("{"):
            continue
        path = tensors.source.path
        record = parse_object(text.encode(), path, f"the metadata of tensor {quoted(name)}")
        kind, attributes, parts = record.get("_type"), record.get("_data"), record.get("_tensor_data_names")
        if "_type" not in record or kind == "Tensor":
            continue
        if not isinstance(kind, str) or kind not in _READERS:
            raise CheckpointError(
                path, f"the class {quoted(kind)} is not supported; there are {', '.join(_READERS)}", tensor=name
            )
        if not isinstance(attributes, dict) or not isinstance(parts, list) or not all(type(p) is str for p in parts):
            raise CheckpointError(path, "`_data` and `_tensor_data_names` are missing", tensor=name)
        yield _Flattened(tensors, name, kind, attributes, parts)


def _block(flattened: _Flattened, shape: tuple[int, ...]) -> blocks.Block:
    """The block, with one entry per axis; 0 is a whole axis."""
    block = flattened.attributes.get("block_size")
    if not isinstance(block, list) or len(block) != len(shape) or not all(type(n) is int and n > 0 for n in block):
        flattened.fail(f"`block_size` {quoted(block)} does not fit shape {list(shape)}")
    return tuple(0 if n == size != 1 else n for n, size in zip(block, shape, strict=True))


def _per_block(flattened: _Flattened, part: str, grid: tuple[int, ...], *dtype_names: str) -> LazyArray:
    """A tensor with an entry per block of a grid, which may lack axes of size 1 in the file."""
    array = flattened.take(part, *dtype_names)
    if [n for n in array.shape if n != 1] != [n for n in grid if n != 1]:
        flattened.tensors.fail(flattened.part_name(part), f"the shape is {list(array.shape)}; expected {list(grid)}")
    return array.reshape(grid)


def _float8(flattened: _Flattened) -> ScaledArray:
    codes = flattened.take("qdata", "F8_E4M3", "F8_E5M2")
    block = _block(flattened, codes.shape)
    scale = _per_block(flattened, "scale", blocks.grid(codes.shape, block), *_FLOAT_SCALES)
    format = format_of(codes.dtype.name, scale.dtype)
    return scaled(codes, scale, format, blocks.trim(block), flattened.dtype("dtype"))


def _integer(flattened: _Flattened) -> ScaledArray:
    """Int8Tensor, or IntxUnpackedToInt8Tensor, whose codes have fewer bits than their int8."""
    element = flattened.element("target_dtype") if "target_dtype" in flattened.attributes else "int8"
    if element not in _INTEGER_ELEMENTS:
        flattened.fail(f"`target_dtype` {quoted(element)} is not supported; there are {', '.join(_INTEGER_ELEMENTS)}")
    codes = flattened.take("qdata", "I8")
    block = _block(flattened, codes.shape)
    grid = blocks.grid(codes.shape, block)
    scale = _per_block(flattened, "scale", grid, *_FLOAT_SCALES)
    format, zero = format_of(element, scale.dtype), None
    if "zero_point" in flattened.parts:
        zero = _narrowed(flattened, _per_block(flattened, "zero_point", grid, *_INTEGERS), format)
    codes = _narrowed(flattened, codes, format)
    return scaled(codes, scale, format, blocks.trim(block), flattened.dtype("dtype"), zero=zero)


def _narrowed(flattened: _Flattened, array: LazyArray, format: Format) -> LazyArray:
    """Integers in the code dtype of a format; raises when it reads those that its bits do not hold."""
    half, dtype = 2 ** (format.bits - 1), format.code_dtype
    if array.dtype == dtype:
        return array

    def narrow(values: np.ndarray) -> np.ndarray:
        if values.size and not -half <= values.min() <= values.max() < half:
            flattened.fail(f"codes or zero points are outside [{-half}, {half - 1}]")
        return values.astype(np.int8).astype(dtype)

    return array.map(narrow, dtype)


def _int4(flattened: _Flattened) -> Offset:
    """Two's complement nibbles (..., outputs, inputs / 2); scales and addends are (..., inputs / group, outputs)."""
    codes = lazy.nibbles(flattened.take("qdata", "I8", "U8"), ml_dtypes.int4)
    if codes.ndim < 2:
        flattened.fail(f"`qdata` has shape [{codes.shape[0] // 2}]; expected [..., outputs, inputs / 2]")
    block = _block(flattened, codes.shape)
    *leading, outputs, groups = blocks.grid(codes.shape, block)
    axes = (*range(codes.ndim - 2), codes.ndim - 1, codes.ndim - 2)
    scale, offset = (
        _per_block(flattened, part, (*leading, groups, outputs), *_FLOAT_SCALES).transpose(axes)
        for part in ("scale", "zero_point")
    )
    array = scaled(codes, scale, format_of("int4", scale.dtype), blocks.trim(block), scale.dtype)
    return Offset(array, offset.map(lambda values: values.astype(np.float32), np.float32))


def _mx(flattened: _Flattened) -> ScaledArray:
    element = flattened.element("elem_dtype")
    if element == "float4_e2m1fn_x2":
        codes = _fp4_codes(flattened)
    elif element in ("float8_e4m3fn", "float8_e5m2"):
        codes = flattened.take("qdata", "F8_E4M3" if element == "float8_e4m3fn" else "F8_E5M2")
    else:
        flattened.fail(f"`elem_dtype` {quoted(element)} is not supported; there are float8 and float4_e2m1fn_x2")
    scale = _tiled_scales(flattened, codes.shape, np.dtype(ml_dtypes.float8_e8m0fnu), ("F8_E8M0", "U8"))
    format = format_of(codes.dtype.name, scale.dtype)
    return scaled(codes, scale, format, (flattened.attributes["block_size"],), flattened.dtype("orig_dtype"))


def _nvfp4(flattened: _Flattened) -> ScaledArray:
    codes = _fp4_codes(flattened)
    scale = _tiled_scales(flattened, codes.shape, np.dtype(ml_dtypes.float8_e4m3fn), ("F8_E4M3", "U8"))
    format, tensor_scale = format_variants.torchao.nvfp4_single_level, None
    if "per_tensor_scale" in flattened.parts:
        format, tensor_scale = format_variants.torchao.nvfp4, flattened.take("per_tensor_scale", "F32")
        if tensor_scale.size != 1:
            flattened.fail(f"`per_tensor_scale` has shape {list(tensor_scale.shape)}; expected one element")
        tensor_scale = tensor_scale.reshape(())
    block, dtype = (flattened.attributes["block_size"],), flattened.dtype("orig_dtype")
    return scaled(codes, scale, format, block, dtype, tensor_scale=tensor_scale)


def _fp4_codes(flattened: _Flattened) -> LazyArray:
    codes = flattened.take("qdata", "U8", "F4")
    if codes.ndim == 0:
        flattened.fail("a quantised weight has at least one axis, this one has shape []")
    return codes if codes.dtype == ml_dtypes.float4_e2m1fn else lazy.nibbles(codes, ml_dtypes.float4_e2m1fn)


def _tiled_scales(
    flattened: _Flattened, shape: tuple[int, ...], dtype: np.dtype, dtype_names: tuple[str, ...]
) -> LazyArray:
    """The scales of blocks along the last axis, tiled or in their own shape in the file."""
    size = flattened.attributes.get("block_size")
    if type(size) is not int or size < 1 or not shape or shape[-1] % size:
        flattened.fail(f"`block_size` {quoted(size)} does not divide the last axis of {list(shape)}")
    grid = (*shape[:-1], shape[-1] // size)
    if flattened.attributes.get("is_swizzled_scales") is not True:
        return flattened.take("scale", *dtype_names, shape=grid).view(dtype)
    if len(grid) != 2:
        flattened.fail(f"scales of shape {list(grid)} with `is_swizzled_scales` are not supported, only of matrices")
    tiles = (-(-grid[0] // 128), -(-grid[1] // 4), 32, 4, 4)
    return lazy.untiled(flattened.take("scale", *dtype_names, view=tiles), grid).view(dtype)


_READERS = {
    "Float8Tensor": _float8,
    "Int8Tensor": _integer,
    "IntxUnpackedToInt8Tensor": _integer,
    "Int4Tensor": _int4,
    "MXTensor": _mx,
    "NVFP4Tensor": _nvfp4,
}
