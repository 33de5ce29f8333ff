"""Where the Mosaic kernels run, without loading them."""

import math
from typing import Any

import jax
from jax.core import Tracer

OLDEST_JAX = (0, 11)
MULTIPROCESSORS = 132  # of an H100 or H200, where the device does not say


def device_reason() -> str | None:
    """Why this process cannot use them here, whatever the arrays."""
    return machine_reason() or partition_reason(devices_of())


def machine_reason() -> str | None:
    """Why this process cannot use them anywhere."""
    if jax.__version_info__ < OLDEST_JAX:
        return f"needs jax {'.'.join(map(str, OLDEST_JAX))}; this is {jax.__version__}"
    backend = jax.default_backend()
    if backend != "gpu":
        return f"needs a Hopper GPU; the default backend is {backend}"
    chosen = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if getattr(chosen, "platform", chosen) not in (None, "gpu", "cuda"):
        return f"needs a Hopper GPU; jax.default_device is {chosen}"
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", "unknown")
    if not capability.startswith("9."):
        return f"needs compute capability 9; {device.device_kind} has {capability}"
    if jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        return "its programs count in 32 bits, and jax_enable_x64 makes them count in 64"
    return None


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
    meshes = [context, *(jax.typeof(array).sharding.mesh for array in arrays)]
    concrete = [array for array in arrays if isinstance(array, jax.Array) and not isinstance(array, Tracer)]
    return max([math.prod(_partitioned(mesh)) for mesh in meshes] + [a.sharding.num_devices for a in concrete])


def _partitioned(mesh: Any) -> list[int]:
    """The sizes of the axes along which XLA partitions."""
    kinds = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return [size for size, kind in kinds if kind != jax.sharding.AxisType.Manual]


def multiprocessors() -> int:
    device = jax.devices()[0]
    return getattr(device, "core_count", None) or MULTIPROCESSORS


def is_interpreted() -> bool:
    """Whether kernels run as what they mean, on a machine without a GPU."""
    return jax.default_backend() == "cpu"
