"""A product under a recipe whose operands are split over a mesh, as one program that every device runs on its parts.

Devices cast their own parts, to the codes and scales that one device would find: largest magnitudes of what shares a
scale are compared across devices, random bits are those of an element's place in the whole array, and blocks must not
be cut. What a product needs of others' operands is gathered as codes. Parts of sums are added in float32.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from scaledot import collective
from scaledot.array import ScaledArray
from scaledot.contraction import Contraction
from scaledot.kernels.spec import sum_dtype
from scaledot.numerics.hadamard import Hadamard
from scaledot.numerics.rounding import seeds_of, uniform_at
from scaledot.ops import partition
from scaledot.ops.partition import Axes, Split, spec_of
from scaledot.recipes import PRODUCTS, Cast, Recipe
from scaledot.sharding import constrain
from scaledot.state import State
from scaledot.train.casts import CastRequest, Laid, Made
from scaledot.train.flatten import Layout
from scaledot.train.product import Operands, Rule, product
from scaledot.train.splits import Splits, are_parts, check_axes, cut_words, mesh_of, whole_sizes


class Cut(NamedTuple):
    """A label whose split would cut blocks, and a sentence about it."""

    label: str
    sentence: str


class Part(NamedTuple):
    """A cast laid on a device's part of a tensor. shared: mesh axes over which scales are shared."""

    tensor: str
    laid: Any
    shared: Axes


