"""Products on Hopper's tensor cores as rows of the kernel table: which problems they solve, and how those are laid.

`FLOAT8` and `INT8` multiply 8-bit codes, whose scales may change along the sum every 128 elements, and `VALUES` the
bfloat16 values of codes in shorter blocks.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scaledot.array import ScaledArray
from scaledot.kernels import operands
from scaledot.kernels.formulations import folds_exactly
from scaledot.kernels.hopper import matmul_operands, support, tile_configs
from scaledot.kernels.hopper.sizes import LINE
from scaledot.kernels.operands import filled_up
from scaledot.kernels.spec import Operand, Problem, is_default_precision
from scaledot.parallel.types import vary_as


@dataclasses.dataclass(frozen=True)
class DotKernel:
    """One of the ways to multiply: "float8" and "int8" are codes as they are, "values" those that codes stand for."""

    kind: str

    @property
    def values(self) -> bool:
        return self.kind == "values"

    def problem_reason(self, problem: Problem) -> str | None:
        """Why the kernel cannot compute it, whatever the device."""
        if problem.op != "dot" or problem.contraction.batch:
            return "it multiplies two matrices, without batch axes"
        reason = _values_reason(problem) if self.values else matmul_operands.codes_reason(problem, self.kind)
        return reason or matmul_operands.result_reason(problem)

    def how(self, problem: Problem) -> str:
        if self.values:
            return "bfloat16 products on Hopper's tensor cores, block scales folded in exactly, one rounding"
        products = f"{self.kind} products on Hopper's tensor cores"
        if matmul_operands.scaled_in_steps(problem):
            return f"{products}, scales applied to the sums of every {LINE} terms in float32"
        sums = f"float32 sums of every {LINE} terms" if self.promotes(problem) else "sums in the tensor cores"
        return f"{products}, {sums}, scales applied before the one rounding"

    def promotes(self, problem: Problem) -> bool:
        """Whether partial sums of floats are moved into float32: where more than the default precision is asked for."""
        return self.kind == "float8" and not is_default_precision(problem.precision)

    def run(self, problem: Problem, lhs: ScaledArray, rhs: ScaledArray, bias: jax.Array | None = None) -> jax.Array:
        from scaledot.kernels.hopper.matmul import matmul

        contraction = problem.contraction
        in_steps = not self.values and matmul_operands.scaled_in_steps(problem)
        promote = in_steps or self.promotes(problem)
        a = self._side(lhs, contraction.lhs, contraction.lhs_free, contraction.contracted, matmul_operands.ROWS)
        b = self._side(rhs, contraction.rhs, contraction.rhs_free, contraction.contracted, matmul_operands.COLUMNS)
        if in_steps:
            k_block_scales = functools.partial(matmul_operands.k_block_scales, summed=contraction.contracted)
            rows = k_block_scales(lhs, contraction.lhs, contraction.lhs_free, squares=False)
            columns = k_block_scales(rhs, contraction.rhs, contraction.rhs_free, squares=True)
        else:
            rows, columns = a.factors(), b.factors()
        squares = in_steps and columns.shape[1] < b.rows
        element, sums = "bfloat16" if self.values else self.kind, tile_configs.sums_of(promote, in_steps, squares)
        shape = tile_configs.Shape(a.rows, b.rows, a.terms, element, problem.out_dtype.itemsize, sums)
        config = tile_configs.config_for(shape)
        result = matmul(
            a.matrix,
            b.matrix,
            matmul_operands.padded_scales(rows, in_steps, config.team_rows),
            matmul_operands.padded_scales(columns, in_steps, config.team_columns // (LINE if squares else 1)),
            None if bias is None else _filled_bias(bias, config.team_columns),
            out_dtype=problem.out_dtype,
            config=config,
            promote=promote,
            in_steps=in_steps,
            programs=support.sm_count(),
            k_first=(a.k_first, b.k_first),
        )
        # Under lax.scan XLA would run the kernel twice: for its consumers, and for the stacked output that has a copy.
        result = lax.optimization_barrier(vary_as(result, a.matrix, b.matrix))[: a.rows, : b.rows]
        sizes = dict(zip(contraction.lhs + contraction.rhs, lhs.shape + rhs.shape, strict=True))
        result = result.reshape([sizes[c] for c in contraction.natural])
        return result.transpose([contraction.natural.index(c) for c in contraction.out])

    def _side(self, q: ScaledArray, labels: str, free: str, along: str, multiple: int) -> "KernelOperand":
        folds = self.values and not _is_values(q.format)
        data = operands.block_values(q, jnp.bfloat16) if folds else matmul_operands.codes_of(q)
        k_first = self.values and labels == along + free
        order = along + free if k_first else free + along
        moved = data.transpose([labels.index(c) for c in order])
        rows = math.prod(q.shape[labels.index(c)] for c in free)
        terms = q.size // rows
        matrix = moved.reshape((terms, rows) if k_first else (rows, terms))
        row = matmul_operands.ROW_BYTES // matrix.dtype.itemsize
        filled = filled_up(matrix, row, matmul_operands.LAST) if k_first else filled_up(matrix, multiple, row)

        def factors() -> jax.Array:
            scale = operands.tensor_scales(q, labels) if folds else operands.block_scales(q, labels, {})
            return matmul_operands.row_scales(scale, q, labels, free)

        return KernelOperand(filled, rows, terms, k_first, factors)


@dataclasses.dataclass(frozen=True)
class KernelOperand:
    """An operand as a matrix, filled up; its true sizes; and how to get what its rows are multiplied by."""

    matrix: jax.Array
    rows: int
    terms: int
    k_first: bool
    factors: Callable[[], jax.Array]


FLOAT8 = DotKernel("float8")
INT8 = DotKernel("int8")
VALUES = DotKernel("values")


def _values_reason(problem: Problem) -> str | None:
    for name, operand in problem.named:
        found = _operand_values_reason(name, operand, problem.contraction.contracted)
        if found:
            return found
    return None


def _operand_values_reason(name: str, operand: Operand, summed: str) -> str | None:
    if operand.format is None:
        return f"{name} is {operand}; both sides must be scaled"
    if not _is_values(operand.format) and not folds_exactly(operand.format, operand.zero):
        return f"a code of {name} ({operand.format.name}) times its scale does not fit bfloat16"
    if any(c in summed for c in operand.level_varies):
        return f"the tensor scale of {name} changes along the sum"
    return None


def _is_values(format: Any) -> bool:
    return format.element == "bfloat16"


def _filled_bias(bias: jax.Array, whole: int) -> jax.Array:
    return jnp.pad(bias.reshape(-1).astype(np.float32), (0, -bias.size % whole))
