"""Statistics of a block: the magnitude or the range that the codes must cover.

A calibration is a word and numbers, as in Qwix: `absmax[,f]`, `minmax[,f]`, `rms,f`, `fixed,a`,
`fixed,lo,hi`, `percentile,p`, `mse`. Non-finite elements never count, so one bad element spoils nothing.
"""

import dataclasses
import math

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

_METHODS = {  # how many numbers may follow the word
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
        """Whether it gives a range, and so a zero point, instead of a magnitude."""
        return self.method == "minmax" or len(self.values) == 2


def parse(text: str) -> Calibration:
    """
    >>> parse("percentile,99.9")
    Calibration(method='percentile', values=(99.9,))
    """
    method, *rest = (part.strip() for part in str(text).split(","))
    if method not in _METHODS:
        raise ValueError(f"`calibration` {text!r} is not known; use one of {', '.join(_METHODS)}")
    try:
        values = tuple(float(part) for part in rest)
    except ValueError:
        raise ValueError(f"`calibration` {text!r}: what follows {method!r} must be numbers") from None
    if len(values) not in _METHODS[method]:
        counts = " or ".join(str(n) for n in _METHODS[method])
        raise ValueError(f"`calibration` {text!r} has {len(values)} numbers; {method!r} takes {counts}")
    _check_values(text, method, values)
    return Calibration(method, values)


def _check_values(text: str, method: str, values: tuple[float, ...]) -> None:
    if method == "percentile" and not 0 < values[0] <= 100:
        raise ValueError(f"`calibration` {text!r}: a percentile lies in (0, 100]")
    if method == "fixed" and len(values) == 2 and not (values[0] <= 0 <= values[1] and values[0] < values[1]):
        raise ValueError(f"`calibration` {text!r}: the range must contain 0, as in 'fixed,-1,1'")
    if method != "percentile" and len(values) == 1 and not 0 < values[0] < np.inf:
        raise ValueError(f"`calibration` {text!r}: the number must be positive and finite")


def magnitude(x: jax.Array, calibration: Calibration, block: blocks.Block) -> jax.Array:
    """The float32 magnitude that each block's codes must reach, in the shape of the scale."""
    if calibration.method == "fixed":
        return jnp.full(blocks.grid(x.shape, block), calibration.values[0], jnp.float32)
    if calibration.method == "rms":
        return _rms(x, block) * np.float32(calibration.values[0])
    if calibration.method == "percentile":
        return _percentile(x, block, calibration.values[0])
    multiplier = np.float32(calibration.values[0] if calibration.values else 1)
    return jnp.minimum(block_amax(x, block) * multiplier, FLOAT32_MAX)


def extremes(x: jax.Array, calibration: Calibration, block: blocks.Block) -> tuple[jax.Array, jax.Array]:
    """The float32 range, with 0 inside, that each block's codes must reach."""
    if calibration.method == "fixed":
        low, high = (jnp.full(blocks.grid(x.shape, block), v, jnp.float32) for v in calibration.values)
        return low, high
    parts, inside = blocks.split(jnp.where(jnp.isfinite(x), flush(x), np.float32(0)), block)
    multiplier = np.float32(calibration.values[0] if calibration.values else 1)
    shape = blocks.grid(x.shape, block)
    low = lax.reduce_min(jnp.minimum(parts, 0), inside) if parts.size else jnp.zeros(shape)
    high = lax.reduce_max(jnp.maximum(parts, 0), inside) if parts.size else jnp.zeros(shape)
    return low.reshape(shape) * multiplier, high.reshape(shape) * multiplier


def block_amax(x: jax.Array, block: blocks.Block) -> jax.Array:
    """Largest finite magnitude of each block."""
    return _block_max(finite_magnitude(x), block)


def block_amax_or_inf(x: jax.Array, block: blocks.Block) -> jax.Array:
    """Largest magnitude of each block, infinite for a block that holds NaN or infinities."""
    return _block_max(bits_of(amax_of_bits(magnitude_bits(x))).astype(jnp.int32), block)


def _block_max(bits: jax.Array, block: blocks.Block) -> jax.Array:
    """The largest of float32 magnitudes in each block, given as int32 bits, which order as the magnitudes do.

    In two stages where the last axis is long: XLA's CPU fuses a reduction over up to 32 elements with what made
    them and writes a longer one to memory first. The second stage is in floats, so that XLA cannot merge them.
    """
    parts, inside = blocks.split(bits | _zero_at_run_time(), block)
    last = parts.ndim - 1
    if last in inside and parts.shape[last]:
        step = max(d for d in range(1, 33) if parts.shape[last] % d == 0)
        parts = jnp.max(parts.reshape(*parts.shape[:last], parts.shape[last] // step, step), axis=-1)
    largest = jnp.max(lax.bitcast_convert_type(parts, jnp.float32), axis=inside, initial=0)
    return largest.reshape(blocks.grid(bits.shape, block))


def _zero_at_run_time() -> jax.Array:
    """int32 0 that XLA does not know while it folds constants.

    It keeps XLA from reducing a constant array at compile time, in its interpreter: the gradient of `y.sum()` is such
    an array, and its amax took 17 s for 2048 x 2048 elements. Being a scalar, it does not end a fusion.
    """
    return lax.optimization_barrier(jnp.zeros((), jnp.int32))


def block_sum(x: jax.Array, block: blocks.Block) -> jax.Array:
    parts, inside = blocks.split(x, block)
    return jnp.sum(parts, axis=inside).reshape(blocks.grid(x.shape, block))


def _rms(x: jax.Array, block: blocks.Block) -> jax.Array:
    finite = jnp.isfinite(x)
    # In units of the block maximum, so that squares neither overflow nor vanish.
    largest = jnp.maximum(block_amax(x, block), np.finfo(np.float32).tiny)
    ratio = jnp.where(finite, x, 0) / blocks.spread(largest, x.shape, block)
    count = jnp.maximum(block_sum(finite.astype(jnp.float32), block), 1)
    return jnp.sqrt(block_sum(ratio * ratio, block) / count) * largest


def _percentile(x: jax.Array, block: blocks.Block, p: float) -> jax.Array:
    """Linear interpolation between order statistics, as np.percentile does."""
    size = bits_of(x) & MAGNITUDE
    # Padding must not count: +1 keeps a true zero apart from the zeros that split() pads with.
    parts, inside = blocks.split(jnp.where(size < INFINITY, size + 1, 0), block)
    parts = jnp.moveaxis(parts, inside, range(-len(inside), 0)) if inside else parts[..., None]
    lead = parts.ndim - max(len(inside), 1)
    parts = parts.reshape(*parts.shape[:lead], math.prod(parts.shape[lead:]))
    parts = jnp.sort(parts, axis=-1, descending=True)
    count = jnp.sum(parts > 0, axis=-1, keepdims=True)
    from_top = (count - 1).astype(jnp.float32) * np.float32(1 - p / 100)
    whole = jnp.maximum(jnp.floor(from_top), 0)
    at = whole.astype(jnp.int32)
    above = _order_statistic(parts, at)
    below = _order_statistic(parts, jnp.minimum(at + 1, jnp.maximum(count - 1, 0)))
    value = above - (above - below) * (from_top - whole)
    return flush(value).reshape(blocks.grid(x.shape, block))


def _order_statistic(parts: jax.Array, at: jax.Array) -> jax.Array:
    if not parts.shape[-1]:
        return jnp.zeros(at.shape, jnp.float32)
    stored = jnp.take_along_axis(parts, at.astype(jnp.int32), axis=-1)
    return float_of(jnp.maximum(stored, 1) - 1)
