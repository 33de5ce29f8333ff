"""What must hold before a time is worth printing.

The compiled codes and scales equal, byte for byte, those of the same call run one operation at a time; and every
value comes back within half the widest gap between neighbouring codes of its format, which is what rounding to
the nearest means and needs none of the library's own arithmetic to say.
"""

from typing import Any

import jax
import numpy as np

from scaledot import Format, ScaledArray


def require_same_bytes(what: str, compiled: Any, plain: Any) -> None:
    """Raise unless both trees hold the same bytes."""
    pairs = zip(jax.tree.leaves(compiled), jax.tree.leaves(plain), strict=True)
    for at, (a, b) in enumerate(pairs):
        if np.asarray(a).tobytes() != np.asarray(b).tobytes():
            raise AssertionError(f"{what}: leaf {at} of the jitted call differs from the un-jitted one")


def require_nearest(what: str, x: jax.Array, q: ScaledArray, values: jax.Array) -> None:
    """Raise unless every value of the matrix x is within half a gap of what came back."""
    error = np.abs(np.asarray(x) - np.asarray(values))
    # A relative 1e-5 is what the float32 products of code and scales may add.
    allowed = _spread_scale(q) * np.float32(_widest_gap(q.format) / 2) + 1e-5 * np.abs(np.asarray(x))
    worst = float(np.max(error / allowed))
    if not worst <= 1:
        raise AssertionError(f"{what}: an error is {worst:.3f} times half the widest gap of {q.format.name}")


def snr_db(x: jax.Array, values: jax.Array) -> float:
    """Signal over quantisation noise, in decibels."""
    signal = np.asarray(x, np.float64)
    noise = signal - np.asarray(values, np.float64)
    return float(10 * np.log10(np.sum(signal**2) / np.sum(noise**2)))


def _widest_gap(format: Format) -> float:
    if format.codebook is not None:
        return float(np.max(np.diff(format.codebook)))
    return 2.0 ** (format.emax - format.mantissa_bits)


def _spread_scale(q: ScaledArray) -> np.ndarray:
    scale = np.asarray(q.scale).astype(np.float32)
    if q.tensor_scale is not None:
        scale = scale * np.asarray(q.tensor_scale)
    for axis, (size, count) in enumerate(zip(q.shape, scale.shape, strict=True)):
        scale = np.repeat(scale, size // count, axis=axis)
    return scale
