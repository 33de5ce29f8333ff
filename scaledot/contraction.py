"""Contractions as three label strings with one label per axis, as in einsum: lhs, rhs and result.

The arguments of dot_general, matmul and einsum are parsed to this form. The gradients of a contraction are contractions
of the same labels: for y = x w, "mk,kn->mn", dgrad is "mn,kn->mk" and wgrad is "mk,mn->kn".
"""

import dataclasses
import string
from collections.abc import Iterator, Sequence

from jax import lax

_LETTERS = string.ascii_letters


@dataclasses.dataclass(frozen=True)
class Contraction:
    """Labels of lhs, rhs and result; a label of both operands that the result lacks is a contracting dim.

    >>> fwd = Contraction("bmk", "kn", "bmn")
    >>> fwd.contracting, fwd.lhs_free, fwd.dimension_numbers
    ('k', 'bm', (((2,), (0,)), ((), ())))
    >>> fwd.dgrad
    Contraction(lhs='bmn', rhs='kn', out='bmk')
    >>> fwd.wgrad
    Contraction(lhs='bmk', rhs='bmn', out='kn')
    """

    lhs: str
    rhs: str
    out: str

    @property
    def batch(self) -> str:
        return "".join(c for c in self.out if c in self.lhs and c in self.rhs)

    @property
    def contracting(self) -> str:
        return "".join(c for c in self.lhs if c in self.rhs and c not in self.out)

    @property
    def lhs_free(self) -> str:
        return "".join(c for c in self.lhs if c not in self.rhs)

    @property
    def rhs_free(self) -> str:
        return "".join(c for c in self.rhs if c not in self.lhs)

    @property
    def dot_general_out(self) -> str:
        """The labels of lax.dot_general's result, in its order: batch dims, free dims of lhs, free dims of rhs."""
        return self.batch + self.lhs_free + self.rhs_free

    @property
    def dimension_numbers(self) -> lax.DotDimensionNumbers:
        def axes(of: str, labels: str) -> tuple[int, ...]:
            return tuple(of.index(c) for c in labels)

        contracting = axes(self.lhs, self.contracting), axes(self.rhs, self.contracting)
        return contracting, (axes(self.lhs, self.batch), axes(self.rhs, self.batch))

    def for_gemm(self, name: str) -> "Contraction":
        """The contraction of one matmul of training: "fwd" (this one), "dgrad" or "wgrad"."""
        return self if name == "fwd" else getattr(self, name)

    @property
    def dgrad(self) -> "Contraction":
        """The gradient of lhs: the contraction of the result's cotangent with rhs."""
        return Contraction(self.out, self.rhs, self.lhs)

    @property
    def wgrad(self) -> "Contraction":
        """The gradient of rhs: the contraction of lhs with the result's cotangent."""
        return Contraction(self.lhs, self.out, self.rhs)


def labels(count: int, used: str = "") -> str:
    """`count` distinct labels that are not in `used`: letters, then other Unicode characters."""
    return "".join(c for c, _ in zip(_unused(used), range(count), strict=False))


def _unused(used: str) -> Iterator[str]:
    yield from (c for c in _LETTERS if c not in used)
    yield from (chr(n) for n in range(0xC0, 0x2000) if chr(n) not in used)


