"""Builds ScaledArrays from the tensors of a file: formats by the dtypes of codes and scales, blocks by their shapes."""

import dataclasses
import functools

import ml_dtypes
import numpy as np

from scaledot.array import ScaledArray
from scaledot.checkpoint.lazy import LazyArray
from scaledot.checkpoint.reader import Index
from scaledot.checkpoint.tensors import Tensors
from scaledot.formats import FORMATS, Format
from scaledot.numerics import blocks

USUAL_BLOCK = (128, 128)  # of FP8 weights; of files without a configuration, shapes do not tell short blocks
_E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)


@functools.cache
def format_of(element: str, scale_dtype: np.dtype) -> Format:
    """The row of FORMATS for single-level scales of this dtype, or a variant of one with another scale dtype.

    >>> format_of("float8_e4m3fn", np.dtype("float32")), format_of("float8_e4m3fn", _E8M0)
    (Format('fp8_e4m3'), Format('mxfp8'))
    >>> format_of("int4", np.dtype("float16"))
    Format('int4_float16_scale')
    """
    rows = [row for row in FORMATS.values() if row.element == element and not row.two_level and row.codebook is None]
    same_scale = [row for row in rows if row.scale == scale_dtype.name]
    if same_scale:
        return same_scale[0]
    row = rows[0] if rows else Format(element.removeprefix("float"), element)
    return dataclasses.replace(row, name=f"{row.name}_{scale_dtype.name}_scale", scale=scale_dtype.name)


def with_scale_dtype(format: Format, scale_dtype: np.dtype, dtype: np.dtype) -> Format:
    """The format for scales of `scale_dtype` of an array of `dtype`: itself, or a variant with another scale dtype.

    >>> with_scale_dtype(FORMATS["int8"], np.dtype("float16"), np.dtype("float32"))
    Format('int8_float16_scale')
    """
    if format.scale_dtype(dtype) == scale_dtype:
        return format
    return dataclasses.replace(format, name=f"{format.name}_{scale_dtype.name}_scale", scale=scale_dtype.name)


def as_e8m0(scale: LazyArray) -> LazyArray:
    """Scales that are stored as bytes of exponents, as E8M0."""
    return scale.view(_E8M0) if scale.dtype == np.uint8 else scale


def with_rank(scale: LazyArray, ndim: int) -> LazyArray:
    """Scales in `ndim` axes: one scale of the weight, or scales of its leading axes, with axes of size 1 appended."""
    if scale.size == 1:
        return scale.reshape((1,) * ndim)
    return scale if scale.ndim >= ndim else scale.reshape((*scale.shape, *(1,) * (ndim - scale.ndim)))


def check_rank(tensors: Tensors, name: str) -> None:
    """Raises CheckpointError unless a tensor has the axes of a weight: outputs and inputs, after those of experts."""
    shape = tensors.info(name).shape
    if len(shape) < 2:
        tensors.fail(name, f"the shape is {list(shape)}; a quantised weight has at least 2 axes")


def per_tensor(tensors: Tensors, name: str, scale: LazyArray, shape: tuple[int, ...]) -> LazyArray:
    """The tensor scale `name` of a weight of `shape`: a scalar, or one entry per index of the leading axes."""
    found = () if scale.size == 1 else scale.shape
    while found and found[-1] == 1:
        found = found[:-1]
    if scale.size == 0 or len(found) > len(shape) - 2 or found != shape[: len(found)]:
        expected = f"[] or {list(shape[:-2])}" if len(shape) > 2 else "[] or [1]"
        tensors.fail(name, f"the shape is {list(scale.shape)}; a weight of shape {list(shape)} needs {expected}")
    return scale.reshape(found)


def block_of(
    tensors: Tensors,
    name: str,
    shape: tuple[int, ...],
    scale_shape: tuple[int, ...],
    declared: tuple[int, ...] | None = None,
) -> blocks.Block:
    """The block of a weight from the shape of its scales.

    declared: the block that the configuration declares, in the trailing axes; it is used where it gives that shape, and
    is needed if the last block of an axis is short. Otherwise an axis is divided into blocks of equal size.
    """
    if len(scale_shape) != len(shape):
        tensors.fail(name, f"its scales have shape {list(scale_shape)}, which does not fit shape {list(shape)}")
    if declared is not None and len(declared) <= len(shape) and blocks.grid(shape, declared) == scale_shape:
        return blocks.trim(declared)
    entries = []
    for size, count in zip(shape, scale_shape, strict=True):
        if count != 1 and (not 0 < count <= size or size % count):
            hint = "" if declared is None else f" in blocks of {list(declared)}"
            tensors.fail(name, f"its scales have shape {list(scale_shape)}, which does not fit {list(shape)}{hint}")
        entries.append(0 if count == 1 and size != 1 else size // count)
    return blocks.trim(entries)


def checked_block(
    tensors: Tensors,
    scale_name: str,
    shape: tuple[int, ...],
    scale_shape: tuple[int, ...],
    declared: blocks.Block | None,
) -> blocks.Block:
    """The declared block, whose grid the scales must have; without one, the usual block or that of the shapes."""
    if declared is None:
        has_one_scale = scale_shape[-2:] == (1, 1)
        return block_of(tensors, scale_name, shape, scale_shape, None if has_one_scale else USUAL_BLOCK)
    grid = blocks.grid(shape, declared)
    if scale_shape != grid:
        tensors.fail(
            scale_name,
            f"the shape is {list(scale_shape)}; codes of shape {list(shape)} in blocks of {list(declared)} need "
            f"{list(grid)}",
        )
    return declared


def scaled(codes: LazyArray, scale: LazyArray, format: Format, block: blocks.Block, dtype: np.dtype, **leaves):
    """A ScaledArray of LazyArrays; `leaves` are `tensor_scale` and `zero`."""
    return ScaledArray(codes, scale, format=format, block=block, dtype=dtype, **leaves)


def with_divided_scales(weight: ScaledArray) -> ScaledArray:
    """Returns the weight with float32 scales, block scale / global scale, as compressed-tensors dequantises NVFP4.

    Its float32 scales are scale / divisor; scale * float32(1 / divisor) may differ in the last bit. A weight whose
    tensor scale is not the reciprocal of a stored divisor is returned as it is.
    """
    scale, divisor = weight.scale, getattr(weight.tensor_scale, "reciprocal_of", None)
    if divisor is None:
        return weight

    def read(index: Index) -> np.ndarray:
        divisors = divisor.read(index[: divisor.ndim])
        return scale.read(index).astype(np.float32) / divisors.reshape(
            *divisors.shape, *(1,) * (scale.ndim - divisor.ndim)
        )

    divided = LazyArray(scale.shape, np.dtype(np.float32), read)
    format = format_of(weight.format.element, divided.dtype)
    return dataclasses.replace(weight, scale=divided, tensor_scale=None, format=format)
