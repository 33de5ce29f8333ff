"""TransformerEngine's layers and the functions that they consist of, against Flax and `scaledot.train`."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data import normal
from flax import linen as nn
from training import assert_same, assert_same_bits

from scaledot import train
from scaledot.compat import transformer_engine as te
from scaledot.compat.transformer_engine import cpp_extensions as tex
from scaledot.compat.transformer_engine import flax as te_flax
from scaledot.compat.transformer_engine.activation import activation
from scaledot.compat.transformer_engine.layernorm import layernorm
from scaledot.compat.transformer_engine.layernorm_dense import layernorm_dense
from scaledot.compat.transformer_engine.layernorm_mlp import layernorm_mlp
from scaledot.state import init_state
from scaledot.train.residuals import RESIDUAL_NAME

X = normal(0, (2, 4, 32), spread=2.0)
DELAYED = te.DelayedScaling(amax_history_len=4)


def random_like(params, seed=7):
    """Parameters of the same shapes, so that zeros and ones of initialisers hide nothing."""
    leaves, structure = jax.tree.flatten(nn.unbox(params))
    return jax.tree.unflatten(structure, [normal(seed + i, a.shape, a.dtype) for i, a in enumerate(leaves)])


def init(layer, x=X, **rngs):
    variables = nn.unbox(layer.init({"params": jax.random.key(0), **rngs}, x))
    return {**variables, "params": random_like(variables["params"])}


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_layernorm_is_that_of_flax(kind, zero_centered):
    layer = te_flax.LayerNorm(layernorm_type=kind, zero_centered_gamma=zero_centered)
    initial = nn.unbox(layer.init(jax.random.key(0), X))["params"]
    np.testing.assert_array_equal(initial["scale"], np.full(32, 0.0 if zero_centered else 1.0))
    params = random_like(initial)
    scale = params["scale"] + 1 if zero_centered else params["scale"]
    if kind == "layernorm":
        reference = nn.LayerNorm(use_fast_variance=False).apply(
            {"params": {"scale": scale, "bias": params["ln_bias"]}}, X
        )
    else:
        reference = nn.RMSNorm().apply({"params": {"scale": scale}}, X)
    assert_same(layer.apply({"params": params}, X), reference)


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_the_backward_pass_of_a_norm_is_its_gradient(kind):
    gamma, beta, dz = normal(1, (32,)), normal(2, (32,)) if kind == "layernorm" else None, normal(3, X.shape)
    _, mu, rsigma = tex.normalization_fwd(X, gamma, beta, False, 1e-6, kind)
    found = tex.normalization_bwd(dz, X, mu, rsigma, gamma, beta, False, 1e-6, kind)
    _, vjp = jax.vjp(lambda x, gamma, beta: layernorm(x, gamma, beta, kind), X, gamma, beta)
    assert_same_bits(found, vjp(dz))
    assert_same(rsigma, 1 / np.sqrt(np.mean((X - (0 if mu is None else mu[..., None])) ** 2, axis=-1) + 1e-6))


def test_dense_general_is_that_of_flax():
    layer = te_flax.DenseGeneral(features=(3, 8), axis=(-2, -1), kernel_axes=("a", "b", None, None))
    variables = init(layer)
    reference = nn.DenseGeneral((3, 8), axis=(-2, -1)).apply(variables, X)
    assert_same(layer.apply(variables, X), reference)


def test_parameters_have_logical_axes_and_the_dtype_of_the_module():
    layer = te_flax.DenseGeneral(8, kernel_axes=("embed", "mlp"), bias_axes=("mlp",), dtype=jnp.bfloat16)
    params = layer.init(jax.random.key(0), X)["params"]
    assert (params["kernel"].names, params["bias"].names) == (("embed", "mlp"), ("mlp",))
    assert params["kernel"].value.dtype == jnp.bfloat16
    assert layer.apply({"params": params}, X).dtype == jnp.float32
    assert layer.apply({"params": params}, X.astype(jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize("layer", [te_flax.DenseGeneral, te_flax.LayerNormDenseGeneral])
def test_low_rank_adaptation_is_added(layer):
    adapted = layer((3, 8), enable_low_rank_adaptation=True, low_rank_adaptation_dim=4, low_rank_adaptation_alpha=2.0)
    initial = nn.unbox(adapted.init(jax.random.key(0), X))["params"]
    assert not np.any(initial["lora_b_kernel"])
    params = random_like(initial)
    without = {name: value for name, value in params.items() if not name.startswith("lora")}
    x, first = X, lambda y: y
    if layer is te_flax.LayerNormDenseGeneral:
        x, first = layernorm(X, params["scale"], params["ln_bias"], "layernorm"), lambda y: y[0]
    product = jnp.einsum("bsk,knr,nrm->bsnm", x, params["lora_a_kernel"], params["lora_b_kernel"])
    expected = first(layer((3, 8)).apply({"params": without}, X)) + product * 0.5
    assert_same(first(adapted.apply({"params": params}, X)), expected)


def mlp(params, x, act, recipe=None, states=(None, None)):
    """LayerNormMLP in terms of `scaledot.train`."""

    def dense(x, w, bias, state):
        options = {} if state is None else {"state": state}
        y = x @ w if recipe is None else train.dense(x, w, recipe=recipe, **options)
        y = y[0] if isinstance(y, tuple) else y
        return y if bias is None else y + bias.reshape((1,) * (x.ndim - 1) + (-1,))

    hidden, functions, _ = params["wi_kernel"].shape
    y = layernorm(x, params["scale"], params.get("ln_bias"), "layernorm" if "ln_bias" in params else "rmsnorm")
    y = dense(y, params["wi_kernel"].reshape(hidden, -1), params.get("wi_bias"), states[0])
    y = act(*jnp.split(y, functions, axis=-1))
    return dense(y, params["wo_kernel"], params.get("wo_bias"), states[1])


ACTIVATIONS = {
    ("gelu",): jax.nn.gelu,
    ("silu", "linear"): lambda a, b: jax.nn.silu(a) * b,
    ("linear", "ReLU"): lambda a, b: jax.nn.relu(a) * b,
    ("quick_gelu",): lambda a: a * jax.nn.sigmoid(1.702 * a),
    ("squared_relu",): lambda a: jax.nn.relu(a) ** 2,
    ("clamped_silu", "clamped_linear"): lambda a, b: (
        jnp.minimum(a, 7.0) * jax.nn.sigmoid(1.702 * jnp.minimum(a, 7.0)) * (jnp.clip(b, -7.0, 7.0) + 1)
    ),
    (jnp.tanh,): jnp.tanh,
}


@pytest.mark.parametrize(
    "activations", ACTIVATIONS, ids=lambda names: "_".join(getattr(n, "__name__", n) for n in names)
)
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("use_bias", [False, True])
def test_layernorm_mlp_is_a_composition(activations, kind, use_bias):
    layer = te_flax.LayerNormMLP(16, layernorm_type=kind, activations=activations, use_bias=use_bias)
    variables = init(layer)
    y, normalised = layer.apply(variables, X)
    assert normalised is None
    assert_same(y, mlp(variables["params"], X, ACTIVATIONS[activations]))


def test_the_function_and_the_module_agree_under_a_recipe():
    layer = te_flax.LayerNormMLP(64, activations=("silu", "linear"), use_bias=True)
    with te.autocast(enabled=True, recipe=te.MXFP8BlockScaling()):
        params = init(layer)["params"]
        y, _ = layer.apply({"params": params}, X)
        quantizers = te.QuantizerFactory.create_set(2)
    kernels, biases = (params["wi_kernel"], params["wo_kernel"]), (params["wi_bias"], params["wo_bias"])
    found = layernorm_mlp(
        X,
        params["scale"],
        params["ln_bias"],
        kernels,
        biases,
        "layernorm",
        activation_type=("silu", "linear"),
        quantizer_sets=quantizers,
    )
    np.testing.assert_array_equal(found, y)
    np.testing.assert_array_equal(y, mlp(params, X, ACTIVATIONS[("silu", "linear")], "mxfp8"))


@jax.jit
def delayed_step(variables):
    layer = te_flax.LayerNormMLP(64, quantization_checkpoint_name="named")
    with te.autocast(enabled=True, recipe=DELAYED):
        return jax.value_and_grad(lambda variables: jnp.sum(layer.apply(variables, X)[0] ** 2))(variables)


def test_states_of_an_mlp_are_those_of_its_matmuls():
    with te.autocast(enabled=True, recipe=DELAYED):
        variables = init(te_flax.LayerNormMLP(64))
    state = variables["_overwrite_with_gradient"]
    assert set(state) == {
        f"{t}_{i}_{s}" for t in ("x", "kernel", "grad") for i in (0, 1) for s in ("scale", "amax_history")
    }
    value, gradient = delayed_step(variables)

    def loss(params, states):
        return jnp.sum(mlp(params, X, jax.nn.gelu, DELAYED.core, states) ** 2)

    states = [init_state(DELAYED.core) for _ in range(2)]
    expected, (dparams, states) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(variables["params"], states)
    assert_same(value, expected)
    for name, leaf in dparams.items():
        assert_same(gradient["params"][name], leaf)
    for i, next_state in enumerate(states):
        for tensor, name in (("x", "x"), ("w", "kernel"), ("g", "grad")):
            found = gradient["_overwrite_with_gradient"]
            assert_same(found[f"{name}_{i}_scale"][0], next_state[tensor].multiplier)
            assert_same(found[f"{name}_{i}_amax_history"], next_state[tensor].history)


def names_in(jaxpr):
    """The checkpoint names of a jaxpr and of the jaxprs in it."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "name":
            yield eqn.params["name"]
        for value in jax.tree.leaves(eqn.params, is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from names_in(inner)


def test_residuals_have_the_checkpoint_name_of_the_field():
    with te.autocast(enabled=True, recipe=DELAYED):
        variables = init(te_flax.LayerNormMLP(64))
    found = set(names_in(jax.make_jaxpr(delayed_step)(variables).jaxpr))
    assert found >= {"named", "ffn1", "ffn2"}
    assert RESIDUAL_NAME not in found


def test_layernorm_output_is_returned_on_request():
    for cls, size in ((te_flax.LayerNormDenseGeneral, 8), (te_flax.LayerNormMLP, 16)):
        layer = cls(size, return_layernorm_output=True)
        variables = init(layer)
        _, normalised = layer.apply(variables, X)
        params = variables["params"]
        np.testing.assert_array_equal(normalised, layernorm(X, params["scale"], params["ln_bias"], "layernorm"))
        plain = cls(size, return_layernorm_output=True, enable_layernorm=False)
        assert "scale" not in init(plain)["params"]
        np.testing.assert_array_equal(plain.apply(init(plain), X)[1], X)


def test_layernorm_dense_is_its_function_and_depth_scaling_divides():
    layer = te_flax.LayerNormDenseGeneral(8, use_bias=True, layernorm_type="rmsnorm", depth_scaling=4.0)
    variables = init(layer)
    params = variables["params"]
    expected = layernorm_dense(X, params["kernel"], params["scale"], None, params["bias"], "rmsnorm")
    np.testing.assert_array_equal(layer.apply(variables, X)[0], expected / 4)
    assert_same(
        expected,
        nn.RMSNorm().apply({"params": {"scale": params["scale"]}}, X) @ params["kernel"]
        + params["bias"].reshape(1, 1, -1),
    )


def test_dropout_is_after_the_activation():
    layer = te_flax.LayerNormMLP(256, intermediate_dropout_rate=0.5, enable_low_rank_adaptation=True)
    variables = init(layer, dropout=jax.random.key(1))
    params = variables["params"]
    params["wo_kernel"], params["wo_lora_b_kernel"] = jnp.ones((256, 32)), jnp.zeros_like(params["wo_lora_b_kernel"])
    params["wi_kernel"], params["wi_lora_b_kernel"] = (
        jnp.zeros((32, 1, 256)),
        jnp.zeros_like(params["wi_lora_b_kernel"]),
    )
    layer = layer.clone(activations=(jnp.cos,))  # cos(0) = 1: each of 256 ones is 0 or 2
    kept = layer.apply(variables, X, rngs={"dropout": jax.random.key(2)})[0][..., 0] / 2
    assert np.all((kept > 128 - 5 * 8) & (kept < 128 + 5 * 8))  # five standard deviations
    assert len(np.unique(kept)) > 1
    np.testing.assert_array_equal(layer.apply(variables, X, deterministic=True)[0], np.full((2, 4, 32), 256.0))


@pytest.mark.parametrize("types", [t for t in ACTIVATIONS if not callable(t[0]) and t[0] != "linear"], ids="_".join)
def test_the_backward_pass_of_an_activation_is_its_gradient(types):
    x, dz = normal(1, (3, len(types), 16), spread=3.0), normal(2, (3, 16))
    _, vjp = jax.vjp(functools.partial(activation, activation_type=types), x)
    dx, dbias = tex.quantize_dact_dbias(dz, x, types)
    np.testing.assert_array_equal(dx.data, vjp(dz)[0])
    assert_same(dbias, jnp.sum(dx.data, axis=0))
    np.testing.assert_array_equal(tex.dact_lu(dz, x, types).data, dx.data)
    slices = [x[:, i] for i in range(len(types))]
    assert_same(tex.act_lu(x, types).data, ACTIVATIONS[types](*slices))


def test_constants_of_a_clamped_swiglu_are_used():
    x, types = jnp.array([[10.0], [-10.0]]), ("clamped_silu", "clamped_linear")
    params = tex.activation.ActivationParams.create(types, limit=2.0, alpha=0.0, glu_linear_offset=5.0)
    np.testing.assert_array_equal(activation(x, types, act_params=params), [2.0 * 0.5 * 3.0])
    assert tex.activation.ActivationParams.create(("gelu",), limit=2.0) == tex.activation.ActivationParams()


def test_quantizers_of_an_activation_and_a_norm_round_and_pass_gradients_through():
    mode, e4m3 = te.ScalingMode, jnp.float8_e4m3fn
    current = te.QuantizerFactory.create(1, mode.CURRENT_TENSOR_SCALING, e4m3)
    x, dz = normal(1, (4, 1, 32)), normal(2, (4, 32))
    y, vjp = jax.vjp(lambda x: activation(x, ("gelu",), current), x)
    np.testing.assert_array_equal(y, current.quantize(activation(x, ("gelu",))).rowwise.dequantize())
    np.testing.assert_array_equal(vjp(dz)[0], tex.dact_lu(dz, x, ("gelu",)).data)
    np.testing.assert_array_equal(tex.act_lu(x, ("gelu",), current).rowwise.dequantize(), y)

    delayed = te.QuantizerFactory.create(1, mode.DELAYED_TENSOR_SCALING, e4m3)
    gamma = jnp.ones(32)
    y, vjp = jax.vjp(lambda x, quantizer: layernorm(x, gamma, None, "rmsnorm", quantizer=quantizer), X, delayed)
    exact = layernorm(X, gamma, None, "rmsnorm")
    np.testing.assert_array_equal(y, exact.astype(e4m3).astype(jnp.float32))
    dx, following = vjp(y)
    np.testing.assert_array_equal(dx, tex.normalization_bwd(y, X, None, None, gamma, None, False, 1e-6, "rmsnorm")[0])
    assert_same(following.scale, 448 / jnp.max(jnp.abs(exact)).reshape(1))


def test_a_key_of_stochastic_rounding_has_no_gradient():
    mode, key = te.ScalingMode.NVFP4_1D_SCALING, jax.random.key(3)
    quantizer = te.QuantizerFactory.create(1, mode, jnp.float4_e2m1fn, stochastic_rounding_rng_state=key)
    x = normal(1, (4, 1, 32))
    assert jax.grad(lambda x: activation(x, ("gelu",), quantizer).sum())(x).shape == x.shape


def test_amax_of_unquantised_results_is_returned_on_request():
    x = normal(1, (4, 1, 32))
    y = tex.act_lu(x, ("gelu",), output_amax_when_no_scaling=True)
    np.testing.assert_array_equal(y.amax, jnp.max(jnp.abs(y.data)).reshape(1))
    for norm in (
        tex.layernorm_fwd(X, jnp.ones(32), jnp.zeros(32), False, 1e-6, output_amax_when_no_scaling=True),
        tex.rmsnorm_fwd(X, jnp.ones(32), False, 1e-6, output_amax_when_no_scaling=True),
    ):
        np.testing.assert_array_equal(norm[0].amax, jnp.max(jnp.abs(norm[0].data)).reshape(1))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: te_flax.LayerNormMLP(8, axis=0).init(jax.random.key(0), X), "`axis` must be -1, not 0"),
        (lambda: te_flax.DenseGeneral(8, kernel_axes=("a",)).init(jax.random.key(0), X), r"kernel \(32, 8\)"),
        (lambda: te_flax.LayerNorm(layernorm_type="batch").init(jax.random.key(0), X), "not 'batch'"),
        (lambda: layernorm(X, jnp.ones(32), jnp.ones(32), "rmsnorm"), "`beta` must be None"),
        (lambda: activation(X, ("gelu",)), r"axis -2 of x \(2, 4, 32\) must have 1 slices"),
        (lambda: activation(X[:, :1], ("no_such",)), "'no_such' is neither a function of jax.nn nor one of linear"),
        (
            lambda: layernorm_mlp(
                X, jnp.ones(32), None, (jnp.ones((32, 8)), jnp.ones((8, 32))), (None, None), "rmsnorm"
            ),
            r"\(hidden, 1, intermediate\) and \(intermediate, hidden\), not \(32, 8\) and \(8, 32\)",
        ),
    ],
)
def test_bad_input_is_explained(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize(
    ("module", "name", "words"),
    [
        ("flax.transformer", "DotProductAttention", "jax.nn.dot_product_attention"),
        ("flax.transformer", "TransformerLayerType", "LayerNormMLP"),
        ("flax", "TransformerLayer", "LayerNormMLP"),
        ("flax.module", "Softmax", "jax.nn.softmax"),
        ("attention", "fused_attn", "jax.nn.dot_product_attention"),
        ("softmax", "softmax", "jax.nn.softmax"),
    ],
)
def test_importing_what_is_not_provided_names_the_replacement(module, name, words):
    module = importlib.import_module(f"{te.__name__}.{module}")
    with pytest.raises(ImportError, match=words):
        exec(f"from {module.__name__} import {name}")
    with pytest.raises(AttributeError, match="no attribute '_private'"):
        module._private  # noqa: B018


def test_a_wrapped_function_owns_its_quantizers():
    def project(generate_quantizer_set, x, w):
        return te.dense.dense(x, w, quantizer_set=generate_quantizer_set("_p"))

    module = te_flax.wrap_function_in_te_state_module(project, DELAYED, "projection")
    assert module.__name__ == "TEWrapper_projection"
    x, w = X.reshape(8, 32), normal(1, (32, 8))
    state = module().init(jax.random.key(0), x, w)["_overwrite_with_gradient"]
    assert state["grad_p_amax_history"].shape == (4,)


@pytest.mark.jax_versions
@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(te.Float8CurrentScaling(), id="current"),
        pytest.param(te.MXFP8BlockScaling(), id="mxfp8", marks=pytest.mark.exhaustive),  # the same dot
    ],
)
def test_a_bfloat16_mlp_of_a_matrix_has_gradients(recipe):
    """XLA's CPU backend rejects the bfloat16 dot "km,kab->mab" that wgrad of `wi_kernel` would be."""
    layer, x = te_flax.LayerNormMLP(64, activations=("silu", "linear")), X.reshape(8, 32).astype(jnp.bfloat16)
    with te.autocast(enabled=True, recipe=recipe):
        variables = init(layer, x)
        matrix, batch = (
            jax.jit(jax.grad(lambda v, x=x: layer.apply(v, x)[0].astype(jnp.float32).sum()))(variables)["params"]
            for x in (x, x.reshape(1, 8, 32))
        )
    assert_same(matrix["wi_kernel"], batch["wi_kernel"])


