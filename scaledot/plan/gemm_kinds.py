"""Derives from a recipe what a plan needs: the kind of each GEMM, block sizes that shards must contain, bytes of casts.

The kind of a GEMM ("bf16", "fp8", "fp8_block", "mxfp8", ...) is its row in the tables of rates (`rates`).
"""

import dataclasses
import math
from collections.abc import Mapping

from scaledot.formats import row_of
from scaledot.recipes import RECIPES, UNQUANTISED, Cast, Gemm, Recipe

# A recipe without casts, so that the bfloat16 program differs from the others in its dtypes only.
BASELINE = dataclasses.replace(UNQUANTISED, name="bf16")
RECIPES_AND_BASELINE = {BASELINE.name: BASELINE, **RECIPES}

TENSOR_AXES = {"x": "ti", "w": "io", "g": "to"}  # t: tokens, i: inputs, o: outputs
CONTRACTING_AXIS = {"fwd": "i", "dgrad": "o", "wgrad": "t"}


def find_recipe(name: str) -> Recipe:
    """Returns the recipe of that name, of RECIPES or the bfloat16 baseline."""
    return row_of("recipe", name, Recipe, RECIPES_AND_BASELINE, "RECIPES")


def gemm_kind(recipe: Recipe, gemm: str) -> str:
    """Returns the kind of "fwd", "dgrad" or "wgrad": the key of its rate in `Rates.matmuls`.

    Straight-through GEMMs and those with an operand that is not cast run in bfloat16.
    """
    casts: Gemm | None = getattr(recipe, gemm)
    if casts is None or casts.lhs is None or casts.rhs is None:
        return "bf16"
    widest = max((casts.lhs, casts.rhs), key=lambda cast: cast.format.bits)
    if widest.format.scale != "float32":
        return "nvfp4" if widest.format.two_level else "mxfp8"
    element = "int8" if widest.format.is_integer else "fp8"
    return f"{element}_block" if any(size > 1 for size in widest.block_2d) else element


def block_size_along(recipe: Recipe, axis: str) -> int:
    """Returns the largest block of any cast along an axis (t, i or o); shards must be whole multiples of it.

    >>> from scaledot.recipes import FP8_BLOCK, FP8_CURRENT
    >>> block_size_along(FP8_BLOCK, "i"), block_size_along(FP8_CURRENT, "i")
    (128, 1)
    """
    sizes = [1]
    for gemm, tensor, cast in recipe.casts():
        free, contracting = cast.block_2d
        if axis == CONTRACTING_AXIS[gemm] and axis in TENSOR_AXES[tensor]:
            sizes += [contracting, cast.rotation.size if cast.rotation else 1]
        elif axis in TENSOR_AXES[tensor]:
            sizes.append(free)
    return max(sizes)


def cast_bytes(recipe: Recipe, elements: Mapping[str, float]) -> float:
    """Returns the bytes that the casts of one linear layer read and write.

    Each tensor is read once: w as float32, x and g as bfloat16. Each GEMM has its own codes. w is also written once as
    bfloat16 if a GEMM uses it without a cast.

    elements: of x, w and g on a device.
    """
    total = 0.0
    for tensor, count in elements.items():
        written_bits = [bits_per_element(cast) for _, cast_tensor, cast in recipe.casts() if cast_tensor == tensor]
        if tensor == "w" and (recipe.fwd.rhs is None or recipe.dgrad == Gemm()):
            written_bits.append(16)
        if written_bits:
            total += count * ((32 if tensor == "w" else 16) + sum(written_bits)) / 8
    return total


def bits_per_element(cast: Cast) -> float:
    """Returns the bits of a code and its share of the scale of its block."""
    scale_bits = 32 if cast.format.scale == "float32" else 8
    return cast.format.bits + (scale_bits / math.prod(cast.block_2d) if all(cast.block_2d) else 0)
