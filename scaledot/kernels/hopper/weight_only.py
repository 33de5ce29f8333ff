"""Weight-only matmuls as an entry of the kernel table: at most 64 bfloat16 rows times packed weights (K, N).

Weights must be stored with the contracting dim first and are bitcast to int32 words, which is free. The kernel applies
scales that change along K: group scales and block scales. Scales per channel and per tensor are applied afterwards, in
the XLA fusion that also adds the split-K results, transposes and rounds once.

Example: x bfloat16 (8, 4096) times int4 weights (4096, 14336) in groups of 128: words are int32 (4096, 1792), scales
float32 (32, 14336), and the kernel returns float32 (split_k, 56, 8, 256).
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
from scaledot.kernels.hopper.swizzle_atom import ATOM_BYTES, ATOM_ROWS
from scaledot.kernels.operands import pad_to_multiples
from scaledot.kernels.spec import Operand, Problem, is_default_precision
from scaledot.parallel.types import vary_as

MAX_ROWS = 64
GROUP_MULTIPLE = 64  # elements along K: a 64-element K slice must be within one group
TMA_ALIGNMENT = 16  # bytes; rows of scales are padded to multiples of this
FP4 = "float4_e2m1fn"
MAX_ENTRY = 3.5  # of a codebook: entry * 2^133 / 127, the fma multiplier of `bytes_to_bfloat16`, must be finite
FP4_BLOCKS = {"float8_e8m0fnu": 32, "float8_e4m3fn": 16}  # elements along K of a block, by scale dtype


def problem_reason(problem: Problem) -> str | None:
    """Returns why the kernel cannot compute a problem on any device, or None if it can."""
    contraction, x, w = problem.contraction, problem.lhs, problem.rhs
    if problem.op != "dot" or contraction.batch or len(contraction.contracting) != 1:
        return "it multiplies two matrices with one contracting dim, without batch dims"
    if x.format is not None or x.dtype != jnp.bfloat16:
        return f"lhs is {x}; it multiplies plain bfloat16 values with weights"
    if w.format is None:
        return f"rhs is {w}; it must be scaled weights"
    rows = math.prod(x.size(c) for c in contraction.lhs_free)
    if rows > MAX_ROWS:
        return f"lhs has {rows} rows; at most {MAX_ROWS} are supported"
    if w.labels != contraction.contracting + contraction.rhs_free:
        return (
            f"rhs must have its contracting dim {contraction.contracting!r} first; quantize weights (K, N) with axis=0"
        )
    return result_reason(problem) or _weights_reason(w, contraction.contracting)


def _weights_reason(w: Operand, contracted: str) -> str | None:
    assert w.format is not None
    if w.has_zero_point:
        return "rhs has zero points"
    if contracted in w.tensor_scale_varies_along:
        return f"the tensor scale of rhs varies along K ({contracted!r}); it must be constant there"
    if w.format.element == FP4:
        return _fp4_reason(w, contracted)
    if not (w.format.is_integer or w.format.codebook) or w.format.scale == "float8_e8m0fnu":
        return f"rhs is {w}; it unpacks FP4 codes, codebooks, and integers that have float scales"
    if contracted in w.scale_varies_along and w.block_of(contracted) % GROUP_MULTIPLE:
        return f"rhs has groups of {w.block_of(contracted)} along K; they must be multiples of {GROUP_MULTIPLE}"
    return _codebook_reason(w.format) if w.format.codebook else None


def _codebook_reason(format: Format) -> str | None:
    if format.bits > 4:
        return f"rhs has {format.bits}-bit codes of a codebook; at most 4 bits are supported"
    if format.max > MAX_ENTRY:
        return f"rhs has a codebook with entries up to {format.max}; at most {MAX_ENTRY} is supported"
    return None


def _fp4_reason(w: Operand, contracted: str) -> str | None:
    assert w.format is not None
    size = FP4_BLOCKS.get(w.format.scale)
    if size is None:
        return f"rhs is {w} with {w.format.scale} scales; FP4 codes must have {' or '.join(FP4_BLOCKS)} scales"
    other_blocks = {w.block_of(c) for c in w.labels if c != contracted}
    if w.block[w.labels.index(contracted)] != size or other_blocks != {1}:
        return f"rhs is {w}; FP4 codes with {w.format.scale} scales must be in blocks of {size} along K"
    return None


def describe(problem: Problem) -> str:
    """The line of `explain` for a problem that the kernel computes."""
    w, contracted = problem.rhs, problem.contraction.contracting
    if w.format is not None and w.format.element == FP4:
        scales = "block scales folded in exactly"
    elif contracted in w.scale_varies_along:
        scales = f"scales applied to float32 partial accumulators every {w.block_of(contracted)} elements of K"
    else:
        scales = "scales applied to float32 accumulators"
    unpacking = "packed weights read once and unpacked in registers"
    if w.format is not None and w.format.codebook:
        unpacking += f", codebook entries as sums of at most {_max_terms(problem)} bfloat16 terms"
    return f"{unpacking}, bfloat16 matmul on Hopper's tensor cores, {scales}, one rounding"


def _max_terms(problem: Problem) -> int:
    """The largest number of bfloat16 terms of a codebook entry: ceil(significand bits / 8), plus one guard term.

    A bfloat16 has 8 significand bits. Those of the result dtype count if the precision is the default, otherwise 24.
    """
    bits = jnp.finfo(problem.out_dtype).nmant + 1 if is_default_precision(problem.precision) else 24
    return -(-bits // 8) + 1


def run(problem: Problem, lhs: jax.Array, rhs: ScaledArray, bias: jax.Array | None = None) -> jax.Array:
    from scaledot.kernels.hopper import codebook, unpack, weight_only_matmul

    contraction = problem.contraction
    contracted, free = contraction.contracting, contraction.rhs_free
    k, columns = rhs.shape[0], math.prod(rhs.shape[1:])
    x = lhs.transpose([contraction.lhs.index(c) for c in contraction.lhs_free + contracted]).reshape(-1, k)
    rows, entries = x.shape[0], rhs.format.codebook
    unpacker = codebook.unpacker_for(entries, _max_terms(problem)) if entries else unpack.unpacker_for(rhs.format)
    words = _words(rhs.data.reshape(k, columns), unpacker.per_word)
    scales, group = _kernel_scales(rhs, contraction.rhs, problem.rhs, contracted, weight_only_matmul.CTA_COLUMNS)
    config = weight_only_matmul.config_for(rows, columns, k, unpacker, support.sm_count())
    x = pad_to_multiples(x, ATOM_ROWS if rows > ATOM_ROWS else 1, ATOM_BYTES // x.dtype.itemsize)
    partials = weight_only_matmul.split_k_partials(x, words, scales, unpacker=unpacker, group=group, config=config)
    total = _reduce_split_k(vary_as(partials, x, words))[:rows, :columns]
    for scale in _column_scales(rhs, contraction.rhs, free, block_scales_applied=scales is not None):
        total = total * scale
    if bias is not None:
        total = total + bias.reshape(1, -1).astype(jnp.float32)
    sizes = dict(zip(contraction.lhs + contraction.rhs, lhs.shape + rhs.shape, strict=True))
    result = total.astype(problem.out_dtype).reshape([sizes[c] for c in contraction.lhs_free + free])
    return result.transpose([(contraction.lhs_free + free).index(c) for c in contraction.out])


def _reduce_split_k(partials: jax.Array) -> jax.Array:
    """Adds up (split_k, packed tiles, rows, columns of a packed tile) to (rows, columns).

    By additions, which XLA fuses with the operations that follow; it would compile a reduction to another kernel.
    """
    total = functools.reduce(jnp.add, list(partials))
    return total.transpose(1, 0, 2).reshape(partials.shape[2], -1)


def _words(codes: jax.Array, per_word: int) -> jax.Array:
    """Codes (K, N) as int32 words (K, N / per_word) of neighbouring columns, padded to whole swizzle atoms."""
    padded = pad_to_multiples(codes, ATOM_ROWS, ATOM_BYTES // 4 * per_word)
    return lax.bitcast_convert_type(padded.reshape(padded.shape[0], -1, per_word), jnp.int32)


def _kernel_scales(
    q: ScaledArray, labels: str, w: Operand, contracted: str, column_multiple: int
) -> tuple[jax.Array | None, int]:
    """Returns the scales that the kernel applies, or None, and the elements along K of a group, or 0 without groups.

    Block scales of FP4 are four in an int32 word. float32 group scales (K / group, N) are padded to whole column tiles:
    tensor copies are clipped, but a single row of scales per K step is contiguous, so that Mosaic may load it by
    `cp.async.bulk`, which is not bounds-checked. (jax 0.11.2 uses tensor copies for all loads.)
    """
    if q.format.element == FP4:
        scale = pad_to_multiples(q.scale.reshape(q.scale.shape[0], -1), 1, TMA_ALIGNMENT)
        return lax.bitcast_convert_type(scale.reshape(scale.shape[0], -1, 4), jnp.int32), 0
    if contracted not in w.scale_varies_along:
        return None, 0
    group = w.block_of(contracted)
    (scale,) = operands.block_scales(q, labels, {contracted: group})
    shape = scale.values.shape[:1] + q.shape[1:]
    values = jnp.broadcast_to(scale.values, shape).reshape(shape[0], -1)
    return pad_to_multiples(values, 1, column_multiple), group


def _column_scales(q: ScaledArray, labels: str, free: str, block_scales_applied: bool) -> list[jax.Array]:
    """Scales (1, N) of the result: the tensor scale, and the block scale unless the kernel has applied it."""
    scales = operands.tensor_scales(q, labels)
    if not block_scales_applied:
        scales = scales + operands.block_scales(q, labels, {})
    shape = tuple(q.shape[labels.index(c)] for c in free)
    return [jnp.broadcast_to(operands.align_to(scale, free), shape).reshape(1, -1) for scale in scales]
