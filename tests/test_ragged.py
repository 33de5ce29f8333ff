"""ragged_dot and ragged_dot_general: groups of rows, each with a matrix and scales of its own."""

import functools
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data import normal_by_axis
from jax import lax
from reference import assert_one_rounding, exact
from test_dot import CASTS, EACH_CAST, SIDES

import scaledot as sd

GROUPS = {"plain": [5, 3, 8, 8], "empty": [0, 11, 0, 13], "short": [4, 0, 5, 2], "none": [0, 0, 0, 0]}
FREE = lax.RaggedDotDimensionNumbers((((2,), (1,)), ((0,), (2,))), [1], [0])
CONTRACTED = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
BATCH = lax.RaggedDotDimensionNumbers((((2,), (1,)), ((0,), (0,))), [0], [])


def scaled(x, cast, axis):
    format, options = CASTS[cast]
    options = dict(options)
    if options.get("block") == (0, 0):
        axis, options["block"] = tuple(range(x.ndim)), (0,) * x.ndim
    return sd.quantize(x, format, axis=axis, pad=True, **options)


def by_group(lhs, rhs, sizes):
    out, magnitude = (np.zeros((lhs.shape[0], rhs.shape[2])) for _ in range(2))
    start = 0
    for group, size in enumerate(sizes):
        rows = slice(start, start + size)
        out[rows] = lhs[rows] @ rhs[group]
        magnitude[rows] = np.abs(lhs[rows]) @ np.abs(rhs[group])
        start += size
    return out, magnitude


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("cast", [each for each in EACH_CAST if "rotated" not in each.values[0]])
def test_every_format_on_either_side(cast, sides):
    # Experts differ in magnitude, so that a scale of the wrong group is detected.
    lhs, rhs = (
        normal_by_axis(0, (24, 128)),
        normal_by_axis(1, (4, 128, 6)) * jnp.array([1.0, 1e-3, 1e3, 7.0])[:, None, None],
    )
    if SIDES[sides][0]:
        lhs = scaled(lhs, cast, 1)
    if SIDES[sides][1]:
        rhs = scaled(rhs, cast, 1)
    run = jax.jit(sd.ragged_dot)
    for sizes in GROUPS.values():
        y = run(lhs, rhs, jnp.array(sizes))
        assert_one_rounding(y, *by_group(exact(lhs), exact(rhs), sizes), 128)
        assert not np.any(y[sum(sizes) :])


def test_scales_of_rows_past_the_last_group_are_ignored():
    lhs = sd.quantize(jnp.ones((4, 32)), "fp8_e4m3", block=(0,))
    lhs = replace(lhs, scale=lhs.scale.at[2:].set(jnp.nan))
    rhs = sd.quantize(jnp.ones((2, 32, 3)), "int8", axis=1)
    y = sd.ragged_dot(lhs, rhs, jnp.array([1, 1]))
    np.testing.assert_array_equal(y, np.array([[32.0], [32.0], [0.0], [0.0]]) * np.ones((1, 3)))


@pytest.mark.parametrize("cast", ["int8", "int8 tiles", "int8 zeros", "mxfp8", "nvfp4", "nf4"])
def test_the_ragged_dim_may_be_contracted(cast):
    x, g, sizes = normal_by_axis(0, (24, 8)), normal_by_axis(1, (24, 6)), [5, 0, 8, 8]
    qx, qg = scaled(x, cast, 0), scaled(g, cast, 0)
    for lhs, rhs in ((qx, qg), (x, qg), (qx, g)):
        y = sd.ragged_dot_general(lhs, rhs, jnp.array(sizes), CONTRACTED)
        a, b = exact(lhs), exact(rhs)
        starts = np.cumsum([0, *sizes])
        rows = [slice(s, e) for s, e in itertools.pairwise(starts)]
        expected = np.stack([a[r].T @ b[r] for r in rows])
        assert_one_rounding(y, expected, np.stack([np.abs(a[r]).T @ np.abs(b[r]) for r in rows]), 24)


