"""Qwix's quantised training: contractions with quantised forward and backward passes, as described by a config.

A config becomes a `scaledot.Recipe` (`recipe_of`), and the functions are those of `scaledot.train`:

| Qwix | here |
|---|---|
| `lhs_qtype`, `rhs_qtype`, `tile_size` | fwd |
| `dlhs_*`: the gradient of lhs, from g and rhs | dgrad |
| `drhs_*`: the gradient of rhs, from g and lhs | wgrad |
| codes of the forward pass as residuals, gradients not quantised | dgrad or wgrad straight through |

As in Qwix, the backward pass multiplies by the forward codes of an operand that has one scale per channel or tensor,
and a gradient is multiplied by these scales before it is quantised: such operands are divided by their scales before
the recipe's matmul, which rounds them, and the result is multiplied by the scales. An operand with tiles is saved in
full precision. Two things differ: a tile of several contracting dims has a scale for each index of the outer ones,
which Qwix shares, and gradients of `ragged_dot_qt` with respect to rhs have scales per group.
"""

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from scaledot import train
from scaledot.compat.qwix import how
from scaledot.compat.qwix.array import transpose_array
from scaledot.compat.qwix.operators import refuse_offset
from scaledot.compat.qwix.qt_config import (
    ConvGeneralQtConfig,
    DotDims,
    DotGeneralQtConfig,
    RaggedDotQtConfig,
    keeps_codes,
    recipe_of,
)
from scaledot.compat.qwix.quantizers import calibrate, compute_scale_zero_point, may_clip, unclipped_mask
from scaledot.compat.qwix.stochastic_rounding import NoiseFn
from scaledot.contraction import Contraction, from_dimension_numbers
from scaledot.kernels.spec import promoted
from scaledot.numerics.bits import divide
from scaledot.numerics.grouped import clipped_sizes
from scaledot.numerics.rounding import round_to
from scaledot.ops.einsum import two_operands
from scaledot.recipes import Recipe


def dot_general_qt(lhs: jax.Array, rhs: jax.Array, dimension_numbers, config: DotGeneralQtConfig) -> jax.Array:
    """`jax.lax.dot_general` with operands and gradients quantised as a config says.

    >>> config = DotGeneralQtConfig(lhs_qtype="int8", rhs_qtype="int8", dlhs_grad_qtype="int8", drhs_grad_qtype="int8")
    >>> loss = lambda x, w: dot_general_qt(x, w, (((1,), (0,)), ((), ())), config).sum()
    >>> jax.grad(loss)(jnp.ones((2, 4)), jnp.ones((4, 3))).shape
    (2, 4)
    """
    return _contract(from_dimension_numbers(dimension_numbers, lhs.ndim, rhs.ndim), lhs, rhs, config)


def einsum_qt(einsum_str: str, lhs: jax.Array, rhs: jax.Array, config: DotGeneralQtConfig) -> jax.Array:
    """`jnp.einsum` of two operands, quantised as a config says; Qwix has it as `QtProvider.einsum`.

    >>> config = DotGeneralQtConfig(lhs_qtype="int8", rhs_qtype="int8")
    >>> einsum_qt("bsd,dhk->bshk", jnp.ones((2, 5, 32)), jnp.ones((32, 4, 8)), config).shape
    (2, 5, 4, 8)
    """
    (lhs_labels, x), (rhs_labels, w), out = two_operands(einsum_str, lhs, rhs)
    return _contract(Contraction(lhs_labels, rhs_labels, out), x, w, config)


def ragged_dot_qt(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    config: RaggedDotQtConfig,
    precision=None,
    preferred_element_type=None,
    group_offset: jax.Array | None = None,
) -> jax.Array:
    """`jax.lax.ragged_dot` of lhs (m, k) and rhs (groups, k, n), quantised as a config says.

    lhs has a scale per row, and rhs one per column that all groups share.
    """
    refuse_offset(group_offset)
    dot_config = _as_dot_config(config)
    x = _operand(dot_config, "lhs", lhs, (1,), in_groups=True)
    w = _operand(dot_config, "rhs", rhs, (0, 1), in_groups=True)
    dtype = _result_dtype(lhs, rhs)
    y: Any = train.ragged_dot(
        x.value,
        w.value,
        clipped_sizes(group_sizes, lhs.shape[0]),
        precision=precision,
        preferred_element_type=_at_least_float32(dtype),
        recipe=recipe_of(dot_config, unit=_unit(x, w), in_groups=True),
    )
    return _rescaled(y, [x.scale, None if w.scale is None else w.scale[0]], preferred_element_type or dtype)


