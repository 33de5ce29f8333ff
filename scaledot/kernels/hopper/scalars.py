"""Computes a few scalars in one kernel.

Scales and seeds are computed from a few scalars per tensor, but correctly rounded divisions and hashes are hundreds of
HLO instructions, which XLA optimises and compiles again for every layer of a model. A kernel is lowered once for all
layers, and is one launch.
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
    """Returns small arrays of the types `results`, computed by f from small arrays.

    f takes one nested list of scalars for each array, and returns one for each result. key: everything that f depends
    on, see `launch`. One CTA runs, and each of its threads computes all results.
    """

    def kernel(*refs) -> None:
        inputs, outputs = refs[: len(arrays)], refs[len(arrays) :]
        values = f(*(_nested_list(ref) for ref in inputs))
        for ref, value in zip(outputs, values, strict=True):
            for index in np.ndindex(ref.shape):
                ref[index] = _at(value, index)

    run = plgpu.kernel(
        kernel,
        out_type=tuple(results),
        grid=(1,),
        grid_names=("cta",),
        kernel_name=kernel_name("scalars"),
        compiler_params=_PARAMETERS,
    )
    return launch(("scalars", key), run, *arrays)


def _nested_list(ref: Any) -> Any:
    """Reads the elements of a ref into nested lists."""
    elements = np.empty(ref.shape, object)
    for index in np.ndindex(ref.shape):
        elements[index] = ref[index]
    return elements.tolist()


def _at(nested: Any, index: tuple[int, ...]) -> Any:
    for i in index:
        nested = nested[i]
    return nested
