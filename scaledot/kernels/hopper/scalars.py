"""Scalar computations (scales, seeds) fused into one single-CTA kernel.

Scales and seeds follow from a few scalars per tensor, but correctly rounded divisions and hashes are hundreds of HLO
instructions, which XLA optimises and compiles again for every layer of a model. A kernel is lowered once for all of
them, and is one launch.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from scaledot.kernels.hopper.launch import call_exported
from scaledot.kernels.hopper.support import kernel_name

_PARAMETERS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)


def compute(
    key: Hashable, f: Callable[..., Sequence[Any]], results: Sequence[jax.ShapeDtypeStruct], *arrays: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns f(*arrays), small arrays of the types `results`, from one kernel.

    f: takes and returns nested lists of scalars. key: everything that f depends on, see `launch.call_exported`.
    The grid is one CTA of one warpgroup; all 128 threads compute and store the same values.
    """

    def body(*refs) -> None:
        in_refs, out_refs = refs[: len(arrays)], refs[len(arrays) :]
        values = f(*(_load_scalars(ref) for ref in in_refs))
        for ref, value in zip(out_refs, values, strict=True):
            for index in np.ndindex(ref.shape):
                ref[index] = _at(value, index)

    kernel = plgpu.kernel(
        body,
        out_type=tuple(results),
        grid=(1,),
        grid_names=("cta",),
        kernel_name=kernel_name("scalars"),
        compiler_params=_PARAMETERS,
    )
    return call_exported(("scalars", key), kernel, *arrays)


def _load_scalars(ref: Any) -> Any:
    """Returns the elements of a ref as nested lists."""
    scalars = np.empty(ref.shape, object)
    for index in np.ndindex(ref.shape):
        scalars[index] = ref[index]
    return scalars.tolist()


def _at(nested: Any, index: tuple[int, ...]) -> Any:
    for i in index:
        nested = nested[i]
    return nested
