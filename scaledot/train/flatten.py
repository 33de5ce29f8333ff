"""Flattens the free dims of x, the contracting dims and the free dims of w to one dim each, for 2D matmul kernels.

`bsk,khd->bshd` becomes `bk,kh->bh`, where b is (b, s) and h is (h, d), row-major. Blocks of a flattened dim run across
the dims it consists of.
"""

import functools
import math
from typing import NamedTuple

import jax

from scaledot.contraction import Contraction, labels


class DimGroup(NamedTuple):
    """Dims (`members`) that are flattened, row-major, to one dim with a label; without members it has size 1."""

    label: str
    members: str


class Flattening(NamedTuple):
    """The dim groups of one array, and its labels before (`labels`) and after (`flat`) flattening."""

    labels: str
    flat: str
    dim_groups: tuple[DimGroup, ...]

    @classmethod
    def of(cls, labels: str, dim_groups: tuple[DimGroup, ...]) -> "Flattening":
        first = {c: group.label for group in dim_groups for c in group.members}
        flat = "".join(dict.fromkeys(first.get(c, c) for c in labels))
        return cls(labels, flat + "".join(group.label for group in dim_groups if not group.members), dim_groups)

    @property
    def grouped(self) -> str:
        """The original labels in the order in which they are flattened."""
        return "".join(map(self.members, self.flat))

    def members(self, label: str) -> str:
        """The original labels of a flat label."""
        return next((group.members for group in self.dim_groups if group.label == label), label)

    def flatten(self, x: jax.Array) -> jax.Array:
        """x with its dims transposed and flattened."""
        if not self.dim_groups:
            return x
        sizes = dict(zip(self.labels, x.shape, strict=True))
        x = x.transpose([self.labels.index(c) for c in self.grouped])
        return x.reshape([math.prod(sizes[m] for m in self.members(c)) for c in self.flat])

    def unflatten(self, y: jax.Array, sizes: dict[str, int]) -> jax.Array:
        """The inverse of `flatten`. sizes: those of the original labels."""
        if not self.dim_groups:
            return y
        y = y.reshape([sizes[c] for c in self.grouped])
        return y.transpose([self.grouped.index(c) for c in self.labels])


class FlattenedContraction(NamedTuple):
    """A contraction, its flattened form, and the flattenings of x, w, the result (or its cotangent g) and a bias."""

    contraction: Contraction
    flat: Contraction
    x: Flattening
    w: Flattening
    g: Flattening
    bias: Flattening

    @classmethod
    def unchanged(cls, contraction: Contraction, bias: str) -> "FlattenedContraction":
        """The identity: no dims are flattened. bias: the labels of a bias."""
        tensors = contraction.lhs, contraction.rhs, contraction.out, bias
        return cls(contraction, contraction, *(Flattening.of(labels, ()) for labels in tensors))

    def flattened_sizes(self, sizes: dict[str, int]) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """For each flat label, the sizes of the dims it consists of."""
        flattenings = {c: flattening for flattening in (self.x, self.w) for c in flattening.flat}
        members = ((c, tuple(sizes[m] for m in flattening.members(c))) for c, flattening in flattenings.items())
        return tuple((c, member_sizes or (1,)) for c, member_sizes in members)

    def of_tensor(self, tensor: str) -> Flattening:
        return {"x": self.x, "w": self.w, "g": self.g}[tensor]


@functools.lru_cache(maxsize=1024)
def flatten(contraction: Contraction, to_matrices: bool) -> FlattenedContraction:
    """The contraction with its free and contracting dims flattened to one each.

    to_matrices: if false, as for recipes without blocks or rotations, dims keep their shape, except that a missing free
    or contracting dim becomes one of size 1.
    """
    rows, contracting, columns = _groups(contraction, to_matrices)
    flattenings = (
        Flattening.of(contraction.lhs, rows + contracting),
        Flattening.of(contraction.rhs, contracting + columns),
        Flattening.of(contraction.out, rows + columns),
        Flattening.of(contraction.rhs_free, columns),
    )
    flat = Contraction(*(flattening.flat for flattening in flattenings[:3]))
    return FlattenedContraction(contraction, flat, *flattenings)


def _groups(contraction: Contraction, to_matrices: bool) -> tuple[tuple[DimGroup, ...], ...]:
    """The dim groups of rows, contracting dims and columns: one or none each."""
    all_members = contraction.lhs_free, contraction.contracting, contraction.rhs_free
    fresh = iter(labels(3, contraction.lhs + contraction.rhs))
    is_flattened = [not members or (to_matrices and len(members) > 1) for members in all_members]
    rows, contracting, columns = (
        (DimGroup(members[:1] or next(fresh), members),) if flattened else ()
        for members, flattened in zip(all_members, is_flattened, strict=True)
    )
    return rows, contracting, columns
