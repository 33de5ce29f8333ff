"""`compat.jax_nn`: the examples of jax.nn's documentation, its semantics, and bugs of jax.nn that are fixed here."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data import normal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from reference import check_einsum
from tables import EACH_FORMAT, params_of

import scaledot as sd
from scaledot.compat import jax_nn

MATRIX = (((1,), (0,)), ((), ()))
ROWS = (((2,), (2,)), ((0,), (0,)))


def configs(mode, global_scale=None):
    return [jax_nn.get_scaled_dot_general_config(mode, global_scale)] * 3


# ------------------------------------------------------------------------------------- the documented examples


def test_example_of_scaled_matmul_basic():
    a = jnp.array([1, 2, 3]).reshape((1, 1, 3))
    b = jnp.array([4, 5, 6]).reshape((1, 1, 3))
    a_scales = jnp.array([0.5]).reshape((1, 1, 1))
    b_scales = jnp.array([0.5]).reshape((1, 1, 1))
    np.testing.assert_array_equal(jax_nn.scaled_matmul(a, b, a_scales, b_scales), [[[8.0]]])


def test_example_of_scaled_matmul_on_tensor_core_types():
    dtype = jnp.float8_e4m3fn
    a = jax.random.normal(jax.random.PRNGKey(1), (3, 128, 64), dtype=dtype)
    b = jax.random.normal(jax.random.PRNGKey(2), (3, 128, 64), dtype=dtype)
    a_scales = jnp.ones((3, 128, 4), dtype=jnp.float8_e8m0fnu)
    b_scales = jnp.ones((3, 128, 4), dtype=jnp.float8_e8m0fnu)
    y = jax_nn.scaled_matmul(a, b, a_scales, b_scales)
    check_einsum(y, "bmk,bnk->bmn", a, b)


@pytest.mark.parametrize(
    ("mode", "global_scale"),
    [("mxfp8", None), ("nvfp4", jnp.array([0.5], jnp.float32)), ("nvfp4", None), ("mxfp4", None)],
)
def test_example_of_scaled_dot_general(mode, global_scale):
    scaled_dot_general_fn = functools.partial(jax_nn.scaled_dot_general, configs=configs(mode, global_scale))
    lhs = jax.random.normal(jax.random.PRNGKey(1), (3, 128, 64))
    rhs = jax.random.normal(jax.random.PRNGKey(2), (3, 128, 64))
    out = scaled_dot_general_fn(lhs, rhs, ROWS)
    assert (out.shape, out.dtype) == ((3, 128, 128), jnp.float32)
    exact = jnp.einsum("bmk,bnk->bmn", lhs, rhs)
    noise = float(jnp.linalg.norm(out - exact) / jnp.linalg.norm(exact))
    assert noise < {"mxfp8": 0.05, "nvfp4": 0.2, "mxfp4": 0.25}[mode]
    grads = jax.grad(lambda a, b: jnp.sum(scaled_dot_general_fn(a, b, ROWS) ** 2), argnums=(0, 1))(lhs, rhs)
    assert [g.shape for g in grads] == [lhs.shape, rhs.shape]


@pytest.mark.parametrize("mode", params_of(["mxfp8", "nvfp4", "int8"], ["nvfp4", "int8"]))
def test_scaled_dot_general_as_dot_general_of_a_flax_layer(mode):
    linen = pytest.importorskip("flax.linen")
    nnx = pytest.importorskip("flax.nnx")
    dot = functools.partial(jax_nn.scaled_dot_general, configs=configs(mode))
    x = normal(0, (4, 64))
    layer = linen.Dense(8, dot_general=dot)
    params = layer.init(jax.random.key(0), x)
    grads = jax.grad(lambda p: jnp.sum(layer.apply(p, x) ** 2))(params)
    assert jax.tree.map(jnp.shape, grads) == jax.tree.map(jnp.shape, params)
    module = nnx.Linear(64, 8, dot_general=dot, rngs=nnx.Rngs(0))
    assert module(x).shape == (4, 8)


# -------------------------------------------------------------------------------------------------- semantics


def test_configs_have_the_fields_of_jax_nn():
    theirs = jax.nn.get_scaled_dot_general_config("mxfp8")
    ours = jax_nn.get_scaled_dot_general_config("mxfp8")
    for field in ("mode", "block_size", "data_type", "scale_type", "global_scale", "infer_only"):
        assert getattr(ours, field) == getattr(theirs, field)
    fp4 = jax_nn.get_scaled_dot_general_config("nvfp4")
    assert (fp4.block_size, fp4.data_type, fp4.scale_type) == (16, jnp.float4_e2m1fn, jnp.float8_e4m3fn)
    assert fp4.global_scale.shape == (1,)
    mx4 = jax_nn.get_scaled_dot_general_config("mxfp4")
    assert (mx4.block_size, mx4.data_type, mx4.scale_type) == (32, jnp.float4_e2m1fn, jnp.float8_e8m0fnu)
    with pytest.raises(ValueError, match="Unsupported mode: mxfp9"):
        jax_nn.get_scaled_dot_general_config("mxfp9")


@pytest.mark.parametrize("mode", EACH_FORMAT)
def test_every_format_is_a_mode(mode):
    x, w = normal(0, (4, 64)), normal(1, (64, 8))
    y, pull = jax.vjp(lambda x, w: jax_nn.scaled_dot_general(x, w, MATRIX, configs=configs(mode)), x, w)
    assert y.shape == (4, 8)
    assert [g.shape for g in pull(y)] == [(4, 64), (64, 8)]


def test_operands_are_quantised_along_the_contracting_dim_and_multiplied_exactly():
    x, w = normal(0, (8, 96)), normal(1, (96, 16))
    y = jax_nn.scaled_dot_general(x, w, MATRIX, configs=configs("mxfp8"))
    check_einsum(y, "mk,kn->mn", sd.quantize(x, "mxfp8"), sd.quantize(w, "mxfp8", axis=0))
    g = jnp.array([2.0], jnp.float32)
    y = jax_nn.scaled_dot_general(x, w, MATRIX, configs=configs("nvfp4", g))
    lhs = sd.quantize(x, "nvfp4", tensor_scale=2.0)
    check_einsum(y, "mk,kn->mn", lhs, sd.quantize(w, "nvfp4", axis=0, tensor_scale=2.0))


def test_mxfp8_gradients_are_quantised_along_their_contracting_dims():
    x, w, g = normal(0, (64, 96)), normal(1, (96, 32)), normal(2, (64, 32))
    dot = functools.partial(jax_nn.scaled_dot_general, configs=configs("mxfp8"), precision="highest")
    _, pull = jax.vjp(lambda x, w: dot(x, w, MATRIX), x, w)
    dx, dw = pull(g)
    check_einsum(dx, "mn,kn->mk", sd.quantize(g, "mxfp8", axis=1), sd.quantize(w, "mxfp8", axis=1))
    check_einsum(dw, "mk,mn->kn", sd.quantize(x, "mxfp8", axis=0), sd.quantize(g, "mxfp8", axis=0))


def test_nvfp4_gradients_are_unquantised_and_zero_where_the_operand_was_clipped():
    limit = 6 * 448 * 0.001
    x, w, g = normal(0, (8, 32)).at[0, 0].set(2 * limit), 0.1 * normal(1, (32, 4)), normal(2, (8, 4))
    scale = jnp.array([0.001], jnp.float32)
    dot = functools.partial(jax_nn.scaled_dot_general, configs=configs("nvfp4", scale), precision="highest")
    _, pull = jax.vjp(lambda x, w: dot(x, w, MATRIX), x, w)
    dx, dw = pull(g)
    expected = np.where(np.abs(x) <= limit, np.asarray(g) @ np.asarray(w).T, 0)
    np.testing.assert_allclose(dx, expected, rtol=1e-5, atol=1e-5)
    assert dx[0, 0] == 0
    np.testing.assert_allclose(dw, np.asarray(x).T @ np.asarray(g), rtol=1e-4, atol=1e-4)


def test_without_configs_it_is_a_plain_dot_general():
    x, w = normal(0, (4, 8)), normal(1, (8, 2))
    np.testing.assert_array_equal(jax_nn.scaled_dot_general(x, w, MATRIX), jax.lax.dot_general(x, w, MATRIX))


def test_implementation_is_ignored_with_a_deprecation_warning():
    x, w = normal(0, (4, 32)), normal(1, (32, 2))
    with pytest.warns(DeprecationWarning, match="ignored"):
        jax_nn.scaled_dot_general(x, w, MATRIX, configs=configs("mxfp8"), implementation="cudnn")


# ---------------------------------------------------------------------------------- bugs of jax.nn that are fixed here


@pytest.mark.parametrize("mode", params_of(["mxfp8", "nvfp4", "mxfp4"], ["mxfp4"]))
def test_blocks_of_zeros_give_zeros(mode):
    x = jnp.zeros((4, 64)).at[0, :32].set(1.0)
    loss = lambda x: jnp.sum(jax_nn.scaled_dot_general(x, x.T, MATRIX, configs=configs(mode)))  # noqa: E731
    value, gradient = jax.value_and_grad(loss)(x)
    assert np.isfinite(value)
    assert np.all(np.isfinite(gradient))
    assert not np.any(jax_nn.scaled_dot_general(x[1:], x[1:].T, MATRIX, configs=configs(mode)))


def test_contracting_axes_keep_their_pairs():
    x, w = normal(0, (3, 4, 32)), normal(1, (5, 32, 4))
    y = jax_nn.scaled_dot_general(x, w, (((1, 2), (2, 1)), ((), ())), configs=configs("mxfp8"))
    exact = jnp.einsum("mjk,nkj->mn", x, w)
    assert float(jnp.linalg.norm(y - exact) / jnp.linalg.norm(exact)) < 0.1
    x, w = normal(0, (2, 3, 64)), normal(1, (64, 3, 2))
    y = jax_nn.scaled_dot_general(x, w, (((2,), (0,)), ((1, 0), (1, 2))), configs=configs("mxfp8"))
    exact = jnp.einsum("bak,kab->ab", x, w)
    assert float(jnp.linalg.norm(y - exact) / jnp.linalg.norm(exact)) < 0.1


@pytest.mark.parametrize("mode", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_gradients_have_the_dtypes_of_their_primals(mode, dtype):
    x, w = normal(0, (4, 32), dtype), normal(1, (32, 8))
    dot = functools.partial(jax_nn.scaled_dot_general, configs=configs(mode))
    dx, dw = jax.grad(lambda x, w: jnp.sum(dot(x, w, MATRIX)), argnums=(0, 1))(x, w)
    assert (dx.dtype, dw.dtype) == (dtype, jnp.float32)


def test_precision_out_sharding_and_numpy_arrays_are_accepted():
    x, w = np.ones((4, 32), np.float32), np.ones((32, 8), np.float32)
    y = jax_nn.scaled_dot_general(x, w, MATRIX, configs=configs("mxfp8"), precision="highest", out_sharding=None)
    np.testing.assert_array_equal(y, np.full((4, 8), 32.0))


def test_a_global_scale_computed_inside_a_differentiated_function():
    def loss(x, w):
        scale = jnp.max(jnp.abs(x)).reshape(1) / (6 * 448)
        return jnp.sum(jax_nn.scaled_dot_general(x, w, MATRIX, configs=configs("nvfp4", scale)))

    dx = jax.jit(jax.grad(loss))(normal(0, (4, 32)), normal(1, (32, 8)))
    assert np.all(np.isfinite(dx))
    assert np.any(dx)


def test_axes_need_not_be_multiples_of_the_block():
    x, w = normal(0, (5, 100)), normal(1, (100, 7))
    dot = functools.partial(jax_nn.scaled_dot_general, configs=configs("mxfp8"))
    (dx, dw), y = jax.grad(lambda x, w: jnp.sum(dot(x, w, MATRIX) ** 2), argnums=(0, 1))(x, w), dot(x, w, MATRIX)
    exact = x @ w
    assert float(jnp.linalg.norm(y - exact) / jnp.linalg.norm(exact)) < 0.1
    assert (dx.shape, dw.shape) == ((5, 100), (100, 7))


def test_explicit_mesh_axes():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    dot = functools.partial(jax_nn.scaled_dot_general, configs=configs("mxfp8"))
    x, w = normal(0, (4, 8, 64)), normal(1, (64, 32))
    numbers = (((2,), (0,)), ((), ()))
    with jax.set_mesh(mesh):
        xs = jax.device_put(x, NamedSharding(mesh, P("a", None, None)))
        ws = jax.device_put(w, NamedSharding(mesh, P(None, "b")))
        y = jax.jit(lambda x, w: dot(x, w, numbers))(xs, ws)
        dx, dw = jax.jit(jax.grad(lambda x, w: jnp.sum(dot(x, w, numbers) ** 2), argnums=(0, 1)))(xs, ws)
    assert y.sharding.spec == P("a", None, "b")
    assert (dx.sharding.spec, dw.sharding.spec) == (P("a", None, None), P(None, "b"))
    np.testing.assert_allclose(jax.device_get(y), dot(x, w, numbers), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("mode", params_of(["mxfp8", "nvfp4", "fp8_e4m3"], ["nvfp4", "fp8_e4m3"]))
def test_inside_shard_map_and_vmap(mode):
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,))
    dot = functools.partial(jax_nn.scaled_dot_general, configs=configs(mode))
    x, w = normal(0, (8, 32, 64)), normal(1, (64, 16))

    def loss(x, w):
        return jnp.sum(jax.vmap(lambda x: dot(x, w, MATRIX))(x) ** 2)

    def local(x, w):
        return jax.vmap(lambda x: dot(x, w, MATRIX))(x)

    sharded = jax.shard_map(local, mesh=mesh, in_specs=(P("a"), P()), out_specs=P("a"))
    expected = jax.grad(loss, argnums=(0, 1))(x, w)
    found = jax.jit(jax.grad(lambda x, w: jnp.sum(sharded(x, w) ** 2), argnums=(0, 1)))(x, w)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * float(jnp.max(jnp.abs(b))))


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(2, 3), (2, 3), (2, 1), (2, 1)], "rank 3"),
        ([(1, 2, 64), (1, 2, 32), (1, 2, 2), (1, 2, 1)], "must have equal first and last dims"),
        ([(1, 2, 64), (1, 2, 64), (1, 2, 3), (1, 2, 2)], r"`lhs_scales` of shape \(1, 2, 3\) does not fit"),
    ],
)
def test_wrong_shapes_of_scaled_matmul_raise_errors_that_name_them(shapes, message):
    with pytest.raises(ValueError, match=message):
        jax_nn.scaled_matmul(*(jnp.ones(shape) for shape in shapes))


@pytest.mark.parametrize(
    ("lhs", "passed_configs", "error", "message"),
    [
        (jnp.ones((4, 32)), ["mxfp8"] * 3, TypeError, "from get_scaled_dot_general_config"),
        (jnp.ones((4, 32)), configs("mxfp8")[0], TypeError, "must be \\[lhs, rhs, gradient\\]"),
        (jnp.ones((4, 32)), configs("nvfp4", jnp.ones(3)), ValueError, "must be one number"),
        (jnp.ones((4, 32), jnp.int32), configs("mxfp8"), TypeError, "`lhs` must be a float array"),
        (sd.quantize(jnp.ones((4, 32)), "mxfp8"), configs("mxfp8"), TypeError, "`lhs` is already quantised"),
    ],
)
def test_wrong_arguments_raise_errors_that_say_why(lhs, passed_configs, error, message):
    with pytest.raises(error, match=message):
        jax_nn.scaled_dot_general(lhs, jnp.ones((32, 2)), MATRIX, configs=passed_configs)


def test_configs_of_jax_nn_are_accepted():
    x, w = normal(0, (4, 32)), normal(1, (32, 8))
    theirs = [jax.nn.get_scaled_dot_general_config("mxfp8")] * 3
    ours = jax_nn.scaled_dot_general(x, w, MATRIX, configs=configs("mxfp8"))
    np.testing.assert_array_equal(jax_nn.scaled_dot_general(x, w, MATRIX, configs=theirs), ours)


def test_results_equal_those_of_jax_nn_where_it_has_no_bug():
    x, w = normal(0, (2, 64, 128)), normal(1, (2, 32, 128))
    ours = jax_nn.scaled_dot_general(x, w, ROWS, configs=configs("mxfp8"))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = jax.nn.scaled_dot_general(x, w, ROWS, configs=[jax.nn.get_scaled_dot_general_config("mxfp8")] * 3)
    except NotImplementedError:
        pytest.skip("this jax has no CPU lowering of its own scaled matmul")
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-4)


def test_functions_of_jax_nn_can_be_replaced(monkeypatch):
    # Two blocks of 32 each: the program for other platforms contains jax.nn's block-scaled matmul.
    codes = [jnp.ones((1, rows, 64), jnp.float8_e4m3fn) for rows in (4, 8)]
    scales = [jnp.ones((1, rows, 2), jnp.float8_e8m0fnu) for rows in (4, 8)]
    for name in ("scaled_matmul", "scaled_dot_general", "get_scaled_dot_general_config"):
        monkeypatch.setattr(jax.nn, name, getattr(jax_nn, name))
    assert jax.eval_shape(jax.nn.scaled_matmul, *codes, *scales).shape == (1, 4, 8)
    dot = functools.partial(jax.nn.scaled_dot_general, configs=[jax.nn.get_scaled_dot_general_config("mxfp8")] * 3)
    x, w = jnp.ones((4, 64)), jnp.ones((64, 8))
    assert jax.eval_shape(jax.grad(lambda x: dot(x, w, MATRIX).sum()), x).shape == (4, 64)


def test_two_configs_are_enough_for_a_forward_pass():
    x, w, three = jnp.ones((4, 32)), jnp.ones((32, 8)), configs("mxfp8")
    for of in (jax.nn, jax_nn):
        y = jax.eval_shape(lambda x, of=of: of.scaled_dot_general(x, w, MATRIX, configs=three[:2]), x)
        assert (y.shape, y.dtype) == ((4, 8), jnp.float32)
    loss = lambda x, given: jax_nn.scaled_dot_general(x, w, MATRIX, configs=given).sum()  # noqa: E731
    with pytest.raises(ValueError, match=r"two entries, .* pass a third one for the gradient"):
        jax.eval_shape(jax.grad(functools.partial(loss, given=three[:2])), x)
    for wrong in (three[:1], three[:1] * 4):
        with pytest.raises(TypeError, match=r"or \[lhs, rhs\] for the forward pass only"):
            loss(x, wrong)


def test_configs_are_mutable_and_contain_scalar_types_as_in_jax_nn():
    theirs, ours = (of.get_scaled_dot_general_config("nvfp4") for of in (jax.nn, jax_nn))
    for config in (theirs, ours):
        config.global_scale = jnp.full((2,), 2.0, jnp.float32)
        assert config.data_type in {jnp.float4_e2m1fn}
        assert config.scale_type in {jnp.float8_e4m3fn}
        with pytest.raises(AttributeError):
            config.global_scales = None  # no such field
    with pytest.raises(ValueError, match="must be one number"):  # the assigned value is used
        jax_nn.scaled_dot_general(jnp.ones((4, 32)), jnp.ones((32, 8)), MATRIX, configs=[ours] * 3)
