"""The tiny GPT of gpt_linen.py in Flax NNX: `python examples/gpt_nnx.py --recipe mxfp8`.

The model knows nothing of recipes; one line gives one to the four linear layers of each block.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from gpt_training import main, optimizer
from source import Source
from tqdm import trange

import scaledot as sd


class Block(nnx.Module):
    def __init__(self, width: int, heads: int = 4, hidden: int = 128, *, rngs: nnx.Rngs):
        self.heads = heads
        self.before_attention, self.before_mlp = nnx.RMSNorm(width, rngs=rngs), nnx.RMSNorm(width, rngs=rngs)
        self.qkv = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(width, 2 * hidden, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(hidden, width, use_bias=False, rngs=rngs)

    def __call__(self, x):
        batch, length, _ = x.shape
        qkv = self.qkv(self.before_attention(x))
        q, k, v = jnp.split(qkv.reshape(batch, length, 3 * self.heads, -1), 3, axis=2)
        x = x + self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))
        gate, up = jnp.split(self.up(self.before_mlp(x)), 2, axis=-1)
        return x + self.down(nnx.silu(gate) * up)


class Gpt(nnx.Module):
    def __init__(self, symbols: int = 16, width: int = 64, blocks: int = 2, length: int = 32, *, rngs: nnx.Rngs):
        normal = nnx.initializers.normal(0.5)
        self.tokens = nnx.Embed(symbols, width, embedding_init=normal, rngs=rngs)
        self.positions = nnx.Embed(length, width, embedding_init=normal, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs=rngs) for _ in range(blocks)])
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, symbols, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@nnx.jit
def train_step(model: Gpt, optimizer: nnx.Optimizer, tokens):
    def loss(model):
        logits = model(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, 1:], tokens[:, 2:]).mean()

    value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, sd.nnx.TRAINED))(model)
    sd.nnx.apply_gradients(model, optimizer, grads)
    return value


def train(recipe: str | None, steps: int, seed: int = 0, quiet: bool = False) -> list[float]:
    """The loss of every step, less the entropy of the source, once two symbols are known."""
    source, key = Source(), jax.random.key(seed)
    model = Gpt(source.symbols, rngs=nnx.Rngs(seed))
    if recipe is not None:
        sd.nnx.with_recipe(model, {"blocks/*": recipe}, rngs=nnx.Rngs(sr_rng=seed))
    updates = nnx.Optimizer(model, optimizer(steps), wrt=nnx.Param)
    draw = jax.jit(lambda key: source.batch(key, 16, 33))
    excess = []
    for step in (progress := trange(steps, desc=recipe or "float32", disable=quiet)):
        batch_key, _ = jax.random.split(jax.random.fold_in(key, step))
        excess.append(float(train_step(model, updates, draw(batch_key))) - source.entropy)
        progress.set_postfix(excess=f"{excess[-1]:.3f}")
    return excess


if __name__ == "__main__":
    main(train, __doc__)
