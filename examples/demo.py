"""Low precision trains: a small GPT in six precisions, side by side, in a few minutes on two cores.

    python -m examples.demo

Trains the model of `gpt_linen` on sequences of known entropy in float32, in bfloat16 and under four recipes, from the
same parameters and on the same batches; prints what each loses and keeps; and writes demo.html with the loss curves and
the signal-to-noise ratio of every product of every layer.
"""

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from tqdm import tqdm

import scaledot as sd
from examples import demo_page
from examples.demo_layers import Linear, kept_bytes, linear_layers, snr
from examples.gpt_linen import Gpt, fit
from examples.gpt_training import SOURCE

RECIPES = ("fp8_current", "fp8_delayed", "mxfp8", "nvfp4")
PAGE = Path("demo.html")


@dataclasses.dataclass(frozen=True)
class Run:
    """One precision: the loss above the entropy at the end and along the way, bytes that linear layers keep, time."""

    name: str
    excess: float
    curve: list[float]
    kept: int
    seconds: float


def model_for(precision: str) -> Any:
    if precision in RECIPES:
        return sd.linen.with_recipe(Gpt(), {"block_*": precision})
    return Gpt(dtype=jnp.dtype(precision))


def train_all(steps: int) -> tuple[list[Run], dict[str, Linear]]:
    """A run for each precision, and the layers of the one in float32 when it is trained."""
    layers: dict[str, Linear] = {}
    runs = []
    for name in ("float32", "bfloat16", *RECIPES):
        start = time.perf_counter()
        state, excess, curve = fit(model_for(name), steps, label=f"{name:<12}")
        seconds = time.perf_counter() - start
        layers = layers or linear_layers(state)
        runs.append(Run(name, excess, curve, sum(kept_bytes(name, layer) for layer in layers.values()), seconds))
        print(line(runs[-1], runs[0]))
    return runs, layers


HEAD = f"{'':<13}{'excess':>9}{'gap to float32':>16}{'kept for backward':>20}{'seconds':>10}"


def line(run: Run, float32: Run) -> str:
    gap = "" if run is float32 else f"{run.excess - float32.excess:+.4f}"
    kept = f"{run.kept / 1024:,.0f} KiB {run.kept / float32.kept:4.0%}"
    return f"{run.name:<13}{run.excess:>9.4f}{gap:>16}{kept:>20}{run.seconds:>10.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args()
    print(
        f"A GPT of two blocks on a source of {SOURCE.entropy:.4f} nats per symbol, {args.steps} steps each.\n\n{HEAD}"
    )
    runs, layers = train_all(args.steps)
    progress = tqdm(RECIPES, desc="products of each layer", unit="recipe", leave=False)
    ratios = {recipe: {name: snr(recipe, layer) for name, layer in layers.items()} for recipe in progress}
    PAGE.write_text(demo_page.page(runs, ratios, args.steps))
    print(
        "\nexcess: nats per symbol above the entropy of the source, on sequences that were not trained on.\n"
        "kept for backward: what the eight linear layers hold between the passes, activations or codes.\n"
        f"Loss curves, and how exact every product is: {PAGE.resolve()}"
    )


if __name__ == "__main__":
    main()
