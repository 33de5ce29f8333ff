"""Casts to 8-bit codes with float32 scales on Hopper: which problems the kernel supports, and how it is called.

Formats have one scale for the tensor, for each 1×128 block or for each 128×128 block. 8-bit matmuls take operands with
the contracting dim last, so a matrix x (m, k) that one matmul contracts along k and another along m is cast to row-wise
codes (m, k) and column-wise codes (k, m), stored transposed, in one pass over memory (`cast_8bit_kernel`). If there is
one scale for the tensor and no multiplier is passed, XLA computes the amax first (`cast_support.partial_amaxes`).

With row groups there is a pass for each output: in column-wise codes groups start at multiples of 128 rows, with zeros
between them, and in row-wise codes they do not.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from scaledot.array import ScaledArray
from scaledot.formats import FLOAT_RULES, FORMATS
from scaledot.kernels.hopper import cast_support
from scaledot.kernels.hopper.cast_arithmetic import ordered_bits_conversions
from scaledot.kernels.hopper.cast_support import matrix_block, with_leading_dims
from scaledot.kernels.hopper.scale_blocks import FLOAT8_ELEMENTS, SCALE_BLOCK
from scaledot.kernels.layouts import PerGroup, Transposed
from scaledot.kernels.operands import pad_to_multiples
from scaledot.kernels.spec import CastArguments, CastOutput, CastProblem, CastResult
from scaledot.numerics import blocks, calibrate
from scaledot.numerics.grouped import aligned_group_sizes, aligned_row_tiles, group_of, padded_capacity, row_tiles
from scaledot.numerics.rounding import flushed_float32
from scaledot.numerics.scale import Scales, scales_or_nan
from scaledot.parallel.types import vary_as

ELEMENTS = (*FLOAT8_ELEMENTS, "int8")
REFERENCE_FORMAT = FORMATS["fp8_e4m3"]
SUPPORTED_FIELDS = {"element": ELEMENTS, "rule": FLOAT_RULES, "pow2": (False, True), "bound": ("full", "half")}
GROUP_MULTIPLE = SCALE_BLOCK  # groups start at multiples of this many rows if rows are contracted
MAX_ROTATION = 16  # elements, which a thread holds in registers


def problem_reason(problem: CastProblem) -> str | None:
    """Returns why the kernel cannot compute these casts on any device, or None if it can."""
    ndim = len(problem.shape)
    unsupported = [output for output in problem.outputs if not block_kind(output, ndim)]
    if unsupported:
        scales = f"float32 scales (per tensor, per 1x{SCALE_BLOCK} or per {SCALE_BLOCK}x{SCALE_BLOCK} block)"
        spec = unsupported[0].spec
        return f"{spec.format.name} in blocks of {spec.block} is not an 8-bit float or integer with {scales}"
    reason = cast_support.problem_reason(problem)
    reason = reason or cast_support.field_reason(problem.outputs[0].spec.format, REFERENCE_FORMAT, SUPPORTED_FIELDS)
    return reason or (_outputs_reason(problem) if problem.groups is None else _groups_reason(problem))


def _outputs_reason(problem: CastProblem) -> str | None:
    outputs, ndim = problem.outputs, len(problem.shape)
    if len({(block_kind(output, ndim), output.is_stochastic) for output in outputs}) > 1:
        return "the outputs have different kinds of blocks, or only one uses stochastic rounding"
    if len({_contracted(output) for output in outputs}) < len(outputs):
        return "it computes one output for each contracting dim"
    return next(filter(None, (_rotation_reason(problem, output) for output in outputs)), None)


def _groups_reason(problem: CastProblem) -> str | None:
    for output in problem.outputs:
        if block_kind(output, 2) == "square":
            return f"row groups are cast with one float32 scale, or one per 1x{SCALE_BLOCK} block"
        multiple = 1 if _contracted(output) else GROUP_MULTIPLE
        if problem.group_multiple != multiple:
            return f"groups start at multiples of {problem.group_multiple} rows; it supports multiples of {multiple}"
        if padded_capacity(problem.shape[0], problem.groups or 0, multiple) > cast_support.MAX_ROWS:
            return f"it casts at most {cast_support.MAX_ROWS} rows, including padding between groups"
        if output.spec.amax_axes:
            return "groups share scales over mesh axes"
    return next(filter(None, (_rotation_reason(problem, output) for output in problem.outputs)), None)


def block_kind(output: CastOutput, ndim: int) -> str:
    """Returns "tensor", "1d" (1×128) or "square" (128×128) for blocks that the kernel supports, "" for others."""
    format = output.spec.format
    if ndim < 2 or format.element not in ELEMENTS or format.scale != "float32":
        return ""
    block_1d: blocks.Block = (1, SCALE_BLOCK) if _contracted(output) else (SCALE_BLOCK, 1)
    kinds: dict[blocks.Block, str] = {(0, 0): "tensor", block_1d: "1d", (SCALE_BLOCK, SCALE_BLOCK): "square"}
    return kinds.get(matrix_block(output, ndim), "")


def _contracted(output: CastOutput) -> int:
    """Returns the contracting dim: 0 for column-wise codes, 1 for row-wise ones, also in the layout of the input."""
    return 1 if output.contracted is None else output.contracted


def _rotation_reason(problem: CastProblem, output: CastOutput) -> str | None:
    rotation, ndim = output.spec.rotation, len(problem.shape)
    if rotation is None:
        return None
    if block_kind(output, ndim) != "1d":
        return f"it rotates only along 1x{SCALE_BLOCK} blocks"
    if rotation.axis != (-1 if _contracted(output) else -2):
        return "it rotates only along the contracting dim"
    if rotation.size > MAX_ROTATION:
        return f"it rotates at most {MAX_ROTATION} elements, not {rotation.size}"
    length = problem.shape[rotation.axis]
    is_padded = problem.groups is not None and not _contracted(output)
    if is_padded or not length % rotation.size:
        return None
    return f"a contracting dim of {length} is not a multiple of the rotation size {rotation.size}"


def describe(problem: CastProblem) -> str:
    scales = {
        "tensor": "one scale",
        "1d": f"a scale per 1x{SCALE_BLOCK} block",
        "square": f"a scale per {SCALE_BLOCK}x{SCALE_BLOCK} block",
    }
    codes = " and ".join("row-wise" if _contracted(output) else "column-wise" for output in problem.outputs)
    kind = block_kind(problem.outputs[0], len(problem.shape))
    passes = "one pass per output" if problem.groups is not None and len(problem.outputs) > 1 else "one pass"
    needs_amax = kind == "tensor" and "multiplier" not in problem.passed_arguments
    return f"{codes} codes with {scales[kind]}, {passes} on Hopper{', after the amax' if needs_amax else ''}"


def run(problem: CastProblem, x: jax.Array, arguments: CastArguments) -> CastResult:
    if problem.groups is not None:
        return _run_groups(problem, x, arguments)
    shape = cast_support.matrix_shape(problem)
    assert shape is not None
    return _run_matrix(problem, x.reshape(shape), arguments)


def _run_matrix(problem: CastProblem, x: jax.Array, arguments: CastArguments) -> CastResult:
    from scaledot.kernels.hopper import cast_8bit_kernel

    outputs, (m, k) = problem.outputs, x.shape
    spec, kind = outputs[0].spec, block_kind(outputs[0], len(problem.shape))
    saturates, partial_amaxes = spec.nonfinite == "saturate", None
    finite = cast_support.is_amax_finite(spec.format, saturates)
    if arguments.multiplier is not None:
        scaling = cast_8bit_kernel.TensorMultiplier(arguments.multiplier.reshape(1))
    elif kind == "tensor":
        local = cast_support.partial_amaxes(x, finite)
        partial_amaxes = cast_support.amax_over_devices(local, x, spec.amax_axes)
        scaling = cast_8bit_kernel.TensorAmax(partial_amaxes)
    else:
        scaling = cast_8bit_kernel.BlockAmax(kind == "square")
    by_contracted = {_contracted(output): output for output in outputs}
    requested = cast_8bit_kernel.OutputFlags(
        rowwise=1 in by_contracted,
        columnwise=0 in by_contracted,
        amax=problem.amax and partial_amaxes is None,
        column_sums=problem.column_sums,
    )
    seeds = cast_support.seeds([by_contracted.get(dim, outputs[0]) for dim in (1, 0)], arguments)
    rowwise, columnwise = (by_contracted[dim].spec.rotation if dim in by_contracted else None for dim in (1, 0))
    row_length = problem.row_length or k
    padded = pad_to_multiples(x, SCALE_BLOCK, SCALE_BLOCK)
    result = cast_8bit_kernel.cast(
        padded, spec.format, scaling, requested, seeds, row_length, (rowwise, columnwise), saturates=saturates
    )
    amax = None
    if problem.amax:
        _, from_ordered_bits = ordered_bits_conversions(finite)
        amax = jnp.max(result.amax) if partial_amaxes is None else from_ordered_bits(jnp.max(partial_amaxes))

    def array(output: CastOutput) -> ScaledArray | Transposed:
        codes = (result.rowwise, (m, k)) if _contracted(output) else (result.columnwise, (k, m))
        computed_from = x if partial_amaxes is None else partial_amaxes
        source = arguments.multiplier if arguments.multiplier is not None else computed_from
        scale = _stored_scale(result, output, kind, source)
        q = _stored(output, matrix_block(output, len(problem.shape)), *codes, scale, x)
        if isinstance(q, ScaledArray) and output.contracted is None:
            return with_leading_dims(problem, output, q)
        return q

    return CastResult(
        tuple(map(array, outputs)),
        None if amax is None else vary_as(amax, x),
        vary_as(jnp.sum(result.column_sums, axis=0)[:k], x) if problem.column_sums else None,
    )


def _stored_scale(result, output: CastOutput, kind: str, source: jax.Array) -> jax.Array:
    """Returns the scales of an output, transposed if its codes are; they vary over mesh axes as `source` does."""
    if kind == "tensor":
        scale = result.rowwise_scale.reshape(1, 1)
    elif kind == "square":
        scale = result.rowwise_scale if _contracted(output) else result.rowwise_scale.T
    else:
        scale = result.rowwise_scale if _contracted(output) else result.columnwise_scale
    return vary_as(scale, source)


def _stored(
    output: CastOutput, block: tuple[int, int], data: jax.Array, shape: tuple[int, int], scale: jax.Array, x: jax.Array
) -> ScaledArray | Transposed:
    """Returns an output from padded codes and scales; shape: of its codes without padding, transposed if they are."""
    spec, block = output.spec, block if _contracted(output) else (block[1], block[0])
    scale = scale[tuple(slice(size) for size in blocks.grid(shape, block))]
    rotation = None if spec.rotation is None else dataclasses.replace(spec.rotation, axis=-1)
    fields = {"format": spec.format, "block": blocks.trim(block), "dtype": spec.dtype, "rotation": rotation}
    q = ScaledArray(vary_as(data, x)[: shape[0], : shape[1]], scale, **fields)
    return q if _contracted(output) else Transposed(q)


def _run_groups(problem: CastProblem, x: jax.Array, arguments: CastArguments) -> CastResult:
    """Casts x once for each output; the first pass also computes the amax."""
    results = [
        _cast_groups(problem, output, x, arguments, problem.amax and output is problem.outputs[0])
        for output in problem.outputs
    ]
    return CastResult(tuple(array for array, _ in results), results[0][1])


def _cast_groups(
    problem: CastProblem, output: CastOutput, x: jax.Array, arguments: CastArguments, needs_amax: bool
) -> tuple[Any, jax.Array | None]:
    """Casts row groups to one output, and returns it with the amax or None."""
    if arguments.multiplier is not None or block_kind(output, 2) == "1d":
        multiplier = None if arguments.multiplier is None else arguments.multiplier.reshape(())
        return _cast_rows(output, x, arguments, multiplier, needs_amax)
    sizes = arguments.group_sizes
    assert sizes is not None
    scales = _group_scales(x, sizes, output)
    (multiplier,) = scales.multipliers
    rows = x.shape[0] if _contracted(output) else padded_capacity(x.shape[0], sizes.shape[0], GROUP_MULTIPLE)
    group = group_of(aligned_group_sizes(sizes, problem.group_multiple), rows)
    codes, amax = _cast_rows(output, x, arguments, multiplier[group], needs_amax)
    if output.contracted is not None:
        return PerGroup(codes, scales.scale[:-1, None]), amax
    return dataclasses.replace(codes, scale=scales.scale[group][:, None], block=blocks.trim((1, 0))), amax


def _group_scales(x: jax.Array, sizes: jax.Array, output: CastOutput) -> Scales:
    """Returns the scale of each group, (groups + 1,); the last one is for rows in no group, which are cast as zeros."""
    spec, count = output.spec, sizes.shape[0]
    is_finite = cast_support.is_amax_finite(spec.format, spec.nonfinite == "saturate")
    block_amax = calibrate.block_amax if is_finite else calibrate.block_amax_or_inf
    row_amaxes = block_amax(flushed_float32(x), (1, 0))[:, 0]
    group = group_of(sizes, x.shape[0])
    group_amaxes = jax.ops.segment_max(row_amaxes, group, count + 1, indices_are_sorted=True)
    return scales_or_nan(jnp.maximum(group_amaxes, 0).at[count].set(0), spec.format, spec.input_dtype)


def _cast_rows(
    output: CastOutput, x: jax.Array, arguments: CastArguments, multiplier: jax.Array | None, needs_amax: bool
) -> tuple[ScaledArray | Transposed, jax.Array | None]:
    """Casts row groups to one output, with zeros in rows of no group, and returns it with the amax or None.

    Row-wise codes have rows in the order of x. In column-wise codes each group starts at a multiple of 128 rows, with
    zeros between groups, as in `numerics.grouped.align_groups`. multiplier: a scalar; or one for each row of the
    output, whose codes then have a scale of 1; or None for 1×128 blocks.
    """
    from scaledot.kernels.hopper import cast_8bit_kernel

    sizes, (m, k), spec, is_rowwise = arguments.group_sizes, x.shape, output.spec, _contracted(output) == 1
    assert sizes is not None
    rows = m if is_rowwise else padded_capacity(m, sizes.size, SCALE_BLOCK)
    table = (row_tiles if is_rowwise else aligned_row_tiles)(sizes, m, SCALE_BLOCK)
    if multiplier is None:
        scaling = cast_8bit_kernel.BlockAmax(square=False)
    elif multiplier.ndim == 0:
        scaling = cast_8bit_kernel.TensorMultiplier(multiplier.reshape(1))
    else:
        padding = (0, len(table) * SCALE_BLOCK - rows)
        scaling = cast_8bit_kernel.RowMultipliers(jnp.pad(multiplier, padding, constant_values=1))
    requested = cast_8bit_kernel.OutputFlags(rowwise=is_rowwise, columnwise=not is_rowwise, amax=needs_amax)
    rotations = (spec.rotation, None) if is_rowwise else (None, spec.rotation)
    saturates = spec.nonfinite == "saturate"
    result = cast_8bit_kernel.cast(
        pad_to_multiples(x, 2, SCALE_BLOCK),
        spec.format,
        scaling,
        requested,
        cast_support.seeds([output] * 2, arguments),
        k,
        rotations,
        table,
        saturates,
    )
    if multiplier is None:
        scale = vary_as(result.rowwise_scale if is_rowwise else result.columnwise_scale, x)
    elif multiplier.ndim == 0:
        scale = vary_as(result.rowwise_scale, multiplier).reshape(1, 1)
    else:
        scale = jnp.ones(1, jnp.float32).reshape(1, 1)
    data, shape = (result.rowwise, (m, k)) if is_rowwise else (result.columnwise, (k, rows))
    q = _stored(output, matrix_block(output, 2), data, shape, scale, x)
    return q, vary_as(jnp.max(result.amax), x) if needs_amax else None
