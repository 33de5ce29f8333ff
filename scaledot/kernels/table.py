"""The ordered tables of kernels, one per operation: choose one, and explain why.

A kernel is a name, a sentence on how it would solve a problem, a reason for which it cannot, and a run. The
first that supports a problem is taken; a name means that kernel or an error with its reason. The last one,
`xla_dequantize` or `xla_cast`, solves everything and is what the others are held to. A kernel for another device is one
more row: nothing above this module knows of devices.
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
from scaledot.kernels.hopper import cast_8bit, cast_microscaled, support
from scaledot.kernels.hopper import dot as hopper_dot
from scaledot.kernels.hopper import grouped as hopper_grouped
from scaledot.kernels.hopper import weight_only as hopper_weight_only
from scaledot.kernels.operands import LabeledScale, lay, scaled
from scaledot.kernels.spec import CastArguments, CastProblem, CastResult, Problem, accumulation_dtype
from scaledot.numerics.bits import flush
from scaledot.numerics.calibrate import block_amax
from scaledot.parallel.types import Partitioning, vary_as


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """A row of a table.

    problem_reason: why it cannot solve a problem, whatever the device, or None; place_reason: why it does not run in a
    program that XLA partitions so, or inside a shard_map for None (XLA's own kernels run anywhere). is_opaque: whether
    XLA cannot partition it.
    how: one sentence on what it does with a problem that it supports.
    run: (problem, lhs, rhs, group_sizes) -> result; of a cast (problem, x, CastArguments) -> CastResult.
    Of matmuls: adds_bias: whether `run` also takes a `bias` along the columns of rhs, added before the rounding.
    scales_groups: whether it takes `result_scales` per group, applied before it. keeps_codes: whether its
    derivative keeps codes for the backward pass and not values made of them.
    Of casts: group_multiple: of rows, at which it places groups whose rows are contracted.
    """

    name: str
    problem_reason: Callable[[Any], str | None]
    how: Callable[[Any], str]
    run: Callable[..., Any]
    place_reason: Callable[[Partitioning | None], str | None] | None = None
    is_opaque: bool = False
    adds_bias: bool = False
    scales_groups: bool = False
    keeps_codes: bool = False
    group_multiple: int = 1

    def supports(self, problem: Problem | CastProblem) -> str | None:
        """A reason why not, or None."""
        reason = self.problem_reason(problem)
        return reason if reason or self.place_reason is None else self.place_reason(problem.partitioning)


def kernels_for(problem: Problem | CastProblem) -> tuple[Kernel, ...]:
    """The kernels of a problem's kind, in the order in which they are tried."""
    return {"dot": DOT, "ragged_dot": RAGGED, "cast": CASTS}.get(problem.op, OTHERS)


def tables() -> tuple[tuple[Kernel, ...], ...]:
    """All of them: what programs whose kernels are chosen when they are traced depend on, besides what JAX knows."""
    return DOT, RAGGED, OTHERS, CASTS


def choose(problem: Problem | CastProblem, kernel: str | None = None) -> Kernel:
    """The named kernel, or the first that supports the problem."""
    rows = kernels_for(problem)
    if kernel is None:
        return _first(rows, problem, tuple(find(problem.partitioning) for find in _place_reasons(rows)))
    if not isinstance(kernel, str):
        raise TypeError(f"`kernel` must be a name, a function that gives one, or None, not {kernel!r}")
    named = {row.name: row for row in rows}
    kernel = deprecated.current("kernel", kernel, deprecated.KERNELS)
    if kernel not in named:
        near = difflib.get_close_matches(str(kernel), named, n=1) or list(named)
        raise ValueError(f"`kernel` {kernel!r} is not one of {problem.op}'s; did you mean {' or '.join(near)}?")
    reason = named[kernel].supports(problem)
    if reason:
        raise NotImplementedError(f"`kernel` {kernel!r} cannot compute {problem}: {reason}")
    return named[kernel]


@functools.lru_cache(maxsize=4096)
def _first(rows: tuple[Kernel, ...], problem: Problem | CastProblem, places: tuple[str | None, ...]) -> Kernel:
    """The first kernel that supports a problem, found once: an eager call asks every time. places: `_place_reasons`."""
    reasons = dict(zip(_place_reasons(rows), places, strict=True))
    runs_here = (row for row in rows if row.place_reason is None or reasons[row.place_reason] is None)
    return next(row for row in runs_here if row.problem_reason(problem) is None)


@functools.cache
def _place_reasons(rows: tuple[Kernel, ...]) -> tuple[Callable[[Partitioning | None], str | None], ...]:
    """What the rows ask about the place that a program runs in, each question once."""
    return tuple(dict.fromkeys(row.place_reason for row in rows if row.place_reason is not None))


class Verdict(NamedTuple):
    """verdict: "taken", "could" (it supports the problem too) or "no". reason: how it solves it, or why not."""

    kernel: str
    verdict: str
    reason: str


def verdicts(problem: Problem | CastProblem) -> list[Verdict]:
    """Every kernel of the problem's table, in order, and why it was taken or passed over."""
    chosen = choose(problem)
    return [_verdict(row, problem, row is chosen) for row in kernels_for(problem)]


def _verdict(row: Kernel, problem: Problem | CastProblem, is_taken: bool) -> Verdict:
    reason = row.supports(problem)
    if reason:
        return Verdict(row.name, "no", reason)
    return Verdict(row.name, "taken" if is_taken else "could", f"{row.how(problem)}{_on_shards(row, problem)}")


def explain(problem: Problem | CastProblem) -> str:
    """The verdicts as text."""
    rows = verdicts(problem)
    width = max(len(row.kernel) for row in rows)
    words = {"taken": "TAKEN", "could": "could", "no": "no"}
    lines = [f"  {row.kernel:<{width}}  {words[row.verdict]}: {row.reason}" for row in rows]
    return "\n".join([str(problem), *lines])


def _on_shards(row: Kernel, problem: Problem | CastProblem) -> str:
    """What becomes of a kernel in a program that XLA partitions."""
    devices = problem.partitioning.devices
    if devices == 1 or not row.is_opaque:
        return ""
    gathered = "" if problem.op == "cast" else ", and operands are gathered as codes"
    return f"; each of {devices} devices runs it on its shards{gathered}"


def passes(problem: CastProblem) -> tuple[CastProblem, ...]:
    """The problem itself where one kernel makes all of its casts, or none but XLA any; else a problem for each cast."""
    if len(problem.views) == 1 or choose(problem) is not XLA_CAST:
        return (problem,)
    first, *others = (dataclasses.replace(problem, views=(view,)) for view in problem.views)
    others = (dataclasses.replace(other, amax=False, column_sums=False) for other in others)
    singles = first, *others
    return singles if any(choose(single) is not XLA_CAST for single in singles) else (problem,)


def spacing(problem: CastProblem) -> int:
    """Rows at whose multiples groups begin, for a cast of rows that are contracted: as a kernel that makes it wants."""
    for kernel in CASTS:
        spaced = dataclasses.replace(problem, group_multiple=kernel.group_multiple)
        if kernel is not XLA_CAST and kernel.supports(spaced) is None:
            return kernel.group_multiple
    return problem.group_multiple


def casts_matrices(partitioning: Partitioning | None) -> bool:
    """Whether kernels that cast matrices, and nothing else, run in such a program, or inside a shard_map for None."""
    return any(kernel.place_reason is not None and kernel.place_reason(partitioning) is None for kernel in CASTS)


def scalar_program(partitioning: Partitioning | None) -> Callable[..., jax.Array]:
    """What computes f(*scalars), a float32 scalar, from (key, f, *scalars): a kernel where kernels run, or f itself.

    partitioning: as in `casts_matrices`. key: what f depends on.
    """

    def compute(key: Hashable, f: Callable[..., jax.Array], *scalars: jax.Array) -> jax.Array:
        is_one = partitioning is None or partitioning.devices == 1
        if not is_one or support.place_reason(partitioning) is not None:
            return f(*scalars)
        from scaledot.kernels.hopper import scalars as scalar_kernels

        def kernel(*scalars):
            result = [jax.ShapeDtypeStruct((), jnp.float32)]
            return scalar_kernels.compute(key, lambda *numbers: (f(*numbers),), result, *scalars)[0]

        if jax.default_backend() != "gpu":
            return vary_as(kernel(*scalars), *scalars)
        return vary_as(lax.platform_dependent(*scalars, cuda=kernel, default=f), *scalars)

    return compute


def _of_form(name: str, make: Callable[[Problem], Formulation | str], run: Callable[..., jax.Array]) -> Kernel:
    """A kernel whose support is whether its form can be made."""

    def problem_reason(problem: Problem) -> str | None:
        form = _scaled_reason(problem) or make(problem)
        return form if isinstance(form, str) else None

    def how(problem: Problem) -> str:
        return _sentence(problem, _formed(make, problem))

    def run_formed(problem: Problem, lhs, rhs, group_sizes=None) -> jax.Array:
        return run(problem, _formed(make, problem), lhs, rhs, group_sizes)

    return Kernel(name, problem_reason, how, run_formed)


def _formed(make: Callable[[Problem], Formulation | str], problem: Problem) -> Formulation:
    form = make(problem)
    assert isinstance(form, Formulation), form
    return form


def _scaled_reason(problem: Problem) -> str | None:
    return "neither operand is scaled" if problem.is_plain else None


def _sentence(problem: Problem, form: Formulation) -> str:
    """What a form does, in words."""
    if form.folded == (True, True) and form.carrier != formulations.BFLOAT16:
        return f"values are multiplied out in {form.carrier} first, then one {form.carrier} product"
    parts = [f"{form.carrier} products, {form.accumulator} sums"]
    if form.float8_on_cuda:
        parts = ["float8 products on CUDA, bfloat16 elsewhere, float32 sums"]
    elif formulations.is_float_on_cuda(problem, form):
        parts = ["int8 products and int32 sums, on CUDA bfloat16 and float32"]
    if any(form.folded):
        sides = " and ".join(n for n, f in zip(("lhs", "rhs"), form.folded, strict=True) if f)
        parts.append(f"block scales of {sides} folded in exactly")
    if form.tiles:
        cuts = " and ".join(f"{-(-problem.lhs.size(c) // size)} tiles of {size} along {c!r}" for c, size in form.tiles)
        parts.append(f"scales applied to each of {cuts}")
    elif any(o.format is not None and not folded for o, folded in zip(problem.operands, form.folded, strict=True)):
        parts.append("scales applied to the result")
    if form.is_integer and any(o.zero for o in problem.operands):
        parts.append("zero points corrected by sums of codes")
    return "; ".join(parts)


def _run_upcast(problem: Problem, form: Formulation, lhs, rhs, group_sizes=None) -> jax.Array:
    """Exact in bfloat16; a program compiled here for a GPU elsewhere takes its block-scaled product."""
    upcast = functools.partial(xla.run_form, problem, form)
    if jax.default_backend() == "gpu" or block_scaled.layout_reason(problem) or block_scaled.mesh_reason():
        return upcast(lhs, rhs, group_sizes)
    hardware = functools.partial(block_scaled.run, problem)
    return lax.platform_dependent(lhs, rhs, cuda=hardware, default=upcast)


_PLAIN = Kernel(
    "xla_plain",
    lambda problem: None if problem.is_plain else "an operand is scaled",
    lambda problem: "the product of jax.lax",
    xla.run_plain,
)
_BLOCK_SCALED = Kernel(
    "xla_block_scaled",
    lambda problem: _scaled_reason(problem) or block_scaled.layout_reason(problem),
    lambda problem: "the block-scaled product of the tensor cores, scales in their own dtype",
    block_scaled.run,
    lambda partitioning: block_scaled.device_reason() or block_scaled.mesh_reason(),
)


def _hopper(name: str, product: Any) -> Kernel:
    """A kernel for CUDA, by what says whether and how, and runs it.

    Where a program runs on something else, as on an array put on a CPU, XLA's takes its place.
    """

    def run(problem: Problem, lhs, rhs, group_sizes=None, bias=None) -> jax.Array:
        kernel = functools.partial(product.run, problem)
        if jax.default_backend() != "gpu":
            return kernel(lhs, rhs, bias)
        reference = functools.partial(run_and_add, _without_hopper(problem), problem)
        return lax.platform_dependent(lhs, rhs, bias, cuda=kernel, default=reference)

    return Kernel(name, product.problem_reason, product.how, run, support.place_reason, is_opaque=True, adds_bias=True)


def _without_hopper(problem: Problem) -> Kernel:
    """The first of XLA's kernels that supports a problem of scaled operands."""
    return next(row for row in OTHERS if row.supports(problem) is None)


def _differentiated(kernel: Kernel) -> Kernel:
    """The kernel of a plain lhs, whose derivative is the product of its tangent, by XLA."""

    def run(problem: Problem, lhs, rhs, group_sizes=None, bias=None) -> jax.Array:
        @jax.custom_jvp
        def product(lhs, rhs, bias):
            return kernel.run(problem, lhs, rhs, bias=bias)

        @product.defjvp
        def _(primals, tangents):
            (_, rhs, _), (change, _, bias_change) = primals, tangents
            reference = functools.partial(run_and_add, _without_hopper(problem), problem)
            return product(*primals), jax.checkpoint(reference)(change, rhs, bias_change)

        return product(lhs, rhs, bias)

    return dataclasses.replace(kernel, run=run, keeps_codes=True)


def run_and_add(kernel: Kernel, problem: Problem, lhs, rhs, bias) -> jax.Array:
    """A dot plus a bias along the columns of rhs, with one rounding, whatever the kernel."""
    if bias is None:
        return kernel.run(problem, lhs, rhs)
    if kernel.adds_bias:
        return kernel.run(problem, lhs, rhs, bias=bias)
    wide = accumulation_dtype(problem.out_dtype)
    total = kernel.run(dataclasses.replace(problem, preferred=wide), lhs, rhs)
    bias = lay(LabeledScale(bias.astype(wide), problem.contraction.rhs_free), problem.contraction.out)
    return (total + bias).astype(problem.out_dtype)


def run_and_scale(kernel: Kernel, problem: Problem, lhs, rhs, group_sizes, result_scales) -> jax.Array:
    """A result (groups, m, n) times factors (groups, 1 or m) and (groups, 1 or n), with one rounding."""
    if kernel.scales_groups:
        return kernel.run(problem, lhs, rhs, group_sizes, result_scales=result_scales)
    wide = accumulation_dtype(problem.out_dtype)
    total = kernel.run(dataclasses.replace(problem, preferred=wide), lhs, rhs, group_sizes)
    left, right = result_scales
    return scaled(total, [left[:, :, None]], [right[:, None]]).astype(problem.out_dtype)


def _run_grouped(problem: Problem, lhs, rhs, group_sizes, result_scales=None) -> jax.Array:
    """A kernel for CUDA; where a program runs on something else, the next of the table that can takes its place."""
    kernel = functools.partial(hopper_grouped.run, problem)
    if jax.default_backend() != "gpu":
        return kernel(lhs, rhs, group_sizes, result_scales)
    elsewhere = _without_hopper(problem)

    def reference(lhs, rhs, group_sizes, result_scales):
        if result_scales is None:
            return elsewhere.run(problem, lhs, rhs, group_sizes)
        return run_and_scale(elsewhere, problem, lhs, rhs, group_sizes, result_scales)

    return lax.platform_dependent(lhs, rhs, group_sizes, result_scales, cuda=kernel, default=reference)


def _hopper_cast(name: str, cast: Any, group_multiple: int = 1) -> Kernel:
    """A cast for CUDA. An ordinary one is the reference's where a program runs on something else, as matmuls are."""

    def run(problem: CastProblem, x: jax.Array, given: CastArguments) -> CastResult:
        kernel = functools.partial(cast.run, problem)
        x = lax.stop_gradient(x)  # codes have no derivative, and the kernel has no rule for one
        if jax.default_backend() != "gpu" or any(view.contracted is not None for view in problem.views):
            return kernel(x, given)
        reference = functools.partial(_reference_cast, problem)
        return lax.platform_dependent(x, given, cuda=kernel, default=reference)

    place = {"place_reason": support.place_reason, "is_opaque": True}
    return Kernel(name, cast.problem_reason, cast.how, run, group_multiple=group_multiple, **place)


def _reference_cast(problem: CastProblem, x: jax.Array, given: CastArguments) -> CastResult:
    """XLA's casts, and the amax and sums that kernels make on the way."""
    assert problem.groups is None or not (problem.amax or problem.column_sums)
    made = xla_casts.run(problem, x, given)
    amax = block_amax(flush(x.astype(jnp.float32)), (0,) * x.ndim).reshape(()) if problem.amax else None
    sums = jnp.sum(x.astype(jnp.float32), axis=tuple(range(x.ndim - 1))) if problem.column_sums else None
    return made._replace(amax=amax, column_sums=sums)


_INTEGER = _of_form("xla_integer", formulations.integer_form, xla.run_integers)
_CODES = _of_form("xla_codes", formulations.codes_form, xla.run_codes)
_UPCAST = _of_form("xla_upcast", formulations.upcast_form, _run_upcast)
_DEQUANTIZE = _of_form("xla_dequantize", formulations.dequantize_form, xla.run_dequantized)
_HOPPER_WEIGHT_ONLY = _differentiated(_hopper("hopper_weight_only", hopper_weight_only))
_HOPPER_FP8 = _hopper("hopper_fp8", hopper_dot.FLOAT8)
_HOPPER_INT8 = _hopper("hopper_int8", hopper_dot.INT8)
_HOPPER_GROUPED = Kernel(
    "hopper_grouped",
    hopper_grouped.problem_reason,
    hopper_grouped.how,
    _run_grouped,
    support.place_reason,
    is_opaque=True,
    scales_groups=True,
)
_HOPPER_BF16 = _hopper("hopper_bf16", hopper_dot.BFLOAT16)

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
XLA_CAST = Kernel("xla_cast", xla_casts.problem_reason, xla_casts.how, xla_casts.run)
CASTS = (
    _hopper_cast("hopper_cast_8bit", cast_8bit, cast_8bit.GROUP_MULTIPLE),
    _hopper_cast("hopper_cast_microscaled", cast_microscaled),
    XLA_CAST,
)
