"""Reference contractions in float64, and error bounds for results that accumulate in float32 and round once."""

import jax.numpy as jnp
import numpy as np

import scaledot as sd

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def exact(x):
    """The dequantised values of an operand, in float64, computed by numpy; a rotation is not undone.

    Along a contracting dim the rotations of both operands cancel.
    """
    if not isinstance(x, sd.ScaledArray):
        return np.asarray(jnp.asarray(x).astype(jnp.float32), np.float64)
    values = decoded(x)
    if x.zero is not None:
        values = values - _repeated(np.asarray(x.zero), x)
    values = values * np.abs(_repeated(np.asarray(x.scale), x))  # the sign of a scale only names a grid
    if x.tensor_scale is not None:
        level = np.asarray(x.tensor_scale, np.float64)
        values = values * level.reshape(level.shape + (1,) * (values.ndim - level.ndim))
    return values


def decoded(x: sd.ScaledArray) -> np.ndarray:
    """The decoded codes, without scales, in float64; with `grids`, by the sign of the block scale."""
    codes, format = np.asarray(x.data), x.format
    if format.grids is not None:
        raw = codes.astype(np.uint8)
        is_integer = np.signbit(_repeated(np.asarray(x.scale), x))
        return np.where(is_integer, (raw.astype(np.int8) ^ 8) - 8, _E2M1[raw])
    if format.codebook is not None:
        return np.asarray(format.codebook, np.float32)[codes.astype(np.int64)].astype(np.float64)
    return (codes.view(format.element_dtype) if format.is_float else codes).astype(np.float64)


def _repeated(grid: np.ndarray, x: sd.ScaledArray) -> np.ndarray:
    grid = grid.astype(np.float64)
    block = (1,) * (x.ndim - len(x.block)) + x.block
    for axis, (size, b) in enumerate(zip(x.shape, block, strict=True)):
        grid = np.repeat(grid, b or size, axis=axis).take(range(size), axis=axis)
    return grid


def assert_one_rounding(y, expected, magnitude, k: int):
    """Asserts that y is `expected` up to float32 accumulation over K elements and one rounding to its dtype.

    magnitude: the contraction of the operands' magnitudes. A dequantised value is rounded at most three times (code,
    scale, tensor scale), each multiplication once, the accumulation k times, and the scales of the result four times:
    (k + 12) * 2^-24 * magnitude in all.
    """
    unit = float(jnp.finfo(y.dtype).eps) / 2
    error = np.abs(np.asarray(y.astype(jnp.float32), np.float64) - expected)
    allowed = (k + 12) * 2.0**-24 * magnitude + unit * np.abs(expected) * (1 + 2.0**-10)
    excess = np.max(error - allowed, initial=0)
    assert excess <= 0, f"error {error.max():.3e}, {np.max(error / np.maximum(allowed, 1e-300)):.2f} x the bound"


def check_einsum(y, text: str, *operands):
    """Asserts that y is the einsum of its operands, accumulated in float32 and rounded once."""
    values = [exact(x) for x in operands]
    inputs, out = text.split("->")
    sizes: dict[str, int] = {}
    for labels, value in zip(inputs.split(","), values, strict=True):
        sizes |= dict(zip(labels, value.shape, strict=True))
    contracted = [c for c in sizes if c not in out]
    expected = np.einsum(text, *values)
    magnitude = np.einsum(text, *map(np.abs, values))
    assert y.shape == expected.shape
    assert_one_rounding(y, expected, magnitude, int(np.prod([sizes[c] for c in contracted], dtype=np.int64)))


def equations(jaxpr):
    """All equations of a jaxpr, including those of nested jaxprs and of all branches."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for part in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)
