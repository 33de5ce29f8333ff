"""Unpacks codes of a codebook (NF4) into bfloat16 operand tiles, by a table lookup of bytes in registers.

An entry of a codebook has more significant bits than bfloat16, so it is approximated by a sum of bfloat16 slices, which
the tensor cores add up. A slice is (byte - 128) * step rounded to bfloat16; the step of the next slice follows from the
largest remainder. So each lookup returns a byte. Four codes are the selectors of one PRMT instruction, which looks up
their bytes among those of the first eight entries, and of a second one for the last eight entries. A mask, computed
once for all slices, selects between the two.
"""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from scaledot.kernels.hopper.registers import (
    ZERO_BYTE,
    bytes_to_bfloat16,
    opaque_constant,
    operand_tile,
    permute_bytes,
    shift_right,
)
from scaledot.kernels.hopper.unpack import Unpacker

ENTRIES = 16
_BYTES = np.arange(256)


@dataclasses.dataclass(frozen=True)
class CodebookSlice:
    """One bfloat16 slice of all entries: (byte - 128) * step, with the 16 bytes packed in four words."""

    step: float
    words: tuple[int, ...]


def slices_of(codebook: tuple[float, ...], count: int) -> tuple[CodebookSlice, ...]:
    """Splits the entries of a codebook into at most `count` slices.

    Each slice leaves a remainder of less than 1/126 of the largest remainder before it. Zero entries are exact, and
    there are fewer slices if they are exact for all entries.
    """
    remainder = np.zeros(ENTRIES)
    remainder[: len(codebook)] = np.asarray(codebook, np.float32)
    slices = []
    while remainder.any() and len(slices) < count:
        step = _rounded_up(np.abs(remainder).max() / (ZERO_BYTE - 1))
        values = ((_BYTES - ZERO_BYTE) * step).astype(jnp.bfloat16).astype(np.float64)
        nearest = np.abs(remainder[:, None] - values).argmin(1)
        slices.append(CodebookSlice(step, tuple(nearest.astype(np.uint8).view("<u4").tolist())))
        remainder = remainder - values[nearest]
    return tuple(slices)


def _rounded_up(x: float) -> float:
    """The least bfloat16 that is at least x."""
    nearest = np.asarray(x).astype(jnp.bfloat16)
    return float(nearest if nearest >= x else np.nextafter(nearest, np.asarray(np.inf, jnp.bfloat16)))


def unpacker_for(codebook: tuple[float, ...], count: int) -> Unpacker:
    """The unpacker of 4-bit codes of a codebook, with entries as sums of at most `count` bfloat16 slices."""
    slices = slices_of(codebook, count)
    return Unpacker(8, functools.partial(_tiles, slices), slices=len(slices), by_bytes=True)


def _tiles(slices: tuple[CodebookSlice, ...], low: jax.Array, high: jax.Array, index: int) -> Iterator[jax.Array]:
    words, upper = (low, high)[index // 2], index % 2
    selectors = shift_right(words & opaque_constant(0x77777777), 16 * upper)
    is_last = permute_bytes(words << 4, words, 0xFBEA if upper else 0xD9C8)  # the highest bit of each code, eight times
    for each in slices:
        first, last = (
            permute_bytes(opaque_constant(a, per_thread=True), b, selectors)
            for a, b in (each.words[:2], each.words[2:])
        )
        entry_bytes = (first & ~is_last) | (last & is_last)
        yield operand_tile(
            *(bytes_to_bfloat16(permute_bytes(entry_bytes, 0, selector), each.step) for selector in (0x4240, 0x4341))
        )
