"""`scaledot.lora` on whole models: a transformer that QLoRA trains, linen, NNX."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from adapters import CONFIG, KEY, ROWS, WIDTH, normal, quantized, randomised
from flax import linen as nn
from flax import nnx
from jax import lax
from training import assert_same

import scaledot as sd
from scaledot import lora

pytestmark = pytest.mark.usefixtures("standard_promotion")

BLOCKS, TOKENS, VOCABULARY = 2, 8, 32


def transformer(p, tokens):
    """Logits of a causal transformer of two blocks, which a scan runs with jax.checkpoint."""
    x = p["embedding"][tokens]
    mask = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))[None]

    @jax.checkpoint
    def block(x, w):
        q, k, v = jnp.split(x @ w["qkv"], 3, axis=-1)
        scores = jax.nn.softmax(jnp.where(mask, q @ k.mT / WIDTH**0.5, -1e9))
        x = x + (scores @ v) @ w["out"]
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    return lax.scan(block, x, p["blocks"])[0] @ p["head"]


def transformer_params():
    shapes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 64), "down": (64, WIDTH)}
    blocks = {name: normal(i, BLOCKS, *shape) / 2 for i, (name, shape) in enumerate(shapes.items())}
    return {"embedding": normal(8, VOCABULARY, WIDTH), "blocks": blocks, "head": normal(9, WIDTH, VOCABULARY)}


FP4 = pytest.param("nvfp4", marks=pytest.mark.optimized)  # does not compile under `--compilation cheap`


@pytest.mark.parametrize("name", ["nf4", pytest.param("int4", marks=pytest.mark.exhaustive), FP4, "fp8_e4m3"])
def test_qlora_trains_a_transformer(name):
    """Memorising 64 random tokens starts near the entropy of a guess, log 32, and halves within 60 steps of Adam."""
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, VOCABULARY, (8, TOKENS + 1)))
    p = jax.jit(lambda p: p | {"blocks": quantized(p["blocks"], name)})(transformer_params())
    rules = lora.Config(rank=8, alpha=16, dropout=0.02)
    adapters = jax.jit(lora.init(transformer, rules, key=KEY))(p, tokens[:, 1:])
    assert set(adapters) == {"head", *(f"blocks/{name}" for name in ("qkv", "out", "up", "down"))}
    optimizer = optax.adam(1e-2)

    def loss(adapters, p, key):
        logits = lora.adapted(transformer, rules)(adapters, p, tokens[:, :-1], dropout_key=key)
        return jnp.mean(optax.losses.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(adapters, state, p, key):
        value, grads = jax.value_and_grad(loss)(adapters, p, key)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(adapters, updates), state, value

    state, values = optimizer.init(adapters), []
    for i in range(60):
        adapters, state, value = step(adapters, state, p, jnp.array([0, i], jnp.uint32))
        values.append(float(value))
    assert 0.5 * math.log(VOCABULARY) < values[0] < 2 * math.log(VOCABULARY)
    assert values[-1] < 0.5 * values[0], values


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.MultiHeadDotProductAttention(4, name="attention")(x)
        return nn.Dense(WIDTH, name="down")(nn.relu(nn.Dense(64, name="up")(x)))


ATTENTION = [f"attention/{name}/kernel" for name in ("query", "key", "value", "out")]


@pytest.mark.jax_versions
def test_a_linen_model_is_adapted_through_its_apply():
    model, x = Linen(), normal(3, 2, ROWS, WIDTH)
    variables = jax.jit(model.init)(KEY, x)
    variables = {"params": sd.linen.quantize_params(model, variables["params"], "int8", x)}
    assert isinstance(variables["params"]["attention"]["out"]["kernel"], sd.ScaledArray)
    adapters = lora.init(model.apply, CONFIG, key=KEY)(variables, x)
    assert sorted(adapters) == sorted([*ATTENTION, "up/kernel", "down/kernel"])
    adapted = jax.jit(lora.adapted(model.apply, CONFIG))
    assert_same(adapted(adapters, variables, x), jax.jit(sd.linen.with_quantized_params(model).apply)(variables, x))
    adapters = randomised(adapters)
    merged = lora.merge(model.apply, CONFIG)(adapters, variables, x)
    assert_same(adapted(adapters, variables, x), jax.jit(model.apply)(merged, x))


class Nnx(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 64, rngs=rngs), nnx.Linear(64, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(self.attention(x))))


@pytest.mark.jax_versions
@pytest.mark.parametrize("name", [None, "int8"])
@pytest.mark.parametrize("is_split", [False, True])
def test_an_nnx_model_is_adapted_as_an_argument_or_by_its_state(name, is_split):
    model, x = Nnx(), normal(3, 2, ROWS, WIDTH)
    model = model if name is None else sd.nnx.quantize_params(model, name)
    graph, state = nnx.split(model)
    f = (lambda state, x: nnx.merge(graph, state)(x)) if is_split else (lambda model, x: model(x))
    p = state if is_split else model
    adapters = lora.init(f, CONFIG, key=KEY)(p, x)
    assert sorted(adapters) == sorted([*ATTENTION, "up/kernel", "down/kernel"])
    adapted = jax.jit(lora.adapted(f, CONFIG))
    assert_same(adapted(adapters, p, x), jax.jit(f)(p, x))
    adapters = randomised(adapters)
    assert_same(adapted(adapters, p, x), jax.jit(f)(lora.merge(f, CONFIG)(adapters, p, x), x))
