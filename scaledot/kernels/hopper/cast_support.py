"""Checks, random seeds and reshapes that the Mosaic cast kernels share; imports no Pallas."""

import dataclasses
import math
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scaledot.array import ScaledArray
from scaledot.formats import Format
from scaledot.kernels.hopper.cast_arithmetic import ordered_bits_conversions
from scaledot.kernels.hopper.scale_blocks import SCALE_BLOCK
from scaledot.kernels.spec import CastArguments, CastOutput, CastProblem
from scaledot.numerics import blocks
from scaledot.numerics.bits import ONE, divide
from scaledot.numerics.calibrate import Calibration, zero_at_run_time
from scaledot.numerics.cast import bounded_amax
from scaledot.numerics.hadamard import Hadamard
from scaledot.numerics.rounding import FoldedKey, hash_words, offset_seeds, raw_key, stored_float32
from scaledot.numerics.scale import tensor_level
from scaledot.parallel.types import vary_as

INPUT_DTYPES = ("bfloat16", "float16", "float32")
PARTIAL_AMAXES = 128  # one for each thread of a CTA
MAX_ROWS = 16 * 65535  # a CUDA grid has at most 65535 CTAs along rows, and a CTA at least 16 rows


def matrix_shape(problem: CastProblem) -> tuple[int, int] | None:
    """Returns the shape (rows, columns) after leading dims are merged, or None if blocks run along leading dims."""
    if len(problem.shape) == 2:
        return problem.shape[0], problem.shape[1]
    can_merge = (output.contracted is None and _can_merge(output, len(problem.shape)) for output in problem.outputs)
    if len(problem.shape) < 2 or not all(can_merge):
        return None
    return math.prod(problem.shape[:-1]), problem.shape[-1]


def _can_merge(output: CastOutput, ndim: int) -> bool:
    *leading, _ = block = blocks.expand(output.spec.block, ndim)
    return not any(block) or set(leading) == {1}


def matrix_block(output: CastOutput, ndim: int) -> tuple[int, int]:
    """Returns the block (rows, columns) of the matrix; 0 for a whole dim."""
    *_, rows, columns = blocks.expand(output.spec.block, ndim)
    return rows, columns


def problem_reason(problem: CastProblem) -> str | None:
    """Returns why no Mosaic kernel supports these casts, or None; each kernel checks formats itself."""
    shape = matrix_shape(problem)
    if shape is None or not all(shape):
        return f"it casts non-empty matrices; shape {problem.shape} in these blocks cannot be reshaped to one"
    if problem.dtype.name not in INPUT_DTYPES:
        return f"it reads {', '.join(INPUT_DTYPES)}, not {problem.dtype}"
    if shape[0] > MAX_ROWS:
        return f"it casts at most {MAX_ROWS} rows, not {shape[0]}"
    if problem.outputs[0].contracted is None and shape[0] < SCALE_BLOCK:
        return f"its tiles have {SCALE_BLOCK} rows, and {shape[0]} rows would leave most of a tile idle"
    if any(output.spec.eden for output in problem.outputs):
        return "it does not correct block scales, as MS-EDEN does"
    if any(output.spec.rotation is not None and output.spec.rotation.draws_signs for output in problem.outputs):
        return "it rotates with fixed signs, not with those drawn in each step"
    if reason := arguments_reason(problem, {"multiplier"}):
        return reason
    specs = [output.spec for output in problem.outputs]
    if any(spec.calibration != Calibration("absmax") for spec in specs):
        return f"it scales by the amax, not by calibration {specs[0].calibration.method!r}"
    if len({spec.format for spec in specs}) > 1:
        return "the outputs have different formats"
    if len({(spec.amax_axes, spec.nonfinite == "saturate") for spec in specs}) > 1:
        return "the outputs share scales over different mesh axes, or treat NaN differently"
    return None


def arguments_reason(problem: CastProblem, supported: Collection[str] = ()) -> str | None:
    """Returns why a kernel that takes only the arguments in `supported` cannot compute these casts, or None."""
    unsupported = problem.passed_arguments.difference(supported)
    if "mean" in unsupported:
        return "it does not subtract a mean"
    return f"`{min(unsupported)}` is passed; it computes scales and random numbers itself" if unsupported else None


def field_reason(format: Format, reference: Format, supported: dict[str, tuple]) -> str | None:
    """Returns which field of a format has a value that a kernel does not support, or None.

    A kernel supports formats that equal `reference` except for the name, the block, and field values in `supported`.
    So a new field of Format is unsupported until a kernel lists its values.
    """
    expected = _fields(reference)
    for field, value in _fields(format).items():
        if value != expected[field] and value not in supported.get(field, ()):
            values = ", ".join(map(repr, dict.fromkeys((expected[field], *supported.get(field, ())))))
            return f"`{field}` of {format.name} is {value!r}; the kernel supports {values}"
    return None


def _fields(format: Format) -> dict[str, Any]:
    """Returns the fields of a format that determine how it is cast, including those of its quirks."""
    own = {field.name: getattr(format, field.name) for field in dataclasses.fields(format)}
    quirks = {f"quirks.{field.name}": getattr(format.quirks, field.name) for field in dataclasses.fields(format.quirks)}
    return {name: own[name] for name in own if name not in ("name", "block", "quirks")} | quirks


