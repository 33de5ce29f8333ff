"""Checks the arguments of `quantize` and related functions, and makes a CastSpec, the frozen description of a cast.

Results are cached per shape, dtype and arguments, so that a repeated eager call is not checked again. Errors name the
argument in backticks, give both numbers, and say what would work.
"""

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from scaledot.array import ScaledArray
from scaledot.formats import Format, find_format
from scaledot.numerics import blocks, calibrate, eden
from scaledot.numerics.bits import FLOAT32_MAX
from scaledot.numerics.cast import CastSpec
from scaledot.numerics.format_checks import checked_calibration, checked_format
from scaledot.numerics.grouped import clipped_sizes
from scaledot.numerics.hadamard import Hadamard
from scaledot.numerics.rounding import check_rounding

Axis = int | tuple[int, ...]


def make_cast_spec(x, format, axis, block, calibration, rule, rotation, dtype, pad) -> CastSpec:
    """The CastSpec of a call of `quantize` with these arguments."""
    axis, block = as_axis(axis), None if block is None else block_tuple(block)
    options = {"calibration": calibration, "rule": rule, "rotation": rotation, "dtype": dtype, "pad": pad}
    try:
        return _cast_spec(x.shape, x.dtype, format, axis, block, **options)
    except TypeError:
        check_hashable({"format": format, **options})
        raise


def as_axis(axis: Axis) -> Axis:
    """An axis, or a tuple of axes, converted to Python integers."""
    if type(axis) is int:
        return axis
    several = isinstance(axis, (tuple, list))
    try:
        return tuple(map(operator.index, axis)) if several else operator.index(axis)
    except TypeError:
        raise TypeError(f"`axis` must {'hold integers' if several else 'be an integer'}, not {axis!r}") from None


def check_hashable(arguments: dict[str, Any]) -> None:
    """Raises for the first argument that is not hashable, and so cannot be part of a cache key."""
    for name, value in arguments.items():
        try:
            hash(value)
        except TypeError:
            raise TypeError(f"`{name}` must be hashable, not {value!r}") from None


@functools.lru_cache(maxsize=4096)
def _cast_spec(shape, input_dtype, format, axis, block, calibration, rule, rotation, dtype, pad) -> CastSpec:
    shape, input_dtype = tuple(shape), np.dtype(input_dtype)
    dtype = float_dtype(input_dtype if dtype is None else dtype)
    format, ndim = checked_format(find_format(format), rule), len(shape)
    parsed = checked_calibration(format, calibration)
    try:
        resolved = resolved_block(format, block, axis, ndim)
        if parsed.method == "fixed":
            resolved = _per_tensor_block(resolved, block, ndim)
        if not pad:
            blocks.check_divides(shape, resolved)
    except ValueError as error:
        raise ValueError(f"{error} (quantising shape {shape} to {format.name})") from None
    return CastSpec(format, resolved, input_dtype, dtype, parsed, _rotation_on_axis(rotation, axis, shape))


def propagate_nonfinite(spec: CastSpec, ndim: int) -> CastSpec:
    """The cast with NaN and infinities propagated: every matmul result that depends on one is NaN.

    A block that contains one gets a NaN scale. If one scale covers the whole array, of `ndim` axes, and the codes have
    a NaN (8-bit floats), only the elements themselves become NaN, so that other rows of the result stay finite.
    """
    has_one_scale = not any(blocks.expand(spec.block, ndim))
    codes_hold_nan = spec.format.is_float and spec.format.bits == 8
    return dataclasses.replace(spec, nonfinite="nan_codes" if has_one_scale and codes_hold_nan else "nan_scales")


def checked_amax_axes(spec: CastSpec, axes) -> tuple[str, ...]:
    """`amax_axes` as a tuple; raises unless the scale is computed from an amax."""
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    if axes and spec.calibration.method != "absmax":
        raise ValueError(f"`amax_axes` {axes} are for calibration 'absmax', not {spec.calibration.method!r}")
    if axes and 0 in spec.block and (spec.format.search or spec.format.grids):
        raise ValueError(
            f"{spec.format.name} compares errors of blocks, which must be on one device, but `amax_axes` {axes} shard "
            f"blocks of {spec.block}; use blocks of a fixed size"
        )
    return axes


