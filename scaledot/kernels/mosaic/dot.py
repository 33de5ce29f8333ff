"""Products on Hopper's tensor cores as rows of the kernel table: which problems they solve, and how those are laid.

`FLOAT8` multiplies 8-bit codes, whose scales may change along the sum every 128 elements, and `VALUES` the bfloat16
values of codes in shorter blocks. 8-bit operands lie with the summed axis last. A transposition that this needs costs
nothing where the operand was stored so by a fused cast, because XLA cancels it against the one that presents it in its
logical shape.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scaledot.array import ScaledArray
from scaledot.kernels import operands
from scaledot.kernels.forms import folds_exactly
from scaledot.kernels.manual import vary_as
from scaledot.kernels.mosaic import support, tuning
from scaledot.kernels.mosaic.casts import FLOAT8_ELEMENTS, LINE
from scaledot.kernels.operands import Factor, filled_up
from scaledot.kernels.spec import Operand, Problem
from scaledot.numerics import blocks

OUT_DTYPES = ("bfloat16", "float16", "float32")
ROW_BYTES = 128  # the summed axis is filled up with zeros to whole rows of a tile
ROWS, COLUMNS, LAST = 8, 16, 64  # what the others must be multiples of; LAST where they lie last


@dataclasses.dataclass(frozen=True)
class Product:
    """One of the two ways to multiply; `values`: bfloat16 values instead of 8-bit codes."""

    values: bool

    def supports(self, problem: Problem) -> str | None:
        return self.problem_reason(problem) or support.device_reason()

    def problem_reason(self, problem: Problem) -> str | None:
        """Why the kernel cannot compute it, whatever the device."""
        contraction = problem.contraction
        if problem.op != "dot" or contraction.batch:
            return "it multiplies two matrices, without batch axes"
        if problem.out_dtype.name not in OUT_DTYPES:
            return f"it writes {', '.join(OUT_DTYPES)}, not {problem.out_dtype}"
        if problem.out_sharding is not None or any(operand.sharded for operand in problem.operands):
            return "operands or result are laid out along explicit mesh axes"
        reason = _values_reason if self.values else _codes_reason
        for name, operand in problem.named:
            found = reason(name, operand, contraction.contracted)
            if found:
                return found
            if operand.rotated and operand.rotated in contraction.out:
                return f"{name} is rotated along {operand.rotated!r}, which is kept"
        return None if all(math.prod(o.shape) for o in problem.operands) else "an operand is empty"

    def how(self, problem: Problem) -> str:
        if self.values:
            return "bfloat16 products on Hopper's tensor cores, block scales folded in exactly, one rounding"
        if _scaled_in_steps(problem):
            return (
                f"float8 products on Hopper's tensor cores, scales applied to the sums of every {LINE} terms in float32"
            )
        sums = f"float32 sums of every {LINE} terms" if promotes(problem) else "sums in the tensor cores"
        return f"float8 products on Hopper's tensor cores, {sums}, scales applied before the one rounding"

    def run(self, problem: Problem, lhs: ScaledArray, rhs: ScaledArray, bias: jax.Array | None = None) -> jax.Array:
        from scaledot.kernels.mosaic.matmul import matmul

        contraction = problem.contraction
        in_steps = not self.values and _scaled_in_steps(problem)
        promote = in_steps or (not self.values and promotes(problem))
        a = self._side(lhs, contraction.lhs, contraction.lhs_free, contraction.contracted, ROWS)
        b = self._side(rhs, contraction.rhs, contraction.rhs_free, contraction.contracted, COLUMNS)
        shape = tuning.Shape(a.rows, b.rows, a.terms, a.matrix.dtype.itemsize, problem.out_dtype.itemsize, promote)
        config = tuning.config_for(shape)
        if in_steps:
            rows = _step_factors(lhs, contraction.lhs, contraction.lhs_free, contraction.contracted, squares=False)
            columns = _step_factors(rhs, contraction.rhs, contraction.rhs_free, contraction.contracted, squares=True)
            of_square = LINE if columns.shape[1] < b.rows else 1
        else:
            rows, columns, of_square = a.factors(), b.factors(), 1
        result = matmul(
            a.matrix,
            b.matrix,
            _filled_factors(rows, config.team_rows),
            _filled_factors(columns, config.team_columns // of_square),
            None if bias is None else _filled_bias(bias, config.team_columns),
            out_dtype=problem.out_dtype,
            config=config,
            promote=promote,
            programs=support.multiprocessors(),
            summed_first=(a.summed_first, b.summed_first),
        )
        result = vary_as(result, a.matrix, b.matrix)[: a.rows, : b.rows]
        sizes = dict(zip(contraction.lhs + contraction.rhs, lhs.shape + rhs.shape, strict=True))
        result = result.reshape([sizes[c] for c in contraction.natural])
        return result.transpose([contraction.natural.index(c) for c in contraction.out])

    def _side(self, q: ScaledArray, labels: str, free: str, along: str, multiple: int) -> "Side":
        data = operands.block_values(q, jnp.bfloat16) if self.values and not _is_values(q.format) else q.data
        summed_first = self.values and labels == along + free
        order = along + free if summed_first else free + along
        moved = data.transpose([labels.index(c) for c in order])
        rows = math.prod(q.shape[labels.index(c)] for c in free)
        terms = q.size // rows
        matrix = moved.reshape((terms, rows) if summed_first else (rows, terms))
        row_bytes = ROW_BYTES // matrix.dtype.itemsize
        filled = filled_up(matrix, row_bytes, LAST) if summed_first else filled_up(matrix, multiple, row_bytes)
        return Side(filled, rows, terms, summed_first, functools.partial(self._factors, q, labels, free, rows))

    def _factors(self, q: ScaledArray, labels: str, free: str, rows: int) -> jax.Array:
        """One number, or one for each row of the operand's matrix."""
        by_block = not self.values or _is_values(q.format)
        factors = operands.block_factors(q, labels, {}) if by_block else operands.level_factors(q, labels)
        if not factors:
            return jnp.ones(1, jnp.float32)
        (factor,) = factors
        if factor.values.size == 1:
            return factor.values.reshape(1)
        shape = tuple(q.shape[labels.index(c)] for c in free)
        return jnp.broadcast_to(operands.lay(Factor(factor.values, labels), free), shape).reshape(rows)


