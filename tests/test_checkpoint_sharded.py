"""Sharded loading: each process reads only the bytes of the shards on its devices."""

import json
import os
import socket
import subprocess
import sys
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import scaledot as sd
from scaledot import checkpoint
from scaledot.checkpoint.layouts import entries
from scaledot.checkpoint.loading import read_entry
from scaledot.checkpoint.source import open_source

PROCESSES = 4
CASES = {"fp8_e4m3": (128, 128), "nvfp4": None, "int4": (64,), "int3": (128,), "mxfp6_e2m3": None, "mxfp8": None}


def weight(format, seed=0, shape=(512, 1024)):
    x = jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
    return sd.quantize(x, format, block=CASES[format])


@pytest.fixture
def mesh():
    return jax.make_mesh((4,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))


@pytest.mark.parametrize("format", CASES)
@pytest.mark.parametrize("spec", [P("tp"), P(None, "tp")], ids=["outputs", "inputs"])
@pytest.mark.parametrize("layout", ["compressed-tensors", "scaledot"])
def test_a_sharded_load_has_the_arrays_of_an_unsharded_one(format, spec, layout, mesh, tmp_path):
    checkpoint.save({"a.weight": weight(format), "norm": jnp.arange(8.0)}, tmp_path / "model", layout)
    expected = checkpoint.load(tmp_path / "model")["a.weight"]
    sharding = {"a.weight": NamedSharding(mesh, spec)}
    loaded = checkpoint.load(tmp_path / "model", sharding=sharding)["a.weight"]
    for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(expected), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert loaded.data.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)


def test_transposed_names_are_sharded_along_the_axes_of_the_result(mesh, tmp_path):
    checkpoint.save({"a.weight": weight("mxfp8")}, tmp_path / "model", "modelopt")
    names = {"{}.weight": "{}/kernel.T"}
    sharding = NamedSharding(mesh, P("tp"))
    kernel = checkpoint.load(tmp_path / "model", rename=names, sharding=sharding)["a"]["kernel"]
    assert kernel.shape == (1024, 512)
    assert {shard.data.shape for shard in kernel.data.addressable_shards} == {(256, 512)}
    assert {shard.data.shape for shard in kernel.scale.addressable_shards} == {(8, 512)}
    expected = checkpoint.load(tmp_path / "model", rename=names)["a"]["kernel"]
    assert np.asarray(kernel.data).tobytes() == np.asarray(expected.data).tobytes()


def test_a_shard_of_rows_reads_only_its_bytes(tmp_path):
    checkpoint.save({"a.weight": weight("nvfp4")}, tmp_path / "model", "modelopt")
    source = open_source(tmp_path / "model")
    leaves = entries(source)["a.weight"]
    leaves.data.read((slice(128, 256), slice(0, 1024)))
    assert source.reader.bytes_read == 128 * 512
    leaves.data.read((slice(0, 512), slice(512, 768)))
    assert source.reader.bytes_read == 128 * 512 + 512 * 128


def test_tensors_that_are_not_included_are_not_read(tmp_path):
    checkpoint.save({"a": jnp.ones(64), "b": jnp.ones(64)}, tmp_path / "model")
    assert list(checkpoint.load(tmp_path / "model", include="a")) == ["a"]
    source = open_source(tmp_path / "model")
    found = entries(source)
    assert source.reader.bytes_read == 0
    read_entry(found["b"])
    assert source.reader.bytes_read == 256


def test_four_processes_load_one_model_and_each_reads_its_quarter(tmp_path):
    tree = {f"{format}.weight": weight(format) for format in ("nvfp4", "mxfp8", "fp8_e4m3")}
    tree["norm.weight"] = jnp.arange(1024, dtype=jnp.bfloat16)
    checkpoint.save(tree, tmp_path / "model", "compressed-tensors", max_shard_bytes=600_000)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    environment = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    commands = [
        [
            sys.executable,
            Path(__file__).parent / "load_shards.py",
            tmp_path / "model",
            coordinator,
            str(PROCESSES),
            str(index),
        ]
        for index in range(PROCESSES)
    ]
    running = [subprocess.Popen(c, env=environment, stdout=subprocess.PIPE, text=True) for c in commands]
    reports = [json.loads(process.communicate(timeout=120)[0].splitlines()[-1]) for process in running]
    loaded = checkpoint.load(tmp_path / "model")
    for name, array in loaded.items():
        replicated = 0 if not isinstance(array, sd.ScaledArray) or array.tensor_scale is None else 4
        stored = array.nbytes - replicated
        assert [report[name][0] for report in reports] == [stored // PROCESSES + replicated] * PROCESSES
        codes = np.asarray(jax.tree.leaves(array)[0])
        assert [report[name][1] for report in reports] == [zlib.crc32(q.tobytes()) for q in np.split(codes, PROCESSES)]
