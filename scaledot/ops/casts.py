"""Casts of checked arrays: make a CastProblem, ask the table, run."""

import functools
from typing import Any

import jax

from scaledot.kernels import table
from scaledot.kernels.spec import CastArguments, CastProblem, CastResult, View
from scaledot.kernels.table import Kernel
from scaledot.ops.operands import Choice
from scaledot.parallel.types import devices_of
from scaledot.programs import program


def make_casts(
    x: jax.Array, views: tuple[View, ...], given: CastArguments, kernel: Choice = None, devices: int = 1, **wanted
) -> CastResult:
    """All casts of x that the views ask for, in as few passes as a kernel of the table makes them.

    devices: at least so many that XLA partitions the program over, where that of x does not say it all. `wanted` are
    further fields of the CastProblem.
    """
    groups = None if given.group_sizes is None else given.group_sizes.shape[0]
    devices = max(devices, devices_of(x))
    problem = _problem(x.shape, views, given.names, groups=groups, devices=devices, **wanted)
    if len(views) == 1 or isinstance(kernel, str):
        return _solve(problem, kernel, x, given)
    first, *others = [_solve(each, kernel, x, given) for each in table.passes(problem)]
    return first if not others else first._replace(arrays=sum((one.arrays for one in others), first.arrays))


@functools.lru_cache(maxsize=4096)
def _problem(*fields, **named_fields) -> CastProblem:
    """One object for equal problems: an eager call looks them up by identity."""
    return CastProblem(*fields, **named_fields)


def _solve(problem: CastProblem, kernel: Choice, x: jax.Array, given: CastArguments) -> CastResult:
    name = kernel(problem) if callable(kernel) else kernel
    made = program(_run, problem, table.choose(problem, name))(x, given)
    return made if len(made.arrays) == 1 else made._replace(arrays=_shared(problem, made.arrays))


def _shared(problem: CastProblem, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arrays, one object for equal ones: what is saved of it for the backward pass is saved once."""
    first: dict[Any, Any] = {}
    keys = ((view.plan, view.key, jax.tree.structure(q)) for view, q in zip(problem.views, arrays, strict=True))
    return tuple(first.setdefault(key, q) for key, q in zip(keys, arrays, strict=True))


def _run(problem: CastProblem, kernel: Kernel, x: jax.Array, given: CastArguments) -> CastResult:
    return kernel.run(problem, x, given)
