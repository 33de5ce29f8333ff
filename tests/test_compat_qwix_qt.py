"""`compat.qwix`: quantised training by configs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data import normal
from jax import lax

from scaledot.compat import qwix
from scaledot.compat.qwix import ConvGeneralQtConfig, DotGeneralQtConfig, HowToQuantize, RaggedDotQtConfig
from scaledot.compat.qwix.qt_config import recipe_of
from scaledot.transform.analysis import contractions_of
from scaledot.transform.jaxprs import type_of

MATRIX = (((1,), (0,)), ((), ()))
INT8 = DotGeneralQtConfig(lhs_qtype="int8", rhs_qtype="int8")
INT8_BOTH = dataclasses.replace(INT8, dlhs_grad_qtype="int8", drhs_grad_qtype="int8")
X, W, G = normal(0, (16, 64)), normal(1, (64, 32)), normal(2, (16, 32))


def dequantised(x, qtype, *channelwise, **fields):
    return np.asarray(qwix.dequantize(qwix.quantize(x, qtype, channelwise_axes=channelwise, **fields)), np.float64)


def vjp(config, x=X, w=W, g=G):
    y, pullback = jax.vjp(lambda x, w: qwix.dot_general_qt(x, w, MATRIX, config), x, w)
    return y, *pullback(g)


def assert_close(actual, expected, tolerance=1e-5):
    expected = np.asarray(expected, np.float64)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def assert_within(actual, expected, bound):
    """Compares with a bound per element and the float32 rounding of the accumulation."""
    expected = np.asarray(expected, np.float64)
    assert np.all(np.abs(actual - expected) <= bound + 1e-5 * np.abs(expected).max())


def steps_of_ties(x, axes):
    """The change by one int8 code, where it may occur, and 0 elsewhere.

    The scale is amax / 127.5, so elements of magnitude amax are ties; the last bit of x / scale decides the code.
    """
    magnitude = np.abs(np.asarray(x, np.float64))
    amax = magnitude.max(axes, keepdims=True)
    return np.where(magnitude == amax, amax / 127.5, 0)


def half_step(x, axes):
    """The largest error of int8 codes with one scale, amax / 127.5, along the axes."""
    return np.abs(np.asarray(x, np.float64)).max(axes, keepdims=True) / 127.5 / 2


@pytest.mark.parametrize("qtype", ["int8", "float8_e4m3fn", "float8_e4m3", "nf4"])
def test_without_gradient_qtypes_the_backward_pass_multiplies_by_forward_codes(qtype):
    x, w = dequantised(X, qtype, 0), dequantised(W, qtype, 1)
    y, dx, dw = vjp(DotGeneralQtConfig(lhs_qtype=qtype, rhs_qtype=qtype))
    assert_close(y, x @ w)
    assert_close(dx, np.asarray(G) @ w.T)
    assert_close(dw, x.T @ np.asarray(G))


def test_quantised_gradients_are_scaled_by_the_residual_first_and_multiplied_by_its_codes():
    x, w = (qwix.quantize(a, "int8", channelwise_axes=[axis]) for a, axis in ((X, 0), (W, 1)))
    gw, gx = dequantised(G * w.scale, "int8", 0), dequantised(G * x.scale, "int8", 1)
    _, dx, dw = vjp(INT8_BOTH)
    x_codes, w_codes = np.asarray(x.qvalue, np.float64), np.asarray(w.qvalue, np.float64)
    assert_within(dx, gw @ w_codes.T, steps_of_ties(G * w.scale, 1) @ np.abs(w_codes).T)
    assert_within(dw, x_codes.T @ gx, np.abs(x_codes).T @ steps_of_ties(G * x.scale, 0))


def test_original_residuals_are_used_in_full_precision_or_with_a_qtype_of_their_own():
    config = dataclasses.replace(INT8, use_original_residuals=True)
    _, dx, dw = vjp(config)
    assert_close(dx, np.asarray(G, np.float64) @ np.asarray(W, np.float64).T)
    assert_close(dw, np.asarray(X, np.float64).T @ np.asarray(G, np.float64))
    _, dx, _ = vjp(dataclasses.replace(config, dlhs_grad_qtype="int8", dlhs_residual_qtype="int8"))
    assert_close(dx, dequantised(G, "int8", 0) @ dequantised(W, "int8", 0).T)


@pytest.mark.parametrize(("tile", "scale_tiles"), [(16, 16), (0.25, 16), ({0: 8, 1: 16}, None)])
def test_tiles_run_along_the_contracting_dim_or_the_axes_of_matrices(tile, scale_tiles):
    y, dx, _ = vjp(dataclasses.replace(INT8, tile_size=tile))
    if scale_tiles:
        x = dequantised(X, "int8", 0, tiled_axes={1: scale_tiles})
        w = dequantised(W, "int8", 1, tiled_axes={0: scale_tiles})
    else:
        x, w = dequantised(X, "int8", tiled_axes=tile), dequantised(W, "int8", tiled_axes=tile)
    assert_close(y, x @ w)
    assert_close(dx, np.asarray(G, np.float64) @ np.asarray(W, np.float64).T)  # operands with tiles are not reused


def test_one_scale_per_tensor_without_channelwise_axes():
    config = dataclasses.replace(INT8, lhs_disable_channelwise_axes=True, rhs_disable_channelwise_axes=True)
    assert_close(vjp(config)[0], dequantised(X, "int8") @ dequantised(W, "int8"))


@pytest.mark.parametrize("method", ["absmax,0.5", "rms,1", "fixed,-1,1", "fixed,1"])
@pytest.mark.parametrize("config", [INT8, INT8_BOTH], ids=["straight_through", "quantised"])
def test_gradients_are_zero_where_the_calibration_clips(method, config):
    config = dataclasses.replace(config, lhs_calibration_method=method)
    _, dx, dw = vjp(config)
    bound = qwix.calibrate(X, HowToQuantize(qtype="int8", channelwise_axes=[0], calibration_method=method))["absmax"]
    clipped = np.broadcast_to(np.abs(X) > bound, X.shape)
    assert 0 < clipped.sum() < clipped.size
    assert not dx[clipped].any()
    assert dx[~clipped].all()
    assert dw.all()
    kept = vjp(dataclasses.replace(config, disable_gradient_clipping=True))[1]
    assert kept.all()


def test_every_matmul_of_a_training_step_multiplies_int8_codes():
    def loss(x, w1, w2):
        dot = functools.partial(qwix.dot_general_qt, dimension_numbers=(((2,), (0,)), ((), ())), config=INT8_BOTH)
        return jnp.sum(dot(jax.nn.relu(dot(x, w1)), w2).astype(jnp.float32))

    shapes = (2, 64, 128), (128, 256), (256, 128)  # shorter ones are bfloat16 matmuls on CUDA
    avals = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(*avals)
    dtypes = [
        tuple(type_of(atom).dtype.name for atom in (*eqn.invars, *eqn.outvars)) for eqn in contractions_of(jaxpr.jaxpr)
    ]
    assert len(dtypes) >= 6
    assert set(dtypes) == {("int8", "int8", "int32")}


def test_stochastic_rounding_of_gradients_is_unbiased_and_depends_on_the_key():
    def dx(key):
        noise = qwix.get_noise_fn("low_bit_uniform", key)
        return vjp(dataclasses.replace(INT8_BOTH, dlhs_stochastic_rounding_noise_fn=noise))[1]

    draws = jax.vmap(dx)(jax.random.split(jax.random.key(0), 64))
    assert not np.array_equal(draws[0], draws[1])
    w = dequantised(W, "int8", 1)
    error = np.abs(np.asarray(draws, np.float64).mean(0) - np.asarray(G, np.float64) @ w.T)
    step = np.abs(G * qwix.quantize(W, "int8", channelwise_axes=[1]).scale).max() / 127.5
    deviation = step * np.sqrt(np.sum(np.asarray(qwix.quantize(W, "int8", channelwise_axes=[1]).qvalue, float) ** 2, 1))
    assert np.all(error <= 5 * 0.5 * deviation.max() / np.sqrt(64))  # noise of one element has deviation at most 1/2


def test_einsum_qt_is_dot_general_qt_of_its_dims():
    x, w = normal(0, (2, 8, 64)), normal(1, (64, 4, 16))
    y = qwix.einsum_qt("bsd,dhk->bhsk", x, w, INT8_BOTH)
    expected = qwix.dot_general_qt(x, w, (((2,), (0,)), ((), ())), INT8_BOTH)
    np.testing.assert_allclose(y, expected.transpose(0, 2, 1, 3), rtol=1e-6)


@pytest.mark.parametrize("bwd", [None, "int8"])
def test_ragged_dot_qt_shares_scales_of_columns_between_groups(bwd):
    x, w, groups = normal(0, (24, 32)), normal(1, (3, 32, 16)), jnp.array([10, 0, 14])
    config = RaggedDotQtConfig(lhs_qtype="int8", rhs_qtype="int8", dlhs_grad_qtype=bwd, drhs_grad_qtype=bwd)
    y, pullback = jax.vjp(lambda x, w: qwix.ragged_dot_qt(x, w, groups, config), x, w)
    codes = dequantised(x, "int8", 0), dequantised(w, "int8", 2)
    x_ties, w_ties = steps_of_ties(x, 1), steps_of_ties(w, (0, 1))
    g = normal(2, y.shape)
    dx, dw = pullback(g)
    g = np.asarray(g, np.float64)
    g_error = np.zeros_like(g), np.zeros_like(g)  # of the gradients that dx and dw are computed from
    for group, rows in ((0, slice(0, 10)), (2, slice(10, 24))):
        x_codes, w_codes = codes[0][rows], codes[1][group]
        if bwd:  # g is multiplied by the scales of the other operand before it is quantised
            w_scale = qwix.quantize(w, "int8", channelwise_axes=[2]).scale[0]
            x_scale = qwix.quantize(x, "int8", channelwise_axes=[0]).scale[rows]
            g_error[0][rows] = half_step(g[rows] * w_scale, 1) / w_scale
            g_error[1][rows] = half_step(g[rows] * x_scale, 0) / x_scale
        x_max, w_max = np.abs(x_codes) + x_ties[rows], np.abs(w_codes) + w_ties[group]
        assert_within(y[rows], x_codes @ w_codes, x_ties[rows] @ w_max + x_max @ w_ties[group])
        dx_bound = np.abs(g[rows]) @ w_ties[group].T + g_error[0][rows] @ w_max.T
        assert_within(dx[rows], g[rows] @ w_codes.T, dx_bound)
        dw_bound = x_ties[rows].T @ np.abs(g[rows]) + x_max.T @ g_error[1][rows]
        assert_within(dw[group], x_codes.T @ g[rows], dw_bound)
    assert not dw[1].any()
    with pytest.raises(ValueError, match="group_offset"):
        qwix.ragged_dot_qt(x, w, groups, config, group_offset=jnp.array([1]))


@pytest.mark.parametrize("bwd", [None, "int8"])
def test_conv_general_qt_has_scales_per_image_and_output_feature(bwd):
    x, w, numbers = normal(0, (2, 6, 6, 8)), normal(1, (3, 3, 8, 16)), ("NHWC", "HWIO", "NHWC")
    config = ConvGeneralQtConfig(lhs_qtype="int8", rhs_qtype="int8", dlhs_grad_qtype=bwd, drhs_grad_qtype=bwd)

    def plain(x, w):
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers, precision="highest")

    y, pullback = jax.vjp(
        lambda x, w: qwix.conv_general_qt(x, w, config, (1, 1), "SAME", dimension_numbers=numbers), x, w
    )
    codes = [jnp.asarray(dequantised(*args), jnp.float32) for args in ((x, "int8", 0), (w, "int8", 3))]
    expected, expected_pullback = jax.vjp(plain, *codes)
    assert_close(y, expected)
    g = normal(2, y.shape)
    x_scale = qwix.quantize(x, "int8", channelwise_axes=[0]).scale
    w_scale = qwix.quantize(w, "int8", channelwise_axes=[3]).scale
    # g is multiplied by the scales of the other operand before it is quantised per image or per output feature
    errors = half_step(g * w_scale, (1, 2, 3)) / w_scale, half_step(g * x_scale, (0, 1, 2)) / x_scale
    of_magnitudes = jax.vjp(plain, *map(jnp.abs, codes))[1]
    for i, (actual, reference) in enumerate(zip(pullback(g), expected_pullback(g), strict=True)):
        error = jnp.broadcast_to(jnp.asarray(errors[i], jnp.float32), g.shape)
        assert_within(actual, reference, of_magnitudes(error)[i] if bwd else 0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lhs_collect_quant_stat": lambda c: c}, "`lhs_collect_quant_stat`"),
        ({"sparsity_rule": object()}, "`sparsity_rule`"),
        ({"dlhs_stochastic_rounding_noise_fn": lambda shape: jnp.zeros(shape)}, "`dlhs_stochastic_rounding_noise_fn`"),
        ({"lhs_calibration_method": "minmax"}, "`lhs_calibration_method` 'minmax' computes a zero point"),
    ],
    ids=lambda value: None if isinstance(value, str) else next(iter(value)),
)
def test_fields_that_are_not_supported_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        qwix.dot_general_qt(X, W, MATRIX, dataclasses.replace(INT8_BOTH, **fields))


def test_tiles_by_axis_need_matrices_and_fractions_need_sizes():
    config = dataclasses.replace(INT8, tile_size={0: 8})
    with pytest.raises(ValueError, match="need 2-D operands"):
        qwix.dot_general_qt(normal(0, (8, 2, 64)), W, (((2,), (0,)), ((), ())), config)
    with pytest.raises(ValueError, match="fraction of an axis of unknown size"):
        recipe_of(dataclasses.replace(INT8, tile_size=0.25))