def float_array(x) -> jax.Array:
    """`x` as a jax array of floats of at least 16 bits; raises for anything else."""
    if isinstance(x, ScaledArray):
        raise TypeError(f"`x` is already quantised ({x}); use requantize")
    check_range(x)
    x = _array("x", x)
    if not _is_wide_float(x.dtype):
        raise TypeError(f"`x` must be a float array of at least 16 bits, not {x.dtype}; convert it with astype first")
    return x


@functools.cache
def _is_wide_float(dtype: np.dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits >= 16


def check_range(x) -> None:
    """Raises if a concrete float64 array has finite elements beyond the range of float32, in which casts compute."""
    if getattr(x, "dtype", None) != np.float64 or isinstance(x, Tracer):
        return
    module: Any = jnp if isinstance(x, jax.Array) else np
    largest = float(module.max(module.abs(x), initial=0, where=module.isfinite(x)))
    if largest > float(FLOAT32_MAX):
        raise ValueError(
            f"`x` has an element of magnitude {largest:g}, but casts compute in float32, whose maximum is "
            f"{FLOAT32_MAX:g}; divide `x` by a power of two first"
        )


def float_dtype(dtype) -> np.dtype:
    """`dtype` as a numpy dtype; raises unless it is a float dtype."""
    try:
        parsed = np.dtype(dtype)
    except TypeError:
        raise TypeError(f"`dtype` {dtype!r} is not a dtype") from None
    if not jnp.issubdtype(parsed, jnp.floating):
        raise TypeError(f"`dtype` must be a float dtype, not {parsed}")
    return parsed


def check_consistent(q: ScaledArray, name: str = "q") -> None:
    """Raises unless the leaves of a ScaledArray match its format and block, which its constructor does not check."""
    if not isinstance(q, ScaledArray):
        raise TypeError(f"`{name}` must be a ScaledArray, not {type(q).__name__}")
    if not isinstance(q.format, Format):
        raise TypeError(f"`{name}.format` must be a Format, not {q.format!r}")
    if len(q.block) > q.ndim:
        raise ValueError(f"`{name}.block` {q.block} has more entries than the {q.ndim} axes of {q.shape}")
    grid, stored = blocks.grid(q.shape, q.block), q.format.scale_dtype(q.dtype)
    for field, leaf in (("scale", q.scale), ("zero", q.zero)):
        if (leaf is not None or field == "scale") and getattr(leaf, "shape", None) != grid:
            shape = getattr(leaf, "shape", leaf)
            raise ValueError(f"`{name}.{field}` has shape {shape}, but blocks of {q.block} cut {q.shape} into {grid}")
    if q.format.scale != "input" and q.scale.dtype != stored:
        raise TypeError(f"`{name}.scale` is {q.scale.dtype}, but {q.format.name} stores {stored}")
    if q.data.dtype != q.format.code_dtype:
        raise TypeError(f"`{name}.data` is {q.data.dtype}, but {q.format.name} stores {q.format.code_dtype}")
    if q.format.two_level and q.tensor_scale is None:
        raise ValueError(f"`{name}.tensor_scale` is None, but {q.format.name} has two levels")
    if q.tensor_scale is not None and q.tensor_scale.shape != q.shape[: q.tensor_scale.ndim]:
        raise ValueError(
            f"`{name}.tensor_scale` of shape {q.tensor_scale.shape} does not match the leading axes of {q.shape}"
        )


def _array(name: str, value) -> jax.Array:
    """The argument `name` as a jax array; raises TypeError if it is not an array of numbers."""
    if isinstance(value, jax.Array):
        return value
    check_byte_order(name, value)
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"`{name}` must be an array of numbers, not {type(value).__name__}") from error