def conv_general_qt(
    lhs: jax.Array,
    rhs: jax.Array,
    config: ConvGeneralQtConfig,
    window_strides,
    padding,
    lhs_dilation=None,
    rhs_dilation=None,
    dimension_numbers=None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    out_sharding=None,
) -> jax.Array:
    """`jax.lax.conv_general_dilated`, quantised as a config says: a scale per image, and per output feature."""
    numbers = jax.lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    dot_config = _as_dot_config(config)
    x = _operand(dot_config, "lhs", lhs, numbers.lhs_spec[1:])
    w = _operand(dot_config, "rhs", rhs, numbers.rhs_spec[1:])
    dtype = _result_dtype(lhs, rhs)
    y: Any = train.conv_general_dilated(
        x.value,
        w.value,
        window_strides,
        padding,
        lhs_dilation,
        rhs_dilation,
        numbers,
        feature_group_count,
        batch_group_count,
        preferred_element_type=_at_least_float32(dtype),
        recipe=recipe_of(dot_config, unit=_unit(x, w)),
        out_sharding=out_sharding,
    )
    images, features, *_ = numbers.out_spec
    return _rescaled(y, [_along(x.scale, images, y.ndim), _along(w.scale, features, y.ndim)], dtype)


def _as_dot_config(config: RaggedDotQtConfig | ConvGeneralQtConfig) -> DotGeneralQtConfig:
    """The config of a dot with the same fields. Qwix does not clip the gradients of ragged dots and convolutions."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return DotGeneralQtConfig(**fields, disable_gradient_clipping=True)


def _contract(contraction: Contraction, lhs: Any, rhs: Any, config: DotGeneralQtConfig) -> jax.Array:
    labels = contraction.lhs, contraction.rhs, contraction.out
    x, w = (
        _operand(config, name, array, tuple(names.index(c) for c in contraction.contracting))
        for name, array, names in (("lhs", lhs, contraction.lhs), ("rhs", rhs, contraction.rhs))
    )
    recipe, dtype = recipe_of(config, _dims(contraction, lhs, rhs), _unit(x, w)), _result_dtype(lhs, rhs)
    keywords = {"key": _key(config, recipe), "preferred_element_type": _at_least_float32(dtype)}
    y: Any = train.einsum("{},{}->{}".format(*labels), x.value, w.value, recipe=recipe, **keywords)
    scales = (
        None if scale is None else transpose_array(scale, [names.index(c) if c in names else None for c in labels[2]])
        for scale, names in ((x.scale, contraction.lhs), (w.scale, contraction.rhs))
    )
    return _rescaled(y, scales, dtype)


class _Operand(NamedTuple):
    """An operand, divided by its scale if that is not None."""

    value: jax.Array
    scale: jax.Array | None


def _operand(
    config: DotGeneralQtConfig, name: str, x: jax.Array, shared: Collection[int], in_groups: bool = False
) -> _Operand:
    """The operand `name`, "lhs" or "rhs", of a matmul under the recipe. shared: axes along which a scale is shared.

    Its gradient is zero where the calibration clips, as in Qwix.
    """
    qtype = getattr(config, f"{name}_qtype")
    if qtype is None:
        return _Operand(x, None)
    fields = {"qtype": qtype, "calibration_method": getattr(config, f"{name}_calibration_method")}
    quantization = how.of_operand(x.ndim, shared, config.tile_size, **fields)
    if getattr(config, f"{name}_disable_channelwise_axes"):
        quantization = dataclasses.replace(quantization, channelwise_axes=())
    calibration = jax.lax.stop_gradient(calibrate(x, quantization))
    if quantization.clips and not config.disable_gradient_clipping:
        x = jnp.where(unclipped_mask(x, calibration), x, jax.lax.stop_gradient(x))
    if not keeps_codes(config, name) or not (in_groups or _needs_units(config)):
        return _Operand(x, None)
    if "absmax" not in calibration:
        raise ValueError(
            f"`{name}_calibration_method` {quantization.calibration_method!r} computes a zero point, which quantised "
            "gradients and `disable_gradient_clipping` do not support; use 'absmax', or use_original_residuals=True"
        )
    scale, _ = compute_scale_zero_point(calibration, qtype)
    return _Operand(_divided(x, scale), scale)


def _needs_units(config: DotGeneralQtConfig) -> bool:
    """Whether operands are divided by their scales: not if both gradients of the recipe are straight through.

    These are zero where an operand is clipped, so they do not serve a config that keeps such gradients.
    """
    methods = config.lhs_calibration_method, config.rhs_calibration_method
    keeps_clipped = config.disable_gradient_clipping and any(map(may_clip, methods))
    return config.dlhs_grad_qtype is not None or config.drhs_grad_qtype is not None or keeps_clipped


def _divided(x: jax.Array, scale: jax.Array) -> jax.Array:
    """x / scale, correctly rounded as in `quantize`; XLA's quotient may be an ulp off, which changes codes at ties."""
    exact = round_to(divide(x.astype(jnp.float32), jnp.broadcast_to(scale, x.shape).astype(jnp.float32)), x.dtype)
    quotient = x / scale
    return quotient + jax.lax.stop_gradient(exact.astype(x.dtype) - quotient)


