"""Dispatch of rows and weights to the devices of their experts, and the way back (combine).

A route is a tuple of collectives inside a shard_map. Dispatch and combine are each other's transposes, so the result of
a ragged matmul is combined as the gradient of an operand is, and its own gradient is dispatched. JAX would derive the
same sums, but gather gradients by adding them to zeros, which moves twice the bytes.
"""

import functools
import itertools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scaledot.parallel import transfer_plan
from scaledot.parallel.transfer_plan import Split
from scaledot.parallel.transfers import Axes, own_part
from scaledot.parallel.types import Like


class Gather(NamedTuple):
    """All-gather of an axis that is sharded over mesh axes; the result does not vary along them."""

    axis: int
    axes: Axes

    def there(self, x: jax.Array, start) -> jax.Array:
        return lax.all_gather(x, self.axes, axis=self.axis, tiled=True, to="invarying")

    def back(self, x: jax.Array, start) -> jax.Array:
        return own_part(x, self.axis, self.axes)


class Cut(NamedTuple):
    """The transpose of Gather: each device takes its own shard of an axis."""

    axis: int
    axes: Axes

    def there(self, x: jax.Array, start) -> jax.Array:
        return own_part(x, self.axis, self.axes)

    def back(self, x: jax.Array, start) -> jax.Array:
        return lax.all_gather(x, self.axes, axis=self.axis, tiled=True, to="invarying")


class Exchange(NamedTuple):
    """All-to-all: an axis that is sharded over mesh axes is gathered, and `split` sharded over them instead."""

    axis: int
    split: int
    axes: Axes

    def there(self, x: jax.Array, start) -> jax.Array:
        return lax.all_to_all(x, self.axes, split_axis=self.split, concat_axis=self.axis, tiled=True)

    def back(self, x: jax.Array, start) -> jax.Array:
        return lax.all_to_all(x, self.axes, split_axis=self.axis, concat_axis=self.split, tiled=True)


class Rows(NamedTuple):
    """All rows, which are sharded over `axes`, those of a device's own groups first; `groups` shard the groups.

    On the way back every row is one device's own and zeros from the others, so the reduction is exact.
    """

    axes: Axes
    groups: Axes

    def there(self, x: jax.Array, start) -> jax.Array:
        x = lax.all_gather(x, self.axes, tiled=True, to="invarying") if self.axes else x
        return jnp.roll(x, -start, axis=0)

    def back(self, x: jax.Array, start) -> jax.Array:
        x = jnp.roll(x, start, axis=0)
        for is_added, axes in itertools.groupby(self.axes, self.groups.__contains__):
            along = tuple(axes)
            x = lax.psum_scatter(x, along, tiled=True) if is_added else own_part(x, 0, along)
        elsewhere = tuple(axis for axis in self.groups if axis not in self.axes)
        return lax.psum(x, elsewhere) if elsewhere else x


Route = tuple[Gather | Cut | Exchange | Rows, ...]


def route_of_rows(labels: str, split: Split, work: dict[str, Axes]) -> Route:
    """From a device's shard of the rows to the rows of its groups."""
    rows, feature = labels
    moves = transfer_plan.moves_between(feature, dict(split), work)
    gathers, cuts = _gathers_and_cuts(labels, moves)
    return *gathers, Rows(dict(split).get(rows, ()), work["g"]), *cuts


def route_of_weights(labels: str, split: Split, work: dict[str, Axes]) -> Route:
    """From a device's shard of the weights, or of the biases, to those of its groups."""
    has, steps = dict(split), []
    for axis in work["g"][len(has.get("g", ())) :]:
        along = next((c for c, axes in split if axis in axes), None)
        if along is None:
            steps.append(Cut(0, (axis,)))
        else:
            steps.append(Exchange(labels.index(along), 0, (axis,)))
            has[along] = tuple(a for a in has[along] if a != axis)
    gathers, cuts = _gathers_and_cuts(labels, transfer_plan.moves_between(labels[1:], has, work))
    return *steps, *gathers, *cuts


def _gathers_and_cuts(labels: str, moves: transfer_plan.Transfers) -> tuple[Route, Route]:
    gathers = tuple(Gather(labels.index(c), axes) for c, axes in moves.gathered)
    return gathers, tuple(Cut(labels.index(c), axes) for c, axes in moves.cut)


def dispatch(route: Route, x: jax.Array, start: jax.Array) -> jax.Array:
    """x on the devices that work on it. start: the first row, among all, of a device's own groups."""
    return cast(jax.Array, _moved(route, True, x, start))


def combine(route: Route, y: jax.Array, start: jax.Array) -> jax.Array:
    return cast(jax.Array, _moved(route, False, y, start))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _moved(route: Route, there: bool, x: jax.Array, start: jax.Array) -> jax.Array:
    """x after the route, or after its way back in reverse order; either is the transpose of the other."""
    for step in route if there else reversed(route):
        x = (step.there if there else step.back)(x, start)
    return x


def _moved_forward(route: Route, there: bool, x: jax.Array, start: jax.Array):
    return _moved(route, there, x, start), (start, Like.of(x))


def _moved_backward(route: Route, there: bool, kept: tuple[jax.Array, Like], g: jax.Array) -> tuple[jax.Array, Any]:
    start, like = kept
    return like.reduced(cast(jax.Array, _moved(route, not there, g, start))), np.zeros((), jax.dtypes.float0)


_moved.defvjp(_moved_forward, _moved_backward)
