"""The reference kernels: forms carried out by XLA's own products, on every backend.

They differ only in their Form (see `forms`): which dtype is multiplied, what is folded, how the sum is cut.
Sums are float32 (or exact in int32), scales are applied in float32, and there is one rounding to the result.
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
from scaledot.kernels.formulations import Formulation, codes_form, is_float_on_cuda
from scaledot.kernels.operands import LabeledScale
from scaledot.kernels.spec import Operand, Problem, promoted
from scaledot.kernels.xla_contractions import ContractionOps, ops_for
from scaledot.parallel.types import vary_as

Array = jax.Array | ScaledArray


class DecodedOperand(NamedTuple):
    """An operand taken apart: what is multiplied, what the result is multiplied by, and the zero point."""

    values: jax.Array
    factors: list[LabeledScale]
    zero: LabeledScale | None = None


def run_form(problem: Problem, form: Formulation, lhs: Array, rhs: Array, group_sizes=None) -> jax.Array:
    """The contraction in that form."""
    steps = ops_for(problem, group_sizes)
    a, b = (
        _take_apart(o, x, form, folded) for o, x, folded in zip(problem.operands, (lhs, rhs), form.folded, strict=True)
    )
    if form.tiles:
        (a, left), (b, right) = (_without_tiles(side, dict(form.tiles)) for side in (a, b))
        total = _scaled(steps, _sum_of_tiles(problem, form, steps, (a, b)), left, right)
    else:
        total = _one_sum(problem, form, steps, (a, b))
    return steps.clear(total).astype(problem.out_dtype)


def _without_tiles(side: DecodedOperand, tiles: operands.Tiles) -> tuple[DecodedOperand, list[LabeledScale]]:
    """The side with the factors of its tiles, and those that can wait for the result."""
    waiting = [f for f in side.factors if not f.varies(tiles)]
    return side._replace(factors=[f for f in side.factors if f.varies(tiles)]), waiting


def _scaled(steps: ContractionOps, total: jax.Array, lhs: list[LabeledScale], rhs: list[LabeledScale]) -> jax.Array:
    return operands.scaled(total, [steps.lay(f) for f in lhs], [steps.lay(f) for f in rhs])


def run_dequantized(problem: Problem, form: Formulation, lhs: Array, rhs: Array, group_sizes=None) -> jax.Array:
    """Values first, in full, then one product."""
    values = []
    for operand, x in zip(problem.operands, (lhs, rhs), strict=True):
        if isinstance(x, ScaledArray):
            values.append(operands.all_values(x, form.carrier, operand.rotated in problem.contraction.out))
        else:
            values.append(x.astype(form.carrier))
    steps = ops_for(problem, group_sizes)
    return steps.clear(steps.product(*values, form.accumulator)).astype(problem.out_dtype)


def run_plain(problem: Problem, lhs: jax.Array, rhs: jax.Array, group_sizes=None) -> jax.Array:
    """jax.lax's own product, of operands promoted to one dtype."""
    if lhs.dtype != rhs.dtype:
        common = promoted(lhs.dtype, rhs.dtype)
        lhs, rhs = lhs.astype(common), rhs.astype(common)
    return ops_for(problem, group_sizes).product(lhs, rhs, problem.preferred)


def run_integers(problem: Problem, form: Formulation, lhs: Array, rhs: Array, group_sizes=None) -> jax.Array:
    """Integer codes; CUDA may multiply them as bfloat16."""
    if not is_float_on_cuda(problem, form):
        return run_form(problem, form, lhs, rhs, group_sizes)
    floats = codes_form(problem)
    assert isinstance(floats, Formulation), floats
    return lax.platform_dependent(
        lhs,
        rhs,
        group_sizes,
        cuda=functools.partial(run_form, problem, floats),
        default=functools.partial(run_form, problem, form),
    )


