"""Compiles for a GPU on a machine without one; needs JAX's CUDA plugin (about 4 GB) and JAX_PLATFORMS=cpu."""

import importlib.util
import os
import re

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from scaledot.kernels.hopper import support

_FIELDS = """threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448 threads_per_core_limit: 2048 fpus_per_core: 128
block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
registers_per_core_limit: 65536 registers_per_block_limit: 65536 device_vendor: "NVIDIA Corporation"
device_address_bits: 64 driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
dnn_version: "9.12.0" """
DEVICES = {
    "H200": "core_count: 132 memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 "
    "device_memory_size: 151397597184 cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }",
    "B200": "core_count: 148 memory_bandwidth: 7672320000000 l2_cache_size: 132644864 clock_rate_ghz: 1.965 "
    "device_memory_size: 191514411008 cuda_compute_capability { major: 10 feature_extension: ACCELERATED_FEATURES }",
}
MISSING = "compiling for a GPU needs the CUDA plugin: make test-gpu-compile"


def is_possible() -> bool:
    has_plugin = any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13))
    return has_plugin and os.environ.get("JAX_PLATFORMS") == "cpu"


def devices_of(device: str, count: int):
    """Returns a topology of `count` devices of that kind to compile for."""
    target = (
        f'gpu_device_info {{ {_FIELDS} {DEVICES[device]} name: "NVIDIA {device}" }} platform_name: "CUDA" '
        f'dnn_version_info {{ major: 9 minor: 12 patch: 0 }} device_description_str: "NVIDIA {device}"'
    )
    return topologies.get_topology_desc(platform="cuda", target_config=target, topology=f"1x1x{count}")


def compiled_for(device: str, f, *shapes: jax.ShapeDtypeStruct) -> str:
    """Returns the optimised HLO of f for one device of that kind."""
    sharding = NamedSharding(topologies.make_mesh(devices_of(device, 1), (1,), ("x",)), PartitionSpec())
    placed = [jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding) for shape in shapes]
    return jax.jit(f).lower(*placed).compile().as_text()


def ptxas_reports(monkeypatch, folder):
    """Makes ptxas write its reports on Mosaic kernels to the folder, and returns the folder."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(folder))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    monkeypatch.setattr(support, "sm_count", lambda: 132)
    monkeypatch.setattr(support, "is_interpreted", lambda: False)
    return folder


def spills(folder) -> list[int]:
    """Returns the bytes of register spills of each kernel, from the reports of ptxas."""
    return _numbers(folder, r"(\d+) bytes spill stores")


def registers(folder) -> list[int]:
    """Returns the registers of a thread of each kernel, from the reports of ptxas."""
    return _numbers(folder, r"Used (\d+) registers")


def _numbers(folder, pattern: str) -> list[int]:
    texts = [file.read_text() for file in folder.glob("*ptxas*")]
    return [int(found) for text in texts for found in re.findall(pattern, text)]


def spills_of_cast(device: str, case, folder) -> list[int]:
    key = jax.random.key(0)
    compiled_for(device, lambda x: case.by_kernel(x, key).arrays, jax.ShapeDtypeStruct((1024, 2048), case.dtype))
    found = spills(folder)
    assert found, "ptxas wrote no report"
    return found
