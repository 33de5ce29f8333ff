"""Drop-in replacements of `jax.nn`'s scaled_matmul, scaled_dot_general and get_scaled_dot_general_config.

Arguments and results are those of jax.nn, with these extensions and fixes:

* `mode` may be any name in FORMATS.
* The contracting dim need not be a multiple of the block size, and all-zero blocks give zeros, not NaN.
* Several contracting dims are paired in the order of `dimension_numbers`.
* Gradients have the dtypes of their primals.
* `precision` and `out_sharding` are accepted, so that `scaled_dot_general` can be the `dot_general` of a Flax layer.
* Operands may be numpy arrays or sharded along explicit mesh axes, and `global_scale` may be traced.
"""

import dataclasses
import functools
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from scaledot.array import ScaledArray
from scaledot.contraction import Contraction, from_dimension_numbers, labels
from scaledot.formats import FORMATS, Format
from scaledot.kernels.spec import promoted
from scaledot.numerics import blocks
from scaledot.ops.operands import contract, float_operand
from scaledot.ops.quantize import quantize
from scaledot.parallel.types import PrimalType

__all__ = ["BlockScaleConfig", "get_scaled_dot_general_config", "scaled_dot_general", "scaled_matmul"]


@dataclasses.dataclass(slots=True)
class BlockScaleConfig:
    """How to quantise one operand. Mutable, as in jax.nn.

    block_size: number of elements along the contracting dim that share a scale; 0 for the format's default, which is a
      channel or the tensor.
    global_scale: float32 scale of the whole tensor, the second level of nvfp4; None for formats without one.
    infer_only: unused, as in jax.nn.
    """

    mode: str
    block_size: int
    data_type: Any
    scale_type: Any
    global_scale: Any
    infer_only: bool


def get_scaled_dot_general_config(mode: str, global_scale=None) -> BlockScaleConfig:
    """Returns the config of a mode: `mxfp8`, `nvfp4`, `mxfp4`, or any other name in FORMATS.

    >>> config = get_scaled_dot_general_config("nvfp4")
    >>> config.block_size, config.global_scale
    (16, Array([1.], dtype=float32))
    """
    if mode not in FORMATS:
        raise ValueError(f"Unsupported mode: {mode}; use one of {', '.join(FORMATS)}")
    format = FORMATS[mode]
    if format.two_level:
        global_scale = jnp.ones((1,), jnp.float32) if global_scale is None else global_scale
    elif global_scale is not None:
        raise ValueError(f"`global_scale` must be None: {mode} has no tensor-wide scale, only block scales")
    block = format.block[-1] if format.block else 0
    data_type, scale_type = format.code_dtype.type, format.scale_dtype(np.float32).type  # scalar types, as in jax.nn
    return BlockScaleConfig(mode, block, data_type, scale_type, global_scale, False)


def scaled_matmul(lhs, rhs, lhs_scales, rhs_scales, preferred_element_type=jnp.float32) -> jax.Array:
    """Batched matmul of block-scaled operands, (B, M, K) and (B, N, K) to (B, M, N).

    `lhs_scales` has shape (B, M, Ks) and `rhs_scales` (B, N, Ks), each with its own Ks: K // Ks elements along K share
    a scale.

    >>> a, b = jnp.array([[[1, 2, 3]]]), jnp.array([[[4, 5, 6]]])
    >>> half = jnp.array([[[0.5]]])
    >>> scaled_matmul(a, b, half, half)
    Array([[[8.]]], dtype=float32)
    """
    lhs, rhs, lhs_scales, rhs_scales = (jnp.asarray(x) for x in (lhs, rhs, lhs_scales, rhs_scales))
    shapes = [x.shape for x in (lhs, rhs, lhs_scales, rhs_scales)]
    if any(len(shape) != 3 for shape in shapes):
        raise ValueError(f"scaled_matmul takes four arrays of rank 3, not shapes {shapes}")
    if lhs.shape[0] != rhs.shape[0] or lhs.shape[2] != rhs.shape[2]:
        raise ValueError(f"`lhs` {lhs.shape} and `rhs` {rhs.shape} must have equal first and last dims")
    return contract(
        Contraction("bmk", "bnk", "bmn"),
        _scaled("lhs", lhs, lhs_scales),
        _scaled("rhs", rhs, rhs_scales),
        preferred_element_type=preferred_element_type,
    )


