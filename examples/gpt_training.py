"""Shared parts of the tiny GPT's linen and NNX versions: rotary embeddings, batches, loss, optimiser, command line."""

import argparse
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

import scaledot as sd
from examples.source import Source

SOURCE = Source()
BATCH, LENGTH = 16, 32
HELD_OUT = 64  # batches, about 31 thousand tokens


def rotary(x: jax.Array) -> jax.Array:
    """Applies rotary position embeddings to x (batch, length, heads, width)."""
    length, width = x.shape[1], x.shape[-1]
    angles = jnp.arange(length)[:, None] * 10_000.0 ** (-jnp.arange(width // 2) / (width // 2))
    cos, sin = jnp.cos(angles)[:, None, :].astype(x.dtype), jnp.sin(angles)[:, None, :].astype(x.dtype)
    left, right = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, left * sin + right * cos], axis=-1)


def batches(key: jax.Array, count: int) -> jax.Array:
    """Draws (count, BATCH, LENGTH + 1) tokens: inputs and, shifted by one, targets."""
    return SOURCE.draw(key, (count, BATCH, LENGTH + 1))


def loss_and_excess(logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the mean loss of tokens after the first two, and its excess over that of a perfect model."""
    loss = optax.softmax_cross_entropy_with_integer_labels(logits[:, 1:], tokens[:, 2:]).mean()
    return loss, loss - SOURCE.surprise(tokens).mean()


def make_optimizer(steps: int) -> optax.GradientTransformation:
    return optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 5e-3, min(20, steps // 2), steps, 5e-4))


def main(train: Callable[[str | None, int], tuple[float, list[float]]], description: str | None) -> None:
    """Parses the command line, trains, and prints the final excess loss."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="fp8_current", help=f"one of {', '.join(sd.RECIPES)}, or float32")
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args()
    excess, _ = train(None if args.recipe == "float32" else args.recipe, args.steps)
    print(f"{args.recipe}: {excess:.4f} nats above the entropy of the source, on held-out sequences")
