"""Which E4M3 block scales and grids a search tries, and the squared error that it compares.

A search tries the scale that maps the block amax to `Format.max` first, and keeps it if no other has a smaller error.

* "scales" tries neighbours of that scale, given as differences of E4M3 codes (8 codes are a factor of 2). A smaller
  scale saturates the largest elements and rounds the others finer; a scale 4 to 6 codes larger maps the amax of E2M1 to
  between 3.4 and 4.5, so that no element is rounded in the step of 2 from 4 to 6. A scale twice as large is never
  better: its values are a subset.
* "four_over_six" (arXiv 2512.02010) tries the scale of 1.5 times the amax, which maps the amax of E2M1 to 4 instead of
  6. Neither scale saturates elements, up to the rounding of scales to E4M3.
* Without a search, a format with two grids tries one scale in each.

Errors are fixed-point numbers in units of a code, so coarse that sums of their squares are exact in float32 as well as
in int32: every backend and every order of summation chooses the same scale.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from scaledot.formats import Format
from scaledot.numerics.encode import round_to_element
from scaledot.numerics.rounding import round_integer
from scaledot.numerics.scale import Candidate

# For each element, differences of E4M3 codes from the abs-max scale; the first of equal errors is kept. Those above 0
# come last: they saturate no element if the block amax maps to at most the largest code, and kernels then compute their
# errors with fewer instructions.
# SNR on N(0,1) of 1×16 and 16×16 blocks, in dB, by number of candidates, from a sweep over -8 to 10:
#   E2M1 1: 20.44, 19.08   3 (0 -1 5): 21.53   5 (+ 1 4): 21.75   8 (+ -2 3 6): 21.81, 19.45   all: 21.81, 19.46
#   int4 1: 21.28, 17.97   4 (0 -1 1 2): 21.75, 18.67   6 (+ -2 -3): 21.75, 19.15   all: 21.76, 19.18
OFFSETS: dict[str, tuple[int, ...]] = {
    "float4_e2m1fn": (0, -1, -2, 1, 3, 4, 5, 6),
    "int4": (0, -1, -2, -3, 1, 2),
}
# What "four_over_six" multiplies the amax by, for E2M1; SNR as above: 21.22, 19.08.
RATIOS = (1.0, 1.5)
# A candidate that saturates an element by more is not considered, which bounds the squares.
LARGEST_ERROR = 4  # units of a code


def candidates_of(format: Format) -> list[Candidate]:
    """The scales to try, in each grid of the format; of equal errors the first is kept."""
    if format.search == "four_over_six":
        return [Candidate(ratio=ratio) for ratio in RATIOS]
    grids = enumerate(grid.element for grid in format.grid_formats)
    offsets = OFFSETS if format.search == "scales" else dict.fromkeys(OFFSETS, (0,))
    return [Candidate(offset, index) for index, element in grids for offset in offsets[element]]


def check_stochastic(format: Format) -> None:
    """Raises ValueError for a format whose searched scales saturate elements, which stochastic rounding does not."""
    if format.search == "scales":
        raise ValueError(
            f"`rounding` 'stochastic' of {format.name} would be biased: its searched scales saturate the largest "
            "elements; use 'nearest', or a format without `search`"
        )


def fraction_bits(elements: int) -> int:
    """The number of fractional bits with which sums of the squared errors of `elements` elements fit 24 bits."""
    largest_square_bits = 2 * int(math.log2(LARGEST_ERROR))
    return max(0, (24 - largest_square_bits - math.ceil(math.log2(max(elements, 1)))) // 2)


def squared_error(scaled: jax.Array, format: Format, bits: int) -> jax.Array:
    """int32 squares of the rounding errors of scaled elements, in units of 2^-bits of a code."""
    unit = np.float32(2**bits)
    error = round_integer(scaled * unit) - round_to_grid(scaled, format) * unit
    return (error * error).astype(jnp.int32)


def round_to_grid(scaled: jax.Array, format: Format) -> jax.Array:
    """Rounds finite scaled elements to the nearest code, in float32."""
    if format.is_float:
        return round_to_element(scaled, format)
    return jnp.clip(round_integer(scaled), *map(np.float32, format.integer_range))
