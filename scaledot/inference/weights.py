"""The kernel of one layer: which of its axes are contracted, how it is quantised, and the matmuls that take it.

Blocks run along the contracting dims. For a kernel with several of them, such as (heads, head dim, features) of an
output projection, they run along these dims as if flattened to one: `int8` has one scale for each feature, and `nvfp4`
one for every 16 elements of heads × head dim. Leading axes of stacked layers are quantised one layer at a time.

Matmuls are those of `scaledot.ops`, with a plain x and a ScaledArray w, so kernels are chosen as everywhere. Several
contracting dims are flattened to one first, because kernels for Hopper take matrices.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scaledot.array import ScaledArray
from scaledot.formats import Format
from scaledot.kernels.spec import Problem
from scaledot.kernels.table import choose
from scaledot.ops.conv import conv_general_dilated
from scaledot.ops.dot import dot_general
from scaledot.ops.einsum import einsum
from scaledot.ops.operands import KernelChoice
from scaledot.ops.quantize import quantize
from scaledot.parallel.types import is_sharded
from scaledot.path_patterns import Layer


class Axes(NamedTuple):
    """The axes of one kernel, without those of stacked layers: their number, and which are contracted or batch axes."""

    ndim: int
    contracted: tuple[int, ...]
    batch: tuple[int, ...] = ()

    @property
    def order(self) -> tuple[int, ...]:
        """Batch, contracting and free axes, in this order."""
        leading = self.batch + self.contracted
        return leading + tuple(axis for axis in range(self.ndim) if axis not in leading)


def dense_axes(contracted: int, free: int, batch: int = 0) -> Axes:
    """The axes of a kernel (batch axes, contracting axes, free axes), from the number of each."""
    return Axes(batch + contracted + free, tuple(range(batch, batch + contracted)), tuple(range(batch)))


def conv_axes(spatial: int) -> Axes:
    """The axes of a convolution kernel (spatial axes, input features of a group, output features)."""
    return dense_axes(spatial + 1, 1)


def einsum_axes(subscripts: str) -> Axes | str:
    """The axes of the second operand of an einsum, or why it cannot be quantised.

    >>> einsum_axes("...d,dhk->...hk")
    Axes(ndim=3, contracted=(0,), batch=())
    """
    inputs, _, out = subscripts.replace(" ", "").partition("->")
    x, _, kernel = inputs.partition(",")
    if "." in kernel or len(set(kernel)) != len(kernel):
        return f"its einsum {subscripts!r} has an ellipsis or a repeated label for the kernel"
    if any(c not in x + out for c in kernel):
        return f"its einsum {subscripts!r} sums the kernel over a label that is not in its input"
    contracted = tuple(i for i, c in enumerate(kernel) if c in x and c not in out)
    if not contracted:
        return f"its einsum {subscripts!r} has no contracting dim"
    return Axes(len(kernel), contracted, tuple(i for i, c in enumerate(kernel) if c in x and c in out))


def obstacle(kernel: Any, axes: Axes | str, format: Format) -> str | None:
    """Why a kernel, or a stack of kernels, cannot be quantised to a format; None if it can.

    axes: those of one kernel, or the reason why it cannot be quantised to any format.
    """
    if isinstance(kernel, ScaledArray):
        return f"its kernel is quantised already: {kernel!r}"
    if isinstance(axes, str):
        return axes
    if not jnp.issubdtype(kernel.dtype, jnp.floating) or jnp.finfo(kernel.dtype).bits < 16:
        return f"its kernel is {described(kernel)}; floats of at least 16 bits can be quantised"
    if kernel.ndim < axes.ndim:
        return f"its kernel is {described(kernel)}, which should have {axes.ndim} axes"
    try:
        jax.eval_shape(lambda w: quantize_kernel(w, axes, format), _spec(kernel))
    except _CutBlocksError as error:
        return str(error)
    return None


class _CutBlocksError(ValueError):
    """Blocks along flattened contracting dims are no blocks of the kernel's own axes."""