@dataclasses.dataclass(frozen=True)
class Partitioned:
    """A kind of product on parts of arrays; `kind` is that of flattened ones.

    layouts: those of x, w, g and bias. sizes: of the labels of whole arrays. devices: along each mesh axis.
    amax_scope: as in Recipe. overlap: mesh axes along which what moves does so in rings.
    """

    kind: Any
    contraction: Contraction
    layouts: tuple[Layout, Layout, Layout, Layout]
    sizes: tuple[tuple[str, int], ...]
    devices: tuple[tuple[str, int], ...]
    splits: Splits
    amax_scope: str
    overlap: Axes = ()

    @classmethod
    def of(
        cls, kind, contraction: Contraction, layouts, x, w, splits: Splits, amax_scope: str, overlap: Axes = ()
    ) -> "Partitioned":
        """For these operands, on the mesh that they lie on or that of the context."""
        mesh = mesh_of(x, w)
        check_axes(mesh, (*splits.axes, *overlap))
        sizes = whole_sizes(contraction, x, w, splits, mesh)
        return cls(kind, contraction, layouts, sizes, tuple(mesh.shape.items()), splits, amax_scope, overlap)

    @property
    def has_batch(self) -> bool:
        return self.kind.has_batch

    def lay(self, cast: Cast, product: str, tensor: str) -> Part:
        laid = self.kind.lay(cast, product, tensor)
        for cut in self._cuts(laid, tensor):
            raise ValueError(cut.sentence)
        return Part(tensor, laid, () if cast.delayed else self._sharing(tensor, laid))

    def cast(self, request: CastRequest, x: jax.Array, groups) -> Made:
        """What one device would find: scales are shared, and random numbers are drawn by global indices."""
        request = request.of_shards(lambda part, key: self._uniform(part, key, x.shape))
        made = self.kind.cast(request, self._layout(request.tensor).enter(x), groups)
        return made if made.sums is None else made._replace(sums=self._bias(made.sums, x))

    def plain(self, product: str, tensor: str, x: jax.Array, groups) -> jax.Array:
        return self._layout(tensor).enter(x)

    def inside(self, part: Part, x: jax.Array, q) -> jax.Array | None:
        layout = self._layout(part.tensor)
        found = self.kind.inside(part.laid, layout.enter(x), q)
        return None if found is None else layout.leave(found, dict(zip(layout.labels, x.shape, strict=True)))

    def amax(self, tensor: str, x: jax.Array, groups) -> jax.Array:
        return self.kind.amax(tensor, x, groups)

    def bias_gradient(self, g: jax.Array, groups) -> jax.Array:
        return self._bias(self.kind.bias_gradient(self._layout("g").enter(g), groups), g)

    def _bias(self, sums: jax.Array, g: jax.Array) -> jax.Array:
        """Sums of a flattened g, with the axes of a bias."""
        return self.layouts[3].leave(sums, dict(zip(self.contraction.out, g.shape, strict=True)))

    def multiply(self, product: str, lhs, rhs, groups, **wanted) -> jax.Array:
        dtype = wanted["preferred_element_type"]
        wide = sum_dtype(dtype) if collective.adds(self.plan(product), self._of(product), self.overlap) else dtype
        how = wanted | {"out_sharding": None, "preferred_element_type": wide}

        def multiply(lhs, rhs, sizes) -> jax.Array:
            total = self.kind.multiply(product, lhs, rhs, groups, **how)
            return self._layout(_result(product)).leave(total, sizes)

        return self._carried_out(product, lhs, rhs, multiply).astype(dtype)

    def multiply_and_add(self, x, w, bias: jax.Array, groups, **wanted) -> jax.Array:
        plan, features = self.plan("fwd"), self.contraction.rhs_free
        ring = collective.ring_of(plan, self.overlap)
        if collective.adds(plan, self.contraction, self.overlap) or (ring is not None and ring.label in features):
            wide = sum_dtype(wanted["preferred_element_type"])
            y = self.multiply("fwd", x, w, groups, **(wanted | {"preferred_element_type": wide}))
            y = y + lax.broadcast_in_dim(
                bias.astype(y.dtype), y.shape, [self.contraction.out.index(c) for c in features]
            )
            return y.astype(wanted["preferred_element_type"])
        bias = self.layouts[3].enter(bias)

        def multiply(x, w, sizes) -> jax.Array:
            y = self.kind.multiply_and_add(x, w, bias, groups, **(wanted | {"out_sharding": None}))
            return self.layouts[2].leave(y, sizes)

        return self._carried_out("fwd", x, w, multiply)

    def plan(self, product: str) -> partition.Partition:
        tensors = *PRODUCTS[product], _result(product)
        return partition.plan(self._of(product), *(getattr(self.splits, tensor) for tensor in tensors))

    def _of(self, product: str) -> Contraction:
        return self.contraction if product == "fwd" else getattr(self.contraction, product)

    def _layout(self, tensor: str) -> Layout:
        return self.layouts["xwg".index(tensor)]

    def _carried_out(self, product: str, lhs, rhs, multiply) -> jax.Array:
        """A product as it is planned, with its operands opened to their labels where they move or are cut."""
        left, right = (self._side(tensor, q) for tensor, q in zip(PRODUCTS[product], (lhs, rhs), strict=True))
        return collective.product(self.plan(product), self._of(product), left, right, multiply, self.overlap)

    def _side(self, tensor: str, q) -> collective.Side:
        layout, q = self._layout(tensor), self.kind.logical(q)
        rotation = q.rotation if isinstance(q, ScaledArray) else None
        return collective.Side(
            layout.labels,
            q,
            self._local_sizes(tensor),
            open=lambda q, sizes: layout.leave(_rotated(q, None), sizes),
            close=lambda x: _rotated(layout.enter(x), rotation),
        )

    def _local_sizes(self, tensor: str) -> dict[str, int]:
        split, sizes = dict(getattr(self.splits, tensor)), dict(self.sizes)
        return {c: sizes[c] // self._count(split.get(c, ())) for c in self._layout(tensor).labels}

    def _count(self, axes: Axes) -> int:
        """Devices along some mesh axes."""
        return math.prod(dict(self.devices)[axis] for axis in axes)

    def _members(self, tensor: str, label: str) -> str:
        """The labels that a flat one is made of."""
        return next((group.members for group in self._layout(tensor).groups if group.label == label), label)

    def _sharing(self, tensor: str, laid: Laid) -> Axes:
        """Mesh axes over which a cast shares scales: those that split what has one scale."""
        split = dict(getattr(self.splits, tensor))
        flat = self._layout(tensor).flat
        whole = [c for c, size in zip(flat, laid.tile, strict=True) if size == 0 or laid.cast.format.two_level]
        axes = [axis for c in whole for m in self._members(tensor, c) for axis in split.get(m, ())]
        if self.amax_scope == "global":
            return tuple(axes)
        return tuple(axis for axis in axes if axis in self._gathered_over(tensor))

    def _gathered_over(self, tensor: str) -> set[str]:
        """Mesh axes over which parts of a tensor are put together, and must have one scale."""
        moves = [
            (plan.lhs, plan.rhs)[PRODUCTS[product].index(tensor)]
            for product in PRODUCTS
            if tensor in PRODUCTS[product] and (plan := self.plan(product))
        ]
        return {axis for move in moves for _, axes in move.gathered for axis in axes}

    def without_cuts(self, recipe: Recipe) -> "Partitioned":
        """The same with axes held whole that would not divide, or of which devices would have parts of blocks."""
        whole = {c for split in self.splits for c, axes in split if dict(self.sizes)[c] % self._count(axes)}
        even = self._without(whole)
        casts = [(tensor, self.kind.lay(cast, of, tensor)) for of, tensor, cast in recipe.casts()]
        return even._without({cut.label for tensor, laid in casts for cut in even._cuts(laid, tensor)})

    def _without(self, labels: set[str]) -> "Partitioned":
        splits = (tuple((c, axes) for c, axes in split if c not in labels) for split in self.splits)
        return dataclasses.replace(self, splits=Splits(*splits))

    def _cuts(self, laid: Laid, tensor: str) -> Iterator[Cut]:
        """Axes of which devices would have parts of what has one scale, or is rotated together."""
        flat, rotation = self._layout(tensor).flat, laid.cast.rotation
        if rotation is not None and laid.rotated_axis is not None:
            yield from self._cut(tensor, flat[laid.rotated_axis], rotation.size, "groups of a rotation")
        for label, size in zip(flat, laid.tile, strict=True):
            if size > 1:
                yield from self._cut(tensor, label, size, "blocks")

    def _cut(self, tensor: str, label: str, size: int, what: str) -> Iterator[Cut]:
        split, local = dict(getattr(self.splits, tensor)), self._local_sizes(tensor)
        members = self._members(tensor, label)
        last = max((i for i, c in enumerate(members) if c in split), default=None)
        if last is None:
            return
        inner = math.prod(local[c] for c in members[last:])
        if inner % size:
            sentence = cut_words(tensor, split[members[last]], local[members[last]], inner, size, what)
            yield Cut(members[last], f"{sentence}, or gather it with on_indivisible='gather'")

    def _uniform(self, part: Part, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """What one device would draw for these elements: by their places in the whole flattened array."""
        layout = self._layout(part.tensor)
        local = dict(zip(layout.labels, shape, strict=True))
        index = jnp.zeros((), jnp.uint32)
        for axis, label in enumerate(layout.flat):
            place, size = self._places(part.tensor, label, local)
            rotation = part.laid.cast.rotation
            if rotation is not None and axis == part.laid.rotated_axis:  # zeros that fill up an axis count, too
                short = -size % rotation.size
                place = jnp.concatenate([place, np.uint32(size) + jnp.arange(short, dtype=jnp.uint32)])
                size += short
            index = index[..., None] * np.uint32(size % 2**32) + place.reshape((1,) * axis + (-1,))
        return uniform_at(index, *seeds_of(key))

    def _places(self, tensor: str, label: str, local: dict[str, int]) -> tuple[jax.Array, int]:
        """Where a device's elements of a flat axis are in the whole one, and how long that is."""
        split, sizes = dict(getattr(self.splits, tensor)), dict(self.sizes)
        place, size = jnp.zeros(1, jnp.uint32), 1
        for c in self._members(tensor, label):
            own = jnp.arange(local[c], dtype=jnp.uint32)
            if c in split:
                own = own + (lax.axis_index(split[c]) * local[c]).astype(jnp.uint32)
            place = (place[:, None] * np.uint32(sizes[c]) + own[None]).reshape(-1)
            size *= sizes[c]
        return place, size


def _rotated(q, rotation: Hadamard | None) -> Any:
    """An operand with other word of its rotation, whose groups no move cuts but no reshape may split."""
    return dataclasses.replace(q, rotation=rotation) if isinstance(q, ScaledArray) else q


def _result(product: str) -> str:
    """The tensor that a product makes."""
    (result,) = {"x", "w", "g"} - set(PRODUCTS[product])
    return result


def product_of_parts(rule: Rule, kind: Partitioned, operands: Operands, state: State, key, on_indivisible="raise"):
    """A product of that kind, and its next state; inside a shard_map over its mesh axes, of parts of arrays."""
    if on_indivisible not in ("raise", "gather"):
        raise ValueError(f"`on_indivisible` must be raise or gather, not {on_indivisible!r}")
    mesh = mesh_of(operands.x, operands.w)
    if are_parts(mesh, kind.splits.axes):
        return product(dataclasses.replace(rule, kind=kind), operands, state, key)
    fitting = kind.without_cuts(rule.recipe) if on_indivisible == "gather" else kind
    y, state = _mapped(rule, fitting, operands, state, key, mesh)
    wanted = spec_of(kind.contraction.out, kind.splits.g)
    return constrain(y, wanted, mesh=mesh, on_indivisible="drop" if fitting is kind else "gather"), state


def _mapped(rule: Rule, kind: Partitioned, operands: Operands, state: State, key, mesh):
    """A product of whole arrays, which every device computes its part of."""
    contraction, plan = kind.contraction, kind.plan("fwd")
    splits = Splits(_split_further(kind.splits.x, plan.lhs), _split_further(kind.splits.w, plan.rhs), plan.out)
    inner = dataclasses.replace(rule, kind=dataclasses.replace(kind, splits=splits))
    features = contraction.rhs_free
    of_bias = tuple((c, axes) for c, axes in plan.out if c in features)
    labels = (contraction.lhs, splits.x), (contraction.rhs, splits.w), (features, of_bias)
    specs = [spec_of(*of) for of in labels]
    x, w, bias = (
        None if a is None else constrain(a, spec, mesh=mesh) for a, spec in zip(operands[:3], specs, strict=True)
    )

    def run(x, w, bias, state, key):
        return product(inner, Operands(x, w, bias, None), state, key)

    mapped = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(*specs, PartitionSpec(), PartitionSpec()),
        out_specs=(spec_of(contraction.out, plan.out), PartitionSpec()),
    )
    return mapped(x, w, bias, state, key)


def _split_further(split: Split, moves: partition.Moves) -> Split:
    """A split with the cuts that need nothing from other devices."""
    known, gathered = dict(split), {c for c, _ in moves.gathered}
    return tuple((known | {c: known.get(c, ()) + axes for c, axes in moves.cut if c not in gathered}).items())
