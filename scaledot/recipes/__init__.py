"""Training recipes: how each operand of the three matmuls of a linear layer is quantised.

Training y = x w takes three matmuls: fwd (y = x w), dgrad (dx = g wᵀ with g = dy) and wgrad (dw = xᵀ g). A Recipe has a
Gemm for each, and a Gemm has a Cast for each operand. All are frozen dataclasses; a variant is made with
`dataclasses.replace`. Printing a recipe shows it as a table:

>>> print(FP8_BLOCK)
fp8_block
  fwd    x fp8_e4m3 1×128      w fp8_e4m3 128×128
  dgrad  g fp8_e4m3 1×128      w fp8_e4m3 128×128
  wgrad  x fp8_e4m3 1×128      g fp8_e4m3 1×128

Blocks are written (free × contracting): the last entry is along the contracting dim of that matmul. A recipe without
dgrad and wgrad uses the straight-through estimator (quantisation-aware training): the backward pass multiplies
full-precision gradients by the dequantised forward operands, and the gradient is zero where the calibration of the
forward cast clipped.
"""

from scaledot.recipes.casts import Cast, Delayed, Gemm
from scaledot.recipes.named import (
    AVERIS,
    FP8_BLOCK,
    FP8_CURRENT,
    FP8_DELAYED,
    FP8_QAT,
    IF4,
    INT8,
    INT8_BLOCK,
    INT8_QAT,
    MXFP8,
    NVFP4,
    NVFP4_FOUR_OVER_SIX,
    NVFP4_PLUS,
    QUARTET_II,
    RECIPES,
    UFP4,
    UNQUANTISED,
    W4A8_QAT,
    W4A16_QAT,
    W8A16_QAT,
    find_recipe,
    of_tensors,
)
from scaledot.recipes.recipe import Recipe

__all__ = [
    "AVERIS",
    "FP8_BLOCK",
    "FP8_CURRENT",
    "FP8_DELAYED",
    "FP8_QAT",
    "IF4",
    "INT8",
    "INT8_BLOCK",
    "INT8_QAT",
    "MXFP8",
    "NVFP4",
    "NVFP4_FOUR_OVER_SIX",
    "NVFP4_PLUS",
    "QUARTET_II",
    "RECIPES",
    "UFP4",
    "UNQUANTISED",
    "W4A8_QAT",
    "W4A16_QAT",
    "W8A16_QAT",
    "Cast",
    "Delayed",
    "Gemm",
    "Recipe",
    "find_recipe",
    "of_tensors",
]
