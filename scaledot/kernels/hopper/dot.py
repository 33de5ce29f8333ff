"""Matmuls on Hopper's tensor cores as rows of the kernel table: checks of problems, and preparation of operands.

`FLOAT8` and `INT8` multiply 8-bit codes, with float32 scales per tensor, per row, or in blocks of 128 along K.
`BFLOAT16` multiplies dequantised values: codes times block scales, where that product is exact in bfloat16 (MXFP8,
NVFP4).
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
from scaledot.kernels.hopper.sizes import BLOCK
from scaledot.kernels.operands import pad_to_multiples
from scaledot.kernels.spec import Operand, Problem, is_default_precision
from scaledot.parallel.types import vary_as


@dataclasses.dataclass(frozen=True)
class DotKernel:
    """A row of the kernel table. element: "float8" and "int8" multiply codes, "bfloat16" dequantised values."""

    element: str

    @property
    def dequantizes(self) -> bool:
        return self.element == "bfloat16"

    def problem_reason(self, problem: Problem) -> str | None:
        """Returns why the kernel cannot compute a problem on any device, or None if it can."""
        if problem.op != "dot" or problem.contraction.batch:
            return "it multiplies two matrices, without batch axes"
        reason = _bfloat16_reason(problem) if self.dequantizes else matmul_operands.codes_reason(problem, self.element)
        return reason or matmul_operands.result_reason(problem)

    def describe(self, problem: Problem) -> str:
        """The line of `explain` for a problem that the kernel computes."""
        matmul = f"{self.element} matmul on Hopper's tensor cores"
        if self.dequantizes:
            return f"{matmul}, block scales folded into the operands exactly, float32 accumulation, one rounding"
        return f"{matmul}, {matmul_operands.accumulation(problem, self.promotes(problem))}, one rounding"

    def promotes(self, problem: Problem) -> bool:
        """Whether the requested precision promotes float8 accumulators to float32; blockwise scales always do."""
        return self.element == "float8" and not is_default_precision(problem.precision)

    def run(self, problem: Problem, lhs: ScaledArray, rhs: ScaledArray, bias: jax.Array | None = None) -> jax.Array:
        from scaledot.kernels.hopper.matmul import matmul

        contraction = problem.contraction
        blockwise = not self.dequantizes and matmul_operands.is_blockwise(problem)
        promote = blockwise or self.promotes(problem)
        a = self._operand(
            lhs, contraction.lhs, contraction.lhs_free, contraction.contracting, matmul_operands.M_MULTIPLE
        )
        b = self._operand(
            rhs, contraction.rhs, contraction.rhs_free, contraction.contracting, matmul_operands.N_MULTIPLE
        )
        if blockwise:
            scales_of = functools.partial(matmul_operands.k_block_scales, contracted=contraction.contracting)
            row_scales = scales_of(lhs, contraction.lhs, contraction.lhs_free, allow_square=False)
            column_scales = scales_of(rhs, contraction.rhs, contraction.rhs_free, allow_square=True)
        else:
            row_scales, column_scales = a.row_scales(), b.row_scales()
        square_blocks = blockwise and column_scales.shape[1] < b.rows
        accumulation = tile_configs.accumulation_mode(promote, blockwise, square_blocks)
        shape = tile_configs.Shape(a.rows, b.rows, a.k, self.element, problem.out_dtype.itemsize, accumulation)
        config = tile_configs.config_for(shape)
        column_multiple = config.cluster_columns // (BLOCK if square_blocks else 1)
        result = matmul(
            a.matrix,
            b.matrix,
            matmul_operands.padded_scales(row_scales, blockwise, config.cluster_rows),
            matmul_operands.padded_scales(column_scales, blockwise, column_multiple),
            None if bias is None else _padded_bias(bias, config.cluster_columns),
            out_dtype=problem.out_dtype,
            config=config,
            promote=promote,
            blockwise=blockwise,
            ctas=support.sm_count(),
            k_first=(a.k_first, b.k_first),
        )
        # Without the barrier XLA runs the kernel twice under lax.scan: for its consumers, and for the stacked output.
        result = lax.optimization_barrier(vary_as(result, a.matrix, b.matrix))[: a.rows, : b.rows]
        sizes = dict(zip(contraction.lhs + contraction.rhs, lhs.shape + rhs.shape, strict=True))
        result = result.reshape([sizes[c] for c in contraction.dot_general_out])
        return result.transpose([contraction.dot_general_out.index(c) for c in contraction.out])

    def _operand(self, q: ScaledArray, labels: str, free: str, contracted: str, multiple: int) -> "KernelOperand":
        folds = self.dequantizes and not _is_bfloat16(q.format)
        data = operands.block_scaled_values(q, jnp.bfloat16) if folds else matmul_operands.codes_of(q)
        k_first = self.dequantizes and labels == contracted + free
        order = contracted + free if k_first else free + contracted
        rows = math.prod(q.shape[labels.index(c)] for c in free)
        k = q.size // rows
        matrix = data.transpose([labels.index(c) for c in order]).reshape((k, rows) if k_first else (rows, k))
        k_multiple = matmul_operands.K_BYTES // matrix.dtype.itemsize
        multiples = (k_multiple, matmul_operands.MINOR_MULTIPLE) if k_first else (multiple, k_multiple)

        def row_scales() -> jax.Array:
            scales = operands.tensor_scales(q, labels) if folds else operands.block_scales(q, labels, {})
            return matmul_operands.row_scales(scales, q, labels, free)

        return KernelOperand(pad_to_multiples(matrix, *multiples), rows, k, k_first, row_scales)


@dataclasses.dataclass(frozen=True)
class KernelOperand:
    """An operand of `matmul`: its padded matrix (rows, K), or (K, rows) with `k_first`, and its sizes before padding.

    row_scales: computes its scales, (1,) or (rows,); not called if scales are blockwise.
    """

    matrix: jax.Array
    rows: int
    k: int
    k_first: bool
    row_scales: Callable[[], jax.Array]


FLOAT8 = DotKernel("float8")
INT8 = DotKernel("int8")
BFLOAT16 = DotKernel("bfloat16")


def _bfloat16_reason(problem: Problem) -> str | None:
    contracted = problem.contraction.contracting
    reasons = (_operand_reason(name, operand, contracted) for name, operand in problem.named_operands)
    return next(filter(None, reasons), None)


def _operand_reason(name: str, operand: Operand, contracted: str) -> str | None:
    if operand.format is None:
        return f"{name} is {operand}; both operands must be quantised"
    if not _is_bfloat16(operand.format) and not folds_exactly(operand.format, operand.has_zero_point):
        return f"a code of {name} ({operand.format.name}) times its scale is not exact in bfloat16"
    if any(c in contracted for c in operand.tensor_scale_varies_along):
        return f"the tensor scale of {name} changes along the contracting dim"
    return None


def _is_bfloat16(format: Any) -> bool:
    return format.element == "bfloat16"


def _padded_bias(bias: jax.Array, multiple: int) -> jax.Array:
    return jnp.pad(bias.reshape(-1).astype(np.float32), (0, -bias.size % multiple))
