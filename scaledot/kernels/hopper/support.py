"""Whether the Mosaic kernels can run in this process; imports no Pallas."""

import re

import jax

from scaledot.parallel.types import Partitioning, partition_reason, partitioning_of

OLDEST_JAX = (0, 11, 2)  # the first with `inline_ptx`
DEFAULT_SM_COUNT = 132  # of an H100 or H200 SXM, for devices that do not report `core_count`


def environment_reason(partitioning: Partitioning | None) -> str | None:
    """Returns why the kernels cannot run in a program with this partitioning, or None if they can.

    It checks the devices, the current mesh and the partitioning. partitioning: None inside a shard_map, whose program
    XLA does not partition, so that only the devices are checked.
    """
    return device_reason() if partitioning is None else mesh_reason() or partition_reason(partitioning)


def mesh_reason() -> str | None:
    """Returns why the kernels cannot run on these devices and under the current mesh, or None if they can."""
    return device_reason() or partition_reason(partitioning_of())


def device_reason() -> str | None:
    """Returns why the kernels cannot run on the devices of this process, under any mesh, or None if they can."""
    if jax.__version_info__ < OLDEST_JAX:
        return f"needs jax {'.'.join(map(str, OLDEST_JAX))}; this is {jax.__version__}"
    backend = jax.default_backend()
    if backend != "gpu":
        return f"needs a Hopper GPU; the default backend is {backend}"
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if getattr(default, "platform", default) not in (None, "gpu", "cuda"):
        return f"needs a Hopper GPU; jax.default_device is {default}"
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", "unknown")
    if not capability.startswith("9."):
        return f"needs compute capability 9; {device.device_kind} has {capability}"
    if jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        return "its index arithmetic is 32-bit, and jax_enable_x64 makes it 64-bit; disable jax_enable_x64"
    return None


def sm_count() -> int:
    """The number of SMs of the first device."""
    device = jax.devices()[0]
    return getattr(device, "core_count", None) or DEFAULT_SM_COUNT


def kernel_name(*words: str) -> str:
    """The name of a kernel in profiles.

    >>> kernel_name("cast", "fp8_e4m3")
    'scaledot_cast_fp8_e4m3'
    """
    return "_".join(("scaledot", *(re.sub(r"\W", "_", word) for word in words)))


def is_interpreted() -> bool:
    """Whether kernels run in Pallas' interpret mode, on a CPU."""
    return jax.default_backend() == "cpu"
