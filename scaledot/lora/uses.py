"""`Use`: how a matmul reads a parameter, which gives the shapes of the adapter and where its A B is in the parameter.

A weight (inputs, heads, dim) with contracting dim 0 has A (inputs, rank) and B (rank, heads · dim): contracting dims
are flattened to the inputs of A and free dims to the outputs of B. Leading axes are those of scans over stacked layers
and of batch dims, such as experts: A (layers, experts, inputs, rank).
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from scaledot.transform.site import Site
from scaledot.transform.views import View, stacked_sizes, written_back


@dataclasses.dataclass(frozen=True)
class Use:
    """A parameter as the weight of a matmul: its `view`, the shape of that, and which of its dims are of which kind."""

    view: View
    shape: tuple[int, ...]
    batch: tuple[int, ...]
    contracting: tuple[int, ...]

    @property
    def free(self) -> tuple[int, ...]:
        return tuple(axis for axis in range(len(self.shape)) if axis not in self.batch + self.contracting)

    @property
    def stacked(self) -> tuple[int, ...]:
        """Sizes of the leading axes of stacked layers, which scans slice."""
        return stacked_sizes(self.view)

    def sizes(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.shape[axis] for axis in axes)

    @property
    def inputs(self) -> int:
        return math.prod(self.sizes(self.contracting))

    def factor_shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """The shapes of A and B."""
        leading = self.stacked + self.sizes(self.batch)
        return {"a": (*leading, self.inputs, rank), "b": (*leading, rank, math.prod(self.sizes(self.free)))}

    def change(self, a: jax.Array, b: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """A B in the axes and the `shape` of the parameter, in the dtype of the factors."""
        ab = jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
        order = (*self.batch, *self.contracting, *self.free)
        ab = ab.reshape(*self.stacked, *self.sizes(order))
        count = len(self.stacked)
        ab = ab.transpose(*range(count), *(count + order.index(axis) for axis in range(len(order))))
        return written_back(self.view, shape, ab)


def use_of(site: Site) -> Use:
    """The Use of the weight of a matmul."""
    assert site.view is not None
    _, (contracting, batch) = operand_dims(site)
    return Use(site.view, tuple((site.lhs, site.rhs)[site.weight].shape), batch, tuple(sorted(contracting)))


Dims = tuple[tuple[int, ...], tuple[int, ...]]  # contracting dims and batch dims


def operand_dims(site: Site) -> tuple[Dims, Dims]:
    """Contracting and batch dims of x and of the weight; groups of a ragged matmul are batch dims of the weight."""
    if site.primitive == "ragged_dot_general":
        return ((1,), ()), ((1,), (0,))
    contracting, batch = site.params["dimension_numbers"]
    dims: list[Any] = [(tuple(contracting[i]), tuple(batch[i])) for i in (1 - site.weight, site.weight)]
    return dims[0], dims[1]
