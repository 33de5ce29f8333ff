"""From what a person writes to a frozen Plan: every argument of the verbs is checked here, once.

Errors name the argument in backticks, give both numbers, and say what would work.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from scaledot.array import ScaledArray
from scaledot.formats import Format, find_format, rules_of
from scaledot.numerics import blocks, calibrate
from scaledot.numerics.cast import Plan
from scaledot.numerics.hadamard import Hadamard

Axis = int | tuple[int, ...]


def make_plan(x, format, axis, block, calibration, rule, rotation, dtype, pad) -> Plan:
    """The cast that arguments of `quantize` ask for."""
    row = _checked_format(find_format(format), rule)
    parsed = _checked_calibration(row, calibration)
    try:
        laid = laid_block(row, block, axis, x.ndim)
        if parsed.method == "fixed":
            laid = _whole_tensor(laid, block, x.ndim)
        if not pad:
            blocks.check_divides(x.shape, laid)
    except ValueError as error:
        raise ValueError(f"{error} (quantising shape {x.shape} to {row.name})") from None
    stands_for = np.dtype(x.dtype if dtype is None else dtype)
    if not jnp.issubdtype(stands_for, jnp.floating):
        raise TypeError(f"`dtype` must be a float dtype, not {stands_for}")
    return Plan(row, laid, np.dtype(x.dtype), stands_for, parsed, _laid_rotation(rotation, axis, x.shape))


def float_array(x) -> jax.Array:
    if isinstance(x, ScaledArray):
        raise TypeError(f"`x` is already quantised ({x}); use requantize")
    given = getattr(x, "dtype", None)
    x = jnp.asarray(x)
    if given == np.float64 and x.dtype != np.float64:
        raise TypeError("`x` is float64, which jax holds only with jax_enable_x64; pass x.astype(np.float32)")
    if not jnp.issubdtype(x.dtype, jnp.floating) or jnp.finfo(x.dtype).bits < 16:
        raise TypeError(f"`x` must be a float array of at least 16 bits, not {x.dtype}; convert it with astype first")
    return x


def _checked_format(format: Format, rule: str | None) -> Format:
    allowed = rules_of(format)
    if rule is not None:
        format = dataclasses.replace(format, rule=rule)
    if format.rule not in allowed:
        raise ValueError(
            f"`rule` {format.rule!r} does not make {format.scale} scales; "
            f"{format.name} takes one of {', '.join(allowed)}"
        )
    if format.search not in (None, "four_over_six"):
        raise ValueError(f"`search` {format.search!r} of {format.name} is not known; use 'four_over_six' or None")
    if format.search == "four_over_six" and format.element != "float4_e2m1fn":
        raise ValueError(f"`search` 'four_over_six' is for float4_e2m1fn elements; {format.name} has {format.element}")
    if format.bound not in ("full", "half"):
        raise ValueError(f"`bound` {format.bound!r} of {format.name} is not known; use 'full' or 'half'")
    if format.two_level and format.scale != "float8_e4m3fn":
        raise ValueError(f"{format.name} has two levels, which needs float8_e4m3fn block scales, not {format.scale}")
    return format


def _checked_calibration(format: Format, text: str) -> calibrate.Calibration:
    parsed = calibrate.parse(text)
    if parsed.is_range and not (format.is_integer and format.scale in ("float32", "input")):
        raise ValueError(
            f"`calibration` {text!r} makes a zero point, which {format.name} cannot hold; "
            "use an integer format with float32 scales, or 'absmax'"
        )
    return parsed


def block_tuple(block: int | tuple[int, ...]) -> tuple[int, ...]:
    entries = block if isinstance(block, (tuple, list)) else (block,)
    if any(not isinstance(b, (int, np.integer)) or b < 0 for b in entries):
        raise ValueError(f"`block` {block} must hold sizes of at least 1, or 0 for a whole axis")
    return tuple(int(b) for b in entries)


def laid_block(format: Format, block, axis: Axis, ndim: int) -> blocks.Block:
    entries = format.block if block is None else block_tuple(block)
    if isinstance(axis, list):
        axis = tuple(axis)
    if entries is None and not isinstance(axis, tuple) and ndim:
        blocks.positive_axis(axis, ndim)
    return blocks.lay_on_axes(entries, axis, ndim)


def _whole_tensor(laid: blocks.Block, block, ndim: int) -> blocks.Block:
    if block is not None and (len(laid) != ndim or any(laid)):
        raise ValueError(f"`calibration` 'fixed' gives one scale for the whole tensor; `block` {block} asks for more")
    return (0,) * ndim


def _laid_rotation(rotation: Hadamard | None, axis: Axis, shape: tuple[int, ...]) -> Hadamard | None:
    if rotation is None:
        return None
    if not isinstance(rotation, Hadamard):
        raise TypeError(f"`rotation` must be a Hadamard or None, not {type(rotation).__name__}")
    along = axis if isinstance(axis, int) else axis[-1]
    at = blocks.positive_axis(along, len(shape))
    if shape[at] % rotation.size:
        raise ValueError(
            f"cannot rotate axis {along} of {shape[at]} in groups of {rotation.size}; pad it to a multiple"
        )
    return dataclasses.replace(rotation, axis=at - len(shape))


def key_for(rounding: str, key) -> jax.Array | None:
    if rounding == "nearest":
        return None
    if rounding != "stochastic":
        raise ValueError(f"`rounding` {rounding!r} is not known; use 'nearest' or 'stochastic'")
    if key is None:
        raise ValueError("`rounding` 'stochastic' needs a `key`, such as jax.random.key(0)")
    return key


def check_nan(x: jax.Array, nan: str) -> None:
    if nan not in ("keep", "raise"):
        raise ValueError(f"`nan` {nan!r} is not known; use 'keep' or 'raise'")
    if nan == "keep":
        return
    if isinstance(x, Tracer):
        raise ValueError("`nan` 'raise' needs a concrete array; call quantize outside jit, or use nan='keep'")
    count = int(jnp.sum(jnp.isnan(x)))
    if count:
        raise ValueError(f"`x` of shape {x.shape} holds {count} NaN")


def given_scales(plan: Plan, x: jax.Array, scale, tensor_scale) -> tuple[Any, Any]:
    if tensor_scale is not None:
        if not plan.format.two_level:
            raise ValueError(f"`tensor_scale` is given, but {plan.format.name} has one level; use `scale`")
        tensor_scale = _one_per_leading(jnp.asarray(tensor_scale, jnp.float32), x.shape)
    if scale is None:
        return None, tensor_scale
    if plan.calibration != calibrate.Calibration("absmax"):
        raise ValueError("`scale` is given, so there is nothing to calibrate; drop `calibration`")
    if plan.format.two_level and tensor_scale is None:
        raise ValueError(f"`scale` of {plan.format.name} is relative to a `tensor_scale`; give both")
    return _scale_as_stored(plan, x, scale), tensor_scale


def _scale_as_stored(plan: Plan, x: jax.Array, scale) -> jax.Array:
    scale, stored = jnp.asarray(scale), plan.format.scale_dtype(x.dtype)
    if scale.dtype != stored:
        if stored.itemsize == 1 or not jnp.issubdtype(scale.dtype, jnp.floating):
            raise TypeError(f"`scale` is {scale.dtype}; {plan.format.name} stores {stored}")
        scale = scale.astype(stored)
    grid = blocks.grid(x.shape, plan.block)
    if scale.size == 1:
        scale = jnp.broadcast_to(scale.reshape((1,) * x.ndim), grid)
    if scale.shape != grid:
        raise ValueError(f"`scale` has shape {scale.shape}; blocks of {plan.block} cut {x.shape} into {grid}")
    return scale


def _one_per_leading(tensor_scale: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A scalar, or an array with one entry per leading index; trailing axes of 1 may be written out."""
    if tensor_scale.size == 1:
        return tensor_scale.reshape(())
    lead = tensor_scale.shape
    while lead and lead[-1] == 1:
        lead = lead[:-1]
    if lead != shape[: len(lead)]:
        raise ValueError(f"`tensor_scale` of shape {tensor_scale.shape} does not match the leading axes of {shape}")
    return tensor_scale.reshape(lead)


def checked_groups(group_sizes, rows: int) -> jax.Array:
    group_sizes = jnp.asarray(group_sizes)
    if group_sizes.ndim != 1 or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise TypeError(f"`group_sizes` must be a 1-d integer array, not {group_sizes.dtype}{group_sizes.shape}")
    if not group_sizes.size:
        raise ValueError("`group_sizes` is empty; give one size per group")
    if not isinstance(group_sizes, Tracer):
        sizes = np.asarray(group_sizes)
        if sizes.min() < 0 or sizes.sum() > rows:
            raise ValueError(f"`group_sizes` {sizes.tolist()} must not be negative nor sum to more than {rows} rows")
    return group_sizes
