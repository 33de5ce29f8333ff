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
from scaledot.kernels.hopper.sizes import BLOCK, FLOAT8_ELEMENTS
from scaledot.kernels.layouts import PerGroup, Transposed
from scaledot.kernels.operands import pad_to_multiples
from scaledot.kernels.spec import CastArguments, CastOutput, CastProblem, CastResult
from scaledot.numerics import blocks, calibrate
from scaledot.numerics.bits import flush
from scaledot.numerics.grouped import aligned_row_tiles, group_of, padded_capacity, row_tiles, whole_groups
from scaledot.numerics.scale import Scales, scales_or_nan
from scaledot.parallel.types import vary_as

ELEMENTS = (*FLOAT8_ELEMENTS, "int8")
LIKE = FORMATS["fp8_e4m3"]
COMPUTED = {"element": ELEMENTS, "rule": FLOAT_RULES, "pow2": (False, True), "bound": ("full", "half")}
GROUP_MULTIPLE = BLOCK  # rows at which groups begin where rows are contracted
LONGEST_ROTATION = 16  # elements of a group, which a thread has in registers


def problem_reason(problem: CastProblem) -> str | None:
    """Why it does not make these casts, whatever the device."""
    ndim = len(problem.shape)
    unknown = [output for output in problem.outputs if not scaling_of(output, ndim)]
    if unknown:
        scales = f"float32 scales (one, or one for {BLOCK} or {BLOCK}x{BLOCK} elements)"
        spec = unknown[0].spec
        return f"{spec.format.name} in blocks of {spec.block} is not an 8-bit float or integer with {scales}"
    reason = cast_support.problem_reason(problem)
    reason = reason or cast_support.field_reason(problem.outputs[0].spec.format, LIKE, COMPUTED)
    return reason or (_pair_reason(problem) if problem.groups is None else _groups_reason(problem))


def _pair_reason(problem: CastProblem) -> str | None:
    outputs, ndim = problem.outputs, len(problem.shape)
    if len({(scaling_of(output, ndim), output.is_stochastic) for output in outputs}) > 1:
        return "the casts have different kinds of scales, or one of them rounds stochastically"
    if len({_axis(output) for output in outputs}) < len(outputs):
        return "it makes one cast for each axis that is contracted"
    return next(filter(None, (_rotation_reason(problem, output) for output in outputs)), None)


def _groups_reason(problem: CastProblem) -> str | None:
    for output in problem.outputs:
        if scaling_of(output, 2) == "squares":
            return f"rows in groups are cast with one float32 scale, or one for {BLOCK} elements"
        multiple = 1 if _axis(output) else GROUP_MULTIPLE
        if problem.group_multiple != multiple:
            return f"groups begin at multiples of {problem.group_multiple} rows; it places them at those of {multiple}"
        if padded_capacity(problem.shape[0], problem.groups or 0, multiple) > cast_support.MOST_ROWS:
            return f"it casts at most {cast_support.MOST_ROWS} rows, spaces between groups included"
        if output.spec.amax_axes:
            return "groups share their scales over mesh axes"
    return next(filter(None, (_rotation_reason(problem, output) for output in problem.outputs)), None)


def scaling_of(output: CastOutput, ndim: int) -> str:
    """How codes have their scales, if in a way that the kernel knows: tensor, lines or squares; "" otherwise."""
    format = output.spec.format
    if ndim < 2 or format.element not in ELEMENTS or format.scale != "float32":
        return ""
    tile = tile_of(output, ndim)
    line: blocks.Block = (1, BLOCK) if _axis(output) else (BLOCK, 1)
    return {(0, 0): "tensor", line: "lines", (BLOCK, BLOCK): "squares"}.get(tile, "")


def _axis(output: CastOutput) -> int:
    """The axis that lines run along: the contracted one. Codes of an ordinary output are written as they lie."""
    return 1 if output.contracted is None else output.contracted


def _rotation_reason(problem: CastProblem, output: CastOutput) -> str | None:
    rotation, ndim = output.spec.rotation, len(problem.shape)
    if rotation is None:
        return None
    if scaling_of(output, ndim) != "lines":
        return f"a rotation is made along lines of {BLOCK} that have a scale each"
    if rotation.axis != (-1 if _axis(output) else -2):
        return "a rotation is made along the contracted axis"
    if rotation.size > LONGEST_ROTATION:
        return f"a rotation of {rotation.size} is longer than {LONGEST_ROTATION}"
    length = problem.shape[rotation.axis]
    whole = (problem.groups is not None and not _axis(output)) or not length % rotation.size
    return None if whole else f"a sum of {length} is not whole groups of a rotation of {rotation.size}"


