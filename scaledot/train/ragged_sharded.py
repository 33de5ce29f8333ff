"""The mesh form of ragged matmuls: devices hold the weights of some experts, rows come to them and results go back.

Every group is quantised as if it were alone, so a device with whole matrices of some groups needs the rows of these
groups, all of them and no others, to find the codes and scales of one device. Rows are gathered as they are, because a
block or a scale may span rows of many devices, and those of a device's own groups are brought to the front. Every row
of the result is computed by one device: results are added to zeros of the others, which is exact in any dtype.

Groups are shared by the mesh axes that shard the weights, and where they divide by those that shard rows only, which
would otherwise repeat the work of others. An axis that shards rows and features of weights, as in FSDP, exchanges
features for groups. Features that stay sharded, as in tensor parallelism, are handled as in `dot_sharded`: the amax of
what shares a scale is reduced across devices, and so are partial sums, in float32.

x (t, k), w (8, k@tp, n) on ep=4, tp=2 with groups sharded over "ep": a device has the matrices of two groups, half of k
each, and the rows of these two groups. It multiplies, sums are all-reduced over "tp", rows go back over "ep".
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from scaledot.contraction import Contraction
from scaledot.kernels import table
from scaledot.numerics.grouped import padded_capacity, whole_groups
from scaledot.numerics.rounding import Key, Positions, flat_index, numbered, seeds_of, uniform_at
from scaledot.parallel import transfer_plan
from scaledot.parallel.divisibility import misfit
from scaledot.parallel.expert_dispatch import combine, dispatch, route_of_rows, route_of_weights
from scaledot.parallel.shard_indices import padded, positions
from scaledot.parallel.sharding import constrain
from scaledot.parallel.specs import (
    Shardings,
    are_manual,
    check_axes,
    cut_blocks_message,
    device_count,
    global_sizes,
    mesh_of,
    shardings_of,
)
from scaledot.parallel.transfer_plan import LabelSharding, spec_of
from scaledot.parallel.transfers import Axes, own_shard
from scaledot.programs import run_as_program
from scaledot.recipes import Cast
from scaledot.state import State
from scaledot.train.kind import CastOperands, CastRequest, LocalRagged, Matmul, Operands, ShardCast, Step
from scaledot.train.options import Options
from scaledot.train.vjp import multiply

LABELS = Contraction("tk", "gkn", "tn")
_FEATURES = Contraction("tk", "kn", "tn")  # of one group
_BIAS = "gn"
_IN_WORDS = {"t": "rows", "g": "groups", "k": "features to sum over", "n": "features of the result"}


class Experts(NamedTuple):
    """How the arrays of a ragged matmul are sharded over a mesh. sizes: of the labels of whole arrays."""

    splits: Shardings
    sizes: dict[str, int]
    mesh: Any


def experts_of(x: jax.Array, w: jax.Array, specs, out_sharding) -> Experts | None:
    """How operands are sharded and the result is to be; None where nothing is."""
    splits = shardings_of(LABELS, jax.typeof(x), jax.typeof(w), specs, out_sharding)
    if splits is None:
        return None
    mesh = mesh_of(x, w)
    check_axes(mesh, splits.axes)
    sizes = dict(global_sizes(LABELS, x, w, splits, mesh))
    if not sizes["t"]:
        raise ValueError("`x` has no rows to split over a mesh; give it some that belong to no group")
    for name, split in zip("xwy", splits, strict=True):
        for c, axes in split:
            _check_divides(name, c, sizes[c], axes, mesh)
    return Experts(splits, sizes, mesh)


def _check_divides(name: str, label: str, size: int, axes: Axes, mesh) -> None:
    found = misfit(size, device_count(mesh, axes))
    if found is not None:
        raise ValueError(
            f"`{name}` has {size} {_IN_WORDS[label]}, which cannot be split evenly over {found.devices} devices of "
            f"{' and '.join(map(repr, axes))}; {' or '.join(map(str, found.fitting_sizes))} would fit"
        )


def multiply_experts(
    kind_of: Callable[[int, int, int, int], LocalRagged],
    options: Options,
    experts: Experts,
    operands: Operands,
    state: State,
    key,
) -> tuple[jax.Array, State]:
    """A ragged matmul and its next state; inside a shard_map over its mesh axes, of shards.

    kind_of: the kind of a matmul of so many groups and rows, from and to so many features.
    """
    work, mesh = _work(experts), experts.mesh
    local = {c: size // device_count(mesh, work.get(c, ())) for c, size in experts.sizes.items()}
    kind = ShardedRagged(
        kind_of(local["g"], local["t"], local["k"], local["n"]),
        tuple(work.items()),
        tuple(experts.sizes.items()),
        options.recipe.amax_scope,
    )
    step = Step(kind, options)
    if are_manual(mesh, experts.splits.axes):
        return _multiply_shards(step, experts.splits, tuple(work.items()), operands, state, key)
    static = table.tables(), step, experts.splits, tuple(work.items()), mesh
    if callable(options.kernel):
        return _multiply_whole(*static, operands, state, key)
    return run_as_program(_multiply_whole, *static, arrays=(operands, state, key))


def _multiply_whole(
    tables, step: Step, splits: Shardings, work: LabelSharding, mesh, operands: Operands, state: State, key
):
    """A ragged matmul of whole arrays, of which every device computes its share; kernels are those of the tables."""
    x, w, y = map(spec_of, (LABELS.lhs, LABELS.rhs, LABELS.out), splits)
    rest = PartitionSpec()
    specs: Any = x, w, spec_of(_BIAS, _of_bias(splits)), rest
    placed: Any = (
        None if a is None else constrain(a, spec, mesh=mesh) for a, spec in zip(operands, specs, strict=True)
    )
    run = functools.partial(_multiply_shards, step, splits, work)
    mapped = jax.shard_map(run, mesh=mesh, in_specs=(Operands(*specs), rest, rest), out_specs=(y, rest))
    return mapped(Operands(*placed), state, key)


def _work(experts: Experts) -> dict[str, Axes]:
    """The mesh axes along which devices share the work on groups and features."""
    x, w, y = (dict(split) for split in experts.splits)
    groups = _sharing_groups(experts, x, w, y)
    of_w = *_only("k", w, groups), *_only("n", w, groups)
    plan = transfer_plan.make_transfer_plan(_FEATURES, _only("k", x, groups), of_w, _only("n", y, groups))
    columns = tuple(axis for axis in dict(plan.out).get("n", ()) if axis not in plan.reduced_axes)
    return {"g": groups, "k": plan.reduced_axes, "n": columns}


def _sharing_groups(experts: Experts, x: dict[str, Axes], w: dict[str, Axes], y: dict[str, Axes]) -> Axes:
    """Mesh axes that split groups already, then those that split features of matrices and all rows, then rows only.

    Features are exchanged for groups from the fastest axis on, so that what a device has of them stays together.
    """
    groups, rows = w.get("g", ()), (x.get("t", ()), y.get("t", ()))

    def divides(axis: str) -> bool:
        return misfit(experts.sizes["g"], device_count(experts.mesh, (*groups, axis))) is None

    for c in "kn":
        for axis in reversed(w.get(c, ())):
            if axis not in rows[0] or axis not in rows[1] or not divides(axis):
                break
            groups = (*groups, axis)
    elsewhere = {axis for of, labels in ((x, "k"), (w, "gkn"), (y, "n")) for c in labels for axis in of.get(c, ())}
    for axis in dict.fromkeys(rows[0] + rows[1]):
        if axis not in elsewhere and divides(axis):
            groups = (*groups, axis)
    return groups


def _only(label: str, split: dict[str, Axes], without: Axes) -> LabelSharding:
    axes = tuple(axis for axis in split.get(label, ()) if axis not in without)
    return ((label, axes),) if axes else ()


def _of_bias(splits: Shardings) -> LabelSharding:
    return tuple((c, axes) for c, axes in splits.w if c in _BIAS)


def _multiply_shards(step: Step, splits: Shardings, shared: LabelSharding, operands: Operands, state: State, key):
    """Of shards of x, w, bias and the result as they are given, of what is between as the work is shared."""
    (x, w, bias, groups), work = operands, dict(shared)
    assert groups is not None
    start = _starts(groups, work["g"], 1)
    rows = dispatch(route_of_rows(LABELS.lhs, splits.x, work), x, start)
    weights = dispatch(route_of_weights(LABELS.rhs, splits.w, work), w, start)
    if bias is not None:
        bias = dispatch(route_of_weights(_BIAS, _of_bias(splits), work), bias, start)
    y, state = multiply(step, Operands(rows, weights, bias, groups), state, key)
    return combine(route_of_rows(LABELS.out, splits.g, work), y, start), state


def _starts(groups: jax.Array, axes: Axes, row_alignment: int) -> jax.Array:
    """Where rows of a device's first group start, if groups come in multiples of so many."""
    first = _first_group(groups, axes)
    return jnp.sum(jnp.where(jnp.arange(groups.size) < first, whole_groups(groups, row_alignment), 0))


