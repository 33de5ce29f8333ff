"""The reference kernels: Formulations computed by XLA's own contractions, on every backend.

Kernels differ only in their Formulation (see `formulations`): the dtype of the contraction, the scales that are folded
into operands, and the tiles of contracting dims. Matmuls accumulate in float32 (int32 for integer codes), scales are
applied in float32, and the result is rounded once, to the output dtype. FP8 matmuls on CUDA accumulate in the reduced
precision of the tensor cores unless `precision="highest"`.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scaledot.array import ScaledArray
from scaledot.kernels import operands
from scaledot.kernels.formulations import Formulation, codes_formulation, is_float_on_cuda
from scaledot.kernels.operands import LabeledArray
from scaledot.kernels.spec import Operand, Problem, promoted
from scaledot.kernels.xla_contractions import ContractionOps, ops_for
from scaledot.parallel.types import vary_as

Array = jax.Array | ScaledArray


class DecodedOperand(NamedTuple):
    """The array of an operand that is contracted, and the scales and zero point that are applied to the result."""

    values: jax.Array
    scales: list[LabeledArray]
    zero: LabeledArray | None = None


def run_formulation(problem: Problem, formulation: Formulation, lhs: Array, rhs: Array, group_sizes=None) -> jax.Array:
    """Computes the contraction in this formulation."""
    ops = ops_for(problem, group_sizes)
    a, b = (
        _decode_operand(operand, x, formulation, is_folded)
        for operand, x, is_folded in zip(problem.operands, (lhs, rhs), formulation.folded, strict=True)
    )
    if formulation.tiles:
        (a, left), (b, right) = (_split_scales(operand, dict(formulation.tiles)) for operand in (a, b))
        total = _apply_scales(ops, _accumulate_tiles(problem, formulation, ops, (a, b)), left, right)
    else:
        total = _contract(problem, formulation, ops, (a, b))
    return ops.mask_ungrouped(total).astype(problem.out_dtype)


def _split_scales(operand: DecodedOperand, tiles: operands.Tiles) -> tuple[DecodedOperand, list[LabeledArray]]:
    """Returns the operand with the scales that vary along tiled dims, and its other scales, for the whole result."""
    for_result = [scale for scale in operand.scales if not scale.varies_along(tiles)]
    return operand._replace(scales=[scale for scale in operand.scales if scale.varies_along(tiles)]), for_result


def _apply_scales(ops: ContractionOps, total: jax.Array, lhs: list[LabeledArray], rhs: list[LabeledArray]) -> jax.Array:
    return operands.apply_scales(total, [ops.align(scale) for scale in lhs], [ops.align(scale) for scale in rhs])


def run_dequantized(problem: Problem, formulation: Formulation, lhs: Array, rhs: Array, group_sizes=None) -> jax.Array:
    """Dequantises both operands, then contracts them."""
    values = []
    for operand, x in zip(problem.operands, (lhs, rhs), strict=True):
        if isinstance(x, ScaledArray):
            unrotate = operand.rotated_label in problem.contraction.out
            values.append(operands.dequantized_values(x, formulation.operand_dtype, unrotate))
        else:
            values.append(x.astype(formulation.operand_dtype))
    ops = ops_for(problem, group_sizes)
    return ops.mask_ungrouped(ops.contract(*values, formulation.accumulator)).astype(problem.out_dtype)


def run_plain(problem: Problem, lhs: jax.Array, rhs: jax.Array, group_sizes=None) -> jax.Array:
    """Contracts plain operands by jax.lax, promoted to a common dtype."""
    if lhs.dtype != rhs.dtype:
        common = promoted(lhs.dtype, rhs.dtype)
        lhs, rhs = lhs.astype(common), rhs.astype(common)
    return ops_for(problem, group_sizes).contract(lhs, rhs, problem.preferred)


def run_integers(problem: Problem, formulation: Formulation, lhs: Array, rhs: Array, group_sizes=None) -> jax.Array:
    """Contracts integer codes; CUDA may do so in bfloat16."""
    if not is_float_on_cuda(problem, formulation):
        return run_formulation(problem, formulation, lhs, rhs, group_sizes)
    floats = codes_formulation(problem)
    assert isinstance(floats, Formulation), floats
    return lax.platform_dependent(
        lhs,
        rhs,
        group_sizes,
        cuda=functools.partial(run_formulation, problem, floats),
        default=functools.partial(run_formulation, problem, formulation),
    )


def run_codes(problem: Problem, formulation: Formulation, lhs: Array, rhs: Array, group_sizes=None) -> jax.Array:
    """Contracts unscaled codes; CUDA may contract 8-bit floats without an upcast."""
    if not formulation.float8_on_cuda:
        return run_formulation(problem, formulation, lhs, rhs, group_sizes)
    native = dataclasses.replace(formulation, operand_dtype=None)
    return lax.platform_dependent(
        lhs,
        rhs,
        cuda=functools.partial(run_formulation, problem, native),
        default=functools.partial(run_formulation, problem, formulation),
    )


def _decode_operand(operand: Operand, x: Array, formulation: Formulation, folded: bool) -> DecodedOperand:
    operand_dtype, tiles = formulation.operand_dtype, dict(formulation.tiles)
    if not isinstance(x, ScaledArray):
        return DecodedOperand(x if operand_dtype is None else x.astype(operand_dtype), [])
    scales = operands.tensor_scales(x, operand.labels)
    if folded:
        return DecodedOperand(operands.block_scaled_values(x, operand_dtype), scales)
    scales = operands.block_scales(x, operand.labels, tiles) + scales
    if formulation.is_integer:
        return DecodedOperand(operands.widen_int4(x).data, scales, operands.zero_points(x, operand.labels, tiles))
    return DecodedOperand(x.data if operand_dtype is None else operands.unscaled_values(x, operand_dtype), scales)


def _contract(
    problem: Problem, formulation: Formulation, ops: ContractionOps, decoded: tuple[DecodedOperand, DecodedOperand]
) -> jax.Array:
    """Contracts two decoded operands, or a tile of each, corrects for zero points, and applies the scales."""
    a, b = decoded
    total = ops.contract(a.values, b.values, formulation.accumulator)
    if formulation.is_integer:
        total = _correct_zero_points(problem, ops, total, a, b).astype(jnp.float32)
    return _apply_scales(ops, total, a.scales, b.scales)


def _correct_zero_points(
    problem: Problem, ops: ContractionOps, total: jax.Array, a: DecodedOperand, b: DecodedOperand
) -> jax.Array:
    """Returns sum (a - za)(b - zb) from sum ab, with sums of codes instead of further matmuls."""
    if a.zero is not None:
        total = total - ops.align(a.zero) * ops.operand_sums(1, b.values)
    if b.zero is not None:
        total = total - ops.align(b.zero) * ops.operand_sums(0, a.values)
    if a.zero is not None and b.zero is not None:
        contracting = (axis for axis, c in enumerate(problem.lhs.labels) if c in problem.contraction.contracting)
        products = math.prod(a.values.shape[axis] for axis in contracting)
        total = total + ops.align(a.zero) * ops.align(b.zero) * np.int32(products)
    return total


def _accumulate_tiles(
    problem: Problem, formulation: Formulation, ops: ContractionOps, decoded: tuple[DecodedOperand, DecodedOperand]
) -> jax.Array:
    """Contracts one tile after the other and adds up the scaled results, which are never all in memory."""
    tiles = dict(formulation.tiles)
    counts = {c: -(-problem.lhs.size(c) // size) for c, size in formulation.tiles}
    labels = problem.lhs.labels, problem.rhs.labels

    def split(scale: LabeledArray | None) -> jax.Array | None:
        return None if scale is None else operands.split_scale(scale, tiles, counts)

    all_tiles = [
        (operands.split_tiles(x.values, of, tiles), [split(scale) for scale in x.scales], split(x.zero))
        for x, of in zip(decoded, labels, strict=True)
    ]

    def contract_tile(tile) -> jax.Array:
        a, b = (
            DecodedOperand(
                values, [LabeledArray(scale, of) for scale in scales], None if zero is None else LabeledArray(zero, of)
            )
            for (values, scales, zero), of in zip(tile, labels, strict=True)
        )
        return _contract(problem, formulation, ops, (a, b))

    # The accumulator starts as zeros of the type (sharding, varying mesh axes) of a tile's result.
    kind = jax.eval_shape(lambda tiles: contract_tile(jax.tree.map(lambda x: x[0], tiles)), all_tiles)
    zeros = vary_as(lax.full(kind.shape, 0, kind.dtype, sharding=kind.sharding), *jax.tree.leaves(all_tiles))
    return lax.scan(lambda total, tile: (total + contract_tile(tile), None), zeros, all_tiles)[0]
