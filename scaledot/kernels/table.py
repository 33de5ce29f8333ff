"""Ordered tables of kernels, one per kind of operation: which kernel solves a problem, and why.

A Kernel has a name, a function that returns why it cannot solve a problem, and a function that runs it. The first row
of a table that supports a problem is chosen; a caller who names a kernel gets that one or an error with the reason. The
last row, `xla_dequantize` or `xla_cast`, solves every problem and is the reference for the others. Support for another
device is another row: modules above this one do not depend on the device.

For example, mxfp8 (8, 256) times mxfp8 (256, 16) on an H200 is computed by `hopper_bf16`, because `xla_plain`,
`xla_block_scaled`, `hopper_weight_only`, `hopper_fp8` and `hopper_int8`, the rows above it in `DOT`, do not support it.
"""

import dataclasses
import difflib
import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from scaledot import deprecated
from scaledot.kernels import block_scaled, formulations, xla, xla_casts
from scaledot.kernels.formulations import Formulation
from scaledot.kernels.hopper import cast_8bit, cast_four_bit, cast_microscaled, support
from scaledot.kernels.hopper import dot as hopper_dot
from scaledot.kernels.hopper import grouped as hopper_grouped
from scaledot.kernels.hopper import weight_only as hopper_weight_only
from scaledot.kernels.operands import Bias, OuterProduct, aligned_bias, apply_scales
from scaledot.kernels.spec import CastArguments, CastProblem, CastResult, Problem, accumulation_dtype
from scaledot.numerics.calibrate import block_amax
from scaledot.numerics.rounding import flushed_float32
from scaledot.parallel.types import Partitioning, vary_as


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """An entry of a table.

    problem_reason: returns why the kernel cannot solve a problem on any device, or None if it can.
    describe: returns a sentence on how it solves a problem that it supports.
    run: (problem, lhs, rhs, group_sizes) -> result; for casts (problem, x, CastArguments) -> CastResult.
    environment_reason: returns why the kernel cannot run in a program that XLA partitions in this way, or inside a
    shard_map if the argument is None; None if it can. A kernel without this function runs everywhere.
    is_opaque: whether XLA cannot partition the kernel.

    For matmuls: fuses_bias: whether `run` takes a `bias` along the columns of rhs, added before the rounding;
    fuses_outer_product: whether it may also be an OuterProduct.
    fuses_result_scales: whether `run` takes `result_scales` per group, applied before the rounding.
    saves_codes: whether its derivative saves codes as residuals, not dequantised values.
    For casts: group_multiple: groups start at multiples of this many rows in the outputs if rows are contracted.
    """

    name: str
    problem_reason: Callable[[Any], str | None]
    describe: Callable[[Any], str]
    run: Callable[..., Any]
    environment_reason: Callable[[Partitioning | None], str | None] | None = None
    is_opaque: bool = False
    fuses_bias: bool = False
    fuses_outer_product: bool = False
    fuses_result_scales: bool = False
    saves_codes: bool = False
    group_multiple: int = 1

    def unsupported_reason(self, problem: Problem | CastProblem) -> str | None:
        """Returns why the kernel cannot solve the problem here, or None if it can."""
        reason = self.size_reason(problem) or self.problem_reason(problem)
        return reason if reason or self.environment_reason is None else self.environment_reason(problem.partitioning)

    def size_reason(self, problem: Problem | CastProblem) -> str | None:
        """Returns why the kernel cannot be launched for sizes that are symbolic dims of jax.export, or None."""
        if not self.is_opaque or all(isinstance(size, int) for size in problem.sizes):
            return None
        return "its launch needs concrete sizes, but a dim is symbolic"


def kernels_for(problem: Problem | CastProblem) -> tuple[Kernel, ...]:
    """Returns the table for a problem, in order of preference."""
    return {"dot": DOT, "ragged_dot": RAGGED, "cast": CASTS}.get(problem.op, OTHERS)


def tables() -> tuple[tuple[Kernel, ...], ...]:
    """Returns all tables: programs that choose kernels when they are traced have them in their cache key."""
    return DOT, RAGGED, OTHERS, CASTS


