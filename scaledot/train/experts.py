"""Rows in groups on a mesh: devices hold the matrices of some groups, rows come to them and results go back.

Every group is quantised as if it were alone, so a device with whole matrices of some groups needs the rows of these
groups, all of them and no others, to find the codes and scales of one device. Rows are gathered as they are, because a
block or a scale may span rows of many devices, and those of a device's own groups are brought to the front. Every row
of the result is computed by one device: results are added to zeros of the others, which is exact in any dtype.

Groups are shared by the mesh axes that split the matrices, and where they divide by those that split rows only, which
would otherwise repeat the work of others. An axis that splits rows and features of matrices, as in FSDP, exchanges
features for groups. Features that stay split, as in tensor parallelism, are handled as in `partitioned`: magnitudes of
what shares a scale are compared, and parts of sums are added in float32.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from scaledot.contraction import Contraction
from scaledot.kernels.spec import sum_dtype
from scaledot.numerics.grouped import room, whole_groups
from scaledot.numerics.hadamard import Hadamard
from scaledot.numerics.rounding import seeds_of, uniform_at
from scaledot.ops import partition
from scaledot.ops.moving import Axes, own_part
from scaledot.ops.partition import Split, spec_of
from scaledot.recipes import Cast
from scaledot.sharding import constrain
from scaledot.state import State
from scaledot.train.casts import CastRequest, Made
from scaledot.train.dispatch import sent, sent_back, way_of_matrices, way_of_rows
from scaledot.train.partitioned import Part
from scaledot.train.product import Operands, Rule, product
from scaledot.train.splits import Splits, are_parts, check_axes, cut_words, mesh_of, splits_of, whole_sizes

LABELS = Contraction("tk", "gkn", "tn")
_FEATURES = Contraction("tk", "kn", "tn")  # of one group
_BIAS = "gn"
_IN_WORDS = {"t": "rows", "g": "groups", "k": "features to sum over", "n": "features of the result"}


class Experts(NamedTuple):
    """How a grouped product lies on a mesh. sizes: of the labels of whole arrays."""

    splits: Splits
    sizes: dict[str, int]
    mesh: Any


def experts_of(x: jax.Array, w: jax.Array, specs, out_sharding) -> Experts | None:
    """How operands are split and the result is to be; None where nothing is."""
    splits = splits_of(LABELS, x, w, specs, out_sharding)
    if splits is None:
        return None
    mesh = mesh_of(x, w)
    check_axes(mesh, splits.axes)
    sizes = dict(whole_sizes(LABELS, x, w, splits, mesh))
    if not sizes["t"]:
        raise ValueError("`x` has no rows to split over a mesh; give it some that belong to no group")
    for name, split in zip("xwy", splits, strict=True):
        for c, axes in split:
            _check_divides(name, c, sizes[c], axes, mesh)
    return Experts(splits, sizes, mesh)


def _check_divides(name: str, label: str, size: int, axes: Axes, mesh) -> None:
    devices = math.prod(mesh.shape[axis] for axis in axes)
    if size % devices:
        sizes = sorted({size // devices * devices, -(-size // devices) * devices} - {0})
        raise ValueError(
            f"`{name}` has {size} {_IN_WORDS[label]}, which cannot be split evenly over {devices} devices of "
            f"{' and '.join(map(repr, axes))}; {' or '.join(map(str, sizes))} would fit"
        )


def product_of_experts(
    rule: Rule, kind_of: Callable[..., Any], experts: Experts, operands: Operands, state: State, key
) -> tuple[jax.Array, State]:
    """A grouped product and its next state; inside a shard_map over its mesh axes, of parts of arrays.

    kind_of: the kind of a product of so many groups and rows, from and to so many features.
    """
    work = _work(experts)
    local = {c: size // _devices(experts.mesh, work.get(c, ())) for c, size in experts.sizes.items()}
    kind = PartsOfGroups(
        kind_of(local["g"], local["t"], local["k"], local["n"]),
        tuple(work.items()),
        tuple(experts.sizes.items()),
        rule.recipe.amax_scope,
    )
    run = functools.partial(_on_parts, dataclasses.replace(rule, kind=kind), experts.splits, work)
    if are_parts(experts.mesh, experts.splits.axes):
        return run(operands, state, key)
    x, w, y = map(spec_of, (LABELS.lhs, LABELS.rhs, LABELS.out), experts.splits)
    mesh, rest = experts.mesh, PartitionSpec()
    specs: Any = x, w, spec_of(_BIAS, _of_bias(experts.splits)), rest
    laid: Any = (None if a is None else constrain(a, spec, mesh=mesh) for a, spec in zip(operands, specs, strict=True))
    mapped = jax.shard_map(run, mesh=mesh, in_specs=(Operands(*specs), rest, rest), out_specs=(y, rest))
    return mapped(Operands(*laid), state, key)


def _work(experts: Experts) -> dict[str, Axes]:
    """The mesh axes along which devices share the work on groups and features."""
    x, w, y = (dict(split) for split in experts.splits)
    groups = _sharing_groups(experts, x, w, y)
    of_w = *_only("k", w, groups), *_only("n", w, groups)
    plan = partition.plan(_FEATURES, _only("k", x, groups), of_w, _only("n", y, groups))
    columns = tuple(axis for axis in dict(plan.out).get("n", ()) if axis not in plan.summed)
    return {"g": groups, "k": plan.summed, "n": columns}


def _sharing_groups(experts: Experts, x: dict[str, Axes], w: dict[str, Axes], y: dict[str, Axes]) -> Axes:
    """Mesh axes that split groups already, then those that split features of matrices and all rows, then rows only.

    Features are exchanged for groups from the fastest axis on, so that what a device has of them stays together.
    """
    groups, rows = w.get("g", ()), (x.get("t", ()), y.get("t", ()))

    def divides(axis: str) -> bool:
        return not experts.sizes["g"] % _devices(experts.mesh, (*groups, axis))

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


def _only(label: str, split: dict[str, Axes], without: Axes) -> Split:
    axes = tuple(axis for axis in split.get(label, ()) if axis not in without)
    return ((label, axes),) if axes else ()


def _of_bias(splits: Splits) -> Split:
    return tuple((c, axes) for c, axes in splits.w if c in _BIAS)


def _devices(mesh, axes: Axes) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _on_parts(rule: Rule, splits: Splits, work: dict[str, Axes], operands: Operands, state: State, key):
    """The product of parts: of x, w, bias and the result as they are split, of what is between as the work is."""
    x, w, bias, groups = operands
    assert groups is not None
    start = _starts(groups, work["g"], 1)
    rows = sent(way_of_rows(LABELS.lhs, splits.x, work), x, start)
    matrices = sent(way_of_matrices(LABELS.rhs, splits.w, work), w, start)
    if bias is not None:
        bias = sent(way_of_matrices(_BIAS, _of_bias(splits), work), bias, start)
    y, state = product(rule, Operands(rows, matrices, bias, groups), state, key)
    return sent_back(way_of_rows(LABELS.out, splits.g, work), y, start), state


def _starts(groups: jax.Array, axes: Axes, together: int) -> jax.Array:
    """Where rows of a device's first group start, if groups come in multiples of so many."""
    first = _first_group(groups, axes)
    return jnp.sum(jnp.where(jnp.arange(groups.size) < first, whole_groups(groups, together), 0))


