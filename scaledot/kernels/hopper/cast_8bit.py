"""8-bit codes with float32 scales as a row of the cast table: one scale, one for 128 elements, or for 128 x 128.

A matmul takes its operands with the contracted axis last. A matrix that one matmul contracts along columns and the
other along rows is therefore wanted as it lies and transposed, from one read. Rows in groups take a pass for each,
because sums over the rows of a group want them at other places.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from scaledot.array import ScaledArray
from scaledot.formats import FLOAT_RULES, FORMATS
from scaledot.kernels.hopper import cast_support
from scaledot.kernels.hopper.cast_support import in_shape, tile_of
from scaledot.kernels.hopper.scale_blocks import FLOAT8_ELEMENTS, SCALE_BLOCK
from scaledot.kernels.layouts import PerGroup, Transposed
from scaledot.kernels.operands import filled_up
from scaledot.kernels.spec import CastArguments, CastProblem, CastResult, View
from scaledot.numerics import blocks, calibrate
from scaledot.numerics.bits import flush
from scaledot.numerics.grouped import aligned_row_tiles, group_of, padded_capacity, row_tiles, whole_groups
from scaledot.numerics.scale import Scales, scales_or_nan
from scaledot.parallel.types import vary_as

ELEMENTS = (*FLOAT8_ELEMENTS, "int8")
LIKE = FORMATS["fp8_e4m3"]
COMPUTED = {"element": ELEMENTS, "rule": FLOAT_RULES, "pow2": (False, True), "bound": ("full", "half")}
GROUP_MULTIPLE = SCALE_BLOCK  # rows at which groups begin where rows are contracted
LONGEST_ROTATION = 16  # elements of a group, which a thread has in registers


def problem_reason(problem: CastProblem) -> str | None:
    """Why it does not make these casts, whatever the device."""
    ndim = len(problem.shape)
    unknown = [view for view in problem.views if not scaling_of(view, ndim)]
    if unknown:
        scales = f"float32 scales (one, or one for {SCALE_BLOCK} or {SCALE_BLOCK}x{SCALE_BLOCK} elements)"
        spec = unknown[0].spec
        return f"{spec.format.name} in blocks of {spec.block} is not an 8-bit float or integer with {scales}"
    reason = cast_support.problem_reason(problem)
    reason = reason or cast_support.field_reason(problem.views[0].spec.format, LIKE, COMPUTED)
    return reason or (_pair_reason(problem) if problem.groups is None else _groups_reason(problem))


def _pair_reason(problem: CastProblem) -> str | None:
    views, ndim = problem.views, len(problem.shape)
    if len({(scaling_of(view, ndim), view.is_stochastic) for view in views}) > 1:
        return "the casts have different kinds of scales, or one of them rounds stochastically"
    if len({_axis(view) for view in views}) < len(views):
        return "it makes one cast for each axis that is contracted"
    return next(filter(None, (_rotation_reason(problem, view) for view in views)), None)


def _groups_reason(problem: CastProblem) -> str | None:
    for view in problem.views:
        if scaling_of(view, 2) == "squares":
            return f"rows in groups are cast with one float32 scale, or one for {SCALE_BLOCK} elements"
        multiple = 1 if _axis(view) else GROUP_MULTIPLE
        if problem.group_multiple != multiple:
            return f"groups begin at multiples of {problem.group_multiple} rows; it places them at those of {multiple}"
        if padded_capacity(problem.shape[0], problem.groups or 0, multiple) > cast_support.MOST_ROWS:
            return f"it casts at most {cast_support.MOST_ROWS} rows, spaces between groups included"
        if view.spec.amax_axes:
            return "groups share their scales over mesh axes"
    return next(filter(None, (_rotation_reason(problem, view) for view in problem.views)), None)


def scaling_of(view: View, ndim: int) -> str:
    """How codes have their scales, if in a way that the kernel knows: tensor, lines or squares; "" otherwise."""
    format = view.spec.format
    if ndim < 2 or format.element not in ELEMENTS or format.scale != "float32":
        return ""
    tile = tile_of(view, ndim)
    line: blocks.Block = (1, SCALE_BLOCK) if _axis(view) else (SCALE_BLOCK, 1)
    return {(0, 0): "tensor", line: "lines", (SCALE_BLOCK, SCALE_BLOCK): "squares"}.get(tile, "")


def _axis(view: View) -> int:
    """The axis that lines run along: the contracted one. Codes of an ordinary view are written as they lie."""
    return 1 if view.contracted is None else view.contracted


def _rotation_reason(problem: CastProblem, view: View) -> str | None:
    rotation, ndim = view.spec.rotation, len(problem.shape)
    if rotation is None:
        return None
    if scaling_of(view, ndim) != "lines":
        return f"a rotation is made along lines of {SCALE_BLOCK} that have a scale each"
    if rotation.axis != (-1 if _axis(view) else -2):
        return "a rotation is made along the contracted axis"
    if rotation.size > LONGEST_ROTATION:
        return f"a rotation of {rotation.size} is longer than {LONGEST_ROTATION}"
    length = problem.shape[rotation.axis]
    whole = (problem.groups is not None and not _axis(view)) or not length % rotation.size
    return None if whole else f"a sum of {length} is not whole groups of a rotation of {rotation.size}"


def how(problem: CastProblem) -> str:
    scales = {
        "tensor": "one scale",
        "lines": f"a scale for {SCALE_BLOCK} elements",
        "squares": f"one for {SCALE_BLOCK}x{SCALE_BLOCK}",
    }
    layouts = ["transposed" if _axis(view) == 0 else "as they lie" for view in problem.views]
    passes = "a pass for each" if problem.groups is not None and len(layouts) > 1 else "one pass on Hopper"
    return f"codes {' and '.join(layouts)} with {scales[scaling_of(problem.views[0], len(problem.shape))]}, {passes}"


def run(problem: CastProblem, x: jax.Array, given: CastArguments) -> CastResult:
    if problem.groups is not None:
        return _run_groups(problem, x, given)
    shape = cast_support.matrix_shape(problem)
    assert shape is not None
    return _run_matrix(problem, x.reshape(shape), given)


def _run_matrix(problem: CastProblem, x: jax.Array, given: CastArguments) -> CastResult:
    from scaledot.kernels.hopper import cast_8bit_kernel

    views, (m, k) = problem.views, x.shape
    spec, scaling_kind = views[0].spec, scaling_of(views[0], len(problem.shape))
    saturates, filled, seen = spec.nonfinite == "saturate", filled_up(x, SCALE_BLOCK, SCALE_BLOCK), None
    if given.multiplier is not None:
        scaling = cast_8bit_kernel.GivenMultiplier(given.multiplier.reshape(1))
    elif scaling_kind == "tensor":
        found = cast_8bit_kernel.amax(filled, finite=saturates or spec.format.is_float)
        seen = cast_support.largest_of_devices(found, x, spec.amax_axes)
        scaling = cast_8bit_kernel.FromAmax(seen)
    else:
        scaling = cast_8bit_kernel.PerBlock(scaling_kind == "squares")
    by_axis = {_axis(view): view for view in views}
    wanted = cast_8bit_kernel.Outputs(
        rows=1 in by_axis, transposed=0 in by_axis, amax=problem.amax and seen is None, sums=problem.column_sums
    )
    seeds = cast_support.seeds([by_axis.get(axis, views[0]) for axis in (1, 0)], given)
    along, down = (by_axis[axis].spec.rotation if axis in by_axis else None for axis in (1, 0))
    row_length = problem.row_length or k
    made = cast_8bit_kernel.cast(
        filled, spec.format, scaling, wanted, seeds, row_length, (along, down), saturates=saturates
    )
    largest = made.amax if seen is None else seen

    def array(view: View) -> ScaledArray | Transposed:
        codes = (made.rows, (m, k)) if _axis(view) else (made.transposed, (k, m))
        source = given.multiplier if given.multiplier is not None else x if seen is None else seen
        scale = _stored_scale(made, view, scaling_kind, source)
        q = _stored(view, tile_of(view, len(problem.shape)), *codes, scale, x)
        return in_shape(problem, view, q) if isinstance(q, ScaledArray) and view.contracted is None else q

    return CastResult(
        tuple(map(array, views)),
        vary_as(jnp.max(largest), x) if problem.amax else None,
        vary_as(jnp.sum(made.sums, axis=0)[:k], x) if problem.column_sums else None,
    )


def _stored_scale(made, view: View, scaling_kind: str, source: jax.Array) -> jax.Array:
    """The scales of a view, as its codes are stored. They vary as the source that they were made from."""
    if scaling_kind == "tensor":
        scale = made.row_scale.reshape(1, 1)
    elif scaling_kind == "squares":
        scale = made.row_scale if _axis(view) else made.row_scale.T
    else:
        scale = made.row_scale if _axis(view) else made.column_scale
    return vary_as(scale, source)


def _stored(
    view: View, tile: tuple[int, int], data: jax.Array, shape: tuple[int, int], scale: jax.Array, x: jax.Array
) -> ScaledArray | Transposed:
    """A matrix of that shape from padded codes and scales, all of them transposed where rows are contracted."""
    spec, tile = view.spec, tile if _axis(view) else (tile[1], tile[0])
    scale = scale[tuple(slice(size) for size in blocks.grid(shape, tile))]
    rotation = None if spec.rotation is None else dataclasses.replace(spec.rotation, axis=-1)
    what = {"format": spec.format, "block": blocks.trim(tile), "dtype": spec.dtype, "rotation": rotation}
    q = ScaledArray(vary_as(data, x)[: shape[0], : shape[1]], scale, **what)
    return q if _axis(view) else Transposed(q)


def _run_groups(problem: CastProblem, x: jax.Array, given: CastArguments) -> CastResult:
    """A pass for each view, the first of which looks for the largest magnitude."""
    made = [_cast_groups(problem, view, x, given, problem.amax and view is problem.views[0]) for view in problem.views]
    return CastResult(tuple(array for array, _ in made), made[0][1])


def _cast_groups(problem: CastProblem, view: View, x: jax.Array, given: CastArguments, amax: bool) -> tuple[Any, Any]:
    if given.multiplier is not None or scaling_of(view, 2) == "lines":
        multiplier = None if given.multiplier is None else given.multiplier.reshape(())
        return _cast_rows(view, x, given, multiplier, amax)
    sizes = given.group_sizes
    assert sizes is not None
    levels = _levels_of_groups(x, sizes, view)
    (multiplier,) = levels.multipliers
    rows = x.shape[0] if _axis(view) else padded_capacity(x.shape[0], sizes.shape[0], GROUP_MULTIPLE)
    group = group_of(whole_groups(sizes, problem.group_multiple), rows)
    codes, seen = _cast_rows(view, x, given, multiplier[group], amax)
    if view.contracted is not None:
        return PerGroup(codes, levels.scale[:-1, None]), seen
    return dataclasses.replace(codes, scale=levels.scale[group][:, None], block=blocks.trim((1, 0))), seen


def _levels_of_groups(x: jax.Array, sizes: jax.Array, view: View) -> Scales:
    """Scales of whole groups, and one more for rows of none, which count as zeros."""
    spec, count = view.spec, sizes.shape[0]
    is_finite = spec.nonfinite == "saturate" or spec.format.is_float  # codes of floats can be NaN
    row_amax = calibrate.block_amax if is_finite else calibrate.block_amax_or_inf
    of_rows = row_amax(flush(x.astype(jnp.float32)), (1, 0))[:, 0]
    group = group_of(sizes, x.shape[0])
    largest = jax.ops.segment_max(of_rows, group, count + 1, indices_are_sorted=True)
    return scales_or_nan(jnp.maximum(largest, 0).at[count].set(0), spec.format, spec.input_dtype)


def _cast_rows(
    view: View, x: jax.Array, given: CastArguments, multiplier: jax.Array | None, amax: bool
) -> tuple[ScaledArray | Transposed, jax.Array | None]:
    """The cast of rows in groups for one matmul, with zeros in rows of no group; and the largest magnitude.

    One that contracts features has them as they lie. One that contracts rows has them transposed, every group beginning
    at a multiple of 128 with zeros between, as `pad_groups` has it. factor: a number, or one for each row as it lies
    there, whose codes are then under a scale of 1; None for those of lines.
    """
    from scaledot.kernels.hopper import cast_8bit_kernel

    sizes, (m, k), spec, along = given.group_sizes, x.shape, view.spec, _axis(view) == 1
    assert sizes is not None
    rows = m if along else padded_capacity(m, sizes.size, SCALE_BLOCK)
    table = (row_tiles if along else aligned_row_tiles)(sizes, m, SCALE_BLOCK)
    if multiplier is None:
        scaling = cast_8bit_kernel.PerBlock(square=False)
    elif multiplier.ndim == 0:
        scaling = cast_8bit_kernel.GivenMultiplier(multiplier.reshape(1))
    else:
        scaling = cast_8bit_kernel.PerRow(jnp.pad(multiplier, (0, len(table) * SCALE_BLOCK - rows), constant_values=1))
    wanted = cast_8bit_kernel.Outputs(rows=along, transposed=not along, amax=amax)
    rotations = (spec.rotation, None) if along else (None, spec.rotation)
    saturates = spec.nonfinite == "saturate"
    made = cast_8bit_kernel.cast(
        filled_up(x, 2, SCALE_BLOCK),
        spec.format,
        scaling,
        wanted,
        cast_support.seeds([view] * 2, given),
        k,
        rotations,
        table,
        saturates,
    )
    if multiplier is None:
        scale = vary_as(made.row_scale if along else made.column_scale, x)
    else:
        scale = (vary_as(made.row_scale, multiplier) if multiplier.ndim == 0 else jnp.ones(1, jnp.float32)).reshape(
            1, 1
        )
    data, shape = (made.rows, (m, k)) if along else (made.transposed, (k, rows))
    return _stored(view, tile_of(view, 2), data, shape, scale, x), vary_as(jnp.max(made.amax), x) if amax else None