def choose(problem: Problem | CastProblem, kernel: str | None = None) -> Kernel:
    """Returns the named kernel, or the first that supports the problem."""
    rows = kernels_for(problem)
    if kernel is None:
        environment = tuple(check(problem.partitioning) for check in _environment_checks(rows))
        return _first_supporting(rows, problem, environment)
    if not isinstance(kernel, str):
        raise TypeError(f"`kernel` must be a name, a function that gives one, or None, not {kernel!r}")
    by_name = {row.name: row for row in rows}
    kernel = deprecated.current("kernel", kernel, deprecated.KERNELS)
    if kernel not in by_name:
        near = difflib.get_close_matches(str(kernel), by_name, n=1) or list(by_name)
        raise ValueError(f"`kernel` {kernel!r} is not one of {problem.op}'s; did you mean {' or '.join(near)}?")
    reason = by_name[kernel].unsupported_reason(problem)
    if reason:
        raise NotImplementedError(f"`kernel` {kernel!r} cannot compute {problem}: {reason}")
    return by_name[kernel]


@functools.lru_cache(maxsize=4096)
def _first_supporting(
    rows: tuple[Kernel, ...], problem: Problem | CastProblem, environment: tuple[str | None, ...]
) -> Kernel:
    """Returns the first row that supports a problem; cached for eager calls.

    environment: the results of `_environment_checks`, which may change between calls.
    """
    reasons = dict(zip(_environment_checks(rows), environment, strict=True))
    runs_here = (row for row in rows if row.environment_reason is None or reasons[row.environment_reason] is None)
    return next(row for row in runs_here if not row.size_reason(problem) and row.problem_reason(problem) is None)


@functools.cache
def _environment_checks(rows: tuple[Kernel, ...]) -> tuple[Callable[[Partitioning | None], str | None], ...]:
    """Returns the distinct `environment_reason` functions of the rows."""
    return tuple(dict.fromkeys(row.environment_reason for row in rows if row.environment_reason is not None))


class Verdict(NamedTuple):
    """Whether a kernel is selected for a problem, and why.

    verdict: "selected", "supported" (it supports the problem, but an earlier row is selected) or "unsupported".
    reason: how the kernel solves the problem, or why it cannot.
    """

    kernel: str
    verdict: str
    reason: str


def verdicts(problem: Problem | CastProblem) -> list[Verdict]:
    """Returns a verdict for each kernel of the problem's table, in order."""
    chosen = choose(problem)
    return [_verdict(row, problem, row is chosen) for row in kernels_for(problem)]


def _verdict(row: Kernel, problem: Problem | CastProblem, is_selected: bool) -> Verdict:
    reason = row.unsupported_reason(problem)
    if reason:
        return Verdict(row.name, "unsupported", reason)
    description = f"{row.describe(problem)}{_on_shards(row, problem)}"
    return Verdict(row.name, "selected" if is_selected else "supported", description)


def explain(problem: Problem | CastProblem) -> str:
    """Returns the verdicts as text, one line per kernel."""
    rows = verdicts(problem)
    width = max(len(row.kernel) for row in rows)
    lines = [f"  {row.kernel:<{width}}  {row.verdict}: {row.reason}" for row in rows]
    return "\n".join([str(problem), *lines])


def _on_shards(row: Kernel, problem: Problem | CastProblem) -> str:
    """Returns how an opaque kernel runs in a program that XLA partitions, as the end of a sentence."""
    devices = problem.partitioning.devices
    if devices == 1 or not row.is_opaque:
        return ""
    gathered = "" if problem.op == "cast" else ", and operands are all-gathered as codes"
    return f"; each of {devices} devices runs it on its shards{gathered}"


def split_by_kernel(problem: CastProblem) -> tuple[CastProblem, ...]:
    """Splits a problem into one per output, if no fused kernel computes all outputs but one computes some of them.

    A fused kernel for all outputs reads x once, and so does XLA, which fuses its casts: these problems are not split.
    """
    if len(problem.outputs) == 1 or choose(problem) is not XLA_CAST:
        return (problem,)
    first, *others = (dataclasses.replace(problem, outputs=(output,)) for output in problem.outputs)
    others = (dataclasses.replace(other, amax=False, column_sums=False) for other in others)
    singles = first, *others
    return singles if any(choose(single) is not XLA_CAST for single in singles) else (problem,)


def group_row_multiple(problem: CastProblem) -> int:
    """Returns the multiple of rows at which groups start, if rows are contracted, for a kernel that can cast them."""
    for kernel in CASTS:
        aligned = dataclasses.replace(problem, group_multiple=kernel.group_multiple)
        if kernel is not XLA_CAST and kernel.unsupported_reason(aligned) is None:
            return kernel.group_multiple
    return problem.group_multiple


