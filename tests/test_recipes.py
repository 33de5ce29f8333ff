"""Recipes: printing, JSON, look-up by name, and errors for invalid ones."""

import dataclasses
import json

import pytest

import scaledot as sd
from scaledot import recipes
from scaledot.recipes import RECIPES, Cast, Gemm, Recipe, find_recipe


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_recipes_survive_json(recipe):
    restored = Recipe.from_json(recipe.to_json())
    assert restored == recipe
    assert hash(restored) == hash(recipe)
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


def test_every_field_of_a_cast_survives_json():
    row = dataclasses.replace(sd.FORMATS["fp8_e4m3"], name="mine", pow2=True, quirks=sd.Quirks(least_amax=1e-4))
    casts = [
        Cast(row, (1, 64), "stochastic", sd.Hadamard(32, 5), calibration="rms,3"),
        Cast("fp8_e5m2", delayed=sd.Delayed(16, "most_recent", 1)),
        Cast("nf4"),
        Cast("int8", (0,), calibration="fixed,4"),
    ]
    recipe = Recipe("all", Gemm(None, casts[1]), Gemm(casts[0], casts[0]), Gemm(casts[2], casts[3]))
    assert Recipe.from_json(recipe.to_json()) == recipe


def test_a_recipe_prints_as_a_table():
    assert str(recipes.NVFP4).splitlines() == [
        "nvfp4",
        "  fwd    x nvfp4 1×16                 w nvfp4 16×16",
        "  dgrad  g nvfp4 1×16 stochastic      w nvfp4 16×16",
        "  wgrad  x nvfp4 1×16 hadamard16      g nvfp4 1×16 stochastic hadamard16",
    ]
    assert str(recipes.W4A16_QAT).splitlines() == [
        "w4a16_qat",
        "  fwd    x unquantised      w int4 1×128",
        "  dgrad and wgrad straight through",
    ]


def test_recipes_are_found_by_name():
    assert find_recipe("nvfp4") is recipes.NVFP4
    assert find_recipe(recipes.NVFP4) is recipes.NVFP4
    assert all(recipe.name == name for name, recipe in RECIPES.items())


def nvfp4(**fields):
    return dataclasses.replace(sd.FORMATS["nvfp4"], **fields)


def cast_from(**fields):
    return Recipe.from_dict({"name": "a", "fwd": {"lhs": {"format": "int8", **fields}}})


def test_lists_in_formats_become_tuples():
    format = dataclasses.replace(sd.FORMATS["if4"], grids=["int4", "float4_e2m1fn"], block=[16])
    assert hash(Cast(format)) == hash(Cast(dataclasses.replace(format, grids=tuple(format.grids), block=(16,))))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: find_recipe("fp8_curent"), "did you mean 'fp8_current'"),
        (lambda: find_recipe("NVFP4_PLUS"), "did you mean 'nvfp4_plus'"),
        (lambda: find_recipe(3), "must be a Recipe"),
        (lambda: Cast("mxfp7"), "not in FORMATS"),
        (lambda: Cast("mxfp8", (1, 2, 3)), r"\(free, contracting\)"),
        (lambda: Cast("mxfp8", (-1,)), r"sizes of at least 1 or 0"),
        (lambda: Cast("mxfp8", rounding="up"), "use one of 'nearest', 'stochastic'"),
        (lambda: Cast("mxfp8", calibration="best"), "best"),
        (
            lambda: Gemm(Cast("int8", rotation=sd.Hadamard()), Cast("int8")),
            "both operands of a Gemm must have the same rotation",
        ),
        (lambda: Recipe.from_dict({"name": "a", "fwd": {}, "bwd": {}}), "no field 'bwd'; it takes name, fwd"),
        (lambda: Recipe.from_dict({"name": "a", "fwd": {"left": {}}}), "no field 'left'"),
        (lambda: Recipe.from_dict({"name": "a", "fwd": {"lhs": {"fmt": "int8"}}}), "no field 'fmt'"),
        (lambda: Recipe.from_dict({"name": "a"}), "a recipe needs 'fwd'"),
        (lambda: Recipe.from_dict({"name": "a", "fwd": {"lhs": "int8"}}), "must be written as a mapping"),
        (lambda: Recipe.from_dict({"name": "a", "fwd": {"lhs": {}}}), "a cast needs a 'format'"),
        (lambda: Recipe("a", None), "`fwd` of a Recipe must be a Gemm"),
        (lambda: Gemm("mxfp8", None), "a Gemm takes two Casts or None"),
        (lambda: Cast("fp8_e4m3", delayed=True), "must be a Delayed or None"),
        (
            lambda: Cast("fp8_e4m3", rotation=sd.Hadamard(), delayed=sd.Delayed()),
            "uses the amax of the tensor: it takes no `rotation`",
        ),
        (
            lambda: Recipe("r", Gemm(*[Cast("int8", calibration="rms,2", rotation=sd.Hadamard())] * 2)),
            "straight-through, but .* clips elements after the rotation",
        ),
        (
            lambda: Recipe("r", Gemm(*[Cast("nvfp4", rotation=sd.Hadamard(128, mask=None))] * 2)),
            "dgrad of r is straight-through .* w of fwd, but the signs .* dgrad=Gemm()",
        ),
        (lambda: Cast("nvfp4", rotation=sd.Hadamard(axis=0)), "along the contracting dim.* instead of 0"),
        (lambda: Cast("nvfp4", rotation=16), "`rotation` of a Cast must be a Hadamard or None, not 16"),
        (lambda: Cast(nvfp4(target=0.0)), "`target` 0.0 of nvfp4 must be above 0"),
        (lambda: Cast(nvfp4(target="6")), "`target` of nvfp4 must be a number, not '6'"),
        (lambda: Cast(nvfp4(scale_max=float("nan"))), "`scale_max` nan of nvfp4 must be above 0"),
        (lambda: Cast(nvfp4(search="scale")), "`search` 'scale' of nvfp4 is not known"),
        (lambda: Cast(nvfp4(search="scales"), calibration="mse"), "whose scales are searched; drop it"),
        (lambda: Recipe(None, Gemm()), "`name` of a Recipe must be a string, not None"),
        (lambda: cast_from(rotation=16), "a rotation must be written as a mapping with size, mask"),
        (lambda: cast_from(delayed={"steps": 3}), "a delayed scaling has no field 'steps'; it takes length"),
        (lambda: cast_from(format={"name": "a"}), "a format needs 'element'; it has name"),
        (lambda: Cast("nvfp4", requantized="no"), "`requantized` of a Cast must be True or False, not 'no'"),
    ],
)
def test_invalid_recipes_are_refused(build, message):
    with pytest.raises((ValueError, TypeError), match=message):
        build()
