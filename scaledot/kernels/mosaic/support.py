"""Where the Mosaic kernels run, without loading them."""

import jax

OLDEST_JAX = (0, 11)
MULTIPROCESSORS = 132  # of an H100 or H200, where the device does not say


def device_reason() -> str | None:
    """Why this process cannot use them here."""
    return machine_reason() or _sharding_reason()


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


def _sharding_reason() -> str | None:
    """A program for several devices is partitioned by XLA, which cannot look into a kernel."""
    if jax.device_count() == 1:
        return None
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and all(kind == jax.sharding.AxisType.Manual for kind in mesh.axis_types):
        return None
    return f"there are {jax.device_count()} devices; kernels run on one, or inside a shard_map over all mesh axes"


def multiprocessors() -> int:
    device = jax.devices()[0]
    return getattr(device, "core_count", None) or MULTIPROCESSORS


def is_interpreted() -> bool:
    """Whether kernels run as what they mean, on a machine without a GPU."""
    return jax.default_backend() == "cpu"
