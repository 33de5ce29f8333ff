"""The mesh form of contractions and convolutions: one program that every device runs on its shards.

Devices cast their own shards, to the codes and scales that one device would find: the amax of what shares a scale is
reduced across devices, random bits are those of an element's index in the whole array, and blocks must not be cut. What
a matmul needs of other devices' operands is all-gathered as codes. Partial sums are reduced in float32.

Row parallelism, x (m, k@tp) by w (k@tp, n): every device casts x and w of its part of k, multiplies them, and the
float32 results are all-reduced over "tp".
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import PartitionSpec

from scaledot.array import ScaledArray
from scaledot.contraction import Contraction
from scaledot.kernels import table
from scaledot.numerics.hadamard import Hadamard
from scaledot.numerics.rounding import Key, Positions, flat_index, seeds_of, uniform_at
from scaledot.parallel import transfer_plan
from scaledot.parallel.divisibility import misfit
from scaledot.parallel.overlap import RingOperand, accumulates_partials, contract_overlapped, ring_of
from scaledot.parallel.shard_indices import CollapsedDim, first_index, flattened, padded, positions
from scaledot.parallel.sharding import constrain
from scaledot.parallel.specs import (
    Shardings,
    are_manual,
    check_axes,
    cut_blocks_message,
    device_count,
    global_sizes,
    mesh_of,
)
from scaledot.parallel.transfer_plan import Axes, LabelSharding, spec_of
from scaledot.programs import run_as_program
from scaledot.recipes import PRODUCTS, Cast, Recipe
from scaledot.state import State
from scaledot.train.flatten import Flattened, Layout
from scaledot.train.kind import CastOperands, CastRequest, LocalKind, Matmul, Operands, ShardCast, Step
from scaledot.train.options import Options
from scaledot.train.resolved_cast import ResolvedCast
from scaledot.train.vjp import multiply


class Cut(NamedTuple):
    """A label whose sharding would cut blocks, and a sentence about it."""

    label: str
    sentence: str


@dataclasses.dataclass(frozen=True)
class Sharded:
    """A Kind of matmul of shards; `kind` is that of flattened ones.

    sizes: of the labels of whole arrays. mesh: an AbstractMesh. amax_scope: as in Recipe. overlap: mesh axes along
    which shards travel around a ring.
    """

    kind: LocalKind
    flat: Flattened
    sizes: tuple[tuple[str, int], ...]
    mesh: Any
    splits: Shardings
    amax_scope: str
    overlap: Axes = ()

    @classmethod
    def of(cls, kind: LocalKind, flat: Flattened, operands: Operands, splits: Shardings, options: Options) -> "Sharded":
        """For these operands, on the mesh that they are sharded over or that of the context."""
        mesh = mesh_of(operands.x, operands.w)
        check_axes(mesh, (*splits.axes, *options.overlap))
        sizes = global_sizes(flat.contraction, operands.x, operands.w, splits, mesh)
        return cls(kind, flat, sizes, mesh, splits, options.recipe.amax_scope, options.overlap)

    @property
    def contraction(self) -> Contraction:
        return self.flat.contraction

    @property
    def has_batch(self) -> bool:
        return self.kind.has_batch

    @property
    def partitioning(self) -> None:
        return None

    def resolve_cast(self, cast: Cast, matmul: str, tensor: str) -> ShardCast:
        resolved: Any = self.kind.resolve_cast(cast, matmul, tensor)
        cut = next(self._cuts(resolved, matmul, tensor), None)
        if cut is not None:
            is_whole = not are_manual(self.mesh, self.splits.axes)
            raise ValueError(cut.sentence + (", or gather it with on_indivisible='gather'" if is_whole else ""))
        return ShardCast(tensor, resolved, () if cast.delayed else self._amax_axes(tensor, resolved))

    def cast(self, request: CastRequest, x: jax.Array, groups) -> CastOperands:
        """What one device would find: scales are shared, and random numbers are drawn by global indices."""
        axes = self._contiguous_axes(request)
        if axes is not None:
            offset = first_index(axes, dict(getattr(self.splits, request.tensor)), self.mesh)
            request = dataclasses.replace(request, offset=offset, row_length=axes[-1].size)
            request = request.on_shards(lambda on, key: None)
        else:
            request = request.on_shards(lambda on, key: self._uniform(on, key, x.shape))
        made = self.kind.cast(request, self._layout(request.tensor).enter(x), groups)
        return made if made.sums is None else made._replace(sums=self._unflattened_bias(made.sums, x))

    def plain(self, matmul: str, tensor: str, x: jax.Array, groups) -> jax.Array:
        return self._layout(tensor).enter(x)

    def unclipped_mask(self, resolved: ShardCast, x: jax.Array, q) -> jax.Array | None:
        layout = self._layout(resolved.tensor)
        found = self.kind.unclipped_mask(resolved.resolved, layout.enter(x), q)
        return None if found is None else layout.leave(found, dict(zip(layout.labels, x.shape, strict=True)))

    def amax(self, tensor: str, x: jax.Array, groups) -> jax.Array:
        return self.kind.amax(tensor, x, groups)

    def bias_gradient(self, g: jax.Array, groups) -> jax.Array:
        return self._unflattened_bias(self.kind.bias_gradient(self._layout("g").enter(g), groups), g)

    def _unflattened_bias(self, sums: jax.Array, g: jax.Array) -> jax.Array:
        return self.flat.bias.leave(sums, dict(zip(self.contraction.out, g.shape, strict=True)))

    def multiply(self, matmul: Matmul, lhs, rhs, groups, bias: jax.Array | None = None) -> jax.Array:
        """The matmul of shards with its transfers; a bias is added to the result once, before it is rounded."""
        plan, local = self.plan(matmul.name), matmul.on_shards
        ring = ring_of(plan, self.overlap)
        is_summed = accumulates_partials(plan, self.contraction.of(matmul.name), self.overlap)
        # Where terms are reduced, or columns of the result travel, a device cannot add the bias to what it multiplies.
        is_added_last = is_summed or (ring is not None and ring.label in self.contraction.rhs_free)
        if bias is not None and is_added_last:
            return self._plus(self.multiply(matmul.wide, lhs, rhs, groups), bias).astype(matmul.dtype)
        local = local.wide if is_summed else local
        bias = None if bias is None else self.flat.bias.enter(bias)

        def multiply_shards(lhs, rhs, sizes) -> jax.Array:
            total = self.kind.multiply(local, lhs, rhs, groups, bias)
            return self._layout(_result(matmul.name)).leave(total, sizes)

        left, right = (self._side(tensor, q) for tensor, q in zip(PRODUCTS[matmul.name], (lhs, rhs), strict=True))
        y = contract_overlapped(plan, self.contraction.of(matmul.name), left, right, multiply_shards, self.overlap)
        return y.astype(matmul.dtype)

    def _plus(self, y: jax.Array, bias: jax.Array) -> jax.Array:
        axes = [self.contraction.out.index(c) for c in self.contraction.rhs_free]
        return y + lax.broadcast_in_dim(bias.astype(y.dtype), y.shape, axes)

    def plan(self, matmul: str) -> transfer_plan.TransferPlan:
        """What devices gather, multiply, reduce and scatter."""
        tensors = *PRODUCTS[matmul], _result(matmul)
        return transfer_plan.make_transfer_plan(
            self.contraction.of(matmul), *(getattr(self.splits, tensor) for tensor in tensors)
        )

    def _layout(self, tensor: str) -> Layout:
        return self.flat.of_tensor(tensor)

    def _side(self, tensor: str, q) -> RingOperand:
        """An operand that can be unflattened to its labels where it moves or is cut."""
        layout, q = self._layout(tensor), self.kind.logical(q)
        rotation = q.rotation if isinstance(q, ScaledArray) else None
        return RingOperand(
            layout.labels,
            q,
            self._shard_sizes(tensor),
            unflatten=lambda q, sizes: layout.leave(_with_rotation(q, None), sizes),
            flatten=lambda x: _with_rotation(layout.enter(x), rotation),
        )

    def _axes(self, tensor: str, label: str) -> Axes:
        """The mesh axes that a label of a tensor is sharded over."""
        return dict(getattr(self.splits, tensor)).get(label, ())

    def _shard_sizes(self, tensor: str) -> dict[str, int]:
        sizes = dict(self.sizes)
        return {c: sizes[c] // device_count(self.mesh, self._axes(tensor, c)) for c in self._layout(tensor).labels}

    def _multiplied_axes(self, matmul: str, tensor: str) -> dict[str, Axes]:
        """The mesh axes over which labels of an operand are cut when it is multiplied: after its transfers."""
        plan, side = self.plan(matmul), PRODUCTS[matmul].index(tensor)
        axes = transfer_plan.sharding_after(getattr(self.splits, tensor), (plan.lhs, plan.rhs)[side])
        ring = ring_of(plan, self.overlap)
        if ring is not None and ring.operand != side and ring.label in self._layout(tensor).labels:
            axes[ring.label] = (*axes.get(ring.label, ()), ring.axis)  # a part of it for each shard that arrives
        return axes

    def _amax_axes(self, tensor: str, resolved: ResolvedCast) -> Axes:
        """Mesh axes over which a cast shares scales: those that shard what has one scale."""
        layout = self._layout(tensor)
        whole = [
            c for c, size in zip(layout.flat, resolved.tile, strict=True) if size == 0 or resolved.cast.format.two_level
        ]
        axes = [axis for c in whole for m in layout.members(c) for axis in self._axes(tensor, m)]
        if self.amax_scope == "global":
            return tuple(axes)
        return tuple(axis for axis in axes if axis in self._gathered_over(tensor))

    def _gathered_over(self, tensor: str) -> set[str]:
        """Mesh axes over which shards of a tensor are put together, and must have one scale."""
        moves = [
            (plan.lhs, plan.rhs)[PRODUCTS[matmul].index(tensor)]
            for matmul in PRODUCTS
            if tensor in PRODUCTS[matmul] and (plan := self.plan(matmul))
        ]
        return {axis for move in moves for _, axes in move.gathered for axis in axes}

    def without_cuts(self, recipe: Recipe) -> "Sharded":
        """The same with axes replicated that do not divide, or whose sharding would cut blocks."""
        uneven = {
            c
            for split in self.splits
            for c, axes in split
            if misfit(dict(self.sizes)[c], device_count(self.mesh, axes)) is not None
        }
        even = self._without(uneven)
        casts: list[tuple[str, str, Any]] = [
            (of, t, self.kind.resolve_cast(cast, of, t)) for of, t, cast in recipe.casts()
        ]
        return even._without({cut.label for of, tensor, resolved in casts for cut in even._cuts(resolved, of, tensor)})

    def _without(self, labels: set[str]) -> "Sharded":
        splits = (tuple((c, axes) for c, axes in split if c not in labels) for split in self.splits)
        return dataclasses.replace(self, splits=Shardings(*splits))

    def _cuts(self, resolved: ResolvedCast, matmul: str, tensor: str) -> Iterator[Cut]:
        """Axes of which a device would hold, or multiply, parts of what has one scale or is rotated together."""
        flat, rotation = self._layout(tensor).flat, resolved.cast.rotation
        for axes in (dict(getattr(self.splits, tensor)), self._multiplied_axes(matmul, tensor)):
            if rotation is not None and resolved.rotated_axis is not None:
                yield from self._cut(tensor, axes, flat[resolved.rotated_axis], rotation.size, "groups of a rotation")
            for label, size in zip(flat, resolved.tile, strict=True):
                if size > 1:
                    yield from self._cut(tensor, axes, label, size, "blocks")

    def _cut(self, tensor: str, axes: dict[str, Axes], label: str, block: int, what: str) -> Iterator[Cut]:
        """Blocks run on into the axes that are flattened behind a sharded one."""
        members, sizes = self._layout(tensor).members(label), dict(self.sizes)
        last = max((i for i, c in enumerate(members) if axes.get(c)), default=None)
        if last is None:
            return
        over, behind = axes[members[last]], math.prod(sizes[c] for c in members[last + 1 :])
        found = misfit(sizes[members[last]] * behind, device_count(self.mesh, over), block)
        if found is not None:
            yield Cut(members[last], cut_blocks_message(tensor, over, found, what))

    def _contiguous_axes(self, request: CastRequest) -> list[CollapsedDim] | None:
        """The axes of a matrix that is rounded stochastically, if a shard of it is a run of each; None otherwise.

        Then the index of an element follows from that of the first one. An axis that is padded for a rotation is longer
        than its members.
        """
        layout, sizes = self._layout(request.tensor), dict(self.sizes)
        axes = [CollapsedDim(members, tuple(sizes[c] for c in members)) for members in map(layout.members, layout.flat)]
        rotations = ((on.resolved.cast.rotation, on.resolved.rotated_axis) for on in request.distinct)
        is_padded = any(rotation and axes[axis].size % rotation.size for rotation, axis in rotations)
        if not request.is_stochastic or len(axes) != 2 or is_padded:
            return None
        sharding = dict(getattr(self.splits, request.tensor))
        return None if any(axis.noncontiguous_member(sharding, self.mesh) for axis in axes) else axes

    def _uniform(self, on: ShardCast, key: Key, shape: tuple[int, ...]) -> jax.Array:
        """What one device would draw for these elements: by their indices in the whole flattened array."""
        layout, rotation = self._layout(on.tensor), on.resolved.cast.rotation
        shard, axes = dict(zip(layout.labels, shape, strict=True)), []
        for axis, label in enumerate(layout.flat):
            along = self._positions(on.tensor, label, shard)
            axes.append(padded(along, rotation.size) if rotation and axis == on.resolved.rotated_axis else along)
        return uniform_at(flat_index(axes), *seeds_of(key))

    def _positions(self, tensor: str, label: str, shard: dict[str, int]) -> Positions:
        """Of a device's elements along a flat axis."""
        sizes, members = dict(self.sizes), self._layout(tensor).members(label)
        return flattened([positions(shard[c], sizes[c], self._axes(tensor, c)) for c in members])


