"""PartitionSpecs of ScaledArrays: those of the scales are derived from those of the data.

A scale is sharded like the blocks that it belongs to. It is replicated along an axis where it has one entry, and along
an axis whose sharding cuts blocks, which is always correct, and cheap because scales are small. `explain` lists these
axes with the reason.

The mesh is an argument, by default that of `jax.set_mesh`. All functions accept ScaledArrays, plain arrays and pytrees
of both.
"""

import dataclasses
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from scaledot.array import ScaledArray
from scaledot.numerics import blocks
from scaledot.parallel.divisibility import Misfit, misfit
from scaledot.parallel.specs import check_axes, device_count
from scaledot.parallel.types import axis_names, has_explicit_axes

Rules = Iterable[tuple[str, Any]]

ON_INDIVISIBLE = ("drop", "gather", "raise")


def specs(tree, spec, *, mesh: Mesh | AbstractMesh | None = None, on_indivisible: str = "drop"):
    """The PartitionSpec of every leaf, as a pytree of the same structure.

    Args:
      tree: a ScaledArray, an array, or a pytree of them; leaves may be jax.ShapeDtypeStructs.
      spec: the PartitionSpec of the data, or a pytree of PartitionSpecs.
      mesh: by default that of `jax.set_mesh`.
      on_indivisible: what to do with an axis whose sharding cuts blocks: "drop" replicates the scale along it, "gather"
        replicates the data as well, "raise" is an error. An axis that the devices do not divide evenly is an error
        unless "gather".

    >>> import jax.numpy as jnp, scaledot as sd
    >>> q = sd.quantize(jnp.ones((256, 512)), "fp8_e4m3", block=(128, 128))
    >>> mesh = jax.sharding.AbstractMesh((8,), ("tp",))
    >>> found = specs(q, PartitionSpec(None, "tp"), mesh=mesh)
    >>> tuple(found.data), tuple(found.scale)
    ((None, 'tp'), (None, None))
    """
    return _map_arrays(lambda x, spec, mesh: _leaf_specs(x, spec, mesh, on_indivisible)[0], tree, spec, mesh)


def shardings(tree, spec, *, mesh: Mesh | AbstractMesh | None = None, on_indivisible: str = "drop"):
    """The NamedSharding of every leaf, for `in_shardings`, device_put or checkpoints; arguments as in `specs`."""

    def of_leaves(x, spec, mesh):
        found, _ = _leaf_specs(x, spec, mesh, on_indivisible)
        return jax.tree.map(lambda s: NamedSharding(mesh, s), found, is_leaf=_is_spec)

    return _map_arrays(of_leaves, tree, spec, mesh)


def shard(tree, spec, *, mesh: Mesh | None = None, on_indivisible: str = "drop"):
    """Places arrays on the devices of a mesh (`jax.device_put`); arguments as in `specs`.

    >>> import jax.numpy as jnp, scaledot as sd
    >>> mesh = jax.make_mesh((1,), ("fsdp",))
    >>> q = shard(sd.quantize(jnp.ones((64, 32)), "mxfp8"), PartitionSpec("fsdp"), mesh=mesh)
    >>> tuple(q.scale.sharding.spec)
    ('fsdp', None)
    """
    mesh = jax.sharding.get_mesh() if mesh is None else mesh
    return jax.device_put(tree, shardings(tree, spec, mesh=mesh, on_indivisible=on_indivisible))


def constrain(tree, spec, *, mesh: Mesh | AbstractMesh | None = None, on_indivisible: str = "drop"):
    """Constrains the sharding of arrays inside jit; arguments as in `specs`. Returns the tree as it is without a mesh.

    Applies `with_sharding_constraint` on automatic axes and `reshard` on explicit ones, and ignores axes of a
    surrounding shard_map. Outside jit it places arrays on the devices of the mesh.
    """
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    if mesh.empty:
        return tree

    def constrain_leaves(x, spec, mesh):
        found, _ = _leaf_specs(x, _without(spec, frozenset(mesh.manual_axes)), mesh, on_indivisible)
        return jax.tree.map(lambda leaf, s: _constrain(leaf, s, mesh), x, found, is_leaf=_is_spec)

    return _map_arrays(constrain_leaves, tree, spec, mesh)


def apply_sharding_constraint_by_logical_axes(
    tree, names: Sequence[str | None] | None, *, rules: Rules | None = None, mesh=None
):
    """`constrain` to the mesh axes that rules assign to logical axis names.

    Axes without a rule, and axes that the devices do not divide evenly, are replicated. If all axes would be, or
    without names or a mesh, the tree is returned as it is.

    Args:
      names: logical names of the axes of every array in the tree.
      rules: pairs of a logical name and a mesh axis, a tuple of mesh axes, or None; by default the current rules of
        Flax.
    """
    return constrain_what_divides(tree, logical_spec(names, rules), mesh=mesh) if names else tree


