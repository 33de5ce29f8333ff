"""Arrays that are read from files when they are needed.

A `LazyArray` has a shape, a dtype and a function that reads a slice, so that a process reads only the bytes of its
shard. Leaves of a ScaledArray may be LazyArrays: layouts return such arrays, and nothing is read before `load` needs
it. The functions of this module derive one LazyArray from another: unpacked, transposed, with another dtype.

`packed` codes: a 4-bit array whose bytes in the file hold two codes each, the even one in the low nibble, as XLA packs
them, also has its bytes as a LazyArray, which are transferred to the device as they are and bitcast there.
`reciprocal_of`: the divisor in the file that an array is the reciprocal of, for results that divide by it.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from scaledot.checkpoint.reader import Index, Reader, length, whole
from scaledot.checkpoint.unpacking import nibbles_as, unpack_bits, unpack_nibbles


@dataclasses.dataclass(frozen=True, eq=False)
class LazyArray:
    """An array of a file; `read(index)` returns the slice `index` of it as a NumPy array."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[Index], np.ndarray]
    packed: "LazyArray | None" = None
    reciprocal_of: "LazyArray | None" = None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def numpy(self) -> np.ndarray:
        """The whole array."""
        return self.read(whole(self.shape))

    def transpose(self, axes: tuple[int, ...]) -> "LazyArray":
        def read(index: Index) -> np.ndarray:
            stored = tuple(index[axes.index(axis)] for axis in range(self.ndim))
            return self.read(stored).transpose(axes)

        return LazyArray(tuple(self.shape[axis] for axis in axes), self.dtype, read)

    @property
    def T(self) -> "LazyArray":
        return self.transpose(tuple(range(self.ndim))[::-1])

    @property
    def mT(self) -> "LazyArray":
        axes = tuple(range(self.ndim))
        return self.transpose((*axes[:-2], axes[-1], axes[-2]))

    def reshape(self, shape: tuple[int, ...]) -> "LazyArray":
        """A reshape that only adds or removes axes of size 1; others read the whole array for every slice."""
        kept = [axis for axis, size in enumerate(self.shape) if size != 1]
        if [size for size in shape if size != 1] != [self.shape[axis] for axis in kept]:
            return LazyArray(shape, self.dtype, lambda index: self.numpy().reshape(shape)[index])

        def read(index: Index) -> np.ndarray:
            stored = list(whole(self.shape))
            for axis, s in zip(kept, (s for s, size in zip(index, shape, strict=True) if size != 1), strict=True):
                stored[axis] = s
            some = self.read(tuple(stored))
            some = some.reshape([1 if size == 1 else length(s) for s, size in zip(index, shape, strict=True)])
            return some[tuple(s if size == 1 else slice(None) for s, size in zip(index, shape, strict=True))]

        return LazyArray(shape, self.dtype, read)

    def view(self, dtype) -> "LazyArray":
        """The same bits in another dtype of the same width."""
        dtype = np.dtype(dtype)
        assert dtype.itemsize == self.dtype.itemsize
        return LazyArray(self.shape, dtype, lambda index: self.read(index).view(dtype))

    def map(self, f: Callable[[np.ndarray], np.ndarray], dtype) -> "LazyArray":
        """An elementwise function of the array, with results of `dtype`."""
        return LazyArray(self.shape, np.dtype(dtype), lambda index: f(self.read(index)))


def stored(reader: Reader, path, start: int, dtype: np.dtype, shape: tuple[int, ...]) -> LazyArray:
    """The row-major array whose bytes begin at `start` of a file."""
    return LazyArray(shape, dtype, lambda index: reader.read(path, start, dtype, shape, index))


def constant(array: np.ndarray) -> LazyArray:
    """An array in memory."""
    return LazyArray(array.shape, array.dtype, lambda index: array[index])


def nibbles(packed: LazyArray, dtype) -> LazyArray:
    """The codes of a 4-bit `dtype`, of which each byte of `packed` holds two along the last axis, the even one low."""
    *leading, last = packed.shape
    dtype = np.dtype(dtype)

    def read(index: Index) -> np.ndarray:
        aligned = _aligned(index[-1], 2)
        codes = unpack_nibbles(packed.read((*index[:-1], aligned.units)), dtype)
        return codes[..., aligned.cut]

    as_stored = packed if packed.dtype == np.uint8 else packed.view(np.uint8)
    return LazyArray((*leading, 2 * last), dtype, read, packed=as_stored)


def row_nibbles(packed: LazyArray, dtype) -> LazyArray:
    """The codes of a 4-bit `dtype`, of which each byte of `packed` holds those of two rows, the even one low."""
    *leading, pairs, last = packed.shape
    dtype = np.dtype(dtype)

    def read(index: Index) -> np.ndarray:
        aligned = _aligned(index[-2], 2)
        octets = packed.read((*index[:-2], aligned.units, index[-1]))
        rows = np.stack([octets & np.uint8(15), octets >> np.uint8(4)], axis=-2)
        rows = rows.reshape(*octets.shape[:-2], 2 * octets.shape[-2], octets.shape[-1])
        return nibbles_as(rows, dtype)[..., aligned.cut, :]

    return LazyArray((*leading, 2 * pairs, last), dtype, read)


def octets(words: LazyArray) -> LazyArray:
    """The bytes of little-endian words along the last axis."""
    *leading, last = words.shape
    width = words.dtype.itemsize

    def read(index: Index) -> np.ndarray:
        aligned = _aligned(index[-1], width)
        some = np.ascontiguousarray(words.read((*index[:-1], aligned.units)))
        return some.view(np.uint8)[..., aligned.cut]

    return LazyArray((*leading, width * last), np.dtype(np.uint8), read)


