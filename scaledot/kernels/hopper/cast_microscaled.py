"""Casts to MXFP8 and NVFP4 on Hopper: which problems the kernel supports, and how it is called.

Blocks run along rows, down columns, or are square; one pass computes several outputs (`cast_microscaled_kernel`). The
tensor scale of NVFP4 needs the amax first, which XLA computes or, if an output is rotated, another kernel. An output
for a matmul that is not saved as a residual is bfloat16 values instead of codes, because Hopper's tensor cores do not
apply block scales.

Example: a gradient (m, n) under the recipe nvfp4 is read by dgrad, which contracts n, and by wgrad, which contracts m:
values with blocks along rows, and Hadamard-rotated values with blocks down columns.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from scaledot.array import ScaledArray
from scaledot.formats import E8M0_RULES, FORMATS, Format
from scaledot.kernels.hopper import cast_support
from scaledot.kernels.hopper.cast_support import matrix_block, with_leading_dims
from scaledot.kernels.hopper.scale_blocks import FLOAT8_ELEMENTS, MICROSCALED_BLOCKS
from scaledot.kernels.layouts import RowPairs, bfloat16_operand
from scaledot.kernels.operands import pad_to_multiples
from scaledot.kernels.spec import CastArguments, CastOutput, CastProblem, CastResult
from scaledot.numerics import blocks
from scaledot.numerics.bits import amax_of_rank
from scaledot.parallel.types import vary_as

# By scale dtype: a format that the kernel supports, and further values of its fields that it supports.
SUPPORTED_FIELDS: dict[str, tuple[Format, dict[str, tuple]]] = {
    "float8_e8m0fnu": (FORMATS["mxfp8"], {"element": FLOAT8_ELEMENTS, "rule": E8M0_RULES}),
    "float8_e4m3fn": (FORMATS["nvfp4"], {}),
}


def problem_reason(problem: CastProblem) -> str | None:
    """Returns why the kernel cannot compute these casts on any device, or None if it can."""
    if problem.groups is not None:
        return "it does not cast row groups"
    if reason := cast_support.arguments_reason(problem):
        return reason
    unsupported = [output for output in problem.outputs if not block_kind(output, len(problem.shape))]
    if unsupported:
        spec = unsupported[0].spec
        return f"{spec.format.name} in blocks of {spec.block} is not MXFP8 or NVFP4"
    format = problem.outputs[0].spec.format
    reason = cast_support.problem_reason(problem) or cast_support.field_reason(format, *SUPPORTED_FIELDS[format.scale])
    reasons = (reason, _packing_reason(problem), *(_rotation_reason(problem, output) for output in problem.outputs))
    return next(filter(None, reasons), None)


def block_kind(output: CastOutput, ndim: int) -> str:
    """Returns "along" rows, "down" columns or "square" for blocks that the kernel supports, "" for others."""
    size, block = block_size(output.spec.format), matrix_block(output, ndim) if ndim > 1 else (0, 0)
    kinds: dict[blocks.Block, str] = {(1, size): "along", (size, 1): "down", (size, size): "square"}
    contracted = size if output.contracted is None else block[output.contracted]
    return kinds.get(block, "") if size and contracted > 1 else ""


def block_size(format: Format) -> int:
    """Returns the block size of a format; 0 if the kernel does not support the format."""
    return MICROSCALED_BLOCKS.get((format.element, format.scale), 0)


def _packing_reason(problem: CastProblem) -> str | None:
    """Returns why 4-bit codes cannot be packed; packing by columns needs pairs of bfloat16 in 32-bit words."""
    if problem.outputs[0].spec.format.bits == 8:
        return None
    if len({output.contracted is None for output in problem.outputs}) > 1:
        return "it packs 4-bit codes by rows or by columns, not both"
    if problem.outputs[0].contracted is None and problem.dtype != jnp.bfloat16:
        return f"it packs 4-bit codes by columns from bfloat16, not from {problem.dtype}"
    return None


def _rotation_reason(problem: CastProblem, output: CastOutput) -> str | None:
    rotation, size = output.spec.rotation, block_size(output.spec.format)
    if rotation is None:
        return None
    if block_kind(output, len(problem.shape)) != "down" or rotation.axis != -2 or rotation.size != size:
        return f"it rotates only down columns, by the block size {size}"
    rows = problem.shape[-2]
    return None if not rows % size else f"{rows} rows are not a multiple of the rotation size {size}"


def describe(problem: CastProblem) -> str:
    ndim = len(problem.shape)
    words = {"along": "in blocks along rows", "down": "in blocks down columns", "square": "in square blocks"}
    outputs = [
        f"{'bfloat16 values' if _is_dequantized(output) else 'codes'} {words[block_kind(output, ndim)]}"
        for output in problem.outputs
    ]
    needs_amax = problem.outputs[0].spec.format.two_level
    return f"{' and '.join(outputs)}, one pass on Hopper{', after the amax' if needs_amax else ''}"


def _is_dequantized(output: CastOutput) -> bool:
    """Whether an output is bfloat16 values instead of codes."""
    return output.contracted is not None and not output.is_residual


def run(problem: CastProblem, x: jax.Array, arguments: CastArguments) -> CastResult:
    from scaledot.kernels.hopper import cast_microscaled_kernel

    shape, outputs, ndim = cast_support.matrix_shape(problem), problem.outputs, len(problem.shape)
    assert shape is not None
    format, x = outputs[0].spec.format, x.reshape(shape)
    padded = pad_to_multiples(x, block_size(format), cast_microscaled_kernel.COLUMN_MULTIPLE)
    tensor_multipliers, tensor_scales = _tensor_scales(padded, outputs)
    specs = tuple(_output_spec(output, block_kind(output, ndim)) for output in outputs)
    seeds = cast_support.seeds(outputs, arguments)
    results = cast_microscaled_kernel.cast(padded, specs, tensor_multipliers, seeds, problem.row_length or shape[1])
    arrays = (
        stored_array(output, matrix_block(output, ndim), result, tensor_scale, x)
        for output, result, tensor_scale in zip(outputs, results, tensor_scales, strict=True)
    )
    return CastResult(
        tuple(
            with_leading_dims(problem, output, q) if output.contracted is None else q
            for output, q in zip(outputs, arrays, strict=True)
        )
    )


def _output_spec(output: CastOutput, kind: str) -> Any:
    """Returns the OutputSpec of the kernel for an output with this kind of blocks."""
    from scaledot.kernels.hopper import cast_microscaled_kernel

    spec, packing = output.spec, ""
    if spec.format.bits == 4 and not _is_dequantized(output):
        packing = "columns" if output.contracted is None else "rows"
    saturates = spec.nonfinite == "saturate"
    return cast_microscaled_kernel.OutputSpec(
        spec.format, kind, _is_dequantized(output), output.is_stochastic, spec.rotation, packing, saturates
    )


def _tensor_scales(
    x: jax.Array, outputs: tuple[CastOutput, ...]
) -> tuple[jax.Array | None, Sequence[jax.Array | None]]:
    """Computes what the kernel multiplies each output by before it scales blocks, and the tensor scale of each output.

    Returns the results of `cast_support.tensor_scales` if the format has tensor scales, as NVFP4 has. MXFP8 has only
    block scales: the multipliers are then None, and so is each tensor scale. Outputs with different rotations have
    different amaxes.
    """
    from scaledot.kernels.hopper import cast_microscaled_kernel

    format = outputs[0].spec.format
    if not format.two_level:
        return None, [None] * len(outputs)
    rotations = list(dict.fromkeys(output.spec.rotation for output in outputs))
    if rotations == [None]:
        largest = jnp.max(cast_support.partial_amaxes(x, finite=True), keepdims=True)
        amaxes = amax_of_rank(largest)
    else:
        amaxes = cast_microscaled_kernel.amaxes(x, tuple(rotations), block_size(format))
    amaxes = cast_support.amax_over_devices(amaxes, x, outputs[0].spec.amax_axes)
    indices = tuple(rotations.index(output.spec.rotation) for output in outputs)
    return cast_support.tensor_scales(outputs, amaxes, indices, (None,) * len(outputs))


def stored_array(
    output: CastOutput, block: tuple[int, int], result, tensor_scale: jax.Array | None, x: jax.Array
) -> Any:
    """Returns an output with the shape of x from padded codes or values and the bytes of scales."""
    spec, (m, k), format, data = output.spec, x.shape, output.spec.format, vary_as(result.data, x)
    if _is_dequantized(output):
        scale = jnp.ones((), jnp.float32) if tensor_scale is None else tensor_scale
        return bfloat16_operand(data[:m, :k], scale, spec.dtype, spec.rotation)
    packs_rows = format.bits == 4 and output.contracted is not None
    rows = m + m % 2 if packs_rows else m  # both rows of the last byte
    grid = blocks.grid((rows, k), block)
    scale = vary_as(result.scale, x)[: grid[0], : grid[1]]
    scale = lax.bitcast_convert_type(scale, format.scale_dtype(spec.input_dtype))
    fields = {"format": format, "block": blocks.trim(block), "dtype": spec.dtype, "rotation": spec.rotation}
    if packs_rows:
        return RowPairs(ScaledArray(data[: rows // 2, :k], scale, tensor_scale, **fields), m)
    if format.bits == 4:
        data = lax.bitcast_convert_type(data, format.code_dtype).reshape(data.shape[0], -1)
    return ScaledArray(data[:m, :k], scale, tensor_scale, **fields)
