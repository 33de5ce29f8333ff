"""From what a person writes to a frozen Plan: every argument of the verbs is checked here, once.

Errors name the argument in backticks, give both numbers, and say what would work.
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
from scaledot.formats import Format, find_format, rules_of
from scaledot.numerics import blocks, calibrate
from scaledot.numerics.bits import FLOAT32_MAX
from scaledot.numerics.cast import CastSpec
from scaledot.numerics.hadamard import Hadamard

Axis = int | tuple[int, ...]


def make_cast_spec(x, format, axis, block, calibration, rule, rotation, dtype, pad) -> CastSpec:
    """The cast that arguments of `quantize` ask for."""
    axis, block = as_axis(axis), None if block is None else block_tuple(block)
    options = {"calibration": calibration, "rule": rule, "rotation": rotation, "dtype": dtype, "pad": pad}
    try:
        return _cast_spec(x.shape, x.dtype, format, axis, block, **options)
    except TypeError:
        check_hashable({"format": format, **options})
        raise


def as_axis(axis: Axis) -> Axis:
    """An axis or a tuple of them, as integers."""
    if type(axis) is int:
        return axis
    several = isinstance(axis, (tuple, list))
    try:
        return tuple(map(operator.index, axis)) if several else operator.index(axis)
    except TypeError:
        raise TypeError(f"`axis` must {'hold integers' if several else 'be an integer'}, not {axis!r}") from None


def check_hashable(arguments: dict[str, Any]) -> None:
    """Raise for the first argument that cannot be part of a cache's key."""
    for name, value in arguments.items():
        try:
            hash(value)
        except TypeError:
            raise TypeError(f"`{name}` must be a value that hashes, not {value!r}") from None


@functools.lru_cache(maxsize=4096)
def _cast_spec(shape, input_dtype, format, axis, block, calibration, rule, rotation, dtype, pad) -> CastSpec:
    """Checked once per shape and arguments: an eager call asks every time."""
    shape, input_dtype = tuple(shape), np.dtype(input_dtype)
    dtype = float_dtype(input_dtype if dtype is None else dtype)
    row, ndim = _checked_format(find_format(format), rule), len(shape)
    parsed = _checked_calibration(row, calibration)
    try:
        laid = laid_block(row, block, axis, ndim)
        if parsed.method == "fixed":
            laid = _whole_tensor(laid, block, ndim)
        if not pad:
            blocks.check_divides(shape, laid)
    except ValueError as error:
        raise ValueError(f"{error} (quantising shape {shape} to {row.name})") from None
    return CastSpec(row, laid, input_dtype, dtype, parsed, _laid_rotation(rotation, axis, shape))


def propagating(spec: CastSpec, ndim: int) -> CastSpec:
    """The same cast of an array of `ndim` axes, in which NaN and infinities make the matmuls that they enter NaN.

    A block that holds one gets a NaN scale. Where one scale covers the whole array and codes can be NaN, the codes of
    those elements are, so that other rows of the results stay finite.
    """
    has_one_scale = not any(blocks.expand(spec.block, ndim))
    codes_hold_nan = spec.format.is_float and spec.format.bits == 8
    return dataclasses.replace(spec, nonfinite="nan_codes" if has_one_scale and codes_hold_nan else "nan_scales")


def checked_amax_axes(spec: CastSpec, axes) -> tuple[str, ...]:
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    if axes and spec.calibration.method != "absmax":
        raise ValueError(f"`amax_axes` {axes} are for calibration 'absmax', not {spec.calibration.method!r}")
    return axes


def float_array(x) -> jax.Array:
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
    """Raise where a concrete float64 array holds finite numbers that float32, in which casts compute, does not."""
    if getattr(x, "dtype", None) != np.float64 or isinstance(x, Tracer):
        return
    module: Any = jnp if isinstance(x, jax.Array) else np
    largest = float(module.max(module.abs(x), initial=0, where=module.isfinite(x)))
    if largest > float(FLOAT32_MAX):
        raise ValueError(
            f"`x` holds {largest:g}, and casts compute in float32, whose largest number is {FLOAT32_MAX:g}; "
            "divide `x` by a power of two first"
        )


def float_dtype(dtype) -> np.dtype:
    """The dtype, if it is one of floats."""
    try:
        found = np.dtype(dtype)
    except TypeError:
        raise TypeError(f"`dtype` {dtype!r} is not a dtype") from None
    if not jnp.issubdtype(found, jnp.floating):
        raise TypeError(f"`dtype` must be a float dtype, not {found}")
    return found