def reciprocal(array: LazyArray) -> LazyArray:
    """The float32 reciprocal of an array."""
    inverse = array.map(lambda divisor: np.float32(1) / divisor, np.float32)
    return dataclasses.replace(inverse, reciprocal_of=array)


def bit_stream(words: LazyArray, bits: int, count: int, dtype, *, axis: int = -1, offset: int = 0) -> LazyArray:
    """`count` codes of `bits` bits from a dense little-endian stream of words along `axis`; `offset` is added to each.

    A slice reads the words that hold it, in multiples of lcm(bits, word size) bits.
    """
    axis %= words.ndim
    word_bits = 8 * words.dtype.itemsize
    period = math.lcm(bits, word_bits)  # codes begin at a word boundary every `period` bits
    shape = (*words.shape[:axis], count, *words.shape[axis + 1 :])

    def read(index: Index) -> np.ndarray:
        aligned = _aligned(index[axis], period // bits)
        first, last = aligned.units.start * (period // word_bits), aligned.units.stop * (period // word_bits)
        some = words.read((*index[:axis], slice(first, min(last, words.shape[axis])), *index[axis + 1 :]))
        codes = unpack_bits(some, bits, axis=axis, dtype=dtype, offset=offset)
        return codes[(slice(None),) * axis + (aligned.cut,)]

    return LazyArray(shape, np.dtype(dtype), read)


@dataclasses.dataclass(frozen=True)
class _Aligned:
    units: slice  # the units that hold a slice of elements
    cut: slice  # the slice within the elements of these units


def _aligned(s: slice, unit: int) -> _Aligned:
    first = s.start // unit
    return _Aligned(slice(first, -(-s.stop // unit)), slice(s.start - first * unit, s.stop - first * unit))


def merge_last(array: LazyArray, count: int) -> LazyArray:
    """Merges the last axis, of size `count`, into the one before."""
    *leading, units, last = array.shape
    assert last == count

    def read(index: Index) -> np.ndarray:
        aligned = _aligned(index[-1], count)
        some = array.read((*index[:-1], aligned.units, slice(0, count)))
        return some.reshape(*some.shape[:-2], some.shape[-2] * count)[..., aligned.cut]

    merged = LazyArray((*leading, units * count), array.dtype, read)
    if array.packed is None:
        return merged
    return dataclasses.replace(merged, packed=merge_last(array.packed, count // 2))


def reorder_last(array: LazyArray, order: tuple[int, ...]) -> LazyArray:
    """Permutes each group of len(order) elements of the last axis: element i of a group is its stored one order[i]."""
    count = len(order)
    assert array.shape[-1] % count == 0

    def read(index: Index) -> np.ndarray:
        aligned = _aligned(index[-1], count)
        some = array.read((*index[:-1], slice(aligned.units.start * count, aligned.units.stop * count)))
        grouped = some.reshape(*some.shape[:-1], some.shape[-1] // count, count)[..., list(order)]
        return grouped.reshape(some.shape)[..., aligned.cut]

    return LazyArray(array.shape, array.dtype, read)


def take(array: LazyArray, indices: np.ndarray, axis: int) -> LazyArray:
    """The elements at `indices` along `axis`; a slice reads the range of the array that holds its indices."""
    axis %= array.ndim

    def read(index: Index) -> np.ndarray:
        chosen = indices[index[axis]]
        first, last = (int(chosen.min()), int(chosen.max()) + 1) if chosen.size else (0, 0)
        some = array.read((*index[:axis], slice(first, last), *index[axis + 1 :]))
        return np.take(some, chosen - first, axis=axis)

    return LazyArray((*array.shape[:axis], len(indices), *array.shape[axis + 1 :]), array.dtype, read)


def fields(
    records: LazyArray, octets: slice, count: int, dtype, decode: Callable[[np.ndarray], np.ndarray]
) -> LazyArray:
    """`count` elements from the bytes `octets` of each record, along the last axis.

    records: bytes (..., records, bytes per record), read only at `octets`.
    decode: from bytes (..., records, length of octets) to elements (..., records, count).
    """
    *leading, units, _ = records.shape

    def read(index: Index) -> np.ndarray:
        aligned = _aligned(index[-1], count)
        some = np.ascontiguousarray(records.read((*index[:-1], aligned.units, octets)))
        return decode(some).reshape(*some.shape[:-2], some.shape[-2] * count)[..., aligned.cut]

    return LazyArray((*leading, units * count), np.dtype(dtype), read)


def untiled(tiles: LazyArray, shape: tuple[int, int]) -> LazyArray:
    """A matrix of `shape` that is stored in 128 x 4 tiles as Blackwell tensor cores read block scales.

    tiles: (tile rows, tile columns, 32, 4, 4), of which the last three axes are r % 32, r // 32 and c within a tile,
    as in `scaledot.numerics.pack.tile_scales`.
    """

    def read(index: Index) -> np.ndarray:
        rows, columns = _aligned(index[0], 128), _aligned(index[1], 4)
        some = tiles.read((rows.units, columns.units, slice(0, 32), slice(0, 4), slice(0, 4)))
        matrix = some.transpose(0, 3, 2, 1, 4).reshape(128 * some.shape[0], 4 * some.shape[1])
        return matrix[rows.cut, columns.cut]

    return LazyArray(shape, tiles.dtype, read)
