"""Checks the operands of a contraction, makes a Problem of them, chooses a kernel and runs it.

Checks that need both operands run once per equal pair; their errors name both. Plain operands are differentiable;
`constant` raises a TypeError for the gradient with respect to a ScaledArray.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scaledot.array import ScaledArray
from scaledot.contraction import Contraction
from scaledot.kernels.operands import Bias, OuterProduct, aligned_bias
from scaledot.kernels.spec import Operand, Problem, accumulation_dtype, operand_of
from scaledot.kernels.table import Kernel, choose, run_with_bias, run_with_result_scales
from scaledot.ops.cast_spec import check_byte_order, check_consistent, check_hashable
from scaledot.parallel import partitioned_ops
from scaledot.parallel.types import ONE_DEVICE, Partitioning
from scaledot.programs import program

Array = jax.Array | ScaledArray
KernelChoice = str | Callable[[Any], str | None] | None  # the name of a kernel, or a function from a problem to a name


def as_operand(x, name: str) -> Array:
    """x as a jax array of real numbers, or a ScaledArray with consistent leaves; raises for anything else."""
    if isinstance(x, ScaledArray):
        check_consistent(x, name)
        return x
    if not isinstance(x, jax.Array):
        check_byte_order(name, x)
        try:
            x = jnp.asarray(x)
        except (TypeError, ValueError) as error:
            raise TypeError(f"`{name}` must be a ScaledArray or an array of numbers, not {type(x).__name__}") from error
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise TypeError(f"`{name}` is {x.dtype}; contractions with scaled operands take real numbers")
    return x


def float_operand(x, name: str) -> jax.Array:
    """x as a plain jax array of floats of at least 16 bits, which can be quantised; raises for anything else."""
    x = as_operand(x, name)
    if isinstance(x, ScaledArray):
        raise TypeError(f"`{name}` is already quantised ({x}); pass it to scaledot.dot_general instead")
    if not jnp.issubdtype(x.dtype, jnp.floating) or jnp.finfo(x.dtype).bits < 16:
        raise TypeError(f"`{name}` must be a float array of at least 16 bits, not {x.dtype}")
    return x


def element_type(dtype) -> np.dtype | None:
    """The argument `preferred_element_type` as a numpy dtype."""
    if dtype is None:
        return None
    try:
        return np.dtype(dtype)
    except TypeError:
        raise TypeError(f"`preferred_element_type` {dtype!r} is not a dtype") from None


def make_problem(
    op: str, contraction: Contraction, lhs: Array, rhs: Array, partitioning: Partitioning = ONE_DEVICE, **fields
) -> Problem:
    """The Problem of contracting two operands, after every check that needs both.

    partitioning: of the program by XLA, merged with that of the operands' types. `fields` are further fields of the
    Problem, and `preferred`, which may be anything that numpy takes as a dtype.
    """
    if isinstance(fields.get("precision"), list):
        fields["precision"] = tuple(fields["precision"])  # a Problem is hashable
    try:
        left, right = operand_of(lhs, contraction.lhs), operand_of(rhs, contraction.rhs)
        if partitioning != ONE_DEVICE:
            left = dataclasses.replace(left, partitioning=left.partitioning.joined(partitioning))
        return _problem(op, contraction, left, right, **fields)
    except TypeError:
        check_hashable(fields)
        raise


@functools.lru_cache(maxsize=4096)
def _problem(op: str, contraction: Contraction, left: Operand, right: Operand, *, preferred=None, **fields) -> Problem:
    """The checked Problem, cached: an eager call with equal operands is not checked again."""
    _check_sizes(contraction, left, right)
    _check_blocks(contraction, left, right)
    _check_rotations(contraction, left, right)
    problem = Problem(op, contraction, left, right, element_type(preferred), **fields)
    if not problem.is_plain and not jnp.issubdtype(problem.out_dtype, jnp.floating):
        raise TypeError(f"`preferred_element_type` must be a float dtype for {left} x {right}, not {problem.out_dtype}")
    return problem


def _check_sizes(contraction: Contraction, lhs: Operand, rhs: Operand) -> None:
    for label in contraction.lhs:
        if label in contraction.rhs and lhs.size(label) != rhs.size(label):
            left, right = contraction.lhs.index(label), contraction.rhs.index(label)
            raise ValueError(
                f"axis {left} of lhs has {lhs.size(label)} elements and axis {right} of rhs has {rhs.size(label)}: "
                f"cannot contract {lhs} with {rhs}"
            )


def _check_blocks(contraction: Contraction, lhs: Operand, rhs: Operand) -> None:
    """Raises unless blocks along a contracting dim nest: blocks of one operand are unions of blocks of the other."""
    if lhs.format is None or rhs.format is None:
        return
    for label in contraction.contracting:
        a, b = sorted((lhs.block_of(label), rhs.block_of(label)))
        if a and b % a and b != lhs.size(label):
            raise ValueError(
                f"blocks of {lhs.block_of(label)} and of {rhs.block_of(label)} along one contracting dim do not nest: "
                f"cannot contract {lhs} with {rhs}; requantize one of them"
            )


def _check_rotations(contraction: Contraction, lhs: Operand, rhs: Operand) -> None:
    """Raises unless both operands have the same rotation along contracting dims, where it cancels.

    A rotation along a free dim is undone by the kernel.
    """
    left = lhs.rotation if lhs.rotated_label in contraction.contracting else None
    right = rhs.rotation if rhs.rotated_label in contraction.contracting else None
    if left is None and right is None:
        return
    if left is None or right is None:
        rotated, plain = ("lhs", "rhs") if right is None else ("rhs", "lhs")
        raise ValueError(
            f"{rotated} was rotated before it was quantised and {plain} was not: cannot contract {lhs} with {rhs}; "
            f"quantize {plain} with the same `rotation`, or dequantize {rotated}"
        )
    if lhs.rotated_label != rhs.rotated_label or (left.size, left.mask) != (right.size, right.mask):
        raise ValueError(f"lhs and rhs have different rotations, {left} and {right}: cannot contract {lhs} with {rhs}")


def contract(
    contraction: Contraction,
    lhs: Array,
    rhs: Array,
    *,
    precision=None,
    preferred_element_type=None,
    out_sharding=None,
    kernel: KernelChoice = None,
    bias: Bias | None = None,
    partitioning: Partitioning = ONE_DEVICE,
    flattened_sizes: dict[str, tuple[int, ...]] | None = None,
) -> jax.Array:
    """The contraction of two checked operands, plus a bias, rounded once.

    partitioning: of the program by XLA, merged with that of the operands' types. flattened_sizes: for each label, the
    sizes of the axes that were flattened to it.
    """
    fields = {"precision": precision, "preferred": preferred_element_type, "out_sharding": out_sharding}
    problem = make_problem("dot", contraction, lhs, rhs, partitioning, **fields)
    if problem.partitioning.devices > 1 and problem.partitioning.is_automatic:
        name = kernel(problem) if callable(kernel) else kernel
        if choose(problem, name).is_opaque:
            lhs, rhs = constant(lhs), constant(rhs)
            if isinstance(bias, OuterProduct):  # a sum of sharded arrays, which XLA partitions
                wide = dataclasses.replace(problem, preferred=accumulation_dtype(problem.out_dtype))
                total = partitioned_ops.contract(wide, name, lhs, rhs, None, flattened_sizes or {})
                return (total + aligned_bias(bias, contraction, total.dtype)).astype(problem.out_dtype)
            return partitioned_ops.contract(problem, name, lhs, rhs, bias, flattened_sizes or {})
    return run_problem(problem, kernel, lhs, rhs, bias=bias)


def run_problem(
    problem: Problem, kernel: KernelChoice, lhs: Array, rhs: Array, group_sizes=None, bias=None, result_scales=None
) -> jax.Array:
    """Runs a problem with the chosen kernel, or with the first that supports it."""
    name = kernel(problem) if callable(kernel) else kernel
    return program(_run, problem, choose(problem, name))(lhs, rhs, group_sizes, bias, result_scales)


def _run(problem: Problem, kernel: Kernel, lhs: Array, rhs: Array, group_sizes, bias, result_scales) -> jax.Array:
    run = functools.partial(kernel.run, problem)
    lhs, rhs = (constant(x) if isinstance(x, ScaledArray) else x for x in (lhs, rhs))
    if bias is not None:
        return run_with_bias(kernel, problem, lhs, rhs, bias)
    if result_scales is not None:
        return run_with_result_scales(kernel, problem, lhs, rhs, group_sizes, result_scales)
    if problem.is_plain:
        return run(lhs, rhs, group_sizes)
    if (problem.lhs.format is None or problem.rhs.format is None) and not kernel.saves_codes:
        run = jax.checkpoint(run)  # saves codes as residuals, not dequantised values
    return run(lhs, rhs, group_sizes)


@jax.custom_jvp
def constant(q: ScaledArray) -> ScaledArray:
    """q itself; raises a TypeError when differentiated with respect to it."""
    return q


def _refuse_gradient(primals: tuple[Any], tangents: tuple[Any]):
    (q,), (dq,) = primals, tangents
    if not all(_is_zero(leaf) for leaf in jax.tree.leaves(dq, is_leaf=_is_zero)):
        raise TypeError(
            f"a ScaledArray is a constant: cannot differentiate with respect to {q}; differentiate with respect to the "
            "plain operand"
        )
    return q, dq


def _is_zero(leaf) -> bool:
    return isinstance(leaf, jax.custom_derivatives.SymbolicZero) or getattr(leaf, "dtype", None) == jax.dtypes.float0


constant.defjvp(_refuse_gradient, symbolic_zeros=True)
