"""The environment of tests in which other projects read what `checkpoint.save` writes (make test-checkpoints)."""

import os

os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # compilation takes most of the time
    "HF_HUB_OFFLINE": "1",  # models are read from folders only
    "CUDA_VISIBLE_DEVICES": "",  # transformers would pick kernels for a GPU
}
