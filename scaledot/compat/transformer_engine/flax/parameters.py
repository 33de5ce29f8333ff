"""Parameters and computations that TransformerEngine's linen modules share.

Parameters have logical axis names (flax.linen.with_logical_partitioning) and the dtype of the module; all of them
except the kernels of matmuls are cast to the dtype of the input.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from scaledot.compat.transformer_engine.layernorm import canonicalize_norm_type
from scaledot.compat.transformer_engine.quantize.quantizer_set import QuantizerSet

Axes = tuple[str | None, ...]
Initializer = Callable[..., Any]


def kernel_init_or_default(init: Initializer | None, dtype) -> Initializer:
    """TransformerEngine's default initialiser of kernels if there is no other."""
    return init or nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", dtype=dtype)


def scale_init_or_default(init: Initializer | None, zero_centered_gamma: bool) -> Initializer:
    """The initialiser of gamma: by default, one at which the normalised input is not scaled."""
    return init or (nn.initializers.zeros if zero_centered_gamma else nn.initializers.ones)


def as_tuple(value: int | Iterable[int]) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, Iterable) else (value,)


def normalize_axes(axes: Iterable[int], ndim: int) -> tuple[int, ...]:
    return tuple(axis % ndim for axis in axes)


def parameter(module: nn.Module, name: str, init: Initializer, axes: Axes | None, *arguments) -> jax.Array:
    """A parameter with logical axis names; None or () names no axes."""
    value: Any = module.param(name, nn.with_logical_partitioning(init, axes or ()), *arguments)
    return value  # linen unboxes it


def norm_parameters(module: Any, x: jax.Array, bias_init: Initializer, bias_axes: Axes):
    """gamma and beta for the last axis of x, in the dtype of x; beta is None for RMSNorm."""
    shape = (x.shape[-1],)
    gamma = parameter(module, "scale", module.scale_init, module.scale_axes, shape, module.dtype).astype(x.dtype)
    if canonicalize_norm_type(module.layernorm_type) == "rmsnorm":
        return gamma, None
    return gamma, parameter(module, "ln_bias", bias_init, bias_axes, shape, module.dtype).astype(x.dtype)


def operand_kernel(kernel: jax.Array, quantizers: QuantizerSet, dtype) -> jax.Array:
    """The kernel as an operand: quantised from its own dtype, or without quantizers in that of the input."""
    return kernel if quantizers.core is not None else kernel.astype(dtype)


def low_rank_parameters(
    module: Any, prefix: str, axes_in: tuple[int, ...], features: tuple[int, ...], x_dtype
) -> tuple[jax.Array, jax.Array]:
    """The factors (*axes_in, *features[:-1], rank) and (*features[:-1], rank, features[-1]) of low-rank adaptation."""
    rank = module.low_rank_adaptation_dim
    shapes = (*axes_in, *features[:-1], rank), (*features[:-1], rank, features[-1])
    inits = module.kernel_init, nn.initializers.zeros
    a, b = (
        parameter(module, f"{prefix}lora_{name}_kernel", init, (None,) * len(shape), shape, module.dtype)
        for name, init, shape in zip("ab", inits, shapes, strict=True)
    )
    return a.astype(x_dtype), b.astype(x_dtype)


def low_rank_product(
    x: jax.Array, axis: Sequence[int], features: Sequence[int], a: jax.Array, b: jax.Array, alpha: float | None
) -> jax.Array:
    """Returns x · a · b, times alpha / rank unless alpha is None.

    x contracts its last axes, `axis`, with a; a and b share features[:-1] and contract the rank.

    >>> low_rank_product(jnp.ones((2, 4)), (1,), (3,), jnp.ones((4, 2)), jnp.ones((2, 3)), 4.0)[0]
    Array([16., 16., 16.], dtype=float32)
    """
    contracted, free = "abcde"[: len(axis)], "mnopq"[: len(features)]
    subscripts = f"...{contracted},{contracted}{free[:-1]}r,{free[:-1]}r{free[-1]}->...{free}"
    y = jnp.einsum(subscripts, x, a, b)
    return y if alpha is None else y * (alpha / a.shape[-1])
