"""Reads the header of GGUF files, versions 2 and 3: key-value pairs and the type, shape and place of each tensor.

Nothing that the file claims is trusted: counts and lengths are compared with the bytes that are left before anything is
allocated, and tensors must be aligned, within the file and disjoint. Only the header is read.
"""

import math
import struct
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

import numpy as np

from scaledot.checkpoint import dtypes, lazy
from scaledot.checkpoint.errors import CheckpointError, quoted
from scaledot.checkpoint.lazy import LazyArray
from scaledot.checkpoint.reader import Reader

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 2**28  # tokenizers of 10^6 tokens take less than 2^26
MAX_STRINGS = 4_000_000
MAX_NAME_BYTES = 65535  # the specification's limit for keys
_MAX_AXES = 4
_MAX_DEPTH = 8
_MAX_ELEMENTS = 2**60 - 1  # of NumPy, which does not count axes of size 0, for 8 bytes each
_DEFAULT_ALIGNMENT = 32
_BUFFER_BYTES = 2**20


class BlockType(NamedTuple):
    """A type of GGUF tensors: rows are cut into blocks of `elements` elements that take `nbytes` bytes."""

    name: str
    elements: int
    nbytes: int


TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    24: BlockType("I8", 1, 1),
    25: BlockType("I16", 1, 2),
    26: BlockType("I32", 1, 4),
    27: BlockType("I64", 1, 8),
    28: BlockType("F64", 1, 8),
    30: BlockType("BF16", 1, 2),
    39: BlockType("MXFP4", 32, 17),
    40: BlockType("NVFP4", 64, 36),
}
_OTHER_TYPES = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
}
_SCALARS = {code: struct.Struct(f"<{kind}") for code, kind in zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True)}
_U32, _U64 = _SCALARS[4], _SCALARS[10]
_STRING, _ARRAY = 8, 9
_LEAST_BYTES = {_STRING: 8, _ARRAY: 12, **{code: scalar.size for code, scalar in _SCALARS.items()}}
_LEAST_TENSOR_BYTES = 24  # an empty name, no axes, a type and an offset


