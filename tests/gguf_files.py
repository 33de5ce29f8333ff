"""Writes GGUF files for tests, also wrong ones."""

import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

TYPE_NUMBERS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13}
TYPE_NUMBERS |= {"Q6_K": 14, "I8": 24, "I16": 25, "I32": 26, "I64": 27, "F64": 28, "BF16": 30, "MXFP4": 39, "NVFP4": 40}
_PYTHON_VALUES = {bool: (7, "<?"), int: (4, "<I"), float: (6, "<f")}


class Tensor(NamedTuple):
    """A tensor of a file; `offset` and `type` replace those that the writer would choose."""

    name: str
    type: str | int
    shape: tuple[int, ...]
    octets: bytes
    offset: int | None = None


def string(text: str | bytes) -> bytes:
    octets = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(octets)) + octets


def value(item: Any) -> tuple[int, bytes]:
    """The number of the type and the bytes of a value; an array is a tuple."""
    if isinstance(item, tuple):
        code = value(item[0])[0]
        return 9, struct.pack("<IQ", code, len(item)) + b"".join(value(each)[1] for each in item)
    if isinstance(item, str | bytes):
        return 8, string(item)
    code, layout = _PYTHON_VALUES[type(item)]
    return code, struct.pack(layout, item)


def pair(key: str, item: Any) -> bytes:
    code, octets = value(item)
    return string(key) + struct.pack("<I", code) + octets


def record(tensor: Tensor, offset: int) -> bytes:
    number = TYPE_NUMBERS[tensor.type] if isinstance(tensor.type, str) else tensor.type
    sizes = struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape))
    return string(tensor.name) + struct.pack("<I", len(tensor.shape)) + sizes + struct.pack("<IQ", number, offset)


def file_bytes(*tensors: Tensor, pairs: tuple[bytes, ...] = (), version: int = 3, alignment: int = 32) -> bytes:
    data, records = b"", []
    for tensor in tensors:
        records.append(record(tensor, len(data) if tensor.offset is None else tensor.offset))
        data += tensor.octets + bytes(-len(tensor.octets) % alignment)
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs)) + b"".join((*pairs, *records))
    return header + bytes(-len(header) % alignment) + data


def write(folder: Path, *tensors: Tensor, **options) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(file_bytes(*tensors, **options))
    return path


def plain(name: str, type: str, array: np.ndarray) -> Tensor:
    return Tensor(name, type, array.shape, array.tobytes())
