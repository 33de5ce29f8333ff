"""Low-precision tensors, matmuls and training for JAX: one array type for every format.

Its values are `decoded codes x broadcast scale`.

>>> import jax.numpy as jnp, scaledot as sd
>>> q = sd.quantize(jnp.ones((4, 64)), "mxfp8")
>>> q.nbytes, sd.dequantize(q).shape
(264, (4, 64))

Names are imported on first use, so that `scaledot.formats` can be used without jax.
"""

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scaledot import (
        checkpoint,
        checkpoint_policies,
        format_variants,
        linen,
        lora,
        nnx,
        orbax,
        recipes,
        schedules,
        state,
        train,
        transform,
    )
    from scaledot.array import ScaledArray
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
    from scaledot.parallel import collective_matmul, sharding
    from scaledot.recipes import RECIPES, Cast, Delayed, Gemm, Recipe, find_recipe
    from scaledot.state import init_state

__version__ = "0.1.0"

_SUBMODULES = {
    "checkpoint": "checkpoint",
    "checkpoint_policies": "checkpoint_policies",
    "collective_matmul": "parallel.collective_matmul",
    "format_variants": "format_variants",
    "linen": "linen",
    "lora": "lora",
    "nnx": "nnx",
    "orbax": "orbax",
    "recipes": "recipes",
    "schedules": "schedules",
    "sharding": "parallel.sharding",
    "state": "state",
    "train": "train",
    "transform": "transform",
}

_MODULE_OF = {
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
    "find_recipe": "recipes",
    "init_state": "state",
    "matmul": "ops.dot",
    "quantize": "ops.quantize",
    "quantize_both": "ops.quantize",
    "quantize_dbias": "ops.quantize",
    "quantize_grouped": "ops.quantize",
    "ragged_dot": "ops.ragged",
    "ragged_dot_general": "ops.ragged",
    "requantize": "ops.quantize",
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
    "checkpoint",
    "checkpoint_policies",
    "collective_matmul",
    "conv_general_dilated",
    "dequantize",
    "dot_general",
    "einsum",
    "explain",
    "find_format",
    "find_recipe",
    "format_variants",
    "init_state",
    "linen",
    "lora",
    "matmul",
    "nnx",
    "orbax",
    "quantize",
    "quantize_both",
    "quantize_dbias",
    "quantize_grouped",
    "ragged_dot",
    "ragged_dot_general",
    "recipes",
    "requantize",
    "schedules",
    "sharding",
    "state",
    "train",
    "transform",
]


def __getattr__(name: str):
    if name in _SUBMODULES:
        return importlib.import_module(f"scaledot.{_SUBMODULES[name]}")
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(f"scaledot.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value
    deprecated = importlib.import_module("scaledot.deprecated")
    if name in deprecated.ATTRIBUTES:
        module, _, attribute = deprecated.current("scaledot attribute", name, deprecated.ATTRIBUTES).rpartition(".")
        return getattr(importlib.import_module(f"scaledot.{module}" if module else __name__), attribute)
    raise AttributeError(f"module 'scaledot' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})


if sys.modules.get("jax") is not None:  # registers the pytree types, for jax.export.deserialize
    for _module in ("array", "state"):
        importlib.import_module(f"scaledot.{_module}")
