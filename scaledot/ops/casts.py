"""Runs the casts of a checked array: makes a CastProblem, chooses a kernel from the table, and calls it."""

import functools
from typing import Any

import jax

from scaledot.kernels import table
from scaledot.kernels.spec import CastArguments, CastOutput, CastProblem, CastResult
from scaledot.kernels.table import Kernel
from scaledot.numerics.scale_search import check_stochastic
from scaledot.ops.operands import KernelChoice
from scaledot.parallel import partitioned_ops
from scaledot.parallel.types import ONE_DEVICE, Partitioning, partitioning_of
from scaledot.programs import program


def run_casts(
    x: jax.Array,
    outputs: tuple[CastOutput, ...],
    arguments: CastArguments,
    kernel: KernelChoice = None,
    partitioning: Partitioning = ONE_DEVICE,
    flattened_sizes: tuple[tuple[int, ...], ...] | None = None,
    **fields,
) -> CastResult:
    """Casts x to all outputs, by one kernel that reads x once if the table has one, else by a kernel for each output.

    partitioning: of the program by XLA, merged with that of the type of x. flattened_sizes: for each axis of x, the
    sizes of the axes that were flattened to it. `fields` are further fields of the CastProblem.
    """
    _check_rounding(outputs, arguments)
    groups = None if arguments.group_sizes is None else arguments.group_sizes.shape[0]
    partitioning = partitioning.joined(partitioning_of(x))
    if groups is not None or (x.ndim != 2 and any(output.is_stochastic for output in outputs)):
        partitioning = partitioning._replace(is_automatic=False)  # partitioned_ops cannot partition these
    problem = _problem(x.shape, outputs, arguments.passed, groups=groups, partitioning=partitioning, **fields)
    if len(outputs) == 1 or isinstance(kernel, str):
        return _run_problem(problem, kernel, x, arguments, flattened_sizes)
    first, *others = [
        _run_problem(each, kernel, x, arguments, flattened_sizes) for each in table.split_by_kernel(problem)
    ]
    return first if not others else first._replace(arrays=sum((one.arrays for one in others), first.arrays))


def _check_rounding(outputs: tuple[CastOutput, ...], arguments: CastArguments) -> None:
    """Raises for stochastic rounding of a format whose searched scales saturate elements, unless scales are passed."""
    for output in outputs:
        if output.is_stochastic and not output.spec.eden and arguments.scale is None:
            check_stochastic(output.spec.format)


@functools.lru_cache(maxsize=4096)
def _problem(*fields, **named_fields) -> CastProblem:
    """The CastProblem, one object for equal fields, so that the caches of an eager call look it up by identity."""
    return CastProblem(*fields, **named_fields)


def _run_problem(
    problem: CastProblem, kernel: KernelChoice, x: jax.Array, arguments: CastArguments, flattened_sizes
) -> CastResult:
    chosen = table.choose(problem, kernel(problem) if callable(kernel) else kernel)
    if chosen.is_opaque and problem.partitioning.devices > 1:
        result = partitioned_ops.cast(
            problem, chosen, x, arguments, flattened_sizes or tuple((size,) for size in x.shape)
        )
    else:
        result = program(_run, problem, chosen)(x, arguments)
    return result if len(result.arrays) == 1 else result._replace(arrays=_deduplicated(problem, result.arrays))


def _deduplicated(problem: CastProblem, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arrays, with the same object for equal outputs, so that it is saved as a residual once."""
    first: dict[Any, Any] = {}
    keys = ((*output.codes_key, jax.tree.structure(q)) for output, q in zip(problem.outputs, arrays, strict=True))
    return tuple(first.setdefault(key, q) for key, q in zip(keys, arrays, strict=True))


def _run(problem: CastProblem, kernel: Kernel, x: jax.Array, arguments: CastArguments) -> CastResult:
    return kernel.run(problem, x, arguments)
