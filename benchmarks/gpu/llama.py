"""A Llama-like decoder in linen and its training step.

Decoder blocks have width 4096, 14336 hidden features (SwiGLU), seven Dense without bias (q, k, v, o, gate, up, down),
32 query heads with 8 key-value heads, rotary position embeddings and cuDNN attention; the vocabulary has 32000 entries.
Parameters are float32, computation is bfloat16, the optimiser is AdamW.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from benchmarks.attention import attention
from benchmarks.gpu.sizes import BATCH, TOKENS, Shape

KEY_STREAM = "sr_rng"


class Attention(nn.Module):
    shape: Shape
    dense: Callable[..., nn.Module]

    @nn.compact
    def __call__(self, x):
        shape, size = self.shape, self.shape.width // self.shape.heads
        heads = {"q": shape.heads, "k": shape.kv_heads, "v": shape.kv_heads}
        q, k, v = (
            self.dense(count * size, name=name)(x).reshape(*x.shape[:-1], count, size) for name, count in heads.items()
        )
        return self.dense(shape.width, name="o")(attention(q, k, v).reshape(x.shape))


class Block(nn.Module):
    shape: Shape
    dense: Callable[..., nn.Module]

    @nn.compact
    def __call__(self, x, _=None):
        norm = functools.partial(nn.RMSNorm, dtype=jnp.bfloat16)
        x = x + Attention(self.shape, self.dense)(norm()(x))
        y = norm()(x)
        gate, up = (self.dense(self.shape.hidden, name=name)(y) for name in ("gate", "up"))
        return x + self.dense(self.shape.width, name="down")(nn.silu(gate) * up), None


class Stack(nn.Module):
    """dot_general_cls: for the Dense of decoder blocks; head_cls: for the output head. None computes in bfloat16."""

    shape: Shape
    dot_general_cls: Any = None
    head_cls: Any = None

    @nn.compact
    def __call__(self, tokens):
        shape = self.shape
        dense = functools.partial(
            nn.Dense, use_bias=False, dtype=jnp.bfloat16, param_dtype=jnp.float32, dot_general_cls=self.dot_general_cls
        )
        x = nn.Embed(shape.vocabulary, shape.width, dtype=jnp.bfloat16)(tokens)
        block = Block
        if shape.policy is not None:
            block = nn.remat(Block, policy=shape.policy, prevent_cse=not shape.scanned)
        if shape.scanned:
            stacked: dict[Any, Any] = {"params": 0, "_overwrite_with_gradient": 0}
            rngs: dict[Any, bool] = {"params": True, KEY_STREAM: True}
            scan = nn.scan(block, variable_axes=stacked, split_rngs=rngs, length=shape.blocks)
            x, _ = scan(shape, dense)(x, None)
        else:
            for index in range(shape.blocks):
                x, _ = block(shape, dense, name=f"block_{index}")(x)
        x = nn.RMSNorm(dtype=jnp.bfloat16)(x)
        return dense(shape.vocabulary, name="head", dot_general_cls=self.head_cls)(x)


def training(
    model: Stack, batch: int = BATCH, tokens: int = TOKENS, transform: Callable[..., Any] = lambda f: f
) -> tuple[Any, Callable[..., Any], jax.Array]:
    """Returns init(key) -> state (jitted), step(state, tokens, key) -> (state, loss), and random tokens.

    transform: of the function (variables, tokens, key) -> logits.
    """
    data = jax.random.randint(jax.random.key(1), (batch, tokens + 1), 0, model.shape.vocabulary)

    @jax.jit
    def init(key):
        variables = model.init({"params": key, KEY_STREAM: key}, data[:, :-1])
        return TrainState.create(apply_fn=model.apply, params=variables, tx=optax.adamw(1e-4))

    @transform
    def logits_of(variables, tokens: jax.Array, key: jax.Array) -> Any:
        return model.apply(variables, tokens, rngs={KEY_STREAM: key})

    def step(state: TrainState, data: jax.Array, key: jax.Array):
        def loss(variables):
            logits = logits_of(variables, data[:, :-1], jax.random.fold_in(key, state.step))
            return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), data[:, 1:]).mean()

        value, gradients = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=gradients), value

    return init, step, data
