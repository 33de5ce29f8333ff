"""Casts of 4-bit recipes on Hopper: which problems the kernel supports, and how it is called.

The kernel (`cast_four_bit_kernel`) casts operands of matmuls in training to formats like NVFP4: E2M1 codes, 4-bit
integers, or blocks that choose between both, with E4M3 scales per 16 elements and a tensor scale. Scales may be
searched (`Format.search` "scales" or "four_over_six"); operands may be rotated with drawn signs and their scales
corrected (MS-EDEN), and a mean may be subtracted first. Plain NVFP4 is cast by `cast_microscaled`, which takes fewer
passes over SMEM.

Example: x (m, k) under the recipe nvfp4_plus is an operand of fwd, which contracts k, with searched scales, and of
wgrad, which contracts m: rotated down columns and corrected. One launch writes both: bfloat16 values, and codes, which
are saved as residuals.
"""

from typing import Any

import jax
import jax.numpy as jnp

from scaledot.formats import FORMATS, Format
from scaledot.kernels.hopper import cast_support
from scaledot.kernels.hopper.cast_microscaled import stored_array
from scaledot.kernels.hopper.cast_support import matrix_block
from scaledot.kernels.hopper.scale_blocks import FOUR_BIT_BLOCK, FOUR_BIT_ELEMENTS, ROTATION
from scaledot.kernels.operands import pad_to_multiples
from scaledot.kernels.spec import CastArguments, CastOutput, CastProblem, CastResult
from scaledot.numerics.bits import amax_of_rank
from scaledot.numerics.cast import subtract_mean
from scaledot.parallel.types import vary_as

# Fields of nvfp4 that may have other values.
SUPPORTED_FIELDS: dict[str, tuple] = {"element": ("int4", "uint4"), "search": ("scales", "four_over_six")}
FREE_FIELDS = ("target", "scale_max", "grids")  # any value


def problem_reason(problem: CastProblem) -> str | None:
    """Returns why the kernel cannot compute these casts on any device, or None if it can."""
    if problem.groups is not None:
        return "it does not cast row groups"
    if len(problem.shape) != 2 or not all(problem.shape):
        return f"it casts non-empty matrices, not shape {problem.shape}"
    if problem.dtype.name not in cast_support.INPUT_DTYPES:
        return f"it reads {', '.join(cast_support.INPUT_DTYPES)}, not {problem.dtype}"
    if problem.shape[0] > cast_support.MAX_ROWS:
        return f"it casts at most {cast_support.MAX_ROWS} rows, not {problem.shape[0]}"
    if reason := cast_support.arguments_reason(problem, {"mean"}):
        return reason
    if len({output.spec.amax_axes for output in problem.outputs}) > 1:
        return "the outputs share scales over different mesh axes"
    return next(filter(None, (_output_reason(problem, output) for output in problem.outputs)), None)


def _output_reason(problem: CastProblem, output: CastOutput) -> str | None:
    spec, axis, rotation = output.spec, output.contracted, output.spec.rotation
    if axis is None or spec.nonfinite != "nan_scales":
        return "it casts operands of matmuls in training, whose NaN and infinities propagate"
    reason = _format_reason(spec.format)
    if reason is not None:
        return reason
    if spec.calibration.method != "absmax" or spec.calibration.values:
        return f"it scales by the amax or a search, not by calibration {spec.calibration.method!r}"
    if matrix_block(output, 2) != ((1, FOUR_BIT_BLOCK) if axis == 1 else (FOUR_BIT_BLOCK, 1)):
        return f"its blocks are {FOUR_BIT_BLOCK} elements along the contracting dim, not {spec.block}"
    if output.is_stochastic and not spec.eden:
        return "it rounds codes to nearest"
    if rotation is None:
        return None
    if not rotation.draws_signs or rotation.size != ROTATION or rotation.axis != axis - 2:
        return f"it rotates {ROTATION} elements along the contracting dim, with drawn signs, not {rotation}"
    size = problem.shape[axis]
    return None if not size % ROTATION else f"{size} elements are not a multiple of the rotation size {ROTATION}"


def _format_reason(format: Format) -> str | None:
    supported = SUPPORTED_FIELDS | {field: (getattr(format, field),) for field in FREE_FIELDS}
    reason = cast_support.field_reason(format, FORMATS["nvfp4"], supported)
    elements = [grid.element for grid in format.grid_formats]
    if reason is None and not set(elements) <= set(FOUR_BIT_ELEMENTS):
        return f"its codes are {' or '.join(FOUR_BIT_ELEMENTS)}, not {' or '.join(elements)}"
    return reason