def describe(problem: CastProblem) -> str:
    scales = {"tensor": "one scale", "lines": f"a scale for {BLOCK} elements", "squares": f"one for {BLOCK}x{BLOCK}"}
    layouts = ["transposed" if _axis(output) == 0 else "as they lie" for output in problem.outputs]
    passes = "a pass for each" if problem.groups is not None and len(layouts) > 1 else "one pass on Hopper"
    return f"codes {' and '.join(layouts)} with {scales[scaling_of(problem.outputs[0], len(problem.shape))]}, {passes}"


def run(problem: CastProblem, x: jax.Array, given: CastArguments) -> CastResult:
    if problem.groups is not None:
        return _run_groups(problem, x, given)
    shape = cast_support.matrix_shape(problem)
    assert shape is not None
    return _run_matrix(problem, x.reshape(shape), given)


def _run_matrix(problem: CastProblem, x: jax.Array, given: CastArguments) -> CastResult:
    from scaledot.kernels.hopper import cast_8bit_kernel

    outputs, (m, k) = problem.outputs, x.shape
    spec, scaling_kind = outputs[0].spec, scaling_of(outputs[0], len(problem.shape))
    saturates, filled, seen = spec.nonfinite == "saturate", pad_to_multiples(x, BLOCK, BLOCK), None
    if given.multiplier is not None:
        scaling = cast_8bit_kernel.GivenMultiplier(given.multiplier.reshape(1))
    elif scaling_kind == "tensor":
        found = cast_8bit_kernel.amax(filled, finite=saturates or spec.format.is_float)
        seen = cast_support.amax_over_devices(found, x, spec.amax_axes)
        scaling = cast_8bit_kernel.FromAmax(seen)
    else:
        scaling = cast_8bit_kernel.PerBlock(scaling_kind == "squares")
    by_axis = {_axis(output): output for output in outputs}
    wanted = cast_8bit_kernel.Outputs(
        rows=1 in by_axis, transposed=0 in by_axis, amax=problem.amax and seen is None, sums=problem.column_sums
    )
    seeds = cast_support.seeds([by_axis.get(axis, outputs[0]) for axis in (1, 0)], given)
    along, down = (by_axis[axis].spec.rotation if axis in by_axis else None for axis in (1, 0))
    row_length = problem.row_length or k
    made = cast_8bit_kernel.cast(
        filled, spec.format, scaling, wanted, seeds, row_length, (along, down), saturates=saturates
    )
    largest = made.amax if seen is None else seen

    def array(output: CastOutput) -> ScaledArray | Transposed:
        codes = (made.rows, (m, k)) if _axis(output) else (made.transposed, (k, m))
        source = given.multiplier if given.multiplier is not None else x if seen is None else seen
        scale = _stored_scale(made, output, scaling_kind, source)
        q = _stored(output, tile_of(output, len(problem.shape)), *codes, scale, x)
        return in_shape(problem, output, q) if isinstance(q, ScaledArray) and output.contracted is None else q

    return CastResult(
        tuple(map(array, outputs)),
        vary_as(jnp.max(largest), x) if problem.amax else None,
        vary_as(jnp.sum(made.sums, axis=0)[:k], x) if problem.column_sums else None,
    )


def _stored_scale(made, output: CastOutput, scaling_kind: str, source: jax.Array) -> jax.Array:
    """The scales of a output, as its codes are stored. They vary as the source that they were made from."""
    if scaling_kind == "tensor":
        scale = made.row_scale.reshape(1, 1)
    elif scaling_kind == "squares":
        scale = made.row_scale if _axis(output) else made.row_scale.T
    else:
        scale = made.row_scale if _axis(output) else made.column_scale
    return vary_as(scale, source)


def _stored(
    output: CastOutput, tile: tuple[int, int], data: jax.Array, shape: tuple[int, int], scale: jax.Array, x: jax.Array
) -> ScaledArray | Transposed:
    """A matrix of that shape from padded codes and scales, all of them transposed where rows are contracted."""
    spec, tile = output.spec, tile if _axis(output) else (tile[1], tile[0])
    scale = scale[tuple(slice(size) for size in blocks.grid(shape, tile))]
    rotation = None if spec.rotation is None else dataclasses.replace(spec.rotation, axis=-1)
    what = {"format": spec.format, "block": blocks.trim(tile), "dtype": spec.dtype, "rotation": rotation}
    q = ScaledArray(vary_as(data, x)[: shape[0], : shape[1]], scale, **what)
    return q if _axis(output) else Transposed(q)


