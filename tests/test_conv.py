"""conv_general_dilated on scaled images and kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data import normal_by_axis
from jax import lax
from reference import assert_one_rounding, equations, exact
from test_dot import CASTS, EACH_CAST, SIDES

import scaledot as sd

NHWC = ("NHWC", "HWIO", "NHWC")
WINDOWS = {
    "valid": ((1, 1), "VALID", {}),
    "same, strided": ((2, 1), "SAME", {}),
    "padded, dilated": ((1, 2), ((2, 1), (0, 3)), {"lhs_dilation": (2, 1), "rhs_dilation": (1, 2)}),
    "feature groups": ((1, 1), "SAME", {"feature_group_count": 2}),
}


def scaled(x, cast, axis):
    """Quantised with one scale per image or output feature if blocks are a whole axis, else with blocks of features."""
    format, options = CASTS[cast]
    options = {k: v for k, v in options.items() if k != "rotation"}
    if (sd.find_format(format).block == (0,) and "block" not in options) or options.get("block") in ((0,), (0, 0)):
        free = 0 if axis == 3 else 3
        axis, options["block"] = tuple(a for a in range(4) if a != free), (0, 0, 0)
    return sd.quantize(x, format, axis=axis, pad=True, **options)


def exact_conv(lhs, rhs, strides, padding, **options):
    """The convolution by jax.lax in float64, and that of the magnitudes."""
    with jax.enable_x64(True):

        def conv(a, b):
            return np.asarray(
                lax.conv_general_dilated(
                    jnp.asarray(a), jnp.asarray(b), strides, padding, dimension_numbers=NHWC, **options
                )
            )

        return conv(lhs, rhs), conv(np.abs(lhs), np.abs(rhs))


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("cast", ["fp8_e4m3", "mxfp8", "nvfp4", "int8", "int8 zeros", "int4 groups zeros", "nf4"])
def test_windows(cast, window, sides):
    strides, padding, options = WINDOWS[window]
    groups = options.get("feature_group_count", 1)
    lhs, rhs = normal_by_axis(0, (2, 6, 7, 32)), normal_by_axis(1, (3, 2, 32 // groups, 8))
    if SIDES[sides][0]:
        lhs = scaled(lhs, cast, 3)
    if SIDES[sides][1]:
        rhs = scaled(rhs, cast, 2)
    run = jax.jit(lambda a, b: sd.conv_general_dilated(a, b, strides, padding, dimension_numbers=NHWC, **options))
    y = run(lhs, rhs)
    assert_one_rounding(y, *exact_conv(exact(lhs), exact(rhs), strides, padding, **options), 3 * 2 * 32 // groups)


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("cast", EACH_CAST)
def test_every_format_on_either_side(cast, sides):
    lhs, rhs = normal_by_axis(0, (2, 5, 5, 32), jnp.bfloat16), normal_by_axis(1, (3, 3, 32, 4), jnp.bfloat16)
    if SIDES[sides][0]:
        lhs = scaled(lhs, cast, 3)
    if SIDES[sides][1]:
        rhs = scaled(rhs, cast, 2)
    y = sd.conv_general_dilated(lhs, rhs, (1, 1), "SAME", dimension_numbers=NHWC)
    assert y.dtype == jnp.bfloat16
    assert_one_rounding(y, *exact_conv(exact(lhs), exact(rhs), (1, 1), "SAME"), 288)


def test_zero_points_of_an_image_are_no_second_convolution():
    image = scaled(normal_by_axis(0, (2, 8, 8, 32)) + 3, "int8 zeros", 3)
    kernel = scaled(normal_by_axis(1, (3, 3, 32, 8)), "int8", 2)

    def run(a, b):
        return sd.conv_general_dilated(a, b, (1, 1), "SAME", dimension_numbers=NHWC)

    assert "zero points corrected by sums of codes" in sd.explain(_kernel_first(run), image, kernel)
    sizes = [  # the CUDA branch subtracts zero points from bfloat16 codes instead
        eqn.invars[0].aval.shape
        for eqn in equations(jax.make_jaxpr(run)(image, kernel).jaxpr)
        if eqn.primitive.name == "conv_general_dilated" and eqn.outvars[0].aval.dtype == jnp.int32
    ]
    assert sorted(sizes) == [(1, 8, 8, 1), (2, 8, 8, 32)]


def _kernel_first(run):
    def conv(a, b, kernel):
        return sd.conv_general_dilated(a, b, (1, 1), "SAME", dimension_numbers=NHWC, kernel=kernel)

    return conv


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("cast", ["int8", "mxfp8"])
def test_plain_operands_have_gradients(cast, dtype):
    image, kernel = normal_by_axis(0, (2, 5, 5, 32)), normal_by_axis(1, (3, 3, 32, 4))
    q = scaled(kernel, cast, 2)

    def loss(conv, kernel):
        return lambda a: jnp.sum(conv(a, kernel, (1, 1), "SAME", dimension_numbers=NHWC).astype(jnp.float32) ** 2)

    ours = jax.grad(loss(sd.conv_general_dilated, q))(image.astype(dtype))
    plain = functools.partial(lax.conv_general_dilated, precision="highest")
    theirs = jax.grad(loss(plain, sd.dequantize(q)))(image.astype(dtype).astype(jnp.float32))
    assert ours.dtype == dtype
    tolerance = float(jnp.finfo(dtype).eps) * 16
    np.testing.assert_allclose(
        ours.astype(jnp.float32), theirs, rtol=tolerance, atol=tolerance * float(jnp.max(jnp.abs(theirs)))
    )


def test_batch_groups_and_other_layouts():
    lhs, rhs = normal_by_axis(0, (4, 3, 8)), normal_by_axis(1, (6, 3, 3))
    q = sd.quantize(lhs, "int8", block=(0, 0)), sd.quantize(rhs, "int8", block=(0, 0))
    y = sd.conv_general_dilated(*q, (1,), "SAME", batch_group_count=2)
    expected = lax.conv_general_dilated(sd.dequantize(q[0]), sd.dequantize(q[1]), (1,), "SAME", batch_group_count=2)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5 * float(jnp.max(jnp.abs(expected))))


def test_integer_accumulators_do_not_overflow():
    q = sd.quantize(jnp.ones((1, 1, 140000)), "int8", block=(0, 0, 0))
    np.testing.assert_allclose(sd.conv_general_dilated(q, q, (1,), "VALID"), [[[140000.0]]], rtol=1e-3)


@pytest.mark.parametrize(
    ("window", "message"), [((1, "SAME"), "`window_strides` must hold"), (((1,), 1), "`padding` must")]
)
def test_wrong_windows_raise_errors_that_name_the_argument(window, message):
    q = sd.quantize(jnp.ones((1, 1, 8)), "int8")
    with pytest.raises(TypeError, match=message):
        sd.conv_general_dilated(q, q, *window)
