"""einsum on any number of scaled and plain operands, contracted two at a time."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from scaledot.array import ScaledArray
from scaledot.contraction import Contraction, parse_einsum
from scaledot.kernels.spec import accumulation_dtype, operand_of, promoted
from scaledot.ops.operands import Array, KernelChoice, as_operand, constant, contract, element_type
from scaledot.ops.quantize import dequantize


class Labeled(NamedTuple):
    """An array and a label for each of its axes."""

    labels: str
    array: Array

    def __str__(self) -> str:
        return str(operand_of(self.array, self.labels))


def einsum(
    subscripts: str,
    *operands,
    optimize="auto",
    precision=None,
    preferred_element_type=None,
    out_sharding=None,
    kernel: KernelChoice = None,
) -> jax.Array:
    """`jnp.einsum` where operands may be ScaledArrays.

    More than two operands are contracted in pairs along the path of `jnp.einsum_path`, with intermediates in float32.
    An operand is dequantised first if it has a label twice, or one that is in no other operand and not in the result.

    >>> import jax.numpy as jnp, scaledot as sd
    >>> w = sd.quantize(jnp.ones((4, 64, 8)), "mxfp8", axis=1)
    >>> einsum("...k,hkd->...hd", jnp.ones((2, 3, 64)), w).shape
    (2, 3, 4, 8)
    """
    arrays = [as_operand(x, f"operand {i}") for i, x in enumerate(operands)]
    if kernel is None and not any(isinstance(x, ScaledArray) for x in arrays):
        return jnp.einsum(
            subscripts,
            *arrays,
            optimize=optimize,
            precision=precision,
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
        )
    inputs, out = parse_einsum(subscripts, [x.ndim for x in arrays])
    labeled = [Labeled(labels, x) for labels, x in zip(inputs, arrays, strict=True)]
    dtype = element_type(preferred_element_type) or functools.reduce(promoted, (x.dtype for x in arrays))
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"`preferred_element_type` must be a float dtype for {' and '.join(map(str, labeled))}, not {dtype}"
        )
    if len(labeled) == 1 and isinstance(kernel, str):
        raise ValueError(f"`kernel` {kernel!r} was passed, but an einsum of one operand has no matmul")
    labeled = _without_broadcast(labeled, _sizes(subscripts, labeled))
    labeled = [
        _reduced(operand, out + "".join(other.labels for other in labeled if other is not operand))
        for operand in labeled
    ]
    for pair in _path(labeled, out, optimize):
        rhs, lhs = (labeled.pop(i) for i in sorted(pair, reverse=True))
        needed = out + "".join(other.labels for other in labeled)
        free = "".join(c for c in dict.fromkeys(lhs.labels + rhs.labels) if c in needed)
        contraction = Contraction(lhs.labels, rhs.labels, free if labeled else out)
        result = contract(
            contraction,
            *_floats(lhs.array, rhs.array, accumulation_dtype(dtype)),
            precision=precision,
            preferred_element_type=accumulation_dtype(dtype) if labeled else dtype,
            out_sharding=None if labeled else out_sharding,
            kernel=kernel,
        )
        labeled.append(Labeled(contraction.out, result))
    return _dequantized(labeled[0].array).transpose([labeled[0].labels.index(c) for c in out]).astype(dtype)


def two_operands(subscripts: str, lhs: jax.Array, rhs: jax.Array) -> tuple[Labeled, Labeled, str]:
    """Both operands of an einsum, each reduced to the labels of the other or of the result, and the result's labels."""
    inputs, out = parse_einsum(subscripts, [lhs.ndim, rhs.ndim])
    labeled = [Labeled(labels, x) for labels, x in zip(inputs, (lhs, rhs), strict=True)]
    left, right = _without_broadcast(labeled, _sizes(subscripts, labeled))
    return _reduced(left, out + right.labels), _reduced(right, out + left.labels), out


def _floats(lhs: Array, rhs: Array, dtype: np.dtype) -> tuple[Array, Array]:
    """Both operands; integers of an unscaled pair are converted to `dtype`, because the result is a float."""
    if isinstance(lhs, ScaledArray) or isinstance(rhs, ScaledArray):
        return lhs, rhs
    lhs, rhs = (x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(dtype) for x in (lhs, rhs))
    return lhs, rhs


def _dequantized(x: Array) -> jax.Array:
    return dequantize(constant(x), jnp.float32) if isinstance(x, ScaledArray) else x


def _sizes(subscripts: str, labeled: list[Labeled]) -> dict[str, int]:
    """The size of each label; an axis of size 1 broadcasts, as in numpy."""
    sizes: dict[str, int] = {}
    for operand in labeled:
        for label, size in zip(operand.labels, operand.array.shape, strict=True):
            if sizes.get(label, 1) == 1:
                sizes[label] = size
            elif size not in (1, sizes[label]):
                arrays = " and ".join(map(str, labeled))
                raise ValueError(f"{label!r} of {subscripts!r} is {sizes[label]} and {size}: cannot contract {arrays}")
    return sizes


def _without_broadcast(labeled: list[Labeled], sizes: dict[str, int]) -> list[Labeled]:
    """The operands without axes of size 1 that broadcast."""

    def drop(operand: Labeled) -> Labeled:
        broadcasts = [size != sizes[c] for c, size in zip(operand.labels, operand.array.shape, strict=True)]
        if not any(broadcasts):
            return operand
        array = operand.array[tuple(0 if dropped else slice(None) for dropped in broadcasts)]
        return Labeled("".join(c for c, dropped in zip(operand.labels, broadcasts, strict=True) if not dropped), array)

    return [drop(operand) for operand in labeled]


def _reduced(operand: Labeled, needed: str) -> Labeled:
    """The operand with repeated labels reduced to diagonals, and labels that are not in `needed` to sums."""
    free = "".join(c for c in dict.fromkeys(operand.labels) if c in needed)
    if free == operand.labels:
        return operand
    values = _dequantized(operand.array)
    return Labeled(free, jnp.einsum(f"{operand.labels}->{free}", values.astype(_reduction_dtype(values.dtype))))


def _reduction_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype to reduce one array in; jnp.einsum would use that of the array, in which int8 wraps around."""
    if jnp.issubdtype(dtype, jnp.floating):
        return accumulation_dtype(dtype)
    return np.dtype(np.int32) if dtype.itemsize < 4 else np.dtype(dtype)


def _path(labeled: list[Labeled], out: str, optimize) -> list[tuple[int, ...]]:
    """Pairs of indices into the list of operands; each pair is replaced by its result at the end of the list."""
    if len(labeled) <= 2:
        return [(0, 1)] * (len(labeled) - 1)
    shapes = [np.broadcast_to(np.float32(0), operand.array.shape) for operand in labeled]
    text = f"{','.join(operand.labels for operand in labeled)}->{out}"
    if isinstance(optimize, (list, tuple)):
        optimize = [step for step in optimize if step != "einsum_path"]  # the first entry of a path of numpy
    path, _ = jnp.einsum_path(text, *shapes, optimize=optimize)
    steps = [tuple(step) for step in path if len(step) != 1]  # reductions of one operand are done
    if any(len(step) > 2 for step in steps):
        raise ValueError(f"`optimize` {optimize!r} contracts more than two operands at a time; use 'auto' or 'optimal'")
    return steps
