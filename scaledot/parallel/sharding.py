"""The PartitionSpecs of scales, derived from those of the data.

A scale is sharded with the blocks that it belongs to. Along an axis where it has one entry, or whose sharding cuts
blocks, it is replicated: right in any case, and small. `explain` says which axes these are, and why.

Meshes, specs and rules are arguments; without one, the mesh is that of `jax.set_mesh`. Everything takes plain arrays
and trees of both kinds, too.
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
    """The PartitionSpec of every leaf, in the structure of the tree.

    Args:
      tree: a ScaledArray, an array, or a tree of them; leaves may be shapes.
      spec: the PartitionSpec of the data, or a tree of such.
      mesh: that of `jax.set_mesh` by default.
      on_indivisible: what to do where devices would hold parts of blocks: `drop` the axis from the scale's spec alone,
        `gather`: from that of the data as well, or `raise`. An axis whose data does not divide is an error unless it
        is gathered.

    >>> import jax.numpy as jnp, scaledot as sd
    >>> q = sd.quantize(jnp.ones((256, 512)), "fp8_e4m3", block=(128, 128))
    >>> mesh = jax.sharding.AbstractMesh((8,), ("tp",))
    >>> found = specs(q, PartitionSpec(None, "tp"), mesh=mesh)
    >>> tuple(found.data), tuple(found.scale)
    ((None, 'tp'), (None, None))
    """
    return _mapped(lambda x, spec, mesh: _leaf_specs(x, spec, mesh, on_indivisible)[0], tree, spec, mesh)


def shardings(tree, spec, *, mesh: Mesh | AbstractMesh | None = None, on_indivisible: str = "drop"):
    """The NamedSharding of every leaf, for jit's `in_shardings`, device_put, checkpoints; arguments as in `specs`."""

    def of_leaves(x, spec, mesh):
        found, _ = _leaf_specs(x, spec, mesh, on_indivisible)
        return jax.tree.map(lambda s: NamedSharding(mesh, s), found, is_leaf=_is_spec)

    return _mapped(of_leaves, tree, spec, mesh)


def shard(tree, spec, *, mesh: Mesh | None = None, on_indivisible: str = "drop"):
    """Arrays put on the devices of a mesh; arguments as in `specs`.

    >>> import jax.numpy as jnp, scaledot as sd
    >>> mesh = jax.make_mesh((1,), ("fsdp",))
    >>> q = shard(sd.quantize(jnp.ones((64, 32)), "mxfp8"), PartitionSpec("fsdp"), mesh=mesh)
    >>> tuple(q.scale.sharding.spec)
    ('fsdp', None)
    """
    mesh = jax.sharding.get_mesh() if mesh is None else mesh
    return jax.device_put(tree, shardings(tree, spec, mesh=mesh, on_indivisible=on_indivisible))


def constrain(tree, spec, *, mesh: Mesh | AbstractMesh | None = None, on_indivisible: str = "drop"):
    """Arrays laid out over a mesh inside jit; arguments as in `specs`. Nothing happens without a mesh.

    Automatic axes are constrained, explicit ones resharded, and axes of a surrounding shard_map are left alone. Outside
    of jit arrays go to the mesh's devices.
    """
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    if mesh.empty:
        return tree

    def laid(x, spec, mesh):
        found, _ = _leaf_specs(x, _without(spec, frozenset(mesh.manual_axes)), mesh, on_indivisible)
        return jax.tree.map(lambda leaf, s: _laid_out(leaf, s, mesh), x, found, is_leaf=_is_spec)

    return _mapped(laid, tree, spec, mesh)


def apply_sharding_constraint_by_logical_axes(
    tree, names: Sequence[str | None] | None, *, rules: Rules | None = None, mesh=None
):
    """`constrain` along the mesh axes that rules give logical names.

    Axes are not split that no rule speaks of, or that do not divide; where none would be, nothing happens, and so
    without names or a mesh.

    Args:
      names: of the axes of every array in the tree.
      rules: pairs of a logical name and a mesh axis, several, or None; those of Flax that are in force by default.
    """
    return constrain_what_divides(tree, logical_spec(names, rules), mesh=mesh) if names else tree


def constrain_what_divides(tree, spec, *, mesh: Mesh | AbstractMesh | None = None):
    """`constrain` with axes left whole that do not divide; nothing happens where none is split."""
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    if mesh.empty:
        return tree

    def laid(x, spec, mesh):
        found, _ = _leaf_specs(x, _without(spec, frozenset(mesh.manual_axes)), mesh, "gather")
        data = found.data if isinstance(x, ScaledArray) else found
        return constrain(x, spec, mesh=mesh, on_indivisible="gather") if any(data) else x

    return _mapped(laid, tree, spec, mesh)


