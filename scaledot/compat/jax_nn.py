"""The block-scaled names of `jax.nn`: scaled_matmul, scaled_dot_general, get_scaled_dot_general_config.

Same arguments, same meaning, with these differences. Any name in FORMATS is a mode. Axes need not divide by the
block. All-zero blocks give zeros. Pairs of axes stay paired as given. Gradients have the dtypes of their primals.
`precision` and `out_sharding` are taken, so that it serves as a Flax `dot_general`. numpy arrays, explicit mesh
axes, and a `global_scale` computed inside a differentiated function all work.
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
from scaledot.parallel.types import Like

__all__ = ["BlockScaleConfig", "get_scaled_dot_general_config", "scaled_dot_general", "scaled_matmul"]


@dataclasses.dataclass(slots=True)
class BlockScaleConfig:
    """How one operand is quantised; fields may be assigned, as in jax.nn.

    block_size: elements along the summed axis that share a scale, 0 for all of them.
    global_scale: float32, divides the operand first and multiplies the result; None for formats of one level.
    infer_only: kept because jax.nn has it; nothing depends on it there or here.
    """

    mode: str
    block_size: int
    data_type: Any
    scale_type: Any
    global_scale: Any
    infer_only: bool


def get_scaled_dot_general_config(mode: str, global_scale=None) -> BlockScaleConfig:
    """The config of a mode: `mxfp8`, `nvfp4`, `mxfp4`, or any other name in FORMATS.

    >>> config = get_scaled_dot_general_config("nvfp4")
    >>> config.block_size, config.global_scale
    (16, Array([1.], dtype=float32))
    """
    if mode not in FORMATS:
        raise ValueError(f"Unsupported mode: {mode}; use one of {', '.join(FORMATS)}")
    row = FORMATS[mode]
    if row.two_level:
        global_scale = jnp.ones((1,), jnp.float32) if global_scale is None else global_scale
    elif global_scale is not None:
        raise ValueError(f"`global_scale` is given, but {mode} has one level of scales")
    block = row.block[-1] if row.block else 0
    data_type, scale_type = row.code_dtype.type, row.scale_dtype(np.float32).type  # scalar types, as theirs
    return BlockScaleConfig(mode, block, data_type, scale_type, global_scale, False)


def scaled_matmul(lhs, rhs, lhs_scales, rhs_scales, preferred_element_type=jnp.float32) -> jax.Array:
    """(B, M, K) times (B, N, K) to (B, M, N), each block of K elements times its scale.

    The block of a side is K // Ks, where its scales have shape (B, rows, Ks).

    >>> a, b = jnp.array([[[1, 2, 3]]]), jnp.array([[[4, 5, 6]]])
    >>> half = jnp.array([[[0.5]]])
    >>> scaled_matmul(a, b, half, half)
    Array([[[8.]]], dtype=float32)
    """
    lhs, rhs, lhs_scales, rhs_scales = (jnp.asarray(x) for x in (lhs, rhs, lhs_scales, rhs_scales))
    shapes = [x.shape for x in (lhs, rhs, lhs_scales, rhs_scales)]
    if any(len(shape) != 3 for shape in shapes):
        raise ValueError(f"scaled_matmul takes four arrays of 3 axes, not shapes {shapes}")
    if lhs.shape[0] != rhs.shape[0] or lhs.shape[2] != rhs.shape[2]:
        raise ValueError(f"`lhs` {lhs.shape} and `rhs` {rhs.shape} must agree in their first and last axis")
    return contract(
        Contraction("bmk", "bnk", "bmn"),
        _scaled("lhs", lhs, lhs_scales),
        _scaled("rhs", rhs, rhs_scales),
        preferred_element_type=preferred_element_type,
    )


def _scaled(name: str, data: jax.Array, scales: jax.Array) -> ScaledArray | jax.Array:
    """A ScaledArray where its dtypes can be one's, otherwise the product in float32."""
    blocks_along = scales.shape[-1]
    if scales.shape[:2] != data.shape[:2] or not blocks_along or data.shape[-1] % blocks_along:
        raise ValueError(
            f"`{name}_scales` of shape {scales.shape} does not fit `{name}` {data.shape}: "
            "the first two axes must be equal and the last must divide"
        )
    block = (data.shape[-1] // blocks_along,)
    is_code = data.dtype.name.startswith(("float8", "float4", "int4", "int8")) and data.dtype.name != "float8_e8m0fnu"
    if not is_code or jnp.issubdtype(scales.dtype, jnp.integer):
        spread = blocks.spread(scales.astype(jnp.float32), data.shape, block)
        return data.astype(jnp.float32) * spread
    row = Format(f"{data.dtype.name} x {scales.dtype.name}", data.dtype.name, scales.dtype.name, block)
    return ScaledArray(data, scales, format=row, block=blocks.trim(block), dtype=np.dtype(np.float32))


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
    """lax.dot_general of operands that are quantised along the axes it sums over, forward and backward.

    Args:
      dimension_numbers: ((lhs summed, rhs summed), (lhs batch, rhs batch)).
      configs: [lhs, rhs, gradient], each a BlockScaleConfig; None leaves everything unquantised. [lhs, rhs] is enough
        where nothing is differentiated. jax.nn ignores a fourth entry; here it is an error.
      implementation: ignored, with a DeprecationWarning, as in jax.nn.

    In the backward pass the gradient and the other operand are quantised along the axis that is summed there, from
    full precision. Under a mode with a global scale gradients stay unquantised, and are zero where the operand was
    out of range.

    >>> configs = [get_scaled_dot_general_config("mxfp8")] * 3
    >>> x, w = jnp.ones((4, 64)), jnp.ones((64, 2))
    >>> scaled_dot_general(x, w, (((1,), (0,)), ((), ())), configs=configs).shape
    (4, 2)
    """
    if implementation is not None:
        warnings.warn(
            "`implementation` is ignored; a kernel is chosen by the problem", DeprecationWarning, stacklevel=2
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
    rule = _Rule(
        from_dimension_numbers(dimension_numbers, lhs.ndim, rhs.ndim),
        tuple(_row(config) for config in configs),
        preferred,
        precision,
        out_sharding,
    )
    return _scaled_dot(rule, lhs, rhs, tuple(_global_scale(config) for config in configs[:2]))


def _check_configs(configs: Any) -> None:
    is_list = isinstance(configs, (list, tuple)) and len(configs) in (2, 3)
    if not is_list or not all(hasattr(config, "mode") for config in configs):
        raise TypeError(
            "`configs` must be [lhs, rhs, gradient], or [lhs, rhs] for a forward pass alone, each from "
            f"get_scaled_dot_general_config (or None for a plain matmul), not {configs!r}"
        )


class _Rule(NamedTuple):
    """What is known of a scaled dot before data."""

    contraction: Contraction
    rows: tuple[Format, ...]  # of lhs, rhs and, where there is a backward pass, gradient
    preferred: np.dtype
    precision: Any
    out_sharding: Any


def _row(config: BlockScaleConfig) -> Format:
    row = FORMATS[config.mode]
    element = row.element if row.code_dtype == config.data_type else np.dtype(config.data_type).name
    scale = np.dtype(config.scale_type).name
    block = (config.block_size,) if row.block != (config.block_size,) and config.block_size else row.block
    return dataclasses.replace(row, element=element, scale=scale, block=block)


def _global_scale(config: BlockScaleConfig) -> jax.Array | None:
    if config.global_scale is None:
        return None
    if jnp.size(config.global_scale) != 1:
        raise ValueError(f"`global_scale` must be one number, not of shape {jnp.shape(config.global_scale)}")
    return jnp.asarray(config.global_scale, jnp.float32).reshape(())


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scaled_dot(rule: _Rule, lhs: jax.Array, rhs: jax.Array, global_scales) -> jax.Array:
    return _quantized_dot(
        rule.contraction,
        (lhs, rhs),
        rule.rows[:2],
        global_scales,
        preferred_element_type=rule.preferred,
        precision=rule.precision,
        out_sharding=rule.out_sharding,
    )


def _forward(rule: _Rule, lhs, rhs, global_scales):
    return _scaled_dot(rule, lhs, rhs, global_scales), (lhs, rhs, global_scales)


def _backward(rule: _Rule, residuals, g: jax.Array):
    if len(rule.rows) == 2:
        raise ValueError(
            "`configs` has two entries, [lhs, rhs], which serve the forward pass only; to differentiate, "
            "pass a third one for the gradient: [lhs, rhs, gradient]"
        )
    lhs, rhs, global_scales = residuals
    lhs_row, rhs_row, g_row = rule.rows
    unscaled = g_row.two_level
    dgrad = (g_row, rhs_row), (None, global_scales[1])
    wgrad = (lhs_row, g_row), (global_scales[0], None)
    dlhs = _gradient(rule, rule.contraction.dgrad, (g, rhs), None if unscaled else dgrad, lhs)
    drhs = _gradient(rule, rule.contraction.wgrad, (lhs, g), None if unscaled else wgrad, rhs)
    if unscaled:
        dlhs, drhs = (
            _within_range(d, x, row, s)
            for d, x, row, s in zip((dlhs, drhs), (lhs, rhs), rule.rows, global_scales, strict=False)
        )
    return (
        Like.of(lhs).reduced(dlhs),
        Like.of(rhs).reduced(drhs),
        jax.tree.map(jnp.zeros_like, global_scales),
    )


_scaled_dot.defvjp(_forward, _backward)


def _gradient(rule: _Rule, contraction: Contraction, operands, casts, primal: jax.Array) -> jax.Array:
    """One gradient, in the dtype (and along explicit mesh axes the sharding) of its primal."""
    sharding = jax.typeof(primal).sharding
    wanted = {
        "preferred_element_type": primal.dtype,
        "precision": rule.precision,
        "out_sharding": None if sharding.mesh.empty else sharding,
    }
    if casts is None:
        return contract(contraction, *operands, **wanted)
    return _quantized_dot(contraction, operands, *casts, **wanted)


def _within_range(gradient: jax.Array, x: jax.Array, row: Format, global_scale: jax.Array | None) -> jax.Array:
    """Zero where the forward cast clipped."""
    reach = np.float32(row.max * float(ml_dtypes.finfo(np.dtype(row.scale_dtype(np.float32))).max))
    limit = reach if global_scale is None else global_scale * reach
    return jnp.where(jnp.abs(x.astype(jnp.float32)) <= limit, gradient, jnp.zeros_like(gradient))


def _quantized_dot(contraction: Contraction, operands, rows, global_scales, **wanted) -> jax.Array:
    """Both operands cast along what is summed, then the product."""
    along = contraction.contracted
    if not along:
        return contract(contraction, *operands, **wanted)
    merged = along if len(along) == 1 else labels(1, contraction.lhs + contraction.rhs)
    sides = []
    for x, of, row, global_scale in zip(operands, (contraction.lhs, contraction.rhs), rows, global_scales, strict=True):
        x, of = _merge(x, of, along, merged)
        axis = of.index(merged)
        level = jnp.ones((), jnp.float32) if row.two_level and global_scale is None else global_scale
        sides.append((quantize(x, row, axis=axis, tensor_scale=level, pad=True), of))
    (lhs, lhs_labels), (rhs, rhs_labels) = sides
    return contract(Contraction(lhs_labels, rhs_labels, contraction.out), lhs, rhs, **wanted)


def _merge(x: jax.Array, of: str, along: str, merged: str) -> tuple[jax.Array, str]:
    """Several summed axes as one, last, in the order in which they are paired."""
    if along == merged:
        return x, of
    kept = "".join(c for c in of if c not in along)
    moved = x.transpose([of.index(c) for c in kept + along])
    return moved.reshape(*moved.shape[: len(kept)], -1), kept + merged
