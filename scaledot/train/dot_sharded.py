"""Contractions and convolutions of shards: the computation that every device runs inside a shard_map.

Every device casts its own shards, and the codes and scales are bit-identical to single-device quantisation: the amax
of elements that share a scale is max-reduced over devices, stochastic rounding hashes an element's index in the global
array, and shardings that would cut blocks are refused. Operands are all-gathered as codes; partial results are reduced
in float32.

Row parallelism, x (m, k@tp) by w (k@tp, n): every device casts its part of k of x and w and multiplies them; the
float32 results are all-reduced over "tp".
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
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
from scaledot.parallel.transfers import own_shard
from scaledot.programs import run_as_program
from scaledot.recipes import Cast, Recipe
from scaledot.recipes.casts import GEMM_OPERANDS
from scaledot.state import State
from scaledot.train.flatten import FlattenedContraction, Flattening
from scaledot.train.means import contract_means, token_means
from scaledot.train.options import Options
from scaledot.train.resolved_cast import ResolvedCast
from scaledot.train.train_op import (
    CastOperands,
    CastRequest,
    LocalOp,
    Matmul,
    MeanTerm,
    Operands,
    ShardCast,
    StaticArgs,
    TokenMeans,
)
from scaledot.train.vjp import quantised_matmul


class Cut(NamedTuple):
    """A label whose sharding would cut blocks or groups of a rotation, and the error message."""

    label: str
    message: str


@dataclasses.dataclass(frozen=True)
class ShardedOp:
    """The TrainOp of shards: runs `local` on flattened shards, between the collectives of a transfer plan.

    sizes: the global size of each label. mesh: an AbstractMesh. amax_scope: as in Recipe. overlap: mesh axes along
    which collective-permute rings overlap with matmuls.
    """

    local: LocalOp
    flat: FlattenedContraction
    sizes: tuple[tuple[str, int], ...]
    mesh: Any
    shardings: Shardings
    amax_scope: str
    overlap: Axes = ()

    @classmethod
    def of(
        cls, local: LocalOp, flat: FlattenedContraction, operands: Operands, shardings: Shardings, options: Options
    ) -> "ShardedOp":
        """The operation on the mesh that the operands are sharded over, or the mesh of the context."""
        mesh = mesh_of(operands.x, operands.w)
        check_axes(mesh, (*shardings.axes, *options.overlap))
        sizes = global_sizes(flat.contraction, operands.x, operands.w, shardings, mesh)
        return cls(local, flat, sizes, mesh, shardings, options.recipe.amax_scope, options.overlap)

    @property
    def contraction(self) -> Contraction:
        return self.flat.contraction

    @property
    def has_batch(self) -> bool:
        return self.local.has_batch

    @property
    def sums_tokens(self) -> bool:
        return False  # column sums of a shard lack the tokens of other devices

    @property
    def partitioning(self) -> None:
        return None

    def resolve_cast(self, cast: Cast, matmul: str, tensor: str) -> ShardCast:
        resolved: Any = self.local.resolve_cast(cast, matmul, tensor)
        cut = next(self._cuts(resolved, matmul, tensor), None)
        if cut is not None:
            is_global = not are_manual(self.mesh, self.shardings.axes)
            raise ValueError(cut.message + (", or gather it with on_indivisible='gather'" if is_global else ""))
        return ShardCast(tensor, resolved, () if cast.delayed else self._amax_axes(tensor, resolved))

    def cast(self, request: CastRequest, x: jax.Array, groups) -> CastOperands:
        """The casts of a shard, bit-identical to the same elements of the global array cast on one device."""
        axes = self._contiguous_axes(request)
        if axes is not None:
            offset = first_index(axes, dict(getattr(self.shardings, request.tensor)), self.mesh)
            request = dataclasses.replace(request, offset=offset, row_length=axes[-1].size)
            request = request.on_shards(lambda cast, key: None)
        else:
            request = request.on_shards(lambda cast, key: self._uniform(cast, key, x.shape))
        flattening = self._flattening(request.tensor)
        if request.mean is not None:
            request = dataclasses.replace(request, mean=flattening.flatten(request.mean))
        operands = self.local.cast(request, flattening.flatten(x), groups)
        if operands.column_sums is None:
            return operands
        return operands._replace(column_sums=self._unflattened_bias(operands.column_sums, x))

    def unquantised_operand(self, matmul: str, tensor: str, x: jax.Array, groups) -> jax.Array:
        return self._flattening(tensor).flatten(x)

    def unclipped_mask(self, resolved: ShardCast, x: jax.Array, q, groups) -> jax.Array | None:
        flattening = self._flattening(resolved.tensor)
        mask = self.local.unclipped_mask(resolved.resolved, flattening.flatten(x), q, groups)
        return None if mask is None else flattening.unflatten(mask, dict(zip(flattening.labels, x.shape, strict=True)))

    def amax(self, tensor: str, x: jax.Array, groups) -> jax.Array:
        return self.local.amax(tensor, x, groups)

    def bias_gradient(self, g: jax.Array, groups) -> jax.Array:
        return self._unflattened_bias(self.local.bias_gradient(self._flattening("g").flatten(g), groups), g)

    def _unflattened_bias(self, db: jax.Array, g: jax.Array) -> jax.Array:
        return self.flat.bias.unflatten(db, dict(zip(self.contraction.out, g.shape, strict=True)))

    def token_means(self, tensor: str, x: jax.Array, groups) -> TokenMeans:
        """The means over the tokens of all devices."""
        labels, tokens = self._flattening(tensor).labels, self.contraction.lhs_free
        sums = jnp.sum(x.astype(jnp.float32), tuple(labels.index(c) for c in tokens), keepdims=True)
        axes = tuple(axis for c in tokens for axis in self._axes(tensor, c))
        sums = lax.psum(sums, axes) if axes else sums
        return token_means(sums, math.prod(dict(self.sizes)[c] for c in tokens))

    def multiply(
        self,
        matmul: Matmul,
        lhs,
        rhs,
        groups,
        bias: jax.Array | None = None,
        mean_term: MeanTerm | None = None,
    ) -> jax.Array:
        """The matmul of shards with its collectives, plus a bias and the term of means, rounded once."""
        if mean_term is not None:
            y = self.multiply(matmul.unrounded, lhs, rhs, groups, bias)
            return (y + self._mean_term(matmul, mean_term)).astype(matmul.dtype)
        plan = self.plan(matmul.name)
        ring = ring_of(plan, self.overlap)
        is_partial = accumulates_partials(plan, self.contraction.for_gemm(matmul.name), self.overlap)
        # Partial results are reduced first, and a ring along columns computes parts of them: the bias is added last.
        is_bias_last = is_partial or (ring is not None and ring.label in self.contraction.rhs_free)
        if bias is not None and is_bias_last:
            return self._add_bias(self.multiply(matmul.unrounded, lhs, rhs, groups), bias).astype(matmul.dtype)
        local = matmul.without_out_sharding
        local = local.unrounded if is_partial else local
        bias = None if bias is None else self.flat.bias.flatten(bias)

        def multiply_shards(lhs, rhs, sizes) -> jax.Array:
            y = self.local.multiply(local, lhs, rhs, groups, bias)
            return self._flattening(_result_tensor(matmul.name)).unflatten(y, sizes)

        lhs, rhs = (
            self._ring_operand(tensor, q) for tensor, q in zip(GEMM_OPERANDS[matmul.name], (lhs, rhs), strict=True)
        )
        y = contract_overlapped(plan, self.contraction.for_gemm(matmul.name), lhs, rhs, multiply_shards, self.overlap)
        return y.astype(matmul.dtype)

    def _mean_term(self, matmul: Matmul, term: MeanTerm) -> jax.Array:
        """The term of means, sharded as the result of the matmul.

        Each device multiplies means by its own shard of w, so that collectives transfer one row, and no weights.
        """
        contraction, tensors = self.contraction.for_gemm(matmul.name), GEMM_OPERANDS[matmul.name]
        lhs, rhs = (
            array if tensor == "w" else self._resharded(array, labels, tensor, "w")
            for array, labels, tensor in zip(term, (contraction.lhs, contraction.rhs), tensors, strict=True)
        )
        result = contract_means(contraction, MeanTerm(lhs, rhs), matmul.dtype)
        if matmul.name == "wgrad":
            return result
        axes = tuple(axis for c in contraction.contracting for axis in self._axes("w", c))
        result = lax.psum(result, axes) if axes else result
        return self._resharded(result, contraction.out, "w", _result_tensor(matmul.name))

    def _resharded(self, x: jax.Array, labels: str, source: str, target: str) -> jax.Array:
        """x, whose dims of tokens have size 1, from the sharding of one tensor to that of another."""
        for axis, label in enumerate(labels):
            before, after = self._axes(source, label), self._axes(target, label)
            if label in self.contraction.lhs_free or before == after:
                continue
            x = lax.all_gather(x, before, axis=axis, tiled=True, to="invarying") if before else x
            x = own_shard(x, axis, after) if after else x
        return x

    def _add_bias(self, y: jax.Array, bias: jax.Array) -> jax.Array:
        axes = [self.contraction.out.index(c) for c in self.contraction.rhs_free]
        return y + lax.broadcast_in_dim(bias.astype(y.dtype), y.shape, axes)

    def plan(self, matmul: str) -> transfer_plan.TransferPlan:
        """The collectives of a matmul: what is all-gathered before it, and reduced or scattered after it."""
        tensors = *GEMM_OPERANDS[matmul], _result_tensor(matmul)
        return transfer_plan.make_transfer_plan(
            self.contraction.for_gemm(matmul), *(getattr(self.shardings, tensor) for tensor in tensors)
        )

    def _flattening(self, tensor: str) -> Flattening:
        return self.flat.of_tensor(tensor)

    def _ring_operand(self, tensor: str, q) -> RingOperand:
        """An operand that the collectives unflatten before they gather or slice it, and flatten again after."""
        flattening, q = self._flattening(tensor), self.local.to_logical_layout(q)
        rotation = q.rotation if isinstance(q, ScaledArray) else None
        return RingOperand(
            flattening.labels,
            q,
            self._shard_sizes(tensor),
            unflatten=lambda q, sizes: flattening.unflatten(_with_rotation(q, None), sizes),
            flatten=lambda x: _with_rotation(flattening.flatten(x), rotation),
        )

    def _axes(self, tensor: str, label: str) -> Axes:
        """The mesh axes that a label of a tensor is sharded over."""
        return dict(getattr(self.shardings, tensor)).get(label, ())

    def _shard_sizes(self, tensor: str) -> dict[str, int]:
        sizes = dict(self.sizes)
        return {c: sizes[c] // device_count(self.mesh, self._axes(tensor, c)) for c in self._flattening(tensor).labels}

    def _multiplied_axes(self, matmul: str, tensor: str) -> dict[str, Axes]:
        """For each label of an operand, the mesh axes that shard it when it is multiplied: after its collectives."""
        plan, index = self.plan(matmul), GEMM_OPERANDS[matmul].index(tensor)
        axes = transfer_plan.sharding_after(getattr(self.shardings, tensor), (plan.lhs, plan.rhs)[index])
        ring = ring_of(plan, self.overlap)
        if ring is not None and ring.operand != index and ring.label in self._flattening(tensor).labels:
            axes[ring.label] = (*axes.get(ring.label, ()), ring.axis)  # sliced to match each shard of the other
        return axes

    def _amax_axes(self, tensor: str, resolved: ResolvedCast) -> Axes:
        """Mesh axes over which the amax of a cast is reduced: those that shard a dim with one scale."""
        flattening, two_level = self._flattening(tensor), resolved.cast.format.two_level
        one_scale = [c for c, size in zip(flattening.flat, resolved.block, strict=True) if size == 0 or two_level]
        axes = [axis for c in one_scale for m in flattening.members(c) for axis in self._axes(tensor, m)]
        if self.amax_scope == "global":
            return tuple(axes)
        return tuple(axis for axis in axes if axis in self._gathered_over(tensor))

    def _gathered_over(self, tensor: str) -> set[str]:
        """Mesh axes over which a matmul all-gathers a tensor, whose shards must then have one scale."""
        transfers = [
            (plan.lhs, plan.rhs)[GEMM_OPERANDS[matmul].index(tensor)]
            for matmul in GEMM_OPERANDS
            if tensor in GEMM_OPERANDS[matmul] and (plan := self.plan(matmul))
        ]
        return {axis for each in transfers for _, axes in each.gathered for axis in axes}

    def without_cuts(self, recipe: Recipe) -> "ShardedOp":
        """The same operation with labels replicated whose sharding is uneven or would cut blocks."""
        uneven = {
            c
            for sharding in self.shardings
            for c, axes in sharding
            if misfit(dict(self.sizes)[c], device_count(self.mesh, axes)) is not None
        }
        even = self._without(uneven)
        casts: list[tuple[str, str, Any]] = [
            (matmul, t, self.local.resolve_cast(cast, matmul, t)) for matmul, t, cast in recipe.casts()
        ]
        return even._without({cut.label for matmul, t, resolved in casts for cut in even._cuts(resolved, matmul, t)})

    def _without(self, labels: set[str]) -> "ShardedOp":
        """The same operation with these labels replicated."""
        shardings = (tuple((c, axes) for c, axes in sharding if c not in labels) for sharding in self.shardings)
        return dataclasses.replace(self, shardings=Shardings(*shardings))

    def _cuts(self, resolved: ResolvedCast, matmul: str, tensor: str) -> Iterator[Cut]:
        """Labels whose sharding, before or after the collectives of a matmul, cuts blocks or groups of a rotation."""
        flat, rotation = self._flattening(tensor).flat, resolved.cast.rotation
        for axes in (dict(getattr(self.shardings, tensor)), self._multiplied_axes(matmul, tensor)):
            if rotation is not None and resolved.rotated_axis is not None:
                yield from self._cut(tensor, axes, flat[resolved.rotated_axis], rotation.size, "groups of a rotation")
            for label, size in zip(flat, resolved.block, strict=True):
                if size > 1:
                    yield from self._cut(tensor, axes, label, size, "blocks")

    def _cut(self, tensor: str, axes: dict[str, Axes], label: str, block: int, what: str) -> Iterator[Cut]:
        """Yields a Cut if the sharding of a flattened dim cuts its blocks.

        Blocks run across the dims (members) that were flattened, row-major. They are cut if a shard of the last sharded
        member, with all members after it, is not a multiple of the block.
        """
        members, sizes = self._flattening(tensor).members(label), dict(self.sizes)
        last = max((i for i, c in enumerate(members) if axes.get(c)), default=None)
        if last is None:
            return
        mesh_axes, minor = axes[members[last]], math.prod(sizes[c] for c in members[last + 1 :])
        found = misfit(sizes[members[last]] * minor, device_count(self.mesh, mesh_axes), block)
        if found is not None:
            yield Cut(members[last], cut_blocks_message(tensor, mesh_axes, found, what))

    def _contiguous_axes(self, request: CastRequest) -> list[CollapsedDim] | None:
        """The dims of a stochastically rounded matrix whose shard is a contiguous range of each dim; None otherwise.

        The global index of every element then follows from that of the first one. It does not if a dim is padded for
        a rotation, because the dim is then longer in the shards than the dims that were flattened to it.
        """
        flattening, sizes = self._flattening(request.tensor), dict(self.sizes)
        all_members = map(flattening.members, flattening.flat)
        axes = [CollapsedDim(members, tuple(sizes[c] for c in members)) for members in all_members]
        rotations = ((cast.resolved.cast.rotation, cast.resolved.rotated_axis) for cast in request.distinct)
        is_padded = any(rotation and axes[axis].size % rotation.size for rotation, axis in rotations)
        if not request.is_stochastic or len(axes) != 2 or is_padded:
            return None
        sharding = dict(getattr(self.shardings, request.tensor))
        return None if any(axis.noncontiguous_member(sharding, self.mesh) for axis in axes) else axes

    def _uniform(self, cast: ShardCast, key: Key, shape: tuple[int, ...]) -> jax.Array:
        """The random numbers that one device would use for these elements: hashed from their global flat indices."""
        flattening, rotation = self._flattening(cast.tensor), cast.resolved.cast.rotation
        shard_sizes, axes = dict(zip(flattening.labels, shape, strict=True)), []
        for axis, label in enumerate(flattening.flat):
            along = self._positions(cast.tensor, label, shard_sizes)
            axes.append(padded(along, rotation.size) if rotation and axis == cast.resolved.rotated_axis else along)
        return uniform_at(flat_index(axes), *seeds_of(key))

    def _positions(self, tensor: str, label: str, shard_sizes: dict[str, int]) -> Positions:
        """The global positions of a device's elements along a flat dim."""
        sizes, members = dict(self.sizes), self._flattening(tensor).members(label)
        return flattened([positions(shard_sizes[c], sizes[c], self._axes(tensor, c)) for c in members])


