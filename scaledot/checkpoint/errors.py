"""The error of files that cannot be read as a checkpoint."""

from os import PathLike
from typing import Any


class CheckpointError(ValueError):
    """A file is damaged, or its content is not supported; the message names the file and, where known, the tensor."""

    def __init__(self, path: str | PathLike[str], reason: str, *, tensor: str | None = None):
        super().__init__(f"{path}: {reason}" if tensor is None else f"{path}: tensor {quoted(tensor)}: {reason}")


def quoted(value: Any, limit: int = 200) -> str:
    """The repr of a value from a file, cut to a length that suits an error message."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}…"
