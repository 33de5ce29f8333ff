"""einsum on scaled and plain operands: any number of them, two at a time."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from scaledot.array import ScaledArray
from scaledot.contraction import Contraction, parse_einsum
from scaledot.kernels.spec import accumulation_dtype, operand_of, promoted
from scaledot.ops.operands import Array, Choice, as_operand, constant, contract, element_type
from scaledot.ops.quantize import dequantize


class Term(NamedTuple):
    """An operand and its labels."""

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
    kernel: Choice = None,
) -> jax.Array:
    """`jnp.einsum` where operands may be ScaledArrays.

    More than two operands are contracted in pairs along the path that `jnp.einsum_path` finds; results in between
    are float32. A label that only one operand has and the result has not, or that one operand has twice, needs
    that operand's values: it is dequantised.

    >>> import jax.numpy as jnp, scaledot as sd
    >>> w = sd.quantize(jnp.ones((4, 64, 8)), "mxfp8", axis=1)
    >>> einsum("...k,hkd->...hd", jnp.ones((2, 3, 64)), w).shape
    (2, 3, 4, 8)
    """
    arrays = [as_operand(x, f"operand {at}") for at, x in enumerate(operands)]
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
    terms = [Term(labels, x) for labels, x in zip(inputs, arrays, strict=True)]
    dtype = element_type(preferred_element_type) or functools.reduce(promoted, (x.dtype for x in arrays))
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"`preferred_element_type` must be a float dtype for {' and '.join(map(str, terms))}, not {dtype}"
        )
    if len(terms) == 1 and isinstance(kernel, str):
        raise ValueError(f"`kernel` {kernel!r} is given, but one operand makes no product")
    terms = _without_broadcast(terms, _sizes(subscripts, terms))
    terms = [_reduced_alone(term, out + "".join(t.labels for t in terms if t is not term)) for term in terms]
    for pair in _path(terms, out, optimize):
        rhs, lhs = (terms.pop(at) for at in sorted(pair, reverse=True))
        needed = out + "".join(t.labels for t in terms)
        kept = "".join(c for c in dict.fromkeys(lhs.labels + rhs.labels) if c in needed)
        contraction = Contraction(lhs.labels, rhs.labels, kept if terms else out)
        result = contract(
            contraction,
            *_floats(lhs.array, rhs.array, accumulation_dtype(dtype)),
            precision=precision,
            preferred_element_type=accumulation_dtype(dtype) if terms else dtype,
            out_sharding=None if terms else out_sharding,
            kernel=kernel,
        )
        terms.append(Term(contraction.out, result))
    return _values(terms[0].array).transpose([terms[0].labels.index(c) for c in out]).astype(dtype)


def two_terms(subscripts: str, lhs: jax.Array, rhs: jax.Array) -> tuple[Term, Term, str]:
    """The operands of an einsum of two, left with the labels that they share or that the result has; and its labels."""
    inputs, out = parse_einsum(subscripts, [lhs.ndim, rhs.ndim])
    terms = [Term(labels, x) for labels, x in zip(inputs, (lhs, rhs), strict=True)]
    left, right = _without_broadcast(terms, _sizes(subscripts, terms))
    return _reduced_alone(left, out + right.labels), _reduced_alone(right, out + left.labels), out


def _floats(lhs: Array, rhs: Array, dtype: np.dtype) -> tuple[Array, Array]:
    """Integers of a pair in which nothing is scaled, as floats, because what becomes of them is one."""
    if isinstance(lhs, ScaledArray) or isinstance(rhs, ScaledArray):
        return lhs, rhs
    lhs, rhs = (x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(dtype) for x in (lhs, rhs))
    return lhs, rhs


def _values(x: Array) -> jax.Array:
    return dequantize(constant(x), jnp.float32) if isinstance(x, ScaledArray) else x


def _sizes(subscripts: str, terms: list[Term]) -> dict[str, int]:
    """The size that each label means; an axis of 1 broadcasts, as in numpy."""
    sizes: dict[str, int] = {}
    for term in terms:
        for label, size in zip(term.labels, term.array.shape, strict=True):
            if sizes.get(label, 1) == 1:
                sizes[label] = size
            elif size not in (1, sizes[label]):
                every = " and ".join(map(str, terms))
                raise ValueError(f"{label!r} of {subscripts!r} is {sizes[label]} and {size}: cannot contract {every}")
    return sizes


def _without_broadcast(terms: list[Term], sizes: dict[str, int]) -> list[Term]:
    """Axes of 1 that broadcast against more are dropped."""

    def drop(term: Term) -> Term:
        gone = [size != sizes[c] for c, size in zip(term.labels, term.array.shape, strict=True)]
        if not any(gone):
            return term
        array = term.array[tuple(0 if g else slice(None) for g in gone)]
        return Term("".join(c for c, g in zip(term.labels, gone, strict=True) if not g), array)

    return [drop(term) for term in terms]


def _reduced_alone(term: Term, needed: str) -> Term:
    """Diagonals, and sums over labels that nobody else has."""
    kept = "".join(c for c in dict.fromkeys(term.labels) if c in needed)
    if kept == term.labels:
        return term
    values = _values(term.array)
    return Term(kept, jnp.einsum(f"{term.labels}->{kept}", values.astype(_reduction_dtype(values.dtype))))


def _reduction_dtype(dtype: np.dtype) -> np.dtype:
    """What an array is reduced in; jnp.einsum reduces one array in its own dtype, in which int8 wraps around."""
    if jnp.issubdtype(dtype, jnp.floating):
        return accumulation_dtype(dtype)
    return np.dtype(np.int32) if dtype.itemsize < 4 else np.dtype(dtype)


def _path(terms: list[Term], out: str, optimize) -> list[tuple[int, ...]]:
    """Pairs of positions, each replaced by its result at the end of the list."""
    if len(terms) <= 2:
        return [(0, 1)] * (len(terms) - 1)
    shapes = [np.broadcast_to(np.float32(0), term.array.shape) for term in terms]
    text = f"{','.join(term.labels for term in terms)}->{out}"
    if isinstance(optimize, (list, tuple)):
        optimize = [step for step in optimize if step != "einsum_path"]  # numpy's paths start with that word
    path, _ = jnp.einsum_path(text, *shapes, optimize=optimize)
    steps = [tuple(step) for step in path if len(step) != 1]  # a step over one operand was made already
    if any(len(step) > 2 for step in steps):
        raise ValueError(f"`optimize` {optimize!r} takes more than two operands at a time; use 'auto' or 'optimal'")
    return steps
