"""Checked entries of `quantization_config`."""

from typing import Any

from scaledot.checkpoint.errors import CheckpointError, quoted
from scaledot.checkpoint.source import Source


def setting(source: Source, *keys: str, among: tuple[Any, ...], default: Any) -> Any:
    """The value of the first of `keys` that is in the configuration; raises CheckpointError unless it is in `among`."""
    key = next((key for key in keys if key in source.quantization), None)
    value = default if key is None else source.quantization[key]
    if not any(type(value) is type(choice) and value == choice for choice in among):
        expected = ", ".join(map(repr, among))
        raise CheckpointError(source.path, f"`{key}` {quoted(value)} is not supported; expected one of {expected}")
    return value


def group_size(source: Source, *keys: str) -> int:
    """The elements along the inputs that share a scale, or -1 for all of them."""
    key = next((key for key in keys if key in source.quantization), keys[0])
    size = source.quantization.get(key)
    if type(size) is not int or (size != -1 and size < 1):
        raise CheckpointError(source.path, f"`{key}` must be a positive integer or -1, not {quoted(size)}")
    return size