def has_matrix_cast_kernels(partitioning: Partitioning | None) -> bool:
    """Whether a cast kernel that takes only matrices can run under a partitioning (None: inside a shard_map)."""
    checks = (kernel.environment_reason for kernel in CASTS if kernel.environment_reason is not None)
    return any(check(partitioning) is None for check in checks)


def scalar_runner(partitioning: Partitioning | None) -> Callable[..., jax.Array]:
    """Returns compute(key, f, *scalars), which returns f(*scalars), a float32 scalar, from one kernel launch.

    If kernels cannot run here, XLA computes f. partitioning: None inside a shard_map.
    key: everything that f depends on, as for `hopper.launch`.
    """

    def compute(key: Hashable, f: Callable[..., jax.Array], *scalars: jax.Array) -> jax.Array:
        is_single = partitioning is None or partitioning.devices == 1
        if not is_single or support.environment_reason(partitioning) is not None:
            return f(*scalars)
        from scaledot.kernels.hopper import scalars as scalar_kernels

        def kernel(*scalars):
            result = [jax.ShapeDtypeStruct((), jnp.float32)]
            return scalar_kernels.compute(key, lambda *numbers: (f(*numbers),), result, *scalars)[0]

        if jax.default_backend() != "gpu":
            return vary_as(kernel(*scalars), *scalars)
        return vary_as(lax.platform_dependent(*scalars, cuda=kernel, default=f), *scalars)

    return compute


def _xla_kernel(name: str, formulate: Callable[[Problem], Formulation | str], run: Callable[..., jax.Array]) -> Kernel:
    """Returns the XLA kernel that supports the problems for which `formulate` returns a Formulation."""

    def problem_reason(problem: Problem) -> str | None:
        formulation = _plain_reason(problem) or formulate(problem)
        return formulation if isinstance(formulation, str) else None

    def describe(problem: Problem) -> str:
        return _description(problem, _formulation(formulate, problem))

    def run_formulated(problem: Problem, lhs, rhs, group_sizes=None) -> jax.Array:
        return run(problem, _formulation(formulate, problem), lhs, rhs, group_sizes)

    return Kernel(name, problem_reason, describe, run_formulated)


def _formulation(formulate: Callable[[Problem], Formulation | str], problem: Problem) -> Formulation:
    formulation = formulate(problem)
    assert isinstance(formulation, Formulation), formulation
    return formulation


def _plain_reason(problem: Problem) -> str | None:
    return "neither operand is quantised" if problem.is_plain else None


def _description(problem: Problem, formulation: Formulation) -> str:
    """Returns a sentence on how a formulation computes a problem."""
    operand_dtype = formulation.operand_dtype
    if formulation.folded == (True, True) and operand_dtype != formulations.BFLOAT16:
        return f"dequantises to {operand_dtype}, then one {operand_dtype} matmul"
    clauses = [f"{operand_dtype} matmul, {formulation.accumulator} accumulation"]
    if formulation.float8_on_cuda:
        clauses = ["float8 matmul on CUDA, bfloat16 elsewhere, float32 accumulation"]
    elif formulations.is_float_on_cuda(problem, formulation):
        clauses = ["int8 matmul and int32 accumulation, on CUDA bfloat16 and float32"]
    if any(formulation.folded):
        names = zip(("lhs", "rhs"), formulation.folded, strict=True)
        folded = " and ".join(name for name, is_folded in names if is_folded)
        clauses.append(f"block scales of {folded} folded into the codes exactly")
    if formulation.tiles:
        tiles = " and ".join(
            f"{-(-problem.lhs.size(c) // size)} tiles of {size} along {c!r}" for c, size in formulation.tiles
        )
        clauses.append(f"scales applied to each of {tiles}")
    elif any(o.format is not None and not f for o, f in zip(problem.operands, formulation.folded, strict=True)):
        clauses.append("scales applied to the result")
    if formulation.is_integer and any(o.has_zero_point for o in problem.operands):
        clauses.append("zero points corrected by sums of codes")
    return "; ".join(clauses)


def _run_upcast(problem: Problem, formulation: Formulation, lhs, rhs, group_sizes=None) -> jax.Array:
    """Runs an exact bfloat16 matmul.

    A program that is traced on a machine without a GPU, and compiled for a GPU, uses the block-scaled matmul instead.
    """
    upcast = functools.partial(xla.run_formulation, problem, formulation)
    if jax.default_backend() == "gpu" or block_scaled.layout_reason(problem) or block_scaled.mesh_reason():
        return upcast(lhs, rhs, group_sizes)
    hardware = functools.partial(block_scaled.run, problem)
    return lax.platform_dependent(lhs, rhs, cuda=hardware, default=upcast)


