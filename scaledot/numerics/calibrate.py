"""Calibration: the magnitude, or the range, of each block that is mapped to the largest code.

A calibration is a string of a method and its numbers, as in Qwix:

absmax[,f]      f times the amax (f = 1 by default)
minmax[,f]      f times the range from the minimum to the maximum, with a zero point
rms,f           f times the root mean square
percentile,p    the p-th percentile of magnitudes
fixed,a         the magnitude a
fixed,lo,hi     the range from lo to hi, with a zero point
mse             the magnitude that minimises the squared error, by search (`cast`)

NaN and infinities are ignored.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scaledot.numerics import blocks
from scaledot.numerics.bits import (
    FLOAT32_MAX,
    INFINITY,
    MAGNITUDE,
    amax_of_bits,
    bits_of,
    finite_magnitude,
    float_of,
    flush,
    magnitude_bits,
)

_METHODS = {  # method: the allowed counts of numbers
    "absmax": (0, 1),
    "minmax": (0, 1),
    "rms": (1,),
    "fixed": (1, 2),
    "percentile": (1,),
    "mse": (0,),
}


@dataclasses.dataclass(frozen=True)
class Calibration:
    """A parsed calibration string."""

    method: str
    values: tuple[float, ...] = ()

    @property
    def is_range(self) -> bool:
        """Whether the calibration is a range, with a zero point, instead of a magnitude."""
        return self.method == "minmax" or len(self.values) == 2

    def __str__(self) -> str:
        return ",".join([self.method, *(f"{value:g}" for value in self.values)])


def parse(text: str) -> Calibration:
    """Parses a calibration string.

    >>> parse("percentile,99.9")
    Calibration(method='percentile', values=(99.9,))
    """
    method, *rest = (part.strip() for part in str(text).split(","))
    if method not in _METHODS:
        raise ValueError(f"`calibration` {text!r} is not known; use one of {', '.join(_METHODS)}")
    try:
        values = tuple(float(part) for part in rest)
    except ValueError:
        raise ValueError(f"`calibration` {text!r}: the arguments of {method!r} must be numbers") from None
    if len(values) not in _METHODS[method]:
        counts = " or ".join(str(n) for n in _METHODS[method])
        raise ValueError(f"`calibration` {text!r} has {len(values)} numbers; {method!r} takes {counts}")
    _check_values(text, method, values)
    return Calibration(method, values)


def _check_values(text: str, method: str, values: tuple[float, ...]) -> None:
    if method == "percentile" and not 0 < values[0] <= 100:
        raise ValueError(f"`calibration` {text!r}: a percentile must be in (0, 100]")
    if method == "fixed" and len(values) == 2 and not (values[0] <= 0 <= values[1] and values[0] < values[1]):
        raise ValueError(f"`calibration` {text!r}: the range must contain 0, as in 'fixed,-1,1'")
    if method != "percentile" and len(values) == 1 and not 0 < values[0] < np.inf:
        raise ValueError(f"`calibration` {text!r}: the number must be positive and finite")


def magnitude(x: jax.Array, calibration: Calibration, block: blocks.Block) -> jax.Array:
    """The float32 magnitude of each block that is mapped to the largest code, in the shape of the scale."""
    if calibration.method == "fixed":
        return jnp.full(blocks.grid(x.shape, block), calibration.values[0], jnp.float32)
    if calibration.method == "rms":
        return _rms(x, block) * np.float32(calibration.values[0])
    if calibration.method == "percentile":
        return _percentile(x, block, calibration.values[0])
    factor = np.float32(calibration.values[0] if calibration.values else 1)
    return jnp.minimum(block_amax(x, block) * factor, FLOAT32_MAX)


def extremes(x: jax.Array, calibration: Calibration, block: blocks.Block) -> tuple[jax.Array, jax.Array]:
    """The float32 minimum and maximum, including 0, that the codes of each block represent."""
    if calibration.method == "fixed":
        low, high = (jnp.full(blocks.grid(x.shape, block), v, jnp.float32) for v in calibration.values)
        return low, high
    in_blocks, within_axes = blocks.split(jnp.where(jnp.isfinite(x), flush(x), np.float32(0)), block)
    factor = np.float32(calibration.values[0] if calibration.values else 1)
    shape = blocks.grid(x.shape, block)
    low = lax.reduce_min(jnp.minimum(in_blocks, 0), within_axes) if in_blocks.size else jnp.zeros(shape)
    high = lax.reduce_max(jnp.maximum(in_blocks, 0), within_axes) if in_blocks.size else jnp.zeros(shape)
    return low.reshape(shape) * factor, high.reshape(shape) * factor


def block_amax(x: jax.Array, block: blocks.Block) -> jax.Array:
    """The largest finite magnitude of each block, in the shape of the scale."""
    return _block_max(finite_magnitude(x), block)


def block_amax_or_inf(x: jax.Array, block: blocks.Block) -> jax.Array:
    """The amax of each block, infinite for a block that contains NaN or infinities."""
    return _block_max(bits_of(amax_of_bits(magnitude_bits(x))).astype(jnp.int32), block)


def _block_max(bits: jax.Array, block: blocks.Block) -> jax.Array:
    """The largest float32 magnitude of each block, from the int32 bits of magnitudes.

    Reduces in two stages: XLA:CPU fuses a reduction over up to 32 elements with its producer, and writes the input of a
    longer one to memory first. The second stage compares floats, so that XLA does not merge the stages.
    """
    in_blocks, within_axes = blocks.split(bits | zero_at_run_time(jnp.int32), block)
    last = in_blocks.ndim - 1
    if last in within_axes and in_blocks.shape[last]:
        step = max(d for d in range(1, 33) if in_blocks.shape[last] % d == 0)
        in_blocks = jnp.max(in_blocks.reshape(*in_blocks.shape[:last], in_blocks.shape[last] // step, step), axis=-1)
    largest = jnp.max(lax.bitcast_convert_type(in_blocks, jnp.float32), axis=within_axes, initial=0)
    return largest.reshape(blocks.grid(bits.shape, block))


def zero_at_run_time(dtype: Any) -> jax.Array:
    """A 0 that XLA cannot constant-fold.

    It keeps XLA from reducing a constant array in its interpreter at compile time: the gradient of `y.sum()` is such an
    array, and its amax took 17 s for 2048 x 2048 elements. The barrier is on a scalar and so does not split a fusion.
    """
    return lax.optimization_barrier(jnp.zeros((), dtype))


def block_sum(x: jax.Array, block: blocks.Block) -> jax.Array:
    """The sum of each block, in the shape of the scale."""
    in_blocks, within_axes = blocks.split(x, block)
    return jnp.sum(in_blocks, axis=within_axes, dtype=x.dtype).reshape(blocks.grid(x.shape, block))


def _rms(x: jax.Array, block: blocks.Block) -> jax.Array:
    finite = jnp.isfinite(x)
    # Relative to the block amax, so that squares neither overflow nor underflow.
    largest = jnp.maximum(block_amax(x, block), np.finfo(np.float32).tiny)
    ratio = jnp.where(finite, x, 0) / blocks.repeat_scale(largest, x.shape, block)
    count = jnp.maximum(block_sum(finite.astype(jnp.float32), block), 1)
    return jnp.sqrt(block_sum(ratio * ratio, block) / count) * largest


def _percentile(x: jax.Array, block: blocks.Block, p: float) -> jax.Array:
    """The p-th percentile of the magnitudes of each block, interpolated linearly like np.percentile."""
    magnitude = bits_of(x) & MAGNITUDE
    # Keys are bits + 1, so that 0 marks non-finite elements and the padding of split(), which are not counted.
    keys, within_axes = blocks.split(jnp.where(magnitude < INFINITY, magnitude + 1, 0), block)
    keys = jnp.moveaxis(keys, within_axes, range(-len(within_axes), 0)) if within_axes else keys[..., None]
    lead = keys.ndim - max(len(within_axes), 1)
    keys = keys.reshape(*keys.shape[:lead], math.prod(keys.shape[lead:]))
    keys = jnp.sort(keys, axis=-1, descending=True)
    count = jnp.sum(keys > 0, axis=-1, keepdims=True)
    from_top = (count - 1).astype(jnp.float32) * np.float32(1 - p / 100)
    floor = jnp.maximum(jnp.floor(from_top), 0)
    index = floor.astype(jnp.int32)
    above = _magnitude_at(keys, index)
    below = _magnitude_at(keys, jnp.minimum(index + 1, jnp.maximum(count - 1, 0)))
    value = above - (above - below) * (from_top - floor)
    return flush(value).reshape(blocks.grid(x.shape, block))


def _magnitude_at(keys: jax.Array, index: jax.Array) -> jax.Array:
    """The float32 magnitudes of the keys (bits + 1) at `index` along the last axis."""
    if not keys.shape[-1]:
        return jnp.zeros(index.shape, jnp.float32)
    key = jnp.take_along_axis(keys, index.astype(jnp.int32), axis=-1)
    return float_of(jnp.maximum(key, 1) - 1)
