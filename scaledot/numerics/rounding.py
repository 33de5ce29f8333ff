"""Rounding to nearest even or stochastically, and the random numbers of stochastic rounding.

Stochastic rounding takes one uniform number per element. Generating it with jax.random would cost more than the rest
of the cast. Here it is a hash of the key and of the element's flat index, so that the same key gives the same codes on
every backend and under every sharding.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scaledot.numerics.bits import float_of, flush

ROUNDINGS = ("nearest", "stochastic", "ms_eden")
_STRIDE = np.uint32(0x9E3779B1)  # multiplies the flat index, before the first round of the hash


def check_rounding(rounding: str) -> None:
    if rounding not in ROUNDINGS:
        raise ValueError(f"`rounding` {rounding!r} is not known; use one of {', '.join(map(repr, ROUNDINGS))}")


def round_integer(x: jax.Array, uniform: jax.Array | None = None) -> jax.Array:
    """Rounds x to an integer value in its own dtype: to nearest even, or stochastically with `uniform` numbers.

    Stochastic rounding rounds up with the probability of the fraction.
    """
    if uniform is None:
        return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)
    below = jnp.floor(x)
    return below + (x - below > uniform).astype(x.dtype)


def round_to_uint32(x: jax.Array, uniform: jax.Array | None = None) -> jax.Array:
    """Rounds 0 <= x < 2^22 to uint32, as `round_integer` does.

    The float32 addition of 2^23 rounds to nearest even and leaves the integer in the low mantissa bits.
    """
    if uniform is None:
        return lax.bitcast_convert_type(x + np.float32(2.0**23), jnp.uint32) & np.uint32(0x7FFFFF)
    return round_nonnegative(x, uniform).astype(jnp.int32).astype(jnp.uint32)


def round_nonnegative(x: jax.Array, uniform: jax.Array | None = None) -> jax.Array:
    """Rounds 0 <= x < 2^22 to an integer value in float32, as `round_integer` does."""
    if uniform is None:
        # The or changes no bit; without it XLA would simplify x + 2^23 - 2^23 to x.
        shifted = lax.bitcast_convert_type(x + np.float32(2.0**23), jnp.uint32) | np.uint32(0x4B000000)
        return lax.bitcast_convert_type(shifted, jnp.float32) - np.float32(2.0**23)
    below = x.astype(jnp.int32).astype(jnp.float32)
    return jnp.where(x - below > uniform, below + np.float32(1), below)


def uniform_of(
    key: "Key", shape: tuple[int, ...], row_length: int | None = None, offset: jax.Array | None = None
) -> jax.Array:
    """Uniform multiples of 2^-24 in [0, 1) in `shape`, hashed from the key and the row-major flat index modulo 2^32.

    For a shard of a matrix: `row_length` is the row length of the global matrix, and `offset` the global flat index of
    the shard's first element.
    """
    axes = [Positions(jnp.arange(size, dtype=jnp.uint32), size) for size in shape]
    if row_length is not None:
        axes[-1] = axes[-1]._replace(size=row_length)
    return uniform_at(flat_index(axes), *offset_seeds(offset, *seeds_of(key)))


def uniform_at(index: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
    """`uniform_of` for uint32 flat indices and the two seed words of `seeds_of`.

    The second word is added between the two hash rounds, so that the random numbers of two keys are not shifted copies
    of each other. Only the high 24 bits are used: the low bits of a product depend on few bits of its input.
    """
    hashed = index * _STRIDE + first
    hashed = (hashed ^ (hashed >> 16)) * np.uint32(0x7FEB352D) + second
    hashed = (hashed ^ (hashed >> 15)) * np.uint32(0x846CA68B)
    return (hashed >> 8).astype(jnp.int32).astype(jnp.float32) * np.float32(2.0**-24)


def round_bfloat16(x: jax.Array) -> jax.Array:
    """Rounds float32 to bfloat16 precision, in float32; XLA may remove a pair of conversions, but never this."""
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def round_to(x: jax.Array, dtype) -> jax.Array:
    """Rounds float32 to the precision of a float dtype, in float32."""
    info = jnp.finfo(dtype)
    if info.bits >= 32:
        return x
    rounded = lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)
    if info.minexp == -126:
        return rounded
    # reduce_precision flushes the subnormals of the narrow dtype, which are equally spaced.
    step = 2.0 ** (info.minexp - info.nmant)
    steps = lax.round(x * np.float32(1 / step), lax.RoundingMethod.TO_NEAREST_EVEN)
    return jnp.where(jnp.abs(x) < np.float32(2.0**info.minexp), steps * np.float32(step), rounded)


def stored_float32(x: jax.Array) -> jax.Array:
    """Converts x to float32, without excess precision.

    If x was rounded from float32 in the same program, XLA:GPU removes that rounding together with the conversion back,
    and codes would be those of the unrounded values. It cannot do so to bit arithmetic or to reduce_precision.
    """
    if x.dtype == jnp.bfloat16:
        return float_of(lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16)
    values = x.astype(jnp.float32)
    return round_to(values, x.dtype) if x.dtype == jnp.float16 else values


def flushed_float32(x: jax.Array) -> jax.Array:
    """`stored_float32` with subnormals flushed to zeros of the same sign."""
    return flush(stored_float32(x))


class Positions(NamedTuple):
    """Positions `at`, uint32 (n,), of some elements along an axis of `size` elements."""

    at: jax.Array
    size: int


def flat_index(axes: Sequence[Positions]) -> jax.Array:
    """The row-major flat indices, modulo 2^32, of the elements at the given positions along each axis of an array.

    >>> columns = Positions(jnp.array([0, 3], jnp.uint32), size=4)
    >>> flat_index([Positions(jnp.array([5, 6], jnp.uint32), size=8), columns])
    Array([[20, 23],
           [24, 27]], dtype=uint32)
    """
    index = jnp.zeros((), jnp.uint32)
    for axis, positions in enumerate(axes):
        index = index[..., None] * np.uint32(positions.size % 2**32) + positions.at.reshape((1,) * axis + (-1,))
    return index


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FoldedKey:
    """A key with a static index folded in, for one of several casts that share the key.

    `seeds_of` hashes the index with the words of the key, so that different indices give independent random numbers.
    Unlike jax.random.fold_in it adds no Threefry to the program, which XLA would compile for every cast of a model.
    """

    key: jax.Array
    index: int = dataclasses.field(metadata={"static": True})


Key = jax.Array | FoldedKey  # a key array of jax.random, typed or raw, or a FoldedKey


def key_words(key: Key) -> list[Any]:
    """The uint32 words of a key; for raw keys of shape (..., words), arrays of shape (...)."""
    if isinstance(key, FoldedKey):
        return [*key_words(key.key), np.uint32(key.index)]
    words = raw_key(key)
    return [words[..., i] for i in range(words.shape[-1])]


def raw_key(key: jax.Array) -> jax.Array:
    return jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key


def fold_in_traced(key: Key, indices: jax.Array) -> jax.Array:
    """A raw key for each of `indices`, which may be traced, in shape (*indices.shape, words)."""
    words = [*key_words(key), indices.astype(jnp.uint32)]
    return jnp.stack([jnp.broadcast_to(word, indices.shape) for word in words], axis=-1)


def seeds_of(key: Key) -> tuple[jax.Array, jax.Array]:
    """Hashes the words of a key to two uint32 seeds; for raw keys of shape (..., words), two arrays of shape (...)."""
    first, second = hash_words(key_words(key))
    return jnp.asarray(first), jnp.asarray(second)


def hash_words(words: Sequence[Any]) -> tuple[Any, Any]:
    """Hashes uint32 words to two seeds."""
    first: Any = np.uint32(0x9E3779B9)
    second: Any = np.uint32(0x85EBCA6B)
    with np.errstate(over="ignore"):  # words that are numpy scalars wrap around as well
        for word in words:
            first = _mix(first ^ _mix(word + np.uint32(0x27D4EB2F)))
            second = _mix(second + _mix(word ^ np.uint32(0x165667B1)))
    return first, second


def offset_seeds(offset: jax.Array | None, first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Seeds (first, second) adjusted so that flat index i gives the number of flat index i + offset."""
    return (first if offset is None else first + offset * _STRIDE), second


def _mix(h):
    """A bijective hash of uint32 words with low bias (lowbias32 of C. Wellons' hash prospector)."""
    h = h ^ (h >> 16)
    h = h * np.uint32(0x7FEB352D)
    h = h ^ (h >> 15)
    h = h * np.uint32(0x846CA68B)
    return h ^ (h >> 16)