def _unit(lhs: _Operand, rhs: _Operand) -> tuple[str, ...]:
    """The names of the operands that are divided by a precomputed scale, so that their cast has scale 1."""
    return tuple(name for name, operand in (("lhs", lhs), ("rhs", rhs)) if operand.scale is not None)


def _along(scale: jax.Array | None, axis: int, ndim: int) -> jax.Array | None:
    """A scale that varies along one axis at most, as an array of rank `ndim` that varies along `axis`."""
    return None if scale is None else scale.reshape([-1 if a == axis else 1 for a in range(ndim)])


def _rescaled(y: jax.Array, scales: Iterable[jax.Array | None], dtype) -> jax.Array:
    for scale in scales:
        y = y if scale is None else y * scale.astype(y.dtype)
    return y.astype(dtype)


def _result_dtype(lhs: jax.Array, rhs: jax.Array) -> np.dtype:
    return promoted(np.dtype(lhs.dtype), np.dtype(rhs.dtype))


def _at_least_float32(dtype: np.dtype) -> np.dtype:
    return promoted(dtype, np.dtype(np.float32))


def _dims(contraction: Contraction, lhs: jax.Array, rhs: jax.Array) -> DotDims:
    sizes = dict(zip(contraction.lhs + contraction.rhs, lhs.shape + rhs.shape, strict=True))
    groups = contraction.lhs_free, contraction.contracting, contraction.rhs_free
    last_sizes = (sizes[labels[-1]] if labels else None for labels in groups)
    is_2d = lhs.ndim == rhs.ndim == 2 and len(contraction.contracting) == 1
    axes = (labels.index(contraction.contracting) if is_2d else None for labels in (contraction.lhs, contraction.rhs))
    return DotDims(*axes, *last_sizes)


def _key(config: DotGeneralQtConfig, recipe: Recipe) -> jax.Array | None:
    """The key of the noise functions; None if no cast of the recipe uses stochastic rounding."""
    if not recipe.stochastic:
        return None
    names = "dlhs_stochastic_rounding_noise_fn", "drhs_stochastic_rounding_noise_fn"
    noise = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    for name, function in noise.items():
        if not isinstance(function, NoiseFn):
            raise ValueError(f"`{name}` must come from stochastic_rounding.get_noise_fn, not be {function!r}")
    return next(iter(noise.values())).key