def logical_spec(names: Sequence[str | None], rules: Rules | None = None) -> PartitionSpec:
    """The PartitionSpec of logical axes. The first rule of a name counts whose mesh axes no other axis has taken.

    >>> tuple(logical_spec(("batch", "embed"), [("batch", ("dp", "fsdp")), ("embed", "tp")]))
    (('dp', 'fsdp'), 'tp')
    """
    rules = tuple(_flax_rules() if rules is None else rules)
    taken: set[str] = set()
    entries = []
    for name in names:
        free = (axes for known, axes in rules if known == name and not taken & set(axis_names(axes)))
        entries.append(next(free, None) if name is not None else None)
        taken |= set(axis_names(entries[-1]))
    return PartitionSpec(*entries)


def explain(tree, spec, *, mesh: Mesh | AbstractMesh | None = None, on_indivisible: str = "drop") -> str:
    """The specs of all leaves, and why they differ from those of the data; arguments as in `specs`.

    >>> import jax.numpy as jnp, scaledot as sd
    >>> q = sd.quantize(jnp.ones((256, 512)), "int8", axis=0)
    >>> print(explain(q, PartitionSpec("fsdp", "tp"), mesh=jax.sharding.AbstractMesh((2, 2), ("fsdp", "tp"))))
    int8[256,512]
      data   ('fsdp', 'tp')
      scale  (None, 'tp')
             axis 0 is not split: one scale serves all of its 256 elements
    """
    lines: list[str] = []

    def add(x, spec, mesh):
        found, reasons = _leaf_specs(x, spec, mesh, on_indivisible)
        lines.append(f"{x.format.name if isinstance(x, ScaledArray) else x.dtype}[{','.join(map(str, x.shape))}]")
        leaves = _leaves(found) if isinstance(x, ScaledArray) else {"data": found}
        for name, leaf_spec in leaves.items():
            lines.append(f"  {name:<6} {tuple(leaf_spec)}")
            lines.extend(f"  {'':<6} {reason.sentence}" for reason in reasons if reason.leaf == name)
        return found

    _mapped(add, tree, spec, mesh)
    return "\n".join(lines)


class Dropped(NamedTuple):
    """Why an axis of a leaf is not split as that of the data is asked to be."""

    leaf: str
    sentence: str


def _leaf_specs(x, spec: PartitionSpec, mesh, on_indivisible: str) -> tuple[Any, list[Dropped]]:
    """The specs of an array's leaves, as an array of the same kind."""
    if on_indivisible not in ON_INDIVISIBLE:
        raise ValueError(f"`on_indivisible` must be one of {', '.join(ON_INDIVISIBLE)}, not {on_indivisible!r}")
    entries = _entries(spec, x.shape)
    dropped: list[Dropped] = []
    data = [_data_entry(x, axis, entry, mesh, on_indivisible, dropped) for axis, entry in enumerate(entries)]
    if not isinstance(x, ScaledArray):
        return PartitionSpec(*data), dropped
    scale = [_scale_entry(x, axis, entry, mesh, dropped) for axis, entry in enumerate(data)]
    of_scale = PartitionSpec(*scale)
    parts = {"data": PartitionSpec(*data), "scale": of_scale, "zero": None if x.zero is None else of_scale}
    if x.tensor_scale is not None:
        leading = zip(x.tensor_scale.shape, data, strict=False)
        parts["tensor_scale"] = PartitionSpec(*(entry if size > 1 else None for size, entry in leading))
    return dataclasses.replace(x, **parts), dropped


def _data_entry(x, axis: int, entry: Any, mesh, on_indivisible: str, dropped: list[Dropped]) -> Any:
    """The mesh axes that an axis of the data is split over."""
    parts, size = _parts(mesh, entry), x.shape[axis]
    if parts == 1:
        return entry
    over = f"{parts} devices of {_quoted(entry)}"
    uneven = misfit(size, parts)
    if uneven is not None:
        if on_indivisible != "gather":
            wanted, sizes = f"axis {axis} of {size} cannot be split evenly over {over}", _either(uneven.fitting_sizes)
            raise ValueError(f"{wanted}; {sizes} would fit, or gather it with on_indivisible='gather'")
        dropped.append(Dropped("data", f"axis {axis} is not split: {size} elements do not divide by {over}"))
        return None
    cut = _cut(x, axis, parts)
    if cut is None or on_indivisible == "drop":
        return entry
    if on_indivisible == "raise":
        fitting = f"split it in {cut.fewer_devices} or make it {cut.fitting_size} long"
        raise ValueError(f"{_sentence(axis, cut)}; {fitting}, or use on_indivisible='gather' or 'drop'")
    dropped.append(Dropped("data", f"axis {axis} is not split: {_sentence(axis, cut)}"))
    return None


