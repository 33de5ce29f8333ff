"""Inline PTX and MLIR in Pallas kernels, for instructions that Pallas does not offer."""

from collections.abc import Callable
from typing import Any

from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import vector


def inline_mgpu(layouts: tuple, return_type: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates f(launch context, *FragmentedArrays) as a function of JAX arrays in these register layouts."""
    return plgpu.inline_mgpu(arg_types=layouts, return_type=return_type)


def ptx(instructions: str, *operands: Any, result_type: Any) -> Any:
    """Emits inline PTX. $0 is the result and $1, $2, ... are the operands, MLIR values of one register each."""
    return mgpu_utils.inline_ptx(instructions, *operands, result_types=result_type)  # pyright: ignore  (before jax 0.11.2)


def bfloat16_pair(word: Any) -> Any:
    """Bitcasts a 32-bit word to a vector of two bfloat16 values."""
    return vector.bitcast(ir.VectorType.get((2,), ir.BF16Type.get()), word)


def vector_of_one(scalar: Any) -> Any:
    """Returns a scalar as a vector of one element."""
    return vector.broadcast(ir.VectorType.get((1,), scalar.type), scalar)


def element(values: Any, index: int) -> Any:
    """Extracts an element of a vector."""
    return vector.extract(values, [], [index])
