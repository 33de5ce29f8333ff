"""A byte-level decoder in plain JAX: pre-norm blocks with four linear layers each (qkv, out, gate_up, down).

Parameters are a dict of float32 arrays, those of blocks stacked, activations are bfloat16. The linear layers of a block
multiply under the block's recipe, which quantises float32 weights, or in bfloat16. Embedding and head are always
bfloat16.
"""

import functools
import itertools
import operator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.attention import attention
from benchmarks.convergence.code_gpt.config import VOCABULARY, Config
from benchmarks.convergence.code_gpt.rows import Recipes
from scaledot.recipes import Recipe
from scaledot.train import dense

Params = dict[str, Any]
LINEARS = ("qkv", "out", "gate_up", "down")


def shapes(config: Config) -> dict[str, tuple[int, int]]:
    """Returns (inputs, outputs) of each linear layer of a block."""
    width, hidden = config.width, config.hidden
    return {"qkv": (width, 3 * width), "out": (width, width), "gate_up": (width, 2 * hidden), "down": (hidden, width)}


def init(key: jax.Array, config: Config) -> Params:
    """Returns normal weights of variance 1 / inputs, smaller where a layer writes to the residual stream."""
    key, embedding, head = jax.random.split(key, 3)
    blocks = jax.vmap(functools.partial(_init_block, config=config))(jax.random.split(key, config.blocks))
    return {
        "embedding": jax.random.normal(embedding, (VOCABULARY, config.width)),
        "blocks": blocks,
        "norm": jnp.ones(config.width),
        "head": jax.random.normal(head, (config.width, VOCABULARY)) * config.width**-0.5,
    }


def _init_block(key: jax.Array, config: Config) -> Params:
    weights = {}
    for (name, shape), k in zip(shapes(config).items(), jax.random.split(key, len(LINEARS)), strict=True):
        writes_residual = name in ("out", "down")
        variance = 1 / shape[0] / (2 * config.blocks if writes_residual else 1)
        weights[name] = jax.random.normal(k, shape) * variance**0.5
    return {**weights, "attention_norm": jnp.ones(config.width), "mlp_norm": jnp.ones(config.width)}


def logits(params: Params, tokens: jax.Array, key: jax.Array, recipes: Recipes, config: Config) -> jax.Array:
    """Returns float32 logits (batch, length, 256) of tokens (batch, length); key: of stochastic casts in this step."""
    # A matmul with one-hot rows, because the gradient of a lookup is a scatter-add, whose order varies on a GPU.
    one_hot = jax.nn.one_hot(tokens, VOCABULARY, dtype=jnp.bfloat16)
    x = one_hot @ params["embedding"].astype(jnp.bfloat16)
    keys, first = jax.random.split(key, config.blocks), 0
    for recipe, same in itertools.groupby(recipes):  # a scan compiles equal blocks once
        part = slice(first, first + len(list(same)))
        apply = functools.partial(block, recipe=recipe, heads=config.heads)
        inputs = jax.tree.map(operator.itemgetter(part), (params["blocks"], keys))
        x, _ = jax.lax.scan(lambda x, inputs, apply=apply: (apply(inputs[0], x, inputs[1]), None), x, inputs)
        first = part.stop
    head = params["head"].astype(jnp.bfloat16)
    return jnp.matmul(normalised(x, params["norm"]), head, preferred_element_type=jnp.float32)


def block(weights: Params, x: jax.Array, key: jax.Array, *, recipe: Recipe | None, heads: int) -> jax.Array:
    """Returns x (batch, tokens, width) after attention and SwiGLU."""

    def linear(name: str, x: jax.Array) -> Any:
        if recipe is None:
            return x @ weights[name].astype(x.dtype)
        return dense(x, weights[name], recipe=recipe, key=jax.random.fold_in(key, LINEARS.index(name)))

    qkv = linear("qkv", normalised(x, weights["attention_norm"]))
    q, k, v = (a.reshape(*x.shape[:-1], heads, -1) for a in jnp.split(qkv, 3, axis=-1))
    x = x + linear("out", attention(q, k, v).reshape(x.shape))
    gate, up = jnp.split(linear("gate_up", normalised(x, weights["mlp_norm"])), 2, axis=-1)
    return x + linear("down", jax.nn.silu(gate) * up)


def normalised(x: jax.Array, gain: jax.Array) -> jax.Array:
    """RMSNorm over the last axis, computed in float32."""
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return (wide * inverse * gain).astype(x.dtype)


def loss(params: Params, windows: jax.Array, key: jax.Array, recipes: Recipes, config: Config) -> jax.Array:
    """Returns the mean cross entropy, in nats, of each next byte of windows (batch, tokens + 1)."""
    predicted = logits(params, windows[:, :-1], key, recipes, config)
    target = jax.nn.one_hot(windows[:, 1:], VOCABULARY, dtype=jnp.float32)
    return jnp.mean(jax.nn.logsumexp(predicted, axis=-1) - jnp.sum(predicted * target, axis=-1))
