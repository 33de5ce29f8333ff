"""Chooses the collectives of a sharded contraction from the shardings of its operands and of its result.

Along each mesh axis the work is partitioned by one label of the contraction:

* a contracting label, if the mesh axis shards it in both operands: every device computes a partial result, and partial
  results are all-reduced, or reduce-scattered if the mesh axis shards the result;
* otherwise the label of the result that the mesh axis shards: operands with another sharding are all-gathered.

Operands are all-gathered as codes and scales. Partial results are reduced in float32.

Example, y (s, n) = x (s, k) @ w (k, n) over "tp":

* row parallelism, x (s, k@tp) and w (k@tp, n): partial results, all-reduced for y (s, n), reduce-scattered for
  y (s@tp, n);
* column parallelism, x (s@tp, k) and w (k, n@tp) for y (s, n@tp): x is all-gathered.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import PartitionSpec

from scaledot.contraction import Contraction
from scaledot.parallel import transfers
from scaledot.parallel.transfers import Axes
from scaledot.parallel.types import axis_names

LabelSharding = tuple[tuple[str, Axes], ...]  # hashable: (label, mesh axes that shard it, major to minor)
AxesByLabel = Mapping[str, Axes]  # the same as a mapping


class Transfers(NamedTuple):
    """Transfers of an operand before its matmul: labels to all-gather, then labels to slice to the device's shard."""

    gathered: LabelSharding = ()
    sliced: LabelSharding = ()


NO_TRANSFERS = Transfers()


class TransferPlan(NamedTuple):
    """The collectives of a sharded contraction.

    lhs, rhs: transfers of the operands. reduced_axes: mesh axes over which partial results are reduced. scattered:
    labels of the result that are reduce-scattered, over some of `reduced_axes`; the others are all-reduced. out: the
    sharding of the result.
    """

    lhs: Transfers
    rhs: Transfers
    reduced_axes: Axes
    scattered: LabelSharding
    out: LabelSharding


def label_sharding(labels: str, spec: PartitionSpec) -> LabelSharding:
    """The sharded labels of an array with a PartitionSpec, and their mesh axes.

    >>> label_sharding("bsk", PartitionSpec(("dp", "fsdp"), None, "tp"))
    (('b', ('dp', 'fsdp')), ('k', ('tp',)))
    """
    return tuple((c, axis_names(entry)) for c, entry in zip(labels, spec, strict=False) if entry)


def spec_of(labels: str, sharding: LabelSharding) -> PartitionSpec:
    """The PartitionSpec of an array with these labels: the inverse of `label_sharding`."""
    axes = dict(sharding)
    return PartitionSpec(*(axes.get(c) for c in labels))


def make_transfer_plan(
    contraction: Contraction, lhs: LabelSharding, rhs: LabelSharding, out: LabelSharding
) -> TransferPlan:
    """The collectives for operands sharded as `lhs` and `rhs`. `out` is the requested sharding of the result.

    The plan's own `out` may differ from the requested one, and the caller reshards.

    >>> row_parallel = make_transfer_plan(Contraction("sk", "kn", "sn"), (("k", ("tp",)),), (("k", ("tp",)),), ())
    >>> row_parallel.reduced_axes
    ('tp',)
    >>> column_parallel = (("n", ("tp",)),)
    >>> plan = make_transfer_plan(Contraction("sk", "kn", "sn"), (("s", ("tp",)),), column_parallel, column_parallel)
    >>> plan.lhs
    Transfers(gathered=(('s', ('tp',)),), sliced=())
    """
    work = _work_sharding(contraction, lhs, rhs, out)
    reduced_axes = tuple(axis for c in contraction.contracting for axis in work.get(c, ()))
    requested = dict(out)
    scattered, result = [], []
    for c in contraction.out:
        computed, target = work.get(c, ()), requested.get(c, ())
        extra = target[len(computed) :]
        can_scatter = target[: len(computed)] == computed and set(extra) <= set(reduced_axes)
        scattered.append((c, extra if can_scatter else ()))
        result.append((c, computed + extra if can_scatter else computed))
    return TransferPlan(
        transfers_between(contraction.lhs, dict(lhs), work),
        transfers_between(contraction.rhs, dict(rhs), work),
        reduced_axes,
        _nonempty(scattered),
        _nonempty(result),
    )


def _work_sharding(
    contraction: Contraction, lhs: LabelSharding, rhs: LabelSharding, out: LabelSharding
) -> dict[str, Axes]:
    """For each label the mesh axes over which the work is partitioned along it, major to minor."""
    left, right, result = ({axis: label for label, axes in each for axis in axes} for each in (lhs, rhs, out))
    partitioned = {
        axis: _partitioned_label(contraction, left.get(axis), right.get(axis), result.get(axis))
        for axis in (*left, *right, *result)
    }
    shardings = (*out, *lhs, *rhs)  # mesh axes in the order of the requested result, so that it needs no resharding
    return {label: _partitioning_axes(label, partitioned, shardings) for label, _ in shardings}


def _partitioned_label(contraction: Contraction, left: str | None, right: str | None, result: str | None) -> str:
    """The label along which a mesh axis partitions the work, if it shards these labels of lhs, rhs and the result."""
    if left is not None and left == right and left in contraction.contracting:
        return left  # both operands are sharded alike along K: no operand is transferred, partial results are reduced
    return next(label for label in (result, left, right) if label is not None)


def _partitioning_axes(label: str, partitioned: dict[str, str], shardings: LabelSharding) -> Axes:
    """The mesh axes that partition the work along a label, in the order in which they first shard it."""
    sharding = (axis for other, axes in shardings if other == label for axis in axes)
    return tuple(dict.fromkeys(axis for axis in sharding if partitioned[axis] == label))


def transfers_between(labels: str, source: AxesByLabel, target: AxesByLabel) -> Transfers:
    """The transfers that reshard an operand from `source` to `target`; their common leading mesh axes stay."""
    gathered, sliced = [], []
    for c in labels:
        old, new = source.get(c, ()), target.get(c, ())
        same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        gathered.append((c, old[same:]))
        sliced.append((c, new[same:]))
    return Transfers(_nonempty(gathered), _nonempty(sliced))


def sharding_after(sharding: LabelSharding, transfers: Transfers) -> dict[str, Axes]:
    """The sharding of an operand after its transfers."""
    axes = dict(sharding)
    for c, gathered in transfers.gathered:
        axes[c] = axes[c][: -len(gathered)]
    for c, sliced in transfers.sliced:
        axes[c] = (*axes.get(c, ()), *sliced)
    return axes


def _nonempty(sharding: list[tuple[str, Axes]]) -> LabelSharding:
    return tuple((c, axes) for c, axes in sharding if axes)


def transfer(x: Any, labels: str, plan: Transfers) -> Any:
    """A plain or quantised operand after its transfers; to be called inside a shard_map."""
    for c, axes in plan.gathered:
        x = transfers.all_gather(x, labels.index(c), axes)
    for c, axes in plan.sliced:
        x = transfers.own_shard(x, labels.index(c), axes)
    return x


def reduce_partials(partial: jax.Array, labels: str, plan: TransferPlan) -> jax.Array:
    """Reduce-scatters the partial results of all devices along `plan.scattered` and all-reduces them otherwise."""
    for c, axes in plan.scattered:
        partial = lax.psum_scatter(partial, axes, scatter_dimension=labels.index(c), tiled=True)
    scattered = {axis for _, axes in plan.scattered for axis in axes}
    rest = tuple(axis for axis in plan.reduced_axes if axis not in scattered)
    return lax.psum(partial, rest) if rest else partial