def _with_rotation(q, rotation: Hadamard | None) -> Any:
    """An operand with that `rotation`: reshapes refuse to split a rotated axis, whose groups no transfer cuts."""
    return dataclasses.replace(q, rotation=rotation) if isinstance(q, ScaledArray) else q


def _result(matmul: str) -> str:
    """The tensor that a matmul makes, or whose gradient."""
    (result,) = {"x", "w", "g"} - set(PRODUCTS[matmul])
    return result


def multiply_sharded(kind: Sharded, options: Options, operands: Operands, state: State, key) -> tuple[jax.Array, State]:
    """The result and the next state; inside a shard_map over its mesh axes, of operands that are shards already."""
    options = dataclasses.replace(options, out_sharding=None)
    _check_bias(kind, operands.bias)
    if are_manual(kind.mesh, kind.splits.axes):
        return multiply(Step(kind, options), operands, state, key)
    if callable(options.kernel):
        return _multiply_whole(table.tables(), kind, options, operands, state, key)
    return run_as_program(_multiply_whole, table.tables(), kind, options, arrays=(operands, state, key))


def _check_bias(kind: Sharded, bias: jax.Array | None) -> None:
    sizes, axes, features = dict(kind.sizes), dict(kind.splits.g), kind.contraction.rhs_free
    if are_manual(kind.mesh, kind.splits.axes):
        sizes = {c: size // device_count(kind.mesh, axes.get(c, ())) for c, size in sizes.items()}
    expected = tuple(sizes[c] for c in features)
    if bias is not None and bias.shape != expected:
        raise ValueError(f"`b` {bias.shape} must have the trailing axes of `w`, here {expected}")


def _multiply_whole(tables, kind: Sharded, options: Options, operands: Operands, state: State, key):
    """A matmul of whole arrays, placed as the splits say; kernels are chosen from these tables."""
    fitting = kind.without_cuts(options.recipe) if options.on_indivisible == "gather" else kind
    y, state = _mapped(fitting, options, operands, state, key)
    wanted = spec_of(kind.contraction.out, kind.splits.g)
    return constrain(y, wanted, mesh=kind.mesh, on_indivisible="drop" if fitting is kind else "gather"), state


def _mapped(kind: Sharded, options: Options, operands: Operands, state: State, key) -> tuple[jax.Array, State]:
    """A matmul of whole arrays, of which every device computes its shard."""
    contraction, plan = kind.contraction, kind.plan("fwd")
    splits = Shardings(_split_further(kind.splits.x, plan.lhs), _split_further(kind.splits.w, plan.rhs), plan.out)
    step = Step(dataclasses.replace(kind, splits=splits), options)
    features = contraction.rhs_free
    of_bias = tuple((c, axes) for c, axes in plan.out if c in features)
    labels = (contraction.lhs, splits.x), (contraction.rhs, splits.w), (features, of_bias)
    specs = [spec_of(*of) for of in labels]
    x, w, bias = (
        None if a is None else constrain(a, spec, mesh=kind.mesh) for a, spec in zip(operands[:3], specs, strict=True)
    )

    def run(x, w, bias, state, key):
        return multiply(step, Operands(x, w, bias, None), state, key)

    mapped = jax.shard_map(
        run,
        mesh=kind.mesh,
        in_specs=(*specs, PartitionSpec(), PartitionSpec()),
        out_specs=(spec_of(contraction.out, plan.out), PartitionSpec()),
    )
    return mapped(x, w, bias, state, key)


def _split_further(split: LabelSharding, moves: transfer_plan.Transfers) -> LabelSharding:
    """A split with the cuts that need nothing from other devices."""
    known, gathered = dict(split), {c for c, _ in moves.gathered}
    return tuple((known | {c: known.get(c, ()) + axes for c, axes in moves.sliced if c not in gathered}).items())
