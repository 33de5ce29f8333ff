"""MXFP8 and NVFP4 as a row of the cast table: blocks along rows, down columns or square, and several from one read."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from scaledot.array import ScaledArray
from scaledot.formats import E8M0_RULES, FORMATS, Format
from scaledot.kernels.hopper import cast_support
from scaledot.kernels.hopper.cast_support import matrix_block, with_leading_dims
from scaledot.kernels.hopper.sizes import FLOAT8_ELEMENTS, MICROSCALED_BLOCKS
from scaledot.kernels.layouts import RowPairs, bfloat16_operand
from scaledot.kernels.operands import pad_to_multiples
from scaledot.kernels.spec import CastArguments, CastOutput, CastProblem, CastResult
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
    if problem.passed_arguments:
        return f"`{min(problem.passed_arguments)}` is given; it makes scales and random bits itself"
    unknown = [output for output in problem.outputs if not shape_of(output, len(problem.shape))]
    if unknown:
        spec = unknown[0].spec
        return f"{spec.format.name} in blocks of {spec.block} is not MXFP8 or NVFP4"
    format = problem.outputs[0].spec.format
    reason = cast_support.problem_reason(problem) or cast_support.field_reason(format, *COMPUTED[format.scale])
    reasons = (reason, _packing_reason(problem), *(_rotation_reason(problem, output) for output in problem.outputs))
    return next(filter(None, reasons), None)


def shape_of(output: CastOutput, ndim: int) -> str:
    """Of blocks: along rows, down columns or square, if they are as long as is computed; "" otherwise."""
    size, tile = block_of(output.spec.format), matrix_block(output, ndim) if ndim > 1 else (0, 0)
    lines: dict[blocks.Block, str] = {(1, size): "along", (size, 1): "down", (size, size): "square"}
    contracted = size if output.contracted is None else tile[output.contracted]
    return lines.get(tile, "") if size and contracted > 1 else ""


def block_of(format: Format) -> int:
    """The length of the blocks that the kernel casts to a format; 0 if it does not cast to it."""
    return MICROSCALED_BLOCKS.get((format.element, format.scale), 0)


def _packing_reason(problem: CastProblem) -> str | None:
    """4-bit codes of an ordinary array are packed by columns, which needs pairs of bfloat16 in a 32-bit word."""
    if problem.outputs[0].spec.format.bits == 8:
        return None
    if len({output.contracted is None for output in problem.outputs}) > 1:
        return "it packs 4-bit codes by rows or by columns, not both"
    if problem.outputs[0].contracted is None and problem.dtype != jnp.bfloat16:
        return f"it packs 4-bit codes by columns from bfloat16, not from {problem.dtype}"
    return None


def _rotation_reason(problem: CastProblem, output: CastOutput) -> str | None:
    rotation, size = output.spec.rotation, block_of(output.spec.format)
    if rotation is None:
        return None
    if shape_of(output, len(problem.shape)) != "down" or rotation.axis != -2 or rotation.size != size:
        return f"a rotation of {rotation.size} is made down columns in blocks of as many"
    rows = problem.shape[-2]
    return None if not rows % size else f"{rows} rows are not whole groups of a rotation of {size}"


def describe(problem: CastProblem) -> str:
    ndim = len(problem.shape)
    casts = [
        f"{'values' if _is_values(output) else 'codes'} in blocks {_WORDS[shape_of(output, ndim)]}"
        for output in problem.outputs
    ]
    reads = "two reads" if problem.outputs[0].spec.format.two_level else "one read"
    return f"{' and '.join(casts)}, {reads} on Hopper"


_WORDS = {"along": "along rows", "down": "down columns", "square": "of squares"}


def _is_values(output: CastOutput) -> bool:
    return output.contracted is not None and not output.is_residual


def run(problem: CastProblem, x: jax.Array, given: CastArguments) -> CastResult:
    from scaledot.kernels.hopper import cast_microscaled_kernel

    shape, outputs, ndim = cast_support.matrix_shape(problem), problem.outputs, len(problem.shape)
    assert shape is not None
    format, x = outputs[0].spec.format, x.reshape(shape)
    filled = pad_to_multiples(x, block_of(format), cast_microscaled_kernel.COLUMNS)
    up, down = _levels(filled, outputs)
    wanted = tuple(_wanted(output, shape_of(output, ndim)) for output in outputs)
    made = cast_microscaled_kernel.cast(
        filled, wanted, up, cast_support.seeds(outputs, given), problem.row_length or shape[1]
    )
    arrays = (
        _stored(output, matrix_block(output, ndim), one, level, x)
        for output, one, level in zip(outputs, made, down, strict=True)
    )
    return CastResult(
        tuple(
            with_leading_dims(problem, v, q) if v.contracted is None else q
            for v, q in zip(outputs, arrays, strict=True)
        )
    )


def _wanted(output: CastOutput, shape: str) -> Any:
    from scaledot.kernels.hopper import cast_microscaled_kernel

    spec, packing = output.spec, ""
    if spec.format.bits == 4 and not _is_values(output):
        packing = "columns" if output.contracted is None else "rows"
    saturates = spec.nonfinite == "saturate"
    return cast_microscaled_kernel.View(
        spec.format, shape, _is_values(output), output.is_stochastic, spec.rotation, packing, saturates
    )


def _levels(x: jax.Array, outputs: tuple[CastOutput, ...]) -> tuple[jax.Array | None, list[jax.Array | None]]:
    """Of a two-level format: what brings the largest block maximum of each output to the largest scale, and the
    reciprocal, float32 (V, 2); and what block scales are multiplied by to return, V numbers. None for other formats."""
    from scaledot.kernels.hopper import cast_microscaled_kernel, scalars

    format, dtype = outputs[0].spec.format, outputs[0].spec.input_dtype
    if not format.two_level:
        return None, [None] * len(outputs)
    rotations = list(dict.fromkeys(output.spec.rotation for output in outputs))
    amax = cast_microscaled_kernel.amaxes(x, tuple(rotations), block_of(format))
    amax = cast_support.amax_over_devices(amax, x, outputs[0].spec.amax_axes)
    numbers = tuple(rotations.index(output.spec.rotation) for output in outputs)

    def levels(amax: list[Any]) -> tuple[Any, ...]:
        found = [tensor_level(format, dtype, None, each) for each in amax]
        return [[found[i][0], divide(ONE, found[i][0])] for i in numbers], *(found[i][1] for i in numbers)

    types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((len(outputs), 2), *[()] * len(outputs))]
    up, *down = scalars.compute(("levels", format, dtype, numbers), levels, types, amax)
    return up, [vary_as(each, amax) for each in down]


def _stored(output: CastOutput, tile: tuple[int, int], made, down: jax.Array | None, x: jax.Array) -> Any:
    """A matrix of the shape of x, from padded codes or values and bytes of scales."""
    spec, (m, k), format, data = output.spec, x.shape, output.spec.format, vary_as(made.data, x)
    if _is_values(output):
        scale = jnp.ones((), jnp.float32) if down is None else down
        return bfloat16_operand(data[:m, :k], scale, spec.dtype, spec.rotation)
    pairs_rows = format.bits == 4 and output.contracted is not None
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
