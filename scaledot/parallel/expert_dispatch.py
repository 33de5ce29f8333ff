"""Dispatch of rows and weights to the devices of their experts, and combine, its transpose.

A route is a tuple of collectives inside a shard_map, each with its transpose. `dispatch` runs a route; `combine` runs
the transposes in reverse order. The result of a ragged matmul is combined along the route of rows, and its gradient is
dispatched. Both are a custom_vjp, because JAX would transpose a slice to a psum of zero-padded gradients, which
transfers twice the bytes of an all-gather.
"""

import functools
import itertools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scaledot.parallel import transfer_plan
from scaledot.parallel.transfer_plan import AxesByLabel, LabelSharding
from scaledot.parallel.transfers import Axes, own_shard
from scaledot.parallel.types import PrimalType


class Gather(NamedTuple):
    """All-gather of an axis that is sharded over mesh axes; the result does not vary along them."""

    axis: int
    axes: Axes

    def forward(self, x: jax.Array, start) -> jax.Array:
        return lax.all_gather(x, self.axes, axis=self.axis, tiled=True, to="invarying")

    def transpose(self, x: jax.Array, start) -> jax.Array:
        return own_shard(x, self.axis, self.axes)


class Slice(NamedTuple):
    """The transpose of Gather: each device takes its own shard of a replicated axis."""

    axis: int
    axes: Axes

    def forward(self, x: jax.Array, start) -> jax.Array:
        return own_shard(x, self.axis, self.axes)

    def transpose(self, x: jax.Array, start) -> jax.Array:
        return lax.all_gather(x, self.axes, axis=self.axis, tiled=True, to="invarying")


class AllToAll(NamedTuple):
    """All-to-all over mesh axes that shard `gathered_axis`: gathers it and shards `sharded_axis` instead."""

    gathered_axis: int
    sharded_axis: int
    axes: Axes

    def forward(self, x: jax.Array, start) -> jax.Array:
        return self._all_to_all(x, self.sharded_axis, self.gathered_axis)

    def transpose(self, x: jax.Array, start) -> jax.Array:
        return self._all_to_all(x, self.gathered_axis, self.sharded_axis)

    def _all_to_all(self, x: jax.Array, split_axis: int, concat_axis: int) -> jax.Array:
        return lax.all_to_all(x, self.axes, split_axis=split_axis, concat_axis=concat_axis, tiled=True)


class GatherRows(NamedTuple):
    """All-gather of rows over `axes`, rolled so that those of the device's own groups are first.

    group_axes: the mesh axes that shard the groups. In the transpose each row is nonzero on one device, so reducing
    over `group_axes` is exact in any dtype.
    """

    axes: Axes
    group_axes: Axes

    def forward(self, x: jax.Array, start) -> jax.Array:
        x = lax.all_gather(x, self.axes, tiled=True, to="invarying") if self.axes else x
        return jnp.roll(x, -start, axis=0)

    def transpose(self, x: jax.Array, start) -> jax.Array:
        x = jnp.roll(x, start, axis=0)
        for is_reduced, group in itertools.groupby(self.axes, self.group_axes.__contains__):
            axes = tuple(group)
            x = lax.psum_scatter(x, axes, tiled=True) if is_reduced else own_shard(x, 0, axes)
        rest = tuple(axis for axis in self.group_axes if axis not in self.axes)
        return lax.psum(x, rest) if rest else x


Route = tuple[Gather | Slice | AllToAll | GatherRows, ...]


def route_of_rows(labels: str, sharding: LabelSharding, compute_axes: AxesByLabel) -> Route:
    """The route from a device's shard of the rows to the rows of its groups.

    labels: of rows and features. sharding: of the array. compute_axes: the mesh axes that shard groups ("g")
    and features in the matmul.
    """
    rows, feature = labels
    plan = transfer_plan.transfers_between(feature, dict(sharding), compute_axes)
    gathers, slices = _gathers_and_slices(labels, plan)
    return *gathers, GatherRows(dict(sharding).get(rows, ()), compute_axes["g"]), *slices


def route_of_weights(labels: str, sharding: LabelSharding, compute_axes: AxesByLabel) -> Route:
    """The route from a device's shard of the weights, or of the biases, to the weights of its groups."""
    remaining, steps = dict(sharding), []
    for axis in compute_axes["g"][len(remaining.get("g", ())) :]:
        label = next((c for c, axes in sharding if axis in axes), None)
        if label is None:
            steps.append(Slice(0, (axis,)))
        else:
            steps.append(AllToAll(labels.index(label), 0, (axis,)))
            remaining[label] = tuple(a for a in remaining[label] if a != axis)
    gathers, slices = _gathers_and_slices(labels, transfer_plan.transfers_between(labels[1:], remaining, compute_axes))
    return *steps, *gathers, *slices


def _gathers_and_slices(labels: str, plan: transfer_plan.Transfers) -> tuple[Route, Route]:
    gathers = tuple(Gather(labels.index(c), axes) for c, axes in plan.gathered)
    return gathers, tuple(Slice(labels.index(c), axes) for c, axes in plan.sliced)


def dispatch(route: Route, x: jax.Array, start: jax.Array) -> jax.Array:
    """Runs the collectives of a route on x. start: the global index of the first row of the device's own groups."""
    return cast(jax.Array, _run_route(route, False, x, start))


def combine(route: Route, y: jax.Array, start: jax.Array) -> jax.Array:
    """Runs the transpose of a route on y."""
    return cast(jax.Array, _run_route(route, True, y, start))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _run_route(route: Route, transposed: bool, x: jax.Array, start: jax.Array) -> jax.Array:
    for step in reversed(route) if transposed else route:
        x = (step.transpose if transposed else step.forward)(x, start)
    return x


def _run_route_fwd(route: Route, transposed: bool, x: jax.Array, start: jax.Array):
    return _run_route(route, transposed, x, start), (start, PrimalType.of(x))


def _run_route_bwd(
    route: Route, transposed: bool, residuals: tuple[jax.Array, PrimalType], g: jax.Array
) -> tuple[jax.Array, Any]:
    start, primal = residuals
    return primal.reduced(cast(jax.Array, _run_route(route, not transposed, g, start))), np.zeros((), jax.dtypes.float0)


_run_route.defvjp(_run_route_fwd, _run_route_bwd)
