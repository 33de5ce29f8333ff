"""Codes, scales and rounding errors of blocks of 16 elements, in the registers of the four-bit cast kernel.

Arrays have shape (n, 128): n elements in each of the 128 threads of a warpgroup, 16 for a block and 1 for its scale.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scaledot.formats import FORMATS
from scaledot.kernels.hopper import support
from scaledot.kernels.hopper.scale_blocks import FOUR_BIT_BLOCK as BLOCK
from scaledot.numerics.bits import INFINITY, SIGN, bits_of, float_of
from scaledot.numerics.scale_search import fraction_bits

E4M3 = FORMATS["fp8_e4m3"]
NAN_SCALE = np.uint32(0x7F)  # a code of E4M3
SECOND_ELEMENT = np.uint32(0x80)  # the sign bit of a stored scale: its codes are of the second element
LARGEST_CODE = {grid.element: grid.largest_code for grid in FORMATS["if4"].grid_formats}
ERROR_STEPS = np.float32(2.0 ** fraction_bits(BLOCK))  # per unit of a code: errors of a search are integers
TWO_23 = np.float32(2.0**23)  # float32 numbers from here to 2^24 are integers
# Adding it rounds a float32 below 2^22 to an integer, which is then the difference of the bits.
ROUNDER = np.float32(1.5 * 2.0**23)
BINADE_OF_STEP_1 = np.float32(2.0).view(np.uint32)  # in `_rounded`, a step is half a binade


def rows_of(x: jax.Array) -> list[jax.Array]:
    return [x[i : i + 1] for i in range(x.shape[0])]


def spread(per_thread: jax.Array, count: int = BLOCK) -> jax.Array:
    """Repeats one number per thread (1, 128) for `count` elements, by default those of a block: (count, 128)."""
    return jnp.concatenate([per_thread] * count)


def after(first: jax.Array, x: jax.Array, zero: jax.Array) -> jax.Array:
    """Returns x unchanged, with a false dependence on `first`, so that ptxas schedules the uses of x after `first`.

    That shortens live ranges, and ptxas allocates fewer registers. zero: uint32 zeros that the compiler cannot prove to
    be zeros.
    """
    return float_of(bits_of(x) | (bits_of(first) & zero))


def max_of(x: jax.Array) -> jax.Array:
    return functools.reduce(jnp.maximum, rows_of(x))


def sum_of(x: jax.Array) -> jax.Array:
    return functools.reduce(jnp.add, rows_of(x))


def entry(values: tuple[float, ...], i) -> Any:
    """Returns values[i] for an i that is known at run time only, without an array in memory.

    Up to 8 integers from -8 to 7 are packed into a constant word and extracted by shifts.
    """
    if all(isinstance(value, int) for value in values):
        word = np.uint32(sum((int(value) + 8) << 4 * n for n, value in enumerate(values)))
        return ((word >> (4 * i).astype(jnp.uint32)) & np.uint32(15)).astype(jnp.int32) - 8
    return functools.reduce(lambda found, n: jnp.where(i == n, values[n], found), range(1, len(values)), values[0])


def error_of(magnitude: jax.Array, element: str, saturates: bool) -> jax.Array:
    """Returns rounding errors of scaled magnitudes, as float32 integers: multiples of 1 / ERROR_STEPS of a code.

    Their squares equal `numerics.scale_search.squared_error`; their signs may differ. saturates: whether a magnitude
    may exceed the largest code. With all numbers in units of 1 / ERROR_STEPS:

        x = magnitude + 2^23    is rounded to an integer, because float32 numbers in [2^23, 2^24) are integers
        c - (c - x)             is x, rounded to a multiple of the ulp of c - x

    c is chosen so that this ulp is the step between codes. For int4 it is a constant. For E2M1, whose steps double with
    the binade, it is 2^23 + (2^22 + 1) * max(magnitude, ERROR_STEPS), Veltkamp's splitting. A tie has the same absolute
    error in either direction.
    """
    x = magnitude * ERROR_STEPS + TWO_23
    if element == "int4":
        c = np.float32(1.5) * ERROR_STEPS * TWO_23
    else:
        splitter = np.float32(2.0**22 + 1) * ERROR_STEPS
        c = jnp.maximum(magnitude * splitter + TWO_23, splitter + TWO_23)
    rounded = c - (c - x)
    if saturates:
        rounded = jnp.minimum(rounded, np.float32(LARGEST_CODE[element]) * ERROR_STEPS + TWO_23)
    return x - rounded


def encode(scaled: jax.Array, element: str) -> tuple[jax.Array, jax.Array]:
    """Rounds scaled elements to an element dtype; returns the values, float32, and their 4-bit codes, uint32.

    Values of int4 may be -0, which has the code of 0. The code of NaN is arbitrary: the block has a NaN scale.
    """
    largest = np.float32(LARGEST_CODE[element])
    if element == "int4":
        values, _, _ = _rounded(scaled, largest, np.uint32(0), BINADE_OF_STEP_1)
        return values, _int4_code(values)
    values, shifted, binade = _rounded(scaled, largest, INFINITY, np.uint32(0))
    return values, _e2m1_code(scaled, shifted, binade)


def encode_either(scaled: jax.Array, is_int4: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As `encode`, to int4 in blocks for which `is_int4` (1, 128) is true, otherwise to E2M1."""
    largest = jnp.where(is_int4, *(np.float32(LARGEST_CODE[element]) for element in ("int4", "float4_e2m1fn")))
    mask = jnp.where(is_int4, np.uint32(0), INFINITY)
    constant = jnp.where(is_int4, BINADE_OF_STEP_1, np.uint32(0))
    values, shifted, binade = _rounded(scaled, *(spread(each, scaled.shape[0]) for each in (largest, mask, constant)))
    has_int4_code = spread(is_int4.astype(jnp.uint32), scaled.shape[0]) == 1
    return values, jnp.where(has_int4_code, _int4_code(values), _e2m1_code(scaled, shifted, binade))


