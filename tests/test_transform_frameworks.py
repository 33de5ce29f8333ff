"""`transform.quantized` and `report` of models of Flax, Equinox, Haiku, Tunix and plain JAX.

Flax models are compared with the same recipe through the hooks of linen and NNX, the others with recipes applied by
hand.
"""

import functools
import importlib
import importlib.util
import pathlib
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import haiku as hk
import haiku._src.basic as haiku_layers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from hopper import lowered_for_hopper, needs_mosaic
from jax import lax
from tables import params_of
from training import assert_same, assert_same_bits

import scaledot as sd
from scaledot import lora, train, transform

pytestmark = [
    pytest.mark.usefixtures("standard_promotion"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Tunix uses deprecated names of JAX and Flax
]

WIDTH, HEADS, TOKENS = 32, 2, 8


class Model(NamedTuple):
    """A loss of (params, x). by_hand: the loss with `dot(x, w)` in place of each matmul of x by a weight w.

    layers: the number of matmuls by a weight. activations: the number of matmuls of two activations.
    """

    params: Any
    x: jax.Array
    loss: Callable[..., jax.Array]
    by_hand: Callable[..., jax.Array]
    layers: int
    activations: int = 2


def inputs() -> jax.Array:
    return jax.random.normal(jax.random.key(9), (2, TOKENS, WIDTH))


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention of q, k, v (..., tokens, heads, size); heads are merged in the result."""
    weights = jax.nn.softmax(jnp.einsum("...qhd,...khd->...hqk", q, k) / 4)
    return jnp.einsum("...hqk,...khd->...qhd", weights, v).reshape(*q.shape[:-2], WIDTH)


def dictionary_model() -> Model:
    keys = jax.random.split(jax.random.key(0), 6)
    params = {name: jax.random.normal(key, (WIDTH, WIDTH)) / 6 for name, key in zip("qkvoud", keys, strict=True)}

    def loss(dot, p, x):
        q, k, v = (dot(x, p[name]).reshape(*x.shape[:-1], HEADS, -1) for name in "qkv")
        x = x + dot(attend(q, k, v), p["o"])
        return jnp.mean((x + dot(jax.nn.gelu(dot(x, p["u"])), p["d"])) ** 2)

    return Model(params, inputs(), functools.partial(loss, jnp.matmul), loss, 6)


class EquinoxBlock(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, key: jax.Array):
        first, second = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=first)
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, jax.nn.gelu, key=second)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jax.vmap(self.norm)(x)
        x = x + self.attention(y, y, y)
        return x + jax.vmap(self.mlp)(x)


def equinox_model() -> Model:
    model = EquinoxBlock(jax.random.key(0))

    def loss(model, x):
        return jnp.mean(jax.vmap(model)(x) ** 2)

    def by_hand(dot, model, x):
        linear = lambda layer, x: dot(x, layer.weight.T) + (0 if layer.bias is None else layer.bias)  # noqa: E731
        attention, y = model.attention, jax.vmap(jax.vmap(model.norm))(x)
        projections = attention.query_proj, attention.key_proj, attention.value_proj
        q, k, v = (linear(layer, y).reshape(*x.shape[:-1], HEADS, -1) for layer in projections)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q / np.sqrt(q.shape[-1]), k)
        values = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape)
        x = x + linear(attention.output_proj, values)
        return jnp.mean((x + linear(model.mlp.layers[1], jax.nn.gelu(linear(model.mlp.layers[0], x)))) ** 2)

    return Model(model, inputs(), loss, by_hand, 6)


def haiku_model() -> Model:
    def block(x):
        attention = hk.MultiHeadAttention(HEADS, WIDTH // HEADS, w_init=hk.initializers.VarianceScaling())
        y = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
        x = x + attention(y, y, y)
        return jnp.mean((x + hk.nets.MLP([2 * WIDTH, WIDTH], activation=jax.nn.gelu)(x)) ** 2)

    model = hk.without_apply_rng(hk.transform(block))

    def by_hand(dot, params, x):
        """Haiku's own code, with another `jnp.dot` in its Linear."""
        namespace = types.SimpleNamespace(**vars(jnp))
        namespace.dot = lambda x, w, precision: dot(x, w)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(haiku_layers, "jnp", namespace)
            return model.apply(params, x)

    return Model(model.init(jax.random.key(0), inputs()), inputs(), model.apply, by_hand, 6)


def tunix_model() -> Model:
    llama = module_alone("tunix.models.llama3.model")
    config = llama.ModelConfig(
        num_layers=1,
        vocab_size=64,
        embed_dim=WIDTH,
        hidden_dim=2 * WIDTH,
        num_heads=HEADS,
        head_dim=16,
        num_kv_heads=1,
        rope_theta=10000,
        norm_eps=1e-5,
    )
    model = llama.Llama3(config, rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(1), (2, TOKENS), 0, 64)

    def loss(model, tokens):
        positions, mask = jnp.arange(TOKENS)[None], jnp.tril(jnp.ones((1, TOKENS, TOKENS), bool))
        logits, _ = model(tokens, positions, None, mask)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - logits[..., 0])

    def by_hand(dot, model, tokens):
        """Tunix's own code, with another product in its layer Einsum and in NNX's Linear."""
        layers = [module for _, module in nnx.iter_modules(model) if isinstance(module, nnx.Linear)]
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(llama.Einsum, "__call__", lambda self, x: einsum(dot, self.einsum_str, x, self.w.value))
            for layer in layers:
                patched.setattr(layer, "dot_general", lambda x, w, *_, **__: dot(x, w))
            return loss(model, tokens)

    return Model(model, tokens, loss, by_hand, 8)


