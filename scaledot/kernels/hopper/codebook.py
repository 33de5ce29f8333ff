"""Unpacks codes of a codebook (NF4) into bfloat16 A fragments, by a table lookup of bytes in registers.

An entry of a codebook has more significant bits than bfloat16, so it is approximated by a sum of bfloat16 terms, which
the tensor cores add up. A term is (byte - 128) * step rounded to bfloat16; the step of the next term follows from the
largest remainder. So each lookup returns a byte. A PRMT looks up 4 codes at once in an 8-byte table: one PRMT for
entries 0-7, one for entries 8-15, selected by each code's bit 3. The mask of bit 3 is computed once for all terms.
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
    make_fragment,
    opaque_constant,
    permute_bytes,
    shift_right,
)
from scaledot.kernels.hopper.unpack import Unpacker

ENTRIES = 16
_BYTES = np.arange(256)


@dataclasses.dataclass(frozen=True)
class CodebookTerm:
    """One bfloat16 term of all entries: (byte - 128) * step, with the 16 bytes packed in four words."""

    step: float
    words: tuple[int, ...]


def split_into_terms(codebook: tuple[float, ...], count: int) -> tuple[CodebookTerm, ...]:
    """Splits the entries of a codebook into at most `count` terms.

    Each term leaves a remainder of less than 1/126 of the largest remainder before it. Zero entries are exact, and
    there are fewer terms if they are exact for all entries.
    """
    remainder = np.zeros(ENTRIES)
    remainder[: len(codebook)] = np.asarray(codebook, np.float32)
    terms = []
    while remainder.any() and len(terms) < count:
        step = _rounded_up(np.abs(remainder).max() / (ZERO_BYTE - 1))
        values = ((_BYTES - ZERO_BYTE) * step).astype(jnp.bfloat16).astype(np.float64)
        nearest = np.abs(remainder[:, None] - values).argmin(1)
        terms.append(CodebookTerm(step, tuple(nearest.astype(np.uint8).view("<u4").tolist())))
        remainder = remainder - values[nearest]
    return tuple(terms)


def _rounded_up(x: float) -> float:
    """The least bfloat16 that is at least x."""
    nearest = np.asarray(x).astype(jnp.bfloat16)
    return float(nearest if nearest >= x else np.nextafter(nearest, np.asarray(np.inf, jnp.bfloat16)))


def unpacker_for(codebook: tuple[float, ...], count: int) -> Unpacker:
    """Returns the unpacker of 4-bit codes of a codebook, with entries as sums of at most `count` bfloat16 terms."""
    terms = split_into_terms(codebook, count)
    return Unpacker(8, functools.partial(_unpack, terms), terms=len(terms), by_bytes=True)


def _unpack(terms: tuple[CodebookTerm, ...], low: jax.Array, high: jax.Array, index: int) -> Iterator[jax.Array]:
    """Yields a fragment (64, 64) for each term of the codes of fragment `index`.

    low, high: words (32, 32) of bytes [e0 | o0 | e1 | o1], of even and odd k, with two 4-bit codes per byte. A fragment
    has the codes of one byte of each k, in 16 bits of a word: low nibbles are rows 0-7, high nibbles rows 8-15.
    """
    words, shift16 = (low, high)[index // 2], index % 2
    selectors = shift_right(words & opaque_constant(0x77777777), 16 * shift16)  # PRMT uses the lowest four nibbles
    # PRMT with sign replication: 0xFF if a code's bit 3 is set. It is the sign of a byte in words << 4 for low nibbles.
    bit3_mask = permute_bytes(words << 4, words, 0xFBEA if shift16 else 0xD9C8)
    for term in terms:
        entries_0_7, entries_8_15 = (
            permute_bytes(opaque_constant(a, per_thread=True), b, selectors)
            for a, b in (term.words[:2], term.words[2:])
        )
        entry_bytes = (entries_0_7 & ~bit3_mask) | (entries_8_15 & bit3_mask)
        # The bytes of low nibbles (0 and 2) and of high nibbles (1 and 3), zero-extended to 16 bits.
        yield make_fragment(
            *(bytes_to_bfloat16(permute_bytes(entry_bytes, 0, selector), term.step) for selector in (0x4240, 0x4341))
        )
