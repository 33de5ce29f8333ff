"""Few bfloat16 rows times packed weights as a row of the kernel table: which problems, and how weights are laid.

Weights lie with their summed axis first, (K, N), and are handed over as the words they are stored in, which costs
nothing. Scales of groups and of short blocks go to the kernel; those of channels and of the tensor meet the result, in
the pass that adds what several programs summed, transposes it and rounds once.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from scaledot.array import ScaledArray
from scaledot.formats import Format
from scaledot.kernels import operands
from scaledot.kernels.hopper import support
from scaledot.kernels.hopper.matmul_operands import result_reason
from scaledot.kernels.operands import filled_up
from scaledot.kernels.spec import Operand, Problem, is_default_precision
from scaledot.parallel.types import vary_as

MOST_ROWS = 64
STEP = 64  # a group of terms is a multiple of this
LINE, ROWS = 128, 8  # bytes and rows of a tile in shared memory; what is fetched in tiles consists of whole ones
ALIGNED = 16  # bytes; rows of other arrays are multiples of this
FP4 = "float4_e2m1fn"
LARGEST_ENTRY = 3.5  # of a codebook; 2^133 times a 127th of it is a bfloat16 (`registers.stepped`)
BLOCKS = {"float8_e8m0fnu": 32, "float8_e4m3fn": 16}  # terms that share a scale of this dtype


def problem_reason(problem: Problem) -> str | None:
    """Why the kernel cannot compute it, whatever the device."""
    contraction, x, w = problem.contraction, problem.lhs, problem.rhs
    if problem.op != "dot" or contraction.batch or len(contraction.contracted) != 1:
        return "it multiplies two matrices along one axis, without batch axes"
    if x.format is not None or x.dtype != jnp.bfloat16:
        return f"lhs is {x}; it multiplies plain bfloat16 values with weights"
    if w.format is None:
        return f"rhs is {w}; it must be scaled weights"
    rows = math.prod(x.size(c) for c in contraction.lhs_free)
    if rows > MOST_ROWS:
        return f"lhs has {rows} rows; it is made for at most {MOST_ROWS}"
    if w.labels != contraction.contracted + contraction.rhs_free:
        summed = contraction.contracted
        return f"the summed axis of rhs, {summed!r}, must lie first; quantize weights (inputs, outputs) with axis=0"
    return result_reason(problem) or _weights_reason(w, contraction.contracted)


def _weights_reason(w: Operand, summed: str) -> str | None:
    assert w.format is not None
    if w.zero:
        return "rhs has zero points"
    if summed in w.level_varies:
        return f"the tensor scale of rhs changes along {summed!r}, which is summed"
    if w.format.element == FP4:
        return _blocks_reason(w, summed)
    if not (w.format.is_integer or w.format.codebook) or w.format.scale == "float8_e8m0fnu":
        return f"rhs is {w}; it unpacks FP4 codes, codebooks, and integers that have float scales"
    if summed in w.varies and w.block_of(summed) % STEP:
        return f"scales of rhs change every {w.block_of(summed)} terms; it has groups of multiples of {STEP}"
    return _codebook_reason(w.format) if w.format.codebook else None


def _codebook_reason(format: Format) -> str | None:
    if format.bits > 4:
        return f"codes of rhs have {format.bits} bits; it looks up those of at most 4"
    if format.max > LARGEST_ENTRY:
        return f"the codebook of rhs reaches {format.max}; it looks up entries of at most {LARGEST_ENTRY}"
    return None


def _blocks_reason(w: Operand, summed: str) -> str | None:
    assert w.format is not None
    size = BLOCKS.get(w.format.scale)
    if size is None:
        return f"rhs is {w} with {w.format.scale} scales; it folds {' and '.join(BLOCKS)} into FP4 codes"
    others = {w.block_of(c) for c in w.labels if c != summed}
    if w.block[w.labels.index(summed)] != size or others != {1}:
        return f"rhs is {w}; {w.format.scale} scales are folded for {size} terms of one column"
    return None


def how(problem: Problem) -> str:
    w, summed = problem.rhs, problem.contraction.contracted
    if w.format is not None and w.format.element == FP4:
        where = "block scales folded in exactly"
    elif summed in w.varies:
        where = f"scales applied to the sums of every {w.block_of(summed)} terms in float32"
    else:
        where = "scales applied before the one rounding"
    products = "bfloat16 products on Hopper's tensor cores"
    if w.format is not None and w.format.codebook:
        products = f"entries looked up as sums of at most {_parts(problem)} bfloat16 numbers, {products}"
    return f"weights read as they are stored, {products}, {where}"


def _parts(problem: Problem) -> int:
    """Of an entry of a codebook, each about eight bits: one more than the significant bits of the result fill."""
    bits = jnp.finfo(problem.out_dtype).nmant + 1 if is_default_precision(problem.precision) else 24
    return -(-bits // 8) + 1


def run(problem: Problem, lhs: jax.Array, rhs: ScaledArray, bias: jax.Array | None = None) -> jax.Array:
    from scaledot.kernels.hopper import codebook, unpack, weight_only_matmul

    contraction = problem.contraction
    summed, free = contraction.contracted, contraction.rhs_free
    terms, columns = rhs.shape[0], math.prod(rhs.shape[1:])
    x = lhs.transpose([contraction.lhs.index(c) for c in contraction.lhs_free + summed]).reshape(-1, terms)
    rows, table = x.shape[0], rhs.format.codebook
    codes = codebook.codes_for(table, _parts(problem)) if table else unpack.codes_for(rhs.format)
    words = _words(rhs.data.reshape(terms, columns), codes.per_word)
    scales, group = _scales(rhs, contraction.rhs, problem.rhs, summed, weight_only_matmul.STRIP)
    config = weight_only_matmul.config_for(rows, columns, terms, codes, support.sm_count())
    x = filled_up(x, ROWS if rows > ROWS else 1, LINE // x.dtype.itemsize)
    sums = weight_only_matmul.decode(x, words, scales, codes=codes, group=group, config=config)
    total = _added(vary_as(sums, x, words))[:rows, :columns]
    for factor in _scales_of_columns(rhs, contraction.rhs, free, inside=scales is not None):
        total = total * factor
    if bias is not None:
        total = total + bias.reshape(1, -1).astype(jnp.float32)
    sizes = dict(zip(contraction.lhs + contraction.rhs, lhs.shape + rhs.shape, strict=True))
    result = total.astype(problem.out_dtype).reshape([sizes[c] for c in contraction.lhs_free + free])
    return result.transpose([(contraction.lhs_free + free).index(c) for c in contraction.out])


def _added(sums: jax.Array) -> jax.Array:
    """(splits, lines, rows, columns of a line) as (rows, columns). A reduction would be a pass of its own."""
    lines = functools.reduce(jnp.add, list(sums))
    return lines.transpose(1, 0, 2).reshape(sums.shape[2], -1)


def _words(codes: jax.Array, per_word: int) -> jax.Array:
    """A matrix of codes as int32 words of neighbouring columns."""
    filled = filled_up(codes, ROWS, LINE // 4 * per_word)
    return lax.bitcast_convert_type(filled.reshape(filled.shape[0], -1, per_word), jnp.int32)


def _scales(q: ScaledArray, labels: str, w: Operand, summed: str, strip: int) -> tuple[jax.Array | None, int]:
    """What the kernel applies, None where that is nothing, and the terms of a group where there are groups.

    float32 scales of a group are fetched by whole strips of columns, as bytes, which must be there.
    """
    if q.format.element == FP4:
        scale = filled_up(q.scale.reshape(q.scale.shape[0], -1), 1, ALIGNED)
        return lax.bitcast_convert_type(scale.reshape(scale.shape[0], -1, 4), jnp.int32), 0
    if summed not in w.varies:
        return None, 0
    group = w.block_of(summed)
    (factor,) = operands.block_scales(q, labels, {summed: group})
    shape = factor.values.shape[:1] + q.shape[1:]
    values = jnp.broadcast_to(factor.values, shape).reshape(shape[0], -1)
    return filled_up(values, 1, strip), group


def _scales_of_columns(q: ScaledArray, labels: str, free: str, inside: bool) -> list[jax.Array]:
    """What the sums of each column, (1, N), are multiplied by; block scales are not, where they were `inside`."""
    found = operands.tensor_scales(q, labels) + ([] if inside else operands.block_scales(q, labels, {}))
    shape = tuple(q.shape[labels.index(c)] for c in free)
    return [jnp.broadcast_to(operands.lay(factor, free), shape).reshape(1, -1) for factor in found]
