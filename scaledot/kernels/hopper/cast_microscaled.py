"""MXFP8 and NVFP4 as a row of the cast table: blocks along rows, down columns or square, and several from one read."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from scaledot.array import ScaledArray
from scaledot.formats import E8M0_RULES, FORMATS, Format
from scaledot.kernels.hopper import cast_support
from scaledot.kernels.hopper.cast_support import in_shape, tile_of
from scaledot.kernels.hopper.scale_blocks import FLOAT8_ELEMENTS, MICROSCALED_BLOCKS
from scaledot.kernels.layouts import RowPairs, as_values
from scaledot.kernels.operands import filled_up
from scaledot.kernels.spec import CastArguments, CastProblem, CastResult, View
from scaledot.numerics import blocks
from scaledot.numerics.bits import ONE, divide
from scaledot.numerics.scale import tensor_level
from scaledot.parallel.types import vary_as

# By the dtype of the scale: a format that the kernel casts to, and what it computes beside that format's own fields.
COMPUTED: dict[str, tuple[Format, dict[str, tuple]]] = {
    "float8_e8m0fnu": (FORMATS["mxfp8"], {"element": FLOAT8_ELEMENTS, "rule": E8M0_RULES}),
    "float8_e4m3fn": (FORMATS["nvfp4"], {}),
}


def problem_reason(problem: CastProblem) -> str | None:
    """Why it does not make these casts, whatever the device."""
    if problem.groups is not None:
        return "it does not cast rows in groups"
    if problem.given:
        return f"`{min(problem.given)}` is given; it makes scales and random bits itself"
    unknown = [view for view in problem.views if not shape_of(view, len(problem.shape))]
    if unknown:
        spec = unknown[0].spec
        return f"{spec.format.name} in blocks of {spec.block} is not MXFP8 or NVFP4"
    format = problem.views[0].spec.format
    reason = cast_support.problem_reason(problem) or cast_support.field_reason(format, *COMPUTED[format.scale])
    reasons = (reason, _packing_reason(problem), *(_rotation_reason(problem, view) for view in problem.views))
    return next(filter(None, reasons), None)


def shape_of(view: View, ndim: int) -> str:
    """Of blocks: along rows, down columns or square, if they are as long as is computed; "" otherwise."""
    size, tile = block_of(view.spec.format), tile_of(view, ndim) if ndim > 1 else (0, 0)
    lines: dict[blocks.Block, str] = {(1, size): "along", (size, 1): "down", (size, size): "square"}
    contracted = size if view.contracted is None else tile[view.contracted]
    return lines.get(tile, "") if size and contracted > 1 else ""


def block_of(format: Format) -> int:
    """The length of the blocks that the kernel casts to a format; 0 if it does not cast to it."""
    return MICROSCALED_BLOCKS.get((format.element, format.scale), 0)


def _packing_reason(problem: CastProblem) -> str | None:
    """4-bit codes of an ordinary array are packed by columns, which needs pairs of bfloat16 in a 32-bit word."""
    if problem.views[0].spec.format.bits == 8:
        return None
    if len({view.contracted is None for view in problem.views}) > 1:
        return "it packs 4-bit codes by rows or by columns, not both"
    if problem.views[0].contracted is None and problem.dtype != jnp.bfloat16:
        return f"it packs 4-bit codes by columns from bfloat16, not from {problem.dtype}"
    return None


def _rotation_reason(problem: CastProblem, view: View) -> str | None:
    rotation, size = view.spec.rotation, block_of(view.spec.format)
    if rotation is None:
        return None
    if shape_of(view, len(problem.shape)) != "down" or rotation.axis != -2 or rotation.size != size:
        return f"a rotation of {rotation.size} is made down columns in blocks of as many"
    rows = problem.shape[-2]
    return None if not rows % size else f"{rows} rows are not whole groups of a rotation of {size}"


def how(problem: CastProblem) -> str:
    ndim = len(problem.shape)
    casts = [
        f"{'values' if _is_values(view) else 'codes'} in blocks {_WORDS[shape_of(view, ndim)]}"
        for view in problem.views
    ]
    reads = "two reads" if problem.views[0].spec.format.two_level else "one read"
    return f"{' and '.join(casts)}, {reads} on Hopper"


_WORDS = {"along": "along rows", "down": "down columns", "square": "of squares"}


def _is_values(view: View) -> bool:
    return view.contracted is not None and not view.is_residual


def run(problem: CastProblem, x: jax.Array, given: CastArguments) -> CastResult:
    from scaledot.kernels.hopper import cast_microscaled_kernel

    shape, views, ndim = cast_support.matrix_shape(problem), problem.views, len(problem.shape)
    assert shape is not None
    format, x = views[0].spec.format, x.reshape(shape)
    filled = filled_up(x, block_of(format), cast_microscaled_kernel.COLUMNS)
    up, down = _levels(filled, views)
    wanted = tuple(_wanted(view, shape_of(view, ndim)) for view in views)
    made = cast_microscaled_kernel.cast(
        filled, wanted, up, cast_support.seeds(views, given), problem.row_length or shape[1]
    )
    arrays = (
        _stored(view, tile_of(view, ndim), one, level, x) for view, one, level in zip(views, made, down, strict=True)
    )
    return CastResult(
        tuple(in_shape(problem, v, q) if v.contracted is None else q for v, q in zip(views, arrays, strict=True))
    )


def _wanted(view: View, shape: str) -> Any:
    from scaledot.kernels.hopper import cast_microscaled_kernel

    spec, packing = view.spec, ""
    if spec.format.bits == 4 and not _is_values(view):
        packing = "columns" if view.contracted is None else "rows"
    saturates = spec.nonfinite == "saturate"
    return cast_microscaled_kernel.View(
        spec.format, shape, _is_values(view), view.is_stochastic, spec.rotation, packing, saturates
    )


def _levels(x: jax.Array, views: tuple[View, ...]) -> tuple[jax.Array | None, list[jax.Array | None]]:
    """Of a two-level format: what brings the largest block maximum of each view to the largest scale, and the
    reciprocal, float32 (V, 2); and what block scales are multiplied by to return, V numbers. None for other formats."""
    from scaledot.kernels.hopper import cast_microscaled_kernel, scalars

    format, dtype = views[0].spec.format, views[0].spec.input_dtype
    if not format.two_level:
        return None, [None] * len(views)
    rotations = list(dict.fromkeys(view.spec.rotation for view in views))
    amax = cast_microscaled_kernel.amaxes(x, tuple(rotations), block_of(format))
    amax = cast_support.largest_of_devices(amax, x, views[0].spec.amax_axes)
    numbers = tuple(rotations.index(view.spec.rotation) for view in views)

    def levels(amax: list[Any]) -> tuple[Any, ...]:
        found = [tensor_level(format, dtype, None, each) for each in amax]
        return [[found[i][0], divide(ONE, found[i][0])] for i in numbers], *(found[i][1] for i in numbers)

    types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((len(views), 2), *[()] * len(views))]
    up, *down = scalars.compute(("levels", format, dtype, numbers), levels, types, amax)
    return up, [vary_as(each, amax) for each in down]


def _stored(view: View, tile: tuple[int, int], made, down: jax.Array | None, x: jax.Array) -> Any:
    """A matrix of the shape of x, from padded codes or values and bytes of scales."""
    spec, (m, k), format, data = view.spec, x.shape, view.spec.format, vary_as(made.data, x)
    if _is_values(view):
        scale = jnp.ones((), jnp.float32) if down is None else down
        return as_values(data[:m, :k], scale, spec.dtype, spec.rotation)
    pairs_rows = format.bits == 4 and view.contracted is not None
    rows = m + m % 2 if pairs_rows else m  # of pairs, both are stored
    grid = blocks.grid((rows, k), tile)
    scale = vary_as(made.scale, x)[: grid[0], : grid[1]]
    scale = lax.bitcast_convert_type(scale, format.scale_dtype(spec.input_dtype))
    what = {"format": format, "block": blocks.trim(tile), "dtype": spec.dtype, "rotation": spec.rotation}
    if pairs_rows:
        return RowPairs(ScaledArray(data[: rows // 2, :k], scale, down, **what), m)
    if format.bits == 4:
        data = lax.bitcast_convert_type(data, format.code_dtype).reshape(data.shape[0], -1)
    return ScaledArray(data[:m, :k], scale, down, **what)