def quantize_kernel(w: jax.Array, axes: Axes, format: Format) -> ScaledArray:
    """Quantises a kernel, or a stack of kernels along leading axes, in blocks along its contracting dims.

    The last block along a contracting dim may be short. `axis=0` of a Dense kernel (inputs, outputs) is the layout that
    weight-only kernels read.

    >>> quantize_kernel(jnp.ones((3, 64, 8)), dense_axes(1, 1), Format("int4", "int4", block=(32,)))
    ScaledArray(int4[3,64,8], block=(32, 1), dtype=float32)
    """
    if w.ndim > axes.ndim:
        return lax.map(lambda layer: quantize_kernel(layer, axes, format), w)
    transposed = w.transpose(axes.order)
    shape, batch, contracted = transposed.shape, len(axes.batch), len(axes.contracted)
    k = shape[batch : batch + contracted]
    matrices = transposed.reshape(*shape[:batch], math.prod(k), math.prod(shape[batch + contracted :]))
    if format.block is None or len(format.block) == 1:
        q = quantize(matrices, format, axis=-2, pad=True)
    else:  # a block of several axes ends at `axis`
        q = quantize(matrices.mT, format, pad=True).mT
    try:
        q = q.reshape(shape)
    except ValueError:
        raise _CutBlocksError(
            f"blocks of {q.block} do not fit its contracting dims of {k} and free dims of {shape[batch + contracted :]}"
            "; a format with one scale per channel does, such as 'int8'"
        ) from None
    return q.transpose(np.argsort(axes.order))


def weight_dot_general(
    x,
    w,
    dimension_numbers,
    precision=None,
    preferred_element_type=None,
    out_sharding=None,
    *,
    kernel: KernelChoice = None,
) -> jax.Array:
    """`scaledot.dot_general` of an input and a kernel, as layers of Flax call `jax.lax.dot_general`."""
    x, w, dimension_numbers = _with_one_contracting_dim(x, w, dimension_numbers)
    keywords = {"preferred_element_type": preferred_element_type, "out_sharding": out_sharding}
    return dot_general(x, w, dimension_numbers, precision, kernel=kernel, **keywords)


def weight_einsum(subscripts: str, x, w, *, kernel: KernelChoice = None, **keywords) -> jax.Array:
    """`scaledot.einsum` of an input and a kernel, as layers of Flax call `jnp.einsum`."""
    return einsum(subscripts, x, w, kernel=kernel, **keywords)


def weight_conv(x, w, window_strides, padding, *, kernel: KernelChoice = None, **keywords) -> jax.Array:
    """`scaledot.conv_general_dilated` of an image and a kernel, as layers of Flax call that of `jax.lax`."""
    return conv_general_dilated(x, w, window_strides, padding, kernel=kernel, **keywords)


def _with_one_contracting_dim(x: jax.Array, w: Any, dimension_numbers: Any) -> tuple[jax.Array, Any, Any]:
    """Flattens the contracting dims if they are the last of x and the first of w; else returns the arguments.

    Arrays that are sharded over explicit mesh axes keep their shapes.
    """
    (x_axes, w_axes), (x_batch, _) = dimension_numbers
    count = len(x_axes)
    last, first = tuple(range(x.ndim - count, x.ndim)), tuple(range(count))
    if count < 2 or x_batch or tuple(x_axes) != last or tuple(w_axes) != first or is_sharded(jax.typeof(x)):
        return x, w, dimension_numbers
    k = math.prod(w.shape[:count])
    x, w = x.reshape(*x.shape[: x.ndim - count], k), w.reshape(k, *w.shape[count:])
    return x, w, (((x.ndim - 1,), (0,)), ((), ()))


class KernelRecorder:
    """A `kernel` argument that chooses nothing and records the names of the kernels that are chosen."""

    def __init__(self):
        self.names: list[str] = []

    def __call__(self, problem: Problem) -> None:
        name = choose(problem).name
        if name not in self.names:
            self.names.append(name)


def quantized_layer(type: str, kernel: ScaledArray, names: list[str]) -> Layer:
    """The row of `explain` for a layer whose kernel is quantised; `names` are those of the kernels that run it."""
    before = kernel.size * np.dtype(kernel.dtype).itemsize
    details = (f"blocks {kernel.block}", f"{before} -> {kernel.nbytes} bytes", ", ".join(names))
    return Layer(type, kernel.format, details=details)


def described(x: Any) -> str:
    """An array's type as text, such as "float32[64,32]"."""
    return f"{np.dtype(x.dtype).name}[{','.join(map(str, x.shape))}]"


def _spec(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


OPERATION: dict[str, Callable[..., jax.Array]] = {  # by the name of a layer's hook
    "dot_general": weight_dot_general,
    "einsum_op": weight_einsum,
    "conv_general_dilated": weight_conv,
}
