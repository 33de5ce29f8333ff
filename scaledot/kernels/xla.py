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
from scaledot.kernels.forms import Form, codes_form, is_float_on_cuda
from scaledot.kernels.operands import Factor
from scaledot.kernels.products import Steps, steps_of
from scaledot.kernels.spec import Operand, Problem, promoted
from scaledot.parallel.types import vary_as

Array = jax.Array | ScaledArray


class Side(NamedTuple):
    """An operand taken apart: what is multiplied, what the result is multiplied by, and the zero point."""

    values: jax.Array
    factors: list[Factor]
    zero: Factor | None = None


def run_form(problem: Problem, form: Form, lhs: Array, rhs: Array, group_sizes=None) -> jax.Array:
    """The contraction in that form."""
    steps = steps_of(problem, group_sizes)
    a, b = (
        _take_apart(o, x, form, folded) for o, x, folded in zip(problem.operands, (lhs, rhs), form.folded, strict=True)
    )
    if form.tiles:
        (a, left), (b, right) = (_without_tiles(side, dict(form.tiles)) for side in (a, b))
        total = _scaled(steps, _sum_of_tiles(problem, form, steps, (a, b)), left, right)
    else:
        total = _one_sum(problem, form, steps, (a, b))
    return steps.clear(total).astype(problem.out_dtype)


def _without_tiles(side: Side, tiles: operands.Tiles) -> tuple[Side, list[Factor]]:
    """The side with the factors of its tiles, and those that can wait for the result."""
    waiting = [f for f in side.factors if not f.varies(tiles)]
    return side._replace(factors=[f for f in side.factors if f.varies(tiles)]), waiting


def _scaled(steps: Steps, total: jax.Array, lhs: list[Factor], rhs: list[Factor]) -> jax.Array:
    return operands.scaled(total, [steps.lay(f) for f in lhs], [steps.lay(f) for f in rhs])


def run_dequantized(problem: Problem, form: Form, lhs: Array, rhs: Array, group_sizes=None) -> jax.Array:
    """Values first, in full, then one product."""
    values = []
    for operand, x in zip(problem.operands, (lhs, rhs), strict=True):
        if isinstance(x, ScaledArray):
            values.append(operands.all_values(x, form.carrier, operand.rotated in problem.contraction.out))
        else:
            values.append(x.astype(form.carrier))
    steps = steps_of(problem, group_sizes)
    return steps.clear(steps.product(*values, form.accumulator)).astype(problem.out_dtype)


def run_plain(problem: Problem, lhs: jax.Array, rhs: jax.Array, group_sizes=None) -> jax.Array:
    """jax.lax's own product, of operands promoted to one dtype."""
    if lhs.dtype != rhs.dtype:
        common = promoted(lhs.dtype, rhs.dtype)
        lhs, rhs = lhs.astype(common), rhs.astype(common)
    return steps_of(problem, group_sizes).product(lhs, rhs, problem.preferred)


def run_integers(problem: Problem, form: Form, lhs: Array, rhs: Array, group_sizes=None) -> jax.Array:
    """Integer codes; CUDA may multiply them as bfloat16."""
    if not is_float_on_cuda(problem, form):
        return run_form(problem, form, lhs, rhs, group_sizes)
    floats = codes_form(problem)
    assert isinstance(floats, Form), floats
    return lax.platform_dependent(
        lhs,
        rhs,
        group_sizes,
        cuda=functools.partial(run_form, problem, floats),
        default=functools.partial(run_form, problem, form),
    )


def run_codes(problem: Problem, form: Form, lhs: Array, rhs: Array, group_sizes=None) -> jax.Array:
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


def _take_apart(operand: Operand, x: Array, form: Form, folded: bool) -> Side:
    if not isinstance(x, ScaledArray):
        return Side(x if form.carrier is None else x.astype(form.carrier), [])
    tiles = dict(form.tiles)
    factors = operands.level_factors(x, operand.labels)
    if folded:
        return Side(operands.block_values(x, form.carrier), factors)
    factors = operands.block_factors(x, operand.labels, tiles) + factors
    if form.is_integer:
        return Side(operands.unpacked(x).data, factors, operands.zero_factor(x, operand.labels, tiles))
    return Side(x.data if form.carrier is None else operands.code_values(x, form.carrier), factors)


def _one_sum(problem: Problem, form: Form, steps: Steps, sides: tuple[Side, Side]) -> jax.Array:
    """One product, and the factors that belong to it alone."""
    a, b = sides
    total = steps.product(a.values, b.values, form.accumulator)
    if form.is_integer:
        total = _less_zeros(problem, steps, total, a, b).astype(jnp.float32)
    return _scaled(steps, total, a.factors, b.factors)


def _less_zeros(problem: Problem, steps: Steps, total: jax.Array, a: Side, b: Side) -> jax.Array:
    """The sum of (a - za)(b - zb) from the sum of ab: sums of codes, not further products."""
    if a.zero is not None:
        total = total - steps.lay(a.zero) * steps.code_sums(1, b.values)
    if b.zero is not None:
        total = total - steps.lay(b.zero) * steps.code_sums(0, a.values)
    if a.zero is not None and b.zero is not None:
        summed = (axis for axis, c in enumerate(problem.lhs.labels) if c in problem.contraction.contracted)
        products = math.prod(a.values.shape[axis] for axis in summed)
        total = total + steps.lay(a.zero) * steps.lay(b.zero) * np.int32(products)
    return total


def _sum_of_tiles(problem: Problem, form: Form, steps: Steps, sides: tuple[Side, Side]) -> jax.Array:
    """One tile after the other, so that no array of all partial sums is ever made."""
    tiles = dict(form.tiles)
    counts = {c: -(-problem.lhs.size(c) // size) for c, size in form.tiles}
    labels = problem.lhs.labels, problem.rhs.labels

    def cut(factor: Factor | None) -> jax.Array | None:
        return None if factor is None else operands.cut_factor(factor, tiles, counts)

    cuts = [
        (operands.cut(side.values, of, tiles), [cut(f) for f in side.factors], cut(side.zero))
        for side, of in zip(sides, labels, strict=True)
    ]

    def term(parts) -> jax.Array:
        a, b = (
            Side(values, [Factor(f, of) for f in factors], None if zero is None else Factor(zero, of))
            for (values, factors, zero), of in zip(parts, labels, strict=True)
        )
        return _one_sum(problem, form, steps, (a, b))

    # The sum starts from zeros of the type (sharding, varying axes) that the terms have.
    kind = jax.eval_shape(lambda parts: term(jax.tree.map(lambda x: x[0], parts)), cuts)
    zeros = vary_as(lax.full(kind.shape, 0, kind.dtype, sharding=kind.sharding), *jax.tree.leaves(cuts))
    return lax.scan(lambda total, parts: (total + term(parts), None), zeros, cuts)[0]