@dataclasses.dataclass(frozen=True)
class Side:
    """An operand as a matrix, filled up; its true sizes; and how to get what its rows are multiplied by."""

    matrix: jax.Array
    rows: int
    terms: int
    summed_first: bool
    factors: Callable[[], jax.Array]


FLOAT8 = Product(values=False)
VALUES = Product(values=True)


def _codes_reason(name: str, operand: Operand, summed: str) -> str | None:
    if operand.format is None or operand.format.element not in FLOAT8_ELEMENTS or operand.format.scale != "float32":
        return f"{name} is {operand}; both sides must be 8-bit floats with float32 scales"
    if not any(c in summed for c in operand.varies):
        return None
    if len(summed) == 1 and operand.block_of(summed) == LINE:
        return None
    return f"the scale of {name} changes along the sum, and not every {LINE} elements of one axis"


def _scaled_in_steps(problem: Problem) -> bool:
    """Whether a scale changes along the sum."""
    return any(c in problem.contraction.contracted for operand in problem.operands for c in operand.varies)


def _step_factors(q: ScaledArray, labels: str, free: str, summed: str, squares: bool) -> jax.Array:
    """Factors of the rows of an operand's matrix, (steps, rows); or of 128 rows each, where `squares` may be."""
    tiles = {summed: LINE}
    if squares and len(free) == 1 and blocks.expand(q.block, q.ndim)[labels.index(free)] == LINE:
        tiles[free] = LINE
    (factor,) = operands.block_factors(q, labels, tiles)
    values = factor.values.transpose([labels.index(c) for c in summed + free])
    steps = -(-q.shape[labels.index(summed)] // LINE)
    sizes = [-(-q.shape[labels.index(c)] // tiles.get(c, 1)) for c in free]
    return jnp.broadcast_to(values, (steps, *sizes)).reshape(steps, -1)


def _values_reason(name: str, operand: Operand, summed: str) -> str | None:
    if operand.format is None:
        return f"{name} is {operand}; both sides must be scaled"
    if not _is_values(operand.format) and not folds_exactly(operand.format, operand.zero):
        return f"a code of {name} ({operand.format.name}) times its scale does not fit bfloat16"
    if any(c in summed for c in operand.level_varies):
        return f"the tensor scale of {name} changes along the sum"
    return None


def _is_values(format: Any) -> bool:
    return format.element == "bfloat16"


def promotes(problem: Problem) -> bool:
    """Whether partial sums are moved into float32: where the caller asks for more than the default precision."""
    asked = problem.precision if isinstance(problem.precision, tuple) else (problem.precision,)
    fast = (None, "default", "fastest", "bfloat16", jax.lax.Precision.DEFAULT)
    return any(precision not in fast for precision in asked)


def _filled_bias(bias: jax.Array, whole: int) -> jax.Array:
    return jnp.pad(bias.reshape(-1).astype(np.float32), (0, -bias.size % whole))


def _filled_factors(factors: jax.Array, whole: int) -> jax.Array:
    if factors.shape == (1,):
        return factors
    missing = [(0, 0)] * (factors.ndim - 1) + [(0, -factors.shape[-1] % whole)]
    return jnp.pad(factors, missing).astype(np.float32)
