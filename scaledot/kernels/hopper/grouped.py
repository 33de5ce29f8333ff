"""Grouped matmuls (`ragged_dot`) on Hopper's tensor cores: groups of rows, or groups along the contracting dim.

* Rows of lhs (M, K) in groups, each multiplied by its own matrix of rhs (groups, K, N): the result is (M, N).
* Contracting dims of lhs (K, M) and rhs (K, N) in groups, each with its own result: (groups, M, N).

Work is proportional to the number of rows. Group sizes are read on the device, without a synchronisation with the host.
Groups along K must start at multiples of 128, a K step. If group sizes are not known to be multiples of 128, both
operands are first copied and zero-padded so that each group starts at one.
"""

import jax
import jax.numpy as jnp

from scaledot.array import ScaledArray
from scaledot.contraction import Contraction
from scaledot.kernels import operands
from scaledot.kernels.hopper import matmul_operands, support, tile_configs
from scaledot.kernels.hopper.scale_blocks import SCALE_BLOCK
from scaledot.kernels.hopper.swizzle_atom import K_STEP
from scaledot.kernels.operands import LabeledArray, pad_to_multiples
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
    both = all(o.format is not None and o.format.element in matmul_operands.ELEMENTS["int8"] for o in problem.operands)
    return "int8" if both else "float8"


def _row_groups_reason(problem: Problem) -> str | None:
    contraction = problem.contraction
    if not problem.group_scales_to_rows or len(contraction.lhs) != 2 or contraction.lhs_free != problem.ragged_label:
        return "the ragged dim must be the only free dim of lhs, and `group_sizes` 1-d"
    if len(contraction.rhs) != 3:
        return f"rhs must be one matrix for each group, with three dims in all, not {problem.rhs}"
    return None


def _k_groups_reason(problem: Problem) -> str | None:
    contraction = problem.contraction
    if contraction.contracting != problem.ragged_label or len(contraction.lhs) != 2 or len(contraction.rhs) != 2:
        return "groups along the contracting dim need two matrices, with that dim as the only contracting one"
    if matmul_operands.has_k_block_scales(problem) and problem.group_multiple % SCALE_BLOCK:
        block, multiple = SCALE_BLOCK, problem.group_multiple
        return f"scales change every {block} elements of K; group sizes must be multiples of {block}, not of {multiple}"
    return None


def describe(problem: Problem) -> str:
    """The line of `explain` for a problem that the kernel computes."""
    groups = "one rhs matrix per group of rows" if _has_row_groups(problem) else "one result per group along K"
    accumulation = matmul_operands.accumulation(problem, _promotes(problem))
    padding = f", after a copy of both operands with groups zero-padded to multiples of {K_STEP} along K"
    aligned = _has_aligned_k_groups(problem) or _has_row_groups(problem)
    return f"{_element(problem)} matmul on Hopper's tensor cores, {groups}, {accumulation}{'' if aligned else padding}"


def _promotes(problem: Problem) -> bool:
    return _element(problem) == "float8" and not is_default_precision(problem.precision)


def _has_aligned_k_groups(problem: Problem) -> bool:
    """Whether groups along K are known to start at multiples of 128."""
    return problem.group_multiple % K_STEP == 0


