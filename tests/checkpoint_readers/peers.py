"""Opens checkpoints with safetensors' reader, and compares tensors of PyTorch with arrays of JAX bit for bit."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from safetensors import safe_open


def example(shape: tuple[int, int] = (96, 256), dtype=jnp.bfloat16, seed: int = 0) -> jax.Array:
    """A random weight whose rows differ in magnitude, with a row of zeros."""
    rows = jnp.exp2(jnp.arange(shape[0]) % 9 - 4).astype(dtype).at[-1].set(0)
    return jax.random.normal(jax.random.key(seed), shape, dtype) * rows[:, None]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder by name."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dict
    return found


def of_module(found: dict[str, torch.Tensor], module: str) -> dict[str, torch.Tensor]:
    """The tensors of a module, by their names in it."""
    return {name.removeprefix(f"{module}."): x for name, x in found.items() if name.startswith(f"{module}.")}


def quantization_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def as_torch(array: Any) -> torch.Tensor:
    """A copy of an array as a tensor of the same dtype, by its bytes."""
    array = np.asarray(array)
    dtype = getattr(torch, array.dtype.name)
    return torch.frombuffer(bytearray(array.tobytes()), dtype=dtype).reshape(array.shape)


def jax_dtype(tensor: torch.Tensor) -> np.dtype:
    return jnp.dtype(str(tensor.dtype).removeprefix("torch."))


def assert_same_bits(tensor: torch.Tensor, array: Any) -> None:
    array = np.asarray(array)
    assert (jax_dtype(tensor), tuple(tensor.shape)) == (array.dtype, array.shape)
    octets = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    np.testing.assert_array_equal(octets, np.frombuffer(array.tobytes(), np.uint8))


def assert_close(tensor: torch.Tensor, array: Any, relative: float) -> None:
    """Compares values, each with a relative error of at most `relative`."""
    np.testing.assert_allclose(tensor.float().numpy(), np.asarray(array, np.float32), rtol=relative, atol=0)
