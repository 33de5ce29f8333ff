"""Arithmetic on a few numbers as one kernel.

Scales and seeds follow from a few scalars per tensor, but correctly rounded divisions and hashes are hundreds of HLO
instructions, which XLA optimises and compiles again for every layer of a model. A kernel is lowered once for all of
them, and is one launch.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from scaledot.kernels.hopper.launch import launch
from scaledot.kernels.hopper.support import kernel_name

_PARAMETERS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)


def compute(
    key: Hashable, f: Callable[..., Sequence[Any]], results: Sequence[jax.ShapeDtypeStruct], *arrays: jax.Array
) -> tuple[jax.Array, ...]:
    """Small arrays of these types, from those of the arguments: f takes and returns nested lists of scalars.

    key: what f depends on, as `launch` wants it. Every thread computes the same; one block of threads runs.
    """

    def kernel(*refs) -> None:
        given, made = refs[: len(arrays)], refs[len(arrays) :]
        values = f(*(_numbers(ref) for ref in given))
        for ref, value in zip(made, values, strict=True):
            for index in np.ndindex(ref.shape):
                ref[index] = _at(value, index)

    run = plgpu.kernel(
        kernel,
        out_type=tuple(results),
        grid=(1,),
        grid_names=("program",),
        kernel_name=kernel_name("scalars"),
        compiler_params=_PARAMETERS,
    )
    return launch(("scalars", key), run, *arrays)


def _numbers(ref: Any) -> Any:
    """The elements of a reference, as nested lists."""
    found = np.empty(ref.shape, object)
    for index in np.ndindex(ref.shape):
        found[index] = ref[index]
    return found.tolist()


def _at(nested: Any, index: tuple[int, ...]) -> Any:
    for i in index:
        nested = nested[i]
    return nested
