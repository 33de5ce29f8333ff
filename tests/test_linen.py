"""Recipes in Flax linen: results equal those of `scaledot.train`, state in variables, unmodified models."""

import copy
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from data import normal
from flax import linen as nn
from flax import serialization
from flax.training.train_state import TrainState
from training import SHORT_HISTORY

import scaledot as sd
from scaledot import state as scaling
from scaledot import train
from scaledot.recipes import RECIPES, Gemm, Recipe

pytestmark = [pytest.mark.jax_versions, pytest.mark.usefixtures("standard_promotion")]  # Flax and optax need it

OWG = "_overwrite_with_gradient"
NAMES = {"x_scale", "x_amax_history", "kernel_scale", "kernel_amax_history", "grad_scale", "grad_amax_history"}


@pytest.mark.parametrize("field", ["dot_general_cls", "dot_general"])
@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed", "nvfp4"])
def test_a_dense_layer_is_train_dense(recipe, field):
    cls = sd.linen.make_dot_general_cls(recipe)
    layer = nn.Dense(32, use_bias=False, **{field: cls if field == "dot_general_cls" else cls()})
    x = normal(0, (2, 7, 64))
    variables = layer.init(jax.random.key(1), x)
    assert set(variables["params"]) == {"kernel"}
    rngs = {"sr_rng": jax.random.key(2)} if recipe == "nvfp4" else None
    y = layer.apply(variables, x, rngs=rngs)
    keywords = {"state": sd.init_state(recipe)} if recipe == "fp8_delayed" else {"key": jax.random.key(3)}
    expected = train.dense(x, variables["params"]["kernel"], recipe=recipe, **keywords)
    np.testing.assert_array_equal(y, expected[0] if recipe == "fp8_delayed" else expected)
    if recipe != "fp8_delayed":
        assert set(variables) == {"params"}
        return
    [(_, leaves)] = variables[OWG].items()  # under the name of the DotGeneral module
    assert set(leaves) == NAMES
    assert leaves["x_scale"].shape == (1,)
    assert leaves["x_amax_history"].shape == (1024,)
    assert {leaf.dtype for leaf in jax.tree.leaves(leaves)} == {jnp.dtype(jnp.float32)}


class Twice(nn.Module):
    """One layer that is called twice; `wrap` may rematerialise it."""

    recipe: Recipe
    wrap: object = staticmethod(lambda layer: layer)

    @nn.compact
    def __call__(self, x):
        layer = self.wrap(nn.Dense)(16, use_bias=False, dot_general_cls=sd.linen.make_dot_general_cls(self.recipe))
        return layer(4 * layer(x))