def einsum(dot, text: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """An einsum that contracts the last axes of x with the first axes of w."""
    count = sum(label in text.split(",")[0] for label in text.split(",")[1].split("->")[0])
    return dot(x.reshape(*x.shape[: x.ndim - count], -1), w.reshape(-1, *w.shape[count:]))


def module_alone(name: str) -> Any:
    """Imports a module without running the `__init__` of its packages: Tunix's import trainers and what these need."""
    *packages, _ = name.split(".")
    if packages[0] not in sys.modules:
        origin = importlib.util.find_spec(packages[0])
        assert origin is not None, f"{packages[0]} is not installed"
        root = pathlib.Path(str(origin.origin)).parents[1]
        for count in range(1, len(packages) + 1):
            package = types.ModuleType(".".join(packages[:count]))
            package.__path__ = [str(root.joinpath(*packages[:count]))]
            sys.modules[package.__name__] = package
    return importlib.import_module(name)


MODELS = {"dictionary": dictionary_model, "equinox": equinox_model, "haiku": haiku_model, "tunix": tunix_model}


def arrays(tree: Any) -> list[jax.Array]:
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]


def gradients(loss, params, x) -> tuple[jax.Array, list[jax.Array]]:
    """The loss and its gradients with respect to all arrays of the parameters."""
    differentiable, static = eqx.partition(params, eqx.is_inexact_array)
    value, found = jax.jit(jax.value_and_grad(lambda p: loss(eqx.combine(p, static), x)))(differentiable)
    return value, arrays(found)


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_current", "fp8_block"])
@pytest.mark.parametrize("name", MODELS)
def test_an_unmodified_model_equals_the_recipe_applied_by_hand(name, recipe):
    model = MODELS[name]()
    dot = functools.partial(train.dense, recipe=recipe)
    value, found = gradients(transform.quantized(model.loss, recipe), model.params, model.x)
    expected_value, expected = gradients(functools.partial(model.by_hand, dot), model.params, model.x)
    assert_same_bits((value, *found), (expected_value, *expected))
    differentiable, static = eqx.partition(model.params, eqx.is_inexact_array)
    assert jax.jit(lambda p: model.loss(eqx.combine(p, static), model.x))(differentiable) != value


