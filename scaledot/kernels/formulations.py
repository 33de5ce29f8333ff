"""Formulations of a contraction: in which dtype it is computed, and where scales are applied.

A block scale that is constant along the contracting dims is applied to the result. One that varies along a contracting
dim is applied to the partial result of each tile of that dim or, if code times scale is exact in bfloat16, folded into
the codes before the contraction. Otherwise operands are dequantised to float32. A Formulation is one such choice. The
functions here return one, or a sentence that says why their choice is not possible.

For example, x (m, 512) with 1×128 blocks times w (512, n) with 128×128 blocks, both E4M3, is bfloat16 matmuls
(FP8 on CUDA) of codes, one for each of 4 tiles along k; their float32 results are scaled and added up.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from scaledot.formats import Format
from scaledot.kernels.spec import Operand, Problem, is_default_precision

# With fewer elements along K per tile, per-tile results cost more than one float32 matmul of dequantised operands.
MIN_TILE = 128
# Integer contractions of at most this many products run in bfloat16 on CUDA. Up to 1024 would be exact in float32: the
# product of two 8-bit integers is at most 2^14, and float32 has 24 significant bits.
MAX_EXACT_FLOAT32_PRODUCTS = 127

BFLOAT16 = np.dtype(jnp.bfloat16)
FLOAT32 = np.dtype(np.float32)
FLOAT64 = np.dtype(np.float64)
INT8 = np.dtype(np.int8)
INT32 = np.dtype(np.int32)


@dataclasses.dataclass(frozen=True)
class Formulation:
    """How a contraction is computed.

    operand_dtype: of the contraction; None for the dtype of the codes. accumulator: the dtype of its result.
    folded: whether block scales are folded into the codes of lhs and of rhs. tiles: (label, elements) of tiled dims.
    float8_on_cuda: whether CUDA multiplies float8 codes, on tensor cores that accumulate with fewer bits than float32.
    """

    operand_dtype: np.dtype | None
    accumulator: np.dtype
    folded: tuple[bool, bool] = (False, False)
    tiles: tuple[tuple[str, int], ...] = ()
    float8_on_cuda: bool = False

    @property
    def is_integer(self) -> bool:
        return self.operand_dtype == INT8


def operand_dtype_of(problem: Problem) -> np.dtype:
    """Returns the narrowest dtype in which plain operands and unscaled codes are exact."""
    plain = [o.dtype for o in problem.operands if o.format is None]
    if FLOAT64 in (*plain, problem.out_dtype):
        return FLOAT64
    if any(o.format is not None and o.format.codebook is not None for o in problem.operands):
        return FLOAT32
    if problem.op == "conv" and plain:
        return FLOAT32  # JAX cannot transpose a bfloat16 convolution with a float32 result
    return BFLOAT16 if all(_is_exact_in_bfloat16(d) for d in plain) else FLOAT32


def accumulator_of(operand_dtype: np.dtype) -> np.dtype:
    return FLOAT64 if operand_dtype == FLOAT64 else FLOAT32


def _is_exact_in_bfloat16(dtype: np.dtype) -> bool:
    if not jnp.issubdtype(dtype, jnp.floating):
        return dtype == np.bool_ or jnp.iinfo(dtype).bits <= 8
    return dtype == BFLOAT16 or jnp.finfo(dtype).bits <= 8


def folds_exactly(format: Format, has_zero: bool) -> bool:
    """Whether every code times every block scale fits the 8 significant bits of a bfloat16."""
    if format.codebook is not None:
        return False
    code_bits = format.mantissa_bits + 1 + (1 if has_zero else 0)
    scale_bits = {"float8_e8m0fnu": 0, "float8_e4m3fn": 4}.get(format.scale)
    return scale_bits is not None and code_bits + scale_bits <= 8


def codes_formulation(problem: Problem) -> Formulation | str:
    """Contracts unscaled codes; all scales are applied to the result, or to the results of tiles."""
    reason = _scale_reason(problem, (False, False))
    if reason:
        return reason
    operand_dtype = operand_dtype_of(problem)
    tiles = tiles_of(problem, (False, False))
    native = operand_dtype == BFLOAT16 and _is_float8_dot(problem) and is_default_precision(problem.precision)
    reason = _tiling_reason(problem, tiles, operand_dtype)
    return reason or Formulation(operand_dtype, accumulator_of(operand_dtype), tiles=tiles, float8_on_cuda=native)


def _is_float8_dot(problem: Problem) -> bool:
    """Whether both operands are 8-bit floats; cuBLAS has no matmul of E5M2 by E5M2."""
    elements = {o.dtype.name if o.format is None else o.format.element for o in problem.operands}
    return problem.op == "dot" and elements in ({"float8_e4m3fn"}, {"float8_e4m3fn", "float8_e5m2"})


def integer_formulation(problem: Problem) -> Formulation | str:
    """Contracts int8 codes with int32 accumulation, which is exact; sums of codes correct for zero points."""
    for name, operand in problem.named_operands:
        if operand.format is None or not operand.format.is_integer:
            return f"{name} is {operand}, not integer codes"
    tiles = tiles_of(problem, (False, False))
    reason = _scale_reason(problem, (False, False)) or _tiling_reason(problem, tiles, INT8)
    if reason:
        return reason
    if problem.out_dtype == FLOAT64:
        return "float64 results need float64 scales"
    return _overflow_reason(problem, tiles) or _zero_reason(problem, tiles) or Formulation(INT8, INT32, tiles=tiles)


def is_float_on_cuda(problem: Problem, formulation: Formulation) -> bool:
    """Whether CUDA contracts integer codes in bfloat16 with float32 accumulation, which is exact for these problems.

    cuDNN's integer convolutions support few shapes, and XLA's int8 matmuls with a short K are unreliable (see
    `xla_contractions`). Few products of 8-bit integers accumulate exactly in float32 (`MAX_EXACT_FLOAT32_PRODUCTS`).
    """
    is_short = tile_products(problem, formulation.tiles) <= MAX_EXACT_FLOAT32_PRODUCTS
    return formulation.is_integer and (problem.op == "conv" or is_short)


def _overflow_reason(problem: Problem, tiles: tuple[tuple[str, int], ...]) -> str | None:
    """Accumulators wrap around, so only the result after the zero-point correction must fit int32."""
    products = tile_products(problem, tiles)
    if problem.op == "conv":
        products = math.prod(problem.rhs.shape) // problem.rhs.size("o")
    largest = math.prod(
        2**o.format.bits - 1 if o.has_zero_point else 2 ** (o.format.bits - 1) for o in problem.operands if o.format
    )
    return f"{products} products of up to {largest} may overflow int32" if products * largest >= 2**31 else None


def upcast_formulation(problem: Problem) -> Formulation | str:
    """Folds block scales that vary along contracting dims into the codes, exactly, in bfloat16."""
    operand_dtype = operand_dtype_of(problem)
    if operand_dtype != BFLOAT16:
        return f"operands need {operand_dtype}; folding scales into {operand_dtype} is what xla_dequantize does"
    folded = _needs_fold(problem, problem.lhs), _needs_fold(problem, problem.rhs)
    if not any(folded):
        return "no block scale that varies along a contracting dim can be folded into bfloat16 exactly"
    tiles = tiles_of(problem, folded)
    reason = _scale_reason(problem, folded) or _tiling_reason(problem, tiles, operand_dtype)
    return reason or Formulation(operand_dtype, FLOAT32, folded, tiles)


def dequantize_formulation(problem: Problem) -> Formulation:
    """Dequantises both operands to float32 (or float64) first."""
    operand_dtype = max(operand_dtype_of(problem), FLOAT32, key=lambda d: d.itemsize)
    return Formulation(operand_dtype, operand_dtype, (True, True))


def tiles_of(problem: Problem, folded: tuple[bool, ...]) -> tuple[tuple[str, int], ...]:
    """Returns (label, elements) for each contracting dim along which a scale varies that is not folded."""
    operands = [o for o, fold in zip(problem.operands, folded, strict=True) if not fold]
    sizes = ((c, min(o.block_of(c) for o in operands)) for c in problem.tileable_labels if operands)
    return tuple((c, size) for c, size in sizes if size < problem.lhs.size(c))


def tile_products(problem: Problem, tiles: tuple[tuple[str, int], ...]) -> int:
    """Returns the number of products that accumulate in an element of a tile's result."""
    return math.prod(dict(tiles).get(c, problem.lhs.size(c)) for c in problem.contraction.contracting)