_PLAIN = Kernel(
    "xla_plain",
    lambda problem: None if problem.is_plain else "an operand is quantised",
    lambda problem: "the contraction of jax.lax",
    xla.run_plain,
)
_BLOCK_SCALED = Kernel(
    "xla_block_scaled",
    lambda problem: _plain_reason(problem) or block_scaled.layout_reason(problem),
    lambda problem: "the block-scaled matmul of the tensor cores, with scales in their stored dtype",
    block_scaled.run,
    lambda partitioning: block_scaled.device_reason() or block_scaled.mesh_reason(),
)


def _mosaic_matmul(name: str, matmul: Any, fuses_outer_product: bool = True) -> Kernel:
    """Returns the entry of a CUDA kernel. matmul: a module or DotKernel with `problem_reason`, `describe` and `run`.

    On a machine with a GPU, the program also has XLA's kernel, for arrays that are placed on a CPU.
    """

    def run(problem: Problem, lhs, rhs, group_sizes=None, bias=None) -> jax.Array:
        kernel = functools.partial(matmul.run, problem)
        if jax.default_backend() != "gpu":
            return kernel(lhs, rhs, bias)
        reference = functools.partial(run_with_bias, _first_xla_kernel(problem), problem)
        return lax.platform_dependent(lhs, rhs, bias, cuda=kernel, default=reference)

    return Kernel(
        name,
        matmul.problem_reason,
        matmul.describe,
        run,
        support.environment_reason,
        is_opaque=True,
        fuses_bias=True,
        fuses_outer_product=fuses_outer_product,
    )


def _first_xla_kernel(problem: Problem) -> Kernel:
    """Returns the first of XLA's kernels that supports a problem with quantised operands."""
    return next(row for row in OTHERS if row.unsupported_reason(problem) is None)


def _differentiated(kernel: Kernel) -> Kernel:
    """Adds a derivative with respect to a plain lhs and the bias: XLA multiplies their tangents."""

    def run(problem: Problem, lhs, rhs, group_sizes=None, bias=None) -> jax.Array:
        @jax.custom_jvp
        def matmul(lhs, rhs, bias):
            return kernel.run(problem, lhs, rhs, bias=bias)

        @matmul.defjvp
        def _(primals, tangents):
            (_, rhs, _), (lhs_tangent, _, bias_tangent) = primals, tangents
            reference = functools.partial(run_with_bias, _first_xla_kernel(problem), problem)
            return matmul(*primals), jax.checkpoint(reference)(lhs_tangent, rhs, bias_tangent)

        return matmul(lhs, rhs, bias)

    return dataclasses.replace(kernel, run=run, saves_codes=True)


def run_with_bias(kernel: Kernel, problem: Problem, lhs, rhs, bias: Bias | None) -> jax.Array:
    """Returns a dot plus a bias, rounded once, by any kernel."""
    if bias is None:
        return kernel.run(problem, lhs, rhs)
    if kernel.fuses_outer_product if isinstance(bias, OuterProduct) else kernel.fuses_bias:
        return kernel.run(problem, lhs, rhs, bias=bias)
    wide = accumulation_dtype(problem.out_dtype)
    total = kernel.run(dataclasses.replace(problem, preferred=wide), lhs, rhs)
    return (total + aligned_bias(bias, problem.contraction, wide)).astype(problem.out_dtype)


def run_with_result_scales(kernel: Kernel, problem: Problem, lhs, rhs, group_sizes, result_scales) -> jax.Array:
    """Returns a result (groups, m, n) times result_scales (groups, 1 or m) and (groups, 1 or n), rounded once."""
    if kernel.fuses_result_scales:
        return kernel.run(problem, lhs, rhs, group_sizes, result_scales=result_scales)
    wide = accumulation_dtype(problem.out_dtype)
    total = kernel.run(dataclasses.replace(problem, preferred=wide), lhs, rhs, group_sizes)
    left, right = result_scales
    return apply_scales(total, [left[:, :, None]], [right[:, None]]).astype(problem.out_dtype)


