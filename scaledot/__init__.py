"""Low-precision tensors for JAX: one array, `codes x broadcast scale`, for every format.

>>> import jax.numpy as jnp, scaledot as sd
>>> q = sd.quantize(jnp.ones((4, 64)), "mxfp8")
>>> q.nbytes, sd.dequantize(q).shape
(264, (4, 64))

Names are loaded when first used, so that `scaledot.formats` needs no jax.
"""

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scaledot import checkpoint_policies, flavours, orbax, recipes, state, train
    from scaledot.array import ScaledArray
    from scaledot.compat.jax_nn import get_scaled_dot_general_config, scaled_dot_general, scaled_matmul
    from scaledot.formats import FORMATS, Format, Quirks, find_format
    from scaledot.numerics.hadamard import Hadamard
    from scaledot.ops.conv import conv_general_dilated
    from scaledot.ops.dot import dot_general, matmul
    from scaledot.ops.einsum import einsum
    from scaledot.ops.explain import explain
    from scaledot.ops.quantize import (
        amax,
        dequantize,
        quantize,
        quantize_both,
        quantize_dbias,
        quantize_grouped,
        requantize,
    )
    from scaledot.ops.ragged import ragged_dot, ragged_dot_general
    from scaledot.parallel import collective, sharding
    from scaledot.recipes import RECIPES, Cast, Delayed, Gemm, Recipe
    from scaledot.state import init_state

__version__ = "0.1.0"

_ROOMS = {
    "checkpoint_policies": "checkpoint_policies",
    "collective": "parallel.collective",
    "flavours": "flavours",
    "linen": "linen",
    "nnx": "nnx",
    "orbax": "orbax",
    "recipes": "recipes",
    "sharding": "parallel.sharding",
    "state": "state",
    "train": "train",
}

_HOMES = {
    "Cast": "recipes",
    "Delayed": "recipes",
    "FORMATS": "formats",
    "Format": "formats",
    "Gemm": "recipes",
    "Hadamard": "numerics.hadamard",
    "Quirks": "formats",
    "RECIPES": "recipes",
    "Recipe": "recipes",
    "ScaledArray": "array",
    "amax": "ops.quantize",
    "conv_general_dilated": "ops.conv",
    "dequantize": "ops.quantize",
    "dot_general": "ops.dot",
    "einsum": "ops.einsum",
    "explain": "ops.explain",
    "find_format": "formats",
    "get_scaled_dot_general_config": "compat.jax_nn",
    "init_state": "state",
    "matmul": "ops.dot",
    "quantize": "ops.quantize",
    "quantize_both": "ops.quantize",
    "quantize_dbias": "ops.quantize",
    "quantize_grouped": "ops.quantize",
    "ragged_dot": "ops.ragged",
    "ragged_dot_general": "ops.ragged",
    "requantize": "ops.quantize",
    "scaled_dot_general": "compat.jax_nn",
    "scaled_matmul": "compat.jax_nn",
}

__all__ = [
    "FORMATS",
    "RECIPES",
    "Cast",
    "Delayed",
    "Format",
    "Gemm",
    "Hadamard",
    "Quirks",
    "Recipe",
    "ScaledArray",
    "amax",
    "checkpoint_policies",
    "collective",
    "conv_general_dilated",
    "dequantize",
    "dot_general",
    "einsum",
    "explain",
    "find_format",
    "flavours",
    "get_scaled_dot_general_config",
    "init_state",
    "matmul",
    "orbax",
    "quantize",
    "quantize_both",
    "quantize_dbias",
    "quantize_grouped",
    "ragged_dot",
    "ragged_dot_general",
    "recipes",
    "requantize",
    "scaled_dot_general",
    "scaled_matmul",
    "sharding",
    "state",
    "train",
]


def __getattr__(name: str):
    if name in _ROOMS:
        return importlib.import_module(f"scaledot.{_ROOMS[name]}")
    if name in _HOMES:
        value = getattr(importlib.import_module(f"scaledot.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'scaledot' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})


if sys.modules.get("jax") is not None:  # for jax.export.deserialize in a process that has not used these types yet
    for _home in ("array", "state"):
        importlib.import_module(f"scaledot.{_home}")
