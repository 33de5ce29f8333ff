"""What both versions of the tiny GPT share: the optimizer and the command line."""

import argparse
from collections.abc import Callable

import optax

import scaledot as sd


def optimizer(steps: int) -> optax.GradientTransformation:
    return optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 5e-3, min(20, steps // 2), steps, 5e-4))


def main(train: Callable[[str | None, int], list[float]], description: str | None) -> None:
    """Train as the command line says and print where the loss ends."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--recipe", default="fp8_current", help=f"one of {', '.join(sd.RECIPES)}, or float32")
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args()
    last = train(None if args.recipe == "float32" else args.recipe, args.steps)[-50:]
    print(f"{args.recipe}: {sum(last) / len(last):.4f} nats above the source's entropy over the last {len(last)} steps")
