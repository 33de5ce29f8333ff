"""Shardings of the operands and the result of a contraction, from `specs` or from types along explicit mesh axes.

Shardings are per label of the contraction. A sequence-parallel x (batch, tokens, features) with labels "bsk" and
PartitionSpec("dp", "tp") has the LabelSharding `(("b", ("dp",)), ("s", ("tp",)))`.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from scaledot.contraction import Contraction
from scaledot.parallel.divisibility import Misfit
from scaledot.parallel.transfer_plan import Axes, LabelSharding, label_sharding
from scaledot.parallel.types import is_sharded


class Specs(NamedTuple):
    """The PartitionSpecs of x, w and the result y."""

    x: PartitionSpec
    w: PartitionSpec
    y: PartitionSpec


SpecsByPath = Specs | Mapping[str, Specs | None] | None  # for all layers of a model, or by patterns of their paths


class Shardings(NamedTuple):
    """The shardings of x, w and the result, whose gradient is g."""

    x: LabelSharding
    w: LabelSharding
    g: LabelSharding

    @property
    def axes(self) -> Axes:
        """All mesh axes, each once."""
        return tuple(dict.fromkeys(axis for sharding in self for _, axes in sharding for axis in axes))


def shardings_of(contraction: Contraction, x: Any, w: Any, specs: Specs | None, out_sharding) -> Shardings | None:
    """The shardings of operands of types x and w (`jax.typeof`) and the requested one of the result; None if unsharded.

    They are those of `specs` if passed, else those of the types along explicit mesh axes and `out_sharding`.
    """
    if specs is not None:
        return _shardings_of_specs(contraction, specs, out_sharding)
    if not is_sharded(x) and not is_sharded(w):
        return None
    left, right = (label_sharding(c, type.sharding.spec) for c, type in ((contraction.lhs, x), (contraction.rhs, w)))
    if out_sharding is None:
        return Shardings(left, right, _inferred_result(contraction, left, right))
    spec = out_sharding.spec if isinstance(out_sharding, NamedSharding) else out_sharding
    return Shardings(left, right, label_sharding(contraction.out, spec))


def _shardings_of_specs(contraction: Contraction, specs: Specs, out_sharding) -> Shardings | None:
    if out_sharding is not None:
        raise ValueError("`out_sharding` and `specs` both give the sharding of the result; pass one of them")
    labels = contraction.lhs, contraction.rhs, contraction.out
    for name, of, spec in zip("xwy", labels, specs, strict=True):
        if len(spec) > len(of):
            raise ValueError(f"`specs.{name}` {spec} has {len(spec)} entries for an array of {len(of)} axes")
    shardings = Shardings(*map(label_sharding, labels, specs))
    return shardings if shardings.axes else None


def _inferred_result(contraction: Contraction, x: LabelSharding, w: LabelSharding) -> LabelSharding:
    """The sharding that jax.lax infers for the result; raises where jax.lax requires `out_sharding`.

    A contracting dim that only one operand shards, such as that of an FSDP weight, is all-gathered.
    """
    of_x, of_w = dict(x), dict(w)
    sharded = [c for c in contraction.contracting if of_x.get(c) and of_w.get(c)]
    if sharded:
        raise ValueError(
            f"the contracting dim {sharded[0]!r} of {contraction} is sharded in both operands, so the sharding of the "
            "result is ambiguous; pass `out_sharding`"
        )
    inferred = {c: axes for c, axes in (*x, *w) if c in contraction.out}
    used = [axis for axes in inferred.values() for axis in axes]
    repeated = [axis for axis in used if used.count(axis) > 1]
    if repeated:
        raise ValueError(
            f"both operands are sharded over {repeated[0]!r}, which can shard one axis of the result; pass "
            "`out_sharding`"
        )
    return tuple(inferred.items())


def global_sizes(contraction: Contraction, x, w, shardings: Shardings, mesh) -> tuple[tuple[str, int], ...]:
    """The global size of each label; inside a shard_map x and w are shards."""
    sizes: dict[str, int] = {}
    for labels, array, sharding in ((contraction.lhs, x, shardings.x), (contraction.rhs, w, shardings.w)):
        manual = {c: tuple(axis for axis in axes if axis in mesh.manual_axes) for c, axes in sharding}
        for c, shard_size in zip(labels, array.shape, strict=True):
            size = shard_size * device_count(mesh, manual.get(c, ()))
            if sizes.setdefault(c, size) != size:
                raise ValueError(f"{c!r} of {contraction} has global size {sizes[c]} in `x` and {size} in `w`")
    return tuple(sizes.items())


def mesh_of(*arrays: jax.Array) -> Any:
    """The mesh of the first array that is sharded over explicit axes, else that of the context."""
    meshes = (type.sharding.mesh for type in map(jax.typeof, arrays) if is_sharded(type))
    return next(meshes, None) or jax.sharding.get_abstract_mesh()


def device_count(mesh, axes: Axes) -> int:
    """The number of devices along mesh axes."""
    return math.prod(mesh.shape[axis] for axis in axes)


def check_axes(mesh, axes: Axes) -> None:
    """Raises unless the mesh has all of these axes."""
    unknown = [axis for axis in axes if axis not in mesh.shape]
    if unknown:
        known = ", ".join(map(repr, mesh.axis_names)) or "no axes; set one as the context with jax.set_mesh"
        raise ValueError(f"the mesh has no axis {unknown[0]!r}; it has {known}")


def are_manual(mesh, axes: Axes) -> bool:
    """Whether these mesh axes are manual, so that arrays are shards; raises if only some of them are."""
    manual = [axis for axis in axes if axis in mesh.manual_axes]
    if manual and len(manual) < len(axes):
        other = next(axis for axis in axes if axis not in manual)
        raise ValueError(
            f"{manual[0]!r} is an axis of the surrounding shard_map, {other!r} is not; map over both or neither"
        )
    return bool(manual)


def cut_blocks_message(tensor: str, axes: Axes, found: Misfit, what: str) -> str:
    """The error message for a sharding that cuts blocks, or rotation groups (`what`), with what would work."""
    return (
        f"`{tensor}` is sharded over {' and '.join(map(repr, axes))} so that a device has {found.shard} elements of an "
        f"axis, which cut {what} of {found.block}; shard it over fewer devices, make the axis {found.fitting_multiple} "
        "times as long"
    )