def check_whole(q: ScaledArray, name: str = "q") -> None:
    """Raise unless the leaves of a ScaledArray belong together; its constructor does not look."""
    if not isinstance(q, ScaledArray):
        raise TypeError(f"`{name}` must be a ScaledArray, not {type(q).__name__}")
    if not isinstance(q.format, Format):
        raise TypeError(f"`{name}.format` must be a Format, not {q.format!r}")
    if len(q.block) > q.ndim:
        raise ValueError(f"`{name}.block` {q.block} has more entries than the {q.ndim} axes of {q.shape}")
    grid, stored = blocks.grid(q.shape, q.block), q.format.scale_dtype(q.dtype)
    for part, leaf in (("scale", q.scale), ("zero", q.zero)):
        if (leaf is not None or part == "scale") and getattr(leaf, "shape", None) != grid:
            found = getattr(leaf, "shape", leaf)
            raise ValueError(f"`{name}.{part}` has shape {found}, but blocks of {q.block} cut {q.shape} into {grid}")
    if q.format.scale != "input" and q.scale.dtype != stored:
        raise TypeError(f"`{name}.scale` is {q.scale.dtype}, but {q.format.name} stores {stored}")
    if q.data.dtype != q.format.code_dtype:
        raise TypeError(f"`{name}.data` is {q.data.dtype}, but {q.format.name} stores {q.format.code_dtype}")
    if q.format.two_level and q.tensor_scale is None:
        raise ValueError(f"`{name}.tensor_scale` is None, but {q.format.name} has two levels")
    if q.tensor_scale is not None and q.tensor_scale.shape != q.shape[: q.tensor_scale.ndim]:
        raise ValueError(f"`{name}.tensor_scale` of shape {q.tensor_scale.shape} does not lead {q.shape}")


def _array(name: str, value) -> jax.Array:
    """What a person gave as an array, or an error that names it."""
    if isinstance(value, jax.Array):
        return value
    check_byte_order(name, value)
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"`{name}` must be an array of numbers, not {type(value).__name__}") from error


def check_byte_order(name: str, value) -> None:
    """Raise where a NumPy array has its bytes in the order of another machine, which jax does not hold."""
    dtype = getattr(value, "dtype", None)
    if isinstance(dtype, np.dtype) and not dtype.isnative:
        raise TypeError(
            f"`{name}` is {dtype.name} with its bytes in the order {dtype.str!r}, and jax holds arrays of this "
            f"machine's order; pass {name}.astype(np.{dtype.name})"
        )


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
    if format.is_integer and not 2 <= format.bits <= 8:
        raise ValueError(f"`element` {format.element!r} of {format.name} is not known; integers have 2 to 8 bits")
    if format.codebook is not None:
        _check_codebook(format, format.codebook)
    if format.bound not in ("full", "half"):
        raise ValueError(f"`bound` {format.bound!r} of {format.name} is not known; use 'full' or 'half'")
    if format.two_level and format.scale != "float8_e4m3fn":
        raise ValueError(f"{format.name} has two levels, which needs float8_e4m3fn block scales, not {format.scale}")
    return format


def _check_codebook(format: Format, codebook: tuple[float, ...]) -> None:
    if not format.element.startswith("uint"):
        raise ValueError(f"`codebook` of {format.name} needs unsigned codes, not {format.element}")
    if not 2 <= len(codebook) <= 2**format.bits or not np.all(np.diff(codebook) > 0):
        raise ValueError(f"`codebook` of {format.name} must hold 2 to {2**format.bits} values in rising order")


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
    return blocks.block_on_axes(entries, axis, ndim)


def _whole_tensor(laid: blocks.Block, block, ndim: int) -> blocks.Block:
    if block is not None and (len(laid) != ndim or any(laid)):
        raise ValueError(f"`calibration` 'fixed' gives one scale for the whole tensor; `block` {block} asks for more")
    return (0,) * ndim


def _laid_rotation(rotation: Hadamard | None, axis: Axis, shape: tuple[int, ...]) -> Hadamard | None:
    if rotation is None:
        return None
    if not isinstance(rotation, Hadamard):
        raise TypeError(f"`rotation` must be a Hadamard or None, not {type(rotation).__name__}")
    if isinstance(axis, tuple) and not axis:
        raise ValueError("`rotation` needs an `axis` to run along; `axis` is ()")
    along = axis[-1] if isinstance(axis, tuple) else axis
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
    dtype = getattr(key, "dtype", None)
    if dtype is None or not (jnp.issubdtype(dtype, jax.dtypes.prng_key) or dtype == jnp.uint32):
        raise TypeError(f"`key` must be a key such as jax.random.key(0) gives, not {key!r}")
    words = 0 if jnp.issubdtype(dtype, jax.dtypes.prng_key) else 1  # axes of one key
    if len(key.shape) != words:
        raise ValueError(f"`key` must be one key, not an array of keys of shape {key.shape[: len(key.shape) - words]}")
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


def given_scales(spec: CastSpec, x: jax.Array, scale, tensor_scale) -> tuple[Any, Any]:
    if tensor_scale is not None:
        if not spec.format.two_level:
            raise ValueError(f"`tensor_scale` is given, but {spec.format.name} has one level; use `scale`")
        tensor_scale = _array("tensor_scale", tensor_scale).astype(jnp.float32)
        tensor_scale = _one_per_leading(tensor_scale, x.shape, spec.block)
    if scale is None:
        return None, tensor_scale
    if spec.calibration != calibrate.Calibration("absmax"):
        raise ValueError("`scale` is given, so there is nothing to calibrate; drop `calibration`")
    if spec.format.two_level and tensor_scale is None:
        raise ValueError(f"`scale` of {spec.format.name} is relative to a `tensor_scale`; give both")
    return _scale_as_stored(spec, x, scale), tensor_scale


