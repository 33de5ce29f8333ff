"""Codes from the packed bytes of files, on the host with NumPy.

`scaledot.numerics.pack` does the same on devices; these functions decode slices while they are read.
"""

import ml_dtypes
import numpy as np

_LOW_NIBBLES_FIRST = np.stack([np.arange(256) & 15, np.arange(256) >> 4], axis=-1).astype(np.uint8)


def unpack_nibbles(packed: np.ndarray, dtype) -> np.ndarray:
    """Two codes of a 4-bit `dtype` per byte along the last axis, the low nibble first.

    >>> unpack_nibbles(np.array([0x21, 0x43], np.uint8), ml_dtypes.uint4)
    array([1, 2, 3, 4], dtype=uint4)
    """
    pairs = _LOW_NIBBLES_FIRST[packed.view(np.uint8)]
    return nibbles_as(pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1]), dtype)


def nibbles_as(codes: np.ndarray, dtype) -> np.ndarray:
    """The bits 0 to 15 of uint8 codes as a 4-bit dtype, whose NumPy arrays have one byte per element.

    >>> nibbles_as(np.array([1, 15], np.uint8), ml_dtypes.int4)
    array([1, -1], dtype=int4)
    """
    dtype = np.dtype(dtype)
    if dtype == ml_dtypes.int4:  # the byte of a negative number is sign-extended
        codes = ((codes ^ 8) - 8).astype(np.uint8)
    return codes.view(dtype)


def unpack_bits(words: np.ndarray, bits: int, *, axis: int, dtype, offset: int = 0) -> np.ndarray:
    """All codes of a dense little-endian bit stream along `axis`, plus `offset`.

    Words are integers; trailing bits that are no whole code are dropped.

    >>> unpack_bits(np.array([129, 48], np.uint8), 6, axis=0, dtype=np.uint8)
    array([1, 2], dtype=uint8)
    """
    words = np.ascontiguousarray(np.moveaxis(words, axis, -1))
    octets = words.view(np.uint8)
    if bits in (2, 4, 8):
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        codes = (octets[..., None] >> shifts) & np.uint8(2**bits - 1)
        codes = codes.reshape(*octets.shape[:-1], octets.shape[-1] * len(shifts))
    else:
        stream = np.unpackbits(octets, axis=-1, bitorder="little")
        count = stream.shape[-1] // bits
        stream = stream[..., : count * bits].reshape(*stream.shape[:-1], count, bits)
        codes = np.packbits(stream, axis=-1, bitorder="little")[..., 0]
    signed = codes.astype(np.int16) + np.int16(offset)
    return np.moveaxis(signed.astype(np.int8 if np.dtype(dtype).kind != "u" else np.uint8).astype(dtype), -1, axis)