def _rounded(scaled: jax.Array, largest, binade_mask, constant_binade) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rounds to multiples of a step of half a binade; returns (values, saturated magnitudes + shift, binade).

    The shift is (2^23 + 2) * step, so that the ulp of magnitude + shift is the step. A binade is given as the bits of a
    power of two. With binade_mask INFINITY and constant_binade 0, as for E2M1, it is the largest one that does not
    exceed the magnitude, at least 1; with binade_mask 0 it is `constant_binade`.
    """
    magnitude = jnp.minimum(jnp.abs(scaled), largest)
    binade = (bits_of(jnp.maximum(magnitude, np.float32(1))) & binade_mask) | constant_binade
    shift = float_of(binade) * np.float32(2.0**22 + 1)
    shifted = magnitude + shift
    return float_of(bits_of(shifted - shift) | (bits_of(scaled) & SIGN)), shifted, binade


def _e2m1_code(scaled: jax.Array, shifted: jax.Array, binade: jax.Array) -> jax.Array:
    """The E2M1 codes of elements, from the results of `_rounded`.

    The low bits of `shifted` are n + 2 for a magnitude of n steps. Codes of the first two binades, [0, 1) and [1, 2),
    are n; each further binade adds 2. Twice the exponent of the first, 2 * 127, is 6 modulo 8.
    """
    code = bits_of(shifted) + (binade >> 22)
    return (code & np.uint32(7)) | ((bits_of(scaled) & SIGN) >> 28)


def _int4_code(values: jax.Array) -> jax.Array:
    return bits_of(values + ROUNDER) & np.uint32(15)


def packed(codes: jax.Array) -> jax.Array:
    """Packs 4-bit codes in uint32 (2 n, 128) to bytes (n, 128): rows 2 i in the low bits, rows 2 i + 1 in the high."""
    rows = rows_of(codes)
    return jnp.concatenate([even | (odd << 4) for even, odd in zip(rows[::2], rows[1::2], strict=True)]).astype(
        jnp.uint8
    )


def sum_of_squares(shifted: jax.Array) -> jax.Array:
    """Returns the sum over elements of x^2, with x rounded to integers, modulo 2^32 (1, 128). shifted: x + ROUNDER.

    With the bits b of `shifted` and r of ROUNDER, x^2 = (b - r)^2 = b^2 - 2 r b + r^2, where r^2 is 0 modulo 2^32.
    Summing b first takes half as many instructions as subtracting r from each, because IADD3 adds three numbers.
    """
    bits = bits_of(shifted)
    return sum_of(bits * bits) - (ROUNDER.view(np.uint32) << np.uint32(1)) * sum_of(bits)


def without_rounder(shifted: jax.Array) -> jax.Array:
    """Returns x rounded to an integer, in float32, from x + ROUNDER."""
    if support.is_interpreted():  # the or changes no bit; without it XLA would simplify the result to x
        shifted = float_of(bits_of(shifted) | TWO_23.view(np.uint32))
    return shifted - ROUNDER
