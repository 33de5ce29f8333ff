"""Reads scaledot's own layout; see `scaledot.checkpoint.writers.native`."""

from typing import Any

import ml_dtypes
import numpy as np

from scaledot import serialization
from scaledot.array import ScaledArray
from scaledot.checkpoint import dtypes, forms, lazy
from scaledot.checkpoint.errors import CheckpointError, quoted
from scaledot.checkpoint.json_text import parse_object
from scaledot.checkpoint.lazy import LazyArray
from scaledot.checkpoint.source import Source
from scaledot.checkpoint.tensors import Tensors
from scaledot.checkpoint.writers.native import PREFIX, VERSION_KEY, is_packed

RESERVED: tuple[str, ...] = ()
PLAIN_DTYPES = tuple(dtypes.DTYPES)
_FIELDS = ("data", "scale", "tensor_scale", "zero")
_FORMS = {"ScaledArray": None, "Permuted": "permutation", "Offset": "offset", "Flat": None}


def matches(source: Source) -> bool:
    return VERSION_KEY in source.metadata


def weights(tensors: Tensors) -> dict[str, Any]:
    records = {
        key.removeprefix(PREFIX): text for key, text in tensors.source.metadata.items() if key.startswith(PREFIX)
    }
    return {name: _weight(tensors, name, text) for name, text in records.items()}


def _weight(tensors: Tensors, name: str, text: str) -> Any:
    record = parse_object(text.encode(), tensors.source.path, f"the metadata of {quoted(name)}")
    try:
        form, arrays = record.pop("form"), record.pop("arrays")
        shape = tuple(record.pop("shape", ()))
        static = serialization.from_record(record)
        types = {field: (_dtype(dtype), tuple(map(int, sizes))) for field, (dtype, sizes) in arrays.items()}
        fields = {*_FIELDS, _FORMS[form]} - {None}
        if not types.keys() <= fields or types["data"][0] != static["format"].code_dtype:
            raise ValueError(f"its arrays are {quoted(arrays)}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(tensors.source.path, f"invalid metadata: {error!r}", tensor=name) from error
    read = {field: _array(tensors, name, field, *type) for field, type in types.items()}
    array = ScaledArray(**{field: read.get(field) for field in _FIELDS}, **static)
    if form == "Flat":
        return forms.Flat(array, shape)
    return array if form == "ScaledArray" else getattr(forms, form)(array, read[_FORMS[form]])


def _array(tensors: Tensors, name: str, field: str, dtype: np.dtype, shape: tuple[int, ...]) -> LazyArray:
    stored_name = name if field == "data" else f"{name}.{field}"
    if is_packed(dtype.name, shape):
        octets = tensors.take(stored_name, "U8", shape=(*shape[:-1], shape[-1] // 2), required_by=name)
        return lazy.nibbles(octets, dtype)
    if dtypes.bits(dtypes.NAMES.get(dtype, "U8")) % 8 == 0 and dtype in dtypes.NAMES:
        return tensors.take(stored_name, dtypes.NAMES[dtype], shape=shape, required_by=name)
    return tensors.take(stored_name, "U8", shape=shape, required_by=name).view(dtype)


def _dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))
