"""Reads the header of GGUF files."""

from pathlib import Path
from typing import Any, NamedTuple


class GgufTensor(NamedTuple):
    path: Path
    name: str
    type: int
    shape: tuple[int, ...]
    start: int
    stop: int


class GgufHeader(NamedTuple):
    tensors: dict[str, GgufTensor]
    metadata: dict[str, Any]


def read_header(path: Path) -> GgufHeader:
    raise NotImplementedError