def _run_grouped(problem: Problem, lhs, rhs, group_sizes, result_scales=None) -> jax.Array:
    """Runs the CUDA kernel; on a machine with a GPU, the program also has XLA's kernel for arrays placed on a CPU."""
    kernel = functools.partial(hopper_grouped.run, problem)
    if jax.default_backend() != "gpu":
        return kernel(lhs, rhs, group_sizes, result_scales)
    xla_kernel = _first_xla_kernel(problem)

    def reference(lhs, rhs, group_sizes, result_scales):
        if result_scales is None:
            return xla_kernel.run(problem, lhs, rhs, group_sizes)
        return run_with_result_scales(xla_kernel, problem, lhs, rhs, group_sizes, result_scales)

    return lax.platform_dependent(lhs, rhs, group_sizes, result_scales, cuda=kernel, default=reference)


def _mosaic_cast(name: str, cast: Any, group_multiple: int = 1) -> Kernel:
    """Returns the row of a CUDA cast kernel from its module, which has `problem_reason`, `describe` and `run`.

    On a machine with a GPU, a program whose outputs are all in the layout of the input also has XLA's cast, for arrays
    that are placed on a CPU. Outputs for matmuls have layouts that XLA's cast does not write.
    """

    def run(problem: CastProblem, x: jax.Array, arguments: CastArguments) -> CastResult:
        kernel = functools.partial(cast.run, problem)
        x = lax.stop_gradient(x)  # codes have no derivative, and Pallas kernels have no differentiation rule
        if jax.default_backend() != "gpu" or any(output.contracted is not None for output in problem.outputs):
            return kernel(x, arguments)
        reference = functools.partial(_reference_cast, problem)
        return lax.platform_dependent(x, arguments, cuda=kernel, default=reference)

    environment = {"environment_reason": support.environment_reason, "is_opaque": True}
    return Kernel(name, cast.problem_reason, cast.describe, run, group_multiple=group_multiple, **environment)


def _reference_cast(problem: CastProblem, x: jax.Array, arguments: CastArguments) -> CastResult:
    """Casts by XLA, with the amax and column sums that the CUDA kernels also return."""
    assert problem.groups is None or not (problem.amax or problem.column_sums)
    result = xla_casts.run(problem, x, arguments)
    amax = block_amax(flushed_float32(x), (0,) * x.ndim).reshape(()) if problem.amax else None
    sums = jnp.sum(flushed_float32(x), axis=tuple(range(x.ndim - 1))) if problem.column_sums else None
    return result._replace(amax=amax, column_sums=sums)


_INTEGER = _xla_kernel("xla_integer", formulations.integer_formulation, xla.run_integers)
_CODES = _xla_kernel("xla_codes", formulations.codes_formulation, xla.run_codes)
_UPCAST = _xla_kernel("xla_upcast", formulations.upcast_formulation, _run_upcast)
_DEQUANTIZE = _xla_kernel("xla_dequantize", formulations.dequantize_formulation, xla.run_dequantized)
_HOPPER_WEIGHT_ONLY = _differentiated(
    _mosaic_matmul("hopper_weight_only", hopper_weight_only, fuses_outer_product=False)
)
_HOPPER_FP8 = _mosaic_matmul("hopper_fp8", hopper_dot.FLOAT8)
_HOPPER_INT8 = _mosaic_matmul("hopper_int8", hopper_dot.INT8)
_HOPPER_GROUPED = Kernel(
    "hopper_grouped",
    hopper_grouped.problem_reason,
    hopper_grouped.describe,
    _run_grouped,
    support.environment_reason,
    is_opaque=True,
    fuses_result_scales=True,
)
_HOPPER_BF16 = _mosaic_matmul("hopper_bf16", hopper_dot.BFLOAT16)

DOT = (
    _PLAIN,
    _BLOCK_SCALED,
    _HOPPER_WEIGHT_ONLY,
    _HOPPER_FP8,
    _HOPPER_INT8,
    _HOPPER_BF16,
    _INTEGER,
    _CODES,
    _UPCAST,
    _DEQUANTIZE,
)
RAGGED = (_PLAIN, _HOPPER_GROUPED, _INTEGER, _CODES, _UPCAST, _DEQUANTIZE)
OTHERS = (_PLAIN, _INTEGER, _CODES, _UPCAST, _DEQUANTIZE)
XLA_CAST = Kernel("xla_cast", xla_casts.problem_reason, xla_casts.describe, xla_casts.run)
CASTS = (
    _mosaic_cast("hopper_cast_8bit", cast_8bit, cast_8bit.GROUP_MULTIPLE),
    _mosaic_cast("hopper_cast_microscaled", cast_microscaled),
    _mosaic_cast("hopper_cast_four_bit", cast_four_bit),
    XLA_CAST,
)
