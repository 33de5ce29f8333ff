"""Matmuls on Hopper's tensor cores as entries of the kernel table: checks of problems, and preparation of operands.

`FLOAT8` and `INT8` multiply 8-bit codes, with float32 scales per tensor, per row, or in blocks of 128 along K.
`BFLOAT16` multiplies dequantised values: codes times block scales, if that product is exact in bfloat16 (MX
formats and NVFP4).
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
from scaledot.kernels.hopper.scale_blocks import SCALE_BLOCK
from scaledot.kernels.hopper.swizzle_atom import K_STEP_BYTES
from scaledot.kernels.operands import Bias, OuterProduct, pad_to_multiples
from scaledot.kernels.spec import Operand, Problem, is_default_precision
from scaledot.parallel.types import vary_as


@dataclasses.dataclass(frozen=True)
class DotKernel:
    """An entry of the kernel table. element: "float8" and "int8" multiply codes, "bfloat16" dequantised values."""

    element: str

    @property
    def dequantizes(self) -> bool:
        return self.element == "bfloat16"

    def problem_reason(self, problem: Problem) -> str | None:
        """Returns why the kernel cannot compute a problem on any device, or None if it can."""
        if problem.op != "dot" or problem.contraction.batch:
            return "it multiplies two matrices, without batch dims"
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

    def run(self, problem: Problem, lhs: ScaledArray, rhs: ScaledArray, bias: Bias | None = None) -> jax.Array:
        from scaledot.kernels.hopper.matmul import matmul

        contraction = problem.contraction
        has_k_block_scales = not self.dequantizes and matmul_operands.has_k_block_scales(problem)
        promote = has_k_block_scales or self.promotes(problem)
        a = self._operand(
            lhs, contraction.lhs, contraction.lhs_free, contraction.contracting, matmul_operands.M_MULTIPLE
        )
        b = self._operand(
            rhs, contraction.rhs, contraction.rhs_free, contraction.contracting, matmul_operands.N_MULTIPLE
        )
        if has_k_block_scales:
            scales_of = functools.partial(matmul_operands.block_scale_matrix, contracted=contraction.contracting)
            a_scales = scales_of(lhs, contraction.lhs, contraction.lhs_free, allow_square=False)
            b_scales = scales_of(rhs, contraction.rhs, contraction.rhs_free, allow_square=True)
        else:
            a_scales, b_scales = a.scales(), b.scales()
        square_blocks = has_k_block_scales and b_scales.shape[1] < b.mn
        accumulation = tile_configs.accumulation_mode(promote, has_k_block_scales, square_blocks)
        gemm = tile_configs.GemmKey(a.mn, b.mn, a.k, self.element, problem.out_dtype.itemsize, accumulation)
        config = tile_configs.config_for(gemm)
        n_multiple = config.cluster_tile_n // (SCALE_BLOCK if square_blocks else 1)
        bias_rows, bias_columns = bias if isinstance(bias, OuterProduct) else (None, bias)
        result = matmul(
            a.matrix,
            b.matrix,
            matmul_operands.padded_scales(a_scales, has_k_block_scales, config.cluster_tile_m),
            matmul_operands.padded_scales(b_scales, has_k_block_scales, n_multiple),
            None if bias_columns is None else _padded_bias(bias_columns, config.cluster_tile_n),
            None if bias_rows is None else _padded_bias(bias_rows, config.cluster_tile_m),
            out_dtype=problem.out_dtype,
            config=config,
            promote=promote,
            has_k_block_scales=has_k_block_scales,
            ctas=support.sm_count(),
            mn_major=(a.mn_major, b.mn_major),
        )
        # Without the barrier XLA runs the kernel twice under lax.scan: for its consumers, and for the stacked output.
        result = lax.optimization_barrier(vary_as(result, a.matrix, b.matrix))[: a.mn, : b.mn]
        sizes = dict(zip(contraction.lhs + contraction.rhs, lhs.shape + rhs.shape, strict=True))
        result = result.reshape([sizes[c] for c in contraction.dot_general_out])
        return result.transpose([contraction.dot_general_out.index(c) for c in contraction.out])

    def _operand(self, q: ScaledArray, labels: str, free: str, contracted: str, mn_multiple: int) -> "KernelOperand":
        folds_block_scales = self.dequantizes and not _is_bfloat16(q.format)
        data = operands.block_scaled_values(q, jnp.bfloat16) if folds_block_scales else matmul_operands.codes_of(q)
        mn_major = self.dequantizes and labels == contracted + free
        order = contracted + free if mn_major else free + contracted
        mn = math.prod(q.shape[labels.index(c)] for c in free)
        k = q.size // mn
        matrix = data.transpose([labels.index(c) for c in order]).reshape((k, mn) if mn_major else (mn, k))
        k_multiple = K_STEP_BYTES // matrix.dtype.itemsize
        multiples = (k_multiple, matmul_operands.MINOR_MULTIPLE) if mn_major else (mn_multiple, k_multiple)

        def scales() -> jax.Array:
            by_label = operands.tensor_scales(q, labels) if folds_block_scales else operands.block_scales(q, labels, {})
            return matmul_operands.row_scales(by_label, q, labels, free)

        return KernelOperand(pad_to_multiples(matrix, *multiples), mn, k, mn_major, scales)


@dataclasses.dataclass(frozen=True)
class KernelOperand:
    """An operand of `matmul`: A is (M, K), B is (N, K), and `mn` is M or N.

    matrix: padded, (mn, K) or, with `mn_major`, (K, mn). mn, k: sizes before padding.
    scales: computes the scales that do not change along K, (1,) or (mn,); not called if there are scales that do.
    """

    matrix: jax.Array
    mn: int
    k: int
    mn_major: bool
    scales: Callable[[], jax.Array]


FLOAT8 = DotKernel("float8")
INT8 = DotKernel("int8")
BFLOAT16 = DotKernel("bfloat16")


def _bfloat16_reason(problem: Problem) -> str | None:
    reasons = (
        _operand_reason(name, operand, problem.contraction.contracting) for name, operand in problem.named_operands
    )
    return next(filter(None, reasons), None)


def _operand_reason(name: str, operand: Operand, contracted: str) -> str | None:
    if operand.format is None:
        return f"{name} is {operand}; both operands must be quantised"
    if not _is_bfloat16(operand.format) and not folds_exactly(operand.format, operand.has_zero_point):
        return f"a code of {name} ({operand.format.name}) times its scale is not exact in bfloat16"
    if any(c in contracted for c in operand.tensor_scale_varies_along):
        return f"the tensor scale of {name} varies along K; it must be constant there"
    return None


def _is_bfloat16(format: Any) -> bool:
    return format.element == "bfloat16"


def _padded_bias(bias: jax.Array, multiple: int) -> jax.Array:
    return jnp.pad(bias.reshape(-1).astype(np.float32), (0, -bias.size % multiple))
