"""The tiny GPT of gpt_linen.py in Flax NNX: `python -m examples.gpt_nnx --recipe mxfp8`.

The model does not depend on scaledot; `sd.nnx.with_recipe` quantises the four linear layers of each block.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from tqdm import tqdm

import scaledot as sd
from examples.gpt_training import SOURCE, batches, loss_and_excess, main, make_optimizer, rotary


class Block(nnx.Module):
    def __init__(self, width: int, heads: int = 4, hidden: int = 128, *, rngs: nnx.Rngs):
        self.heads = heads
        self.attention_norm, self.mlp_norm = nnx.RMSNorm(width, rngs=rngs), nnx.RMSNorm(width, rngs=rngs)
        self.qkv = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(width, 2 * hidden, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(hidden, width, use_bias=False, rngs=rngs)

    def __call__(self, x):
        batch, length, _ = x.shape
        qkv = self.qkv(self.attention_norm(x))
        q, k, v = jnp.split(qkv.reshape(batch, length, 3 * self.heads, -1), 3, axis=2)
        attended = jax.nn.dot_product_attention(rotary(q), rotary(k), v, is_causal=True)
        x = x + self.out(attended.reshape(x.shape))
        gate, up = jnp.split(self.up(self.mlp_norm(x)), 2, axis=-1)
        return x + self.down(nnx.silu(gate) * up)


class Gpt(nnx.Module):
    def __init__(self, vocab: int = SOURCE.vocab, width: int = 64, blocks: int = 2, *, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(vocab, width, embedding_init=nnx.initializers.normal(0.5), rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs=rngs) for _ in range(blocks)])
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, vocab, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@nnx.jit
def train_step(model: Gpt, optimizer: nnx.Optimizer, tokens):
    def loss(model):
        return loss_and_excess(model(tokens[:, :-1]), tokens)

    (_, excess), grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, sd.nnx.TRAINED), has_aux=True)(model)
    sd.nnx.apply_gradients(model, optimizer, grads)
    return excess


@nnx.jit
def evaluate(model: Gpt, tokens):
    return loss_and_excess(model(tokens[:, :-1]), tokens)[1]


def train(recipe: str | None, steps: int, seed: int = 0) -> tuple[float, list[float]]:
    """Trains; returns the excess loss on held-out sequences, and that of every step."""
    model, curve = Gpt(rngs=nnx.Rngs(seed)), []
    if recipe is not None:
        sd.nnx.with_recipe(model, {"blocks/*": recipe}, rngs=nnx.Rngs(sr_rng=seed))
    optimizer = nnx.Optimizer(model, make_optimizer(steps), wrt=nnx.Param)
    data_key, held_out_key = jax.random.split(jax.random.key(seed))
    for tokens in (progress := tqdm(batches(data_key, steps), desc=recipe or "float32", unit="step", leave=False)):
        curve.append(float(train_step(model, optimizer, tokens)))
        progress.set_postfix(excess=f"{curve[-1]:.3f}", refresh=False)
    return float(evaluate(model, jnp.concatenate(batches(held_out_key, 200)))), curve


if __name__ == "__main__":
    main(train, __doc__)