def _first_group(groups: jax.Array, axes: Axes) -> Any:
    return lax.axis_index(axes) * (groups.size // lax.axis_size(axes)) if axes else 0


@dataclasses.dataclass(frozen=True)
class PartsOfGroups:
    """Rows of a device's own groups, and parts of features; `kind` is that of groups alone.

    work: the mesh axes that split groups and features. sizes: of whole arrays. `groups` are the sizes of all groups.
    """

    kind: Any
    work: Split
    sizes: tuple[tuple[str, int], ...]
    amax_scope: str
    has_batch = False

    def lay(self, cast: Cast, product: str, tensor: str) -> Part:
        laid = self.kind.lay(cast, product, tensor)
        for label, size in self._tiles(tensor, laid):
            if size > 1:
                self._check_whole(tensor, label, size, "blocks")
        rotated = self._rotated(tensor, laid)
        if cast.rotation is not None and rotated is not None:
            self._check_whole(tensor, rotated, cast.rotation.size, "groups of a rotation")
        return Part(tensor, laid, () if cast.delayed else self._sharing(tensor, laid))

    def cast(self, request: CastRequest, x: jax.Array, groups) -> Made:
        """What one device would find: scales are shared, and random numbers are drawn by global indices."""
        request = request.of_shards(lambda part, key: self._uniform(part, key, x.shape, groups))
        return self.kind.cast(request, x, self._own(groups))

    def plain(self, product: str, tensor: str, x: jax.Array, groups) -> jax.Array:
        return self.kind.plain(product, tensor, x, self._own(groups))

    def inside(self, part: Part, x: jax.Array, q) -> jax.Array | None:
        return self.kind.inside(part.laid, x, q)

    def amax(self, tensor: str, x: jax.Array, groups) -> jax.Array:
        return self.kind.amax(tensor, x, self._own(groups))

    def bias_gradient(self, g: jax.Array, groups) -> jax.Array:
        return self.kind.bias_gradient(g, self._own(groups))

    def multiply(self, product: str, lhs, rhs, groups, **wanted) -> jax.Array:
        axes = self._axes({"fwd": "k", "dgrad": "n"}.get(product, ""))
        if not axes:
            return self.kind.multiply(product, lhs, rhs, self._own(groups), **wanted)
        dtype = wanted.pop("preferred_element_type")
        total = self.kind.multiply(
            product, lhs, rhs, self._own(groups), preferred_element_type=sum_dtype(dtype), **wanted
        )
        return lax.psum(total, axes).astype(dtype)

    def multiply_and_add(self, x, w, bias: jax.Array, groups, **wanted) -> jax.Array:
        if not self._axes("k"):
            return self.kind.multiply_and_add(x, w, bias, self._own(groups), **wanted)
        dtype = wanted.pop("preferred_element_type")
        y = self.multiply("fwd", x, w, groups, preferred_element_type=sum_dtype(dtype), **wanted)
        return self.kind.add_bias(y, bias.astype(y.dtype), self._own(groups)).astype(dtype)

    def _axes(self, label: str) -> Axes:
        return dict(self.work).get(label, ())

    def _own(self, groups: jax.Array) -> jax.Array:
        axes = self._axes("g")
        return own_part(groups, 0, axes) if axes else groups

    def _tiles(self, tensor: str, laid) -> tuple[tuple[str, int], ...]:
        """Labels of features, and how many elements of each share a scale."""
        if tensor == "w":
            return tuple(zip(_FEATURES.rhs, laid.tile, strict=True))
        return ((_feature(tensor), laid.tile[1]),)

    def _rotated(self, tensor: str, laid) -> str | None:
        """The label of features that a rotation runs along; None where it runs down whole groups."""
        if tensor == "w":
            return None if laid.rotated_axis is None else _FEATURES.rhs[laid.rotated_axis]
        return _feature(tensor) if laid.axis == 1 else None

    def _sharing(self, tensor: str, laid) -> Axes:
        """Mesh axes over which a cast shares scales: those that split what has one scale, unless parts may have it."""
        if self.amax_scope == "local":
            return ()  # features are not put together
        whole = [c for c, size in self._tiles(tensor, laid) if size == 0 or laid.cast.format.two_level]
        return tuple(axis for c in whole for axis in self._axes(c))

    def _check_whole(self, tensor: str, label: str, size: int, what: str) -> None:
        axes = self._axes(label)
        local = dict(self.sizes)[label] // _local_devices(axes)
        if axes and local % size:
            raise ValueError(f"{cut_words(tensor, axes, local, local, size, what)}, or gather it first")

    def _uniform(self, part: Part, key: jax.Array, shape: tuple[int, ...], groups: jax.Array) -> jax.Array:
        """What one device would draw for these elements: by their places among all rows, or in a group's matrix."""
        rotation, rotated = part.laid.cast.rotation, self._rotated(part.tensor, part.laid)

        def places(label: str, size: int) -> tuple[jax.Array, int]:
            place = jnp.arange(size, dtype=jnp.uint32) + self._offset(label, size)
            return _filled(place, dict(self.sizes)[label], rotation if label == rotated else None)

        feature, features = places("n" if part.tensor == "w" else _feature(part.tensor), shape[-1])
        if part.tensor != "w":
            together = part.laid.together
            rows = shape[0] if together == 1 else room(shape[0], self._own(groups).size, together)
            row = jnp.arange(rows, dtype=jnp.uint32) + _starts(groups, self._axes("g"), together).astype(jnp.uint32)
            return uniform_at(row[:, None] * np.uint32(features % 2**32) + feature[None], *seeds_of(key))
        row, _ = places("k", shape[1])
        index = row[:, None] * np.uint32(features % 2**32) + feature[None]
        group = jnp.arange(shape[0]) + _first_group(groups, self._axes("g"))
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, group)
        return jax.vmap(lambda each: uniform_at(index, *seeds_of(each)))(keys)

    def _offset(self, label: str, size: int) -> Any:
        axes = self._axes(label)
        return (lax.axis_index(axes) * size).astype(jnp.uint32) if axes else np.uint32(0)


def _feature(tensor: str) -> str:
    return {"x": "k", "g": "n"}[tensor]


def _local_devices(axes: Axes) -> int:
    return lax.axis_size(axes) if axes else 1


def _filled(place: jax.Array, size: int, rotation: Hadamard | None) -> tuple[jax.Array, int]:
    """Places and their number with the zeros that fill up groups of a rotation, which count, too."""
    short = 0 if rotation is None else -size % rotation.size
    return jnp.concatenate([place, np.uint32(size) + jnp.arange(short, dtype=jnp.uint32)]), size + short
