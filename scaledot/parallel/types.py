"""Mesh axes of JAX types and arrays: shardings, varying manual axes, and whether XLA partitions the program.

A mesh axis is explicit, automatic or manual:

* Along explicit axes the sharding is part of an array's type. JAX infers the sharding of most results, but not that of
  a reshape that splits a sharded axis into blocks (`reshape_sharded`).
* Along automatic axes XLA partitions the program. It cannot partition Pallas kernels, so their support depends on
  whether it does (`Partitioning`).
* Along manual axes, inside a shard_map, an array is a device's shard, and its type holds the axes along which shards
  differ (vary). The results of a primitive without a rule for that, and of a custom_vjp, have to be cast (`vary_as`).

For an x of type `bfloat16[8@dp,512]{V:tp}`, on 2 devices along "dp" and 4 along "tp": `explicit_axes(x, 0)` is "dp",
`shards(x, 0)` is 2 and `varying(x)` is {"tp"}.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from scaledot.parallel.divisibility import misfit


def explicit_axes(x: jax.Array, axis: int) -> Any:
    """The explicit mesh axes that an axis is sharded over, as an entry of a PartitionSpec."""
    spec = jax.typeof(x).sharding.spec
    return spec[axis] if axis < len(spec) else None


def is_sharded(type: Any) -> bool:
    """Whether an array of that type (`jax.typeof`) is sharded over explicit mesh axes."""
    return any(axes is not None for axes in type.sharding.spec)


def shards(x: jax.Array, axis: int) -> int:
    """The number of devices that an axis is sharded over, along explicit mesh axes."""
    mesh = jax.typeof(x).sharding.mesh
    return math.prod(mesh.shape[name] for name in axis_names(explicit_axes(x, axis)))


def axis_names(entry: Any) -> tuple[str, ...]:
    """The mesh axes of an entry of a PartitionSpec (a name, a tuple of names, or None) as a tuple."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def check_blocks(x: jax.Array, axis: int, block: int) -> None:
    """Raises if the explicit sharding of an axis cuts blocks."""
    found = misfit(x.shape[axis], shards(x, axis), block)
    if found is not None:
        raise ValueError(
            f"axis {axis} of {found.size} elements is sharded over {explicit_axes(x, axis)!r} into {found.devices} "
            f"shards of {found.shard}, which cut blocks of {block}; shard it over {found.fewer_devices} devices, pad "
            f"it to {found.fitting_size} elements, or replicate it first with jax.sharding.reshard"
        )


def reshape_sharded(x: jax.Array, shape: Sequence[int], spec: Sequence[Any]) -> jax.Array:
    """x.reshape(shape), whose result is sharded as `spec` if x is sharded over explicit mesh axes."""
    type = jax.typeof(x)
    if not is_sharded(type):
        return x.reshape(shape)
    return lax.reshape(x, tuple(shape), out_sharding=NamedSharding(type.sharding.mesh, PartitionSpec(*spec)))


def has_explicit_axes(sharding: NamedSharding) -> bool:
    return AxisType.Explicit in sharding.mesh.axis_types


def varying(x: jax.Array) -> frozenset:
    """The manual mesh axes along which x differs from device to device."""
    return _varying(jax.typeof(x))


def _varying(type: Any) -> frozenset:
    return type.manual_axis_type.varying


def vary_as(x: jax.Array, *others: jax.Array) -> jax.Array:
    """x, cast (`lax.pcast`) to vary along every manual axis that the others vary along."""
    axes = frozenset().union(*map(varying, others)) - varying(x)
    return lax.pcast(x, tuple(axes), to="varying") if axes else x


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrimalType:
    """The type of a primal, saved as a residual in its place: a cotangent has to match the type only."""

    aval: Any = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, x: jax.Array) -> "PrimalType":
        return cls(jax.typeof(x))

    def reduced(self, cotangent: jax.Array) -> jax.Array:
        """Reduces (psum) a cotangent over the manual axes along which it varies and its primal does not."""
        axes = varying(cotangent) - _varying(self.aval)
        return lax.psum(cotangent, tuple(axes)) if axes else cotangent


class Partitioning(NamedTuple):
    """The number of devices over which XLA partitions a program, and whether all their mesh axes are automatic."""

    devices: int = 1
    is_automatic: bool = True

    def joined(self, other: "Partitioning") -> "Partitioning":
        """The partitioning of a program that has arrays with either."""
        if self == other or other == ONE_DEVICE:
            return self
        return Partitioning(max(self.devices, other.devices), self.is_automatic and other.is_automatic)


ONE_DEVICE = Partitioning()


def partitioning_of(*arrays: jax.Array) -> Partitioning:
    """How XLA may partition a program that computes with these arrays.

    The devices are those of the mesh of the context (`jax.set_mesh`) and of the meshes of the arrays' types, which
    include the mesh of a NamedSharding inside jit as well, for automatic and explicit axes. Axes of a surrounding
    shard_map are excluded. Not detected are `in_shardings` of jit that differ from the arrays' own shardings, and a
    mesh entered by `with mesh`: kernels are correct then, but XLA all-gathers their operands to every device.
    """
    context = jax.sharding.get_abstract_mesh()
    found = ONE_DEVICE if context.empty else _partitioning(context)
    if not context.empty and found == ONE_DEVICE:
        return ONE_DEVICE
    for array in arrays:
        found = found.joined(_partitioning_of(array))
    return found


def _partitioning_of(array: jax.Array) -> Partitioning:
    if isinstance(array, jax.Array) and not isinstance(array, Tracer):
        if array.sharding.num_devices == 1:
            return ONE_DEVICE
        if not isinstance(array.sharding, NamedSharding):
            return Partitioning(array.sharding.num_devices, is_automatic=False)
        return _partitioning(array.sharding.mesh)
    return _partitioning(jax.typeof(array).sharding.mesh)


def _partitioning(mesh: Any) -> Partitioning:
    """The partitioning over the axes of a mesh that are not manual."""
    kinds = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    sizes = [size for size, kind in kinds if kind != AxisType.Manual]
    devices = math.prod(sizes)
    if devices == 1:
        return ONE_DEVICE
    return Partitioning(devices, is_automatic=all(kind == AxisType.Auto for kind in mesh.axis_types))


def partition_reason(partitioning: Partitioning) -> str | None:
    """Why Pallas kernels do not run in a program with this partitioning; None if they do."""
    if partitioning.devices == 1 or partitioning.is_automatic:
        return None
    return (
        f"XLA partitions this program over {partitioning.devices} devices; Pallas kernels run on one device, inside a "
        "shard_map over all mesh axes, or, if all mesh axes are automatic, as casts and matmuls of two scaled matrices"
    )
