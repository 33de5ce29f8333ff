"""Contractions as three label strings, one label per axis, as in einsum; parsed from what each verb of JAX takes.

The gradients of a contraction are contractions of the same labels: for y = x w, "mk,kn->mn", dgrad is "mn,kn->mk" and
wgrad "mk,mn->kn".
"""

import dataclasses
import string
from collections.abc import Iterator, Sequence

from jax import lax

_LETTERS = string.ascii_letters


@dataclasses.dataclass(frozen=True)
class Contraction:
    """Three label strings; a label that both operands have and the result does not is summed over.

    >>> fwd = Contraction("bmk", "kn", "bmn")
    >>> fwd.contracted, fwd.lhs_free, fwd.dimension_numbers
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
    def contracted(self) -> str:
        return "".join(c for c in self.lhs if c in self.rhs and c not in self.out)

    @property
    def lhs_free(self) -> str:
        return "".join(c for c in self.lhs if c not in self.rhs)

    @property
    def rhs_free(self) -> str:
        return "".join(c for c in self.rhs if c not in self.lhs)

    @property
    def natural(self) -> str:
        """The order in which lax.dot_general leaves its result."""
        return self.batch + self.lhs_free + self.rhs_free

    @property
    def dimension_numbers(self) -> lax.DotDimensionNumbers:
        def axes(of: str, labels: str) -> tuple[int, ...]:
            return tuple(of.index(c) for c in labels)

        contracted = axes(self.lhs, self.contracted), axes(self.rhs, self.contracted)
        return contracted, (axes(self.lhs, self.batch), axes(self.rhs, self.batch))

    def of(self, matmul: str) -> "Contraction":
        """The contraction of one matmul of a training step: "fwd", "dgrad" or "wgrad"."""
        return self if matmul == "fwd" else getattr(self, matmul)

    @property
    def dgrad(self) -> "Contraction":
        """The gradient of lhs: result's cotangent times rhs."""
        return Contraction(self.out, self.rhs, self.lhs)

    @property
    def wgrad(self) -> "Contraction":
        """The gradient of rhs: lhs times the result's cotangent."""
        return Contraction(self.lhs, self.out, self.rhs)


def labels(count: int, used: str = "") -> str:
    """That many labels that are not in `used`: letters while they last."""
    return "".join(c for c, _ in zip(_unused(used), range(count), strict=False))


def _unused(used: str) -> Iterator[str]:
    yield from (c for c in _LETTERS if c not in used)
    yield from (chr(n) for n in range(0xC0, 0x2000) if chr(n) not in used)