@pytest.mark.parametrize("cast", ["int8", "mxfp8", "int8 zeros", "nf4"])
@pytest.mark.parametrize("numbers", [FREE, BATCH], ids=["free", "batch"])
def test_batch_axes(numbers, cast):
    if numbers is FREE and jax.default_backend() == "gpu":
        pytest.skip("jax.lax's own ragged_dot_general of these axes does not compile for CUDA (jax 0.11.2)")
    lhs = normal_by_axis(0, (2, 12, 64))
    rhs = normal_by_axis(1, (3, 64, 2, 5)) if numbers is FREE else normal_by_axis(1, (2, 64, 5))
    ql, qr = scaled(lhs, cast, 2), scaled(rhs, cast, 1)
    sizes = jnp.array([4, 0, 6]) if numbers is FREE else jnp.array([1, 1])
    expected = lax.ragged_dot_general(sd.dequantize(ql), sd.dequantize(qr), sizes, numbers, precision="highest")
    for a, b in ((ql, qr), (sd.dequantize(ql), qr), (ql, sd.dequantize(qr))):
        y = sd.ragged_dot_general(a, b, sizes, numbers)
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5 * float(jnp.max(jnp.abs(expected))))


@pytest.mark.parametrize("cast", ["int8", "mxfp8", "nvfp4", "nf4"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_plain_operands_have_gradients(cast, dtype):
    lhs, rhs, sizes = normal_by_axis(0, (12, 64)), normal_by_axis(1, (3, 64, 8)), jnp.array([4, 0, 6])
    qr, ql = scaled(rhs, cast, 1), scaled(lhs, cast, 1)
    g = normal_by_axis(2, (12, 8))

    def loss(dot, a, b):
        return jnp.sum(dot(a, b, sizes, preferred_element_type=jnp.float32) * g)

    ours = jax.grad(lambda a: loss(sd.ragged_dot, a, qr))(lhs.astype(dtype))
    plain = functools.partial(lax.ragged_dot, precision="highest")
    theirs = jax.grad(lambda a: loss(plain, a, sd.dequantize(qr)))(lhs)
    assert ours.dtype == dtype
    tolerance = float(jnp.finfo(dtype).eps) * 64
    np.testing.assert_allclose(ours.astype(jnp.float32), theirs, rtol=tolerance, atol=tolerance)
    ours = jax.grad(lambda b: loss(sd.ragged_dot, ql, b))(rhs.astype(dtype))
    theirs = jax.grad(lambda b: loss(plain, sd.dequantize(ql), b))(rhs)
    np.testing.assert_allclose(ours.astype(jnp.float32), theirs, rtol=tolerance, atol=tolerance * 8)


def test_grouped_rows_times_experts_with_scales_of_their_own():
    x, sizes = normal_by_axis(0, (16, 64)), jnp.array([3, 0, 9, 4])
    q = sd.quantize_grouped(x, sizes, "fp8_e4m3")
    w = sd.quantize(normal_by_axis(1, (4, 64, 8)), "fp8_e4m3", block=(0, 0))
    y = sd.ragged_dot(q, w, sizes)
    assert_one_rounding(y, *by_group(exact(q), exact(w), [3, 0, 9, 4]), 64)
    assert "selected: bfloat16 matmul" in sd.explain(sd.ragged_dot, q, w, sizes)


def test_wrong_groups_raise():
    lhs, rhs = jnp.ones((4, 32)), sd.quantize(jnp.ones((2, 32, 3)), "int8", axis=1)
    with pytest.raises(ValueError, match="sum to more than 4 rows"):
        sd.ragged_dot(lhs, rhs, jnp.array([3, 3]))
    with pytest.raises(ValueError, match="must name one axis"):
        sd.ragged_dot_general(
            lhs, rhs, jnp.array([1, 1]), lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [])
        )
    with pytest.raises(ValueError, match=r"axis 1 of lhs has 32 elements and axis 1 of rhs has 16"):
        sd.ragged_dot(lhs, sd.quantize(jnp.ones((2, 16, 3)), "int8", axis=1), jnp.array([1, 1]))
    with pytest.raises(ValueError, match=r"3 groups"):
        sd.ragged_dot(lhs, rhs, jnp.array([1, 1, 1]))
