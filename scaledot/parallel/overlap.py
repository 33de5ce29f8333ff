"""Collective matmuls: contractions that overlap the transfers of their operands, or of their result, with compute.

A TransferPlan lists the collectives of a sharded contraction. Along a mesh axis in `overlap`, one of them becomes a
ring of collective-permutes:

* all-gather and matmul: shards of an operand arrive around the ring, and each is multiplied on arrival. The gathered
  operand is never materialised.
* matmul and reduce-scatter: accumulators of the result's shards move around the ring, and every device adds its partial
  result.

Each of the two is the transpose of the other, so the backward pass of one is the other.

On 4 devices that shard the rows of x (4096, k), a device first multiplies its own 1024 rows, then those of its two
neighbours, transferred meanwhile, then those of the device opposite.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from scaledot.contraction import Contraction
from scaledot.parallel import transfer_plan, transfers
from scaledot.parallel.transfer_plan import NO_TRANSFERS, Axes, TransferPlan, Transfers
from scaledot.parallel.types import vary_as


class RingOperand(NamedTuple):
    """An operand of a contraction. `unflatten` gives it one axis per label; `flatten` is the inverse.

    sizes: of the labels, on this device.
    """

    labels: str
    value: Any
    sizes: dict[str, int]
    unflatten: Callable[[Any, dict[str, int]], Any] = lambda x, sizes: x
    flatten: Callable[[Any], Any] = lambda x: x

    def unflattened(self) -> Any:
        return self.unflatten(self.value, self.sizes)

    def with_value(self, unflattened: Any) -> "RingOperand":
        """The operand with another value, passed with one axis per label."""
        sizes = dict(zip(self.labels, unflattened.shape, strict=True))
        return self._replace(value=self.flatten(unflattened), sizes=sizes)

    def transferred(self, plan: Transfers) -> "RingOperand":
        if plan == NO_TRANSFERS:
            return self
        return self.with_value(transfer_plan.transfer(self.unflattened(), self.labels, plan))


class Ring(NamedTuple):
    """A ring along one mesh axis that replaces a collective along one label.

    operand: 0 if shards of lhs are transferred, 1 for rhs, None for accumulators of the result.
    """

    operand: int | None
    label: str
    axis: str


def ring_of(plan: TransferPlan, overlap: Axes) -> Ring | None:
    """The ring that replaces the first all-gather or reduce-scatter of the plan over exactly one axis of `overlap`."""
    for axis in overlap:
        for operand, of_operand in enumerate((plan.lhs, plan.rhs)):
            sliced = {c for c, _ in of_operand.sliced}
            for c, axes in of_operand.gathered:
                if axes == (axis,) and c not in sliced:
                    return Ring(operand, c, axis)
        for c, axes in plan.scattered:
            if axes == (axis,):
                return Ring(None, c, axis)
    return None


def accumulates_partials(plan: TransferPlan, contraction: Contraction, overlap: Axes) -> bool:
    """Whether the result is accumulated from several matmuls, which must then have float32 results."""
    ring = ring_of(plan, overlap)
    return bool(plan.reduced_axes) or (ring is not None and ring.label in contraction.contracting)


def contract_overlapped(
    plan: TransferPlan,
    contraction: Contraction,
    lhs: RingOperand,
    rhs: RingOperand,
    multiply: Callable[[Any, Any, dict[str, int]], jax.Array],
    overlap: Axes = (),
) -> jax.Array:
    """Runs a contraction with the collectives of a plan, one of them as a ring along an axis of `overlap`.

    multiply: (value of lhs, value of rhs, sizes of all labels) -> result, called on each pair of shards.
    """

    def matmul(left: RingOperand, right: RingOperand) -> jax.Array:
        return multiply(left.value, right.value, left.sizes | right.sizes)

    ring = ring_of(plan, overlap)
    rest = plan if ring is None else _without(plan, ring)
    operands = lhs.transferred(rest.lhs), rhs.transferred(rest.rhs)
    if ring is None:
        result = matmul(*operands)
    elif ring.operand is None:
        result = _matmul_reduce_scatter(operands, ring, matmul)
    else:
        result = _all_gather_matmul(contraction.out, operands, ring.operand, ring, matmul)
    return transfer_plan.reduce_partials(result, contraction.out, rest)


def _without(plan: TransferPlan, ring: Ring) -> TransferPlan:
    """The plan less the collective that the ring replaces."""
    if ring.operand is None:
        reduced_axes = tuple(axis for axis in plan.reduced_axes if axis != ring.axis)
        scattered = tuple(each for each in plan.scattered if each[0] != ring.label)
        return plan._replace(reduced_axes=reduced_axes, scattered=scattered)
    name = ("lhs", "rhs")[ring.operand]
    of_operand: Transfers = getattr(plan, name)
    gathered = tuple(each for each in of_operand.gathered if each[0] != ring.label)
    return plan._replace(**{name: of_operand._replace(gathered=gathered)})


def _all_gather_matmul(
    out: str, operands: tuple[RingOperand, RingOperand], gathered: int, ring: Ring, matmul
) -> jax.Array:
    """Multiplies each shard of one operand on arrival, by the matching shard of the other if the ring is along K."""
    operand, other = operands[gathered], operands[1 - gathered]
    count = lax.axis_size(ring.axis)
    unflattened = other.unflattened() if ring.label in other.labels else None

    def step(total: jax.Array | None, index: jax.Array, shard) -> jax.Array:
        arrived, matching = operand.with_value(shard), other
        if unflattened is not None:
            axis = other.labels.index(ring.label)
            matching = other.with_value(transfers.shard_at(unflattened, axis, index, count))
        result = matmul(arrived, matching) if gathered == 0 else matmul(matching, arrived)
        if ring.label in out:
            return _write_shard(total, result, out.index(ring.label), index, count)
        return result if total is None else total + result

    return transfers.fold_ring(step, operand.unflattened(), operand.labels.index(ring.label), ring.axis)


def _write_shard(total: jax.Array | None, shard: jax.Array, axis: int, index: jax.Array, count: int) -> jax.Array:
    """`total`, or zeros if it is None, with a shard written at index `index` of `count` along the axis."""
    size = shard.shape[axis]
    if total is None:
        shape = (*shard.shape[:axis], size * count, *shard.shape[axis + 1 :])
        total = vary_as(jnp.zeros(shape, shard.dtype), shard)
    return lax.dynamic_update_slice_in_dim(total, shard, index * size, axis)


def _matmul_reduce_scatter(operands: tuple[RingOperand, RingOperand], ring: Ring, matmul) -> jax.Array:
    """Computes the partial result for each device just before its accumulator arrives, and adds it."""
    count = lax.axis_size(ring.axis)

    def partial(values: list[Any], index) -> jax.Array:
        left, right = (
            operand
            if x is None
            else operand.with_value(transfers.shard_at(x, operand.labels.index(ring.label), index, count))
            for operand, x in zip(operands, values, strict=True)
        )
        return matmul(left, right)

    values = [operand.unflattened() if ring.label in operand.labels else None for operand in operands]
    return transfers.ring_reduce_scatter(partial, values, ring.axis)
