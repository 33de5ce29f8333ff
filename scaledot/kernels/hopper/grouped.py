"""Products of groups on Hopper's tensor cores: rows in groups, each with its own matrix, or sums over groups of rows.

Work is proportional to rows. How many a group has is read by the programs themselves, so nothing waits for the host.
"""

import jax
import jax.numpy as jnp

from scaledot.array import ScaledArray
from scaledot.contraction import Contraction
from scaledot.kernels import operands
from scaledot.kernels.hopper import matmul_operands, support, tile_configs
from scaledot.kernels.hopper.sizes import LINE
from scaledot.kernels.operands import LabeledScale, filled_up
from scaledot.kernels.spec import Problem, is_default_precision
from scaledot.numerics.grouped import spaced
from scaledot.parallel.types import vary_as


def problem_reason(problem: Problem) -> str | None:
    """Why the kernel cannot compute it, whatever the device."""
    if problem.op != "ragged_dot":
        return "it multiplies groups"
    shape = _rows_reason(problem) if problem.group in problem.contraction.rhs else _sum_reason(problem)
    return shape or matmul_operands.codes_reason(problem, _kind_of(problem)) or matmul_operands.result_reason(problem)


def _kind_of(problem: Problem) -> str:
    """Integers where both sides have them."""
    both = all(o.format is not None and o.format.element in matmul_operands.KINDS["int8"] for o in problem.operands)
    return "int8" if both else "float8"


def _rows_reason(problem: Problem) -> str | None:
    contraction = problem.contraction
    if not problem.gathers or len(contraction.lhs) != 2 or contraction.lhs_free != problem.ragged:
        return "rows in groups must be a matrix, with one size for each group"
    if len(contraction.rhs) != 3:
        return f"there must be one matrix for each group, not {problem.rhs}"
    return None


def _sum_reason(problem: Problem) -> str | None:
    contraction = problem.contraction
    if contraction.contracted != problem.ragged or len(contraction.lhs) != 2 or len(contraction.rhs) != 2:
        return "groups that are summed must be parts of the rows of two matrices"
    if matmul_operands.scaled_in_steps(problem) and problem.group_multiple % LINE:
        return f"scales change along the sum every {LINE} rows, and groups do not come in as many"
    return None


def how(problem: Problem) -> str:
    products = f"{_kind_of(problem)} products on Hopper's tensor cores"
    if matmul_operands.scaled_in_steps(problem):
        sums = f"scales applied to the sums of every {LINE} terms in float32"
    else:
        sums = f"float32 sums of every {LINE} terms" if _promotes(problem) else "sums in the tensor cores"
    work = "each group's rows by its own matrix" if problem.group in problem.contraction.rhs else "a result per group"
    moved = "" if _is_whole(problem) else f", rows moved first so that groups come in whole steps of {LINE}"
    return f"{products}, {work}, {sums}{moved}"


def _promotes(problem: Problem) -> bool:
    return _kind_of(problem) == "float8" and not is_default_precision(problem.precision)


def _is_whole(problem: Problem) -> bool:
    return problem.group in problem.contraction.rhs or problem.group_multiple % LINE == 0


def run(
    problem: Problem, lhs: ScaledArray, rhs: ScaledArray, group_sizes: jax.Array, factors: tuple | None = None
) -> jax.Array:
    """factors: two that results per group are multiplied by, float32 (groups, 1) or (groups, columns of a side)."""
    sizes = _fitting(group_sizes, problem.lhs.size(problem.ragged))
    if problem.group in problem.contraction.rhs:
        result = _by_rows(problem, lhs, rhs, sizes)
    else:
        result = _by_sums(problem, lhs, rhs, sizes, factors)
    return vary_as(result, lhs.data, rhs.data)


def _fitting(sizes: jax.Array, rows: int) -> jax.Array:
    """Sizes without what is below zero or beyond the last row."""
    ends = jnp.minimum(jnp.cumsum(jnp.maximum(sizes, 0)), rows).astype(jnp.int32)
    return jnp.diff(ends, prepend=0)


