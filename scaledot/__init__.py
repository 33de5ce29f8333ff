"""Low-precision tensors for JAX: one array, `codes x broadcast scale`, for every format.

>>> import jax.numpy as jnp, scaledot as sd
>>> q = sd.quantize(jnp.ones((4, 64)), "mxfp8")
>>> q.nbytes, sd.dequantize(q).shape
(264, (4, 64))

Names are loaded when first used, so that `scaledot.formats` needs no jax.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scaledot.array import ScaledArray
    from scaledot.formats import FORMATS, Format, Quirks, find_format
    from scaledot.numerics.hadamard import Hadamard
    from scaledot.ops.quantize import (
        amax,
        dequantize,
        quantize,
        quantize_both,
        quantize_dbias,
        quantize_grouped,
        requantize,
    )

__version__ = "0.1.0"

_HOMES = {
    "FORMATS": "formats",
    "Format": "formats",
    "Hadamard": "numerics.hadamard",
    "Quirks": "formats",
    "ScaledArray": "array",
    "amax": "ops.quantize",
    "dequantize": "ops.quantize",
    "find_format": "formats",
    "quantize": "ops.quantize",
    "quantize_both": "ops.quantize",
    "quantize_dbias": "ops.quantize",
    "quantize_grouped": "ops.quantize",
    "requantize": "ops.quantize",
}

__all__ = [
    "FORMATS",
    "Format",
    "Hadamard",
    "Quirks",
    "ScaledArray",
    "amax",
    "dequantize",
    "find_format",
    "quantize",
    "quantize_both",
    "quantize_dbias",
    "quantize_grouped",
    "requantize",
]


def __getattr__(name: str):
    if name in _HOMES:
        value = getattr(importlib.import_module(f"scaledot.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'scaledot' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