class GgufTensor(NamedTuple):
    """A tensor of a file: the number of its type, its shape, the last axis contiguous, and its byte range."""

    path: Path
    name: str
    type: int
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def dtype(self) -> str:
        """The name of the type, which is that of a safetensors dtype if elements are not in blocks."""
        return TYPES[self.type].name

    @property
    def is_blocked(self) -> bool:
        return TYPES[self.type].elements > 1

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    def array(self, reader: Reader) -> LazyArray:
        """The tensor; that of a type with blocks as its bytes (..., blocks along the last axis, bytes of a block)."""
        if not self.is_blocked:
            return lazy.stored(reader, self.path, self.start, dtypes.DTYPES[self.dtype], self.shape)
        _, elements, nbytes = TYPES[self.type]
        *leading, last = self.shape
        return lazy.stored(reader, self.path, self.start, np.dtype(np.uint8), (*leading, last // elements, nbytes))


class GgufHeader(NamedTuple):
    tensors: dict[str, GgufTensor]
    metadata: dict[str, Any]


def read_header(path: Path) -> GgufHeader:
    """Reads and checks the header of a file."""
    with path.open("rb", buffering=_BUFFER_BYTES) as file:
        cursor = _Cursor(path, file, path.stat().st_size)
        _check_version(cursor)
        tensor_count, pair_count = (cursor.number(_U64, f"the number of {what}") for what in ("tensors", "keys"))
        cursor.check_count(tensor_count, _LEAST_TENSOR_BYTES, "tensors")
        cursor.check_count(pair_count, _LEAST_BYTES[_STRING] + 4, "keys")
        metadata = _read_pairs(cursor, pair_count)
        records = [_read_record(cursor) for _ in range(tensor_count)]
    alignment = _alignment(path, metadata)
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for record in records:
        if record.name in tensors:
            raise CheckpointError(path, "the name occurs twice", tensor=record.name)
        tensors[record.name] = _placed(path, record, data_start, alignment, cursor.size)
    _check_disjoint(tensors)
    _check_whole(path, metadata)
    return GgufHeader(tensors, metadata)


class _Cursor:
    """Reads a file from its start; raises CheckpointError before it would read past its end or MAX_HEADER_BYTES."""

    def __init__(self, path: Path, file: BinaryIO, size: int):
        self.path, self.size, self.position = path, size, 0
        self._file = file
        self._limit = min(size, MAX_HEADER_BYTES)
        self._strings = 0

    def fail(self, reason: str) -> NoReturn:
        raise CheckpointError(self.path, reason)

    def take(self, count: int, what: str) -> bytes:
        if count > self._limit - self.position:
            bound = f"the file has {self.size}, of which headers take at most {MAX_HEADER_BYTES}"
            self.fail(f"{what} takes {count} bytes at byte {self.position}; {bound}")
        octets = self._file.read(count)
        if len(octets) < count:
            self.fail(f"the file ends at byte {self.position + len(octets)}, within {what}")
        self.position += count
        return octets

    def number(self, scalar: struct.Struct, what: str) -> Any:
        return scalar.unpack(self.take(scalar.size, what))[0]

    def string(self, what: str, limit: int | None = None) -> bytes:
        length = self.number(_U64, f"the length of {what}")
        if limit is not None and length > limit:
            self.fail(f"{what} at byte {self.position} has {length} bytes; at most {limit} are supported")
        return self.take(length, what)

    def name(self, what: str) -> str:
        octets = self.string(what, MAX_NAME_BYTES)
        try:
            return octets.decode()
        except UnicodeDecodeError:
            self.fail(f"{what} {quoted(octets)} is not UTF-8")

    def check_count(self, count: int, least_bytes: int, what: str) -> None:
        left = self._limit - self.position
        if count * least_bytes > left:
            self.fail(f"{count} {what} take at least {count * least_bytes} bytes; the header has at most {left} left")

    def count_strings(self, count: int) -> None:
        self._strings += count
        if self._strings > MAX_STRINGS:
            self.fail(f"arrays have {self._strings} strings and arrays; at most {MAX_STRINGS} are supported")


def _check_version(cursor: _Cursor) -> None:
    magic = cursor.take(4, "the magic number")
    if magic != MAGIC:
        cursor.fail(f"a GGUF file begins with {MAGIC!r}, not {magic!r}")
    version = cursor.number(_U32, "the version")
    if version & 0xFFFF == 0 and version:
        cursor.fail("big-endian GGUF files are not supported; convert it to little-endian")
    if version not in VERSIONS:
        cursor.fail(f"the version is {version}; versions {VERSIONS[0]} and {VERSIONS[1]} are supported")


def _read_pairs(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.name("a key")
        if key in metadata:
            cursor.fail(f"the key {quoted(key)} occurs twice")
        metadata[key] = _read_value(cursor, cursor.number(_U32, f"the type of {quoted(key)}"), key, depth=0)
    return metadata


def _read_value(cursor: _Cursor, code: int, key: str, depth: int) -> Any:
    """A number, a string, or an array: of numbers as a NumPy array, of others as a list."""
    what = f"the value of {quoted(key)}"
    if code in _SCALARS:
        return cursor.number(_SCALARS[code], what)
    if code == _STRING:
        return _text(cursor.string(what))
    if code != _ARRAY:
        cursor.fail(f"{what} has the unknown type {code}")
    if depth == _MAX_DEPTH:
        cursor.fail(f"{what} has arrays in more than {_MAX_DEPTH} levels")
    item_code, count = cursor.number(_U32, what), cursor.number(_U64, what)
    if item_code not in _LEAST_BYTES:
        cursor.fail(f"{what} has items of the unknown type {item_code}")
    cursor.check_count(count, _LEAST_BYTES[item_code], f"items of {quoted(key)}")
    if item_code in _SCALARS:
        dtype = np.dtype(_SCALARS[item_code].format)
        return np.frombuffer(cursor.take(count * dtype.itemsize, what), dtype)
    cursor.count_strings(count)
    if item_code == _STRING:
        return [_text(cursor.string(what)) for _ in range(count)]
    return [_read_value(cursor, _ARRAY, key, depth + 1) for _ in range(count)]


def _text(octets: bytes) -> str:
    """The text of a value; tokens of a vocabulary may be part of a character, whose bytes are kept as surrogates."""
    return octets.decode(errors="surrogateescape")


class _Record(NamedTuple):
    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


def _read_record(cursor: _Cursor) -> _Record:
    name = cursor.name("the name of a tensor")
    what = f"the record of tensor {quoted(name)}"
    axes = cursor.number(_U32, what)
    if axes > _MAX_AXES:
        raise CheckpointError(cursor.path, f"it has {axes} axes; at most {_MAX_AXES} are supported", tensor=name)
    sizes = [cursor.number(_U64, what) for _ in range(axes)]
    return _Record(name, tuple(reversed(sizes)), cursor.number(_U32, what), cursor.number(_U64, what))


def _placed(path: Path, record: _Record, data_start: int, alignment: int, size: int) -> GgufTensor:
    def fail(reason: str) -> NoReturn:
        raise CheckpointError(path, reason, tensor=record.name)

    if record.type not in TYPES:
        known = ", ".join(block_type.name for block_type in TYPES.values())
        fail(f"the type {_OTHER_TYPES.get(record.type, 'unknown')} ({record.type}) is not supported; there are {known}")
    block_type = TYPES[record.type]
    elements = math.prod(record.shape)
    if math.prod(axis or 1 for axis in record.shape) > _MAX_ELEMENTS:
        fail(f"the shape {list(record.shape)} is too large: sizes other than 0 give more than 2^60 - 1 elements")
    if block_type.elements > 1 and (not record.shape or record.shape[-1] % block_type.elements):
        fail(f"rows of shape {list(record.shape)} are no multiple of the {block_type.elements} elements of a block")
    if record.offset % alignment:
        fail(f"the offset {record.offset} is no multiple of the alignment {alignment}")
    start = data_start + record.offset
    stop = start + elements // block_type.elements * block_type.nbytes
    if stop > size:
        fail(f"{block_type.name}{list(record.shape)} ends at byte {stop}; the file has {size} bytes")
    return GgufTensor(path, record.name, record.type, record.shape, start, stop)


def _alignment(path: Path, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1) or alignment > 2**32:
        raise CheckpointError(path, f"`general.alignment` must be a power of two, not {quoted(alignment)}")
    return alignment


def _check_disjoint(tensors: dict[str, GgufTensor]) -> None:
    end = 0
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.stop)):
        if tensor.start < end:
            reason = f"its bytes from {tensor.start} on overlap the tensor before it, which ends at {end}"
            raise CheckpointError(tensor.path, reason, tensor=tensor.name)
        end = tensor.stop


def _check_whole(path: Path, metadata: dict[str, Any]) -> None:
    count = metadata.get("split.count", 1)
    if type(count) is int and count > 1:
        part = metadata.get("split.no")
        raise CheckpointError(path, f"the file is part {quoted(part)} (from 0 on) of {count}; merge them to one file")
