"""Ragged matmuls of shards: expert parallelism, with tensor parallelism or FSDP of the experts' weights.

Every group is quantised as if it were an array of its own, so a device that has all of some groups' matrices and all of
these groups' rows computes the same codes and scales as a single device would. Rows are dispatched unquantised, because
a block or a scale may span rows of several devices. One device computes each row of the result; results are combined by
adding zeros of all other devices, which is exact in any dtype.

Groups are partitioned over the mesh axes that shard the weights along groups and, if the number of groups is a multiple
of their sizes, over those that shard only rows, whose devices would otherwise repeat the same work. A mesh axis that
shards both rows and features of the weights, as in FSDP, exchanges features for groups. Features that stay sharded, as
in tensor parallelism, are handled as in `dot_sharded`: amaxes are max-reduced over devices, partial results summed in
float32.

x (t, k), w (8, k@tp, n) on ep=4, tp=2 with groups sharded over "ep": a device has half of k of the matrices of two
groups, and the rows of these two groups. It multiplies them, results are all-reduced over "tp", and rows are combined
over "ep".
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
from scaledot.numerics.grouped import aligned_group_sizes, padded_capacity
from scaledot.numerics.rounding import Key, Positions, flat_index, fold_in_traced, seeds_of, uniform_at
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
from scaledot.train.options import Options
from scaledot.train.train_op import (
    CastOperands,
    CastRequest,
    LocalRaggedOp,
    Matmul,
    MeanTerm,
    Operands,
    ShardCast,
    StaticArgs,
    TokenMeans,
)
from scaledot.train.vjp import quantised_matmul

LABELS = Contraction("tk", "gkn", "tn")
_ONE_GROUP = Contraction("tk", "kn", "tn")
_BIAS = "gn"
_LABEL_NAMES = {"t": "rows", "g": "groups", "k": "input features", "n": "output features"}


class Experts(NamedTuple):
    """The shardings of a ragged matmul's arrays over a mesh. sizes: the global size of each label."""

    shardings: Shardings
    sizes: dict[str, int]
    mesh: Any


def experts_of(x: jax.Array, w: jax.Array, specs, out_sharding) -> Experts | None:
    """The shardings of operands and result, by `specs` or by types and `out_sharding`; None if nothing is sharded."""
    shardings = shardings_of(LABELS, jax.typeof(x), jax.typeof(w), specs, out_sharding)
    if shardings is None:
        return None
    mesh = mesh_of(x, w)
    check_axes(mesh, shardings.axes)
    sizes = dict(global_sizes(LABELS, x, w, shardings, mesh))
    if not sizes["t"]:
        raise ValueError("`x` has no rows to split over a mesh; pad it with rows that belong to no group")
    for name, sharding in zip("xwy", shardings, strict=True):
        for c, axes in sharding:
            _check_divides(name, c, sizes[c], axes, mesh)
    return Experts(shardings, sizes, mesh)


def _check_divides(name: str, label: str, size: int, axes: Axes, mesh) -> None:
    found = misfit(size, device_count(mesh, axes))
    if found is not None:
        raise ValueError(
            f"`{name}` has {size} {_LABEL_NAMES[label]}, which cannot be split evenly over {found.devices} devices of "
            f"{' and '.join(map(repr, axes))}; {' or '.join(map(str, found.fitting_sizes))} would fit"
        )


