"""Codes, scales and rounding errors of blocks of 16 elements, in the registers of the four-bit cast kernel.

Arrays are (n, 128), n elements of each thread of a warpgroup: 16 for a block, 1 for its scale.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scaledot.formats import FORMATS
from scaledot.kernels.hopper import support
from scaledot.kernels.hopper.scale_blocks import FOUR_BIT_BLOCK as BLOCK
from scaledot.numerics.bits import INFINITY, SIGN, bits_of, float_of
from scaledot.numerics.scale_search import fraction_bits

E4M3 = FORMATS["fp8_e4m3"]
NAN_SCALE, LARGEST_SCALE = np.uint32(0x7F), np.uint32(0x7E)  # codes of E4M3
SECOND_ELEMENT = np.uint32(0x80)  # the sign bit of a stored scale: its codes are of the second element
LARGEST_CODE = {grid.element: grid.largest_code for grid in FORMATS["if4"].grid_formats}
ERROR_UNIT = np.float32(2.0 ** fraction_bits(BLOCK))  # errors of a search are integers in units of 1 / ERROR_UNIT
TWO_23 = np.float32(2.0**23)  # float32 numbers from here to 2^24 are integers
# Adding it rounds a float32 below 2^22 to an integer, which is then the difference of the bits.
ROUNDER = np.float32(1.5 * 2.0**23)


def rows_of(x: jax.Array) -> list[jax.Array]:
    return [x[i : i + 1] for i in range(x.shape[0])]


def spread(per_thread: jax.Array, count: int = BLOCK) -> jax.Array:
    """One number per thread, (1, 128), for `count` elements of it, by default those of a block."""
    return jnp.concatenate([per_thread] * count)


def after(first: jax.Array, x: jax.Array, zero: jax.Array) -> jax.Array:
    """Returns x with a false dependence on `first`, after which ptxas then schedules the uses of x.

    With fewer instructions in flight it allocates fewer registers. zero: words that are 0 at run time.
    """
    return float_of(bits_of(x) | (bits_of(first) & zero))


def max_of(x: jax.Array) -> jax.Array:
    return functools.reduce(jnp.maximum, rows_of(x))


def sum_of(x: jax.Array) -> jax.Array:
    return functools.reduce(jnp.add, rows_of(x))


def entry(values: tuple[float, ...], i) -> Any:
    """The number at index i, which is known at run time; up to 8 integers from -8 to 7 are packed into a word."""
    if all(isinstance(value, int) for value in values):
        word = np.uint32(sum((int(value) + 8) << 4 * n for n, value in enumerate(values)))
        return ((word >> (4 * i).astype(jnp.uint32)) & np.uint32(15)).astype(jnp.int32) - 8
    return functools.reduce(lambda found, n: jnp.where(i == n, values[n], found), range(1, len(values)), values[0])


def neighbour(code: jax.Array, offset, where: jax.Array) -> jax.Array:
    """The E4M3 code `offset` larger, at least that of the smallest scale above 0 and at most that of 448."""
    moved = jnp.maximum(code, np.uint32(1)).astype(jnp.int32) + offset
    moved = jnp.clip(moved, np.int32(1), LARGEST_SCALE.astype(np.int32))
    return jnp.where(where, moved.astype(jnp.uint32), code)


def error_of(magnitude: jax.Array, element: str) -> jax.Array:
    """Rounding errors of scaled magnitudes to an element, integers in units of 1 / ERROR_UNIT, as float32.

    Up to their sign, they are those of `numerics.scale_search.squared_error`. With magnitudes in those units, x is 2^23
    plus the magnitude, a sum that is rounded to an integer. c - (c - x) rounds x to a multiple of the last bit of
    c - x, and c is so large that this bit is a step of the element: for int4 a constant, and for E2M1 2^23 plus
    2^22 + 1 times the larger of the magnitude and 1 (Veltkamp's splitting). Which way a tie is rounded does not change
    the magnitude of the error.
    """
    x = magnitude * ERROR_UNIT + TWO_23
    if element == "int4":
        c = np.float32(1.5) * ERROR_UNIT * TWO_23
    else:
        splitter = np.float32(2.0**22 + 1) * ERROR_UNIT
        c = jnp.maximum(magnitude * splitter + TWO_23, splitter + TWO_23)
    largest = np.float32(LARGEST_CODE[element]) * ERROR_UNIT + TWO_23
    return x - jnp.minimum(c - (c - x), largest)


def _shifted_e2m1(magnitude: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (saturated magnitudes + shift, shift, binade): a sum whose last bit is a step of E2M1, so it is rounded.

    Steps are half the power of two below the magnitude, and 1/2 below 1. The shift is 2^23 + 2 steps.
    """
    clipped = jnp.minimum(magnitude, np.float32(LARGEST_CODE["float4_e2m1fn"]))
    binade = bits_of(jnp.maximum(clipped, np.float32(1))) & INFINITY
    shift = float_of(binade) * np.float32(2.0**22 + 1)
    return clipped + shift, shift, binade


def encode(scaled: jax.Array, element: str) -> tuple[jax.Array, jax.Array]:
    """Returns scaled elements rounded to values of an element, and their 4-bit codes, uint32; NaN has any code."""
    if element == "int4":
        integers = _int4(scaled)
        return integers.astype(jnp.float32), lax.bitcast_convert_type(integers, jnp.uint32) & np.uint32(15)
    shifted, shift, binade = _shifted_e2m1(jnp.abs(scaled))
    sign = bits_of(scaled) & SIGN
    # The low bits of the sum are the number of steps plus 2. Codes of the first two binades, [0, 1) and [1, 2), are the
    # number of steps; each further binade adds 2. Twice the exponent of the first, 2 · 127, is 6 modulo 8.
    code = bits_of(shifted) + (binade >> 22)
    return float_of(bits_of(shifted - shift) | sign), (code & np.uint32(7)) | (sign >> 28)


def packed(codes: jax.Array) -> jax.Array:
    """Packs two neighbours of each column, 4-bit codes in uint32 (2 n, 128), to bytes (n, 128)."""
    rows = rows_of(codes)
    return jnp.concatenate([even | (odd << 4) for even, odd in zip(rows[::2], rows[1::2], strict=True)]).astype(
        jnp.uint8
    )


def _int4(scaled: jax.Array) -> jax.Array:
    finite = jnp.where(scaled == scaled, scaled, np.float32(0))
    largest = np.float32(LARGEST_CODE["int4"])
    return integer_of(jnp.clip(finite, -largest, largest) + ROUNDER)


def sum_of_squares(shifted: jax.Array) -> jax.Array:
    """The sum of the squares of x rounded to integers, (1, 128) modulo 2^32, from x + ROUNDER.

    With the bits b of that sum and r of ROUNDER, it is the sum of (b - r)^2 = b^2 - 2 r b + r^2, where r^2 is 0 modulo
    2^32; sums of b take half as many instructions as subtractions of r, because the hardware adds three numbers.
    """
    bits = bits_of(shifted)
    return sum_of(bits * bits) - (ROUNDER.view(np.uint32) << np.uint32(1)) * sum_of(bits)


def integer_of(shifted: jax.Array) -> jax.Array:
    """Returns x rounded to int32, from x + ROUNDER."""
    return lax.bitcast_convert_type(shifted, jnp.int32) - ROUNDER.view(np.int32)


def without_rounder(shifted: jax.Array) -> jax.Array:
    """Returns x rounded to an integer, in float32, from x + ROUNDER."""
    if support.is_interpreted():  # the or changes no bit; without it XLA would simplify the result to x
        shifted = float_of(bits_of(shifted) | TWO_23.view(np.uint32))
    return shifted - ROUNDER
