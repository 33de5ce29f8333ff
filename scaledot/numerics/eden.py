"""MS-EDEN: nearest codes whose block scales are corrected, so that the cast is unbiased over random rotations.

After a rotation with random signs, rounding to nearest shrinks a group of elements towards 0 on average. MS-EDEN
(Quartet II, arXiv 2601.22813) multiplies the block scales of each rotated group by <s, s> / <s, q>, where s are the
elements in units of their block scale and q their codes. If the scales of a group were equal, the corrected codes would
have the projection on the group that the group has on itself; as they differ, it is slightly smaller. The corrected
scales are rounded to E4M3 stochastically. The error is close to that of rounding to nearest, where unbiased
stochastic rounding of the codes has twice the variance.

It is unbiased to the extent that the direction of a rotated group is uniform: for elements of similar magnitude, and
not for a group with one dominant element, which all rotations map to codes of equal magnitude, or with few elements
other than 0, such as a dim of 8 elements that is padded to the size of the rotation.

Both inner products are sums of integers, the elements in steps of 2^-9, so that every order of summation and every
backend gives the same bits; the rounding to such steps changes a correction by about 1e-4. The sums fit 32 bits only
for elements of at most LARGEST_ELEMENT, so scales must follow from the amax of their blocks.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scaledot.formats import FORMATS, Format
from scaledot.numerics import blocks
from scaledot.numerics.bits import divide
from scaledot.numerics.calibrate import Calibration, block_sum
from scaledot.numerics.encode import encode
from scaledot.numerics.hadamard import Hadamard
from scaledot.numerics.rounding import Key, Positions, flat_index, seeds_of, uniform_at
from scaledot.numerics.scale_search import LARGEST_ERROR

STEPS = np.float32(2.0**9)  # per unit of a code
CODE_STEPS = np.float32(2)  # the codes of ELEMENTS are multiples of 1/2
ELEMENTS = {"float4_e2m1fn", "int4"}
MAX_GROUP = 128
LARGEST_ELEMENT = 11  # units of a code: MAX_GROUP squares of it, in STEPS, fit uint32
# Rounding an E4M3 block scale increases the scaled elements by up to 1.5, if a subnormal scale of 1.5 steps becomes 1.
SCALE_ROUNDING = 1.5


def unsupported(
    format: Format, calibration: Calibration, rotation: Hadamard | None, rotated_block: int, other_blocks: Sequence[int]
) -> str | None:
    """Why a cast cannot correct its scales, or None. rotated_block: the block entry of the rotated axis."""
    if format.scale != "float8_e4m3fn" or not {grid.element for grid in format.grid_formats} <= ELEMENTS:
        return f"needs E4M3 block scales and E2M1 or int4 codes, such as those of nvfp4, not {format.name}"
    if calibration != Calibration("absmax"):
        return f"needs block scales that follow from the amax, not calibration '{calibration}'"
    largest = max(map(_largest_element, format.grid_formats))
    if largest > LARGEST_ELEMENT:
        remedy = "use bound='full'" if format.bound == "half" else f"lower its `target`, {format.max:g}"
        return (
            f"adds squares of elements of at most {LARGEST_ELEMENT} units of a code, but in {format.name} they reach "
            f"{largest:g}; {remedy}"
        )
    if rotation is None or not rotated_block < rotation.size <= MAX_GROUP:
        size = "none" if rotation is None else f"one of {rotation.size}"
        return (
            f"needs a rotation of more than a block and at most {MAX_GROUP} elements, such as Hadamard(128), not {size}"
        )
    if rotated_block < 2 or rotation.size % rotated_block or any(size != 1 for size in other_blocks):
        return (
            f"corrects the scales of 1-D blocks along the rotation, not of blocks of {(*other_blocks, rotated_block)}"
        )
    return None


def _largest_element(grid: Format) -> float:
    """Returns an upper bound of |element| / block scale in this grid."""
    searched = grid.largest_code + LARGEST_ERROR if grid.search == "scales" else 0.0
    return max(SCALE_ROUNDING * grid.max, searched)


def corrected_scale(
    scaled: jax.Array, codes: jax.Array, scale: jax.Array, block: blocks.Block, group: blocks.Block, uniform: jax.Array
) -> jax.Array:
    """E4M3 scales times the correction of their group, rounded stochastically; NaN scales stay NaN.

    scaled: float32 elements in units of their scale. codes: their decoded codes. block, group: the elements that share
    a scale, and those that were rotated together. uniform: one number in [0, 1) for each scale.
    """
    in_steps = lax.round(scaled * STEPS, lax.RoundingMethod.TO_NEAREST_EVEN).astype(jnp.int32)
    code_steps = (codes * CODE_STEPS).astype(jnp.int32)
    squares = block_sum((in_steps * in_steps).astype(jnp.uint32), group)
    projections = block_sum(in_steps * code_steps, group)
    per_scale = tuple(g // max(b, 1) for g, b in zip(group, block, strict=True))
    value = scale.astype(jnp.float32)
    corrected = value * blocks.repeat_scale(correction(squares, projections), scale.shape, per_scale)
    return encode(jnp.where(jnp.isnan(value), value, corrected), FORMATS["fp8_e4m3"], uniform)


def correction(squares: jax.Array, projections: jax.Array) -> jax.Array:
    """The factor that corrects the block scales of each group; 1 if all codes of the group are 0.

    squares: the sum over the group of the squared elements. projections: that of the products of elements and codes.
    Both are integers in the steps above.
    """
    quotient = divide(squares.astype(jnp.float32), projections.astype(jnp.float32) * (STEPS / CODE_STEPS))
    return jnp.where(projections == 0, np.float32(1), quotient)


def scale_uniforms(key: Key, shape: tuple[int, ...], block: blocks.Block) -> jax.Array:
    """The random number of each block: that of its first element (`rounding.uniform_of`)."""
    sizes = blocks.expand(block, len(shape))
    starts = (np.arange(0, size, step or max(size, 1)) for size, step in zip(shape, sizes, strict=True))
    axes = [Positions(jnp.asarray(start, jnp.uint32), size) for start, size in zip(starts, shape, strict=True)]
    return uniform_at(flat_index(axes), *seeds_of(key))


def first_of_blocks(x: jax.Array, block: blocks.Block) -> jax.Array:
    """The first element of each block, in the shape of the scale."""
    sizes = blocks.expand(block, x.ndim)
    return x[tuple(slice(None, None, step or max(size, 1)) for size, step in zip(x.shape, sizes, strict=True))]