def test_block_scales_of_a_norm_come_from_float32():
    quantizer = te.QuantizerFactory.create(1, te.ScalingMode.MXFP8_1D_SCALING, jnp.float8_e4m3fn)
    x, gamma = normal(0, (4, 64), jnp.bfloat16), normal(1, (64,))
    tensor, _ = tex.rmsnorm_fwd(x, gamma, False, 1e-6, quantizer)
    exact = quantizer.quantize(layernorm(x.astype(jnp.float32), gamma, None, "rmsnorm"))
    np.testing.assert_array_equal(tensor.rowwise.data, exact.rowwise.data)
    assert tensor.rowwise.dq_dtype == jnp.bfloat16


@pytest.mark.parametrize("recipe", [te.MXFP8BlockScaling(), None], ids=["argument", "autocast"])
def test_residuals_of_hooks_have_the_checkpoint_name_of_the_call(recipe):
    x, w, sizes = X.reshape(8, 32), normal(1, (2, 32, 8)), jnp.array([3, 5])
    dense = te_flax.make_dot_general_cls(recipe, "named")()
    experts = te_flax.make_grouped_dense_cls(recipe, "named")

    def loss(w):
        y = dense.apply({}, x, w[0], (((1,), (0,)), ((), ())))
        return y.sum() + experts.apply({}, x, w, sizes).sum()

    with te.autocast(enabled=True, recipe=te.MXFP8BlockScaling()):
        found = set(names_in(jax.make_jaxpr(jax.grad(loss))(w).jaxpr))
    assert "named" in found
    assert RESIDUAL_NAME not in found
