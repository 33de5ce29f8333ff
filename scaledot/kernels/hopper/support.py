"""Where the Mosaic kernels run, without loading them."""

import re

import jax

from scaledot.parallel.types import Partitioning, partition_reason, partitioning_of

OLDEST_JAX = (0, 11)
MULTIPROCESSORS = 132  # of an H100 or H200, where the device does not say


def device_reason() -> str | None:
    """Why this process cannot use them here, whatever the arrays."""
    return machine_reason() or partition_reason(partitioning_of())


def place_reason(partitioning: Partitioning | None) -> str | None:
    """Why they do not run in a program that XLA partitions so, or inside a shard_map for None."""
    return machine_reason() if partitioning is None else device_reason() or partition_reason(partitioning)


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


def sm_count() -> int:
    device = jax.devices()[0]
    return getattr(device, "core_count", None) or MULTIPROCESSORS


def kernel_name(*words: str) -> str:
    """The name that a kernel has in a profile.

    >>> kernel_name("cast", "fp8_e4m3")
    'scaledot_cast_fp8_e4m3'
    """
    return "_".join(("scaledot", *(re.sub(r"\W", "_", word) for word in words)))


def is_interpreted() -> bool:
    """Whether kernels run as what they mean, on a machine without a GPU."""
    return jax.default_backend() == "cpu"
