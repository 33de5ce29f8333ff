"""Chooses the collectives of a sharded contraction: what devices gather, multiply, reduce and scatter.

The operands and the result are sharded in given ways. Along each mesh axis the work is partitioned by one label:

* a contracted label that both operands are sharded along: every device has partial sums, which are all-reduced, or
  reduce-scattered where the result is sharded along that mesh axis;
* otherwise the label of the result that is sharded along it: operands that are sharded differently are all-gathered.

Operands are gathered as codes and scales, and partial sums reduced in float32.
"""

from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import PartitionSpec

from scaledot.contraction import Contraction
from scaledot.parallel import transfers
from scaledot.parallel.transfers import Axes
from scaledot.parallel.types import axis_names

Split = tuple[tuple[str, Axes], ...]  # labels and the mesh axes that they are split over, the slowest first


class Transfers(NamedTuple):
    """What an operand goes through before it is multiplied: labels that are gathered, then labels that are cut."""

    gathered: Split = ()
    cut: Split = ()


STAYS = Transfers()


class TransferPlan(NamedTuple):
    """What devices do. `summed`: the mesh axes over which parts of sums are added; `scattered`: those among them that
    leave each device a part of the result; `out`: how the result lies then."""

    lhs: Transfers
    rhs: Transfers
    summed: Axes
    scattered: Split
    out: Split


def split_of(labels: str, spec: PartitionSpec) -> Split:
    """The labels of an array that a PartitionSpec splits.

    >>> split_of("bsk", PartitionSpec(("dp", "fsdp"), None, "tp"))
    (('b', ('dp', 'fsdp')), ('k', ('tp',)))
    """
    return tuple((c, axis_names(entry)) for c, entry in zip(labels, spec, strict=False) if entry)


def spec_of(labels: str, split: Split) -> PartitionSpec:
    known = dict(split)
    return PartitionSpec(*(known.get(c) for c in labels))


def make_transfer_plan(contraction: Contraction, lhs: Split, rhs: Split, out: Split) -> TransferPlan:
    """What devices do where operands lie as given and the result is to lie as given.

    >>> row_parallel = make_transfer_plan(Contraction("sk", "kn", "sn"), (("k", ("tp",)),), (("k", ("tp",)),), ())
    >>> row_parallel.summed
    ('tp',)
    >>> column_wise = (("n", ("tp",)),)
    >>> gathered = make_transfer_plan(Contraction("sk", "kn", "sn"), (("s", ("tp",)),), column_wise, column_wise)
    >>> gathered.lhs
    Transfers(gathered=(('s', ('tp',)),), cut=())
    """
    shared = _shared(contraction, lhs, rhs, out)
    summed = tuple(axis for c in contraction.contracted for axis in shared.get(c, ()))
    wanted = dict(out)
    scattered, left = [], []
    for c in contraction.out:
        has, wants = shared.get(c, ()), wanted.get(c, ())
        added = wants[len(has) :] if wants[: len(has)] == has and set(wants[len(has) :]) <= set(summed) else ()
        scattered.append((c, added))
        left.append((c, has + added))
    return TransferPlan(
        moves_between(contraction.lhs, dict(lhs), shared),
        moves_between(contraction.rhs, dict(rhs), shared),
        summed,
        _nonempty(scattered),
        _nonempty(left),
    )


def _shared(contraction: Contraction, lhs: Split, rhs: Split, out: Split) -> dict[str, Axes]:
    """For each label the mesh axes over which devices partition the work along it, the slowest first."""
    left, right, result = ({axis: label for label, axes in split for axis in axes} for split in (lhs, rhs, out))
    partitioned = {
        axis: _partitioned_label(contraction, left.get(axis), right.get(axis), result.get(axis))
        for axis in (*left, *right, *result)
    }
    splits = (*out, *lhs, *rhs)  # the result's order of mesh axes comes first, so that it needs no resharding
    return {label: _partitioning_axes(label, partitioned, splits) for label, _ in splits}


def _partitioned_label(contraction: Contraction, left: str | None, right: str | None, result: str | None) -> str:
    """The label along which one mesh axis partitions the work; it shards these labels of lhs, rhs and the result."""
    if left is not None and left == right and left in contraction.contracted:
        return left  # devices hold matching parts of both operands: they multiply these and add up the results
    return next(label for label in (result, left, right) if label is not None)


def _partitioning_axes(label: str, partitioned: dict[str, str], splits: Split) -> Axes:
    """The mesh axes that partition the work along a label, in the order in which they first shard it."""
    sharding = (axis for other, axes in splits if other == label for axis in axes)
    return tuple(dict.fromkeys(axis for axis in sharding if partitioned[axis] == label))


def moves_between(labels: str, split: dict[str, Axes], shared: dict[str, Axes]) -> Transfers:
    """From how an operand is split to how the work is; axes that are split alike in front stay."""
    gathered, cut = [], []
    for c in labels:
        has, wants = split.get(c, ()), shared.get(c, ())
        same = next((i for i, (a, b) in enumerate(zip(has, wants, strict=False)) if a != b), min(len(has), len(wants)))
        gathered.append((c, has[same:]))
        cut.append((c, wants[same:]))
    return Transfers(_nonempty(gathered), _nonempty(cut))


def after(split: Split, moves: Transfers) -> dict[str, Axes]:
    """How an operand is sharded after its transfers."""
    axes = dict(split)
    for c, gathered in moves.gathered:
        axes[c] = axes[c][: -len(gathered)]
    for c, cut in moves.cut:
        axes[c] = (*axes.get(c, ()), *cut)
    return axes


def _nonempty(split: list[tuple[str, Axes]]) -> Split:
    return tuple((c, axes) for c, axes in split if axes)


def moved(x: Any, labels: str, moves: Transfers) -> Any:
    """An operand, plain or quantised, as the work is split; inside a shard_map."""
    for c, axes in moves.gathered:
        x = transfers.gathered(x, labels.index(c), axes)
    for c, axes in moves.cut:
        x = transfers.own_part(x, labels.index(c), axes)
    return x


def added(total: jax.Array, labels: str, partition: TransferPlan) -> jax.Array:
    """The sum of all devices' parts, or each one's share of it."""
    for c, axes in partition.scattered:
        total = lax.psum_scatter(total, axes, scatter_dimension=labels.index(c), tiled=True)
    scattered = {axis for _, axes in partition.scattered for axis in axes}
    left = tuple(axis for axis in partition.summed if axis not in scattered)
    return lax.psum(total, left) if left else total
