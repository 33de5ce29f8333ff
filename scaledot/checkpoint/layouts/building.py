"""Builds ScaledArrays from the tensors of a file: formats by the dtypes of codes and scales, blocks by their shapes."""

import dataclasses
import functools

import ml_dtypes
import numpy as np

from scaledot.array import ScaledArray
from scaledot.checkpoint.lazy import LazyArray
from scaledot.checkpoint.tensors import Tensors
from scaledot.formats import FORMATS, Format
from scaledot.numerics import blocks

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


def as_e8m0(scale: LazyArray) -> LazyArray:
    """Scales that are stored as bytes of exponents, as E8M0."""
    return scale.view(_E8M0) if scale.dtype == np.uint8 else scale


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
        if count != 1 and (count == 0 or size == 0 or size % count):
            hint = "" if declared is None else f" in blocks of {list(declared)}"
            tensors.fail(name, f"its scales have shape {list(scale_shape)}, which does not fit {list(shape)}{hint}")
        entries.append(0 if count == 1 and size != 1 else size // count)
    return blocks.trim(entries)


def scaled(codes: LazyArray, scale: LazyArray, format: Format, block: blocks.Block, dtype: np.dtype, **leaves):
    """A ScaledArray of LazyArrays; `leaves` are `tensor_scale` and `zero`."""
    return ScaledArray(codes, scale, format=format, block=block, dtype=dtype, **leaves)
