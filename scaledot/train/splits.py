"""How the arrays of a product lie on a mesh: by `specs`, or by the types of arrays along explicit axes."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from scaledot.contraction import Contraction
from scaledot.numerics import explicit
from scaledot.ops.partition import Axes, Split, split_of


class Specs(NamedTuple):
    """How x, w and the result y lie on a mesh."""

    x: PartitionSpec
    w: PartitionSpec
    y: PartitionSpec


SpecsByPath = Specs | Mapping[str, Specs | None] | None  # for all layers of a model, or by patterns of their paths


class Splits(NamedTuple):
    """How x, w and the result, or its gradient g, are split."""

    x: Split
    w: Split
    g: Split

    @property
    def axes(self) -> Axes:
        """All mesh axes."""
        return tuple(dict.fromkeys(axis for split in self for _, axes in split for axis in axes))


def splits_of(contraction: Contraction, x: jax.Array, w: jax.Array, specs: Specs | None, out_sharding) -> Splits | None:
    """How operands are split and the result is to be: by `specs`, or by the types of arrays; None where nothing is."""
    if specs is not None:
        if out_sharding is not None:
            raise ValueError("`out_sharding` and `specs` both say how the result lies; give one of them")
        labels = contraction.lhs, contraction.rhs, contraction.out
        for name, of, spec in zip("xwy", labels, specs, strict=True):
            if len(spec) > len(of):
                raise ValueError(f"`specs.{name}` {spec} has {len(spec)} entries for an array of {len(of)} axes")
        splits = Splits(*map(split_of, labels, specs))
        return splits if splits.axes else None
    if not explicit.is_split(x) and not explicit.is_split(w):
        return None
    left, right = (split_of(c, jax.typeof(a).sharding.spec) for c, a in ((contraction.lhs, x), (contraction.rhs, w)))
    if out_sharding is None:
        return Splits(left, right, _as_operands(contraction, left, right))
    spec = out_sharding.spec if isinstance(out_sharding, NamedSharding) else out_sharding
    return Splits(left, right, split_of(contraction.out, spec))


def _as_operands(contraction: Contraction, x: Split, w: Split) -> Split:
    """How JAX's own products lie: as their operands do. It leaves sums over split axes to the caller."""
    summed = [c for c, _ in (*x, *w) if c in contraction.contracted]
    if summed:
        raise ValueError(f"{summed[0]!r} of {contraction} is summed and split; say how the result lies: `out_sharding`")
    found = {c: axes for c, axes in (*x, *w) if c in contraction.out}
    used = [axis for axes in found.values() for axis in axes]
    twice = [axis for axis in used if used.count(axis) > 1]
    if twice:
        raise ValueError(f"both operands are split over {twice[0]!r}; say which axis of the result is: `out_sharding`")
    return tuple(found.items())


def whole_sizes(contraction: Contraction, x, w, splits: Splits, mesh) -> tuple[tuple[str, int], ...]:
    """Of all labels; inside a shard_map arrays are parts of those that are meant."""
    sizes: dict[str, int] = {}
    for labels, array, split in ((contraction.lhs, x, splits.x), (contraction.rhs, w, splits.w)):
        axes = {c: [axis for axis in along if axis in mesh.manual_axes] for c, along in split}
        for c, size in zip(labels, array.shape, strict=True):
            whole = size * math.prod(mesh.shape[axis] for axis in axes.get(c, ()))
            if sizes.setdefault(c, whole) != whole:
                raise ValueError(
                    f"{c!r} of {contraction} is {sizes[c]} long in `x` and {whole} in `w`, as they are split"
                )
    return tuple(sizes.items())


def mesh_of(*arrays: jax.Array) -> Any:
    """The mesh of arrays whose types name one, or that of the context."""
    meshes = (jax.typeof(a).sharding.mesh for a in arrays if explicit.is_split(a))
    return next(meshes, None) or jax.sharding.get_abstract_mesh()


def check_axes(mesh, axes: Axes) -> None:
    unknown = [axis for axis in axes if axis not in mesh.shape]
    if unknown:
        known = ", ".join(map(repr, mesh.axis_names)) or "no axes; make one the context with jax.set_mesh"
        raise ValueError(f"the mesh has no axis {unknown[0]!r}; it has {known}")


def are_parts(mesh, axes: Axes) -> bool:
    """Whether arrays are parts along these axes: inside a shard_map over all of them."""
    manual = [axis for axis in axes if axis in mesh.manual_axes]
    if manual and len(manual) < len(axes):
        other = next(axis for axis in axes if axis not in manual)
        raise ValueError(f"{manual[0]!r} is an axis of the surrounding shard_map, {other!r} is not; map both or none")
    return bool(manual)


def cut_words(tensor: str, axes: Axes, have: int, inner: int, size: int, what: str) -> str:
    """A device has so many elements of an axis, `inner` together with those that blocks run on into."""
    fitting = -(-inner // size) * size // math.gcd(inner, -(-inner // size) * size)
    return (
        f"`{tensor}` is split over {' and '.join(map(repr, axes))} so that a device has {have} elements of an axis, "
        f"which cut {what} of {size}; split it over fewer devices, make the axis {fitting} times as long"
    )
