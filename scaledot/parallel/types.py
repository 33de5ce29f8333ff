"""What JAX's types and arrays say about mesh axes.

A mesh axis is explicit, automatic or manual:

* Along explicit axes the type of an array holds its sharding. JAX infers most shardings of results; a reshape that
  splits a sharded axis into blocks has to be told.
* Along automatic axes XLA partitions the program. It cannot partition Pallas kernels, so these need to know whether it
  would (`Partitioning`).
* Along manual axes, inside a shard_map, an array is a device's shard, and its type says whether shards differ (vary).
  A primitive without a rule and a custom_vjp have to set that themselves.

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
    """The explicit mesh axes that an axis is sharded over: a name, several, or None."""
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
    """The mesh axes of one entry of a PartitionSpec: a name, several, or None."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def check_blocks(x: jax.Array, axis: int, block: int) -> None:
    """Raise where the explicit sharding of an axis cuts blocks."""
    found = misfit(x.shape[axis], shards(x, axis), block)
    if found is not None:
        raise ValueError(
            f"axis {axis} of {found.size} is split over {explicit_axes(x, axis)!r} into {found.devices} parts of "
            f"{found.shard}, which cut blocks of {block}; split it in {found.fewer_devices}, make it "
            f"{found.fitting_size} long, or gather it first with jax.sharding.reshard"
        )


def reshape_sharded(x: jax.Array, shape: Sequence[int], spec: Sequence[Any]) -> jax.Array:
    """x.reshape(shape), with that sharding where x is sharded over explicit mesh axes."""
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
    """x, typed to vary along every manual axis that the others vary along."""
    axes = frozenset().union(*map(varying, others)) - varying(x)
    return lax.pcast(x, tuple(axes), to="varying") if axes else x


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Like:
    """The type of a primal, which is all that its cotangent needs to know of it."""

    type: Any = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, x: jax.Array) -> "Like":
        return cls(jax.typeof(x))

    def reduced(self, cotangent: jax.Array) -> jax.Array:
        """A cotangent summed over the manual axes along which it varies and its primal does not."""
        axes = varying(cotangent) - _varying(self.type)
        return lax.psum(cotangent, tuple(axes)) if axes else cotangent


class Partitioning(NamedTuple):
    """Over how many devices XLA partitions a program, and whether along automatic mesh axes alone."""

    devices: int = 1
    is_automatic: bool = True

    def joined(self, other: "Partitioning") -> "Partitioning":
        """That of a program with arrays of both."""
        if self == other or other == ONE_DEVICE:
            return self
        return Partitioning(max(self.devices, other.devices), self.is_automatic and other.is_automatic)


ONE_DEVICE = Partitioning()


def partitioning_of(*arrays: jax.Array) -> Partitioning:
    """How XLA may partition a program of these arrays.

    The devices are those of meshes: of the context (jax.set_mesh), and of the arrays' types, which name the mesh of a
    NamedSharding inside jit, too, along automatic axes as along explicit ones. Axes of a surrounding shard_map do not
    count. What types do not say is not seen: `in_shardings` of jit for arrays that are not placed so yet, and a mesh
    that is a context by `with mesh`. A kernel is right there, too, but XLA then gathers its operands on every device.
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
    """Over the axes of a mesh that are not those of a surrounding shard_map."""
    kinds = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    sizes = [size for size, kind in kinds if kind != AxisType.Manual]
    devices = math.prod(sizes)
    if devices == 1:
        return ONE_DEVICE
    return Partitioning(devices, is_automatic=all(kind == AxisType.Auto for kind in mesh.axis_types))


def partition_reason(partitioning: Partitioning) -> str | None:
    """Why Pallas kernels are not taken in a program that XLA partitions."""
    if partitioning.devices == 1 or partitioning.is_automatic:
        return None
    return (
        f"XLA partitions this over {partitioning.devices} devices; such a kernel runs on one, inside a shard_map over "
        "all mesh axes, or as a dot of two scaled matrices and their casts where all mesh axes are automatic"
    )