@pytest.mark.jax_versions
@pytest.mark.parametrize("name", MODELS)
def test_every_matmul_of_a_model_is_reported(name):
    model = MODELS[name]()
    report = transform.report(model.loss, "mxfp8")(model.params, model.x)
    quantised = [row.path for row in report.rows if row.recipe]
    assert len(quantised) == model.layers
    assert len(set(quantised)) == model.layers, "each has the path of its own layer"
    assert len(report.rows) == model.layers + model.activations


# A transformed model passes a state, a key or neither to its matmuls, and leaves the backward pass to straight-through
# gradients or not; test_train trains every recipe.
KINDS = ("fp8_delayed", "nvfp4", "fp8_block", "w4a16_qat")


@pytest.mark.parametrize("recipe", params_of(sorted(sd.RECIPES), set(sd.RECIPES) - set(KINDS)))
@pytest.mark.parametrize("name", MODELS)
def test_models_train_under_every_recipe(name, recipe):
    model = MODELS[name]()
    quantized = transform.quantized(model.loss, recipe)
    differentiable, static = eqx.partition(model.params, eqx.is_inexact_array)
    states = transform.init_state(model.loss, recipe)(model.params, model.x)

    def loss(params, states, key):
        params = eqx.combine(params, static)
        if states:
            return quantized(params, model.x, sr_key=key, scaling_state=states)[0]
        return quantized(params, model.x, sr_key=key)

    @jax.jit
    def step(params, states, key):
        value, (gradient, states) = jax.value_and_grad(loss, argnums=(0, 1))(params, states, key)
        return jax.tree.map(lambda p, g: p - 0.05 * g, params, gradient), states, value

    losses = []
    for key in jax.random.split(jax.random.key(2), 4):
        differentiable, states, value = step(differentiable, states, key)
        losses.append(float(value))
    assert losses[-1] < losses[0], losses


@pytest.mark.parametrize("name", ["equinox", "haiku"])
def test_adapters_of_a_model_merge_into_its_parameters(name):
    """Of the other frameworks see test_lora_models.py."""
    model, rules = MODELS[name](), lora.Config(rank=2, alpha=4)
    adapters = lora.init(model.loss, rules, key=jax.random.key(0))(model.params, model.x)
    assert len(adapters) == model.layers

    @jax.jit
    def losses(adapters, x):
        adapters = jax.tree.map(lambda factor: factor + 0.25, adapters)
        merged = lora.merge(model.loss, rules)(adapters, model.params, x)
        adapted = lora.adapted(model.loss, rules)(adapters, model.params, x)
        return adapted, model.loss(merged, x), model.loss(model.params, x)

    adapted, merged, base = losses(adapters, model.x)
    assert_same(adapted, merged)
    assert adapted != base


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(2, name="attention")(x)
        return nn.Dense(WIDTH, name="down")(nn.gelu(nn.Dense(2 * WIDTH, name="up")(x)))


@pytest.mark.jax_versions
@pytest.mark.parametrize("recipe", params_of(["fp8_current", "mxfp8", "fp8_block"], ["mxfp8", "fp8_block"]))
def test_a_linen_model_equals_its_hook(recipe):
    model, x = Block(), inputs()
    variables = model.init(jax.random.key(0), x)
    hooked = sd.linen.with_recipe(model, recipe)
    functions = hooked.apply, transform.quantized(model.apply, recipe)
    found, expected = (jax.jit(jax.value_and_grad(lambda v, f=f: jnp.sum(f(v, x) ** 2)))(variables) for f in functions)
    assert_same_bits(found, expected)


