"""Contractions whose kept and summed axes are one axis each, so that blocks can run along them.

Blocks of a flattened axis run across the axes it is made of, row-major.
"""

import math
from typing import NamedTuple

import jax

from scaledot.contraction import Contraction, labels


class Group(NamedTuple):
    """Axes that are flattened, row-major, to one axis with a label of its own; none become an axis of 1."""

    label: str
    members: str


def flattened(contraction: Contraction, to_matrices: bool) -> tuple[tuple[Group, ...], ...]:
    """What to flatten among the rows of x, what is summed, and the columns of w, each one group or none.

    A recipe that cuts no axis into blocks needs no matrices, only something to sum over.
    """
    sides = contraction.lhs_free, contraction.contracted, contraction.rhs_free
    fresh = iter(labels(3, contraction.lhs + contraction.rhs))
    flatten = [not members or (to_matrices and len(members) > 1) for members in sides]
    rows, summed, columns = (
        (Group(members[:1] or next(fresh), members),) if flat else ()
        for members, flat in zip(sides, flatten, strict=True)
    )
    return rows, summed, columns


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
        members = {group.label: group.members for group in self.groups}
        return "".join(members.get(c, c) for c in self.flat)

    def enter(self, x: jax.Array) -> jax.Array:
        if not self.groups:
            return x
        sizes = dict(zip(self.labels, x.shape, strict=True))
        members = {group.label: group.members for group in self.groups}
        x = x.transpose([self.labels.index(c) for c in self.grouped])
        return x.reshape([math.prod(sizes[m] for m in members.get(c, c)) for c in self.flat])

    def leave(self, y: jax.Array, sizes: dict[str, int]) -> jax.Array:
        if not self.groups:
            return y
        y = y.reshape([sizes[c] for c in self.grouped])
        return y.transpose([self.grouped.index(c) for c in self.labels])