def from_dimension_numbers(numbers, lhs_ndim: int, rhs_ndim: int) -> Contraction:
    """The contraction for the `dimension_numbers` of lax.dot_general.

    >>> from_dimension_numbers((((1, 2), (2, 1)), ((0,), (0,))), 4, 3)
    Contraction(lhs='abcd', rhs='acb', out='ad')
    """
    (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = _checked_numbers(numbers, lhs_ndim, rhs_ndim)
    lhs = labels(lhs_ndim)
    rhs = [""] * rhs_ndim
    for left, right in zip((*lhs_batch, *lhs_contracting), (*rhs_batch, *rhs_contracting), strict=True):
        rhs[right] = lhs[left]
    free = iter(labels(rhs_ndim, lhs))
    rhs = "".join(c or next(free) for c in rhs)
    batch = "".join(lhs[a] for a in lhs_batch)
    return Contraction(lhs, rhs, batch + _without(lhs, rhs) + _without(rhs, lhs))


def _without(text: str, excluded: str) -> str:
    return "".join(c for c in text if c not in excluded)


def _checked_numbers(numbers, lhs_ndim: int, rhs_ndim: int):
    try:
        (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = numbers
        axes = [tuple(int(a) for a in part) for part in (lhs_contracting, rhs_contracting, lhs_batch, rhs_batch)]
    except (TypeError, ValueError):
        raise TypeError(
            "`dimension_numbers` must be ((lhs contracting, rhs contracting), (lhs batch, rhs batch)), "
            f"four sequences of axes, not {numbers!r}"
        ) from None
    lhs_contracting, rhs_contracting, lhs_batch, rhs_batch = axes
    if len(lhs_contracting) != len(rhs_contracting) or len(lhs_batch) != len(rhs_batch):
        raise ValueError(f"`dimension_numbers` {numbers} must have as many axes of lhs as of rhs in each pair")
    for name, ndim, used in (
        ("lhs", lhs_ndim, lhs_batch + lhs_contracting),
        ("rhs", rhs_ndim, rhs_batch + rhs_contracting),
    ):
        if any(not 0 <= a < ndim for a in used):
            raise ValueError(
                f"`dimension_numbers` name axes {used} of {name}, which has axes 0 to {ndim - 1}; use no negative axes"
            )
        if len(set(used)) != len(used):
            raise ValueError(f"`dimension_numbers` name an axis of {name} twice: {used}")
    return (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch)


def for_matmul(lhs_shape: tuple[int, ...], rhs_shape: tuple[int, ...]) -> Contraction:
    """The contraction of numpy.matmul; leading axes are batch dims that broadcast, and a 1-d operand has no m (or n).

    >>> for_matmul((7, 5, 2, 3), (5, 3, 4))
    Contraction(lhs='abmk', rhs='bkn', out='abmn')
    """
    if not lhs_shape or not rhs_shape:
        raise ValueError(f"operands of matmul need at least one axis, not shapes {lhs_shape} and {rhs_shape}")
    row = "m" if len(lhs_shape) > 1 else ""
    column = "n" if len(rhs_shape) > 1 else ""
    count = max(len(lhs_shape) - 2, len(rhs_shape) - 2, 0)
    batch = labels(count, "mkn")
    lhs_batch = batch[count - max(len(lhs_shape) - 2, 0) :]
    rhs_batch = batch[count - max(len(rhs_shape) - 2, 0) :]
    return Contraction(lhs_batch + row + "k", rhs_batch + "k" + column, batch + row + column)


def parse_einsum(text: str, ndims: Sequence[int]) -> tuple[list[str], str]:
    """The labels of each operand and of the result of einsum, with `...` expanded and an implicit result made explicit.

    >>> parse_einsum("...k,kn->...n", (3, 2))
    (['abk', 'kn'], 'abn')
    >>> parse_einsum("ij,jk", (2, 2))
    (['ij', 'jk'], 'ik')
    """
    if not isinstance(text, str):
        raise TypeError(f"`subscripts` must be a string such as 'bmk,kn->bmn', not {type(text).__name__}")
    left, arrow, right = text.replace(" ", "").partition("->")
    parts = left.split(",")
    if len(parts) != len(ndims):
        raise ValueError(f"`subscripts` {text!r} has {len(parts)} operands, but {len(ndims)} were passed")
    invalid = set(left + right) - set(_LETTERS + ",.")
    if invalid:
        raise ValueError(f"`subscripts` {text!r} contains {sorted(invalid)}; labels are letters")
    counts = [_ellipsis_axes(text, part, ndim) for part, ndim in zip(parts, ndims, strict=True)]
    ellipsis = labels(max(n or 0 for n in counts), left + right)
    inputs = [part.replace("...", ellipsis[len(ellipsis) - (n or 0) :]) for part, n in zip(parts, counts, strict=True)]
    if arrow:
        out = right.replace("...", ellipsis)
    else:
        joined = "".join(inputs)
        out = ellipsis + "".join(sorted(c for c in set(joined) - set(ellipsis) if joined.count(c) == 1))
    _check_result(text, "".join(inputs), out)
    return inputs, out


def _ellipsis_axes(text: str, part: str, ndim: int) -> int | None:
    """The number of axes that the `...` of one operand stands for; None without `...`."""
    named = len(part.replace("...", ""))
    if "." in part.replace("...", "", 1):
        raise ValueError(f"`subscripts` {text!r}: {part!r}: '.' may only occur as one '...'")
    if "..." not in part:
        if named != ndim:
            raise ValueError(f"`subscripts` {text!r}: {part!r} names {named} axes of an operand that has {ndim}")
        return None
    if named > ndim:
        raise ValueError(f"`subscripts` {text!r}: {part!r} names {named} axes of an operand that has {ndim}")
    return ndim - named


def _check_result(text: str, inputs: str, out: str) -> None:
    unknown = [c for c in out if c not in inputs]
    if unknown:
        raise ValueError(f"`subscripts` {text!r}: the result names {unknown}, which no operand has")
    if len(set(out)) != len(out):
        raise ValueError(f"`subscripts` {text!r}: the result names a label twice")