def _scale_as_stored(spec: CastSpec, x: jax.Array, scale) -> jax.Array:
    scale, stored = _array("scale", scale), spec.format.scale_dtype(x.dtype)
    if scale.dtype != stored:
        if stored.itemsize == 1 or not jnp.issubdtype(scale.dtype, jnp.floating):
            raise TypeError(f"`scale` is {scale.dtype}; {spec.format.name} stores {stored}")
        scale = scale.astype(stored)
    grid = blocks.grid(x.shape, spec.block)
    if scale.size == 1:
        scale = jnp.broadcast_to(scale.reshape((1,) * x.ndim), grid)
    if scale.shape != grid:
        raise ValueError(f"`scale` has shape {scale.shape}; blocks of {spec.block} cut {x.shape} into {grid}")
    return scale


def given_multiplier(spec: CastSpec, x: jax.Array, scale, multiplier) -> jax.Array | None:
    if multiplier is None:
        return None
    if scale is not None or spec.calibration != calibrate.Calibration("absmax"):
        raise ValueError("`multiplier` decides the scale; drop `scale` and `calibration`")
    if spec.format.scale != "float32" or spec.format.codebook is not None:
        raise ValueError(f"`multiplier` is for formats with float32 scales; {spec.format.name} has {spec.format.scale}")
    multiplier, grid = _array("multiplier", multiplier), blocks.grid(x.shape, spec.block)
    if multiplier.dtype != np.float32:
        raise TypeError(f"`multiplier` must be float32, not {multiplier.dtype}")
    if multiplier.size == 1:
        multiplier = jnp.broadcast_to(multiplier.reshape((1,) * x.ndim), grid)
    if multiplier.shape != grid:
        raise ValueError(f"`multiplier` has shape {multiplier.shape}; blocks of {spec.block} cut {x.shape} into {grid}")
    return multiplier


def given_zero(spec: CastSpec, x: jax.Array, scale, zero) -> jax.Array | None:
    if zero is None:
        return None
    if scale is None:
        raise ValueError("`zero` is in units of a `scale`; give both")
    if not spec.format.is_integer:
        raise ValueError(f"`zero` is given, but {spec.format.name} has no zero point; use an integer format")
    zero, grid = _array("zero", zero), blocks.grid(x.shape, spec.block)
    if not jnp.issubdtype(zero.dtype, jnp.integer):
        raise TypeError(f"`zero` must hold integers, not {zero.dtype}")
    if zero.shape != grid:
        raise ValueError(f"`zero` has shape {zero.shape}; blocks of {spec.block} cut {x.shape} into {grid}")
    return zero


def given_uniform(rounding: str, uniform, shape: tuple[int, ...]) -> jax.Array | None:
    if uniform is None:
        return None
    if rounding != "stochastic":
        raise ValueError(f"`uniform` is for `rounding` 'stochastic', not {rounding!r}")
    uniform = _array("uniform", uniform).astype(jnp.float32)
    try:
        return jnp.broadcast_to(uniform, shape)
    except ValueError:
        raise ValueError(f"`uniform` has shape {uniform.shape}, which does not broadcast to {shape}") from None


def _one_per_leading(tensor_scale: jax.Array, shape: tuple[int, ...], block: blocks.Block) -> jax.Array:
    """A scalar, or an array with one entry per leading index; trailing axes of 1 may be written out."""
    if tensor_scale.size == 1:
        return tensor_scale.reshape(())
    lead = tensor_scale.shape
    while lead and lead[-1] == 1:
        lead = lead[:-1]
    if lead != shape[: len(lead)] or len(lead) > len(shape) - len(block):
        raise ValueError(
            f"`tensor_scale` of shape {tensor_scale.shape} does not match the leading axes of {shape} "
            f"that blocks of {block} leave alone"
        )
    return tensor_scale.reshape(lead)


def checked_groups(group_sizes, rows: int) -> jax.Array:
    group_sizes = _array("group_sizes", group_sizes)
    if group_sizes.ndim != 1 or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise TypeError(f"`group_sizes` must be a 1-d integer array, not {group_sizes.dtype}{group_sizes.shape}")
    if not group_sizes.size:
        raise ValueError("`group_sizes` is empty; give one size per group")
    if not isinstance(group_sizes, Tracer):
        sizes = np.asarray(group_sizes)
        if sizes.min() < 0 or sizes.sum() > rows:
            raise ValueError(f"`group_sizes` {sizes.tolist()} must not be negative nor sum to more than {rows} rows")
    return group_sizes.astype(jnp.int32)  # narrow or unsigned sums would wrap
