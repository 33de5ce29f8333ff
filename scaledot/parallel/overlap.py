"""Matmuls whose operands, or whose results, travel between devices while parts of them are being computed.

A Partition says what devices gather, multiply, reduce and scatter. Along a mesh axis that is to `overlap`, an operand
is not gathered before it is multiplied: its shards arrive around a ring, each is multiplied as it comes, and no device
ever holds the whole. A result is not computed before it is scattered: each device's shard of it is summed on the way
there. Forward and backward these are each other's transposes.

On 4 devices that shard the rows of x (4096, k), a device first multiplies its own 1024 rows, then those of its two
neighbours, which arrived meanwhile, then those of the device opposite.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from scaledot.contraction import Contraction
from scaledot.parallel import transfer_plan, transfers
from scaledot.parallel.transfer_plan import STAYS, Axes, TransferPlan, Transfers
from scaledot.parallel.types import vary_as


class RingOperand(NamedTuple):
    """An operand of a contraction, maybe flattened: `open` restores one axis for each label, `close` undoes that."""

    labels: str
    value: Any
    sizes: dict[str, int]
    open: Callable[[Any, dict[str, int]], Any] = lambda x, sizes: x
    close: Callable[[Any], Any] = lambda x: x

    def opened(self) -> Any:
        return self.open(self.value, self.sizes)

    def with_contents(self, opened: Any) -> "RingOperand":
        return self._replace(value=self.close(opened), sizes=dict(zip(self.labels, opened.shape, strict=True)))

    def moved(self, moves: Transfers) -> "RingOperand":
        if moves == STAYS:
            return self
        return self.with_contents(transfer_plan.moved(self.opened(), self.labels, moves))


class Ring(NamedTuple):
    """A ring along one mesh axis: of shards of an operand (side 0 or 1) or of partial sums (None), along a label."""

    side: int | None
    label: str
    axis: str


def ring_of(plan: TransferPlan, overlap: Axes) -> Ring | None:
    """The ring that replaces a transfer of the plan: the first that runs along one of the axes to overlap alone."""
    for axis in overlap:
        for side, moves in enumerate((plan.lhs, plan.rhs)):
            cut = {c for c, _ in moves.cut}
            for c, axes in moves.gathered:
                if axes == (axis,) and c not in cut:
                    return Ring(side, c, axis)
        for c, axes in plan.scattered:
            if axes == (axis,):
                return Ring(None, c, axis)
    return None


def adds(plan: TransferPlan, contraction: Contraction, overlap: Axes) -> bool:
    """Whether the result is accumulated from several matmuls, whose results must then be float32."""
    ring = ring_of(plan, overlap)
    return bool(plan.summed) or (ring is not None and ring.label in contraction.contracted)


def contract_overlapped(
    plan: TransferPlan,
    contraction: Contraction,
    lhs: RingOperand,
    rhs: RingOperand,
    multiply: Callable[[Any, Any, dict[str, int]], jax.Array],
    overlap: Axes = (),
) -> jax.Array:
    """The contraction with the transfers of the plan. multiply: of two operands' values and the sizes of all labels."""

    def times(sides: tuple[RingOperand, RingOperand]) -> jax.Array:
        left, right = sides
        return multiply(left.value, right.value, left.sizes | right.sizes)

    ring = ring_of(plan, overlap)
    rest = plan if ring is None else _without(plan, ring)
    sides = lhs.moved(rest.lhs), rhs.moved(rest.rhs)
    if ring is None:
        total = times(sides)
    elif ring.side is None:
        total = _sums_around(sides, ring, times)
    else:
        total = _parts_around(contraction.out, sides, ring.side, ring, times)
    return transfer_plan.added(total, contraction.out, rest)


def _without(plan: TransferPlan, ring: Ring) -> TransferPlan:
    """The transfers of a plan that a ring does not replace."""
    if ring.side is None:
        summed = tuple(axis for axis in plan.summed if axis != ring.axis)
        return plan._replace(summed=summed, scattered=tuple(each for each in plan.scattered if each[0] != ring.label))
    name = ("lhs", "rhs")[ring.side]
    moves: Transfers = getattr(plan, name)
    gathered = tuple(each for each in moves.gathered if each[0] != ring.label)
    return plan._replace(**{name: moves._replace(gathered=gathered)})


def _parts_around(out: str, sides: tuple[RingOperand, RingOperand], side: int, ring: Ring, times) -> jax.Array:
    """All-gather and matmul: each shard of one operand is multiplied as it arrives, by its part of the other."""
    mine, other = sides[side], sides[1 - side]
    count = lax.axis_size(ring.axis)
    whole = other.opened() if ring.label in other.labels else None

    def step(total: jax.Array | None, index: jax.Array, part) -> jax.Array:
        facing = other
        if whole is not None:
            facing = other.with_contents(transfers.part(whole, other.labels.index(ring.label), index, count))
        arrived = mine.with_contents(part)
        term = times((arrived, facing) if side == 0 else (facing, arrived))
        if ring.label in out:
            return _placed(total, term, out.index(ring.label), index, count)
        return term if total is None else total + term

    return transfers.fold_parts(step, mine.opened(), mine.labels.index(ring.label), ring.axis)


def _placed(total: jax.Array | None, term: jax.Array, axis: int, index: jax.Array, count: int) -> jax.Array:
    """The result with the part of one device written at its place; zeros elsewhere if there is none yet."""
    size = term.shape[axis]
    if total is None:
        shape = (*term.shape[:axis], size * count, *term.shape[axis + 1 :])
        total = vary_as(jnp.zeros(shape, term.dtype), term)
    return lax.dynamic_update_slice_in_dim(total, term, index * size, axis)


def _sums_around(sides: tuple[RingOperand, RingOperand], ring: Ring, times) -> jax.Array:
    """Matmul and reduce-scatter: partial sums travel towards their device, and every hop adds its own term."""
    count = lax.axis_size(ring.axis)

    def term(opened: list[Any], index) -> jax.Array:
        left, right = (
            side if x is None else side.with_contents(transfers.part(x, side.labels.index(ring.label), index, count))
            for side, x in zip(sides, opened, strict=True)
        )
        return times((left, right))

    opened = [side.opened() if ring.label in side.labels else None for side in sides]
    return transfers.summed_on_the_way(term, opened, ring.axis)
