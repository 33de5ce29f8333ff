"""Converts ScaledArrays to the matrices and scales that `matmul` takes, and checks which operands and results it takes.

Matrices have the contracting dim last, padded with zeros to a multiple of 128 bytes. The transpose that this may need
is free for an operand that a fused cast stored transposed: such a cast returns `stored.T`, and XLA cancels the two
transposes. Scales that do not change along K become one per row of the matrix, (1,) or (rows,); scales of blocks of 128
along K become (K / 128, rows).
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from scaledot.array import ScaledArray
from scaledot.kernels import operands
from scaledot.kernels.hopper.sizes import BLOCK, FLOAT8_ELEMENTS
from scaledot.kernels.operands import LabeledScale
from scaledot.kernels.spec import Problem
from scaledot.numerics import blocks

OUT_DTYPES = ("bfloat16", "float16", "float32")
K_BYTES = 128  # K is padded to a multiple of these bytes, the width of an SMEM tile
M_MULTIPLE, N_MULTIPLE, MINOR_MULTIPLE = 8, 16, 64  # padding of M and of N, or of either as a minor dimension
MAX_INT8_K = 2**31 >> 14  # from this K on, an int32 accumulator of int8 codes may overflow
KINDS = {"float8": FLOAT8_ELEMENTS, "int8": tuple(f"int{bits}" for bits in range(2, 9))}
NAMES = {"float8": "8-bit floats", "int8": "integers of at most 8 bits"}


def result_reason(problem: Problem) -> str | None:
    """Returns why the kernels cannot write the result of a problem, or None if they can."""
    if problem.out_dtype.name not in OUT_DTYPES:
        return f"it writes {', '.join(OUT_DTYPES)}, not {problem.out_dtype}"
    if problem.out_sharding is not None or any(operand.sharded_labels for operand in problem.operands):
        return "operands or result are sharded over explicit mesh axes"
    for name, operand in problem.named_operands:
        if operand.rotated_label and operand.rotated_label in problem.contraction.out:
            return f"{name} is rotated along {operand.rotated_label!r}, which is not a contracting dim"
    return None if all(math.prod(o.shape) for o in problem.operands) else "an operand is empty"


def codes_reason(problem: Problem, kind: str) -> str | None:
    """Returns why the operands are not codes of a kind, "float8" or "int8", that the kernel multiplies, or None."""
    contracted = problem.contraction.contracting
    for name, operand in problem.named_operands:
        if operand.format is None or operand.format.element not in KINDS[kind] or operand.format.scale != "float32":
            return f"{name} is {operand}; both sides must be {NAMES[kind]} with float32 scales"
        if operand.has_zero_point:
            return f"{name} has zero points"
        changes = any(c in contracted for c in operand.scale_varies_along)
        if changes and (len(contracted) > 1 or operand.block_of(contracted) != BLOCK):
            return f"the scale of {name} changes along the contracting dim, but not in blocks of {BLOCK} along one dim"
    k = math.prod(problem.lhs.size(c) for c in contracted)
    if kind == "int8" and not is_blockwise(problem) and k >= MAX_INT8_K:
        return f"K is {k}; int32 accumulators of 8-bit integers may overflow from {MAX_INT8_K} on"
    return None


def is_blockwise(problem: Problem) -> bool:
    """Whether a scale changes along the contracting dim."""
    return any(c in problem.contraction.contracting for operand in problem.operands for c in operand.scale_varies_along)


def accumulation(problem: Problem, promotes: bool) -> str:
    """How a matmul of codes accumulates and where it applies scales, for `explain`."""
    if is_blockwise(problem):
        return f"scales applied to float32 partial accumulators every {BLOCK} elements of K"
    precision = f"promoted to float32 every {BLOCK} elements of K" if promotes else "accumulated in the tensor cores"
    return f"{precision}, scales applied in the epilogue"


def codes_of(q: ScaledArray) -> jax.Array:
    """The codes, with 4-bit integers unpacked to int8."""
    return operands.widen_int4(q).data


def row_scales(scales: list[LabeledScale], q: ScaledArray, labels: str, free: str) -> jax.Array:
    """Scales of the rows of an operand's matrix, the free dims flattened: (rows,), or (1,) for a per-tensor scale.

    scales: the at most one scale of q, by label; without any, the result is a scale of 1.
    """
    if not scales:
        return jnp.ones(1, jnp.float32)
    (scale,) = scales
    if scale.values.size == 1:
        return scale.values.reshape(1)
    shape = tuple(q.shape[labels.index(c)] for c in free)
    return jnp.broadcast_to(operands.align_to(LabeledScale(scale.values, labels), free), shape).reshape(-1)


def k_block_scales(
    q: ScaledArray, labels: str, free: str, contracted: str, allow_square: bool, group: str = ""
) -> jax.Array:
    """Blockwise scales of an operand's matrix, (K / 128, rows) or, with a `group` dim, (groups, K / 128, rows).

    If `allow_square` and q has 128×128 blocks, there is one scale for each 128 rows.
    """
    tiles = {contracted: BLOCK}
    if allow_square and len(free) == 1 and blocks.expand(q.block, q.ndim)[labels.index(free)] == BLOCK:
        tiles[free] = BLOCK
    (scale,) = operands.block_scales(q, labels, tiles)
    order = group + contracted + free
    values = scale.values.transpose([labels.index(c) for c in order])
    sizes = [-(-q.shape[labels.index(c)] // tiles.get(c, 1)) for c in order]
    return jnp.broadcast_to(values, sizes).reshape(*sizes[: len(group) + 1], -1)


def padded_scales(scales: jax.Array, blockwise: bool, multiple: int, extra: int = 0) -> jax.Array:
    """Pads the last dim of scales to a multiple, and by `extra`, as float32; a per-tensor scale stays (..., 1)."""
    if scales.shape[-1] == 1 and not blockwise:
        return scales.astype(np.float32)
    padding = [(0, 0)] * (scales.ndim - 1) + [(0, -scales.shape[-1] % multiple + extra)]
    return jnp.pad(scales, padding).astype(np.float32)
