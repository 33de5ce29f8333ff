"""Where scales go: the forms in which a contraction can be computed exactly.

A block scale that is constant over what is summed belongs on the result. One that changes along a summed axis
can be applied to each tile's partial sum, or, where code times scale is exact in bfloat16, folded into the codes
beforehand. What none of these can do is multiplied out in float32 first. A Form is one such decision; the
functions that make one return a sentence instead where it is not possible.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from scaledot.formats import Format
from scaledot.kernels.spec import Operand, Problem, is_default_precision

# Below this many products per tile the partial sums cost more than one float32 product of everything.
MIN_TILE = 128

BFLOAT16 = np.dtype(jnp.bfloat16)
FLOAT32 = np.dtype(np.float32)
FLOAT64 = np.dtype(np.float64)
INT8 = np.dtype(np.int8)
INT32 = np.dtype(np.int32)


@dataclasses.dataclass(frozen=True)
class Formulation:
    """How operands meet: the dtype they are multiplied in, whose scales are folded, and the tiles of the sum.

    carrier None keeps codes as they are. tiles: (label, elements) pairs. float8_on_cuda: CUDA multiplies the codes as
    they are, on tensor cores that sum with fewer bits than float32 has.
    """

    carrier: np.dtype | None
    accumulator: np.dtype
    folded: tuple[bool, bool] = (False, False)
    tiles: tuple[tuple[str, int], ...] = ()
    float8_on_cuda: bool = False

    @property
    def is_integer(self) -> bool:
        return self.carrier == INT8


def carrier_of(problem: Problem) -> np.dtype:
    """The narrowest dtype in which plain operands and bare codes are exact."""
    plain = [o.dtype for o in problem.operands if o.format is None]
    if FLOAT64 in (*plain, problem.out_dtype):
        return FLOAT64
    if any(o.format is not None and o.format.codebook is not None for o in problem.operands):
        return FLOAT32
    if problem.op == "conv" and plain:
        return FLOAT32  # JAX cannot transpose a convolution of bfloat16 that accumulates in float32
    return BFLOAT16 if all(_is_exact_in_bfloat16(d) for d in plain) else FLOAT32


def accumulator_of(carrier: np.dtype) -> np.dtype:
    return FLOAT64 if carrier == FLOAT64 else FLOAT32


def _is_exact_in_bfloat16(dtype: np.dtype) -> bool:
    if not jnp.issubdtype(dtype, jnp.floating):
        return dtype == np.bool_ or jnp.iinfo(dtype).bits <= 8
    return dtype == BFLOAT16 or jnp.finfo(dtype).bits <= 8


def folds_exactly(format: Format, has_zero: bool) -> bool:
    """Whether a code times its block scale always fits the 8 significant bits of a bfloat16."""
    if format.codebook is not None:
        return False
    code_bits = format.mantissa_bits + 1 + (1 if has_zero else 0)
    scale_bits = {"float8_e8m0fnu": 0, "float8_e4m3fn": 4}.get(format.scale)
    return scale_bits is not None and code_bits + scale_bits <= 8


def codes_form(problem: Problem) -> Formulation | str:
    """Bare codes are multiplied; every scale meets the result, or partial sums of tiles."""
    reason = _stays_behind(problem, (False, False))
    if reason:
        return reason
    carrier = carrier_of(problem)
    tiles = tiles_of(problem, (False, False))
    native = carrier == BFLOAT16 and _multiplies_float8(problem) and is_default_precision(problem.precision)
    reason = _tiling_reason(problem, tiles, carrier)
    return reason or Formulation(carrier, accumulator_of(carrier), tiles=tiles, float8_on_cuda=native)


def _multiplies_float8(problem: Problem) -> bool:
    """Whether both sides are 8-bit floats; tensor cores have no e5m2 x e5m2."""
    elements = {o.dtype.name if o.format is None else o.format.element for o in problem.operands}
    return problem.op == "dot" and elements in ({"float8_e4m3fn"}, {"float8_e4m3fn", "float8_e5m2"})


def integer_form(problem: Problem) -> Formulation | str:
    """int8 products summed in int32, which is exact; zero points are corrected by sums of the other side's codes."""
    for name, operand in problem.named:
        if operand.format is None or not operand.format.is_integer:
            return f"{name} is {operand}, not integer codes"
    tiles = tiles_of(problem, (False, False))
    reason = _stays_behind(problem, (False, False)) or _tiling_reason(problem, tiles, INT8)
    if reason:
        return reason
    if problem.out_dtype == FLOAT64:
        return "float64 results need float64 scales"
    return _overflow_reason(problem, tiles) or _zero_reason(problem, tiles) or Formulation(INT8, INT32, tiles=tiles)


