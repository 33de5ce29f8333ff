"""A tiny GPT in Flax linen, trained in low precision: `python examples/gpt_linen.py --recipe fp8_delayed`.

The model knows nothing of recipes; one line gives one to the four linear layers of each block.
"""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from gpt_training import main, optimizer
from source import Source
from tqdm import trange

import scaledot as sd


class Block(nn.Module):
    heads: int = 4
    hidden: int = 128

    @nn.compact
    def __call__(self, x):
        batch, length, width = x.shape
        qkv = nn.Dense(3 * width, use_bias=False, name="qkv")(nn.RMSNorm()(x))
        q, k, v = jnp.split(qkv.reshape(batch, length, 3 * self.heads, -1), 3, axis=2)
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x = x + nn.Dense(width, use_bias=False, name="out")(attended)
        gate, up = jnp.split(nn.Dense(2 * self.hidden, use_bias=False, name="up")(nn.RMSNorm()(x)), 2, axis=-1)
        return x + nn.Dense(width, use_bias=False, name="down")(nn.silu(gate) * up)


class Gpt(nn.Module):
    symbols: int = 16
    width: int = 64
    blocks: int = 2
    length: int = 32

    @nn.compact
    def __call__(self, tokens):
        normal = nn.initializers.normal(0.5)
        x = nn.Embed(self.symbols, self.width, embedding_init=normal, name="tokens")(tokens)
        x = x + nn.Embed(self.length, self.width, embedding_init=normal, name="positions")(jnp.arange(tokens.shape[1]))
        for i in range(self.blocks):
            x = Block(name=f"block_{i}")(x)
        return nn.Dense(self.symbols, use_bias=False, name="head")(nn.RMSNorm()(x))


@jax.jit
def train_step(state: TrainState, tokens, key):
    def loss(variables):
        logits = state.apply_fn(variables, tokens[:, :-1], rngs={"sr_rng": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, 1:], tokens[:, 2:]).mean()

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


def train(recipe: str | None, steps: int, seed: int = 0, quiet: bool = False) -> list[float]:
    """The loss of every step, less the entropy of the source, once two symbols are known."""
    source, key = Source(), jax.random.key(seed)
    model = Gpt(source.symbols) if recipe is None else sd.linen.with_recipe(Gpt(source.symbols), {"block_*": recipe})
    variables = jax.jit(model.init)(key, jnp.zeros((1, 32), int))
    state = TrainState.create(apply_fn=model.apply, params=variables, tx=optimizer(steps))
    draw = jax.jit(lambda key: source.batch(key, 16, 33))
    excess = []
    for step in (progress := trange(steps, desc=recipe or "float32", disable=quiet)):
        batch_key, rounding_key = jax.random.split(jax.random.fold_in(key, step))
        state, value = train_step(state, draw(batch_key), rounding_key)
        excess.append(float(value) - source.entropy)
        progress.set_postfix(excess=f"{excess[-1]:.3f}")
    return excess


if __name__ == "__main__":
    main(train, __doc__)
