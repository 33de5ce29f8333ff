"""One product of two arrays for each kind of contraction, and the labels' way from an operand to its result.

`ops_for(problem)` gives the three things that a form needs: the product itself, a factor laid on the result,
and sums of codes for the correction of zero points.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from scaledot.contraction import Contraction
from scaledot.kernels.operands import LabeledScale, lay
from scaledot.kernels.spec import Problem


class ContractionOps(NamedTuple):
    """product(a, b, accumulator), lay(factor), code_sums(side, codes), all in the labels of the result.

    clear(result) puts zeros where nothing was summed, whatever the scales there are.
    """

    product: Callable[..., jax.Array]
    lay: Callable[[LabeledScale], jax.Array]
    code_sums: Callable[[int, jax.Array], jax.Array]
    clear: Callable[[jax.Array], jax.Array] = lambda x: x


def ops_for(problem: Problem, group_sizes: jax.Array | None) -> ContractionOps:
    if problem.op == "ragged_dot":
        return _ragged_steps(problem, group_sizes)
    return _conv_steps(problem) if problem.op == "conv" else _dot_steps(problem)


def precision_of(problem: Problem, dtype) -> Any:
    """The caller's precision; float32 products are full ones, here and in gradients, unless someone asked otherwise."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return None
    default = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    asked = problem.precision is not None or default is not None
    if asked or problem.is_plain:
        return problem.precision
    # The transpose of a bfloat16 product multiplies float32 cotangents, under the precision given here.
    differentiable = problem.lhs.format is None or problem.rhs.format is None
    return lax.Precision.HIGHEST if dtype == np.float32 or differentiable else None


def _integer_product(contraction: Contraction, out: str, product: Callable[..., jax.Array], a, b) -> jax.Array:
    """An int8 product in the form in which XLA's GPU computes it reliably.

    Under jax 0.11.2 on an H200 some come out doubled, such as a Triton product in steps of 16. XLA can compare with
    cuBLAS when rows, columns and terms are multiples of four in number, and nothing before or after is fused in. So
    axes are padded with zeros, and barriers keep the product apart; short sums do without integers (`forms`).
    """
    sizes = dict(zip(contraction.lhs + contraction.rhs, a.shape + b.shape, strict=True))
    padded = dict(sizes)
    for group in (contraction.lhs_free, contraction.contracting, contraction.rhs_free):
        if group and math.prod(sizes[c] for c in group) % 4:
            padded[group[-1]] += -sizes[group[-1]] % 4

    def filled(x: jax.Array, labels: str) -> jax.Array:
        missing = [(0, padded[c] - sizes[c]) for c in labels]
        return jnp.pad(x, missing) if any(more for _, more in missing) else x

    a, b = lax.optimization_barrier((filled(a, contraction.lhs), filled(b, contraction.rhs)))
    y = lax.optimization_barrier(product(a, b))
    return y if padded == sizes else y[tuple(slice(sizes.get(c)) for c in out)]


def _dot_steps(problem: Problem) -> ContractionOps:
    contraction = problem.contraction
    order = tuple(contraction.dot_general_out.index(c) for c in contraction.out)

    def product(a: jax.Array, b: jax.Array, accumulator) -> jax.Array:
        dot = functools.partial(
            lax.dot_general,
            dimension_numbers=contraction.dimension_numbers,
            precision=precision_of(problem, a.dtype),
            preferred_element_type=accumulator,
            out_sharding=reordered(problem.out_sharding, contraction.out, contraction.dot_general_out),
        )
        y = _integer_product(contraction, contraction.dot_general_out, dot, a, b) if a.dtype == jnp.int8 else dot(a, b)
        if a.dtype == jnp.bfloat16 != y.dtype:
            # XLA's CPU folds a later transpose into the product and then has no code for bfloat16 summed in float32.
            y = lax.platform_dependent(y, cpu=lax.optimization_barrier, default=lambda y: y)
        return y if order == tuple(range(y.ndim)) else y.transpose(order)

    def code_sums(side: int, codes: jax.Array) -> jax.Array:
        return lay(_sum_codes(problem, side, codes), contraction.out)

    return ContractionOps(product, lambda f: lay(f, contraction.out), code_sums)