def constrain_what_divides(tree, spec, *, mesh: Mesh | AbstractMesh | None = None):
    """`constrain` with indivisible axes replicated; an array of which no axis would be sharded is returned as it is."""
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    if mesh.empty:
        return tree

    def constrain_leaves(x, spec, mesh):
        found, _ = _leaf_specs(x, _without(spec, frozenset(mesh.manual_axes)), mesh, "gather")
        data = found.data if isinstance(x, ScaledArray) else found
        return constrain(x, spec, mesh=mesh, on_indivisible="gather") if any(data) else x

    return _map_arrays(constrain_leaves, tree, spec, mesh)


def logical_spec(names: Sequence[str | None], rules: Rules | None = None) -> PartitionSpec:
    """The PartitionSpec of logical axes: for each the first rule whose mesh axes no earlier axis uses, as in Flax.

    >>> tuple(logical_spec(("batch", "embed"), [("batch", ("dp", "fsdp")), ("embed", "tp")]))
    (('dp', 'fsdp'), 'tp')
    """
    rules = tuple(_flax_rules() if rules is None else rules)
    taken: set[str] = set()
    entries = []
    for name in names:
        free = (axes for logical, axes in rules if logical == name and not taken & set(axis_names(axes)))
        entries.append(next(free, None) if name is not None else None)
        taken |= set(axis_names(entries[-1]))
    return PartitionSpec(*entries)


def explain(tree, spec, *, mesh: Mesh | AbstractMesh | None = None, on_indivisible: str = "drop") -> str:
    """The specs of all leaves as text, with the reason for each replicated axis; arguments as in `specs`.

    >>> import jax.numpy as jnp, scaledot as sd
    >>> q = sd.quantize(jnp.ones((256, 512)), "int8", axis=0)
    >>> print(explain(q, PartitionSpec("fsdp", "tp"), mesh=jax.sharding.AbstractMesh((2, 2), ("fsdp", "tp"))))
    int8[256,512]
      data   ('fsdp', 'tp')
      scale  (None, 'tp')
             axis 0 is replicated: one scale for all of its 256 elements
    """
    lines: list[str] = []

    def add(x, spec, mesh):
        found, replicated = _leaf_specs(x, spec, mesh, on_indivisible)
        lines.append(f"{x.format.name if isinstance(x, ScaledArray) else x.dtype}[{','.join(map(str, x.shape))}]")
        leaves = _leaves(found) if isinstance(x, ScaledArray) else {"data": found}
        for name, leaf_spec in leaves.items():
            lines.append(f"  {name:<6} {tuple(leaf_spec)}")
            lines.extend(f"  {'':<6} {each.sentence}" for each in replicated if each.leaf == name)
        return found

    _map_arrays(add, tree, spec, mesh)
    return "\n".join(lines)


class Dropped(NamedTuple):
    """An axis dropped from the spec of a leaf, so that it is replicated; `sentence` is the line of `explain`."""

    leaf: str
    sentence: str

    @classmethod
    def along(cls, leaf: str, axis: int, reason: str) -> "Dropped":
        return cls(leaf, f"axis {axis} is replicated: {reason}")


def _leaf_specs(x, spec: PartitionSpec, mesh, on_indivisible: str) -> tuple[Any, list[Dropped]]:
    """A PartitionSpec, or a ScaledArray of them; and the axes that are replicated although `spec` shards them."""
    if on_indivisible not in ON_INDIVISIBLE:
        raise ValueError(f"`on_indivisible` must be one of {', '.join(ON_INDIVISIBLE)}, not {on_indivisible!r}")
    entries = _entries(spec, x.shape)
    replicated: list[Dropped] = []
    data = [_data_entry(x, axis, entry, mesh, on_indivisible, replicated) for axis, entry in enumerate(entries)]
    if not isinstance(x, ScaledArray):
        return PartitionSpec(*data), replicated
    scale = [_scale_entry(x, axis, entry, mesh, replicated) for axis, entry in enumerate(data)]
    of_scale = PartitionSpec(*scale)
    leaves = {"data": PartitionSpec(*data), "scale": of_scale, "zero": None if x.zero is None else of_scale}
    if x.tensor_scale is not None:
        leading = zip(x.tensor_scale.shape, data, strict=False)
        leaves["tensor_scale"] = PartitionSpec(*(entry if size > 1 else None for size, entry in leading))
    return dataclasses.replace(x, **leaves), replicated


