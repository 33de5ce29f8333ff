"""Arrays on their way to the devices that work on them, and back: the collectives of a grouped product.

A way is a tuple of steps inside a shard_map. Going there and coming back are each other's gradients, so a result comes
back as the gradient of an operand does, and its own gradient goes there. JAX would find the same sums, but gather
gradients by adding them to zeros, twice the bytes.
"""

import functools
import itertools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scaledot.kernels.manual import summed_as
from scaledot.ops import partition
from scaledot.ops.moving import Axes, own_part
from scaledot.ops.partition import Split
from scaledot.train.product import Like


class Gather(NamedTuple):
    """An axis that is split over mesh axes and shall be whole; the same everywhere then, and typed so."""

    axis: int
    axes: Axes

    def there(self, x: jax.Array, start) -> jax.Array:
        return lax.all_gather(x, self.axes, axis=self.axis, tiled=True, to="invarying")

    def back(self, x: jax.Array, start) -> jax.Array:
        return own_part(x, self.axis, self.axes)


class Cut(NamedTuple):
    """The other way round."""

    axis: int
    axes: Axes

    def there(self, x: jax.Array, start) -> jax.Array:
        return own_part(x, self.axis, self.axes)

    def back(self, x: jax.Array, start) -> jax.Array:
        return lax.all_gather(x, self.axes, axis=self.axis, tiled=True, to="invarying")


class Exchange(NamedTuple):
    """An axis that is split over mesh axes shall be whole, and another one split instead."""

    axis: int
    split: int
    axes: Axes

    def there(self, x: jax.Array, start) -> jax.Array:
        return lax.all_to_all(x, self.axes, split_axis=self.split, concat_axis=self.axis, tiled=True)

    def back(self, x: jax.Array, start) -> jax.Array:
        return lax.all_to_all(x, self.axes, split_axis=self.axis, concat_axis=self.split, tiled=True)


class Rows(NamedTuple):
    """All rows, which are split over `axes`, those of a device's own groups first; groups are split over `groups`.

    On the way back every row is one device's own and zeros from the others, so adding them rounds nothing.
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


Steps = tuple[Gather | Cut | Exchange | Rows, ...]


def way_of_rows(labels: str, split: Split, work: dict[str, Axes]) -> Steps:
    """From parts of rows to the rows of a device's groups."""
    rows, feature = labels
    moves = partition.moves_between(feature, dict(split), work)
    gathers, cuts = _gathers_and_cuts(labels, moves)
    return *gathers, Rows(dict(split).get(rows, ()), work["g"]), *cuts


def way_of_matrices(labels: str, split: Split, work: dict[str, Axes]) -> Steps:
    """From parts of matrices, or of biases, to those of a device's groups."""
    has, steps = dict(split), []
    for axis in work["g"][len(has.get("g", ())) :]:
        along = next((c for c, axes in split if axis in axes), None)
        if along is None:
            steps.append(Cut(0, (axis,)))
        else:
            steps.append(Exchange(labels.index(along), 0, (axis,)))
            has[along] = tuple(a for a in has[along] if a != axis)
    gathers, cuts = _gathers_and_cuts(labels, partition.moves_between(labels[1:], has, work))
    return *steps, *gathers, *cuts


def _gathers_and_cuts(labels: str, moves: partition.Moves) -> tuple[Steps, Steps]:
    gathers = tuple(Gather(labels.index(c), axes) for c, axes in moves.gathered)
    return gathers, tuple(Cut(labels.index(c), axes) for c, axes in moves.cut)


def sent(steps: Steps, x: jax.Array, start: jax.Array) -> jax.Array:
    """x where it is worked on. start: where rows of a device's groups start among all."""
    return cast(jax.Array, _moved(steps, True, x, start))


def sent_back(steps: Steps, y: jax.Array, start: jax.Array) -> jax.Array:
    return cast(jax.Array, _moved(steps, False, y, start))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _moved(steps: Steps, there: bool, x: jax.Array, start: jax.Array) -> jax.Array:
    """x after the steps, or after the ways back in reverse; either is the gradient of the other."""
    for step in steps if there else reversed(steps):
        x = (step.there if there else step.back)(x, start)
    return x


def _moved_forward(steps: Steps, there: bool, x: jax.Array, start: jax.Array):
    return _moved(steps, there, x, start), (start, Like(jax.typeof(x)))


def _moved_backward(steps: Steps, there: bool, kept: tuple[jax.Array, Like], g: jax.Array) -> tuple[jax.Array, Any]:
    start, like = kept
    return summed_as(cast(jax.Array, _moved(steps, not there, g, start)), like.type), np.zeros((), jax.dtypes.float0)


_moved.defvjp(_moved_forward, _moved_backward)