def _scaled(name: str, data: jax.Array, scales: jax.Array) -> ScaledArray | jax.Array:
    """Returns a ScaledArray of these codes and scales, or dequantises to float32 if no Format has their dtypes."""
    num_blocks = scales.shape[-1]
    if scales.shape[:2] != data.shape[:2] or not num_blocks or data.shape[-1] % num_blocks:
        raise ValueError(
            f"`{name}_scales` of shape {scales.shape} does not fit `{name}` {data.shape}: "
            "the first two dims must be equal, and the last dim of the scales must divide that of the data"
        )
    block = (data.shape[-1] // num_blocks,)
    is_code = data.dtype.name.startswith(("float8", "float4", "int4", "int8")) and data.dtype.name != "float8_e8m0fnu"
    if not is_code or jnp.issubdtype(scales.dtype, jnp.integer):
        return data.astype(jnp.float32) * blocks.repeat_scale(scales.astype(jnp.float32), data.shape, block)
    format = Format(f"{data.dtype.name} x {scales.dtype.name}", data.dtype.name, scales.dtype.name, block)
    return ScaledArray(data, scales, format=format, block=blocks.trim(block), dtype=np.dtype(np.float32))


def scaled_dot_general(
    lhs,
    rhs,
    dimension_numbers,
    preferred_element_type=jnp.float32,
    configs=None,
    implementation=None,
    *,
    precision=None,
    out_sharding=None,
) -> jax.Array:
    """lax.dot_general of operands that are quantised along their contracting dims, forward and backward.

    Args:
      dimension_numbers: ((lhs contracting, rhs contracting), (lhs batch, rhs batch)), as of lax.dot_general.
      configs: [lhs, rhs, gradient], each a BlockScaleConfig, or None for an unquantised matmul. [lhs, rhs] suffices
        if the function is not differentiated. jax.nn ignores a fourth entry; here it is an error.
      implementation: ignored, with a DeprecationWarning, as in jax.nn.

    The backward matmuls quantise the output gradient and the saved high-precision operand along their own contracting
    dims. If the gradient's mode has a global scale (nvfp4), the backward matmuls are unquantised, and gradients are
    zero where the forward quantisation clipped the operand.

    >>> configs = [get_scaled_dot_general_config("mxfp8")] * 3
    >>> x, w = jnp.ones((4, 64)), jnp.ones((64, 2))
    >>> scaled_dot_general(x, w, (((1,), (0,)), ((), ())), configs=configs).shape
    (4, 2)
    """
    if implementation is not None:
        warnings.warn(
            "`implementation` is ignored; shapes, formats and device select the kernel",
            DeprecationWarning,
            stacklevel=2,
        )
    if configs is None:
        lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
        return lax.dot_general(
            lhs,
            rhs,
            dimension_numbers,
            precision=precision,
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
        )
    _check_configs(configs)
    lhs, rhs = float_operand(lhs, "lhs"), float_operand(rhs, "rhs")
    preferred = promoted(lhs.dtype, rhs.dtype) if preferred_element_type is None else np.dtype(preferred_element_type)
    spec = _DotSpec(
        from_dimension_numbers(dimension_numbers, lhs.ndim, rhs.ndim),
        tuple(_format(config) for config in configs),
        preferred,
        precision,
        out_sharding,
    )
    return _scaled_dot(spec, lhs, rhs, tuple(_global_scale(config) for config in configs[:2]))


def _check_configs(configs: Any) -> None:
    is_list = isinstance(configs, (list, tuple)) and len(configs) in (2, 3)
    if not is_list or not all(hasattr(config, "mode") for config in configs):
        raise TypeError(
            "`configs` must be [lhs, rhs, gradient], or [lhs, rhs] for the forward pass only, each from "
            f"get_scaled_dot_general_config, or None for an unquantised matmul, not {configs!r}"
        )


class _DotSpec(NamedTuple):
    """Static arguments of a scaled dot."""

    contraction: Contraction
    formats: tuple[Format, ...]  # of lhs, rhs and, if the function is differentiable, the output gradient
    preferred: np.dtype
    precision: Any
    out_sharding: Any


def _format(config: BlockScaleConfig) -> Format:
    format = FORMATS[config.mode]
    element = format.element if format.code_dtype == config.data_type else np.dtype(config.data_type).name
    scale = np.dtype(config.scale_type).name
    block = (config.block_size,) if format.block != (config.block_size,) and config.block_size else format.block
    return dataclasses.replace(format, element=element, scale=scale, block=block)


def _global_scale(config: BlockScaleConfig) -> jax.Array | None:
    if config.global_scale is None:
        return None
    if jnp.size(config.global_scale) != 1:
        raise ValueError(f"`global_scale` must be one number, not of shape {jnp.shape(config.global_scale)}")
    return jnp.asarray(config.global_scale, jnp.float32).reshape(())


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scaled_dot(spec: _DotSpec, lhs: jax.Array, rhs: jax.Array, global_scales) -> jax.Array:
    return _quantized_dot(
        spec.contraction,
        (lhs, rhs),
        spec.formats[:2],
        global_scales,
        preferred_element_type=spec.preferred,
        precision=spec.precision,
        out_sharding=spec.out_sharding,
    )


def _forward(spec: _DotSpec, lhs, rhs, global_scales):
    return _scaled_dot(spec, lhs, rhs, global_scales), (lhs, rhs, global_scales)


def _backward(spec: _DotSpec, residuals, g: jax.Array):
    if len(spec.formats) == 2:
        raise ValueError(
            "`configs` has two entries, [lhs, rhs], which are for the forward pass only; to differentiate, "
            "pass a third one for the gradient: [lhs, rhs, gradient]"
        )
    lhs, rhs, global_scales = residuals
    lhs_format, rhs_format, g_format = spec.formats
    unquantized = g_format.two_level
    dgrad_casts = (g_format, rhs_format), (None, global_scales[1])
    wgrad_casts = (lhs_format, g_format), (global_scales[0], None)
    dlhs = _gradient(spec, spec.contraction.dgrad, (g, rhs), None if unquantized else dgrad_casts, lhs)
    drhs = _gradient(spec, spec.contraction.wgrad, (lhs, g), None if unquantized else wgrad_casts, rhs)
    if unquantized:
        dlhs, drhs = (
            _zero_where_clipped(d, x, format, s)
            for d, x, format, s in zip((dlhs, drhs), (lhs, rhs), spec.formats, global_scales, strict=False)
        )
    return (
        PrimalType.of(lhs).reduced(dlhs),
        PrimalType.of(rhs).reduced(drhs),
        jax.tree.map(jnp.zeros_like, global_scales),
    )


_scaled_dot.defvjp(_forward, _backward)


def _gradient(spec: _DotSpec, contraction: Contraction, operands, casts, primal: jax.Array) -> jax.Array:
    """Computes one gradient matmul; the result has the primal's dtype and, along explicit mesh axes, its sharding."""
    sharding = jax.typeof(primal).sharding
    options = {
        "preferred_element_type": primal.dtype,
        "precision": spec.precision,
        "out_sharding": None if sharding.mesh.empty else sharding,
    }
    if casts is None:
        return contract(contraction, *operands, **options)
    return _quantized_dot(contraction, operands, *casts, **options)


def _zero_where_clipped(gradient: jax.Array, x: jax.Array, format: Format, global_scale: jax.Array | None) -> jax.Array:
    """Zeroes the gradient of elements that exceed the largest representable magnitude of the forward quantisation."""
    max_unscaled = np.float32(format.max * float(ml_dtypes.finfo(np.dtype(format.scale_dtype(np.float32))).max))
    limit = max_unscaled if global_scale is None else global_scale * max_unscaled
    return jnp.where(jnp.abs(x.astype(jnp.float32)) <= limit, gradient, jnp.zeros_like(gradient))


def _quantized_dot(contraction: Contraction, operands, formats, global_scales, **options) -> jax.Array:
    """Quantises both operands along their contracting dims and contracts them."""
    contracting = contraction.contracting
    if not contracting:
        return contract(contraction, *operands, **options)
    merged = contracting if len(contracting) == 1 else labels(1, contraction.lhs + contraction.rhs)
    quantized, dims = [], (contraction.lhs, contraction.rhs)
    for x, x_dims, format, global_scale in zip(operands, dims, formats, global_scales, strict=True):
        x, x_dims = _merge_dims(x, x_dims, contracting, merged)
        axis = x_dims.index(merged)
        tensor_scale = jnp.ones((), jnp.float32) if format.two_level and global_scale is None else global_scale
        quantized.append((quantize(x, format, axis=axis, tensor_scale=tensor_scale, pad=True), x_dims))
    (lhs, lhs_dims), (rhs, rhs_dims) = quantized
    return contract(Contraction(lhs_dims, rhs_dims, contraction.out), lhs, rhs, **options)


def _merge_dims(x: jax.Array, dims: str, contracting: str, merged: str) -> tuple[jax.Array, str]:
    """Reshapes several contracting dims into one trailing dim labelled `merged`, in the order of `contracting`."""
    if contracting == merged:
        return x, dims
    others = "".join(c for c in dims if c not in contracting)
    x = x.transpose([dims.index(c) for c in others + contracting])
    return x.reshape(*x.shape[: len(others)], -1), others + merged
