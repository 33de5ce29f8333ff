"""Writes scaledot's own layout, which stores every format losslessly.

Codes have the name of the weight; `NAME.scale`, `NAME.tensor_scale` and `NAME.zero` are its other arrays. Static
fields, and the dtypes and shapes of all arrays, are JSON in the `__metadata__` of the file, under `scaledot:NAME`.
Arrays of a dtype that safetensors lacks are stored as bytes: 4-bit codes in pairs, the even element low, if the last
axis is even, and other codes one per byte.
"""

import json
from typing import Any

import numpy as np

from scaledot import serialization
from scaledot.array import ScaledArray
from scaledot.checkpoint import dtypes, forms
from scaledot.checkpoint.writers.parts import PACKED_DTYPES, Contents, Part, Written, packed_nibbles

VERSION_KEY, VERSION = "scaledot", "1"
PREFIX = f"{VERSION_KEY}:"


def plan(contents: Contents) -> Written:
    if contents.activations is not None:
        raise ValueError("layout 'scaledot' does not describe activations; omit `activations`")
    records = {PREFIX + name: json.dumps(_record(weight)) for name, weight in contents.weights.items()}
    return Written(
        {name: _parts(name, weight) for name, weight in contents.weights.items()},
        metadata={VERSION_KEY: VERSION, **records},
    )


def _record(weight: Any) -> dict[str, Any]:
    q = weight if isinstance(weight, ScaledArray) else weight.array
    record = json.loads(serialization.to_json(**serialization.static_fields(q)))
    arrays = {field: [np.dtype(array.dtype).name, list(array.shape)] for field, array in _arrays(weight).items()}
    record |= {"form": type(weight).__name__, "arrays": arrays}
    return record | ({"shape": list(weight.shape)} if isinstance(weight, forms.Flat) else {})


def _arrays(weight: Any) -> dict[str, Any]:
    """The arrays of a weight by field; those of a form follow those of its ScaledArray."""
    if isinstance(weight, ScaledArray):
        fields = ("data", "scale", "tensor_scale", "zero")
        return {field: getattr(weight, field) for field in fields if getattr(weight, field) is not None}
    own = ("permutation", "offset")
    return _arrays(weight.array) | {field: getattr(weight, field) for field in own if hasattr(weight, field)}


def _parts(name: str, weight: Any) -> list[Part]:
    return [
        _part(name if field == "data" else f"{name}.{field}", field, array) for field, array in _arrays(weight).items()
    ]


def _part(name: str, field: str, array: Any) -> Part:
    dtype, shape = np.dtype(array.dtype), tuple(array.shape)

    def extract(weight: Any) -> Any:
        return _arrays(weight)[field]

    if is_packed(dtype.name, shape):
        packed = packed_nibbles(name, shape)
        return packed._replace(extract=lambda weight: packed.extract(extract(weight)))
    if dtype in dtypes.NAMES and dtype.name not in PACKED_DTYPES:
        return Part(name, dtypes.NAMES[dtype], shape, lambda weight: np.asarray(extract(weight)))
    return Part(name, "U8", shape, lambda weight: np.asarray(extract(weight)).view(np.uint8))


def is_packed(dtype: str, shape: tuple[int, ...]) -> bool:
    """Whether codes are stored in pairs.

    >>> is_packed("int4", (2, 64)), is_packed("int4", (2, 63))
    (True, False)
    """
    return dtype in PACKED_DTYPES and bool(shape) and shape[-1] % 2 == 0
