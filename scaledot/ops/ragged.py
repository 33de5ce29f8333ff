"""ragged_dot and ragged_dot_general (grouped GEMM) on scaled and plain operands."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scaledot.contraction import Contraction, from_dimension_numbers, labels
from scaledot.kernels.spec import operand_of
from scaledot.ops.cast_spec import checked_groups
from scaledot.ops.operands import KernelChoice, as_operand, make_problem, run_problem
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
    kernel: KernelChoice = None,
) -> jax.Array:
    """`jax.lax.ragged_dot` where either operand may be a ScaledArray: (m, k) x (groups, k, n) -> (m, n).

    Rows of lhs form consecutive groups of sizes `group_sizes`, and group i is multiplied by rhs[i]. Groups may be
    empty; rows past the last group give zeros. Scales of rhs may differ between groups. vmap is supported where
    jax.lax.ragged_dot supports it. If operands are sharded over explicit mesh axes, `out_sharding` is required.
    Accumulation and `precision` are those of `dot_general`.

    >>> import jax.numpy as jnp, scaledot as sd
    >>> w = sd.quantize(jnp.stack([jnp.eye(2), 3 * jnp.eye(2)]), "int8", axis=1)
    >>> ragged_dot(jnp.ones((4, 2)), w, jnp.array([1, 2]))
    Array([[1., 1.],
           [3., 3.],
           [3., 3.],
           [0., 0.]], dtype=float32)
    """
    options = {"out_sharding": out_sharding, "kernel": kernel}
    return ragged_dot_general(lhs, rhs, group_sizes, _MATRIX_PER_GROUP, precision, preferred_element_type, **options)


def ragged_dot_general(
    lhs,
    rhs,
    group_sizes,
    ragged_dot_dimension_numbers: lax.RaggedDotDimensionNumbers,
    precision=None,
    preferred_element_type=None,
    *,
    out_sharding=None,
    kernel: KernelChoice = None,
) -> jax.Array:
    """`jax.lax.ragged_dot_general` where either operand may be a ScaledArray.

    The ragged dim of lhs may be a free dim (one slice of rhs per group), a contracting dim (one slice of the result per
    group), or a batch dim.
    """
    fields = {"precision": precision, "preferred": preferred_element_type}

    def contract(lhs, rhs, group_sizes) -> jax.Array:
        return contract_groups(lhs, rhs, group_sizes, ragged_dot_dimension_numbers, kernel, **fields)

    lhs, rhs = as_operand(lhs, "lhs"), as_operand(rhs, "rhs")
    are_sharded = any(is_sharded(jax.typeof(leaf)) for leaf in jax.tree.leaves((lhs, rhs)))
    if out_sharding is None and not are_sharded:
        return contract(lhs, rhs, group_sizes)
    if out_sharding is None:
        raise ValueError(
            "operands are sharded over explicit mesh axes; pass `out_sharding`, the sharding of the result"
        )
    # jax.lax.ragged_dot has no sharding rule for explicit axes; XLA can partition it along automatic ones.
    automatic: Any = jax.sharding.auto_axes(contract, out_sharding=out_sharding)
    return automatic(lhs, rhs, jnp.asarray(group_sizes))


def contract_groups(
    lhs,
    rhs,
    group_sizes,
    ragged_dot_dimension_numbers: lax.RaggedDotDimensionNumbers,
    kernel: KernelChoice,
    *,
    result_scales: tuple[jax.Array, jax.Array] | None = None,
    **fields,
) -> jax.Array:
    """ragged_dot_general with further `fields` of the Problem.

    `group_multiple` is such a field: a number of which all group sizes are multiples. result_scales: a pair of
    (groups, 1) or (groups, m), and (groups, 1) or (groups, n), which multiply a result (groups, m, n) before it is
    rounded.
    """
    lhs, rhs = as_operand(lhs, "lhs"), as_operand(rhs, "rhs")
    numbers = ragged_dot_dimension_numbers
    contraction = from_dimension_numbers(numbers.dot_dimension_numbers, lhs.ndim, rhs.ndim)
    contraction, ragged, group = _with_groups(contraction, numbers)
    has_1d_sizes = np.ndim(group_sizes) == 1
    if not has_1d_sizes and ragged in contraction.contracting:
        raise ValueError(
            "`group_sizes` must be 1-d, one size per group, if the ragged dim is contracted; it has shape "
            f"{np.shape(group_sizes)}"
        )
    if has_1d_sizes:
        group_sizes = checked_groups(group_sizes, lhs.shape[contraction.lhs.index(ragged)])
    has_rhs_per_group = has_1d_sizes and group in contraction.rhs
    if has_rhs_per_group and (matrices := rhs.shape[contraction.rhs.index(group)]) != group_sizes.size:
        raise ValueError(
            f"`group_sizes` has {group_sizes.size} groups, but rhs has {matrices} matrices: "
            f"{operand_of(rhs, contraction.rhs)}"
        )
    problem = make_problem(
        "ragged_dot",
        contraction,
        lhs,
        rhs,
        ragged_label=ragged,
        group_label=group,
        group_scales_to_rows=has_rhs_per_group,
        **fields,
    )
    return run_problem(problem, kernel, lhs, rhs, group_sizes, result_scales=result_scales)


def _with_groups(contraction: Contraction, numbers: lax.RaggedDotDimensionNumbers) -> tuple[Contraction, str, str]:
    """The contraction with a label for the group dim, the ragged label, and the group label."""
    (ragged_axis,) = _one_axis("lhs_ragged_dimensions", numbers.lhs_ragged_dimensions)
    ragged = contraction.lhs[ragged_axis]
    if ragged in contraction.contracting:
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