def check_byte_order(name: str, value) -> None:
    """Raises for a NumPy array in non-native byte order, which jax does not support."""
    dtype = getattr(value, "dtype", None)
    if isinstance(dtype, np.dtype) and not dtype.isnative:
        raise TypeError(
            f"`{name}` is {dtype.name} in non-native byte order ({dtype.str!r}), which jax does not support; pass "
            f"{name}.astype(np.{dtype.name})"
        )


def block_tuple(block: int | tuple[int, ...]) -> tuple[int, ...]:
    """The argument `block` as a tuple of integers."""
    entries = block if isinstance(block, (tuple, list)) else (block,)
    if any(not isinstance(b, (int, np.integer)) or b < 0 for b in entries):
        raise ValueError(f"`block` {block} must hold sizes of at least 1, or 0 for a whole axis")
    return tuple(int(b) for b in entries)


def resolved_block(format: Format, block, axis: Axis, ndim: int) -> blocks.Block:
    """The block size of each trailing axis, for a `block` on `axis`; the format's own block if `block` is None."""
    entries = format.block if block is None else block_tuple(block)
    if isinstance(axis, list):
        axis = tuple(axis)
    if entries is None and not isinstance(axis, tuple) and ndim:
        blocks.positive_axis(axis, ndim)
    return blocks.block_on_axes(entries, axis, ndim)


def _per_tensor_block(resolved: blocks.Block, block, ndim: int) -> blocks.Block:
    """The block of one scale for the whole tensor; raises if `block` was passed and has several scales."""
    if block is not None and (len(resolved) != ndim or any(resolved)):
        raise ValueError(
            f"`calibration` 'fixed' gives one scale for the whole tensor, but `block` {block} has several; drop `block`"
        )
    return (0,) * ndim


def _rotation_on_axis(rotation: Hadamard | None, axis: Axis, shape: tuple[int, ...]) -> Hadamard | None:
    """The rotation along `axis`, or the last of several, as a negative axis."""
    if rotation is None:
        return None
    if not isinstance(rotation, Hadamard):
        raise TypeError(f"`rotation` must be a Hadamard or None, not {type(rotation).__name__}")
    if isinstance(axis, tuple) and not axis:
        raise ValueError("`rotation` needs an `axis` to run along; `axis` is ()")
    last = axis[-1] if isinstance(axis, tuple) else axis
    positive = blocks.positive_axis(last, len(shape))
    if shape[positive] % rotation.size:
        raise ValueError(
            f"cannot rotate axis {last} of {shape[positive]} in groups of {rotation.size}; pad it to a multiple"
        )
    return dataclasses.replace(rotation, axis=positive - len(shape))


def with_rounding(spec: CastSpec, rounding: str) -> CastSpec:
    """The spec with the scale corrections of `rounding` 'ms_eden'; raises if the cast does not support them."""
    if rounding != "ms_eden":
        return spec
    rotated = spec.rotation.axis if spec.rotation is not None else -1
    sizes = list(blocks.expand(spec.block, max(len(spec.block), -rotated)))
    reason = eden.unsupported(spec.format, spec.calibration, spec.rotation, sizes.pop(rotated), sizes)
    if reason is not None:
        raise ValueError(f"`rounding` 'ms_eden' {reason}")
    return dataclasses.replace(spec, eden=True)


def checked_key(rounding: str, key) -> jax.Array | None:
    """The key of stochastic rounding or of MS-EDEN, or None for rounding to nearest."""
    if rounding == "nearest":
        return None
    check_rounding(rounding)
    if key is None:
        raise ValueError(f"`rounding` {rounding!r} needs a `key`, such as jax.random.key(0)")
    check_one_key(key)
    return key