def _needs_fold(problem: Problem, operand: Operand) -> bool:
    if operand.format is None or not folds_exactly(operand.format, operand.has_zero_point):
        return False
    return any(c not in problem.epilogue_labels for c in operand.scale_varies_along)


def _scale_reason(problem: Problem, folded: tuple[bool, ...]) -> str | None:
    """Returns why a scale that is not folded cannot be applied to the result or to the results of tiles."""
    if 0 in problem.lhs.shape + problem.rhs.shape:
        return "an operand is empty"
    for (name, operand), fold in zip(problem.named_operands, folded, strict=True):
        applicable = problem.epilogue_labels + problem.tileable_labels
        varying = [c for c in operand.scale_varies_along if c not in applicable and not fold]
        if varying:
            return f"the scale of {name} varies along {varying[0]!r}, which is neither a free dim nor can be tiled"
        varying = [c for c in operand.tensor_scale_varies_along if c not in problem.epilogue_labels]
        if varying:
            return f"the tensor scale of {name} varies along {varying[0]!r}, a contracting dim"
        rotated = operand.rotated_label
        if rotated and rotated in problem.contraction.out:
            return f"{name} is rotated along {rotated!r}, a free dim: the rotation must be undone first"
    return None


def _tiling_reason(problem: Problem, tiles: tuple[tuple[str, int], ...], operand_dtype: np.dtype) -> str | None:
    if not tiles:
        return None
    if operand_dtype not in (INT8, BFLOAT16):
        return f"{operand_dtype} matmuls of tiles are slower than one matmul of dequantised operands"
    sharded = [c for c, _ in tiles if c in problem.lhs.sharded_labels + problem.rhs.sharded_labels]
    if sharded:
        return f"{sharded[0]!r} is sharded over explicit mesh axes and cannot be split into tiles"
    products = tile_products(problem, tiles)
    if products < MIN_TILE:
        return f"scales vary every {products} elements of K; per-block accumulation is only worth it from {MIN_TILE}"
    return None


def _zero_reason(problem: Problem, tiles: tuple[tuple[str, int], ...]) -> str | None:
    if not any(o.has_zero_point for o in problem.operands):
        return None
    if problem.op == "conv" and (problem.rhs.has_zero_point or dict(problem.lax_arguments)["batch_group_count"] > 1):
        return "zero points of a convolution are corrected for lhs only, and without batch groups"
    if problem.ragged_label in problem.contraction.contracting and problem.ragged_label:
        return "zero points cannot be corrected if the ragged dim is contracted"
    partial = [c for c, size in tiles if problem.lhs.size(c) % size]
    return f"zero points need whole tiles along {partial[0]!r}" if partial else None
