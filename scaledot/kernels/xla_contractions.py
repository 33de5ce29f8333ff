"""XLA's contractions of two arrays: dot, ragged dot and convolution behind one interface.

`ops_for(problem)` returns what a Formulation needs: the contraction itself, scales broadcast against its result, and
sums of codes for the correction of zero points. For a dot "mk,kn->mn", contract(a, b, float32) returns (m, n), align
returns a scale (m, 1) of lhs unchanged and one (1, n) of rhs as well, and operand_sums(1, b) returns (1, n).
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
from scaledot.kernels.operands import LabeledArray, align_to
from scaledot.kernels.spec import Problem


class ContractionOps(NamedTuple):
    """The operations of a kind of contraction. All arrays that they return broadcast against its result.

    contract(a, b, accumulator): the contraction of two arrays, with this result dtype.
    align(scale): a LabeledArray of an operand.
    operand_sums(index, codes): sums of the codes of lhs (0) or rhs (1) over contracting dims.
    mask_ungrouped(result): the result with zeros in rows that belong to no group, where scales may be NaN.
    """

    contract: Callable[..., jax.Array]
    align: Callable[[LabeledArray], jax.Array]
    operand_sums: Callable[[int, jax.Array], jax.Array]
    mask_ungrouped: Callable[[jax.Array], jax.Array] = lambda x: x


def ops_for(problem: Problem, group_sizes: jax.Array | None) -> ContractionOps:
    if problem.op == "ragged_dot":
        return _ragged_ops(problem, group_sizes)
    return _conv_ops(problem) if problem.op == "conv" else _dot_ops(problem)


def precision_of(problem: Problem, dtype) -> Any:
    """Returns the caller's precision; by default HIGHEST for float32 contractions, also those of gradients."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return None
    default = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    is_set = problem.precision is not None or default is not None
    if is_set or problem.is_plain:
        return problem.precision
    # The transpose of a bfloat16 contraction contracts float32 cotangents, with the precision returned here.
    differentiable = problem.lhs.format is None or problem.rhs.format is None
    return lax.Precision.HIGHEST if dtype == np.float32 or differentiable else None


def _int8_contraction(contraction: Contraction, out: str, contract: Callable[..., jax.Array], a, b) -> jax.Array:
    """Computes an int8 contraction in a form that XLA compiles reliably for GPUs.

    Under jax 0.11.2 on an H200 some results are doubled, such as those of Triton GEMMs with a K tile of 16. XLA can
    compare them with cuBLAS if M, N and K are multiples of 4 and nothing is fused with the GEMM. So dims are padded
    with zeros, and barriers prevent fusion. Contractions with a short K are not computed in int8 (`formulations`).
    """
    sizes = dict(zip(contraction.lhs + contraction.rhs, a.shape + b.shape, strict=True))
    padded = dict(sizes)
    for labels in (contraction.lhs_free, contraction.contracting, contraction.rhs_free):
        if labels and math.prod(sizes[c] for c in labels) % 4:
            padded[labels[-1]] += -sizes[labels[-1]] % 4

    def pad(x: jax.Array, labels: str) -> jax.Array:
        padding = [(0, padded[c] - sizes[c]) for c in labels]
        return jnp.pad(x, padding) if any(after for _, after in padding) else x

    a, b = lax.optimization_barrier((pad(a, contraction.lhs), pad(b, contraction.rhs)))
    y = lax.optimization_barrier(contract(a, b))
    return y if padded == sizes else y[tuple(slice(sizes.get(c)) for c in out)]


def _dot_ops(problem: Problem) -> ContractionOps:
    contraction = problem.contraction
    order = tuple(contraction.dot_general_out.index(c) for c in contraction.out)

    def contract(a: jax.Array, b: jax.Array, accumulator) -> jax.Array:
        dot = functools.partial(
            lax.dot_general,
            dimension_numbers=contraction.dimension_numbers,
            precision=precision_of(problem, a.dtype),
            preferred_element_type=accumulator,
            out_sharding=reordered(problem.out_sharding, contraction.out, contraction.dot_general_out),
        )
        if a.dtype == jnp.int8:
            y = _int8_contraction(contraction, contraction.dot_general_out, dot, a, b)
        elif a.dtype == jnp.bfloat16 and accumulator == jnp.float32 and _may_fail_on_cpu(contraction):
            y = lax.platform_dependent(a, b, cpu=functools.partial(_in_float32, dot), default=dot)
        else:
            y = dot(a, b)
        if a.dtype == jnp.bfloat16 != y.dtype:
            # XLA's CPU backend folds a later transpose into the dot, and then cannot compile a bfloat16 dot with a
            # float32 result.
            y = lax.platform_dependent(y, cpu=lax.optimization_barrier, default=lambda y: y)
        return y if order == tuple(range(y.ndim)) else y.transpose(order)

    def operand_sums(operand: int, codes: jax.Array) -> jax.Array:
        return align_to(_sum_codes(problem, operand, codes), contraction.out)

    return ContractionOps(contract, lambda scale: align_to(scale, contraction.out), operand_sums)