def check_one_key(key) -> None:
    """Raises unless `key` is one key of jax.random, typed or raw."""
    dtype = getattr(key, "dtype", None)
    if dtype is None or not (jnp.issubdtype(dtype, jax.dtypes.prng_key) or dtype == jnp.uint32):
        raise TypeError(f"`key` must be a key such as jax.random.key(0) returns, not {key!r}")
    key_ndim = 0 if jnp.issubdtype(dtype, jax.dtypes.prng_key) else 1  # typed and raw keys
    if len(key.shape) != key_ndim:
        shape = key.shape[: len(key.shape) - key_ndim]
        raise ValueError(f"`key` must be one key, not an array of keys of shape {shape}")


def check_nan(x: jax.Array, nan: str) -> None:
    """Raises if `nan` is "raise" and x has NaN elements."""
    if nan not in ("keep", "raise"):
        raise ValueError(f"`nan` {nan!r} is not known; use 'keep' or 'raise'")
    if nan == "keep":
        return
    if isinstance(x, Tracer):
        raise ValueError("`nan` 'raise' needs a concrete array; call quantize outside jit, or use nan='keep'")
    count = int(jnp.sum(jnp.isnan(x)))
    if count:
        raise ValueError(f"`x` of shape {x.shape} holds {count} NaN")


def checked_scales(spec: CastSpec, x: jax.Array, scale, tensor_scale) -> tuple[Any, Any]:
    """The arguments `scale` and `tensor_scale` in the shapes and dtypes that the format stores; None if not passed."""
    if tensor_scale is not None:
        if not spec.format.two_level:
            raise ValueError(f"`tensor_scale` was passed, but {spec.format.name} has one level of scales; use `scale`")
        tensor_scale = _array("tensor_scale", tensor_scale).astype(jnp.float32)
        tensor_scale = _per_leading_index(tensor_scale, x.shape, spec.block)
    if scale is None:
        return None, tensor_scale
    if spec.calibration != calibrate.Calibration("absmax"):
        raise ValueError("`scale` was passed, so there is nothing to calibrate; drop `calibration`")
    if spec.format.two_level and tensor_scale is None:
        raise ValueError(f"`scale` of {spec.format.name} is relative to a `tensor_scale`; pass both")
    return _scale_as_stored(spec, x, scale), tensor_scale


def _scale_as_stored(spec: CastSpec, x: jax.Array, scale) -> jax.Array:
    scale, stored = _array("scale", scale), spec.format.scale_dtype(x.dtype)
    if scale.dtype != stored:
        if stored.itemsize == 1 or not jnp.issubdtype(scale.dtype, jnp.floating):
            raise TypeError(f"`scale` is {scale.dtype}; {spec.format.name} stores {stored}")
        scale = scale.astype(stored)
    return _one_per_block("scale", scale, spec, x)


def _one_per_block(name: str, value: jax.Array, spec: CastSpec, x: jax.Array) -> jax.Array:
    """`value` with one entry per block of x; one element is broadcast to all blocks."""
    grid = blocks.grid(x.shape, spec.block)
    if value.size == 1:
        value = jnp.broadcast_to(value.reshape((1,) * x.ndim), grid)
    if value.shape != grid:
        raise ValueError(f"`{name}` has shape {value.shape}; blocks of {spec.block} cut {x.shape} into {grid}")
    return value


def checked_multiplier(spec: CastSpec, x: jax.Array, scale, multiplier) -> jax.Array | None:
    """The argument `multiplier`, one per block; None if not passed."""
    if multiplier is None:
        return None
    if scale is not None or spec.calibration != calibrate.Calibration("absmax"):
        raise ValueError("`multiplier` determines the scale; drop `scale` and `calibration`")
    return _one_per_block("multiplier", _float32_multiplier(spec, multiplier), spec, x)


