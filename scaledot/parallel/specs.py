"""How the operands and the result of a contraction are sharded: by `specs`, or by types along explicit mesh axes.

A sequence-parallel x (batch, tokens, features) with labels "bsk" and the PartitionSpec ("dp", "tp") has the Split
`(("b", ("dp",)), ("s", ("tp",)))`: labels of the contraction, each with the mesh axes that it is sharded over.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from scaledot.contraction import Contraction
from scaledot.parallel.divisibility import Misfit
from scaledot.parallel.transfer_plan import Axes, Split, split_of
from scaledot.parallel.types import is_sharded


class Specs(NamedTuple):
    """The PartitionSpecs of x, w and the result y."""

    x: PartitionSpec
    w: PartitionSpec
    y: PartitionSpec


SpecsByPath = Specs | Mapping[str, Specs | None] | None  # for all layers of a model, or by patterns of their paths


class Splits(NamedTuple):
    """How x, w and the result, or its gradient g, are sharded."""

    x: Split
    w: Split
    g: Split

    @property
    def axes(self) -> Axes:
        """All mesh axes."""
        return tuple(dict.fromkeys(axis for split in self for _, axes in split for axis in axes))


def splits_of(contraction: Contraction, x: Any, w: Any, specs: Specs | None, out_sharding) -> Splits | None:
    """How operands of types x and w are sharded, and the result is to be; None where nothing is.

    `specs` say it, or along explicit mesh axes the types (`jax.typeof`) and `out_sharding`.
    """
    if specs is not None:
        return _splits_of_specs(contraction, specs, out_sharding)
    if not is_sharded(x) and not is_sharded(w):
        return None
    left, right = (split_of(c, type.sharding.spec) for c, type in ((contraction.lhs, x), (contraction.rhs, w)))
    if out_sharding is None:
        return Splits(left, right, _as_operands(contraction, left, right))
    spec = out_sharding.spec if isinstance(out_sharding, NamedSharding) else out_sharding
    return Splits(left, right, split_of(contraction.out, spec))


def _splits_of_specs(contraction: Contraction, specs: Specs, out_sharding) -> Splits | None:
    if out_sharding is not None:
        raise ValueError("`out_sharding` and `specs` both say how the result lies; give one of them")
    labels = contraction.lhs, contraction.rhs, contraction.out
    for name, of, spec in zip("xwy", labels, specs, strict=True):
        if len(spec) > len(of):
            raise ValueError(f"`specs.{name}` {spec} has {len(spec)} entries for an array of {len(of)} axes")
    splits = Splits(*map(split_of, labels, specs))
    return splits if splits.axes else None


def _as_operands(contraction: Contraction, x: Split, w: Split) -> Split:
    """The sharding of jax.lax's own result: that of the operands. Sums over sharded axes it leaves to the caller."""
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
    """The global size of each label; inside a shard_map x and w are shards."""
    sizes: dict[str, int] = {}
    for labels, array, split in ((contraction.lhs, x, splits.x), (contraction.rhs, w, splits.w)):
        axes = {c: [axis for axis in along if axis in mesh.manual_axes] for c, along in split}
        for c, size in zip(labels, array.shape, strict=True):
            whole = size * device_count(mesh, tuple(axes.get(c, ())))
            if sizes.setdefault(c, whole) != whole:
                raise ValueError(
                    f"{c!r} of {contraction} is {sizes[c]} long in `x` and {whole} in `w`, as they are split"
                )
    return tuple(sizes.items())


def mesh_of(*arrays: jax.Array) -> Any:
    """The mesh of arrays that are sharded over explicit axes, or that of the context."""
    meshes = (type.sharding.mesh for type in map(jax.typeof, arrays) if is_sharded(type))
    return next(meshes, None) or jax.sharding.get_abstract_mesh()


def device_count(mesh, axes: Axes) -> int:
    """The number of devices along some mesh axes."""
    return math.prod(mesh.shape[axis] for axis in axes)


def check_axes(mesh, axes: Axes) -> None:
    unknown = [axis for axis in axes if axis not in mesh.shape]
    if unknown:
        known = ", ".join(map(repr, mesh.axis_names)) or "no axes; make one the context with jax.set_mesh"
        raise ValueError(f"the mesh has no axis {unknown[0]!r}; it has {known}")


def are_shards(mesh, axes: Axes) -> bool:
    """Whether arrays are shards along these axes already: inside a shard_map over all of them."""
    manual = [axis for axis in axes if axis in mesh.manual_axes]
    if manual and len(manual) < len(axes):
        other = next(axis for axis in axes if axis not in manual)
        raise ValueError(f"{manual[0]!r} is an axis of the surrounding shard_map, {other!r} is not; map both or none")
    return bool(manual)


def cut_sentence(tensor: str, axes: Axes, found: Misfit, what: str) -> str:
    """The error message for a sharding that cuts blocks, or groups of a rotation (`what`), with what would work."""
    return (
        f"`{tensor}` is split over {' and '.join(map(repr, axes))} so that a device has {found.shard} elements of an "
        f"axis, which cut {what} of {found.block}; split it over fewer devices, make the axis {found.fitting_multiple} "
        "times as long"
    )
