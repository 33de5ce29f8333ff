"""Quantisation of arrays to QArrays: calibrate, compute scale and zero point, quantise.

Statistics come from `numerics.calibrate`, scales from `numerics.scale`, codes from `scaledot.quantize`. Qwix's numerics
(arithmetic in the input's dtype, half-integer clipping bounds) are fields of the formats in `format_variants.qwix`.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scaledot.compat.qwix.array import (
    QArray,
    ShapeT,
    as_scaled,
    call_with_generic_broadcast,
    format_of,
    split_axis,
    tile_size,
    validate_qarray,
)
from scaledot.numerics import blocks, scale
from scaledot.numerics import calibrate as statistics
from scaledot.numerics.rounding import round_to
from scaledot.ops import quantize as core

_MX = ("mxfp8", "mxfp4")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HowToQuantize:
    """Quantisation parameters of one array.

    qtype: a dtype of at most 8 bits, or "nf4", "mxfp8", "mxfp4", "int2" to "int7".
    channelwise_axes: axes with one scale per index; may be negative.
    tiled_axes: {axis: elements per scale}; a float is 1 / (number of tiles), so 1 is one scale per element and 1.0 one
      scale for the axis. Axes may be negative.
    calibration_method: `absmax[,f]`, `minmax[,f]`, `rms,f`, `fixed,a`, `fixed,lo,hi`.
    noise_fn: from a shape to noise in [-0.5, 0.5] that broadcasts to it, added before integers are rounded.

    mxfp8 and mxfp4 have tiles of 32 along the last axis (or the one in `tiled_axes`) and are channelwise along all
    others.
    """

    qtype: Any
    channelwise_axes: Collection[int] = ()
    tiled_axes: Mapping[int, int | float] = dataclasses.field(default_factory=dict)
    calibration_method: str = "absmax"
    noise_fn: Callable[[tuple[int, ...]], jax.Array] | None = None

    def __post_init__(self):
        not_32 = [size for size in self.tiled_axes.values() if size != 32]
        if self.qtype in _MX and (not_32 or len(self.tiled_axes) > 1):
            raise ValueError(
                f"`tiled_axes` of {self.qtype} must be tiles of 32 along one axis, not {dict(self.tiled_axes)}"
            )

    def __hash__(self) -> int:
        axes = tuple(self.channelwise_axes), tuple(sorted(self.tiled_axes.items()))
        return hash((self.qtype, *axes, self.calibration_method, self.noise_fn))

    @property
    def clips(self) -> bool:
        return may_clip(self.calibration_method)


def may_clip(calibration_method: str) -> bool:
    """Whether the range of a calibration method may not cover the data: not of absmax and minmax, times 1 or more."""
    parsed = statistics.parse(calibration_method.lower())
    return parsed.method not in ("absmax", "minmax") or (bool(parsed.values) and parsed.values[0] < 1)


def get_scale_shape(array_shape: ShapeT, how: HowToQuantize) -> tuple[int, ...]:
    """Returns the shape of the scale of an array of shape `array_shape`.

    >>> get_scale_shape((8, 64, 6), HowToQuantize(qtype="int4", channelwise_axes=[-1], tiled_axes={1: 16}))
    (1, 4, 6)
    """
    ndim = len(array_shape)
    tiled = {blocks.positive_axis(axis, ndim): tile for axis, tile in how.tiled_axes.items()}
    channelwise = {blocks.positive_axis(axis, ndim) for axis in how.channelwise_axes}
    if channelwise & tiled.keys():
        raise ValueError(f"axes {sorted(channelwise & tiled.keys())} cannot be both channelwise and tiled")
    if how.qtype in _MX:
        tiled = tiled or {ndim - 1: 32}
        channelwise = set(range(ndim)) - tiled.keys()
    shape = []
    for axis, size in enumerate(array_shape):
        tile = 1 if axis in channelwise else tile_size(size, tiled[axis]) if axis in tiled else max(size, 1)
        if tile <= 0 or size % tile:
            raise ValueError(
                f"shape {tuple(array_shape)} cannot be tiled as {dict(how.tiled_axes)}: "
                f"axis {axis} of {size} is no multiple of {tile}"
            )
        shape.append(size // tile if axis in tiled or axis in channelwise else 1)
    return tuple(shape)


def calibrate(array: jax.Array, how: HowToQuantize) -> dict[str, jax.Array]:
    """Returns {"absmax": ...} or {"min": ..., "max": ...}, of the scale's shape and the array's dtype."""
    array = jnp.asarray(array)
    parsed = statistics.parse(how.calibration_method.lower())
    shape = get_scale_shape(array.shape, how)
    multiplier = 1.0
    if parsed.method == "fixed":
        shape = (1,) * array.ndim
        if len(parsed.values) == 2 and sum(parsed.values) == 0:
            parsed = statistics.Calibration("fixed", parsed.values[1:])
    elif parsed.method in ("absmax", "minmax", "rms") and parsed.values:
        multiplier, parsed = parsed.values[0], statistics.Calibration(parsed.method, (1.0,))
    values = _calibrate(array, parsed, _block(array.shape, shape))
    return {name: value * jnp.asarray(multiplier, array.dtype) for name, value in values.items()}


def _block(shape: tuple[int, ...], scale_shape: tuple[int, ...]) -> blocks.Block:
    return tuple(0 if count == 1 else size // count for size, count in zip(shape, scale_shape, strict=True))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _calibrate(array: jax.Array, parsed: statistics.Calibration, block: blocks.Block) -> dict[str, jax.Array]:
    x = array.astype(jnp.float32)
    if parsed.is_range:
        low, high = statistics.extremes(x, parsed, block)
        values = {"min": low, "max": high}
    else:
        values = {"absmax": statistics.magnitude(x, parsed, block)}
    return {name: round_to(value, array.dtype).astype(array.dtype) for name, value in values.items()}


def compute_scale_zero_point(calibration: Mapping[str, jax.Array], qtype) -> tuple[jax.Array, jax.Array | None]:
    """Returns (scale, zero point or None): a zero point if `calibration` has min and max. A scale of 0 becomes 1."""
    format = format_of(qtype)
    if "min" in calibration and "max" in calibration:
        if not format.is_integer:
            raise ValueError(
                f"calibration by min and max needs a zero point, which {format.name} does not have; use 'absmax'"
            )
        low, high = calibration["min"], calibration["max"]
        return _affine_scale(low, high, format)
    if "absmax" in calibration:
        return _symmetric_scale(calibration["absmax"], format), None
    raise ValueError(f"`calibration` must hold 'absmax' or 'min' and 'max', not {sorted(calibration)}")


@functools.partial(jax.jit, static_argnums=1)
def _symmetric_scale(absmax: jax.Array, format) -> jax.Array:
    return scale.scales_of(absmax.astype(jnp.float32), format, absmax.dtype).scale


@functools.partial(jax.jit, static_argnums=2)
def _affine_scale(low: jax.Array, high: jax.Array, format) -> tuple[jax.Array, jax.Array]:
    scales, zero = scale.zero_point(low.astype(jnp.float32), high.astype(jnp.float32), format, low.dtype)
    return scales.scale, zero.astype(jnp.int8).astype(format.code_dtype)


def quantize_with_scale_zero_point(
    array: jax.Array,
    qtype,
    scale: jax.Array,
    zero_point: jax.Array | None,
    noise_fn: Callable[[tuple[int, ...]], jax.Array] | None = None,
) -> QArray:
    """Quantises with the scale and zero point passed; the scale is cast to the array's dtype first."""
    array = jnp.asarray(array)
    if not jnp.issubdtype(array.dtype, jnp.floating) or jnp.finfo(array.dtype).bits < 16:
        raise ValueError(f"`array` is {array.dtype}; quantize takes floats of at least 16 bits")
    if zero_point is not None and zero_point.shape != scale.shape:
        raise ValueError(f"`zero_point` has shape {zero_point.shape}, but `scale` has {scale.shape}")
    format = format_of(qtype)
    rounding: dict[str, Any] = {}
    if noise_fn is not None and (format.is_integer or format.is_unsigned):
        # round(w + noise) rounds up if the fractional part of w exceeds 1/2 - noise, which stochastic rounding compares
        # with a uniform number.
        rounding = {"rounding": "stochastic", "uniform": np.float32(0.5) - noise_fn(array.shape)}
    quantized = core.quantize(
        array,
        format,
        axis=tuple(range(array.ndim)),
        block=_block(array.shape, scale.shape),
        scale=scale.astype(array.dtype),
        zero=zero_point,
        **rounding,
    )
    return QArray(quantized.data, quantized.scale, quantized.zero, qtype)