def checked_group_multiplier(spec: CastSpec, multiplier, groups: int) -> jax.Array:
    """The argument `multiplier` of a grouped cast, (groups,), as an array (groups, 1)."""
    if blocks.expand(spec.block, 2) != (0, 0) or spec.rotation is not None:
        raise ValueError("`multiplier` needs one scale per group, block=(0, 0), and no `rotation`")
    multiplier = _float32_multiplier(spec, multiplier)
    if multiplier.shape != (groups,):
        raise ValueError(f"`multiplier` has shape {multiplier.shape}; it must have one entry per group, ({groups},)")
    return multiplier[:, None]


def _float32_multiplier(spec: CastSpec, multiplier) -> jax.Array:
    if spec.format.scale != "float32" or spec.format.codebook is not None:
        raise ValueError(f"`multiplier` is for formats with float32 scales; {spec.format.name} has {spec.format.scale}")
    multiplier = _array("multiplier", multiplier)
    if multiplier.dtype != np.float32:
        raise TypeError(f"`multiplier` must be float32, not {multiplier.dtype}")
    return multiplier


def checked_zero(spec: CastSpec, x: jax.Array, scale, zero) -> jax.Array | None:
    """The argument `zero`, one zero point per block; None if not passed."""
    if zero is None:
        return None
    if scale is None:
        raise ValueError("`zero` is in units of a `scale`; pass both")
    if not spec.format.is_integer:
        raise ValueError(f"`zero` was passed, but {spec.format.name} has no zero point; use an integer format")
    zero, grid = _array("zero", zero), blocks.grid(x.shape, spec.block)
    if not jnp.issubdtype(zero.dtype, jnp.integer):
        raise TypeError(f"`zero` must hold integers, not {zero.dtype}")
    if zero.shape != grid:
        raise ValueError(f"`zero` has shape {zero.shape}; blocks of {spec.block} cut {x.shape} into {grid}")
    return zero


def checked_uniform(rounding: str, uniform, shape: tuple[int, ...]) -> jax.Array | None:
    """The argument `uniform`, broadcast to `shape`; None if not passed."""
    if uniform is None:
        return None
    if rounding == "nearest":
        raise ValueError(f"`uniform` is for `rounding` 'stochastic' or 'ms_eden', not {rounding!r}")
    uniform = _array("uniform", uniform).astype(jnp.float32)
    try:
        return jnp.broadcast_to(uniform, shape)
    except ValueError:
        raise ValueError(f"`uniform` has shape {uniform.shape}, which does not broadcast to {shape}") from None


def _per_leading_index(tensor_scale: jax.Array, shape: tuple[int, ...], block: blocks.Block) -> jax.Array:
    """The tensor scale as a scalar, or with one entry per index of leading axes; trailing axes of 1 are dropped."""
    if tensor_scale.size == 1:
        return tensor_scale.reshape(())
    lead = tensor_scale.shape
    while lead and lead[-1] == 1:
        lead = lead[:-1]
    if lead != shape[: len(lead)] or len(lead) > len(shape) - len(block):
        raise ValueError(
            f"`tensor_scale` of shape {tensor_scale.shape} does not match the leading axes of {shape} "
            f"in front of blocks of {block}"
        )
    return tensor_scale.reshape(lead)


def checked_groups(group_sizes, rows: int) -> jax.Array:
    """`group_sizes` as int32 (groups,); raises unless a concrete one partitions at most `rows` rows.

    Traced sizes that exceed the rows are clipped, as by `jax.lax.ragged_dot`.
    """
    group_sizes = _array("group_sizes", group_sizes)
    if group_sizes.ndim != 1 or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise TypeError(f"`group_sizes` must be a 1-d integer array, not {group_sizes.dtype}{group_sizes.shape}")
    if not group_sizes.size:
        raise ValueError("`group_sizes` is empty; pass one size per group")
    if not isinstance(group_sizes, Tracer):
        sizes = np.asarray(group_sizes)
        if sizes.min() < 0 or sizes.sum() > rows:
            raise ValueError(f"`group_sizes` {sizes.tolist()} must not be negative nor sum to more than {rows} rows")
        return group_sizes.astype(jnp.int32)
    return clipped_sizes(group_sizes, rows)
