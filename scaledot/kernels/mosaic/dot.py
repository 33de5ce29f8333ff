"""Products of 8-bit floats as a row of the kernel table: which problems the Hopper kernel solves, and how they are laid.

Both operands are given to it as matrices with the summed axis last. A transposition that this needs costs nothing where
the operand was stored so by a fused cast, because XLA cancels it against the one that presents it in its logical shape.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from scaledot.array import ScaledArray
from scaledot.kernels import operands
from scaledot.kernels.manual import vary_as
from scaledot.kernels.mosaic import support, tuning
from scaledot.kernels.operands import Factor
from scaledot.kernels.spec import Operand, Problem

OUT_DTYPES = ("bfloat16", "float16", "float32")
ELEMENTS = ("float8_e4m3fn", "float8_e5m2")
# What M, N and K must be multiples of; operands are filled up with zeros.
ROWS, COLUMNS, TERMS = 8, 16, 128


def supports(problem: Problem) -> str | None:
    return problem_reason(problem) or support.device_reason()


def problem_reason(problem: Problem) -> str | None:
    """Why the kernel cannot compute it, whatever the device."""
    contraction = problem.contraction
    if problem.op != "dot" or contraction.batch:
        return "it multiplies two matrices, without batch axes"
    if problem.out_dtype.name not in OUT_DTYPES:
        return f"it writes {', '.join(OUT_DTYPES)}, not {problem.out_dtype}"
    if problem.out_sharding is not None or any(operand.sharded for operand in problem.operands):
        return "operands or result are laid out along explicit mesh axes"
    for name, operand in problem.named:
        reason = _operand_reason(name, operand, contraction.contracted, contraction.out)
        if reason:
            return reason
    return None if all(math.prod(o.shape) for o in problem.operands) else "an operand is empty"


def _operand_reason(name: str, operand: Operand, summed: str, out: str) -> str | None:
    if operand.format is None or operand.format.element not in ELEMENTS or operand.format.scale != "float32":
        return f"{name} is {operand}; both sides must be 8-bit floats with float32 scales"
    if any(c in summed for c in operand.varies):
        return f"the scale of {name} changes along the sum"
    if operand.rotated and operand.rotated in out:
        return f"{name} is rotated along {operand.rotated!r}, which is kept"
    return None


def how(problem: Problem) -> str:
    sums = "float32 sums of every 128 terms" if promotes(problem) else "sums in the tensor cores"
    return f"float8 products on Hopper's tensor cores, {sums}, scales applied before the one rounding"


def promotes(problem: Problem) -> bool:
    """Whether partial sums are moved into float32: where the caller asks for more than the default precision."""
    asked = problem.precision if isinstance(problem.precision, tuple) else (problem.precision,)
    fast = (None, "default", "fastest", "bfloat16", jax.lax.Precision.DEFAULT)
    return any(precision not in fast for precision in asked)


def run(problem: Problem, lhs: ScaledArray, rhs: ScaledArray, group_sizes=None) -> jax.Array:
    from scaledot.kernels.mosaic.matmul import matmul

    contraction = problem.contraction
    along = contraction.contracted
    a, b = (
        _matrix(q.data, of, free, along)
        for q, of, free in ((lhs, contraction.lhs, contraction.lhs_free), (rhs, contraction.rhs, contraction.rhs_free))
    )
    (m, k), (n, _) = a.shape, b.shape
    config = tuning.config_for(tuning.Shape(m, n, k, a.dtype.itemsize, problem.out_dtype.itemsize, promotes(problem)))
    left = _factors(lhs, contraction.lhs, contraction.lhs_free, config.program_rows)
    right = _factors(rhs, contraction.rhs, contraction.rhs_free, config.program_columns)
    result = matmul(
        _filled(a, ROWS, TERMS),
        _filled(b, COLUMNS, TERMS),
        left,
        right,
        None,
        out_dtype=problem.out_dtype,
        config=config,
        promote=promotes(problem),
        programs=support.multiprocessors(),
    )
    result = vary_as(result, a, b)[:m, :n]
    sizes = dict(zip(contraction.lhs + contraction.rhs, lhs.shape + rhs.shape, strict=True))
    result = result.reshape([sizes[c] for c in contraction.natural])
    return result.transpose([contraction.natural.index(c) for c in contraction.out])


def _matrix(data: jax.Array, labels: str, free: str, along: str) -> jax.Array:
    moved = data.transpose([labels.index(c) for c in free + along])
    rows = math.prod(moved.shape[: len(free)])
    return moved.reshape(rows, data.size // rows)


def _filled(x: jax.Array, rows: int, columns: int) -> jax.Array:
    missing = -x.shape[0] % rows, -x.shape[1] % columns
    return jnp.pad(x, [(0, more) for more in missing]) if any(missing) else x


def _factors(q: ScaledArray, labels: str, free: str, whole: int) -> jax.Array:
    """One number, or one for each row of the operand's matrix, filled up to whole tiles."""
    (factor,) = operands.block_factors(q, labels, {})
    if factor.values.size == 1:
        return factor.values.reshape(1)
    rows = tuple(q.shape[labels.index(c)] for c in free)
    values = jnp.broadcast_to(operands.lay(Factor(factor.values, labels), free), rows).reshape(-1)
    return jnp.pad(values, (0, -values.size % whole)).astype(np.float32)
