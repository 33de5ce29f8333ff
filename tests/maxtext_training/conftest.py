"""The environment of tests that train unmodified MaxText on four virtual CPU devices (make test-maxtext)."""

import os

os.environ |= {
    "DECOUPLE_GCLOUD": "TRUE",
    "JAX_PLATFORMS": "cpu",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # compilation takes most of the time
    "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
}
