"""Codes that stand for entries of a table, as bfloat16 tiles: looked up in registers, a byte at a time.

An entry has more bits than a bfloat16, so it is a sum of parts, which tensor cores add. A part is as many steps as a
byte counts from its middle, rounded to bfloat16; steps of the next part divide what is then left. So a byte is all that
must be looked up. Four codes are the selectors of one permutation, which finds their bytes among those of the first
eight entries, and of another, for the last eight; a mask, the same for all parts, chooses.
"""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from scaledot.kernels.hopper.registers import MIDDLE, in_register, operand, permuted, shifted, stepped
from scaledot.kernels.hopper.unpack import Codes

ENTRIES = 16
_BYTES = np.arange(256)


@dataclasses.dataclass(frozen=True)
class CodebookSlice:
    """What an entry's byte counts, and the bytes of all entries, four in a word."""

    step: float
    words: tuple[int, ...]


def parts_of(codebook: tuple[float, ...], count: int) -> tuple[CodebookSlice, ...]:
    """At most so many parts; each leaves less than a 126th of the largest that was left, and zero of a zero."""
    left = np.zeros(ENTRIES)
    left[: len(codebook)] = np.asarray(codebook, np.float32)
    parts = []
    while left.any() and len(parts) < count:
        step = _rounded_up(np.abs(left).max() / (MIDDLE - 1))
        values = ((_BYTES - MIDDLE) * step).astype(jnp.bfloat16).astype(np.float64)
        nearest = np.abs(left[:, None] - values).argmin(1)
        parts.append(CodebookSlice(step, tuple(nearest.astype(np.uint8).view("<u4").tolist())))
        left = left - values[nearest]
    return tuple(parts)


def _rounded_up(x: float) -> float:
    """The least bfloat16 that is not smaller."""
    near = np.asarray(x).astype(jnp.bfloat16)
    return float(near if near >= x else np.nextafter(near, np.asarray(np.inf, jnp.bfloat16)))


def codes_for(codebook: tuple[float, ...], count: int) -> Codes:
    """Tiles of 4-bit codes of a codebook, whose entries are sums of so many parts."""
    parts = parts_of(codebook, count)
    return Codes(8, functools.partial(_tiles, parts), parts=len(parts), by_bytes=True)


def _tiles(parts: tuple[CodebookSlice, ...], low: jax.Array, high: jax.Array, index: int) -> Iterator[jax.Array]:
    words, upper = (low, high)[index // 2], index % 2
    selectors = shifted(words & in_register(0x77777777), 16 * upper)
    is_last = permuted(words << 4, words, 0xFBEA if upper else 0xD9C8)  # the highest bit of a code, eight times
    for part in parts:
        first, last = (permuted(in_register(a, True), b, selectors) for a, b in (part.words[:2], part.words[2:]))
        counts = (first & ~is_last) | (last & is_last)
        yield operand(*(stepped(permuted(counts, 0, which), part.step) for which in (0x4240, 0x4341)))