def run(
    problem: Problem, lhs: ScaledArray, rhs: ScaledArray, group_sizes: jax.Array, result_scales: tuple | None = None
) -> jax.Array:
    """Computes a grouped matmul.

    result_scales: for groups along K, two more float32 scales of each group's result, (groups, 1 or M) and
    (groups, 1 or N); None without.
    """
    sizes = _clipped(group_sizes, problem.lhs.size(problem.ragged_label))
    if _has_row_groups(problem):
        result = _run_row_groups(problem, lhs, rhs, sizes)
    else:
        result = _run_k_groups(problem, lhs, rhs, sizes, result_scales)
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
    has_k_block_scales = matmul_operands.has_k_block_scales(problem)
    promote = has_k_block_scales or _promotes(problem)
    a = _codes(lhs, contraction.lhs, row + contracted)
    b = _codes(rhs, contraction.rhs, group + column + contracted)
    (m, k), n = a.shape, b.shape[1]
    if has_k_block_scales:
        a_scales = matmul_operands.block_scale_matrix(lhs, contraction.lhs, row, contracted, allow_square=False)
        b_scales = matmul_operands.block_scale_matrix(
            rhs, contraction.rhs, column, contracted, allow_square=True, group=group
        )
    else:
        scales_by_label = operands.block_scales(lhs, contraction.lhs, {})
        a_scales = matmul_operands.row_scales(scales_by_label, lhs, contraction.lhs, row)
        b_scales = _column_scales(rhs, contraction.rhs, group + column)
    square_blocks = has_k_block_scales and b_scales.shape[-1] < n
    accumulation = tile_configs.accumulation_mode(promote, has_k_block_scales, square_blocks)
    itemsize = problem.out_dtype.itemsize
    gemm = tile_configs.GemmKey(m, n, k, _element(problem), itemsize, accumulation, row_groups=sizes.size)
    config = tile_configs.config_for(gemm)
    n_multiple = config.cluster_tile_n // (SCALE_BLOCK if square_blocks else 1)
    # Tiles at a group boundary are stored as 128-byte row segments, so N is padded to 64 16-bit columns.
    b_padding = (0, 0), (0, -n % matmul_operands.MINOR_MULTIPLE), (0, -k % K_STEP)
    result = matmul(
        pad_to_multiples(a, matmul_operands.M_MULTIPLE, K_STEP),
        jnp.pad(b, b_padding),
        matmul_operands.padded_scales(a_scales, has_k_block_scales, config.cluster_tile_m, config.cta_m),
        matmul_operands.padded_scales(b_scales, has_k_block_scales, n_multiple),
        None,
        out_dtype=problem.out_dtype,
        config=config,
        promote=promote,
        has_k_block_scales=has_k_block_scales,
        ctas=support.sm_count(),
        groups=groups_of_rows(sizes, m, config),
    )
    return _transposed(result[:m, :n], row + column, contraction)


def _run_k_groups(problem: Problem, lhs: ScaledArray, rhs: ScaledArray, sizes: jax.Array, result_scales) -> jax.Array:
    from scaledot.kernels.hopper.matmul import matmul
    from scaledot.kernels.hopper.tiles import groups_of_k

    contraction, contracted = problem.contraction, problem.ragged_label
    all_labels = (contraction.lhs, contraction.lhs_free), (contraction.rhs, contraction.rhs_free)
    has_k_block_scales = matmul_operands.has_k_block_scales(problem)
    promote = has_k_block_scales or _promotes(problem)
    matrices, scales = [], []
    for q, (labels, free), group_scale in zip((lhs, rhs), all_labels, result_scales or (1, 1), strict=True):
        codes = _codes(q, labels, contracted + free)
        matrices.append((codes if _has_aligned_k_groups(problem) else align_groups(codes, sizes, K_STEP)).T)
        if has_k_block_scales:
            scales.append(matmul_operands.block_scale_matrix(q, labels, free, contracted, allow_square=False))
        else:
            row_scales = matmul_operands.row_scales(operands.block_scales(q, labels, {}), q, labels, free)
            per_group_scales = row_scales[None] * group_scale
            scales.append(jnp.broadcast_to(per_group_scales, (sizes.size, per_group_scales.shape[1])))
    (m, k), n = matrices[0].shape, matrices[1].shape[0]
    accumulation = tile_configs.accumulation_mode(promote, has_k_block_scales, square_blocks=False)
    itemsize = problem.out_dtype.itemsize
    gemm = tile_configs.GemmKey(m, n, k, _element(problem), itemsize, accumulation, k_groups=sizes.size)
    config = tile_configs.config_for(gemm)
    # Scales of blocks along K have no group dim that result_scales could be multiplied into.
    apply_group_scales_in_xla = has_k_block_scales and result_scales
    result = matmul(
        pad_to_multiples(matrices[0], matmul_operands.M_MULTIPLE, K_STEP),
        pad_to_multiples(matrices[1], matmul_operands.N_MULTIPLE, K_STEP),
        matmul_operands.padded_scales(scales[0], has_k_block_scales, config.cluster_tile_m),
        matmul_operands.padded_scales(scales[1], has_k_block_scales, config.cluster_tile_n),
        None,
        out_dtype=jnp.float32 if apply_group_scales_in_xla else problem.out_dtype,
        config=config,
        promote=promote,
        has_k_block_scales=has_k_block_scales,
        ctas=support.sm_count(),
        groups=groups_of_k(-(-sizes // K_STEP)),
    )[:, :m, :n]
    if apply_group_scales_in_xla:
        lhs_scales, rhs_scales = result_scales
        result = operands.apply_scales(result, [lhs_scales[:, :, None]], [rhs_scales[:, None]]).astype(
            problem.out_dtype
        )
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
    values = operands.align_to(LabeledArray(scale.values, labels), group_and_column)
    return jnp.broadcast_to(values, (groups, columns if values.shape[1] > 1 else 1))