def _sum_codes(problem: Problem, side: int, codes: jax.Array) -> LabeledScale:
    labels = problem.operands[side].labels
    summed = tuple(a for a, c in enumerate(labels) if c in problem.contraction.contracting)
    return LabeledScale(jnp.sum(codes.astype(jnp.int32), axis=summed, keepdims=True), labels)


def reordered(sharding: Any, labels: str, order: str) -> Any:
    """A sharding of axes `labels` as one of the same axes in another order."""
    if sharding is None or labels == order:
        return sharding
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    full = (*spec, *[None] * (len(labels) - len(spec)))
    moved = PartitionSpec(*(full[labels.index(c)] for c in order))
    return NamedSharding(sharding.mesh, moved) if isinstance(sharding, NamedSharding) else moved


def _ragged_steps(problem: Problem, group_sizes) -> ContractionOps:
    contraction, window = problem.contraction, dict(problem.window)
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=contraction.dimension_numbers,
        lhs_ragged_dimensions=[contraction.lhs.index(problem.ragged)],
        rhs_group_dimensions=[contraction.rhs.index(c) for c in problem.group if c in contraction.rhs],
    )

    def product(a: jax.Array, b: jax.Array, accumulator) -> jax.Array:
        dot = functools.partial(
            lax.ragged_dot_general,
            group_sizes=group_sizes,
            ragged_dot_dimension_numbers=numbers,
            precision=precision_of(problem, a.dtype),
            preferred_element_type=accumulator,
            **window,
        )
        return _integer_product(contraction, contraction.out, dot, a, b) if a.dtype == jnp.int8 else dot(a, b)

    def lay_by_group(factor: LabeledScale) -> jax.Array:
        return lay(_per_row(problem, factor, group_sizes), contraction.out)

    def code_sums(side: int, codes: jax.Array) -> jax.Array:
        return lay_by_group(_sum_codes(problem, side, codes))

    def clear(x: jax.Array) -> jax.Array:
        if not problem.group_scales_to_rows:
            return x
        axis = contraction.out.index(problem.ragged)
        inside = lax.broadcasted_iota(jnp.int32, x.shape, axis) < jnp.sum(group_sizes, dtype=jnp.int32)
        return jnp.where(inside, x, jnp.zeros_like(x))

    return ContractionOps(product, lay_by_group, code_sums, clear)


def _per_row(problem: Problem, factor: LabeledScale, group_sizes) -> LabeledScale:
    """A factor per group as one per row of the ragged axis; rows of no group take the last group's."""
    if not (problem.group and problem.group in factor.labels):
        return factor
    labels = factor.labels.replace(problem.group, problem.ragged)
    if not factor.varies(problem.group):
        return LabeledScale(factor.values, labels)
    rows = jnp.arange(problem.lhs.size(problem.ragged))
    group = jnp.sum(rows[:, None] >= jnp.cumsum(group_sizes.astype(jnp.int32))[None], axis=1)
    group = jnp.minimum(group, group_sizes.shape[0] - 1)
    return LabeledScale(jnp.take(factor.values, group, axis=factor.labels.index(problem.group)), labels)


def _conv_steps(problem: Problem) -> ContractionOps:
    contraction, window = problem.contraction, dict(problem.window)
    numbers: lax.ConvDimensionNumbers = window.pop("dimension_numbers")

    def product(a: jax.Array, b: jax.Array, accumulator, **changed) -> jax.Array:
        return lax.conv_general_dilated(
            a,
            b,
            **{**window, **changed},
            dimension_numbers=numbers,
            precision=precision_of(problem, a.dtype),
            preferred_element_type=accumulator,
        )

    def code_sums(side: int, codes: jax.Array) -> jax.Array:
        """Sums of the kernel over the part of each window that lies inside the image: padding counts as zero."""
        assert side == 1
        features = numbers.rhs_spec[1]
        kernel = jnp.sum(codes.astype(jnp.int32), axis=features, keepdims=True)
        shape = list(problem.lhs.shape)
        shape[numbers.lhs_spec[0]] = shape[numbers.lhs_spec[1]] = 1
        return product(jnp.ones(shape, jnp.int32), kernel, jnp.int32, feature_group_count=1)

    return ContractionOps(product, lambda f: lay(f, contraction.out), code_sums)
