"""quantize, dequantize and related functions.

Each function checks its arguments and makes a CastSpec of them (`ops.cast_spec`), which the first supporting kernel of
`kernels.table` runs (`ops.casts`). Casts are jitted, so that eager calls and calls under a user's jit run the same
program and give the same bits.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scaledot.array import ScaledArray
from scaledot.deprecated import accepts_renamed_arguments
from scaledot.formats import Format, find_format
from scaledot.kernels.spec import CastArguments, CastOutput, accumulation_dtype
from scaledot.numerics import blocks, calibrate
from scaledot.numerics.cast import CastSpec, QuantizedLeaves, dequantize_values
from scaledot.numerics.grouped import group_of
from scaledot.numerics.hadamard import Hadamard
from scaledot.numerics.rounding import flushed_float32
from scaledot.ops.cast_spec import (
    Axis,
    as_axis,
    block_tuple,
    check_consistent,
    check_nan,
    checked_amax_axes,
    checked_group_multiplier,
    checked_groups,
    checked_key,
    checked_multiplier,
    checked_scales,
    checked_uniform,
    checked_zero,
    float_array,
    float_dtype,
    make_cast_spec,
    resolved_block,
    with_rounding,
)
from scaledot.ops.casts import run_casts
from scaledot.ops.operands import KernelChoice


@accepts_renamed_arguments
def quantize(
    x,
    format: str | Format,
    *,
    axis: Axis = -1,
    block: int | tuple[int, ...] | None = None,
    calibration: str = "absmax",
    rule: str | None = None,
    rounding: str = "nearest",
    key=None,
    uniform=None,
    rotation: Hadamard | None = None,
    scale=None,
    tensor_scale=None,
    zero=None,
    multiplier=None,
    pad: bool = False,
    dtype=None,
    nan: str = "keep",
    amax_axes: tuple[str, ...] = (),
    kernel: KernelChoice = None,
) -> ScaledArray:
    """Quantises a float array to codes and scales.

    The last entry of `block` (by default the format's) is the block size along `axis`, the entries before it those
    along the axes to its left; 0 is a whole axis. `q.data` has the shape of x; `q.scale` has the rank of x and one
    entry per block. The gradient is 0, as that of jnp.round.

    Args:
      x: float array of at least 16 bits; casts compute in float32. Non-finite elements do not influence a scale:
        infinities saturate, and NaN stays NaN in 8-bit floats and becomes 0 in other formats. A finite float64 element
        beyond the range of float32 is an error outside jit and an infinity inside.
      format: a Format or its name.
      axis: the axis of the last entry of `block`; as a tuple, the axis of each entry.
      block: elements that share a scale, e.g. (128,), (128, 128), or (0,) for one scale per channel.
      calibration: the magnitude of a block that is mapped to the largest code. `absmax[,f]` or `rms,f`: the amax or the
        root mean square, times a factor f; `percentile,p`: the p-th percentile of magnitudes; `fixed,a`: the number a;
        `mse`: that of the least squared error. `minmax[,f]` (minimum and maximum, times f) and `fixed,lo,hi` are ranges
        for integer formats with a zero point.
      rule: how a power-of-two scale is rounded: `ceil`, `floor`, `even`, `even1`, `ceil_log2`.
      rounding: `nearest` (ties to even); `stochastic`, which needs a `key`, or `uniform` numbers in [0, 1) that
        broadcast against x; or `ms_eden`, for 4-bit formats with E4M3 scales and a `rotation`: nearest codes, and block
        scales that are corrected and rounded stochastically, with a `key` or `uniform` as well.
      rotation: a Hadamard to apply along `axis` first; `dequantize` undoes it.
      scale, tensor_scale, zero: used instead of computed ones; a `zero` point needs its `scale`.
      multiplier: the quantisation multiplier, float32: x is multiplied by it, and the scale is its reciprocal, as in
        delayed scaling.
      pad: allow a short last block instead of raising.
      dtype: the dtype of dequantised values, by default that of x.
      nan: "keep" quantises NaN elements as stated for x; "raise" raises if there are any, which needs a concrete array.
      amax_axes: inside a shard_map, the mesh axes over which the amax is all-reduced, so that devices agree on a scale:
        those that shard an axis whose elements share a scale; for per-tensor scales, all that shard x.
      kernel: the name of a kernel (`explain` lists them), or a function from the CastProblem to a name; None is the
        first kernel that supports it.

    >>> q = quantize(jnp.array([-3, 0.1, 0.7, 2.5]), "fp8_e4m3")
    >>> q
    ScaledArray(fp8_e4m3[4], block=(0,), dtype=float32)
    >>> q.data.astype(jnp.float32)
    Array([-448.,   15.,  104.,  384.], dtype=float32)
    >>> dequantize(q)
    Array([-3.        ,  0.10044643,  0.6964286 ,  2.5714285 ], dtype=float32)
    """
    x = float_array(x)
    spec = _cast_spec(x, format, axis, block, calibration, rule, rotation, dtype, pad, amax_axes)
    check_nan(x, nan)
    checked = make_cast_arguments(spec, x, rounding, key, uniform, scale, tensor_scale, zero, multiplier)
    return run_casts(x, (single_output(spec, rounding),), checked, kernel).arrays[0]


def make_cast_arguments(
    spec: CastSpec,
    x: jax.Array,
    rounding: str,
    key=None,
    uniform=None,
    scale=None,
    tensor_scale=None,
    zero=None,
    multiplier=None,
) -> CastArguments:
    """The checked array arguments of a cast, other than x."""
    if rounding == "nearest" and uniform is scale is tensor_scale is zero is multiplier is None:
        return _NO_ARGUMENTS
    if rounding == "ms_eden" and (scale is not None or tensor_scale is not None):
        name = "scale" if scale is not None else "tensor_scale"
        raise ValueError(f"`rounding` 'ms_eden' computes its scales from the amax of x; drop `{name}`")
    uniform = checked_uniform(rounding, uniform, x.shape)
    key = None if uniform is not None else checked_key(rounding, key)
    scale, tensor_scale = checked_scales(spec, x, scale, tensor_scale)
    multiplier = checked_multiplier(spec, x, scale, multiplier)
    return CastArguments((key,), (uniform,), multiplier, scale, tensor_scale, checked_zero(spec, x, scale, zero))


_NO_ARGUMENTS = CastArguments((None,), (None,))


@functools.lru_cache(maxsize=4096)
def single_output(spec: CastSpec, rounding: str) -> CastOutput:
    """The CastOutput of a single cast, whose key is the first of the CastArguments."""
    return CastOutput(with_rounding(spec, rounding), key=None if rounding == "nearest" else 0)


def dequantize(q: ScaledArray, dtype=None) -> jax.Array:
    """The dequantised values of a ScaledArray, computed in float32 and rounded once, to `dtype` (by default q.dtype).

    >>> dequantize(quantize(jnp.array([1.0, 2.0, 4.0]), "int8", block=(0,)))
    Array([1.007874, 2.015748, 4.      ], dtype=float32)
    """
    check_consistent(q)
    return _dequantize(q, float_dtype(q.dtype if dtype is None else dtype))


def requantize(q: ScaledArray, format: str | Format, **options) -> ScaledArray:
    """Quantises the dequantised values of q to another format, block or axis; `options` are those of `quantize`.

    >>> q = quantize(jnp.ones((2, 64)), "mxfp8")
    >>> requantize(q, "nvfp4", axis=0, pad=True)
    ScaledArray(nvfp4[2,64], block=(16, 1), dtype=float32)
    """
    values = dequantize(q, jnp.float32)
    return quantize(values, format, **{"dtype": q.dtype, **options})


def quantize_both(
    x, format: str | Format, *, key=None, rotation=None, kernel: KernelChoice = None, **options
) -> tuple[ScaledArray, ScaledArray]:
    """Quantises a matrix row-wise and column-wise: with blocks along its last axis, and along the one before.

    Both results have the shape of x. If both have the same codes (one scale per tensor, square blocks), they are one
    array. Otherwise each is quantised from x, never from the other, and stochastic rounding uses independent random
    bits: `key` for the first, `jax.random.fold_in(key, 1)` for the second. `rotation` is one Hadamard or None for both,
    or a pair. Other `options` are those of `quantize`.

    >>> rows, columns = quantize_both(jnp.ones((64, 32)), "mxfp8")
    >>> rows.scale.shape, columns.scale.shape
    ((64, 1), (2, 32))
    """
    x = float_array(x)
    if x.ndim < 2:
        raise ValueError(f"`x` must have at least 2 axes to have two orientations, not shape {x.shape}")
    if "axis" in options:
        raise TypeError("quantize_both takes no `axis`: it quantises along the last two")
    row_rotation, column_rotation = _pair(rotation)
    key = checked_key(options.get("rounding", "nearest"), key)
    row_block = resolved_block(find_format(format), options.pop("block", None), -1, x.ndim)
    column_block = _swap_last(row_block, x.ndim)
    row_wise = {"block": _nonempty(row_block), "key": key, "rotation": row_rotation}
    if row_block == column_block and row_rotation == column_rotation is None:
        rows = quantize(x, format, kernel=kernel, **row_wise, **options)
        return rows, rows
    column_key = None if key is None else jax.random.fold_in(key, 1)
    column_wise = {**_column_wise(column_block, x.ndim), "key": column_key, "rotation": column_rotation}
    if any(options.get(name) is not None for name in _ARRAY_ARGUMENTS):
        rows, columns = (quantize(x, format, kernel=kernel, **each, **options) for each in (row_wise, column_wise))
        return rows, columns
    return _cast_both(x, format, (row_wise, column_wise), kernel, **options)


_ARRAY_ARGUMENTS = (
    "scale",
    "tensor_scale",
    "zero",
    "multiplier",
    "uniform",
)  # not supported by a CastProblem of several casts


def _cast_both(x, format, orientations, kernel: KernelChoice, rounding="nearest", nan="keep", **options) -> Any:
    """Both orientations as one CastProblem; `options` are those of a CastSpec."""
    check_nan(x, nan)
    keys = tuple(each.pop("key") for each in orientations)
    specs = (_cast_spec(x, format, **each, **options) for each in orientations)
    is_stochastic = checked_key(rounding, keys[0]) is not None
    outputs = tuple(
        CastOutput(with_rounding(spec, rounding), key=index if is_stochastic else None)
        for index, spec in enumerate(specs)
    )
    return run_casts(x, outputs, CastArguments(keys), kernel).arrays


def quantize_dbias(x, format: str | Format, *, kernel: KernelChoice = None, **options) -> tuple[ScaledArray, jax.Array]:
    """`quantize`, and the bias gradient: the sum of x over all axes but the last, in float32, or float64 for float64 x.

    >>> q, dbias = quantize_dbias(jnp.ones((3, 32)), "mxfp8")
    >>> dbias.shape, float(dbias[0])
    ((32,), 3.0)
    """
    x = float_array(x)
    if not x.ndim:
        raise ValueError("`x` must have at least 1 axis to compute a bias gradient")
    return quantize(x, format, kernel=kernel, **options), _column_sum(x)


def quantize_grouped(
    x,
    group_sizes,
    format: str | Format,
    *,
    axis: Axis = -1,
    block: int | tuple[int, ...] | None = None,
    rule: str | None = None,
    rounding: str = "nearest",
    key=None,
    uniform=None,
    rotation: Hadamard | None = None,
    multiplier=None,
    pad: bool = False,
    dtype=None,
    amax_axes: tuple[str, ...] = (),
    kernel: KernelChoice = None,
) -> ScaledArray:
    """Quantises a matrix whose rows are in consecutive groups, each group independently.

    Groups may be empty; rows past the last group become zeros. Blocks never straddle groups: along rows they restart
    in each group, and the last block of a group may be short. Because group sizes may be traced, scales are stored per
    row (`q.scale` has one row, and `q.tensor_scale` one entry, for each row of x), so the result is an ordinary
    ScaledArray. Inside a shard_map `amax_axes` are mesh axes that shard the features; rows are not sharded.
    multiplier: the quantisation multiplier of each group, float32 (groups,), for one scale per group, block=(0, 0).

    >>> x = jnp.array([[1.0, 2.0], [3.0, 4.0], [50.0, 60.0]])
    >>> q = quantize_grouped(x, jnp.array([2, 0, 1]), "int8", block=(0, 0))
    >>> q.scale.ravel() * 127
    Array([ 4.,  4., 60.], dtype=float32)
    """
    x = float_array(x)
    if x.ndim != 2:
        raise ValueError(f"`x` must be a matrix of rows in groups, not of shape {x.shape}")
    group_sizes = checked_groups(group_sizes, x.shape[0])
    spec = grouped_cast_spec(x, format, axis, block, rule, rotation, dtype, pad, amax_axes)
    checked = make_cast_arguments(spec, x, rounding, key, uniform)._replace(group_sizes=group_sizes)
    if multiplier is not None:
        checked = checked._replace(multiplier=checked_group_multiplier(spec, multiplier, group_sizes.shape[0]))
    q = run_casts(x, (single_output(spec, rounding),), checked, kernel).arrays[0]
    return q if multiplier is None else _scale_by_row(q)


def _scale_by_row(q: ScaledArray) -> ScaledArray:
    """A ScaledArray with one scale per row; a multiplier of one group, (1, 1), gives a single scale."""
    return dataclasses.replace(q, scale=jnp.broadcast_to(q.scale, (q.shape[0], 1)), block=(0,))


def grouped_cast_spec(x, format, axis, block, rule, rotation, dtype, pad: bool, amax_axes=()) -> CastSpec:
    """The CastSpec of a call of `quantize_grouped`; its block has two entries, rows and columns."""
    spec = make_cast_spec(x, format, axis, block, "absmax", rule, rotation, dtype, pad=True)
    row_block, column_block = blocks.expand(spec.block, 2)
    if (spec.format.search or spec.format.grids) and row_block != 1:
        field = f"`search` {spec.format.search!r}" if spec.format.search else f"`grids` {spec.format.grids}"
        raise ValueError(
            f"{field} of {spec.format.name} is not supported for blocks across grouped rows; use blocks of one row, "
            f"not {row_block}"
        )
    if not pad:
        blocks.check_divides(x.shape[1:], (column_block,))
    if spec.rotation is not None and spec.rotation.axis != -1:
        raise ValueError("`rotation` along rows would mix groups; rotate along the last axis")
    return dataclasses.replace(spec, amax_axes=checked_amax_axes(spec, amax_axes))


def amax(x, *, axis: Axis = -1, block: int | tuple[int, ...] | None = None) -> jax.Array:
    """The largest finite magnitude of the array, or of each block, in float32; subnormal numbers count as 0.

    >>> amax(jnp.array([[1.0, -3.0], [jnp.inf, 2.0]]))
    Array(3., dtype=float32)
    >>> amax(jnp.array([[1.0, -3.0], [jnp.inf, 2.0]]), block=(0,))
    Array([[3.],
           [2.]], dtype=float32)
    """
    x = float_array(x)
    if block is None:
        return _amax((0,) * x.ndim, x).reshape(())
    return _amax(blocks.block_on_axes(block_tuple(block), as_axis(axis), x.ndim), x)


def amax_of_groups(x: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """The largest finite magnitude of each group of rows of a matrix, float32 (groups,); 0 for an empty group.

    >>> amax_of_groups(jnp.array([[1.0], [-3.0], [2.0]]), jnp.array([1, 0, 2]))
    Array([1., 0., 3.], dtype=float32)
    """
    count = group_sizes.shape[0]
    rows = amax(x, block=(0,)).reshape(-1)
    return jnp.maximum(jax.ops.segment_max(rows, group_of(group_sizes, x.shape[0]), count + 1)[:count], 0)


@functools.partial(jax.jit, static_argnums=0)
def _amax(block: blocks.Block, x: jax.Array) -> jax.Array:
    return calibrate.block_amax(flushed_float32(x), block)


@functools.partial(jax.jit, static_argnums=1)
def _dequantize(q: ScaledArray, dtype: np.dtype) -> jax.Array:
    leaves = QuantizedLeaves(q.data, q.scale, q.tensor_scale, q.zero)
    return dequantize_values(leaves, q.format, q.block, q.rotation).astype(dtype)


@jax.jit
def _column_sum(x: jax.Array) -> jax.Array:
    return jnp.sum(x.astype(accumulation_dtype(x.dtype)), axis=tuple(range(x.ndim - 1)))


def _cast_spec(
    x,
    format: str | Format,
    axis: Axis = -1,
    block=None,
    calibration: str = "absmax",
    rule: str | None = None,
    rotation: Hadamard | None = None,
    dtype=None,
    pad: bool = False,
    amax_axes: tuple[str, ...] = (),
) -> CastSpec:
    """The CastSpec of a call of `quantize`, with `amax_axes`."""
    spec = make_cast_spec(x, format, axis, block, calibration, rule, rotation, dtype, pad)
    axes = checked_amax_axes(spec, amax_axes)
    return dataclasses.replace(spec, amax_axes=axes) if axes else spec


def _pair(rotation) -> tuple[Hadamard | None, Hadamard | None]:
    if not isinstance(rotation, (tuple, list)):
        return rotation, rotation
    if len(rotation) != 2:
        raise ValueError(f"`rotation` must be one Hadamard or a pair, not {len(rotation)} of them")
    return rotation[0], rotation[1]


def _swap_last(block: blocks.Block, ndim: int) -> blocks.Block:
    *lead, rows, columns = blocks.expand(block, ndim)
    return blocks.trim((*lead, columns, rows))


def _nonempty(block: blocks.Block) -> blocks.Block:
    return block or (1,)


def _column_wise(block: blocks.Block, ndim: int) -> dict[str, Any]:
    """`axis` and `block` with an entry per axis; the last entry is axis -2, along which a rotation runs."""
    axes = (*(a for a in range(-ndim, 0) if a != -2), -2)
    expanded = blocks.expand(block, ndim)
    return {"axis": axes, "block": tuple(expanded[a] for a in axes)}
