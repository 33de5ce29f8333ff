"""What the compiler makes of contractions for a B200, without one: `make test-blackwell`.

Needs jax's CUDA plugin (about 4 GB) and JAX_PLATFORMS=cpu, so it is a job of its own.
"""

import importlib.util
import os
import re

import jax
import jax.numpy as jnp
import pytest

import scaledot as sd

if (
    not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13))
    or os.environ.get("JAX_PLATFORMS") != "cpu"
):
    pytest.skip("compiling for a GPU needs its plugin: make test-blackwell", allow_module_level=True)

from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

_FIELDS = """threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448 threads_per_core_limit: 2048 fpus_per_core: 128
block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
registers_per_core_limit: 65536 registers_per_block_limit: 65536 device_vendor: "NVIDIA Corporation"
device_address_bits: 64 driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
dnn_version: "9.12.0" """
_DEVICES = {
    "H200": "core_count: 132 memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 "
    "device_memory_size: 151397597184 cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }",
    "B200": "core_count: 148 memory_bandwidth: 7672320000000 l2_cache_size: 132644864 clock_rate_ghz: 1.965 "
    "device_memory_size: 191514411008 cuda_compute_capability { major: 10 feature_extension: ACCELERATED_FEATURES }",
}


def compiled_for(device: str, f, *shapes) -> str:
    """The optimised HLO of f on one device of that kind."""
    target = (
        f'gpu_device_info {{ {_FIELDS} {_DEVICES[device]} name: "NVIDIA {device}" }} platform_name: "CUDA" '
        f'dnn_version_info {{ major: 9 minor: 12 patch: 0 }} device_description_str: "NVIDIA {device}"'
    )
    topology = topologies.get_topology_desc(platform="cuda", target_config=target, topology="1x1x1")
    place = NamedSharding(topologies.make_mesh(topology, (1,), ("x",)), PartitionSpec())
    placed = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place) for shape in shapes]
    return jax.jit(f).lower(*placed).compile().as_text()


def calls(text: str) -> set[str]:
    return set(re.findall(r'custom_call_target="([^"]+)"', text))


@pytest.mark.parametrize(("lhs", "rhs"), [("mxfp8", "mxfp8"), ("mxfp8_e5m2", "mxfp8"), ("nvfp4", "nvfp4")])
def test_block_scaled_formats_become_the_hardware_call(lhs, rhs):
    def product(x, w):
        return sd.matmul(sd.quantize(x, lhs), sd.quantize(w, rhs, axis=0))

    assert "__cudnn$blockScaledDot" in calls(compiled_for("B200", product, (256, 512), (512, 384)))
    assert "__cudnn$blockScaledDot" not in calls(compiled_for("H200", product, (256, 512), (512, 384)))


@pytest.mark.parametrize("mode", ["mxfp8", "nvfp4"])
def test_the_names_of_jax_nn_do_too(mode):
    configs = [sd.get_scaled_dot_general_config(mode)] * 3

    def product(x, w):
        return sd.scaled_dot_general(x, w, (((2,), (1,)), ((0,), (0,))), configs=configs)

    assert "__cudnn$blockScaledDot" in calls(compiled_for("B200", product, (2, 128, 256), (2, 256, 128)))


def test_square_blocks_of_a_weight_reach_it():
    def product(x, w):
        return sd.matmul(sd.quantize(x, "nvfp4"), sd.quantize(w, "nvfp4", block=(16, 16)))

    assert "__cudnn$blockScaledDot" in calls(compiled_for("B200", product, (256, 512), (512, 384)))


@pytest.mark.parametrize("device", _DEVICES)
def test_eight_bit_floats_and_integers_are_multiplied_as_they_are(device):
    for format, element in (("fp8_e4m3", "f8e4m3fn"), ("int8", "s8")):

        def product(x, w, format=format):
            return sd.matmul(sd.quantize(x, format), sd.quantize(w, format, axis=0))

        text = compiled_for(device, product, (256, 512), (512, 384))
        fused = [line for line in text.splitlines() if re.search(r" dot\(|gemm|cublas", line)]
        assert any(element in line for line in text.splitlines())
        assert fused
        assert not any(re.search(r"bf16\[256,512\]", line) for line in text.splitlines())