def states_in(tree):
    """The (history, multiplier) of x, w and g in the variables of one layer."""
    leaves = {path[-1].key: leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    names = {"x": "x", "w": "kernel", "g": "grad"}
    return {t: (leaves[f"{n}_amax_history"], leaves[f"{n}_scale"][0]) for t, n in names.items()}


@pytest.mark.parametrize("case", [pytest.param("plain", marks=pytest.mark.exhaustive), "remat, mutable"])
def test_a_layer_called_twice_records_the_larger_amax(case):
    wrap = nn.remat if "remat" in case else (lambda layer: layer)
    model, x = Twice(SHORT_HISTORY, wrap), normal(0, (8, 16))
    variables = model.init(jax.random.key(1), x)
    mutable = [OWG] if "mutable" in case else False

    def loss(variables):
        y = model.apply(variables, x, mutable=mutable)
        return jnp.sum((y[0] if mutable else y) ** 2)

    grads = jax.jit(jax.grad(loss))(variables)
    [kernel] = jax.tree.leaves(variables["params"])
    state = sd.init_state(SHORT_HISTORY)

    def by_hand(state):
        h, state = train.dense(x, kernel, recipe=SHORT_HISTORY, state=state)
        y, state = train.dense(4 * h, kernel, recipe=SHORT_HISTORY, state=state)
        return jnp.sum(y**2)

    expected = jax.jit(jax.grad(by_hand))(state)
    for tensor, (history, multiplier) in states_in(grads[OWG]).items():
        np.testing.assert_array_equal(history, expected[tensor].history)
        np.testing.assert_array_equal(multiplier, expected[tensor].multiplier)


def test_layers_in_a_scan_have_their_own_states():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.Dense(16, dot_general_cls=sd.linen.make_dot_general_cls(SHORT_HISTORY))(x), None

    stack = nn.scan(nn.remat(Layer), variable_axes={"params": 0, OWG: 0}, split_rngs={"params": True}, length=3)
    model, x = stack(), normal(0, (8, 16))
    variables = model.init(jax.random.key(1), x, None)
    grads = jax.jit(jax.grad(lambda v: model.apply(v, x, None)[0].sum()))(variables)
    kernel = variables["params"]["Dense_0"]["kernel"]
    multipliers = states_in(grads[OWG])
    history, _ = multipliers["w"]
    np.testing.assert_array_equal(history[:, -1], jnp.max(jnp.abs(kernel), axis=(1, 2)))


class Model(nn.Module):
    """Dense, DenseGeneral through attention, and Einsum."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(32, name="first")(x)
        x = nn.MultiHeadDotProductAttention(4, name="attention")(x)
        x = nn.Einsum((32, 2, 8), "bsd,dhk->bshk", name="split")(x)
        return nn.Dense(4, name="head")(x.reshape(*x.shape[:2], 16))


RULES = {"attention/*": "mxfp8", "head": None, "*": SHORT_HISTORY}


def test_a_model_takes_recipes_by_path_and_keeps_its_parameters():
    model, x = Model(), normal(0, (2, 5, 32))
    plain = model.init(jax.random.key(1), x)
    quantized = sd.linen.with_recipe(model, RULES)
    variables = jax.jit(quantized.init)(jax.random.key(1), x)
    assert jax.tree.structure(variables["params"]) == jax.tree.structure(plain["params"])
    for a, b in zip(jax.tree.leaves(variables["params"]), jax.tree.leaves(plain["params"]), strict=True):
        np.testing.assert_array_equal(a, b)
    assert set(variables[OWG]) == {"first", "split"}
    y, exact = jax.jit(quantized.apply)(variables, x), model.apply(plain, x)
    # Six matmuls in sequence with 3.8 % error each (two e4m3 operands) have 9 % if errors are independent.
    assert 0 < np.linalg.norm(y - exact) / np.linalg.norm(exact) < 0.2
    with sd.linen.recipes_by_path(RULES):
        np.testing.assert_allclose(jax.jit(model.apply)(variables, x), y, rtol=1e-6)
    np.testing.assert_array_equal(model.apply(plain, x), exact)  # the context manager leaves no trace
    grads = jax.jit(jax.grad(lambda v: quantized.apply(v, x).sum()))(variables)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(grads))
    assert quantized.name is None


def test_capture_intermediates_returns_each_output_once():
    model, x = sd.linen.with_recipe(nn.Sequential([nn.Dense(4)]), "fp8_current"), normal(0, (2, 32))
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    _, captured = jax.eval_shape(lambda params: model.apply(params, x, capture_intermediates=True), params)
    assert len(captured["intermediates"]["layers_0"]["__call__"]) == 1


def test_a_layer_with_a_dot_general_of_its_own_keeps_it():
    layer, x = nn.Dense(4, dot_general=jax.lax.dot_general), normal(0, (2, 32))
    model = sd.linen.with_recipe(layer, "nvfp4")
    variables = model.init(jax.random.key(0), x)
    np.testing.assert_array_equal(model.apply(variables, x), layer.apply(variables, x))


def test_an_einsum_layer_computes_what_flax_does():
    """Under a recipe without casts both agree up to the order of accumulation."""
    plain = Recipe("plain", Gemm(), Gemm(), Gemm())
    for text, shape in (("bsd,dhk->bshk", (32, 2, 8)), ("bsd,kd->bks", (8, 32))):
        layer, x = nn.Einsum(shape, text, bias_init=nn.initializers.normal()), normal(0, (2, 5, 32))
        variables = layer.init(jax.random.key(1), x)
        y = sd.linen.with_recipe(layer, plain).apply(variables, x)
        np.testing.assert_allclose(y, layer.apply(variables, x), rtol=1e-5, atol=1e-5)


def test_grouped_dense_has_its_own_state():
    layer = sd.linen.make_grouped_dense_cls(SHORT_HISTORY)()
    x, kernel, sizes = normal(0, (12, 32)), normal(1, (2, 32, 8)), jnp.array([5, 7])
    variables = layer.init(jax.random.key(0), x, kernel, sizes)
    assert set(variables[OWG]) == NAMES
    grads = jax.grad(lambda v: layer.apply(v, x, kernel, sizes).sum())(variables)
    assert grads[OWG]["x_amax_history"][-1] == jnp.max(jnp.abs(x))


SMALL = sd.linen.with_recipe(nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(4)]), SHORT_HISTORY)
ADAM = optax.adam(1e-2)  # one for all states, so that they share a compiled step


def make_train_state(seed=1):
    variables = SMALL.init(jax.random.key(seed), normal(0, (8, 16)))
    return TrainState.create(apply_fn=SMALL.apply, params=variables, tx=ADAM)


@jax.jit
def train_step(state, x, y):
    def loss(variables):
        return jnp.mean((state.apply_fn(variables, x) - y) ** 2)

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


def test_a_train_state_learns_and_its_optimizer_has_no_scaling_state():
    state = make_train_state()
    assert not any("amax" in str(path) for path, _ in jax.tree_util.tree_leaves_with_path(state.opt_state))
    x, y = normal(0, (8, 16)), normal(1, (8, 4))
    losses = []
    for _ in range(40):
        state, value = train_step(state, x, y)
        losses.append(float(value))
    assert losses[-1] < 0.3 * losses[0]
    history = state.params[OWG]["layers_0"]["DotGeneral_0"]["x_amax_history"]
    np.testing.assert_array_equal(history, np.float32([0, *[jnp.max(jnp.abs(x))] * 3]))


@pytest.mark.parametrize("library", ["flax", "orbax"])
def test_a_run_resumed_from_a_checkpoint_is_bit_identical(library, tmp_path):
    x, y = normal(0, (8, 16)), normal(1, (8, 4))
    state = make_train_state()
    for _ in range(3):
        state, _ = train_step(state, x, y)
    if library == "flax":
        restored = serialization.from_bytes(make_train_state(2), serialization.to_bytes(state))
    else:
        ocp = pytest.importorskip("orbax.checkpoint")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # orbax's own deprecations
            checkpointer = ocp.StandardCheckpointer()
            checkpointer.save(tmp_path / "state", state)
            checkpointer.wait_until_finished()
            restored = checkpointer.restore(tmp_path / "state", make_train_state(2))
            checkpointer.close()
    for _ in range(2):
        state, a = train_step(state, x, y)
        restored, b = train_step(restored, x, y)
        assert float(a) == float(b)
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(restored.params), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda m, v, x: m.apply({"params": v["params"]}, x),
            ValueError,
            "uses delayed scaling, but the variables have no",
        ),
        (
            lambda m, v, x: sd.linen.with_recipe(Model(), {"frist": "mxfp8"}).init(jax.random.key(0), x),
            ValueError,
            "near paths: first",
        ),
        (
            lambda m, v, x: sd.linen.explain(sd.linen.with_recipe(Model(), {"frist": "mxfp8", "*": "nvfp4"}), x),
            ValueError,
            "near paths: first",
        ),
        (lambda m, v, x: sd.linen.with_recipe(Model(), {}), ValueError, "not empty"),
        (lambda m, v, x: sd.linen.with_recipe(Model(), {"*": "mxpf8"}), ValueError, "did you mean 'mxfp8'"),
        (lambda m, v, x: sd.linen.make_dot_general_cls("fp8"), ValueError, "not in RECIPES"),
        (
            lambda m, v, x: jax.grad(lambda v: sd.linen.with_recipe(Model(), "nvfp4").apply({"params": v}, x).sum())(
                v["params"]
            ),
            ValueError,
            "in Flax a stream `sr_rng`",
        ),
    ],
)
def test_bad_input_is_explained(call, error, words):
    model, x = sd.linen.with_recipe(Model(), SHORT_HISTORY), normal(0, (2, 5, 32))
    variables = jax.jit(model.init)(jax.random.key(1), x)
    with pytest.raises(error, match=words):
        call(model, variables, x)


def test_copies_of_a_model_with_rules_keep_them():
    model = sd.linen.with_recipe(nn.Dense(4), "mxfp8")
    for other in (copy.deepcopy(model), model.clone(features=8)):
        assert isinstance(other, sd.linen.WithRecipe)
    with pytest.raises(AttributeError, match="would lose the rules"):
        model.bind({})


def test_every_recipe_has_a_dot_general_class():
    for name, recipe in RECIPES.items():
        assert sd.linen.make_dot_general_cls(name)().recipe is recipe


def test_parameters_differentiated_without_their_scaling_state_are_refused():
    model, x = sd.linen.with_recipe(nn.Dense(4), SHORT_HISTORY), normal(0, (2, 32))
    variables = jax.eval_shape(model.init, jax.random.key(0), x)

    def loss(params, state):
        return model.apply({"params": params, **state}, x).sum()

    state = {OWG: variables[OWG]}
    with pytest.raises(ValueError, match=rf"Flax linen: jax.grad\(loss\)\(variables\).*{OWG}"):
        jax.eval_shape(jax.grad(loss), variables["params"], state)
    jax.eval_shape(jax.grad(loss, argnums=(0, 1)), variables["params"], state)


def test_initialising_does_not_warn_of_an_empty_history_and_applying_does():
    scaling._warn_once.cache_clear()
    model, x = sd.linen.with_recipe(nn.Dense(4), SHORT_HISTORY), normal(0, (2, 32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        variables = model.init(jax.random.key(0), x)
    with pytest.warns(UserWarning, match="all-zero amax history"):
        jax.eval_shape(lambda x: model.apply(variables, x), x)


class Traced(nn.Module):
    """A layer that counts its traces and has an unhashable field."""

    widths: list
    times = []  # noqa: RUF012

    @nn.compact
    def __call__(self, x):
        self.times.append(1)
        return nn.Dense(self.widths[0])(x)


def test_equal_models_have_equal_methods_that_jit_traces_once():
    one, same = (sd.linen.with_recipe(Traced([4]), {"*": "mxfp8"}) for _ in range(2))
    assert one.apply is one.apply
    assert (one.apply, hash(one.apply)) == (same.apply, hash(same.apply))
    others = (
        sd.linen.with_recipe(Traced([8]), {"*": "mxfp8"}),
        sd.linen.with_recipe(Traced([4]), "fp8_current"),
        sd.linen.with_recipe(Traced([4]), {"*": "mxfp8"}, overlap="tp"),
    )
    assert all(one.apply != other for other in (*(other.apply for other in others), one.init))
    variables, x = {"params": {"Dense_0": {"kernel": jnp.ones((32, 4)), "bias": jnp.ones(4)}}}, jnp.ones((2, 32))
    for _ in range(2):
        for model in (one, same):
            jax.jit(model.apply).trace(variables, x)
    assert len(Traced.times) == 1
    tx = optax.sgd(1.0)
    states = [TrainState.create(apply_fn=model.apply, params=variables, tx=tx) for model in (one, same)]
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])


def test_a_convolution_is_train_conv_general_dilated():
    layer, x = nn.Conv(8, (3,), strides=2, use_bias=False), normal(0, (2, 9, 16))
    kernel = normal(1, (3, 16, 8))

    @jax.jit
    def both(x, kernel):
        window = {"window_strides": (2,), "padding": "SAME", "dimension_numbers": ("NWC", "WIO", "NWC")}
        expected = train.conv_general_dilated(x, kernel, **window, recipe="fp8_current")
        return sd.linen.with_recipe(layer, "fp8_current").apply({"params": {"kernel": kernel}}, x), expected

    y, expected = both(x, kernel)
    np.testing.assert_array_equal(y, expected)
    variables = jax.eval_shape(sd.linen.with_recipe(layer, SHORT_HISTORY).init, jax.random.key(0), x)
    assert set(variables[OWG]["ConvGeneralDilated_0"]) == NAMES


class Convolved(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(32, (3,), name="in")(x)
        x = nn.Conv(32, (3,), feature_group_count=32, name="depthwise")(x)
        x = nn.Dense(32, dot_general=jax.lax.dot_general, name="own")(x)
        return nn.ConvTranspose(4, (3,), name="out")(x)


def test_layers_that_do_not_support_a_recipe_are_named():
    x = jax.ShapeDtypeStruct((2, 8, 3), jnp.float32)
    model = sd.linen.with_recipe(Convolved(), "mxfp8")
    with pytest.warns(UserWarning, match=r"depthwise \(Conv: mxfp8.*; out \(ConvTranspose: .*map these paths to None"):
        jax.eval_shape(model.init, jax.random.key(0), x)
    rows = [line.split(maxsplit=2) for line in sd.linen.explain(model, x).splitlines()]
    assert [path for path, *_ in rows] == ["in", "depthwise", "own", "out"]
    assert rows[0][1:] == ["Conv", "mxfp8"]
    assert rows[2][1:] == ["Dense", "none: it has a dot_general of its own"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        per_tensor = {"depthwise": "fp8_current", "out": None, "*": "mxfp8"}
        jax.eval_shape(sd.linen.with_recipe(Convolved(), per_tensor).init, jax.random.key(0), x)


def test_stochastic_recipes_draw_from_linens_default_stream_too():
    model, x = sd.linen.with_recipe(nn.Dense(4), "nvfp4"), normal(0, (2, 32))
    params = jax.eval_shape(model.init, jax.random.key(0), x)

    def traced(stream):
        rngs = {stream: jax.random.key(1)}
        return jax.eval_shape(jax.grad(lambda params: model.apply(params, x, rngs=rngs).sum()), params)

    for stream in ("params", "sr_rng"):
        traced(stream)
    with pytest.raises(ValueError, match=r"rngs=\{'sr_rng': key\}"):
        traced("dropout")


def test_an_axis_that_does_not_divide_into_blocks_can_be_gathered():
    """96 features over eight devices are 12 each, which cuts blocks of 32."""
    mesh = jax.make_mesh((8,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    P = jax.sharding.PartitionSpec  # noqa: N806
    params = {"kernel": jnp.ones((96, 16))}
    for layer, x in (
        (nn.Dense(16, use_bias=False), jnp.ones((8, 96))),
        (nn.Conv(16, (), use_bias=False), jnp.ones((8, 96))),
    ):
        specs = train.Specs(x=P(None, "tp"), w=P("tp", None), y=P())
        with jax.set_mesh(mesh):
            raising = sd.linen.with_recipe(layer, "mxfp8", specs=specs)
            with pytest.raises(ValueError, match="on_indivisible='gather'"):
                jax.eval_shape(raising.apply, {"params": params}, x)
            gathered = sd.linen.with_recipe(layer, "mxfp8", specs=specs, on_indivisible="gather")
            assert jax.eval_shape(gathered.apply, {"params": params}, x).shape == (8, 16)


@pytest.mark.parametrize("module", ["linen", "nnx"])
def test_without_flax_an_error_says_what_to_install(module, monkeypatch):
    monkeypatch.setitem(sys.modules, "flax", None)
    monkeypatch.delitem(sys.modules, f"scaledot.{module}", raising=False)
    monkeypatch.delitem(vars(sd), module, raising=False)
    with pytest.raises(ImportError, match=rf"scaledot.{module} needs Flax.*pip install 'scaledot\[flax\]'"):
        getattr(sd, module)
