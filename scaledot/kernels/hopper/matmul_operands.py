"""Converts ScaledArrays to the matrices and scales that `matmul` takes, and checks which operands and results it takes.

8-bit matrices are K-major: (M, K) and (N, K), with K contiguous. bfloat16 ones may also be MN-major, (K, M) and (K, N).
The transpose that this may need is free for an operand that a fused cast stored transposed: such a cast returns
`stored.T`, and XLA cancels the two transposes. Below, mn is M for lhs and N for rhs. Scales that do not change along K
become (1,) or (mn,), one per row of the K-major matrix; scales of blocks of 128 along K become (K / 128, mn).
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from scaledot.array import ScaledArray
from scaledot.kernels import operands
from scaledot.kernels.hopper.scale_blocks import FLOAT8_ELEMENTS, SCALE_BLOCK
from scaledot.kernels.hopper.swizzle_atom import ATOM_ROWS, K_STEP
from scaledot.kernels.operands import LabeledArray
from scaledot.kernels.spec import Problem
from scaledot.numerics import blocks

OUT_DTYPES = ("bfloat16", "float16", "float32")
M_MULTIPLE = ATOM_ROWS  # of K-major matrices, whose TMA loads and stores are tiled in swizzle atoms
N_MULTIPLE = 16  # columns of the result; 16 of a 16-bit one are 32 bytes, the narrowest swizzle
MINOR_MULTIPLE = 64  # M or N where it is contiguous: a swizzle atom of bfloat16, 128 bytes
INT8_OVERFLOW_K = 2**31 >> 14  # from this K on, an int32 accumulator of products up to 2^14 may overflow
ELEMENTS = {"float8": FLOAT8_ELEMENTS, "int8": tuple(f"int{bits}" for bits in range(2, 9))}
NAMES = {"float8": "8-bit floats", "int8": "integers of at most 8 bits"}


def result_reason(problem: Problem) -> str | None:
    """Returns why the kernels cannot write the result of a problem, or None if they can."""
    if problem.out_dtype.name not in OUT_DTYPES:
        return f"it writes {', '.join(OUT_DTYPES)}, not {problem.out_dtype}"
    if problem.out_sharding is not None or any(operand.sharded_labels for operand in problem.operands):
        return "operands or result are sharded over explicit mesh axes"
    for name, operand in problem.named_operands:
        if operand.rotated_label and operand.rotated_label in problem.contraction.out:
            return f"{name} has a Hadamard transform along {operand.rotated_label!r}, which is not a contracting dim"
    return None if all(math.prod(o.shape) for o in problem.operands) else "an operand is empty"


def codes_reason(problem: Problem, element: str) -> str | None:
    """Returns why the kernel for "float8" or "int8" elements cannot multiply the operands' codes, or None if it can."""
    contracted = problem.contraction.contracting
    for name, operand in problem.named_operands:
        format = operand.format
        if format is None or format.element not in ELEMENTS[element] or format.scale != "float32":
            return f"{name} is {operand}; both operands must be {NAMES[element]} with float32 scales"
        if operand.has_zero_point:
            return f"{name} has zero points"
        changes, block = any(c in contracted for c in operand.scale_varies_along), SCALE_BLOCK
        if changes and (len(contracted) > 1 or operand.block_of(contracted) != block):
            return f"the scale of {name} changes along the contracting dim, but not in blocks of {block} along one dim"
    k = math.prod(problem.lhs.size(c) for c in contracted)
    if element == "int8" and not has_k_block_scales(problem) and k >= INT8_OVERFLOW_K:
        return f"K is {k}; int32 accumulators of 8-bit integers may overflow from {INT8_OVERFLOW_K} on"
    return None


def has_k_block_scales(problem: Problem) -> bool:
    """Whether a scale changes along the contracting dim."""
    return any(c in problem.contraction.contracting for operand in problem.operands for c in operand.scale_varies_along)


def accumulation(problem: Problem, promotes: bool) -> str:
    """How a matmul of codes accumulates and where it applies scales, for `explain`."""
    if has_k_block_scales(problem):
        return f"scales applied to float32 partial accumulators every {SCALE_BLOCK} elements of K"
    precision = f"promoted to float32 every {K_STEP} elements of K" if promotes else "accumulated in the tensor cores"
    return f"{precision}, scales applied in the epilogue"


def codes_of(q: ScaledArray) -> jax.Array:
    """The codes, with 4-bit integers unpacked to int8."""
    return operands.widen_int4(q).data


def row_scales(scales: list[LabeledArray], q: ScaledArray, labels: str, free: str) -> jax.Array:
    """Returns one scale per row of an operand's K-major matrix, (mn,), or (1,) for a per-tensor scale.

    scales: a list with the LabeledArray of q, or an empty list, for which the result is 1.
    """
    if not scales:
        return jnp.ones(1, jnp.float32)
    (scale,) = scales
    if scale.values.size == 1:
        return scale.values.reshape(1)
    shape = tuple(q.shape[labels.index(c)] for c in free)
    return jnp.broadcast_to(operands.align_to(LabeledArray(scale.values, labels), free), shape).reshape(-1)


def block_scale_matrix(
    q: ScaledArray, labels: str, free: str, contracted: str, allow_square: bool, group: str = ""
) -> jax.Array:
    """Returns scales of blocks of 128 along K, (K / 128, mn) or, with a `group` dim, (groups, K / 128, mn).

    allow_square: if q has 128×128 blocks, the result has one scale for each of them, (K / 128, mn / 128).
    """
    tiles = {contracted: SCALE_BLOCK}
    if allow_square and len(free) == 1 and blocks.expand(q.block, q.ndim)[labels.index(free)] == SCALE_BLOCK:
        tiles[free] = SCALE_BLOCK
    (scale,) = operands.block_scales(q, labels, tiles)
    order = group + contracted + free
    values = scale.values.transpose([labels.index(c) for c in order])
    sizes = [-(-q.shape[labels.index(c)] // tiles.get(c, 1)) for c in order]
    return jnp.broadcast_to(values, sizes).reshape(*sizes[: len(group) + 1], -1)


def padded_scales(scales: jax.Array, has_k_blocks: bool, multiple: int, extra: int = 0) -> jax.Array:
    """Pads the last dim of scales to a multiple, and by `extra`, as float32; a per-tensor scale stays (..., 1)."""
    if scales.shape[-1] == 1 and not has_k_blocks:
        return scales.astype(np.float32)
    padding = [(0, 0)] * (scales.ndim - 1) + [(0, -scales.shape[-1] % multiple + extra)]
    return jnp.pad(scales, padding).astype(np.float32)