def describe(problem: CastProblem) -> str:
    axes = ("in blocks down columns", "in blocks along rows")
    outputs = [
        f"{'codes' if output.is_residual else 'bfloat16 values'} {axes[output.contracted or 0]}"
        for output in problem.outputs
    ]
    of_what = " of differences to the mean" if "mean" in problem.passed_arguments else ""
    return f"{' and '.join(outputs)}{of_what}, one launch on Hopper, after the amax"


def run(problem: CastProblem, x: jax.Array, arguments: CastArguments) -> CastResult:
    from scaledot.kernels.hopper import cast_four_bit_kernel

    outputs, mean = problem.outputs, arguments.mean
    rows, columns = problem.shape
    if mean is not None and mean.shape[0] != 1:  # one for each row: tokens are columns, as in "km,kn->mn"
        x, mean = subtract_mean(x, mean), None
    padded = pad_to_multiples(x, ROTATION, ROTATION)
    signs = _signs(outputs, arguments)
    sums_columns = problem.column_sums and arguments.mean is None  # those of x, not of differences
    differences = x if mean is None else subtract_mean(x, mean)
    # XLA fuses the amaxes of the columns of w, float32, with the matmul of the mean of x and w, which also reduces
    # columns. It reads columns of 16-bit elements at half the rate of rows.
    of_columns = x.dtype == jnp.float32
    tensor_multipliers, tensor_scales = _tensor_scales(differences, outputs, of_columns)
    specs = tuple(_output_spec(output) for output in outputs)
    seeds = cast_support.seeds(outputs, arguments)
    mean = None if mean is None else pad_to_multiples(jnp.broadcast_to(mean, (1, columns)), 1, ROTATION)
    row_length = problem.row_length or columns
    results, sums = cast_four_bit_kernel.cast(
        padded, specs, tensor_multipliers, seeds, signs, mean, rows, row_length, sums_columns
    )
    arrays = (
        stored_array(output, matrix_block(output, 2), result, tensor_scale, x)
        for output, result, tensor_scale in zip(outputs, results, tensor_scales, strict=True)
    )
    column_sums = None if sums is None else vary_as(jnp.sum(sums, axis=0)[:columns], x)
    return CastResult(tuple(arrays), column_sums=column_sums)


def _output_spec(output: CastOutput) -> Any:
    from scaledot.kernels.hopper import cast_four_bit_kernel

    format, grids = output.spec.format, output.spec.format.grid_formats
    return cast_four_bit_kernel.OutputSpec(
        elements=tuple(grid.element for grid in grids),
        targets=tuple(grid.max for grid in grids),
        search=format.search,
        along=output.contracted == 1,
        dequantized=not output.is_residual,
        rotated=output.spec.rotation is not None,
        corrected=output.spec.eden,
    )


def _signs(outputs: tuple[CastOutput, ...], arguments: CastArguments) -> jax.Array | None:
    """Returns the signs of each output, float32 (outputs, 128); ones for those that are not rotated."""
    from scaledot.kernels.hopper.cast_four_bit_tile import in_kernel_order

    if all(output.spec.rotation is None for output in outputs):
        return None
    drawn = ((arguments.signs_of(output), output.contracted == 1) for output in outputs)
    ones = jnp.ones(ROTATION, jnp.float32)
    return jnp.stack([ones if signs is None else in_kernel_order(signs, along) for signs, along in drawn])


def _tensor_scales(
    x: jax.Array, outputs: tuple[CastOutput, ...], of_columns: bool
) -> tuple[jax.Array, list[jax.Array]]:
    """Computes what the kernel multiplies each output by before it scales blocks, and the tensor scale of each output.

    Only the amax of x is computed. A rotated output uses an upper bound of its amax that follows from it. See
    `cast_support.tensor_scales` for the results.
    """
    partial = cast_support.partial_amaxes(x, finite=True, of_columns=of_columns)
    amax = amax_of_rank(jnp.max(partial, keepdims=True))
    amax = cast_support.amax_over_devices(amax, x, outputs[0].spec.amax_axes)
    bounds = tuple(output.spec.rotation for output in outputs)
    return cast_support.tensor_scales(outputs, amax, (0,) * len(outputs), bounds)
