"""Operands as the matrices and factors that `matmul` takes: which can be, and how they are laid.

Matrices lie with the summed axis last, filled up with zeros to whole rows of a tile. A transposition that this needs
costs nothing where the operand was stored so by a fused cast: XLA cancels it against the one that presents it in its
logical shape. Scales that do not change along the sum are factors of rows; others are factors of rows in steps.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from scaledot.array import ScaledArray
from scaledot.kernels import operands
from scaledot.kernels.hopper.sizes import FLOAT8_ELEMENTS, LINE
from scaledot.kernels.operands import LabeledScale
from scaledot.kernels.spec import Problem
from scaledot.numerics import blocks

OUT_DTYPES = ("bfloat16", "float16", "float32")
ROW_BYTES = 128  # of a tile: the summed axis is filled up to whole ones
ROWS, COLUMNS, LAST = 8, 16, 64  # what the others must be multiples of; LAST where they lie last
MOST_INTEGERS = 2**31 >> 14  # products of 8-bit integers whose sum fits 32 bits
KINDS = {"float8": FLOAT8_ELEMENTS, "int8": tuple(f"int{bits}" for bits in range(2, 9))}
NAMES = {"float8": "8-bit floats", "int8": "integers of at most 8 bits"}


def result_reason(problem: Problem) -> str | None:
    """Why a result of that kind is not written."""
    if problem.out_dtype.name not in OUT_DTYPES:
        return f"it writes {', '.join(OUT_DTYPES)}, not {problem.out_dtype}"
    if problem.out_sharding is not None or any(operand.sharded for operand in problem.operands):
        return "operands or result are laid out along explicit mesh axes"
    for name, operand in problem.named:
        if operand.rotated and operand.rotated in problem.contraction.out:
            return f"{name} is rotated along {operand.rotated!r}, which is kept"
    return None if all(math.prod(o.shape) for o in problem.operands) else "an operand is empty"


def codes_reason(problem: Problem, kind: str) -> str | None:
    """Why 8-bit codes of that kind cannot be multiplied as they are."""
    summed = problem.contraction.contracted
    for name, operand in problem.named:
        if operand.format is None or operand.format.element not in KINDS[kind] or operand.format.scale != "float32":
            return f"{name} is {operand}; both sides must be {NAMES[kind]} with float32 scales"
        if operand.zero:
            return f"{name} has zero points"
        changes = any(c in summed for c in operand.varies)
        if changes and (len(summed) > 1 or operand.block_of(summed) != LINE):
            return f"the scale of {name} changes along the sum, and not every {LINE} elements of one axis"
    terms = math.prod(problem.lhs.size(c) for c in summed)
    if kind == "int8" and not scaled_in_steps(problem) and terms >= MOST_INTEGERS:
        return f"{terms} products of 8-bit integers may pass 2^31"
    return None


def scaled_in_steps(problem: Problem) -> bool:
    """Whether a scale changes along the sum."""
    return any(c in problem.contraction.contracted for operand in problem.operands for c in operand.varies)


def codes_of(q: ScaledArray) -> jax.Array:
    return operands.unpacked(q).data


def row_scales(factors: list[LabeledScale], q: ScaledArray, labels: str, free: str) -> jax.Array:
    """One number, or one for each row of the operand's matrix, whose axes are `free`."""
    if not factors:
        return jnp.ones(1, jnp.float32)
    (factor,) = factors
    if factor.values.size == 1:
        return factor.values.reshape(1)
    shape = tuple(q.shape[labels.index(c)] for c in free)
    return jnp.broadcast_to(operands.lay(LabeledScale(factor.values, labels), free), shape).reshape(-1)


def k_block_scales(q: ScaledArray, labels: str, free: str, summed: str, squares: bool, group: str = "") -> jax.Array:
    """Factors of the rows of an operand's matrix, (steps, rows); or of 128 rows each, where `squares` may be.

    Those of several matrices, one for each `group`, are (groups, steps, rows).
    """
    tiles = {summed: LINE}
    if squares and len(free) == 1 and blocks.expand(q.block, q.ndim)[labels.index(free)] == LINE:
        tiles[free] = LINE
    (factor,) = operands.block_scales(q, labels, tiles)
    order = group + summed + free
    values = factor.values.transpose([labels.index(c) for c in order])
    sizes = [-(-q.shape[labels.index(c)] // tiles.get(c, 1)) for c in order]
    return jnp.broadcast_to(values, sizes).reshape(*sizes[: len(group) + 1], -1)


def padded_scales(factors: jax.Array, in_steps: bool, whole: int, more: int = 0) -> jax.Array:
    """float32, the last axis filled up to a multiple of `whole`, and by `more`; one number for all stays one."""
    if factors.shape[-1] == 1 and not in_steps:
        return factors.astype(np.float32)
    missing = [(0, 0)] * (factors.ndim - 1) + [(0, -factors.shape[-1] % whole + more)]
    return jnp.pad(factors, missing).astype(np.float32)
