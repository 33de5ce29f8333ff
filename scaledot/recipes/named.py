"""The named recipes, their table, and its look-up."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from scaledot.formats import FORMATS, row_of
from scaledot.numerics.hadamard import Hadamard
from scaledot.recipes.casts import Cast, Delayed, Gemm
from scaledot.recipes.recipe import Recipe


def of_tensors(name: str, x: Cast, w: Cast, g: Cast) -> Recipe:
    """A recipe that quantises each tensor in the same way in both of its matmuls."""
    return Recipe(name, Gemm(x, w), Gemm(g, w), Gemm(x, g))


def _delayed(format: str) -> Cast:
    return Cast(FORMATS[format], delayed=Delayed())


_E4M3, _E5M2 = Cast(FORMATS["fp8_e4m3"]), Cast(FORMATS["fp8_e5m2"])
_E4M3_1X128, _E4M3_128X128 = (Cast(FORMATS["fp8_e4m3"], block) for block in ((1, 128), (128, 128)))
_MX = Cast(FORMATS["mxfp8"])
_NV = Cast(FORMATS["nvfp4"])
_NV_16X16 = Cast(FORMATS["nvfp4"], (16, 16))
_NV_ROTATED = dataclasses.replace(_NV, rotation=Hadamard())
_INT8 = Cast(FORMATS["int8"])
_INT8_1X128 = Cast(FORMATS["int8"], (1, 128))
_INT8_ROTATED = dataclasses.replace(_INT8_1X128, rotation=Hadamard())
_INT4_1X128 = Cast(FORMATS["int4"], (1, 128))


def _stochastic(cast: Cast) -> Cast:
    return dataclasses.replace(cast, rounding="stochastic")


def _four_over_six(cast: Cast) -> Cast:
    return dataclasses.replace(cast, format=dataclasses.replace(cast.format, name="nvfp4_4o6", search="four_over_six"))


# Quartet II, arXiv 2601.22813. Block scales have headroom: four-over-six and MS-EDEN increase them. The target of
# MS-EDEN's block amax is slightly above the largest code, where a clipped maximum costs less than a coarser scale.
_QUARTET_FORWARD = Cast(
    dataclasses.replace(FORMATS["nvfp4"], name="nvfp4_4o6_256", search="four_over_six", scale_max=256.0)
)
_EDEN = Cast(
    dataclasses.replace(FORMATS["nvfp4"], name="nvfp4_eden", target=6 * (16 / 17) / 0.93, scale_max=256.0),
    rounding="ms_eden",
    rotation=Hadamard(128, mask=None),
)
_IF4_EDEN = dataclasses.replace(_EDEN, format=dataclasses.replace(FORMATS["if4"], name="if4_eden", scale_max=256.0))
_EDEN_AGAIN = dataclasses.replace(_EDEN, requantized=True)
_UNIFORM_ROTATED = Cast(FORMATS["nvint4"], rotation=Hadamard())


def _without_mean(cast: Cast) -> Cast:
    return dataclasses.replace(cast, subtract_mean=True)


def _plus(name: str, format: str, backward: Cast) -> Recipe:
    """Scales of least squared error in fwd, MS-EDEN in the backward pass, and differences to the mean for x.

    Operands of the backward pass are cast from x and w themselves, not from the operands of fwd: they are saved at 4
    bits either way. Their scales are not searched and g keeps its mean, because most of the loss gap is that of the
    forward casts.
    """
    forward = Cast(dataclasses.replace(FORMATS[format], name=f"{format}_search", search="scales", scale_max=256.0))
    return Recipe(
        name,
        fwd=Gemm(_without_mean(forward), forward),
        dgrad=Gemm(backward, backward),
        wgrad=Gemm(_without_mean(backward), backward),
    )


FP8_CURRENT = of_tensors("fp8_current", _E4M3, _E4M3, _E5M2)
FP8_DELAYED = of_tensors("fp8_delayed", _delayed("fp8_e4m3"), _delayed("fp8_e4m3"), _delayed("fp8_e5m2"))
FP8_BLOCK = of_tensors("fp8_block", _E4M3_1X128, _E4M3_128X128, _E4M3_1X128)
MXFP8 = of_tensors("mxfp8", _MX, _MX, _MX)
NVFP4 = Recipe(
    "nvfp4",
    fwd=Gemm(_NV, _NV_16X16),
    dgrad=Gemm(_stochastic(_NV), _NV_16X16),
    wgrad=Gemm(_NV_ROTATED, _stochastic(_NV_ROTATED)),
)
NVFP4_FOUR_OVER_SIX = Recipe(
    "nvfp4_four_over_six",
    fwd=Gemm(_four_over_six(_NV), _four_over_six(_NV_16X16)),
    dgrad=Gemm(_stochastic(_NV), _four_over_six(_NV_16X16)),
    wgrad=NVFP4.wgrad,
)
QUARTET_II = Recipe(
    "quartet_ii",
    fwd=Gemm(_QUARTET_FORWARD, _QUARTET_FORWARD),
    dgrad=Gemm(_EDEN, _EDEN_AGAIN),
    wgrad=Gemm(_EDEN_AGAIN, _EDEN),
)
# Averis, arXiv 2603.10444: NVIDIA's recipe with the means over tokens of x and g subtracted before their casts.
AVERIS = Recipe(
    "averis",
    fwd=Gemm(_without_mean(_NV), _NV_16X16),
    dgrad=Gemm(_without_mean(_stochastic(_NV)), _NV_16X16),
    wgrad=Gemm(_without_mean(_NV_ROTATED), _without_mean(_stochastic(_NV_ROTATED))),
)
# UFP4, arXiv 2606.20381: a uniform grid, which gains from a rotation, in all matmuls.
UFP4 = Recipe(
    "ufp4",
    fwd=Gemm(_UNIFORM_ROTATED, _UNIFORM_ROTATED),
    dgrad=Gemm(_stochastic(_UNIFORM_ROTATED), _UNIFORM_ROTATED),
    wgrad=Gemm(_UNIFORM_ROTATED, _stochastic(_UNIFORM_ROTATED)),
)
NVFP4_PLUS = _plus("nvfp4_plus", "nvfp4", _EDEN)
IF4 = _plus("if4", "if4", _IF4_EDEN)
INT8 = of_tensors("int8", _INT8, _INT8, _stochastic(_INT8))
INT8_BLOCK = Recipe(
    "int8_block",
    fwd=Gemm(_INT8_ROTATED, _INT8_ROTATED),
    dgrad=Gemm(_stochastic(_INT8_1X128), _INT8_1X128),
    wgrad=Gemm(_INT8_1X128, _stochastic(_INT8_1X128)),
)
INT8_QAT = Recipe("int8_qat", Gemm(_INT8, _INT8))
FP8_QAT = Recipe("fp8_qat", Gemm(_E4M3, _E4M3))
W8A16_QAT = Recipe("w8a16_qat", Gemm(None, _INT8))
W4A16_QAT = Recipe("w4a16_qat", Gemm(None, _INT4_1X128))
W4A8_QAT = Recipe("w4a8_qat", Gemm(_INT8, _INT4_1X128))
UNQUANTISED = Recipe("unquantised", Gemm(), Gemm(), Gemm())  # not in RECIPES, as it quantises nothing

RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        recipe.name: recipe
        for recipe in (
            FP8_CURRENT,
            FP8_DELAYED,
            FP8_BLOCK,
            MXFP8,
            NVFP4,
            NVFP4_FOUR_OVER_SIX,
            NVFP4_PLUS,
            QUARTET_II,
            AVERIS,
            UFP4,
            IF4,
            INT8,
            INT8_BLOCK,
            INT8_QAT,
            FP8_QAT,
            W8A16_QAT,
            W4A16_QAT,
            W4A8_QAT,
        )
    }
)


def find_recipe(recipe: str | Recipe) -> Recipe:
    """Returns `recipe` itself, or the row of RECIPES with that name.

    >>> find_recipe("mxfp8") is MXFP8
    True
    """
    return row_of("recipe", recipe, Recipe, RECIPES, "RECIPES")
