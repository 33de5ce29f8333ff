"""ragged_dot and ragged_dot_general on scaled and plain operands: rows in groups, each with its own matrix."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scaledot.contraction import Contraction, from_dimension_numbers, labels
from scaledot.kernels.spec import operand_of
from scaledot.ops.cast_spec import checked_groups
from scaledot.ops.operands import Choice, as_operand, make_problem, solve
from scaledot.parallel.types import is_sharded

_MATRIX_PER_GROUP = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (1,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


def ragged_dot(
    lhs,
    rhs,
    group_sizes,
    precision=None,
    preferred_element_type=None,
    *,
    out_sharding=None,
    kernel: Choice = None,
) -> jax.Array:
    """`jax.lax.ragged_dot` where either operand may be a ScaledArray: (m, k) x (groups, k, n) -> (m, n).

    Rows come in consecutive groups and each is multiplied by its group's matrix. Groups may be empty; rows past
    the last group give zeros. Scales of rhs may differ from group to group. vmap goes as far as jax.lax's does. Along
    explicit mesh axes `out_sharding` must say how the result lies.
    As in `dot_general`, tensor cores add products of 8-bit floats with few bits unless `precision` asks for more.

    >>> import jax.numpy as jnp, scaledot as sd
    >>> w = sd.quantize(jnp.stack([jnp.eye(2), 3 * jnp.eye(2)]), "int8", axis=1)
    >>> ragged_dot(jnp.ones((4, 2)), w, jnp.array([1, 2]))
    Array([[1., 1.],
           [3., 3.],
           [3., 3.],
           [0., 0.]], dtype=float32)
    """
    wanted = {"out_sharding": out_sharding, "kernel": kernel}
    return ragged_dot_general(lhs, rhs, group_sizes, _MATRIX_PER_GROUP, precision, preferred_element_type, **wanted)


def ragged_dot_general(
    lhs,
    rhs,
    group_sizes,
    ragged_dot_dimension_numbers: lax.RaggedDotDimensionNumbers,
    precision=None,
    preferred_element_type=None,
    *,
    out_sharding=None,
    kernel: Choice = None,
) -> jax.Array:
    """`jax.lax.ragged_dot_general` where either operand may be a ScaledArray.

    The ragged axis of lhs may be kept (each group has a slice of rhs), summed over (the result has one slice per
    group), or a batch axis.
    """
    wanted = {"precision": precision, "preferred": preferred_element_type}

    def contract(lhs, rhs, group_sizes) -> jax.Array:
        return contract_groups(lhs, rhs, group_sizes, ragged_dot_dimension_numbers, kernel, **wanted)

    lhs, rhs = as_operand(lhs, "lhs"), as_operand(rhs, "rhs")
    are_sharded = any(is_sharded(jax.typeof(leaf)) for leaf in jax.tree.leaves((lhs, rhs)))
    if out_sharding is None and not are_sharded:
        return contract(lhs, rhs, group_sizes)
    if out_sharding is None:
        raise ValueError("`out_sharding` must say how the result lies where operands are split over explicit mesh axes")
    # jax.lax has no rule for how grouped products lie along explicit axes; XLA has.
    by_xla: Any = jax.sharding.auto_axes(contract, out_sharding=out_sharding)
    return by_xla(lhs, rhs, jnp.asarray(group_sizes))


def contract_groups(
    lhs,
    rhs,
    group_sizes,
    ragged_dot_dimension_numbers: lax.RaggedDotDimensionNumbers,
    kernel: Choice,
    *,
    multipliers: tuple[jax.Array, jax.Array] | None = None,
    **wanted,
) -> jax.Array:
    """ragged_dot_general whose problem says more: `group_multiple` is what group sizes are multiples of.

    multipliers: for results (groups, m, n), which are multiplied by them before they are rounded: (groups, 1) or
    (groups, m), and (groups, 1) or (groups, n).
    """
    lhs, rhs = as_operand(lhs, "lhs"), as_operand(rhs, "rhs")
    numbers = ragged_dot_dimension_numbers
    contraction = from_dimension_numbers(numbers.dot_dimension_numbers, lhs.ndim, rhs.ndim)
    contraction, ragged, group = _with_groups(contraction, numbers)
    flat = np.ndim(group_sizes) == 1
    if not flat and ragged in contraction.contracted:
        raise ValueError(f"`group_sizes` must have one size for each group that is summed, not {np.shape(group_sizes)}")
    if flat:
        group_sizes = checked_groups(group_sizes, lhs.shape[contraction.lhs.index(ragged)])
    if flat and group in contraction.rhs and rhs.shape[contraction.rhs.index(group)] != group_sizes.size:
        raise ValueError(f"`group_sizes` has {group_sizes.size} groups, but rhs is {operand_of(rhs, contraction.rhs)}")
    problem = make_problem(
        "ragged_dot",
        contraction,
        lhs,
        rhs,
        ragged=ragged,
        group=group,
        gathers=flat and group in contraction.rhs,
        **wanted,
    )
    return solve(problem, kernel, lhs, rhs, group_sizes, multipliers=multipliers)


def _with_groups(contraction: Contraction, numbers: lax.RaggedDotDimensionNumbers) -> tuple[Contraction, str, str]:
    """The contraction with its axis of groups, the ragged label and the label of groups."""
    (ragged_axis,) = _one_axis("lhs_ragged_dimensions", numbers.lhs_ragged_dimensions)
    ragged = contraction.lhs[ragged_axis]
    if ragged in contraction.contracted:
        group = labels(1, contraction.lhs + contraction.rhs)
        return Contraction(contraction.lhs, contraction.rhs, group + contraction.out), ragged, group
    if ragged in contraction.rhs:
        return contraction, ragged, labels(1, contraction.lhs + contraction.rhs)
    (group_axis,) = _one_axis("rhs_group_dimensions", numbers.rhs_group_dimensions)
    group = contraction.rhs[group_axis]
    return Contraction(contraction.lhs, contraction.rhs, contraction.out.replace(group, "")), ragged, group


def _one_axis(name: str, axes) -> tuple[int]:
    if len(axes) != 1:
        raise ValueError(f"`{name}` must name one axis, not {list(axes)}")
    return (int(axes[0]),)
