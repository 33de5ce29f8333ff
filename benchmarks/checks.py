"""Checks that run before a cast is timed.

Codes and scales of the jitted call are bit-identical to those of the un-jitted one, and every dequantised value differs
from its element of the input by at most half the largest gap between neighbouring codes of its format, times the scale
of its block. This holds for rounding to nearest and is computed without the library's own arithmetic.
"""

from typing import Any

import jax
import numpy as np

from scaledot import Format, ScaledArray


def require_same_bytes(name: str, jitted: Any, unjitted: Any) -> None:
    """Raises AssertionError unless the leaves of both trees are bit-identical."""
    pairs = zip(jax.tree.leaves(jitted), jax.tree.leaves(unjitted), strict=True)
    for i, (a, b) in enumerate(pairs):
        if np.asarray(a).tobytes() != np.asarray(b).tobytes():
            raise AssertionError(f"{name}: leaf {i} of the jitted call differs from the un-jitted one")


def require_nearest(name: str, x: jax.Array, q: ScaledArray, dequantized: jax.Array) -> None:
    """Raises AssertionError unless every dequantised value is near enough to its element of x.

    They may differ by half the format's largest gap between neighbouring codes, times the scale of the block.
    """
    error = np.abs(np.asarray(x) - np.asarray(dequantized))
    # The relative 1e-5 allows for float32 rounding of code * scale.
    allowed = _broadcast_scale(q) * np.float32(_largest_gap(q.format) / 2) + 1e-5 * np.abs(np.asarray(x))
    worst = float(np.max(error / allowed))
    if not worst <= 1:
        raise AssertionError(f"{name}: the largest error is {worst:.3f} times half the largest gap of {q.format.name}")


def snr_db(x: jax.Array, dequantized: jax.Array) -> float:
    """The signal-to-quantisation-noise ratio in decibels."""
    signal = np.asarray(x, np.float64)
    noise = signal - np.asarray(dequantized, np.float64)
    return float(10 * np.log10(np.sum(signal**2) / np.sum(noise**2)))


def _largest_gap(format: Format) -> float:
    if format.codebook is not None:
        return float(np.max(np.diff(format.codebook)))
    return 2.0 ** (format.emax - format.mantissa_bits)


def _broadcast_scale(q: ScaledArray) -> np.ndarray:
    scale = np.asarray(q.scale).astype(np.float32)
    if q.tensor_scale is not None:
        scale = scale * np.asarray(q.tensor_scale)
    for axis, (size, count) in enumerate(zip(q.shape, scale.shape, strict=True)):
        scale = np.repeat(scale, size // count, axis=axis)
    return scale