def _may_fail_on_cpu(contraction: Contraction) -> bool:
    """Whether XLA's CPU backend may reject the contraction of bfloat16 operands with a float32 result.

    It does ("Unsupported element type for DotThunk::Execute", jax 0.10.2 and 0.11.2) for "km,kab->mab" and
    "bkm,nkb->bmn", never if the last dim of lhs is contracted. "km,kn->mn" compiles, unless vmap adds a dim to rhs.
    """
    return bool(contraction.contracting) and contraction.lhs[-1] not in contraction.contracting


def _in_float32(dot: Callable[..., jax.Array], a: jax.Array, b: jax.Array) -> jax.Array:
    """The contraction of the same numbers in float32, whose products are exact as well."""
    return dot(a.astype(jnp.float32), b.astype(jnp.float32))


def _sum_codes(problem: Problem, operand: int, codes: jax.Array) -> LabeledArray:
    labels = problem.operands[operand].labels
    contracting = tuple(a for a, c in enumerate(labels) if c in problem.contraction.contracting)
    return LabeledArray(jnp.sum(codes.astype(jnp.int32), axis=contracting, keepdims=True), labels)


def reordered(sharding: Any, labels: str, order: str) -> Any:
    """Returns a sharding of dims `labels` for the same dims in another order."""
    if sharding is None or labels == order:
        return sharding
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    full = (*spec, *[None] * (len(labels) - len(spec)))
    ordered = PartitionSpec(*(full[labels.index(c)] for c in order))
    return NamedSharding(sharding.mesh, ordered) if isinstance(sharding, NamedSharding) else ordered


def _ragged_ops(problem: Problem, group_sizes) -> ContractionOps:
    contraction, lax_arguments = problem.contraction, dict(problem.lax_arguments)
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=contraction.dimension_numbers,
        lhs_ragged_dimensions=[contraction.lhs.index(problem.ragged_label)],
        rhs_group_dimensions=[contraction.rhs.index(c) for c in problem.group_label if c in contraction.rhs],
    )

    def contract(a: jax.Array, b: jax.Array, accumulator) -> jax.Array:
        dot = functools.partial(
            lax.ragged_dot_general,
            group_sizes=group_sizes,
            ragged_dot_dimension_numbers=numbers,
            precision=precision_of(problem, a.dtype),
            preferred_element_type=accumulator,
            **lax_arguments,
        )
        return _int8_contraction(contraction, contraction.out, dot, a, b) if a.dtype == jnp.int8 else dot(a, b)

    def align_by_row(scale: LabeledArray) -> jax.Array:
        return align_to(_gathered_to_rows(problem, scale, group_sizes), contraction.out)

    def operand_sums(operand: int, codes: jax.Array) -> jax.Array:
        return align_by_row(_sum_codes(problem, operand, codes))

    def mask_ungrouped(x: jax.Array) -> jax.Array:
        if not problem.group_scales_to_rows:
            return x
        axis = contraction.out.index(problem.ragged_label)
        is_grouped = lax.broadcasted_iota(jnp.int32, x.shape, axis) < jnp.sum(group_sizes, dtype=jnp.int32)
        return jnp.where(is_grouped, x, jnp.zeros_like(x))

    return ContractionOps(contract, align_by_row, operand_sums, mask_ungrouped)


def _gathered_to_rows(problem: Problem, scale: LabeledArray, group_sizes) -> LabeledArray:
    """Gathers a scale per group to one per row of the ragged dim; rows in no group get that of the last group."""
    if not (problem.group_label and problem.group_label in scale.labels):
        return scale
    labels = scale.labels.replace(problem.group_label, problem.ragged_label)
    if not scale.varies_along(problem.group_label):
        return LabeledArray(scale.values, labels)
    rows = jnp.arange(problem.lhs.size(problem.ragged_label))
    group = jnp.sum(rows[:, None] >= jnp.cumsum(group_sizes.astype(jnp.int32))[None], axis=1)
    group = jnp.minimum(group, group_sizes.shape[0] - 1)
    return LabeledArray(jnp.take(scale.values, group, axis=scale.labels.index(problem.group_label)), labels)


def _conv_ops(problem: Problem) -> ContractionOps:
    contraction, lax_arguments = problem.contraction, dict(problem.lax_arguments)
    numbers: lax.ConvDimensionNumbers = lax_arguments.pop("dimension_numbers")

    def contract(a: jax.Array, b: jax.Array, accumulator, **changed) -> jax.Array:
        return lax.conv_general_dilated(
            a,
            b,
            **{**lax_arguments, **changed},
            dimension_numbers=numbers,
            precision=precision_of(problem, a.dtype),
            preferred_element_type=accumulator,
        )

    def operand_sums(operand: int, codes: jax.Array) -> jax.Array:
        """Sums the weight over the part of each window that is inside the image, because padding counts as zero."""
        assert operand == 1
        features = numbers.rhs_spec[1]
        weight = jnp.sum(codes.astype(jnp.int32), axis=features, keepdims=True)
        shape = list(problem.lhs.shape)
        shape[numbers.lhs_spec[0]] = shape[numbers.lhs_spec[1]] = 1
        return contract(jnp.ones(shape, jnp.int32), weight, jnp.int32, feature_group_count=1)

    return ContractionOps(contract, lambda scale: align_to(scale, contraction.out), operand_sums)