def _scale_entry(q: ScaledArray, axis: int, entry: Any, mesh, dropped: list[Dropped]) -> Any:
    parts = _parts(mesh, entry)
    if parts == 1 or not _blocked(q, axis):
        if parts > 1:
            reason = f"one scale serves all of its {q.shape[axis]} elements"
            dropped.append(Dropped("scale", f"axis {axis} is not split: {reason}"))
        return entry if parts == 1 and _blocked(q, axis) else None
    cut = _cut(q, axis, parts)
    if cut is not None:
        dropped.append(Dropped("scale", f"axis {axis} is not split: {_sentence(axis, cut)}"))
    return entry if cut is None else None


def _blocked(q: ScaledArray, axis: int) -> bool:
    return q.scale.shape[axis] > 1


def _cut(x, axis: int, parts: int) -> Misfit | None:
    """Blocks of an axis that sharding it would cut."""
    if not isinstance(x, ScaledArray) or not _blocked(x, axis):
        return None
    return misfit(x.shape[axis], parts, blocks.expand(x.block, x.ndim)[axis])


def _sentence(axis: int, cut: Misfit) -> str:
    return f"axis {axis} of {cut.size} in {cut.devices} parts of {cut.shard} would cut blocks of {cut.block}"


def _parts(mesh, entry: Any) -> int:
    """Devices along the mesh axes of an entry of a PartitionSpec."""
    check_axes(mesh, axis_names(entry))
    return device_count(mesh, axis_names(entry))


def _entries(spec: PartitionSpec, shape: tuple[int, ...]) -> tuple[Any, ...]:
    if len(spec) > len(shape):
        raise ValueError(f"{spec} has {len(spec)} entries, but the array of shape {tuple(shape)} has {len(shape)} axes")
    return (*spec, *(None for _ in shape[len(spec) :]))


def _without(spec: PartitionSpec, names: frozenset[str]) -> PartitionSpec:
    """A spec less some mesh axes."""

    def left(entry: Any) -> Any:
        kept = tuple(name for name in axis_names(entry) if name not in names)
        return entry if len(kept) == len(axis_names(entry)) else kept or None

    return PartitionSpec(*map(left, spec))


def _laid_out(x: jax.Array, spec: PartitionSpec, mesh) -> jax.Array:
    sharding = NamedSharding(mesh, spec)
    return _constrained(x, sharding) if isinstance(x, Tracer) else jax.jit(_constrained, static_argnums=1)(x, sharding)


def _constrained(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    if has_explicit_axes(sharding):
        return jax.sharding.reshard(x, sharding)
    return jax.lax.with_sharding_constraint(x, sharding)


def _mapped(f, tree, spec, mesh):
    """f(array, its spec, mesh) for every array of a tree; one spec serves all."""
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    if mesh.empty:
        raise ValueError("there is no mesh; give `mesh`, or make one the context with jax.set_mesh")

    def is_array(x) -> bool:
        return isinstance(x, ScaledArray)

    if _is_spec(spec):
        return jax.tree.map(lambda x: f(x, spec, mesh), tree, is_leaf=is_array)
    return jax.tree.map(lambda x, one: f(x, one, mesh), tree, spec, is_leaf=is_array)


def _is_spec(x) -> bool:
    return isinstance(x, PartitionSpec)


def _leaves(q: ScaledArray) -> dict[str, Any]:
    names = ("data", "scale", "tensor_scale", "zero")
    return {name: leaf for name in names if (leaf := getattr(q, name)) is not None}


def _flax_rules() -> Rules:
    """A Flax that was never imported has no rules."""
    linen = sys.modules.get("flax.linen")
    return () if linen is None else linen.get_logical_axis_rules()


def _quoted(entry: Any) -> str:
    return " and ".join(map(repr, axis_names(entry)))


def _either(sizes: list[int]) -> str:
    return " or ".join(map(str, sizes))
