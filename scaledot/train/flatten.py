"""Contractions whose free and contracted axes are one axis each, so that blocks can run along them.

Blocks of a flattened axis run across the axes it is made of, row-major. `bsk,khd->bshd` becomes `bk,kh->bh`: b stands
for (b, s) and h for (h, d).
"""

import functools
import math
from typing import NamedTuple

import jax

from scaledot.contraction import Contraction, labels


class Group(NamedTuple):
    """Axes that are flattened, row-major, to one axis with a label of its own; none become an axis of 1."""

    label: str
    members: str


class Layout(NamedTuple):
    """The groups that one array has, and its labels before and after they are flattened."""

    labels: str
    flat: str
    groups: tuple[Group, ...]

    @classmethod
    def of(cls, labels: str, groups: tuple[Group, ...]) -> "Layout":
        first = {c: group.label for group in groups for c in group.members}
        flat = "".join(dict.fromkeys(first.get(c, c) for c in labels))
        return cls(labels, flat + "".join(group.label for group in groups if not group.members), groups)

    @property
    def grouped(self) -> str:
        """The original labels, in the order of the flat ones."""
        return "".join(map(self.members, self.flat))

    def members(self, label: str) -> str:
        """The original labels that a flat one is made of."""
        return next((group.members for group in self.groups if group.label == label), label)

    def enter(self, x: jax.Array) -> jax.Array:
        """x with its axes flattened."""
        if not self.groups:
            return x
        sizes = dict(zip(self.labels, x.shape, strict=True))
        x = x.transpose([self.labels.index(c) for c in self.grouped])
        return x.reshape([math.prod(sizes[m] for m in self.members(c)) for c in self.flat])

    def leave(self, y: jax.Array, sizes: dict[str, int]) -> jax.Array:
        """The inverse, for axes of those sizes."""
        if not self.groups:
            return y
        y = y.reshape([sizes[c] for c in self.grouped])
        return y.transpose([self.grouped.index(c) for c in self.labels])


class Flattened(NamedTuple):
    """A contraction, the flattened one, and the layouts of x, w, the result (or its gradient g) and a bias."""

    contraction: Contraction
    flat: Contraction
    x: Layout
    w: Layout
    g: Layout
    bias: Layout

    @classmethod
    def unchanged(cls, contraction: Contraction, bias: str) -> "Flattened":
        """With every axis left alone."""
        layouts = (Layout.of(of, ()) for of in (contraction.lhs, contraction.rhs, contraction.out, bias))
        return cls(contraction, contraction, *layouts)

    def members(self, sizes: dict[str, int]) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """By flat label, the sizes of the axes that it is made of."""
        layouts = {c: layout for layout in (self.x, self.w) for c in layout.flat}
        found = ((c, tuple(sizes[m] for m in layout.members(c))) for c, layout in layouts.items())
        return tuple((c, members or (1,)) for c, members in found)

    def of_tensor(self, tensor: str) -> Layout:
        return {"x": self.x, "w": self.w, "g": self.g}[tensor]


@functools.lru_cache(maxsize=1024)
def flatten(contraction: Contraction, to_matrices: bool) -> Flattened:
    """Each of the free axes of x, the contracted ones and the free axes of w as one axis.

    A recipe that cuts no axis into blocks needs no matrices, only something to contract.
    """
    rows, summed, columns = _groups(contraction, to_matrices)
    layouts = (
        Layout.of(contraction.lhs, rows + summed),
        Layout.of(contraction.rhs, summed + columns),
        Layout.of(contraction.out, rows + columns),
        Layout.of(contraction.rhs_free, columns),
    )
    return Flattened(contraction, Contraction(*(layout.flat for layout in layouts[:3])), *layouts)


def _groups(contraction: Contraction, to_matrices: bool) -> tuple[tuple[Group, ...], ...]:
    """What to flatten of rows, contracted axes and columns, each one group or none."""
    sides = contraction.lhs_free, contraction.contracted, contraction.rhs_free
    fresh = iter(labels(3, contraction.lhs + contraction.rhs))
    flatten = [not members or (to_matrices and len(members) > 1) for members in sides]
    rows, summed, columns = (
        (Group(members[:1] or next(fresh), members),) if flat else ()
        for members, flat in zip(sides, flatten, strict=True)
    )
    return rows, summed, columns
