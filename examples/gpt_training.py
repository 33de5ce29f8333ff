"""What both versions of the tiny GPT share: positions, batches, loss, optimizer, and the command line."""

import argparse
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

import scaledot as sd
from examples.source import Source

SOURCE = Source()
BATCH, LENGTH = 16, 32
HELD_OUT = 64  # batches, of about 31 thousand symbols


def rotary(x: jax.Array) -> jax.Array:
    """(batch, length, heads, width) turned by angles that grow with the position, so that attention sees distances."""
    length, width = x.shape[1], x.shape[-1]
    angles = jnp.arange(length)[:, None] * 10_000.0 ** (-jnp.arange(width // 2) / (width // 2))
    cos, sin = jnp.cos(angles)[:, None, :].astype(x.dtype), jnp.sin(angles)[:, None, :].astype(x.dtype)
    left, right = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, left * sin + right * cos], axis=-1)


def batches(key: jax.Array, count: int) -> jax.Array:
    """(count, BATCH, LENGTH + 1) symbols: inputs, and the one that follows each."""
    return SOURCE.draw(key, (count, BATCH, LENGTH + 1))


def loss_and_excess(logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The mean loss where two symbols are known, and how far it is above that of a model that knows the source."""
    loss = optax.softmax_cross_entropy_with_integer_labels(logits[:, 1:], tokens[:, 2:]).mean()
    return loss, loss - SOURCE.surprise(tokens).mean()


def optimizer(steps: int) -> optax.GradientTransformation:
    return optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 5e-3, min(20, steps // 2), steps, 5e-4))


def main(train: Callable[[str | None, int], tuple[float, list[float]]], description: str | None) -> None:
    """Train as the command line says and print where the loss ends."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="fp8_current", help=f"one of {', '.join(sd.RECIPES)}, or float32")
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args()
    excess, _ = train(None if args.recipe == "float32" else args.recipe, args.steps)
    print(f"{args.recipe}: {excess:.4f} nats above the entropy of the source, on sequences that it was not trained on")
