"""Grouped matmuls (`ragged_dot`) on Hopper's tensor cores: groups of rows, or groups along the contracting dim.

* Rows of lhs (M, K) in groups, each multiplied by its own matrix of rhs (groups, K, N): the result is (M, N).
* Contracting dims of lhs (K, M) and rhs (K, N) in groups, each with its own result: (groups, M, N).

Work is proportional to the number of rows. Group sizes are read on the device, without a synchronisation with the host.
Groups along the contracting dim must start at multiples of 128; if they do not, their rows are first moved apart, with
zeros in between.
"""

import jax
import jax.numpy as jnp

from scaledot.array import ScaledArray
from scaledot.contraction import Contraction
from scaledot.kernels import operands
from scaledot.kernels.hopper import matmul_operands, support, tile_configs
from scaledot.kernels.hopper.sizes import BLOCK
from scaledot.kernels.operands import LabeledScale, pad_to_multiples
from scaledot.kernels.spec import Problem, is_default_precision
from scaledot.numerics.grouped import align_groups
from scaledot.parallel.types import vary_as


def problem_reason(problem: Problem) -> str | None:
    """Returns why the kernel cannot compute a problem on any device, or None if it can."""
    if problem.op != "ragged_dot":
        return "it computes grouped matmuls (ragged_dot) only"
    shape = _row_groups_reason(problem) if _has_row_groups(problem) else _k_groups_reason(problem)
    return shape or matmul_operands.codes_reason(problem, _element(problem)) or matmul_operands.result_reason(problem)


def _has_row_groups(problem: Problem) -> bool:
    return problem.group_label in problem.contraction.rhs


def _element(problem: Problem) -> str:
    """Returns "int8" if both operands have integer codes, "float8" otherwise."""
    both = all(o.format is not None and o.format.element in matmul_operands.KINDS["int8"] for o in problem.operands)
    return "int8" if both else "float8"


def _row_groups_reason(problem: Problem) -> str | None:
    contraction = problem.contraction
    if not problem.group_scales_to_rows or len(contraction.lhs) != 2 or contraction.lhs_free != problem.ragged_label:
        return "lhs with groups of rows must be a matrix, and `group_sizes` must have one size for each group"
    if len(contraction.rhs) != 3:
        return f"rhs must be one matrix for each group, with three dims in all, not {problem.rhs}"
    return None


def _k_groups_reason(problem: Problem) -> str | None:
    contraction = problem.contraction
    if contraction.contracting != problem.ragged_label or len(contraction.lhs) != 2 or len(contraction.rhs) != 2:
        return "groups along the contracting dim need two matrices, with that dim as the only contracting one"
    if matmul_operands.is_blockwise(problem) and problem.group_multiple % BLOCK:
        multiple = problem.group_multiple
        return f"scales change every {BLOCK} elements of K; group sizes must be multiples of {BLOCK}, not of {multiple}"
    return None


def describe(problem: Problem) -> str:
    """The line of `explain` for a problem that the kernel computes."""
    groups = "one rhs matrix per group of rows" if _has_row_groups(problem) else "one result per group along K"
    accumulation = matmul_operands.accumulation(problem, _promotes(problem))
    spacing = "" if _is_aligned(problem) else f", groups first moved apart to multiples of {BLOCK} along K"
    return f"{_element(problem)} matmul on Hopper's tensor cores, {groups}, {accumulation}{spacing}"


def _promotes(problem: Problem) -> bool:
    return _element(problem) == "float8" and not is_default_precision(problem.precision)


def _is_aligned(problem: Problem) -> bool:
    """Whether groups along K start at multiples of 128; groups of rows need no alignment."""
    return _has_row_groups(problem) or problem.group_multiple % BLOCK == 0


def run(
    problem: Problem, lhs: ScaledArray, rhs: ScaledArray, group_sizes: jax.Array, group_scales: tuple | None = None
) -> jax.Array:
    """Computes a grouped matmul.

    group_scales: for groups along K, two more float32 scales of the results, (groups, 1 or M) and (groups, 1 or N).
    """
    sizes = _clipped(group_sizes, problem.lhs.size(problem.ragged_label))
    if _has_row_groups(problem):
        result = _run_row_groups(problem, lhs, rhs, sizes)
    else:
        result = _run_k_groups(problem, lhs, rhs, sizes, group_scales)
    return vary_as(result, lhs.data, rhs.data)


def _clipped(sizes: jax.Array, rows: int) -> jax.Array:
    """Clips group sizes to be non-negative and to end at the last row."""
    ends = jnp.minimum(jnp.cumsum(jnp.maximum(sizes, 0)), rows).astype(jnp.int32)
    return jnp.diff(ends, prepend=0)


