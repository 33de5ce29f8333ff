"""From arrays to QArrays: what HowToQuantize says, step by step.

The steps are the core's: statistics from `numerics.calibrate`, scales from `numerics.scale`, codes from `quantize`;
that arithmetic is in the input's dtype with half-integer bounds is written in the rows of `format_variants.qwix`.
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
    row_of,
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
    """How an array becomes a QArray.

    qtype: a dtype of at most 8 bits, or "nf4", "mxfp8", "mxfp4", "int2" to "int7".
    channelwise_axes: axes with one scale per index. tiled_axes: axis -> elements that share a scale; a float is
    1 / the number of tiles (1 is one scale per element, 1.0 one for all). Axes may be negative.
    calibration_method: `absmax[,f]`, `minmax[,f]`, `rms,f`, `fixed,a`, `fixed,lo,hi`.
    noise_fn: shape -> noise in [-0.5, 0.5] that is added before integers are rounded.

    mxfp8 and mxfp4 have tiles of 32 on the last axis (or on the one that tiled_axes names) and are channelwise on
    all others.
    """

    qtype: Any
    channelwise_axes: Collection[int] = ()
    tiled_axes: Mapping[int, int | float] = dataclasses.field(default_factory=dict)
    calibration_method: str = "absmax"
    noise_fn: Callable[[tuple[int, ...]], jax.Array] | None = None

    def __post_init__(self):
        wrong = [size for size in self.tiled_axes.values() if size != 32]
        if self.qtype in _MX and (wrong or len(self.tiled_axes) > 1):
            raise ValueError(f"{self.qtype} has tiles of 32 on one axis, not {dict(self.tiled_axes)}")


def get_scale_shape(array_shape: ShapeT, how: HowToQuantize) -> tuple[int, ...]:
    """
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
            raise ValueError(f"{tuple(array_shape)} cannot be tiled as {dict(how.tiled_axes)}: {size} by {tile}")
        shape.append(size // tile if axis in tiled or axis in channelwise else 1)
    return tuple(shape)


def calibrate(array: jax.Array, how: HowToQuantize) -> dict[str, jax.Array]:
    """Statistics in the shape of the scale and the dtype of the array: {"absmax"} or {"min", "max"}."""
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
    found = _calibrate(array, parsed, _block(array.shape, shape))
    return {name: value * jnp.asarray(multiplier, array.dtype) for name, value in found.items()}


def _block(shape: tuple[int, ...], scale_shape: tuple[int, ...]) -> blocks.Block:
    return tuple(0 if count == 1 else size // count for size, count in zip(shape, scale_shape, strict=True))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _calibrate(array: jax.Array, parsed: statistics.Calibration, block: blocks.Block) -> dict[str, jax.Array]:
    wide = array.astype(jnp.float32)
    if parsed.is_range:
        low, high = statistics.extremes(wide, parsed, block)
        found = {"min": low, "max": high}
    else:
        found = {"absmax": statistics.magnitude(wide, parsed, block)}
    return {name: round_to(value, array.dtype).astype(array.dtype) for name, value in found.items()}


def compute_scale_zero_point(calibration: Mapping[str, jax.Array], qtype) -> tuple[jax.Array, jax.Array | None]:
    """The scale, and the zero point where the statistics are a range; a scale of 0 becomes 1."""
    row = row_of(qtype)
    if "min" in calibration and "max" in calibration:
        if not row.is_integer:
            raise ValueError(f"a range gives a zero point, which {row.name} cannot hold; calibrate by 'absmax'")
        low, high = calibration["min"], calibration["max"]
        return _affine_scale(low, high, row)
    if "absmax" in calibration:
        return _symmetric_scale(calibration["absmax"], row), None
    raise ValueError(f"`calibration` must hold 'absmax' or 'min' and 'max', not {sorted(calibration)}")


@functools.partial(jax.jit, static_argnums=1)
def _symmetric_scale(absmax: jax.Array, row) -> jax.Array:
    return scale.scales_of(absmax.astype(jnp.float32), row, absmax.dtype).scale


@functools.partial(jax.jit, static_argnums=2)
def _affine_scale(low: jax.Array, high: jax.Array, row) -> tuple[jax.Array, jax.Array]:
    levels, zero = scale.zero_point(low.astype(jnp.float32), high.astype(jnp.float32), row, low.dtype)
    return levels.scale, zero.astype(jnp.int8).astype(row.code_dtype)


def quantize_with_scale_zero_point(
    array: jax.Array,
    qtype,
    scale: jax.Array,
    zero_point: jax.Array | None,
    noise_fn: Callable[[tuple[int, ...]], jax.Array] | None = None,
) -> QArray:
    """Codes under scales that are given; they are cast to the array's dtype first."""
    array = jnp.asarray(array)
    if not jnp.issubdtype(array.dtype, jnp.floating) or jnp.finfo(array.dtype).bits < 16:
        raise ValueError(f"refuse to quantize {array.dtype}; use a float of at least 16 bits")
    if zero_point is not None and zero_point.shape != scale.shape:
        raise ValueError(f"zero_point has shape {zero_point.shape}, but scale has {scale.shape}")
    row = row_of(qtype)
    rounding: dict[str, Any] = {}
    if noise_fn is not None and row.is_integer:
        # round(w + noise) takes the upper neighbour where w's fraction is above 1/2 - noise.
        rounding = {"rounding": "stochastic", "uniform": np.float32(0.5) - noise_fn(array.shape)}
    codes = core.quantize(
        array,
        row,
        axis=tuple(range(array.ndim)),
        block=_block(array.shape, scale.shape),
        scale=scale.astype(array.dtype),
        zero=zero_point,
        **rounding,
    )
    return QArray(codes.data, codes.scale, codes.zero, qtype)


def quantize(array: jax.Array, how: HowToQuantize) -> QArray:
    """Calibrate, scale, round.

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
    """`quantize` without a HowToQuantize; what Qwix exports as `qwix.quantize`."""
    how = HowToQuantize(
        qtype=qtype,
        channelwise_axes=channelwise_axes,
        tiled_axes=tiled_axes or {},
        calibration_method=calibration_method,
    )
    q = quantize(array, how)
    return q if scale_dtype is None else q.astype(scale_dtype)


def dequantize(array: QArray) -> jax.Array:
    """The values, in the scale's dtype; computed in float32 and rounded once."""
    validate_qarray(array)
    return core.dequantize(as_scaled(array))


def clip_to_calibration(
    array: jax.Array, calibration: Mapping[str, jax.Array], tiled_axes: Mapping[int, int | float]
) -> jax.Array:
    """The array clipped to the range that was calibrated."""
    split_axis(array, tiled_axes)  # raises where the tiles do not divide
    low, high = _bounds(calibration)
    above = call_with_generic_broadcast(jnp.maximum, array, low.astype(array.dtype))
    return call_with_generic_broadcast(jnp.minimum, above, high.astype(array.dtype))


def clip_gradient_to_calibration(
    g: jax.Array, array: jax.Array, calibration: Mapping[str, jax.Array], calibration_method: str
) -> jax.Array:
    """The gradient, zero where the array lies outside the calibrated range.

    `absmax` and `minmax` with a factor of at least 1 cover all data, so nothing is masked.
    """
    parsed = statistics.parse(calibration_method.lower())
    low, high = _bounds(calibration)
    if parsed.method in ("absmax", "minmax") and (not parsed.values or parsed.values[0] >= 1):
        return g
    inside = call_with_generic_broadcast(jnp.greater_equal, array, low.astype(array.dtype))
    inside &= call_with_generic_broadcast(jnp.less_equal, array, high.astype(array.dtype))
    return jnp.where(inside, g, jnp.zeros_like(g))


def _bounds(calibration: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    if "min" in calibration and "max" in calibration:
        return calibration["min"], calibration["max"]
    if "absmax" in calibration:
        return -calibration["absmax"], calibration["absmax"]
    raise ValueError(f"`calibration` must hold 'absmax' or 'min' and 'max', not {sorted(calibration)}")
