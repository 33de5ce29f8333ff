"""Casts of checked arrays: make a CastProblem, ask the table, run."""

import functools
from typing import Any

import jax

from scaledot.kernels import table
from scaledot.kernels.spec import CastArguments, CastProblem, CastResult, View
from scaledot.kernels.table import Kernel
from scaledot.ops.operands import Choice
from scaledot.parallel import partitioned_ops
from scaledot.parallel.types import ONE_DEVICE, Partitioning, partitioning_of
from scaledot.programs import program


def make_casts(
    x: jax.Array,
    views: tuple[View, ...],
    given: CastArguments,
    kernel: Choice = None,
    partitioning: Partitioning = ONE_DEVICE,
    members: tuple[tuple[int, ...], ...] | None = None,
    **wanted,
) -> CastResult:
    """All casts of x that the views ask for, in as few passes as a kernel of the table makes them.

    partitioning: how XLA partitions the program, where the type of x does not say it all. members: for each axis of x,
    the sizes of the axes that were flattened to it. `wanted` are further fields of the CastProblem.
    """
    groups = None if given.group_sizes is None else given.group_sizes.shape[0]
    partitioning = partitioning.joined(partitioning_of(x))
    if groups is not None or (x.ndim != 2 and any(view.is_stochastic for view in views)):
        partitioning = partitioning._replace(is_automatic=False)  # there is no rule for the shards of these
    problem = _problem(x.shape, views, given.names, groups=groups, partitioning=partitioning, **wanted)
    if len(views) == 1 or isinstance(kernel, str):
        return _solve(problem, kernel, x, given, members)
    first, *others = [_solve(each, kernel, x, given, members) for each in table.passes(problem)]
    return first if not others else first._replace(arrays=sum((one.arrays for one in others), first.arrays))


@functools.lru_cache(maxsize=4096)
def _problem(*fields, **named_fields) -> CastProblem:
    """One object for equal problems: an eager call looks them up by identity."""
    return CastProblem(*fields, **named_fields)


def _solve(problem: CastProblem, kernel: Choice, x: jax.Array, given: CastArguments, members) -> CastResult:
    chosen = table.choose(problem, kernel(problem) if callable(kernel) else kernel)
    if chosen.is_opaque and problem.partitioning.devices > 1:
        made = partitioned_ops.cast(problem, chosen, x, given, members or tuple((size,) for size in x.shape))
    else:
        made = program(_run, problem, chosen)(x, given)
    return made if len(made.arrays) == 1 else made._replace(arrays=_shared(problem, made.arrays))


def _shared(problem: CastProblem, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arrays, one object for equal ones: what is saved of it for the backward pass is saved once."""
    first: dict[Any, Any] = {}
    keys = ((view.spec, view.key, jax.tree.structure(q)) for view, q in zip(problem.views, arrays, strict=True))
    return tuple(first.setdefault(key, q) for key, q in zip(keys, arrays, strict=True))


def _run(problem: CastProblem, kernel: Kernel, x: jax.Array, given: CastArguments) -> CastResult:
    return kernel.run(problem, x, given)
