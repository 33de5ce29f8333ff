"""A tiny GPT in Flax linen, trained in low precision: `python -m examples.gpt_linen --recipe fp8_delayed`.

The model does not depend on scaledot; `sd.linen.with_recipe` quantises the four linear layers of each block.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.training.train_state import TrainState
from tqdm import tqdm

import scaledot as sd
from examples.gpt_training import HELD_OUT, LENGTH, SOURCE, batches, loss_and_excess, main, make_optimizer, rotary


class Block(nn.Module):
    heads: int = 4
    hidden: int = 128
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        batch, length, width = x.shape
        qkv = self.linear(3 * width, "qkv")(nn.RMSNorm()(x))
        q, k, v = jnp.split(qkv.reshape(batch, length, 3 * self.heads, -1), 3, axis=2)
        attended = jax.nn.dot_product_attention(rotary(q), rotary(k), v, is_causal=True)
        x = x + self.linear(width, "out")(attended.reshape(x.shape))
        gate, up = jnp.split(self.linear(2 * self.hidden, "up")(nn.RMSNorm()(x)), 2, axis=-1)
        return x + self.linear(width, "down")(nn.silu(gate) * up)

    def linear(self, features: int, name: str) -> nn.Dense:
        return nn.Dense(features, use_bias=False, dtype=self.dtype, name=name)


class Gpt(nn.Module):
    """dtype: of the linear layers of blocks; everything else is float32."""

    vocab: int = SOURCE.vocab
    width: int = 64
    blocks: int = 2
    dtype: Any = None

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(self.vocab, self.width, embedding_init=nn.initializers.normal(0.5), name="tokens")(tokens)
        for i in range(self.blocks):
            x = Block(dtype=self.dtype, name=f"block_{i}")(x)
        return nn.Dense(self.vocab, use_bias=False, name="head")(nn.RMSNorm()(x))


def init_variables(model, key: jax.Array) -> Any:
    """Initialises the variables: parameters, and the states of recipes with delayed scaling."""
    return jax.jit(model.init)(key, jnp.zeros((1, LENGTH), int))


def init_train_state(model, key: jax.Array, steps: int, variables: Any = None) -> TrainState:
    """Returns the initial train state, with `variables` or newly initialised ones."""
    variables = init_variables(model, key) if variables is None else variables
    return TrainState.create(apply_fn=model.apply, params=variables, tx=make_optimizer(steps))


@jax.jit
def train_step(state: TrainState, tokens, key):
    def loss(variables):
        return loss_and_excess(state.apply_fn(variables, tokens[:, :-1], rngs={"sr_rng": key}), tokens)

    (_, excess), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads), excess


def evaluate(state: TrainState, held_out, key) -> float:
    """Returns the mean held-out loss above the entropy of the source.

    Runs `train_step` and discards the updated state, which avoids compiling a separate evaluation function.
    """
    return float(np.mean([train_step(state, tokens, key)[1] for tokens in held_out]))


def fit(
    model,
    steps: int,
    seed: int = 0,
    *,
    variables: Any = None,
    report: Callable[[float], object] = lambda excess: None,
) -> tuple[TrainState, float, list[float]]:
    """Trains; returns the final state, its excess loss on held-out sequences, and the excess loss of every step.

    Training starts from `variables`, or from newly initialised ones. `report` is called with each step's excess loss.
    """
    init_key, data_key, rounding_key = jax.random.split(jax.random.key(seed), 3)
    data, curve = batches(data_key, steps + HELD_OUT), []
    state = init_train_state(model, init_key, steps, variables)
    for step, tokens in enumerate(data[:steps]):
        state, excess = train_step(state, tokens, jax.random.fold_in(rounding_key, step))
        curve.append(float(excess))
        report(curve[-1])
    return state, evaluate(state, data[steps:], rounding_key), curve


def train(recipe: str | None, steps: int, seed: int = 0) -> tuple[float, list[float]]:
    """Trains; returns the excess loss on held-out sequences, and that of every step."""
    model = Gpt() if recipe is None else sd.linen.with_recipe(Gpt(), {"block_*": recipe})
    with tqdm(total=steps, desc=recipe or "float32", unit="step", leave=False) as progress:

        def report(excess: float) -> None:
            progress.set_postfix(excess=f"{excess:.3f}", refresh=False)
            progress.update()

        _, excess, curve = fit(model, steps, seed, report=report)
    return excess, curve


if __name__ == "__main__":
    main(train, __doc__)
