"""Writes small checkpoints, compares loaded ones bit for bit with golden values, and reads slices of their tensors."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from scaledot import checkpoint
from scaledot.checkpoint import dtypes, safetensors
from scaledot.checkpoint.layouts import entries
from scaledot.checkpoint.lazy import LazyArray
from scaledot.checkpoint.source import open_source

GOLDEN = Path(__file__).parent / "golden" / "hf"
E4M3, E5M2, E8M0 = (np.dtype(getattr(ml_dtypes, name)) for name in ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"))
E2M1, BF16 = np.dtype(ml_dtypes.float4_e2m1fn), np.dtype(ml_dtypes.bfloat16)


def golden(*prefixes: str) -> list[str]:
    return sorted(folder.name for folder in GOLDEN.iterdir() if folder.name.startswith(prefixes))


def write(folder: Path, tensors: Mapping[str, np.ndarray], quantization: Mapping[str, Any] | None = None) -> Path:
    """Writes `model.safetensors` and, with `quantization`, a `config.json` of a bfloat16 model."""
    pending = [
        safetensors.Pending(name, dtypes.NAMES[array.dtype], array.shape, [array]) for name, array in tensors.items()
    ]
    with (folder / "model.safetensors").open("wb") as file:
        safetensors.write(file, pending, {})
    if quantization is not None:
        config = {"torch_dtype": "bfloat16", "quantization_config": quantization}
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def random_codes(shape: tuple[int, ...], dtype, seed: int = 0) -> np.ndarray:
    """Codes of all bits except NaN."""
    values = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    if dtype == E4M3:
        values &= 0xFE  # 0x7F and 0xFF are NaN
    return values.view(dtype)


def random_scales(shape: tuple[int, ...], dtype, seed: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if dtype == np.uint8:
        return rng.integers(110, 130, shape, np.uint8)
    return rng.uniform(0.01, 1, shape).astype(dtype)


def nibbles(packed: np.ndarray) -> np.ndarray:
    """The values of E2M1 codes, the even one in the low nibble."""
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    codes = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), np.uint8)
    codes[..., ::2], codes[..., 1::2] = packed.view(np.uint8) & 15, packed.view(np.uint8) >> 4
    return table[codes]


def repeated(scale: np.ndarray, block: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    """Scales in float32, each repeated over its block of the last axes; blocks at the end may be short."""
    scale = np.asarray(scale)
    values = np.exp2(scale.astype(np.float32) - 127) if scale.dtype == np.uint8 else scale.astype(np.float32)
    for axis, size in zip(range(-len(block), 0), block, strict=True):
        values = np.repeat(values, size, axis)
    return values[tuple(slice(0, size) for size in shape)]


def assert_same_bits(array, expected: np.ndarray, dtype) -> None:
    """Compares an array of `dtype` with float32 values that `dtype` represents, including signs of zeros."""
    assert array.dtype == np.dtype(dtype)
    got = np.asarray(array).astype(np.float32)
    np.testing.assert_array_equal(got.view(np.uint32), expected.astype(np.float32).view(np.uint32))


def assert_dequantizes_to(folder: Path, name: str, values: np.ndarray, dtype=BF16) -> None:
    """Compares a weight, loaded and then dequantised as well as dequantised while loading, with float32 `values`."""
    expected = values.astype(dtype).astype(np.float32)
    loaded = checkpoint.load(folder)[name]
    assert_same_bits(checkpoint.dequantize(loaded, dtype), expected, dtype)
    assert_same_bits(checkpoint.load(folder, dequantize=dtype, include=name)[name], expected, dtype)


def assert_golden(name: str) -> None:
    """Compares every weight of a golden checkpoint with the values that its library decodes, in the library's dtype."""
    folder = GOLDEN / name
    dtype = dtypes.named(json.loads((folder / "meta.json").read_text())["expected_dtype"])
    expected = np.load(folder / "expected.npz")
    assert len(expected)
    for weight in expected:
        assert_dequantizes_to(folder, weight, expected[weight], dtype)


def lazy_leaves(folder: Path) -> dict[str, LazyArray]:
    """Every leaf of a checkpoint by the path of its entry and of the leaf."""
    found = jax.tree_util.tree_leaves_with_path(
        entries(open_source(folder)), is_leaf=lambda node: isinstance(node, LazyArray)
    )
    return {jax.tree_util.keystr(path): leaf for path, leaf in found}


def assert_slices_agree(folder: Path, seed: int, count: int = 20) -> None:
    """Compares random slices of every leaf, and of its packed bytes, with those of the whole array."""
    rng = np.random.default_rng(seed)
    for path, leaf in lazy_leaves(folder).items():
        for array in (leaf, leaf.packed):
            whole = None if array is None else array.numpy()
            for _ in range(0 if array is None else count):
                index = tuple(slice(*map(int, np.sort(rng.integers(0, size + 1, 2)))) for size in array.shape)
                some = array.read(index)
                assert (some.dtype, some.shape) == (array.dtype, whole[index].shape), path
                assert some.tobytes() == np.ascontiguousarray(whole[index]).tobytes(), (path, index)