class NnxBlock(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 64, rngs=rngs), nnx.Linear(64, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(x)
        return self.down(nnx.gelu(self.up(x)))


@pytest.mark.jax_versions
@pytest.mark.parametrize("recipe", params_of(["mxfp8", "fp8_current"], ["fp8_current"]))
def test_an_nnx_model_equals_its_hook(recipe):
    def f(model, x):
        return jnp.sum(model(x) ** 2)

    x = inputs()
    expected = nnx.grad(f)(sd.nnx.with_recipe(NnxBlock(), recipe), x)
    found = jax.grad(transform.quantized(f, recipe), allow_int=True)(NnxBlock(), x)
    kernels = [nnx.state(gradient, nnx.Param) for gradient in (nnx.state(found), expected)]
    assert_same_bits(*kernels)


@pytest.mark.jax_versions
@needs_mosaic
@pytest.mark.parametrize("recipe", params_of(["fp8_current", "nvfp4"], ["fp8_current"]))
def test_the_program_for_a_gpu_has_the_kernels_of_the_hook(monkeypatch, recipe):
    model, x = Block(), jnp.ones((2, 128, WIDTH))
    variables = model.init(jax.random.key(0), x)
    hooked, quantized = sd.linen.with_recipe(model, recipe), transform.quantized(model.apply, recipe)
    functions = (
        lambda v, key: hooked.apply(v, x, rngs={"sr_rng": key}),
        lambda v, key: quantized(v, x, sr_key=key),
    )
    with lowered_for_hopper(monkeypatch):
        step = [jax.jit(jax.grad(lambda v, key, f=f: jnp.sum(f(v, key)))) for f in functions]
        texts = [
            each.trace(variables, jax.random.key(0)).lower(lowering_platforms=("cuda",)).as_text() for each in step
        ]
    found, expected = (text.count("stablehlo.custom_call @mosaic_gpu") for text in texts)
    assert found == expected > 0


@pytest.mark.jax_versions
def test_hooked_layers_are_reported_and_left_as_they_are():
    """Each contraction under a hook has its recipe in the report, and `quantized` changes only the others."""
    model, x = Block(), inputs()
    variables = model.init(jax.random.key(0), x)
    hooked = sd.linen.with_recipe(model, {"attention/*": "fp8_current", "up": "mxfp8", "*": None})
    report = transform.report(hooked.apply)(variables, x)
    recipes = {row.path: row.recipe for row in report.rows if row.recipe}
    projections = dict.fromkeys([f"attention/{name}" for name in ("query", "key", "value", "out")], "fp8_current")
    assert recipes == projections | {"up": "mxfp8"}
    by_rules = transform.report(model.apply, {"attention/*": "fp8_current", "up": "mxfp8"})(variables, x)
    assert [(row.path, row.flops, row.kernel) for row in report.rows] == [
        (row.path, row.flops, row.kernel) for row in by_rules.rows
    ]
    assert {row.reason for row in report.rows if not row.recipe} == {"it has no recipe"}
    together = sd.linen.with_recipe(model, {"attention/*": "fp8_current", "up": "mxfp8", "down": "fp8_block"})
    functions = transform.quantized(hooked.apply, {"down": "fp8_block"}), together.apply
    assert_same_bits(*(jax.jit(jax.value_and_grad(lambda v, f=f: jnp.sum(f(v, x))))(variables) for f in functions))
    rules = transform.report(hooked.apply, "int8_qat")(variables, x)
    assert {row.path for row in rules.rows if row.recipe == "int8_qat"} == {"down"}


@pytest.mark.jax_versions
def test_hooked_nnx_layers_are_reported_in_scans_and_under_vmap():
    model = sd.nnx.with_recipe(nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)), "mxfp8")

    def scanned(model, x):
        return lax.scan(lambda x, _: (jnp.tanh(model(x)), None), x, length=3)[0]

    (row,) = transform.report(scanned)(model, inputs()).rows
    assert (row.recipe, row.executions, row.flops) == ("mxfp8", 3, 3 * 2 * 16 * WIDTH * WIDTH)
    (row,) = transform.report(lambda model, x: jax.vmap(model)(x))(model, inputs()).rows
    assert (row.recipe, row.flops) == ("mxfp8", 2 * 16 * WIDTH * WIDTH)
