"""What a recipe asks of a device: the kind of each product, blocks that must stay whole, and bytes of casts."""

import math
from collections.abc import Mapping

from scaledot.formats import row_of
from scaledot.recipes import RECIPES, Cast, Gemm, Recipe

BASELINE = Recipe("bf16", Gemm(), Gemm(), Gemm())  # casts nothing, so that what differs is only the numbers
KNOWN = {BASELINE.name: BASELINE, **RECIPES}

AXES = {"x": "ti", "w": "io", "g": "to"}  # tokens, inputs and outputs
SUMMED = {"fwd": "i", "dgrad": "o", "wgrad": "t"}


def find_recipe(name: str) -> Recipe:
    return row_of("recipe", name, Recipe, KNOWN, "RECIPES")


def kind_of(recipe: Recipe, product: str) -> str:
    """Which rate a product has; one that is straight-through, or has an operand as it is, is of bfloat16."""
    gemm: Gemm | None = getattr(recipe, product)
    if gemm is None or gemm.lhs is None or gemm.rhs is None:
        return "bf16"
    widest = max((gemm.lhs, gemm.rhs), key=lambda cast: cast.format.bits)
    if widest.format.scale != "float32":
        return "nvfp4" if widest.format.two_level else "mxfp8"
    element = "int8" if widest.format.is_integer else "fp8"
    return f"{element}_block" if any(size > 1 for size in widest.tile) else element


def block_along(recipe: Recipe, axis: str) -> int:
    """Elements of an axis (t, i or o) that devices must not part, the most that any cast has.

    >>> from scaledot.recipes import FP8_BLOCK, FP8_CURRENT
    >>> block_along(FP8_BLOCK, "i"), block_along(FP8_CURRENT, "i")
    (128, 1)
    """
    sizes = [1]
    for product, tensor, cast in recipe.casts():
        kept, summed = cast.tile
        if axis == SUMMED[product] and axis in AXES[tensor]:
            sizes += [summed, cast.rotation.size if cast.rotation else 1]
        elif axis in AXES[tensor]:
            sizes.append(kept)
    return max(sizes)


def cast_bytes(recipe: Recipe, parts: Mapping[str, float]) -> float:
    """That the casts of a layer read and write, where a device has so many elements of x, w and g.

    Each product has codes of its own. Weights are float32, and rounded once for what takes them as they are; the rest
    is bfloat16.
    """
    total = 0.0
    for tensor, elements in parts.items():
        written = [bits_of(cast) for _, of, cast in recipe.casts() if of == tensor]
        if tensor == "w" and (recipe.fwd.rhs is None or recipe.dgrad == Gemm()):
            written.append(16)
        if written:
            total += elements * ((32 if tensor == "w" else 16) + sum(written)) / 8
    return total


def bits_of(cast: Cast) -> float:
    """Of an element's code, and its share of a block's scale."""
    scale = 32 if cast.format.scale == "float32" else 8
    return cast.format.bits + (scale / math.prod(cast.tile) if all(cast.tile) else 0)
