"""The devices that XLA partitions a program over. Kernels are opaque to it, so they need to know."""

import math
from typing import Any

import jax
from jax.core import Tracer


def partition_reason(devices: int) -> str | None:
    """Why kernels are not taken in a program that XLA partitions over so many devices: it cannot look into them."""
    if devices == 1:
        return None
    return f"XLA partitions this over {devices} devices; kernels run on one, or inside a shard_map over all mesh axes"


def devices_of(*arrays: jax.Array) -> int:
    """The devices that XLA may partition a program of these arrays over.

    They are those of meshes: of the context (jax.set_mesh), and of the arrays' types, which name the mesh of a
    NamedSharding inside jit, too, along automatic axes as along explicit ones. Axes of a surrounding shard_map do not
    count. What types do not say is not seen: `in_shardings` of jit for arrays that are not placed so yet, and a mesh
    that is a context by `with mesh`. A kernel is right there, too, but XLA then gathers its operands on every device.
    """
    context = jax.sharding.get_abstract_mesh()
    if not context.empty and not _partitioned(context):
        return 1
    return max([math.prod(_partitioned(context)), *map(_devices_of, arrays)])


def _devices_of(array: jax.Array) -> int:
    if isinstance(array, jax.Array) and not isinstance(array, Tracer):
        return array.sharding.num_devices
    return math.prod(_partitioned(jax.typeof(array).sharding.mesh))


def _partitioned(mesh: Any) -> list[int]:
    """The sizes of the axes along which XLA partitions."""
    kinds = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return [size for size, kind in kinds if kind != jax.sharding.AxisType.Manual]