def is_float_on_cuda(problem: Problem, form: Formulation) -> bool:
    """Whether CUDA multiplies integer codes as bfloat16, which is as exact there.

    Its integer convolutions take few shapes, and XLA's products of few integers are unreliable (see `products`). A sum
    of fewer than 128 products of codes is exact in float32.
    """
    return form.is_integer and (problem.op == "conv" or tile_products(problem, form.tiles) < MIN_TILE)


def _overflow_reason(problem: Problem, tiles: tuple[tuple[str, int], ...]) -> str | None:
    """Sums wrap around, so only what they come to after zero points must fit."""
    products = tile_products(problem, tiles)
    if problem.op == "conv":
        products = math.prod(problem.rhs.shape) // problem.rhs.size("o")
    largest = math.prod(
        2**o.format.bits - 1 if o.zero else 2 ** (o.format.bits - 1) for o in problem.operands if o.format
    )
    return f"{products} products of up to {largest} may pass 2^31" if products * largest >= 2**31 else None


def upcast_form(problem: Problem) -> Formulation | str:
    """Block scales that change along the sum are folded into the codes, exactly, in bfloat16."""
    carrier = carrier_of(problem)
    if carrier != BFLOAT16:
        return f"the product needs {carrier}, in which folding is what xla_dequantize does"
    folded = _needs_fold(problem, problem.lhs), _needs_fold(problem, problem.rhs)
    if not any(folded):
        return "no block scale changes along the sum and fits bfloat16"
    tiles = tiles_of(problem, folded)
    reason = _stays_behind(problem, folded) or _tiling_reason(problem, tiles, carrier)
    return reason or Formulation(carrier, FLOAT32, folded, tiles)


def dequantize_form(problem: Problem) -> Formulation:
    carrier = max(carrier_of(problem), FLOAT32, key=lambda d: d.itemsize)
    return Formulation(carrier, carrier, (True, True))


def tiles_of(problem: Problem, folded: tuple[bool, ...]) -> tuple[tuple[str, int], ...]:
    """(label, elements) for each summed label along which an unfolded scale changes."""
    operands = [o for o, fold in zip(problem.operands, folded, strict=True) if not fold]
    sizes = ((c, min(o.block_of(c) for o in operands)) for c in problem.summed if operands)
    return tuple((c, size) for c, size in sizes if size < problem.lhs.size(c))


def tile_products(problem: Problem, tiles: tuple[tuple[str, int], ...]) -> int:
    """How many products one tile sums."""
    return math.prod(dict(tiles).get(c, problem.lhs.size(c)) for c in problem.contraction.contracting)


def _needs_fold(problem: Problem, operand: Operand) -> bool:
    if operand.format is None or not folds_exactly(operand.format, operand.zero):
        return False
    return any(c not in problem.reaches_out for c in operand.varies)


def _stays_behind(problem: Problem, folded: tuple[bool, ...]) -> str | None:
    """Why a scale that is not folded cannot reach the result, even by tiles."""
    if 0 in problem.lhs.shape + problem.rhs.shape:
        return "an operand is empty"
    for (name, operand), fold in zip(problem.named, folded, strict=True):
        reachable = problem.reaches_out + problem.summed
        lost = [c for c in operand.varies if c not in reachable and not fold]
        if lost:
            return f"the scale of {name} changes along {lost[0]!r}, which is neither kept nor cut into tiles"
        level = [c for c in operand.level_varies if c not in problem.reaches_out]
        if level:
            return f"the tensor scale of {name} changes along {level[0]!r}, which is summed"
        if operand.rotated and operand.rotated in problem.contraction.out:
            return f"{name} is rotated along {operand.rotated!r}, which is kept: the rotation must be undone first"
    return None


def _tiling_reason(problem: Problem, tiles: tuple[tuple[str, int], ...], carrier: np.dtype) -> str | None:
    if not tiles:
        return None
    if carrier not in (INT8, BFLOAT16):
        return f"partial sums over tiles of {carrier} products are slower than one product of dequantised values"
    sharded = [c for c, _ in tiles if c in problem.lhs.sharded + problem.rhs.sharded]
    if sharded:
        return f"{sharded[0]!r} is split over explicit mesh axes and cannot be cut into tiles"
    products = tile_products(problem, tiles)
    if products < MIN_TILE:
        return f"scales change every {products} products; partial sums pay from {MIN_TILE} on"
    return None


def _zero_reason(problem: Problem, tiles: tuple[tuple[str, int], ...]) -> str | None:
    if not any(o.zero for o in problem.operands):
        return None
    if problem.op == "conv" and (problem.rhs.zero or dict(problem.window)["batch_group_count"] > 1):
        return "zero points of a convolution are corrected on the left, without batch groups"
    if problem.ragged in problem.contraction.contracting and problem.ragged:
        return "zero points cannot be corrected where groups are summed"
    short = [c for c, size in tiles if problem.lhs.size(c) % size]
    return f"zero points need whole tiles along {short[0]!r}" if short else None
