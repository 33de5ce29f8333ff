"""The compute capability of the local GPUs."""

import jax


def get_device_compute_capability(gpu_id: int = 0) -> int:
    """Returns the compute capability of a local device times 10, such as 90 for an H100; 0 if it is not an NVIDIA GPU.

    >>> get_device_compute_capability() in (0, 80, 86, 89, 90, 100, 103, 120, 121)
    True
    """
    capability = str(getattr(jax.local_devices()[gpu_id], "compute_capability", "0.0"))
    major, _, minor = capability.partition(".")
    return 10 * int(major) + int(minor) if minor.isdigit() and major.isdigit() else 0


def is_fp8_gemm_with_all_layouts_supported() -> bool:
    """Whether FP8 GEMMs of the first local device take operands of any layout: on Blackwell data-centre GPUs.

    >>> is_fp8_gemm_with_all_layouts_supported() == (100 <= get_device_compute_capability() < 120)
    True
    """
    return 100 <= get_device_compute_capability() < 120


__all__ = ["get_device_compute_capability", "is_fp8_gemm_with_all_layouts_supported"]
