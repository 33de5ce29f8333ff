"""Convolutions under every recipe: gradients as convolutions, and casts along features and images."""

import functools

import jax
import pytest
from data import normal
from tables import EXHAUSTIVE_ONLY_RECIPES, STATELESS, params_of
from training import KEY, assert_same, conv_general_dilated, dense, nearest, vjp_of

import scaledot as sd
from scaledot.recipes import RECIPES, Cast, Gemm, Recipe

pytestmark = pytest.mark.jax_versions

CONVOLUTIONS = {
    "strided": ((3, 9, 8, 32), (3, 2, 32, 16), {"window_strides": (2, 1), "padding": "SAME"}),
    "dilated": (
        (2, 7, 9, 8),
        (3, 2, 8, 4),
        {"window_strides": (1, 2), "padding": ((1, 2), (0, -1)), "lhs_dilation": (2, 1), "rhs_dilation": (1, 2)},
    ),
    "grouped": ((2, 7, 9, 6), (3, 2, 3, 4), {"window_strides": (1, 2), "padding": "VALID", "feature_group_count": 2}),
    "depthwise": ((2, 7, 9, 6), (3, 2, 1, 12), {"window_strides": (1, 1), "padding": "SAME", "feature_group_count": 6}),
}
NHWC = ("NHWC", "HWIO", "NHWC")


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_gradients_of_convolutions_are_those_of_jax(case):
    """Under a recipe without casts, to test strides, padding, dilation and feature groups alone."""
    x_shape, w_shape, window = CONVOLUTIONS[case]
    x, w = normal(0, x_shape), normal(1, w_shape)
    plain = Recipe("plain", Gemm(), Gemm(), Gemm())
    y, vjp = jax.vjp(lambda x, w: conv_general_dilated(x, w, dimension_numbers=NHWC, recipe=plain, **window), x, w)
    expected, expected_vjp = jax.vjp(
        lambda x, w: jax.lax.conv_general_dilated(x, w, dimension_numbers=NHWC, precision="highest", **window), x, w
    )
    g = normal(2, y.shape)
    for a, b in zip((y, *vjp(g)), (expected, *expected_vjp(g)), strict=True):
        assert_same(a, b)


SUPPORTED = [name for name in STATELESS if not RECIPES[name].mean_subtracted]


@pytest.mark.parametrize("recipe", params_of(SUPPORTED, (*EXHAUSTIVE_ONLY_RECIPES, "fp8_current", "nvfp4")))
def test_convolutions_multiply_the_casts_of_their_recipe(recipe):
    """With kernels and images of one position, the convolution is `dense` of images as rows.

    A scale per image, for blocks of a whole axis, is then a scale per row.
    """
    recipe = nearest(RECIPES[recipe])
    x, w, g = normal(0, (40, 64)), normal(1, (64, 48)), normal(2, (40, 48))
    expected = vjp_of(lambda x, w: dense(x, w, recipe=recipe, key=KEY), g, x, w)

    def conv(x, w):
        y = conv_general_dilated(
            x[:, None], w[None], (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC"), recipe=recipe, key=KEY
        )
        return y[:, 0]

    for a, b in zip(vjp_of(conv, g, x, w), expected, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8", "int8"])
def test_a_convolution_is_that_of_its_dequantised_operands(recipe):
    recipe = nearest(RECIPES[recipe])
    x_shape, w_shape, window = CONVOLUTIONS["strided"]
    x, w = normal(0, x_shape), normal(1, w_shape)
    name = recipe.fwd.lhs.format
    image_block, kernel_block = {"fp8_current": ((0, 0, 0, 0), (0, 0, 0, 0)), "int8": ((1, 0, 0, 0), (0, 0, 0, 1))}.get(
        recipe.name, ((1, 1, 1, 32), (1, 1, 32, 1))
    )
    dequantised = [
        sd.dequantize(sd.quantize(a, name, axis=(0, 1, 2, 3), block=block))
        for a, block in ((x, image_block), (w, kernel_block))
    ]
    y = conv_general_dilated(x, w, dimension_numbers=NHWC, recipe=recipe, **window)
    assert_same(y, jax.lax.conv_general_dilated(*dequantised, dimension_numbers=NHWC, precision="highest", **window))


def test_a_rotated_forward_cast_of_feature_groups_has_straight_through_gradients():
    cast = Cast("int8", rotation=sd.Hadamard())
    image, kernel, g = normal(0, (2, 9, 32)), normal(1, (3, 16, 32)), normal(2, (2, 9, 32))
    window = {"window_strides": (1,), "padding": "SAME", "feature_group_count": 2}
    window["dimension_numbers"] = ("NWC", "WIO", "NWC")
    conv = functools.partial(conv_general_dilated, recipe=Recipe("r", Gemm(cast, cast)), **window)
    plain = functools.partial(jax.lax.conv_general_dilated, precision="highest", **window)
    rotation = sd.Hadamard()
    dequantised = (
        sd.dequantize(sd.quantize(image, "int8", axis=(1, 2), block=(0, 0), rotation=rotation)),
        sd.dequantize(sd.quantize(kernel, "int8", axis=(0, 1), block=(0, 0), rotation=rotation)),
    )
    for a, b in zip(vjp_of(conv, g, image, kernel)[1:], vjp_of(plain, g, *dequantised)[1:], strict=True):
        assert_same(a, b)
