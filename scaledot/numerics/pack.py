"""Storage layouts of checkpoints and tensor cores: nibbles, dense bit streams, swizzled block scales."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def pack_nibbles(codes: jax.Array) -> jax.Array:
    """Packs two codes of a 4-bit dtype per byte along the last axis, the even element in the low nibble.

    >>> pack_nibbles(jnp.array([1, 2, 3, 4], jnp.uint4))
    Array([33, 67], dtype=uint8)
    """
    if codes.dtype not in (jnp.uint4, jnp.int4, jnp.float4_e2m1fn):
        raise TypeError(f"`codes` must have a 4-bit dtype, not {codes.dtype}")
    if codes.shape[-1] % 2:
        raise ValueError(f"cannot pack nibbles along a last axis of {codes.shape[-1]}; it must be even")
    return lax.bitcast_convert_type(codes.reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2), jnp.uint8)


def unpack_nibbles(packed: jax.Array, dtype) -> jax.Array:
    """The inverse of `pack_nibbles`, for any 4-bit `dtype`.

    >>> unpack_nibbles(jnp.array([33, 67], jnp.uint8), jnp.uint4)
    Array([1, 2, 3, 4], dtype=uint4)
    """
    pairs = lax.bitcast_convert_type(packed, dtype)
    return pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def pack_bits(codes: jax.Array, bits: int, *, axis: int = -1, word=jnp.int32) -> jax.Array:
    """Packs integer codes of `bits` bits as a dense little-endian bit stream of words along `axis`.

    Signed codes are stored in offset binary (code + 2^(bits-1)); the last word is padded with zero bits.

    >>> pack_bits(jnp.array([1, 2, 3], jnp.uint8), 6, word=jnp.uint8)
    Array([129,  48,   0], dtype=uint8)
    """
    codes = jnp.moveaxis(codes, axis, -1)
    offset = 2 ** (bits - 1) if jnp.issubdtype(codes.dtype, jnp.signedinteger) else 0
    unsigned = (codes.astype(jnp.int32) + offset).astype(jnp.uint32)
    stream = _bits_of_each(unsigned, bits)
    width = jnp.iinfo(word).bits
    stream = stream.reshape(*codes.shape[:-1], codes.shape[-1] * bits)
    stream = jnp.pad(stream, [(0, 0)] * (codes.ndim - 1) + [(0, -stream.shape[-1] % width)])
    stream = stream.reshape(*codes.shape[:-1], stream.shape[-1] // width, width)
    return jnp.moveaxis(_join_bits(stream).astype(_unsigned(word)).view(word), -1, axis)


def unpack_bits(packed: jax.Array, bits: int, count: int, *, axis: int = -1, signed: bool = True) -> jax.Array:
    """Unpacks the first `count` codes of a bit stream from `pack_bits`, as int8 or uint8.

    >>> unpack_bits(jnp.array([129, 48, 0], jnp.uint8), 6, 3, signed=False)
    Array([1, 2, 3], dtype=uint8)
    """
    packed = jnp.moveaxis(packed, axis, -1)
    width = jnp.iinfo(packed.dtype).bits
    words = packed.view(_unsigned(packed.dtype)).astype(jnp.uint32)
    stream = _bits_of_each(words, width)
    stream = stream.reshape(*packed.shape[:-1], packed.shape[-1] * width)
    if count * bits > stream.shape[-1]:
        raise ValueError(f"`count` {count} codes of {bits} bits do not fit {stream.shape[-1]} packed bits")
    stream = stream[..., : count * bits].reshape(*packed.shape[:-1], count, bits)
    unsigned = _join_bits(stream).astype(jnp.int32)
    codes = (unsigned - 2 ** (bits - 1)).astype(jnp.int8) if signed else unsigned.astype(jnp.uint8)
    return jnp.moveaxis(codes, -1, axis)


def _bits_of_each(words: jax.Array, width: int) -> jax.Array:
    """Expands uint32 words to a new last axis of their `width` low bits, lowest first."""
    position = lax.broadcasted_iota(jnp.uint32, (*words.shape, width), words.ndim)
    return (words[..., None] >> position) & 1


def _join_bits(stream: jax.Array) -> jax.Array:
    position = lax.broadcasted_iota(jnp.uint32, stream.shape, stream.ndim - 1)
    return jnp.sum(stream << position, axis=-1, dtype=jnp.uint32)


def _unsigned(word) -> np.dtype:
    return np.dtype(f"uint{jnp.iinfo(word).bits}")


def tile_scales(scale: jax.Array) -> jax.Array:
    """Swizzles a (rows, columns) matrix of block scales to the layout of Blackwell tensor cores, as a flat array.

    The matrix is zero-padded to 128 x 4 tiles, which are stored in row-major order. Within a tile the flat index of
    (r, c) is (r % 32) * 16 + (r // 32) * 4 + c.
    """
    if scale.ndim != 2:
        raise ValueError(f"`scale` must be a matrix, not of shape {scale.shape}")
    rows, columns = scale.shape
    raw = lax.bitcast_convert_type(scale, jnp.uint8)
    raw = jnp.pad(raw, ((0, -rows % 128), (0, -columns % 4)))
    tiles = raw.reshape(raw.shape[0] // 128, 4, 32, raw.shape[1] // 4, 4)  # tile row, r // 32, r % 32, tile column, c
    return lax.bitcast_convert_type(tiles.transpose(0, 3, 2, 1, 4).reshape(-1), scale.dtype)


def untile_scales(tiled: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """The inverse of `tile_scales`, for a matrix of `shape` (rows, columns)."""
    rows, columns = shape
    tile_rows, tile_columns = -(-rows // 128), -(-columns // 4)
    if tiled.size != tile_rows * tile_columns * 512:
        raise ValueError(
            f"`tiled` has {tiled.size} entries; a {rows} x {columns} matrix takes {tile_rows * tile_columns * 512}"
        )
    raw = lax.bitcast_convert_type(tiled, jnp.uint8).reshape(tile_rows, tile_columns, 32, 4, 4)
    raw = raw.transpose(0, 3, 2, 1, 4).reshape(tile_rows * 128, tile_columns * 4)[:rows, :columns]
    return lax.bitcast_convert_type(raw, tiled.dtype)