def quantize(array: jax.Array, how: HowToQuantize) -> QArray:
    """Quantises an array: calibrates, computes scale and zero point, rounds.

    >>> quantize(jnp.array([[1.0, -2.0], [0.0, 0.0]]), HowToQuantize(qtype=jnp.int8, channelwise_axes=[0])).qvalue
    Array([[  64, -127],
           [   0,    0]], dtype=int8)
    """
    scale, zero_point = compute_scale_zero_point(calibrate(array, how), how.qtype)
    return quantize_with_scale_zero_point(array, how.qtype, scale, zero_point, how.noise_fn)


def quantize_api(
    array: jax.Array,
    qtype,
    *,
    channelwise_axes: Collection[int] = (),
    tiled_axes: Mapping[int, int | float] | None = None,
    calibration_method: str = "absmax",
    scale_dtype=None,
) -> QArray:
    """Quantises like `quantize`, with the fields of HowToQuantize as arguments; Qwix exports it as `qwix.quantize`.

    `quantize_api(array, how)` with a HowToQuantize as second argument is `quantize(array, how)`.

    >>> quantize_api(jnp.array([[1.0, -2.0], [0.0, 0.0]]), jnp.int8, channelwise_axes=[0]).scale.shape
    (2, 1)
    """
    fields = {"channelwise_axes": channelwise_axes, "tiled_axes": tiled_axes or {}}
    how = qtype
    if not isinstance(how, HowToQuantize):
        how = HowToQuantize(qtype=qtype, calibration_method=calibration_method, **fields)
    elif any(fields.values()) or calibration_method != "absmax":
        raise ValueError("`qtype` is a HowToQuantize, which has axes and calibration method; pass these there")
    q = quantize(array, how)
    return q if scale_dtype is None else q.astype(scale_dtype)