def run_codes(problem: Problem, form: Formulation, lhs: Array, rhs: Array, group_sizes=None) -> jax.Array:
    """Bare codes; CUDA may multiply 8-bit floats as they are."""
    if not form.float8_on_cuda:
        return run_form(problem, form, lhs, rhs, group_sizes)
    native = dataclasses.replace(form, carrier=None)
    return lax.platform_dependent(
        lhs,
        rhs,
        cuda=functools.partial(run_form, problem, native),
        default=functools.partial(run_form, problem, form),
    )


def _take_apart(operand: Operand, x: Array, form: Formulation, folded: bool) -> DecodedOperand:
    if not isinstance(x, ScaledArray):
        return DecodedOperand(x if form.carrier is None else x.astype(form.carrier), [])
    tiles = dict(form.tiles)
    factors = operands.tensor_scales(x, operand.labels)
    if folded:
        return DecodedOperand(operands.block_values(x, form.carrier), factors)
    factors = operands.block_scales(x, operand.labels, tiles) + factors
    if form.is_integer:
        return DecodedOperand(operands.unpacked(x).data, factors, operands.zero_points(x, operand.labels, tiles))
    return DecodedOperand(x.data if form.carrier is None else operands.code_values(x, form.carrier), factors)


def _one_sum(
    problem: Problem, form: Formulation, steps: ContractionOps, sides: tuple[DecodedOperand, DecodedOperand]
) -> jax.Array:
    """One product, and the factors that belong to it alone."""
    a, b = sides
    total = steps.product(a.values, b.values, form.accumulator)
    if form.is_integer:
        total = _less_zeros(problem, steps, total, a, b).astype(jnp.float32)
    return _scaled(steps, total, a.factors, b.factors)


def _less_zeros(
    problem: Problem, steps: ContractionOps, total: jax.Array, a: DecodedOperand, b: DecodedOperand
) -> jax.Array:
    """The sum of (a - za)(b - zb) from the sum of ab: sums of codes, not further products."""
    if a.zero is not None:
        total = total - steps.lay(a.zero) * steps.code_sums(1, b.values)
    if b.zero is not None:
        total = total - steps.lay(b.zero) * steps.code_sums(0, a.values)
    if a.zero is not None and b.zero is not None:
        summed = (axis for axis, c in enumerate(problem.lhs.labels) if c in problem.contraction.contracting)
        products = math.prod(a.values.shape[axis] for axis in summed)
        total = total + steps.lay(a.zero) * steps.lay(b.zero) * np.int32(products)
    return total


def _sum_of_tiles(
    problem: Problem, form: Formulation, steps: ContractionOps, sides: tuple[DecodedOperand, DecodedOperand]
) -> jax.Array:
    """One tile after the other, so that no array of all partial sums is ever made."""
    tiles = dict(form.tiles)
    counts = {c: -(-problem.lhs.size(c) // size) for c, size in form.tiles}
    labels = problem.lhs.labels, problem.rhs.labels

    def cut(factor: LabeledScale | None) -> jax.Array | None:
        return None if factor is None else operands.tile_scales(factor, tiles, counts)

    cuts = [
        (operands.cut(side.values, of, tiles), [cut(f) for f in side.factors], cut(side.zero))
        for side, of in zip(sides, labels, strict=True)
    ]

    def term(parts) -> jax.Array:
        a, b = (
            DecodedOperand(
                values, [LabeledScale(f, of) for f in factors], None if zero is None else LabeledScale(zero, of)
            )
            for (values, factors, zero), of in zip(parts, labels, strict=True)
        )
        return _one_sum(problem, form, steps, (a, b))

    # The sum starts from zeros of the type (sharding, varying axes) that the terms have.
    kind = jax.eval_shape(lambda parts: term(jax.tree.map(lambda x: x[0], parts)), cuts)
    zeros = vary_as(lax.full(kind.shape, 0, kind.dtype, sharding=kind.sharding), *jax.tree.leaves(cuts))
    return lax.scan(lambda total, parts: (total + term(parts), None), zeros, cuts)[0]