def _with_rotation(q, rotation: Hadamard | None) -> Any:
    """Replaces the rotation metadata of an operand.

    Reshapes refuse to split a rotated dim; here they may, because no collective cuts groups of a rotation.
    """
    return dataclasses.replace(q, rotation=rotation) if isinstance(q, ScaledArray) else q


def _result_tensor(matmul: str) -> str:
    """The tensor that a matmul computes, for dgrad and wgrad the one whose gradient it computes."""
    (result,) = {"x", "w", "g"} - set(GEMM_OPERANDS[matmul])
    return result


def multiply_sharded(op: ShardedOp, options: Options, operands: Operands, state: State, key) -> tuple[jax.Array, State]:
    """y and the state for the next use. Operands are global arrays, or shards inside a shard_map over the mesh axes."""
    options = dataclasses.replace(options, out_sharding=None)
    _check_bias(op, operands.bias)
    if are_manual(op.mesh, op.shardings.axes):
        return quantised_matmul(StaticArgs(op, options), operands, state, key)
    if callable(options.kernel):
        return _multiply_global(table.tables(), op, options, operands, state, key)
    return run_as_program(_multiply_global, table.tables(), op, options, arrays=(operands, state, key))


def _check_bias(op: ShardedOp, bias: jax.Array | None) -> None:
    sizes, axes, features = dict(op.sizes), dict(op.shardings.g), op.contraction.rhs_free
    if are_manual(op.mesh, op.shardings.axes):
        sizes = {c: size // device_count(op.mesh, axes.get(c, ())) for c, size in sizes.items()}
    expected = tuple(sizes[c] for c in features)
    if bias is not None and bias.shape != expected:
        raise ValueError(f"`b` {bias.shape} must have the trailing axes of `w`, here {expected}")


def _multiply_global(tables, op: ShardedOp, options: Options, operands: Operands, state: State, key):
    """The matmul of global arrays, sharded as in `op.shardings`. tables: a key of the cache of jitted functions."""
    divisible = op.without_cuts(options.recipe) if options.on_indivisible == "gather" else op
    y, state = _shard_mapped(divisible, options, operands, state, key)
    spec = spec_of(op.contraction.out, op.shardings.g)
    return constrain(y, spec, mesh=op.mesh, on_indivisible="drop" if divisible is op else "gather"), state


def _shard_mapped(op: ShardedOp, options: Options, operands: Operands, state: State, key) -> tuple[jax.Array, State]:
    """The matmul of global arrays as a shard_map over the mesh of `op`."""
    contraction, plan = op.contraction, op.plan("fwd")
    shardings = Shardings(_slice_further(op.shardings.x, plan.lhs), _slice_further(op.shardings.w, plan.rhs), plan.out)
    static = StaticArgs(dataclasses.replace(op, shardings=shardings), options)
    features = contraction.rhs_free
    bias_sharding = tuple((c, axes) for c, axes in plan.out if c in features)
    sharded = (contraction.lhs, shardings.x), (contraction.rhs, shardings.w), (features, bias_sharding)
    specs = [spec_of(labels, sharding) for labels, sharding in sharded]
    x, w, bias = (
        None if a is None else constrain(a, spec, mesh=op.mesh) for a, spec in zip(operands[:3], specs, strict=True)
    )

    def run(x, w, bias, state, key):
        return quantised_matmul(static, Operands(x, w, bias, None), state, key)

    mapped = jax.shard_map(
        run,
        mesh=op.mesh,
        in_specs=(*specs, PartitionSpec(), PartitionSpec()),
        out_specs=(spec_of(contraction.out, plan.out), PartitionSpec()),
    )
    return mapped(x, w, bias, state, key)


def _slice_further(sharding: LabelSharding, transfers: transfer_plan.Transfers) -> LabelSharding:
    """The sharding of an operand after those of its slices that do not follow an all-gather of the same dim."""
    axes_of, gathered = dict(sharding), {c for c, _ in transfers.gathered}
    return tuple(
        (axes_of | {c: axes_of.get(c, ()) + axes for c, axes in transfers.sliced if c not in gathered}).items()
    )
