"""`transform.quantized` of unmodified Equinox, Haiku, Tunix and plain JAX models, against recipes applied by hand."""

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
from flax import nnx

import scaledot as sd
from scaledot import train, transform

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
    for a, b in zip((value, *found), (expected_value, *expected), strict=True):
        np.testing.assert_array_equal(a, b)
    plain, _ = gradients(model.loss, model.params, model.x)
    assert plain != value


@pytest.mark.jax_versions
@pytest.mark.parametrize("name", MODELS)
def test_every_matmul_of_a_model_is_reported(name):
    model = MODELS[name]()
    report = transform.report(model.loss, "mxfp8")(model.params, model.x)
    quantised = [row.path for row in report.rows if row.recipe]
    assert len(quantised) == model.layers
    assert len(set(quantised)) == model.layers, "each has the path of its own layer"
    assert len(report.rows) == model.layers + model.activations


@pytest.mark.parametrize("recipe", sorted(sd.RECIPES))
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