def from_dimension_numbers(numbers, lhs_ndim: int, rhs_ndim: int) -> Contraction:
    """The contraction of lax.dot_general; pairs of axes stay paired as given.

    >>> from_dimension_numbers((((1, 2), (2, 1)), ((0,), (0,))), 4, 3)
    Contraction(lhs='abcd', rhs='acb', out='ad')
    """
    (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = _checked_numbers(numbers, lhs_ndim, rhs_ndim)
    lhs = labels(lhs_ndim)
    rhs = [""] * rhs_ndim
    for left, right in zip((*lhs_batch, *lhs_sum), (*rhs_batch, *rhs_sum), strict=True):
        rhs[right] = lhs[left]
    free = iter(labels(rhs_ndim, lhs))
    rhs = "".join(c or next(free) for c in rhs)
    batch = "".join(lhs[a] for a in lhs_batch)
    return Contraction(lhs, rhs, batch + _others(lhs, rhs) + _others(rhs, lhs))


def _others(mine: str, theirs: str) -> str:
    return "".join(c for c in mine if c not in theirs)


def _checked_numbers(numbers, lhs_ndim: int, rhs_ndim: int):
    try:
        (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = numbers
        axes = [tuple(int(a) for a in part) for part in (lhs_sum, rhs_sum, lhs_batch, rhs_batch)]
    except (TypeError, ValueError):
        raise TypeError(
            "`dimension_numbers` must be ((lhs summed, rhs summed), (lhs batch, rhs batch)), "
            f"four sequences of axes, not {numbers!r}"
        ) from None
    lhs_sum, rhs_sum, lhs_batch, rhs_batch = axes
    if len(lhs_sum) != len(rhs_sum) or len(lhs_batch) != len(rhs_batch):
        raise ValueError(f"`dimension_numbers` {numbers} must pair each axis of lhs with one of rhs")
    for name, ndim, used in (("lhs", lhs_ndim, lhs_batch + lhs_sum), ("rhs", rhs_ndim, rhs_batch + rhs_sum)):
        if any(not 0 <= a < ndim for a in used):
            raise ValueError(
                f"`dimension_numbers` name axes {used} of {name}, which has axes 0 to {ndim - 1} (none from the end)"
            )
        if len(set(used)) != len(used):
            raise ValueError(f"`dimension_numbers` name an axis of {name} twice: {used}")
    return (lhs_sum, rhs_sum), (lhs_batch, rhs_batch)


def for_matmul(lhs_shape: tuple[int, ...], rhs_shape: tuple[int, ...]) -> Contraction:
    """numpy's matmul: vectors lose their axis, leading axes broadcast (an axis of 1 against more gets no label twice).

    >>> for_matmul((7, 5, 2, 3), (5, 3, 4))
    Contraction(lhs='abmk', rhs='bkn', out='abmn')
    """
    if not lhs_shape or not rhs_shape:
        raise ValueError(f"matmul needs at least one axis on each side, not shapes {lhs_shape} and {rhs_shape}")
    row = "m" if len(lhs_shape) > 1 else ""
    column = "n" if len(rhs_shape) > 1 else ""
    count = max(len(lhs_shape) - 2, len(rhs_shape) - 2, 0)
    batch = labels(count, "mkn")
    lhs_batch = batch[count - max(len(lhs_shape) - 2, 0) :]
    rhs_batch = batch[count - max(len(rhs_shape) - 2, 0) :]
    return Contraction(lhs_batch + row + "k", rhs_batch + "k" + column, batch + row + column)


def parse_einsum(text: str, ndims: Sequence[int]) -> tuple[list[str], str]:
    """The labels of each operand and of the result, with `...` spelt out and an implicit result made explicit.

    >>> parse_einsum("...k,kn->...n", (3, 2))
    (['abk', 'kn'], 'abn')
    >>> parse_einsum("ij,jk", (2, 2))
    (['ij', 'jk'], 'ik')
    """
    if not isinstance(text, str):
        raise TypeError(f"`subscripts` must be text such as 'bmk,kn->bmn', not {type(text).__name__}")
    left, arrow, right = text.replace(" ", "").partition("->")
    parts = left.split(",")
    if len(parts) != len(ndims):
        raise ValueError(f"`subscripts` {text!r} has {len(parts)} operands, but {len(ndims)} were given")
    stray = set(left + right) - set(_LETTERS + ",.")
    if stray:
        raise ValueError(f"`subscripts` {text!r} holds {sorted(stray)}; labels are letters")
    dots = [_dots(text, part, ndim) for part, ndim in zip(parts, ndims, strict=True)]
    spelt = labels(max(d or 0 for d in dots), left + right)
    inputs = [part.replace("...", spelt[len(spelt) - (d or 0) :]) for part, d in zip(parts, dots, strict=True)]
    if arrow:
        out = right.replace("...", spelt)
    else:
        every = "".join(inputs)
        out = spelt + "".join(sorted(c for c in set(every) - set(spelt) if every.count(c) == 1))
    _check_result(text, "".join(inputs), out)
    return inputs, out


def _dots(text: str, part: str, ndim: int) -> int | None:
    """How many axes the `...` of one operand stands for; None without one."""
    named = len(part.replace("...", ""))
    if "." in part.replace("...", "", 1):
        raise ValueError(f"`subscripts` {text!r}: {part!r} may hold one '...'")
    if "..." not in part:
        if named != ndim:
            raise ValueError(f"`subscripts` {text!r}: {part!r} names {named} axes of an operand that has {ndim}")
        return None
    if named > ndim:
        raise ValueError(f"`subscripts` {text!r}: {part!r} names {named} axes of an operand that has {ndim}")
    return ndim - named


def _check_result(text: str, inputs: str, out: str) -> None:
    unknown = [c for c in out if c not in inputs]
    if unknown or "." in out:
        raise ValueError(f"`subscripts` {text!r}: the result names {unknown or '...'}, which no operand has")
    if len(set(out)) != len(out):
        raise ValueError(f"`subscripts` {text!r}: the result names a label twice")