def _data_entry(x, axis: int, entry: Any, mesh, on_indivisible: str, replicated: list[Dropped]) -> Any:
    """The entry of the data's spec for an axis: `entry`, or None where it is indivisible."""
    devices, size = _devices(mesh, entry), x.shape[axis]
    if devices == 1:
        return entry
    over = f"{devices} devices of {_quoted(entry)}"
    uneven = misfit(size, devices)
    if uneven is not None:
        if on_indivisible != "gather":
            sizes = " or ".join(map(str, uneven.fitting_sizes))
            raise ValueError(
                f"axis {axis} of {size} elements cannot be sharded evenly over {over}; {sizes} would fit, or replicate "
                "it with on_indivisible='gather'"
            )
        replicated.append(Dropped.along("data", axis, f"its {size} elements do not divide by {over}"))
        return None
    cut = _cut_blocks(x, axis, devices)
    if cut is None or on_indivisible == "drop":
        return entry
    if on_indivisible == "raise":
        fitting = f"shard it over {cut.fewer_devices} devices or pad it to {cut.fitting_size} elements"
        raise ValueError(f"{_cut_message(axis, cut)}; {fitting}, or use on_indivisible='gather' or 'drop'")
    replicated.append(Dropped.along("data", axis, _cut_message(axis, cut)))
    return None


def _scale_entry(q: ScaledArray, axis: int, entry: Any, mesh, replicated: list[Dropped]) -> Any:
    """The entry of the scale's spec for an axis, where that of the data is `entry`."""
    devices = _devices(mesh, entry)
    if devices == 1 or not _is_blocked(q, axis):
        if devices > 1:
            reason = f"one scale for all of its {q.shape[axis]} elements"
            replicated.append(Dropped.along("scale", axis, reason))
        return entry if devices == 1 and _is_blocked(q, axis) else None
    cut = _cut_blocks(q, axis, devices)
    if cut is not None:
        replicated.append(Dropped.along("scale", axis, _cut_message(axis, cut)))
    return entry if cut is None else None


def _is_blocked(q: ScaledArray, axis: int) -> bool:
    return q.scale.shape[axis] > 1


def _cut_blocks(x, axis: int, devices: int) -> Misfit | None:
    """The Misfit of an axis whose sharding would cut blocks, else None."""
    if not isinstance(x, ScaledArray) or not _is_blocked(x, axis):
        return None
    return misfit(x.shape[axis], devices, blocks.expand(x.block, x.ndim)[axis])


def _cut_message(axis: int, cut: Misfit) -> str:
    return f"axis {axis} of {cut.size} elements in {cut.devices} shards of {cut.shard} would cut blocks of {cut.block}"


def _devices(mesh, entry: Any) -> int:
    """The number of devices along the mesh axes of an entry of a PartitionSpec."""
    check_axes(mesh, axis_names(entry))
    return device_count(mesh, axis_names(entry))


def _entries(spec: PartitionSpec, shape: tuple[int, ...]) -> tuple[Any, ...]:
    if len(spec) > len(shape):
        raise ValueError(f"{spec} has {len(spec)} entries, but the array of shape {tuple(shape)} has {len(shape)} axes")
    return (*spec, *(None for _ in shape[len(spec) :]))


def _without(spec: PartitionSpec, names: frozenset[str]) -> PartitionSpec:
    """A spec less some mesh axes."""

    def drop(entry: Any) -> Any:
        rest = tuple(name for name in axis_names(entry) if name not in names)
        return entry if len(rest) == len(axis_names(entry)) else rest or None

    return PartitionSpec(*map(drop, spec))


def _constrain(x: jax.Array, spec: PartitionSpec, mesh) -> jax.Array:
    sharding = NamedSharding(mesh, spec)
    return _constrained(x, sharding) if isinstance(x, Tracer) else jax.jit(_constrained, static_argnums=1)(x, sharding)


def _constrained(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    if has_explicit_axes(sharding):
        return jax.sharding.reshard(x, sharding)
    return jax.lax.with_sharding_constraint(x, sharding)


def _map_arrays(f, tree, spec, mesh):
    """Maps f(array, spec, mesh) over the arrays of a tree; `spec` is one for all or a tree of them."""
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    if mesh.empty:
        raise ValueError("there is no mesh; pass `mesh`, or set one as the context with jax.set_mesh")

    def is_scaled(x) -> bool:
        return isinstance(x, ScaledArray)

    if _is_spec(spec):
        return jax.tree.map(lambda x: f(x, spec, mesh), tree, is_leaf=is_scaled)
    return jax.tree.map(lambda x, own_spec: f(x, own_spec, mesh), tree, spec, is_leaf=is_scaled)


def _is_spec(x) -> bool:
    return isinstance(x, PartitionSpec)


def _leaves(q: ScaledArray) -> dict[str, Any]:
    names = ("data", "scale", "tensor_scale", "zero")
    return {name: leaf for name in names if (leaf := getattr(q, name)) is not None}


def _flax_rules() -> Rules:
    """The current logical axis rules of Flax; none if Flax was not imported."""
    linen = sys.modules.get("flax.linen")
    return () if linen is None else linen.get_logical_axis_rules()


def _quoted(entry: Any) -> str:
    return " and ".join(map(repr, axis_names(entry)))