def dequantize(array: QArray) -> jax.Array:
    """Dequantises in float32 and rounds once, to the scale's dtype."""
    validate_qarray(array)
    return core.dequantize(as_scaled(array))


def clip_to_calibration(
    array: jax.Array, calibration: Mapping[str, jax.Array], tiled_axes: Mapping[int, int | float]
) -> jax.Array:
    """Clips an array to the calibrated range."""
    split_axis(array, tiled_axes)  # raises if a tile size does not divide its axis
    low, high = (bound.astype(array.dtype) for bound in _bounds(calibration))
    # By selects, because the gradient of jnp.clip is 1/2 at a bound, and the amax of a block is at its bound.
    array = call_with_generic_broadcast(lambda x, bound: jnp.where(x < bound, bound, x), array, low)
    return call_with_generic_broadcast(lambda x, bound: jnp.where(x > bound, bound, x), array, high)


def clip_gradient_to_calibration(
    g: jax.Array, array: jax.Array, calibration: Mapping[str, jax.Array], calibration_method: str
) -> jax.Array:
    """Zeroes the gradient where the array is outside the calibrated range.

    `absmax` and `minmax` with a multiplier of at least 1 cover the whole range of the data, so g is returned as is.
    """
    mask = unclipped_mask(array, calibration)
    return jnp.where(mask, g, jnp.zeros_like(g)) if may_clip(calibration_method) else g


def unclipped_mask(array: jax.Array, calibration: Mapping[str, jax.Array]) -> jax.Array:
    """Returns a mask that is true where the array is inside the calibrated range."""
    low, high = _bounds(calibration)
    mask = call_with_generic_broadcast(jnp.greater_equal, array, low.astype(array.dtype))
    return mask & call_with_generic_broadcast(jnp.less_equal, array, high.astype(array.dtype))


def _bounds(calibration: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    if "min" in calibration and "max" in calibration:
        return calibration["min"], calibration["max"]
    if "absmax" in calibration:
        return -calibration["absmax"], calibration["absmax"]
    raise ValueError(f"`calibration` must hold 'absmax' or 'min' and 'max', not {sorted(calibration)}")