def is_amax_finite(format: Format, saturates: bool) -> bool:
    """Whether a tensor's amax is that of its finite elements: NaN and infinities saturate, or have NaN codes.

    Otherwise the amax is infinite, and the scale NaN, if an element is not finite.
    """
    return saturates or format.is_float


def partial_amaxes(x: jax.Array, finite: bool, of_columns: bool = False) -> jax.Array:
    """Returns the ordered bits of amaxes of groups of rows of x (M, K), uint32 (128,); see `ordered_bits_conversions`.

    They are computed by XLA, which fuses the row-wise reduction with the operations that produce x where it can.
    of_columns: amaxes of groups of columns instead: XLA reads x once for this reduction and for sums over rows. Without
    the barrier it would turn both reductions into one over all of x, which it computes row by row.
    """
    to_ordered_bits, _ = ordered_bits_conversions(finite)
    amaxes = jnp.max(to_ordered_bits(stored_float32(x)) | zero_at_run_time(jnp.uint32), axis=0 if of_columns else 1)
    amaxes = lax.optimization_barrier(amaxes) if of_columns else amaxes
    padded = jnp.pad(amaxes, (0, -len(amaxes) % PARTIAL_AMAXES))
    return jnp.max(padded.reshape(PARTIAL_AMAXES, -1), axis=1)


def amax_over_devices(amax: jax.Array, x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns the maximum of a device's amax over mesh axes `axes`; along other axes it varies as x does."""
    amax = vary_as(amax, x)
    return lax.pmax(amax, axes) if axes else amax


def tensor_scales(
    outputs: tuple[CastOutput, ...],
    amaxes: jax.Array,
    indices: tuple[int, ...],
    bounds: tuple[Hadamard | None, ...],
) -> tuple[jax.Array, list[jax.Array]]:
    """Computes the quantisation multiplier and the tensor scale of each output of a cast, from amaxes.

    The multiplier maps the amax to the largest code times the largest block scale.

    Args:
        amaxes: amaxes of the input, float32 (n,): one for each rotation under which the amax was computed.
        indices: for each output, the index of its amax in `amaxes`.
        bounds: for each output, a rotation after which its amax is not known; the upper bound that follows from the
            amax before the rotation is used instead. None if the amax is known.

    Returns:
        The multipliers and their reciprocals, float32 (outputs, 2), and a list of tensor scales, each float32 ().
    """
    from scaledot.kernels.hopper import scalars

    specs = [output.spec for output in outputs]

    def compute(amaxes: list[Any]) -> tuple[Any, ...]:
        used = (
            amaxes[i] if bound is None else bounded_amax(amaxes[i], bound)
            for i, bound in zip(indices, bounds, strict=True)
        )
        levels = (tensor_level(s.format, s.input_dtype, None, amax) for s, amax in zip(specs, used, strict=True))
        multipliers, scales = zip(*levels, strict=True)
        return [[multiplier, divide(ONE, multiplier)] for multiplier in multipliers], *scales

    types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((len(outputs), 2), *[()] * len(outputs))]
    key = "tensor scales", tuple((spec.format, spec.input_dtype) for spec in specs), indices, bounds
    multipliers, *scales = scalars.compute(key, compute, types, amaxes)
    return multipliers, [vary_as(scale, amaxes) for scale in scales]


def seeds(outputs: tuple[CastOutput, ...] | list[CastOutput], arguments: CastArguments) -> jax.Array | None:
    """Returns two words derived from the random key of each output, uint32 (outputs, 2); None if all round to nearest.

    Words of outputs that round to nearest are zeros.
    """
    if not any(output.is_stochastic for output in outputs):
        return None
    from scaledot.kernels.hopper import scalars

    keys = [arguments.key(output) for output in outputs]
    numbers = tuple(key.index if isinstance(key, FoldedKey) else None for key in keys)
    arrays = [raw_key(key.key if isinstance(key, FoldedKey) else key) for key in keys if key is not None]
    has_key = tuple(key is not None for key in keys)
    offset = [] if arguments.offset is None else [arguments.offset.reshape(1)]

    def compute(*scalars: list[Any]) -> tuple[list[Any]]:
        key_words, first = iter(scalars), scalars[-1][0] if offset else None
        result = []
        for is_keyed, number in zip(has_key, numbers, strict=True):
            key = [*next(key_words), *([] if number is None else [np.uint32(number)])] if is_keyed else None
            result.append([np.uint32(0)] * 2 if key is None else offset_seeds(first, *hash_words(key)))
        return (result,)

    types = [jax.ShapeDtypeStruct((len(outputs), 2), jnp.uint32)]
    (words,) = scalars.compute(("seeds", has_key, numbers, bool(offset)), compute, types, *arrays, *offset)
    return words


def with_leading_dims(problem: CastProblem, output: CastOutput, q: ScaledArray) -> ScaledArray:
    """Reshapes a cast matrix to the shape of the problem, whose leading dims `matrix_shape` merged."""
    spec = output.spec
    return ScaledArray(
        q.data.reshape(problem.shape),
        q.scale.reshape(blocks.grid(problem.shape, spec.block)),
        q.tensor_scale,
        format=spec.format,
        block=spec.block,
        dtype=spec.dtype,
        rotation=spec.rotation,
    )