def multiply_experts(
    local_op: Callable[[int, int, int, int], LocalRaggedOp],
    options: Options,
    experts: Experts,
    operands: Operands,
    state: State,
    key,
) -> tuple[jax.Array, State]:
    """y and the state for the next use. Operands are global arrays, or shards inside a shard_map over the mesh axes.

    local_op: returns the operation of one device from its numbers of groups, rows, input and output features.
    """
    work, mesh = _work(experts), experts.mesh
    local = {c: size // device_count(mesh, work.get(c, ())) for c, size in experts.sizes.items()}
    op = ShardedRaggedDotOp(
        local_op(local["g"], local["t"], local["k"], local["n"]),
        tuple(work.items()),
        tuple(experts.sizes.items()),
        options.recipe.amax_scope,
    )
    static = StaticArgs(op, options)
    if are_manual(mesh, experts.shardings.axes):
        return _multiply_shards(static, experts.shardings, tuple(work.items()), operands, state, key)
    fixed = table.tables(), static, experts.shardings, tuple(work.items()), mesh
    if callable(options.kernel):
        return _multiply_global(*fixed, operands, state, key)
    return run_as_program(_multiply_global, *fixed, arrays=(operands, state, key))


def _multiply_global(
    tables, static: StaticArgs, shardings: Shardings, work: LabelSharding, mesh, operands: Operands, state: State, key
) -> tuple[jax.Array, State]:
    """The matmul of global arrays as a shard_map over the mesh. tables: a key of the cache of jitted functions."""
    x, w, y = map(spec_of, (LABELS.lhs, LABELS.rhs, LABELS.out), shardings)
    replicated = PartitionSpec()
    specs: Any = x, w, spec_of(_BIAS, _bias_sharding(shardings)), replicated
    sharded: Any = (
        None if a is None else constrain(a, spec, mesh=mesh) for a, spec in zip(operands, specs, strict=True)
    )
    run = functools.partial(_multiply_shards, static, shardings, work)
    in_specs, out_specs = (Operands(*specs), replicated, replicated), (y, replicated)
    mapped = jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    return mapped(Operands(*sharded), state, key)


def _work(experts: Experts) -> dict[str, Axes]:
    """The mesh axes over which the computation is partitioned along groups g and features k and n."""
    x, w, y = (dict(sharding) for sharding in experts.shardings)
    groups = _group_axes(experts, x, w, y)
    w_sharding = *_sharding_of_label("k", w, groups), *_sharding_of_label("n", w, groups)
    plan = transfer_plan.make_transfer_plan(
        _ONE_GROUP, _sharding_of_label("k", x, groups), w_sharding, _sharding_of_label("n", y, groups)
    )
    columns = tuple(axis for axis in dict(plan.out).get("n", ()) if axis not in plan.reduced_axes)
    return {"g": groups, "k": plan.reduced_axes, "n": columns}


def _group_axes(experts: Experts, x: dict[str, Axes], w: dict[str, Axes], y: dict[str, Axes]) -> Axes:
    """The mesh axes that partition groups.

    These are axes that shard w along groups, then axes that shard features of w and the rows of x and y, then axes that
    shard rows only. Features are exchanged for groups from the minor mesh axis on, so that the remaining features of
    a device are contiguous.
    """
    groups, rows = w.get("g", ()), (x.get("t", ()), y.get("t", ()))

    def divides(axis: str) -> bool:
        return misfit(experts.sizes["g"], device_count(experts.mesh, (*groups, axis))) is None

    for c in "kn":
        for axis in reversed(w.get(c, ())):
            if axis not in rows[0] or axis not in rows[1] or not divides(axis):
                break
            groups = (*groups, axis)
    sharded = ((x, "k"), (w, "gkn"), (y, "n"))
    not_rows = {axis for sharding, labels in sharded for c in labels for axis in sharding.get(c, ())}
    for axis in dict.fromkeys(rows[0] + rows[1]):
        if axis not in not_rows and divides(axis):
            groups = (*groups, axis)
    return groups


def _sharding_of_label(label: str, sharding: dict[str, Axes], excluded: Axes) -> LabelSharding:
    """The sharding of one label, without the excluded mesh axes."""
    axes = tuple(axis for axis in sharding.get(label, ()) if axis not in excluded)
    return ((label, axes),) if axes else ()


def _bias_sharding(shardings: Shardings) -> LabelSharding:
    return tuple((c, axes) for c, axes in shardings.w if c in _BIAS)


def _multiply_shards(
    static: StaticArgs, shardings: Shardings, partition: LabelSharding, operands: Operands, state: State, key
):
    """Dispatches rows and weights from `shardings` to `partition`, multiplies, and combines the rows of the result."""
    (x, w, bias, groups), work = operands, dict(partition)
    assert groups is not None
    start = _first_row(groups, work["g"], 1)
    rows = dispatch(route_of_rows(LABELS.lhs, shardings.x, work), x, start)
    weights = dispatch(route_of_weights(LABELS.rhs, shardings.w, work), w, start)
    if bias is not None:
        bias = dispatch(route_of_weights(_BIAS, _bias_sharding(shardings), work), bias, start)
    y, state = quantised_matmul(static, Operands(rows, weights, bias, groups), state, key)
    return combine(route_of_rows(LABELS.out, shardings.g, work), y, start), state


def _first_row(groups: jax.Array, axes: Axes, row_alignment: int) -> jax.Array:
    """The first row of a device's first group, where group sizes are rounded up to `row_alignment`."""
    first = _first_group(groups, axes)
    return jnp.sum(jnp.where(jnp.arange(groups.size) < first, aligned_group_sizes(groups, row_alignment), 0))


def _first_group(groups: jax.Array, axes: Axes) -> Any:
    return lax.axis_index(axes) * (groups.size // lax.axis_size(axes)) if axes else 0


@dataclasses.dataclass(frozen=True)
class ShardedRaggedDotOp:
    """The TrainOp of one device's groups and features: runs `local`, and reduces over mesh axes that shard features.

    work: the mesh axes that partition groups and features. sizes: the global size of each label. The argument `groups`
    of its methods has the sizes of all groups.
    """

    local: LocalRaggedOp
    work: LabelSharding
    sizes: tuple[tuple[str, int], ...]
    amax_scope: str
    has_batch = False
    sums_tokens = False
    partitioning = None

    def resolve_cast(self, cast: Cast, matmul: str, tensor: str) -> ShardCast:
        resolved: Any = self.local.resolve_cast(cast, matmul, tensor)
        for label, size in self._feature_blocks(tensor, resolved):
            if size > 1:
                self._check_uncut(tensor, label, size, "blocks")
        rotated = self._rotated(tensor, resolved)
        if cast.rotation is not None and rotated is not None:
            self._check_uncut(tensor, rotated, cast.rotation.size, "groups of a rotation")
        return ShardCast(tensor, resolved, () if cast.delayed else self._amax_axes(tensor, resolved))

    def cast(self, request: CastRequest, x: jax.Array, groups) -> CastOperands:
        """The casts of a shard, bit-identical to the same elements of the global array cast on one device."""
        request = request.on_shards(lambda cast, key: self._uniform(cast, key, x.shape, groups))
        if request.multiplier is not None and request.multiplier.ndim:
            request = dataclasses.replace(request, multiplier=self._own(request.multiplier))
        return self.local.cast(request, x, self._own(groups))

    def unquantised_operand(self, matmul: str, tensor: str, x: jax.Array, groups) -> jax.Array:
        return self.local.unquantised_operand(matmul, tensor, x, self._own(groups))

    def unclipped_mask(self, resolved: ShardCast, x: jax.Array, q, groups) -> jax.Array | None:
        return self.local.unclipped_mask(resolved.resolved, x, q, self._own(groups))

    def amax(self, tensor: str, x: jax.Array, groups) -> jax.Array:
        """The amax of this device's rows and groups; of each group, with 0 for the groups of other devices."""
        amax = self.local.amax(tensor, x, self._own(groups))
        if not amax.ndim:
            return amax
        first = _first_group(groups, self._axes("g"))
        return lax.dynamic_update_slice(jnp.zeros(groups.shape, amax.dtype), amax, (first,))

    def bias_gradient(self, g: jax.Array, groups) -> jax.Array:
        return self.local.bias_gradient(g, self._own(groups))

    def token_means(self, tensor: str, x: jax.Array, groups) -> TokenMeans:
        return self.local.token_means(tensor, x, self._own(groups))  # a device has all rows of its groups

    def multiply(
        self,
        matmul: Matmul,
        lhs,
        rhs,
        groups,
        bias: jax.Array | None = None,
        mean_term: MeanTerm | None = None,
    ) -> jax.Array:
        axes, own = self._axes({"fwd": "k", "dgrad": "n"}.get(matmul.name, "")), self._own(groups)
        if not axes:
            return self.local.multiply(matmul, lhs, rhs, own, bias, mean_term)
        # A device's means and weights of its features give a partial term, which is reduced with the partial result.
        y = lax.psum(self.local.multiply(matmul.unrounded, lhs, rhs, own, mean_term=mean_term), axes)
        y = y if bias is None else self.local.add_bias(y, bias.astype(y.dtype), own)
        return y.astype(matmul.dtype)

    def _axes(self, label: str) -> Axes:
        return dict(self.work).get(label, ())

    def _own(self, groups: jax.Array) -> jax.Array:
        """The elements of an array (groups,) for this device's groups."""
        axes = self._axes("g")
        return own_shard(groups, 0, axes) if axes else groups

    def _feature_blocks(self, tensor: str, resolved) -> tuple[tuple[str, int], ...]:
        """Returns (label, block size) of each dim but those of rows and groups."""
        if tensor == "w":
            return tuple(zip(_ONE_GROUP.rhs, resolved.block, strict=True))
        return ((_feature(tensor), resolved.block[1]),)

    def _rotated(self, tensor: str, resolved) -> str | None:
        """The label of features that a rotation runs along; None if it runs down rows or there is none."""
        if tensor == "w":
            return None if resolved.rotated_axis is None else _ONE_GROUP.rhs[resolved.rotated_axis]
        return _feature(tensor) if resolved.axis == 1 else None

    def _amax_axes(self, tensor: str, resolved) -> Axes:
        """Mesh axes over which the amax of a cast is reduced: those that shard a dim with one scale."""
        if self.amax_scope == "local":
            return ()  # features are never all-gathered, so shards may have different scales
        two_level = resolved.cast.format.two_level
        one_scale = [c for c, size in self._feature_blocks(tensor, resolved) if size == 0 or two_level]
        return tuple(axis for c in one_scale for axis in self._axes(c))

    def _check_uncut(self, tensor: str, label: str, block: int, what: str) -> None:
        axes = self._axes(label)
        found = misfit(dict(self.sizes)[label], lax.axis_size(axes), block) if axes else None
        if found is not None:
            raise ValueError(f"{cut_blocks_message(tensor, axes, found, what)}, or gather it first")

    def _uniform(self, cast: ShardCast, key: Key, shape: tuple[int, ...], groups: jax.Array) -> jax.Array:
        """The random numbers that one device would use, hashed from indices among all rows, or in a group's matrix."""
        feature = self._positions(cast, "n" if cast.tensor == "w" else _feature(cast.tensor), shape[-1])
        if cast.tensor != "w":
            row_alignment = cast.resolved.row_alignment
            rows = shape[0] if row_alignment == 1 else padded_capacity(shape[0], self._own(groups).size, row_alignment)
            start = _first_row(groups, self._axes("g"), row_alignment).astype(jnp.uint32)
            row = Positions(jnp.arange(rows, dtype=jnp.uint32) + start, rows)
            return uniform_at(flat_index([row, feature]), *seeds_of(key))
        index = flat_index([self._positions(cast, "k", shape[1]), feature])
        group = jnp.arange(shape[0]) + _first_group(groups, self._axes("g"))
        return jax.vmap(lambda group_key: uniform_at(index, *seeds_of(group_key)))(fold_in_traced(key, group))

    def _positions(self, cast: ShardCast, label: str, shard_size: int) -> Positions:
        """The global positions of a device's elements along features, including zero padding for a rotation."""
        along, rotation = positions(shard_size, dict(self.sizes)[label], self._axes(label)), cast.resolved.cast.rotation
        if rotation is None or label != self._rotated(cast.tensor, cast.resolved):
            return along
        return padded(along, rotation.size)


def _feature(tensor: str) -> str:
    """The label of the features of x or g."""
    return {"x": "k", "g": "n"}[tensor]
