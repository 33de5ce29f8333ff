"""Checks of contracting dims and biases that `gemm`, `grouped_gemm` and `dense` share."""

from typing import Any

from scaledot.numerics import blocks

Dims = tuple[Any, Any]


def check_bias(bias: Any, shape: tuple[int, ...]) -> None:
    if bias is not None and bias.shape != shape:
        raise ValueError(f"`bias` {bias.shape} must have the shape of the kernel's free dims, {shape}")


def normalize_dims(dims: Any, ndim: int) -> tuple[int, ...]:
    """Returns dims, one or several, as a tuple of positive ones."""
    return tuple(blocks.positive_axis(d, ndim) for d in (dims if isinstance(dims, (tuple, list)) else (dims,)))
