"""The model of `benchmarks.gpu.llama` in Flax NNX, quantised by `sd.nnx.with_recipe`, and its training step.

Parameters are initialised by the linen model and copied, so that the first losses of both differ by bfloat16 rounding
only.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import scaledot as sd
from benchmarks.attention import attention
from benchmarks.gpu import llama
from benchmarks.gpu.sizes import BATCH, TOKENS, Shape

# The automatic names that linen gives to modules that are named here.
LINEN_NAMES = {"attention_norm": "RMSNorm_0", "mlp_norm": "RMSNorm_1", "norm": "RMSNorm_0", "embed": "Embed_0"}


class Block(nnx.Module):
    def __init__(self, shape: Shape, *, rngs: nnx.Rngs):
        width, size = shape.width, shape.width // shape.heads
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=jnp.bfloat16, param_dtype=jnp.float32, rngs=rngs)
        norm = functools.partial(nnx.RMSNorm, dtype=jnp.bfloat16, rngs=rngs)
        self.size = size
        self.attention_norm, self.mlp_norm = norm(width), norm(width)
        self.q, self.o = linear(width, width), linear(width, width)
        self.k, self.v = linear(width, shape.kv_heads * size), linear(width, shape.kv_heads * size)
        self.gate, self.up = linear(width, shape.hidden), linear(width, shape.hidden)
        self.down = linear(shape.hidden, width)

    def __call__(self, x):
        y = self.attention_norm(x)
        q, k, v = (layer(y).reshape(*x.shape[:-1], -1, self.size) for layer in (self.q, self.k, self.v))
        x = x + self.o(attention(q, k, v).reshape(x.shape))
        y = self.mlp_norm(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class Stack(nnx.Module):
    def __init__(self, shape: Shape, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(shape.vocabulary, shape.width, dtype=jnp.bfloat16, rngs=rngs)
        self.blocks = nnx.List([Block(shape, rngs=rngs) for _ in range(shape.blocks)])
        self.norm = nnx.RMSNorm(shape.width, dtype=jnp.bfloat16, rngs=rngs)
        self.head = nnx.Linear(shape.width, shape.vocabulary, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def training(
    shape: Shape, recipe: str | None, batch: int = BATCH, tokens: int = TOKENS
) -> tuple[Any, Callable[..., Any], jax.Array]:
    """Returns init, step and tokens as `llama.training` does; recipe: for the Linear of decoder blocks, or None."""
    data = jax.random.randint(jax.random.key(1), (batch, tokens + 1), 0, shape.vocabulary)

    def make() -> tuple[Stack, nnx.Optimizer]:
        model = Stack(shape, rngs=nnx.Rngs(0))
        if recipe is not None:
            sd.nnx.with_recipe(model, {"blocks/*": recipe}, rngs=nnx.Rngs(sr_rng=0))
        return model, nnx.Optimizer(model, optax.adamw(1e-4), wrt=nnx.Param)

    graph = nnx.graphdef(nnx.eval_shape(make))

    @jax.jit
    def init(key):
        variables: Any = llama.Stack(shape).init({"params": key}, data[:, :-1])
        model, optimizer = make()
        flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
        copied = [(path, leaf.replace(linen_value(variables["params"], path))) for path, leaf in flat]
        nnx.update(model, nnx.from_flat_state(copied))
        return nnx.state((model, optimizer))

    def step(state: Any, data: jax.Array, key: jax.Array):
        model, optimizer = nnx.merge(graph, state)

        def loss(model):
            logits = model(data[:, :-1]).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, data[:, 1:]).mean()

        value, gradients = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, sd.nnx.TRAINED))(model)
        sd.nnx.apply_gradients(model, optimizer, gradients)
        return nnx.state((model, optimizer)), value

    return init, step, data


def linen_value(parameters: dict[str, Any], path: tuple[Any, ...]) -> jax.Array:
    """Returns the linen model's parameter for an NNX path such as ("blocks", 0, "q", "kernel")."""
    if path[0] == "blocks":
        parameters, path = parameters[f"block_{path[1]}"], path[2:]
    layer, name = path
    if layer in ("q", "k", "v", "o"):
        parameters = parameters["Attention_0"]
    return parameters[LINEN_NAMES.get(layer, layer)][name]