def _by_rows(problem: Problem, lhs: ScaledArray, rhs: ScaledArray, sizes: jax.Array) -> jax.Array:
    from scaledot.kernels.hopper.matmul import matmul
    from scaledot.kernels.hopper.tiles import groups_of_rows

    contraction, group, row, term = problem.contraction, problem.group, problem.ragged, problem.contraction.contracted
    (column,) = (c for c in contraction.rhs_free if c != group)
    in_steps = matmul_operands.scaled_in_steps(problem)
    promote = in_steps or _promotes(problem)
    a, b = _laid(lhs, contraction.lhs, row + term), _laid(rhs, contraction.rhs, group + column + term)
    (m, k), n = a.shape, b.shape[1]
    if in_steps:
        rows = matmul_operands.k_block_scales(lhs, contraction.lhs, row, term, squares=False)
        columns = matmul_operands.k_block_scales(rhs, contraction.rhs, column, term, squares=True, group=group)
    else:
        rows = matmul_operands.row_scales(operands.block_scales(lhs, contraction.lhs, {}), lhs, contraction.lhs, row)
        columns = _of_each_group(rhs, contraction.rhs, group + column)
    squares = in_steps and columns.shape[-1] < n
    sums = tile_configs.sums_of(promote, in_steps, squares)
    shape = tile_configs.Shape(m, n, k, _kind_of(problem), problem.out_dtype.itemsize, sums, row_groups=sizes.size)
    config = tile_configs.config_for(shape)
    result = matmul(
        filled_up(a, matmul_operands.ROWS, LINE),
        jnp.pad(b, ((0, 0), (0, -n % matmul_operands.LAST), (0, -k % LINE))),
        matmul_operands.padded_scales(rows, in_steps, config.team_rows, config.program_rows),
        matmul_operands.padded_scales(columns, in_steps, config.team_columns // (LINE if squares else 1)),
        None,
        out_dtype=problem.out_dtype,
        config=config,
        promote=promote,
        in_steps=in_steps,
        programs=support.sm_count(),
        groups=groups_of_rows(sizes, m, config),
    )
    return _ordered(result[:m, :n], row + column, contraction)


def _by_sums(problem: Problem, lhs: ScaledArray, rhs: ScaledArray, sizes: jax.Array, factors) -> jax.Array:
    from scaledot.kernels.hopper.matmul import matmul
    from scaledot.kernels.hopper.tiles import groups_of_sum

    contraction, term = problem.contraction, problem.ragged
    labels = (contraction.lhs, contraction.lhs_free), (contraction.rhs, contraction.rhs_free)
    in_steps = matmul_operands.scaled_in_steps(problem)
    promote = in_steps or _promotes(problem)
    matrices, scales = [], []
    for q, (of, free), factor in zip((lhs, rhs), labels, factors or (1, 1), strict=True):
        codes = _laid(q, of, term + free)
        matrices.append((codes if _is_whole(problem) else spaced(codes, sizes, LINE)).T)
        if in_steps:
            scales.append(matmul_operands.k_block_scales(q, of, free, term, squares=False))
        else:
            own = matmul_operands.row_scales(operands.block_scales(q, of, {}), q, of, free)[None] * factor
            scales.append(jnp.broadcast_to(own, (sizes.size, own.shape[1])))
    (m, k), n = matrices[0].shape, matrices[1].shape[0]
    sums = tile_configs.sums_of(promote, in_steps, squares=False)
    shape = tile_configs.Shape(m, n, k, _kind_of(problem), problem.out_dtype.itemsize, sums, sum_groups=sizes.size)
    config = tile_configs.config_for(shape)
    result = matmul(
        filled_up(matrices[0], matmul_operands.ROWS, LINE),
        filled_up(matrices[1], matmul_operands.COLUMNS, LINE),
        matmul_operands.padded_scales(scales[0], in_steps, config.team_rows),
        matmul_operands.padded_scales(scales[1], in_steps, config.team_columns),
        None,
        out_dtype=jnp.float32 if in_steps and factors else problem.out_dtype,
        config=config,
        promote=promote,
        in_steps=in_steps,
        programs=support.sm_count(),
        groups=groups_of_sum(-(-sizes // LINE)),
    )[:, :m, :n]
    if in_steps and factors:
        left, right = factors
        result = operands.scaled(result, [left[:, :, None]], [right[:, None]]).astype(problem.out_dtype)
    return _ordered(result, problem.group + contraction.lhs_free + contraction.rhs_free, contraction)


def _laid(q: ScaledArray, labels: str, order: str) -> jax.Array:
    """Codes with their axes in an order."""
    return matmul_operands.codes_of(q).transpose([labels.index(c) for c in order])


def _ordered(result: jax.Array, labels: str, contraction: Contraction) -> jax.Array:
    return result.transpose([labels.index(c) for c in contraction.out])


def _of_each_group(q: ScaledArray, labels: str, wanted: str) -> jax.Array:
    """Factors (groups, 1) or (groups, columns)."""
    (factor,) = operands.block_scales(q, labels, {})
    group, column = (q.shape[labels.index(c)] for c in wanted)
    values = operands.lay(LabeledScale(factor.values, labels), wanted)
    return jnp.broadcast_to(values, (group, column if values.shape[1] > 1 else 1))
