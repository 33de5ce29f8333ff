"""Reads byte ranges and slices of tensors from files.

A `Reader` counts the bytes that it reads. Contiguous ranges are read into a new buffer that is aligned for XLA, so that
a CPU device takes it over without a copy; other slices are copied from a memory map.
"""

import math
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from scaledot.checkpoint.errors import CheckpointError

Index = tuple[slice, ...]  # one slice per axis with start and stop, without step
_ALIGNMENT = 64  # bytes; XLA copies host buffers that are aligned less


class Reader:
    """Reads files and counts the bytes."""

    def __init__(self):
        self.bytes_read = 0
        self._lock = threading.Lock()
        self._identities: dict[Path, tuple[int, ...]] = {}

    def watch(self, path: Path) -> None:
        """Remembers the file at `path`, before its header is read; reading another one in its place is an error."""
        self._identities[path] = _identity(path.stat())

    def _check(self, path: Path, status: os.stat_result) -> None:
        if self._identities.get(path, _identity(status)) != _identity(status):
            raise CheckpointError(
                path, "the file was changed or replaced after the checkpoint was opened; open it again"
            )

    def read(self, path: Path, start: int, dtype: np.dtype, shape: tuple[int, ...], index: Index) -> np.ndarray:
        """A slice of the row-major array of `shape` whose bytes begin at `start`."""
        sizes = tuple(map(length, index))
        if _is_contiguous(shape, index):
            strides = [math.prod(shape[axis + 1 :]) * dtype.itemsize for axis in range(len(shape))]
            buffer = empty_aligned(math.prod(sizes) * dtype.itemsize)
            offset = start + sum(s.start * stride for s, stride in zip(index, strides, strict=True))
            fill(buffer, path, offset, self._check)
            result = buffer.view(dtype).reshape(sizes)
        else:
            result = self._read_slices(path, start, dtype, shape, index)
        with self._lock:
            self.bytes_read += result.nbytes
        return result

    def _read_slices(self, path: Path, start: int, dtype: np.dtype, shape: tuple[int, ...], index: Index) -> np.ndarray:
        nbytes = math.prod(shape) * dtype.itemsize
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            self._check(path, status)
            if start + nbytes > status.st_size:
                raise _ends_early(path, status.st_size, start + nbytes - status.st_size)
            mapped = np.memmap(file, np.uint8, "r", start, nbytes)
            return np.array(mapped.view(dtype).reshape(shape)[index])


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _is_contiguous(shape: tuple[int, ...], index: Index) -> bool:
    """Whether the elements of a slice are adjacent: axes before the last one that is cut have one element."""
    sizes = tuple(map(length, index))
    cut = max((axis for axis, size in enumerate(shape) if sizes[axis] < size), default=0)
    return math.prod(sizes) == 0 or all(size == 1 for size in sizes[:cut])


def fill(buffer: np.ndarray, path: Path, offset: int, check: Callable[[Path, os.stat_result], None]) -> None:
    """Fills a buffer of bytes from the file, from `offset` on; `check` takes its path and status first."""
    view = buffer.data
    file = os.open(path, os.O_RDONLY)
    try:
        check(path, os.fstat(file))
        done = 0
        while done < len(view):
            count = os.preadv(file, [view[done:]], offset + done)  # at most 2 GiB at once on Linux
            if not count:
                raise _ends_early(path, offset + done, len(view) - done)
            done += count
    finally:
        os.close(file)


def _ends_early(path: Path, end: int, missing: int) -> CheckpointError:
    return CheckpointError(path, f"the file ends at byte {end}, {missing} bytes too early")


def empty_aligned(size: int) -> np.ndarray:
    """An uninitialised array of bytes that begins at a multiple of 64 bytes."""
    buffer = np.empty(size + _ALIGNMENT, np.uint8)
    offset = -buffer.ctypes.data % _ALIGNMENT
    return buffer[offset : offset + size]


def length(s: slice) -> int:
    return s.stop - s.start


def whole(shape: tuple[int, ...]) -> Index:
    """The index of a whole array."""
    return tuple(slice(0, size) for size in shape)