def _run_row_groups(problem: Problem, lhs: ScaledArray, rhs: ScaledArray, sizes: jax.Array) -> jax.Array:
    from scaledot.kernels.hopper.matmul import matmul
    from scaledot.kernels.hopper.tiles import groups_of_rows

    contraction, group, row = problem.contraction, problem.group_label, problem.ragged_label
    contracted = contraction.contracting
    (column,) = (c for c in contraction.rhs_free if c != group)
    blockwise = matmul_operands.is_blockwise(problem)
    promote = blockwise or _promotes(problem)
    a = _codes(lhs, contraction.lhs, row + contracted)
    b = _codes(rhs, contraction.rhs, group + column + contracted)
    (m, k), n = a.shape, b.shape[1]
    if blockwise:
        row_scales = matmul_operands.k_block_scales(lhs, contraction.lhs, row, contracted, allow_square=False)
        column_scales = matmul_operands.k_block_scales(
            rhs, contraction.rhs, column, contracted, allow_square=True, group=group
        )
    else:
        lhs_scales = operands.block_scales(lhs, contraction.lhs, {})
        row_scales = matmul_operands.row_scales(lhs_scales, lhs, contraction.lhs, row)
        column_scales = _column_scales(rhs, contraction.rhs, group + column)
    square_blocks = blockwise and column_scales.shape[-1] < n
    accumulation = tile_configs.accumulation_mode(promote, blockwise, square_blocks)
    itemsize = problem.out_dtype.itemsize
    shape = tile_configs.Shape(m, n, k, _element(problem), itemsize, accumulation, row_groups=sizes.size)
    config = tile_configs.config_for(shape)
    column_multiple = config.cluster_columns // (BLOCK if square_blocks else 1)
    result = matmul(
        pad_to_multiples(a, matmul_operands.M_MULTIPLE, BLOCK),
        jnp.pad(b, ((0, 0), (0, -n % matmul_operands.MINOR_MULTIPLE), (0, -k % BLOCK))),
        matmul_operands.padded_scales(row_scales, blockwise, config.cluster_rows, config.cta_rows),
        matmul_operands.padded_scales(column_scales, blockwise, column_multiple),
        None,
        out_dtype=problem.out_dtype,
        config=config,
        promote=promote,
        blockwise=blockwise,
        ctas=support.sm_count(),
        groups=groups_of_rows(sizes, m, config),
    )
    return _transposed(result[:m, :n], row + column, contraction)


def _run_k_groups(problem: Problem, lhs: ScaledArray, rhs: ScaledArray, sizes: jax.Array, group_scales) -> jax.Array:
    from scaledot.kernels.hopper.matmul import matmul
    from scaledot.kernels.hopper.tiles import groups_of_k

    contraction, contracted = problem.contraction, problem.ragged_label
    all_labels = (contraction.lhs, contraction.lhs_free), (contraction.rhs, contraction.rhs_free)
    blockwise = matmul_operands.is_blockwise(problem)
    promote = blockwise or _promotes(problem)
    matrices, scales = [], []
    for q, (labels, free), group_scale in zip((lhs, rhs), all_labels, group_scales or (1, 1), strict=True):
        codes = _codes(q, labels, contracted + free)
        matrices.append((codes if _is_aligned(problem) else align_groups(codes, sizes, BLOCK)).T)
        if blockwise:
            scales.append(matmul_operands.k_block_scales(q, labels, free, contracted, allow_square=False))
        else:
            row_scales = matmul_operands.row_scales(operands.block_scales(q, labels, {}), q, labels, free)
            of_groups = row_scales[None] * group_scale
            scales.append(jnp.broadcast_to(of_groups, (sizes.size, of_groups.shape[1])))
    (m, k), n = matrices[0].shape, matrices[1].shape[0]
    accumulation = tile_configs.accumulation_mode(promote, blockwise, square_blocks=False)
    itemsize = problem.out_dtype.itemsize
    shape = tile_configs.Shape(m, n, k, _element(problem), itemsize, accumulation, k_groups=sizes.size)
    config = tile_configs.config_for(shape)
    scales_result = blockwise and group_scales  # blockwise scales have no group dim to multiply group_scales into
    result = matmul(
        pad_to_multiples(matrices[0], matmul_operands.M_MULTIPLE, BLOCK),
        pad_to_multiples(matrices[1], matmul_operands.N_MULTIPLE, BLOCK),
        matmul_operands.padded_scales(scales[0], blockwise, config.cluster_rows),
        matmul_operands.padded_scales(scales[1], blockwise, config.cluster_columns),
        None,
        out_dtype=jnp.float32 if scales_result else problem.out_dtype,
        config=config,
        promote=promote,
        blockwise=blockwise,
        ctas=support.sm_count(),
        groups=groups_of_k(-(-sizes // BLOCK)),
    )[:, :m, :n]
    if scales_result:
        left, right = group_scales
        result = operands.apply_scales(result, [left[:, :, None]], [right[:, None]]).astype(problem.out_dtype)
    return _transposed(result, problem.group_label + contraction.lhs_free + contraction.rhs_free, contraction)


def _codes(q: ScaledArray, labels: str, order: str) -> jax.Array:
    """Codes, transposed from dims `labels` to dims `order`."""
    return matmul_operands.codes_of(q).transpose([labels.index(c) for c in order])


def _transposed(result: jax.Array, labels: str, contraction: Contraction) -> jax.Array:
    """The result, transposed from dims `labels` to those of the contraction's output."""
    return result.transpose([labels.index(c) for c in contraction.out])


def _column_scales(q: ScaledArray, labels: str, group_and_column: str) -> jax.Array:
    """Scales of rhs that do not change along K: (groups, columns), or (groups, 1) if each group has a single one."""
    (scale,) = operands.block_scales(q, labels, {})
    groups, columns = (q.shape[labels.index(c)] for c in group_and_column)
    values = operands.align_to(LabeledScale(scale.values, labels), group_and_column)
    return jnp.broadcast_to(values, (groups, columns if values.shape[1] > 1 else 1))