def _run_groups(problem: CastProblem, x: jax.Array, given: CastArguments) -> CastResult:
    """A pass for each output, the first of which looks for the largest magnitude."""
    made = [
        _cast_groups(problem, output, x, given, problem.amax and output is problem.outputs[0])
        for output in problem.outputs
    ]
    return CastResult(tuple(array for array, _ in made), made[0][1])


def _cast_groups(
    problem: CastProblem, output: CastOutput, x: jax.Array, given: CastArguments, amax: bool
) -> tuple[Any, Any]:
    if given.multiplier is not None or scaling_of(output, 2) == "lines":
        multiplier = None if given.multiplier is None else given.multiplier.reshape(())
        return _cast_rows(output, x, given, multiplier, amax)
    sizes = given.group_sizes
    assert sizes is not None
    levels = _levels_of_groups(x, sizes, output)
    (multiplier,) = levels.multipliers
    rows = x.shape[0] if _axis(output) else padded_capacity(x.shape[0], sizes.shape[0], GROUP_MULTIPLE)
    group = group_of(whole_groups(sizes, problem.group_multiple), rows)
    codes, seen = _cast_rows(output, x, given, multiplier[group], amax)
    if output.contracted is not None:
        return PerGroup(codes, levels.scale[:-1, None]), seen
    return dataclasses.replace(codes, scale=levels.scale[group][:, None], block=blocks.trim((1, 0))), seen


def _levels_of_groups(x: jax.Array, sizes: jax.Array, output: CastOutput) -> Scales:
    """Scales of whole groups, and one more for rows of none, which count as zeros."""
    spec, count = output.spec, sizes.shape[0]
    is_finite = spec.nonfinite == "saturate" or spec.format.is_float  # codes of floats can be NaN
    row_amax = calibrate.block_amax if is_finite else calibrate.block_amax_or_inf
    of_rows = row_amax(flush(x.astype(jnp.float32)), (1, 0))[:, 0]
    group = group_of(sizes, x.shape[0])
    largest = jax.ops.segment_max(of_rows, group, count + 1, indices_are_sorted=True)
    return scales_or_nan(jnp.maximum(largest, 0).at[count].set(0), spec.format, spec.input_dtype)


def _cast_rows(
    output: CastOutput, x: jax.Array, given: CastArguments, multiplier: jax.Array | None, amax: bool
) -> tuple[ScaledArray | Transposed, jax.Array | None]:
    """The cast of rows in groups for one matmul, with zeros in rows of no group; and the largest magnitude.

    One that contracts features has them as they lie. One that contracts rows has them transposed, every group beginning
    at a multiple of 128 with zeros between, as `spaced` has it. factor: a number, or one for each row as it lies there,
    whose codes are then under a scale of 1; None for those of lines.
    """
    from scaledot.kernels.hopper import cast_8bit_kernel

    sizes, (m, k), spec, along = given.group_sizes, x.shape, output.spec, _axis(output) == 1
    assert sizes is not None
    rows = m if along else padded_capacity(m, sizes.size, BLOCK)
    table = (row_tiles if along else aligned_row_tiles)(sizes, m, BLOCK)
    if multiplier is None:
        scaling = cast_8bit_kernel.PerBlock(square=False)
    elif multiplier.ndim == 0:
        scaling = cast_8bit_kernel.GivenMultiplier(multiplier.reshape(1))
    else:
        scaling = cast_8bit_kernel.PerRow(jnp.pad(multiplier, (0, len(table) * BLOCK - rows), constant_values=1))
    wanted = cast_8bit_kernel.Outputs(rows=along, transposed=not along, amax=amax)
    rotations = (spec.rotation, None) if along else (None, spec.rotation)
    saturates = spec.nonfinite == "saturate"
    made = cast_8bit_kernel.cast(
        pad_to_multiples(x, 2, BLOCK),
        spec.format,
        scaling,
        wanted,
        cast_support.seeds([output] * 2, given),
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
    return _stored(output, tile_of(output, 2), data, shape, scale, x), vary_as(jnp.max(made.amax), x) if amax else None
