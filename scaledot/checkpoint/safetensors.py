"""Reads and writes safetensors files: 8 bytes of header length, a JSON header, and the bytes of the tensors.

The header is checked completely before a tensor is read: dtypes, shapes against byte counts, and that the tensors
cover the rest of the file without gaps or overlaps, as the specification of the format demands.
"""

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from scaledot.checkpoint import dtypes, lazy
from scaledot.checkpoint.errors import CheckpointError, quoted
from scaledot.checkpoint.json_text import MAX_BYTES, parse_object
from scaledot.checkpoint.lazy import LazyArray
from scaledot.checkpoint.reader import Reader

_LENGTH = struct.Struct("<Q")
_MAX_BYTES = 2**63 - 1  # of NumPy, which does not count axes of size 0


class StoredTensor(NamedTuple):
    """A tensor of a file: its dtype as named in the header, its logical shape, and its byte range in the file."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    def array(self, reader: Reader) -> LazyArray:
        """The tensor; packed sub-byte dtypes as the bytes of the file along the last axis."""
        bits = dtypes.bits(self.dtype)
        if self.dtype == "BOOL":  # NumPy counts bytes other than 0 and 1 wrongly
            octets = lazy.stored(reader, self.path, self.start, np.dtype(np.uint8), self.shape)
            return octets.map(lambda some: some != 0, np.bool_)
        if bits % 8 == 0:
            return lazy.stored(reader, self.path, self.start, dtypes.DTYPES[self.dtype], self.shape)
        *leading, last = self.shape or (1,)
        if last * bits % 8:
            raise CheckpointError(
                self.path, f"rows of {last} elements of {bits} bits are no whole bytes", tensor=self.name
            )
        octets = lazy.stored(reader, self.path, self.start, np.dtype(np.uint8), (*leading, last * bits // 8))
        if bits == 4:
            return lazy.nibbles(octets, dtypes.DTYPES[self.dtype])
        return lazy.bit_stream(octets, bits, last, np.uint8)


class Header(NamedTuple):
    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]


def read_header(path: Path) -> Header:
    """Reads and checks the header of a file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(_LENGTH.size)
        if len(prefix) < _LENGTH.size:
            raise CheckpointError(path, f"a safetensors file has at least 8 bytes, this one has {size}")
        (header_size,) = _LENGTH.unpack(prefix)
        if header_size > min(size - _LENGTH.size, MAX_BYTES):
            raise CheckpointError(
                path,
                f"the header claims {header_size} bytes; the file has {size} and headers have at most {MAX_BYTES}",
            )
        header = parse_object(file.read(header_size), path, "the header")
    metadata = _checked_metadata(path, header.pop("__metadata__", {}))
    data_start = _LENGTH.size + header_size
    tensors = {name: _checked_tensor(path, name, record, data_start) for name, record in header.items()}
    _check_covers(path, tensors, data_start, size)
    return Header(tensors, metadata)


def _checked_metadata(path: Path, metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(path, "`__metadata__` must be an object of strings")
    return metadata


def _checked_tensor(path: Path, name: str, record: Any, data_start: int) -> StoredTensor:
    def fail(reason: str):
        raise CheckpointError(path, reason, tensor=name)

    if not isinstance(record, dict) or set(record) != {"dtype", "shape", "data_offsets"}:
        fail(f"expected an object of dtype, shape and data_offsets, not {quoted(record)}")
    dtype, shape, offsets = record["dtype"], record["shape"], record["data_offsets"]
    if not isinstance(dtype, str) or dtype not in dtypes.DTYPES:
        fail(f"unknown dtype {quoted(dtype)}; safetensors has {', '.join(dtypes.DTYPES)}")
    if not _are_sizes(shape) or len(shape) > 32:
        fail(f"`shape` must be a list of at most 32 integers of at least 0, not {quoted(shape)}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        fail(f"`data_offsets` must be two ascending integers of at least 0, not {quoted(offsets)}")
    if math.prod(size or 1 for size in shape) * dtypes.DTYPES[dtype].itemsize > _MAX_BYTES:
        fail(f"{dtype}{quoted(shape)} is too large: sizes other than 0 give more than 2^63 - 1 bytes")
    bits = math.prod(shape) * dtypes.bits(dtype)
    if bits != 8 * (offsets[1] - offsets[0]):
        fail(f"{dtype}{shape} takes {bits / 8:g} bytes; `data_offsets` are {quoted(offsets)}")
    return StoredTensor(path, name, dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_covers(path: Path, tensors: Mapping[str, StoredTensor], data_start: int, size: int) -> None:
    end = data_start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.stop)):
        if tensor.start != end:
            kind = "overlap those of" if tensor.start < end else "leave a gap after"
            raise CheckpointError(
                path,
                f"its bytes, from {quoted(tensor.start)} on, {kind} the tensor before it, which ends at {quoted(end)}",
                tensor=tensor.name,
            )
        end = tensor.stop
    if end != size:
        raise CheckpointError(path, f"the tensors end at byte {quoted(end)}, the file at byte {size}")


class Pending(NamedTuple):
    """A tensor to write: its dtype and logical shape, and the bytes, in pieces that are computed when written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Iterable[np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * dtypes.bits(self.dtype) // 8


def write(file: BinaryIO, tensors: list[Pending], metadata: Mapping[str, str]) -> None:
    """Writes a file; the bytes of each tensor are computed and written one after the other."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the specification aligns the first tensor to 8 bytes
    file.write(_LENGTH.pack(len(text)) + text)
    for tensor in tensors:
        written = 0
        for piece in tensor.pieces:
            written += file.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
        assert written == tensor.nbytes, f"{tensor.name}: {written} bytes, not {tensor.nbytes}"
    file.flush()
    os.fsync(file.fileno())