def _first_group(groups: jax.Array, axes: Axes) -> Any:
    return lax.axis_index(axes) * (groups.size // lax.axis_size(axes)) if axes else 0


@dataclasses.dataclass(frozen=True)
class ShardedRagged:
    """A Kind of matmul of the rows of a device's own groups, and shards of features; `kind` is that of one device.

    work: the mesh axes that shard groups and features. sizes: of whole arrays. `groups` are the sizes of all groups.
    """

    kind: LocalRagged
    work: LabelSharding
    sizes: tuple[tuple[str, int], ...]
    amax_scope: str
    has_batch = False
    partitioning = None

    def resolve_cast(self, cast: Cast, matmul: str, tensor: str) -> ShardCast:
        resolved: Any = self.kind.resolve_cast(cast, matmul, tensor)
        for label, size in self._tiles(tensor, resolved):
            if size > 1:
                self._check_whole(tensor, label, size, "blocks")
        rotated = self._rotated(tensor, resolved)
        if cast.rotation is not None and rotated is not None:
            self._check_whole(tensor, rotated, cast.rotation.size, "groups of a rotation")
        return ShardCast(tensor, resolved, () if cast.delayed else self._amax_axes(tensor, resolved))

    def cast(self, request: CastRequest, x: jax.Array, groups) -> CastOperands:
        """What one device would find: scales are shared, and random numbers are drawn by global indices."""
        request = request.on_shards(lambda on, key: self._uniform(on, key, x.shape, groups))
        return self.kind.cast(request, x, self._own(groups))

    def plain(self, matmul: str, tensor: str, x: jax.Array, groups) -> jax.Array:
        return self.kind.plain(matmul, tensor, x, self._own(groups))

    def unclipped_mask(self, resolved: ShardCast, x: jax.Array, q) -> jax.Array | None:
        return self.kind.unclipped_mask(resolved.resolved, x, q)

    def amax(self, tensor: str, x: jax.Array, groups) -> jax.Array:
        return self.kind.amax(tensor, x, self._own(groups))

    def bias_gradient(self, g: jax.Array, groups) -> jax.Array:
        return self.kind.bias_gradient(g, self._own(groups))

    def multiply(self, matmul: Matmul, lhs, rhs, groups, bias: jax.Array | None = None) -> jax.Array:
        axes, own = self._axes({"fwd": "k", "dgrad": "n"}.get(matmul.name, "")), self._own(groups)
        if not axes:
            return self.kind.multiply(matmul, lhs, rhs, own, bias)
        y = lax.psum(self.kind.multiply(matmul.wide, lhs, rhs, own), axes)
        y = y if bias is None else self.kind.add_bias(y, bias.astype(y.dtype), own)
        return y.astype(matmul.dtype)

    def _axes(self, label: str) -> Axes:
        return dict(self.work).get(label, ())

    def _own(self, groups: jax.Array) -> jax.Array:
        axes = self._axes("g")
        return own_shard(groups, 0, axes) if axes else groups

    def _tiles(self, tensor: str, resolved) -> tuple[tuple[str, int], ...]:
        """Labels of features, and how many elements of each share a scale."""
        if tensor == "w":
            return tuple(zip(_FEATURES.rhs, resolved.tile, strict=True))
        return ((_feature(tensor), resolved.tile[1]),)

    def _rotated(self, tensor: str, resolved) -> str | None:
        """The label of features that a rotation runs along; None where it runs down whole groups."""
        if tensor == "w":
            return None if resolved.rotated_axis is None else _FEATURES.rhs[resolved.rotated_axis]
        return _feature(tensor) if resolved.axis == 1 else None

    def _amax_axes(self, tensor: str, resolved) -> Axes:
        """Mesh axes over which a cast shares scales: those that shard what has one scale, unless shards may have it."""
        if self.amax_scope == "local":
            return ()  # features are not put together
        whole = [c for c, size in self._tiles(tensor, resolved) if size == 0 or resolved.cast.format.two_level]
        return tuple(axis for c in whole for axis in self._axes(c))

    def _check_whole(self, tensor: str, label: str, block: int, what: str) -> None:
        axes = self._axes(label)
        found = misfit(dict(self.sizes)[label], lax.axis_size(axes), block) if axes else None
        if found is not None:
            raise ValueError(f"{cut_blocks_message(tensor, axes, found, what)}, or gather it first")

    def _uniform(self, on: ShardCast, key: Key, shape: tuple[int, ...], groups: jax.Array) -> jax.Array:
        """What one device would draw for these elements: by their indices among all rows, or in a group's matrix."""
        feature = self._positions(on, "n" if on.tensor == "w" else _feature(on.tensor), shape[-1])
        if on.tensor != "w":
            row_alignment = on.resolved.row_alignment
            rows = shape[0] if row_alignment == 1 else padded_capacity(shape[0], self._own(groups).size, row_alignment)
            start = _starts(groups, self._axes("g"), row_alignment).astype(jnp.uint32)
            row = Positions(jnp.arange(rows, dtype=jnp.uint32) + start, rows)
            return uniform_at(flat_index([row, feature]), *seeds_of(key))
        index = flat_index([self._positions(on, "k", shape[1]), feature])
        group = jnp.arange(shape[0]) + _first_group(groups, self._axes("g"))
        return jax.vmap(lambda each: uniform_at(index, *seeds_of(each)))(numbered(key, group))

    def _positions(self, on: ShardCast, label: str, shard: int) -> Positions:
        """Of a device's elements along features, and of the zeros that pad them for a rotation."""
        along, rotation = positions(shard, dict(self.sizes)[label], self._axes(label)), on.resolved.cast.rotation
        return padded(along, rotation.size) if rotation and label == self._rotated(on.tensor, on.resolved) else along


def _feature(tensor: str) -> str:
    return {"x": "k", "g": "n"}[tensor]
