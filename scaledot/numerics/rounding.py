"""Rounding to integers, to nearest even or by chance, and the bits that chance is made of.

Stochastic rounding needs one uniform number per element. Drawing it with jax.random would cost more than
the rest of the cast; here it is a hash of the key and of the element's flat index, so the same key gives
the same codes on every backend and however the array is sharded.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_STRIDE = np.uint32(0x9E3779B1)  # between the hashes of neighbours


def round_integer(w: jax.Array, uniform: jax.Array | None = None) -> jax.Array:
    """w to a whole number: ties to even, or up with the probability of its fraction where `uniform` is given."""
    if uniform is None:
        return lax.round(w, lax.RoundingMethod.TO_NEAREST_EVEN)
    below = jnp.floor(w)
    return below + (w - below > uniform).astype(w.dtype)


def round_count(w: jax.Array, uniform: jax.Array | None = None) -> jax.Array:
    """The same for 0 <= w < 2^22, as uint32; adding 2^23 makes the sum's own rounding leave the integer in its bits."""
    if uniform is None:
        return lax.bitcast_convert_type(w + np.float32(2.0**23), jnp.uint32) & np.uint32(0x7FFFFF)
    return round_float(w, uniform).astype(jnp.int32).astype(jnp.uint32)


def round_float(w: jax.Array, uniform: jax.Array | None = None) -> jax.Array:
    """The same as float32."""
    if uniform is None:
        # 2^23 has these bits already; without the detour XLA would cancel it against the one that is subtracted.
        shifted = lax.bitcast_convert_type(w + np.float32(2.0**23), jnp.uint32) | np.uint32(0x4B000000)
        return lax.bitcast_convert_type(shifted, jnp.float32) - np.float32(2.0**23)
    below = w.astype(jnp.int32).astype(jnp.float32)
    return jnp.where(w - below > uniform, below + np.float32(1), below)


def uniform_of(
    key: "Key", shape: tuple[int, ...], row_length: int | None = None, offset: jax.Array | None = None
) -> jax.Array:
    """Multiples of 2^-24 in [0, 1), one per element, from the key and the flat index (modulo 2^32).

    Of a shard (m, k): `row_length` of the whole matrix, and the flat index `offset` of the first element in it.
    """
    axes = [Positions(jnp.arange(size, dtype=jnp.uint32), size) for size in shape]
    if row_length is not None:
        axes[-1] = axes[-1]._replace(size=row_length)
    return uniform_at(flat_index(axes), *seeds_from(offset, *seeds_of(key)))


def uniform_at(index: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
    """The same for uint32 flat indices and the two words of a key.

    The second word comes in between two rounds, so that streams of two keys are no shifts of each other; the last
    multiplication has mixed the high bits, which are all that is used.
    """
    hashed = index * _STRIDE + first
    hashed = (hashed ^ (hashed >> 16)) * np.uint32(0x7FEB352D) + second
    hashed = (hashed ^ (hashed >> 15)) * np.uint32(0x846CA68B)
    return (hashed >> 8).astype(jnp.int32).astype(jnp.float32) * np.float32(2.0**-24)


def round_bfloat16(x: jax.Array) -> jax.Array:
    """float32 rounded to bfloat16's grid; XLA may drop a pair of casts, never this."""
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def round_to(x: jax.Array, dtype) -> jax.Array:
    """float32 rounded to the grid of a wider or narrower float dtype, kept as float32."""
    info = jnp.finfo(dtype)
    if info.bits >= 32:
        return x
    rounded = lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)
    if info.minexp == -126:
        return rounded
    # reduce_precision flushes what is subnormal in the narrow dtype; its grid goes on there in equal steps.
    step = 2.0 ** (info.minexp - info.nmant)
    steps = lax.round(x * np.float32(1 / step), lax.RoundingMethod.TO_NEAREST_EVEN)
    return jnp.where(jnp.abs(x) < np.float32(2.0**info.minexp), steps * np.float32(step), rounded)


class Positions(NamedTuple):
    """Positions `at`, uint32 (n,), of some elements along an axis of so many."""

    at: jax.Array
    size: int


def flat_index(axes: Sequence[Positions]) -> jax.Array:
    """The row-major index, modulo 2^32, of every element at these positions along the axes of an array.

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
class Stream:
    """A key for one of several casts, by its number.

    `seeds_of` hashes the number together with the words of the key, so that numbers give independent streams. Unlike
    jax.random.fold_in it adds no Threefry to the program, which XLA would compile again for every cast of a model.
    """

    key: jax.Array
    number: int = dataclasses.field(metadata={"static": True})


Key = jax.Array | Stream  # of jax.random, typed or raw


def key_words(key: Key) -> list[Any]:
    """The uint32 words of a key; of raw keys (..., words), each an array."""
    if isinstance(key, Stream):
        return [*key_words(key.key), np.uint32(key.number)]
    words = raw_key(key)
    return [words[..., i] for i in range(words.shape[-1])]


def raw_key(key: jax.Array) -> jax.Array:
    return jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key


def numbered(key: Key, numbers: jax.Array) -> jax.Array:
    """A raw key for each of several numbers, which need not be static: (..., words)."""
    words = [*key_words(key), numbers.astype(jnp.uint32)]
    return jnp.stack([jnp.broadcast_to(word, numbers.shape) for word in words], axis=-1)


def seeds_of(key: Key) -> tuple[jax.Array, jax.Array]:
    """Two well-mixed words from all words of the key; of raw keys (..., words), two for each."""
    first, second = mixed(key_words(key))
    return jnp.asarray(first), jnp.asarray(second)


def mixed(words: Sequence[Any]) -> tuple[Any, Any]:
    """Two well-mixed words from several."""
    first: Any = np.uint32(0x9E3779B9)
    second: Any = np.uint32(0x85EBCA6B)
    with np.errstate(over="ignore"):  # a number that is known wraps around like all others
        for word in words:
            first = _mix(first ^ _mix(word + np.uint32(0x27D4EB2F)))
            second = _mix(second + _mix(word ^ np.uint32(0x165667B1)))
    return first, second


def seeds_from(offset: jax.Array | None, first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The words of a key with which an index draws what index + offset draws with the given ones."""
    return (first if offset is None else first + offset * _STRIDE), second


def _mix(h):
    """A bijection of 32-bit words with low bias (constants from Wellons' search)."""
    h = h ^ (h >> 16)
    h = h * np.uint32(0x7FEB352D)
    h = h ^ (h >> 15)
    h = h * np.uint32(0x846CA68B)
    return h ^ (h >> 16)
