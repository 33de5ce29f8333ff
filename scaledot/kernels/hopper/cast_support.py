"""What the cast kernels have in common: which problems are theirs, and how arrays become matrices and back."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scaledot.array import ScaledArray
from scaledot.formats import Format
from scaledot.kernels.hopper.scale_blocks import SCALE_BLOCK
from scaledot.kernels.spec import CastArguments, CastProblem, View
from scaledot.numerics import blocks
from scaledot.numerics.calibrate import Calibration
from scaledot.numerics.rounding import Stream, mixed, raw_key, seeds_from
from scaledot.parallel.types import vary_as

INPUTS = ("bfloat16", "float16", "float32")
MOST_ROWS = 16 * 65535  # a grid has no more blocks of 16 rows


def matrix_shape(problem: CastProblem) -> tuple[int, int] | None:
    """The shape of the array as a matrix: leading axes merge where blocks do not run along them."""
    if len(problem.shape) == 2:
        return problem.shape[0], problem.shape[1]
    merges = (view.contracted is None and _merges(view, len(problem.shape)) for view in problem.views)
    if len(problem.shape) < 2 or not all(merges):
        return None
    return math.prod(problem.shape[:-1]), problem.shape[-1]


def _merges(view: View, ndim: int) -> bool:
    *lead, _ = tile = blocks.expand(view.spec.block, ndim)
    return not any(tile) or set(lead) == {1}


def tile_of(view: View, ndim: int) -> tuple[int, int]:
    """(rows, columns) of the matrix that share a scale; 0 for all."""
    *_, rows, columns = blocks.expand(view.spec.block, ndim)
    return rows, columns


def problem_reason(problem: CastProblem) -> str | None:
    """Why neither kernel makes these casts, whatever the device and the formats."""
    shape = matrix_shape(problem)
    if shape is None or not all(shape):
        return f"it casts matrices, not an array of shape {problem.shape} in such blocks"
    if problem.dtype.name not in INPUTS:
        return f"it reads {', '.join(INPUTS)}, not {problem.dtype}"
    if shape[0] > MOST_ROWS:
        return f"it casts at most {MOST_ROWS} rows, not {shape[0]}"
    if problem.views[0].contracted is None and shape[0] < SCALE_BLOCK:
        return f"it works on {SCALE_BLOCK} rows at a time, of which {shape[0]} would leave most idle"
    others = sorted(problem.given - {"multiplier"})
    if others:
        return f"`{others[0]}` is given; it makes scales and random bits itself"
    specs = [view.spec for view in problem.views]
    if any(spec.calibration != Calibration("absmax") for spec in specs):
        return f"it scales by the largest magnitude, not by calibration {specs[0].calibration.method!r}"
    if len({spec.format for spec in specs}) > 1:
        return "the casts have different formats"
    if len({(spec.amax_axes, spec.nonfinite == "saturate") for spec in specs}) > 1:
        return "the casts share scales over different mesh axes, or treat NaN differently"
    return None


def field_reason(format: Format, like: Format, computed: dict[str, tuple]) -> str | None:
    """The first field with a value that a kernel is not known to compute, whatever the field means.

    A kernel is known to compute the fields of the format `like`, and those values of others that `computed` lists. Name
    and block are free.
    """
    known = _fields(like)
    for field, value in _fields(format).items():
        if value != known[field] and value not in computed.get(field, ()):
            return f"`{field}` of {format.name} is {value!r}; the kernel computes casts where it is {known[field]!r}"
    return None


def _fields(format: Format) -> dict[str, Any]:
    """The fields of a format that say how it is cast, and those of its quirks."""
    own = {field.name: getattr(format, field.name) for field in dataclasses.fields(format)}
    quirks = {f"quirks.{field.name}": getattr(format.quirks, field.name) for field in dataclasses.fields(format.quirks)}
    return {name: own[name] for name in own if name not in ("name", "block", "quirks")} | quirks


def largest_of_devices(amax: jax.Array, x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The amax of a device's x, reduced over the devices along some mesh axes; along others it varies as x does."""
    amax = vary_as(amax, x)
    return lax.pmax(amax, axes) if axes else amax


def seeds(views: tuple[View, ...] | list[View], given: CastArguments) -> jax.Array | None:
    """Two words of each view's key, uint32 (V, 2); None where all round to nearest."""
    if not any(view.is_stochastic for view in views):
        return None
    from scaledot.kernels.hopper import scalars

    keys = [given.key(view) for view in views]
    numbers = tuple(key.number if isinstance(key, Stream) else None for key in keys)
    arrays = [raw_key(key.key if isinstance(key, Stream) else key) for key in keys if key is not None]
    drawn = tuple(key is not None for key in keys)
    offset = [] if given.offset is None else [given.offset.reshape(1)]

    def seeds(*words: list[Any]) -> tuple[list[Any]]:
        given, first = iter(words), words[-1][0] if offset else None
        made = []
        for is_drawn, number in zip(drawn, numbers, strict=True):
            key = [*next(given), *([] if number is None else [np.uint32(number)])] if is_drawn else None
            made.append([np.uint32(0)] * 2 if key is None else seeds_from(first, *mixed(key)))
        return (made,)

    result = [jax.ShapeDtypeStruct((len(views), 2), jnp.uint32)]
    (found,) = scalars.compute(("seeds", drawn, numbers, bool(offset)), seeds, result, *arrays, *offset)
    return found


def in_shape(problem: CastProblem, view: View, q: ScaledArray) -> ScaledArray:
    """A cast matrix as the ScaledArray that an ordinary view asks for, whose leading axes had been merged."""
    spec = view.spec
    return ScaledArray(
        q.data.reshape(problem.shape),
        q.scale.reshape(blocks.grid(problem.shape, spec.block)),
        q.tensor_scale,
        format=spec.format,
        block=spec.block,
        dtype=spec.dtype,
        rotation=spec.rotation,
    )
