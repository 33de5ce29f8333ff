"""The safetensors package reads tensors that we write, and we read those that it writes, in every dtype."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import peers
import pytest
import safetensors.numpy
import safetensors.torch
import torch

import scaledot as sd
from scaledot import checkpoint
from scaledot.checkpoint import dtypes
from scaledot.checkpoint.source import open_source

# PyTorch and NumPy have no 6-bit dtypes. PyTorch's 4-bit dtype is tested below.
WITH_TORCH_DTYPE = [name for name in dtypes.DTYPES if dtypes.bits(name) >= 8]
NUMPY_READS = [name for name in WITH_TORCH_DTYPE if not name.startswith("F8")]  # BF16 by way of ml_dtypes


def octets(dtype: np.dtype, shape=(3, 8)) -> np.ndarray:
    """An array of random bits; booleans are 0 and 1."""
    bits = np.random.default_rng(0).integers(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), np.uint8)
    return (bits & 1 if dtype == np.bool_ else bits).view(dtype)


def saved(array: np.ndarray, folder) -> str:
    checkpoint.save({"x": array}, folder)
    return folder / "model.safetensors"


def read(file) -> np.ndarray:
    """The tensor `x` of a file, whatever its dtype: `load` would refuse codes that belong to no weight."""
    source = open_source(file)
    return source.tensors["x"].array(source.reader).numpy()


@pytest.mark.parametrize("name", WITH_TORCH_DTYPE)
def test_torch_tensors_go_both_ways(name, tmp_path):
    array = octets(dtypes.DTYPES[name])
    peers.assert_same_bits(safetensors.torch.load_file(saved(array, tmp_path / "ours"))["x"], array)
    safetensors.torch.save_file({"x": peers.as_torch(array)}, tmp_path / "theirs.safetensors")
    found = read(tmp_path / "theirs.safetensors")
    assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())


@pytest.mark.parametrize("name", NUMPY_READS)
def test_numpy_arrays_go_both_ways(name, tmp_path):
    array = octets(dtypes.DTYPES[name])
    found = safetensors.numpy.load_file(saved(array, tmp_path / "ours"))["x"]
    assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())
    safetensors.numpy.save_file({"x": array}, tmp_path / "theirs.safetensors")
    found = read(tmp_path / "theirs.safetensors")
    assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0, 3), (2, 3, 4, 5)], ids=str)
def test_shapes_go_both_ways(shape, tmp_path):
    array = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    assert safetensors.numpy.load_file(saved(array, tmp_path / "ours"))["x"].shape == shape
    safetensors.numpy.save_file({"x": array}, tmp_path / "theirs.safetensors")
    assert read(tmp_path / "theirs.safetensors").shape == shape


def test_4_bit_tensors_of_torch_are_read_with_their_logical_shape(tmp_path):
    packed = octets(np.dtype(np.uint8))
    safetensors.torch.save_file(
        {"x": torch.from_numpy(packed).view(torch.float4_e2m1fn_x2)}, tmp_path / "x.safetensors"
    )
    found = read(tmp_path / "x.safetensors")
    expected = np.stack([packed & 15, packed >> 4], axis=-1).reshape(3, 16).view(ml_dtypes.float4_e2m1fn)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found.view(np.uint8), expected.view(np.uint8))


def test_the_shards_and_the_index_of_a_folder_are_those_that_transformers_expects(tmp_path):
    tree = {f"w{i}.weight": sd.quantize(peers.example(seed=i), "fp8_e4m3") for i in range(4)}
    checkpoint.save(tree, tmp_path, "hf-fp8", max_shard_bytes=60_000)
    found = peers.tensors(tmp_path)
    assert found.keys() == {f"w{i}.weight{end}" for i in range(4) for end in ("", "_scale_inv")}
    for name, q in tree.items():
        peers.assert_same_bits(found[name], q.data)
        peers.assert_same_bits(found[f"{name}_scale_inv"], jnp.reshape(q.scale, ()))
