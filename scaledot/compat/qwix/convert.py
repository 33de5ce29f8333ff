"""Conversion between ScaledArray and the real qwix.QArray, for libraries that accept the latter."""

import jax.numpy as jnp
from jax import lax

from scaledot.array import ScaledArray
from scaledot.compat.qwix.array import QArray, as_scaled
from scaledot.formats import NF4_CODEBOOK, Format
from scaledot.numerics import blocks
from scaledot.numerics.scale import with_trailing_axes
from scaledot.ops.cast_spec import check_consistent


def from_qwix(array) -> ScaledArray:
    """Converts a qwix.QArray to a ScaledArray with the same codes and scales."""
    missing = [name for name in ("qvalue", "scale", "zero_point", "qtype") if not hasattr(array, name)]
    if missing:
        raise TypeError(f"`array` must be a QArray; {type(array).__name__} has no {missing[0]}")
    return as_scaled(QArray(array.qvalue, array.scale, array.zero_point, array.qtype))


def to_qwix(scaled: ScaledArray, *, fold: bool = False):
    """Converts a ScaledArray to a qwix.QArray with the same dequantised values; its dtype is that of its scale.

    E8M0 and FP8 scales become float32. Raises ValueError for what a QArray cannot represent: rotations, 6-bit codes, a
    last block that is shorter than the others, codebooks other than nf4, and a tensor scale, unless `fold` multiplies
    it into the block scales.
    """
    import qwix  # pyright: ignore[reportMissingImports]

    check_consistent(scaled, "scaled")
    _check_representable(scaled, fold)
    scale = _float_scale(scaled)
    if scaled.tensor_scale is not None:
        scale = scale.astype(jnp.float32) * with_trailing_axes(scaled.tensor_scale, scale.ndim)
    return qwix.QArray(scaled.data, scale, scaled.zero, _qtype(scaled))


def _check_representable(q: ScaledArray, fold: bool) -> None:
    def refuse(reason: str):
        raise ValueError(f"a qwix.QArray cannot hold {q}: {reason}")

    if q.rotation is not None:
        refuse("it is rotated; dequantize and quantize without `rotation`")
    if q.format.is_float and q.format.code_dtype == jnp.uint8:
        refuse("6-bit codes are raw bits in uint8, which Qwix would read as integers")
    if q.format.codebook not in (None, NF4_CODEBOOK):
        refuse("its codebook is not nf4")
    if q.format.grids is not None:
        refuse("the sign of a scale says in which of two grids the codes of its block are")
    if q.tensor_scale is not None and not fold:
        refuse("it has two levels of scales; pass fold=True to multiply them, which rounds to float32")
    expanded = blocks.expand(q.block, q.ndim)
    short = [
        size
        for size, b in zip(q.shape, expanded, strict=True)
        if b > 1 and not blocks.covers_axis(size, b) and size % b
    ]
    if short:
        refuse(f"an axis of {short[0]} ends in a short block")


def _float_scale(q: ScaledArray):
    if q.format.scale != "float8_e8m0fnu":
        return q.scale.astype(jnp.float32) if q.scale.dtype.itemsize == 1 else q.scale
    # By bit operations: 2^-127 (code 0) is subnormal in float32, and XLA's conversion may flush it to zero.
    code = lax.bitcast_convert_type(q.scale, jnp.uint8).astype(jnp.uint32)
    pattern = jnp.where(code == 0, jnp.uint32(0x00400000), code << 23)
    pattern = jnp.where(code == 255, jnp.uint32(0x7FC00000), pattern)
    return lax.bitcast_convert_type(pattern, jnp.float32)


def _qtype(q: ScaledArray):
    """Returns Qwix's logical type for the codes."""
    format: Format = q.format
    if format.codebook is not None:
        return "nf4"
    if not format.is_float:
        return format.code_dtype if format.bits in (4, 8) else format.element
    return format.code_dtype
