"""Trains a small GPT in six precisions, side by side: two to three minutes on two CPU cores.

    python -m examples.demo

The model is that of `gpt_linen`, trained on sequences of known entropy in float32, in bfloat16 and under four recipes,
from the same parameters and on the same batches. Prints what each loses and saves, and writes demo.html: loss curves,
the signal-to-noise ratio of every matmul of every linear layer, and, on a machine with a GPU, times of a large layer.
"""

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

import scaledot as sd
from examples import demo_page
from examples.demo_layers import Linear, kept_bytes, linear_layers, snr
from examples.demo_times import Timed, times
from examples.gpt_linen import Gpt, fit, initial
from examples.gpt_training import SOURCE

PLAIN = ("float32", "bfloat16")
RECIPES = ("fp8_current", "fp8_delayed", "mxfp8", "nvfp4")
STEPS = 400
PAGE = Path("demo.html")

# What the progress bar counts, in training steps that take about as long on two cores.
COMPILING, LAYER, TIMING = 300, 40, 100
LAYERS = 8  # linear layers of the model
BAR = "{percentage:3.0f}% |{bar:30}| {elapsed}, about {remaining} to go: {desc}"


@dataclasses.dataclass(frozen=True)
class Run:
    """One precision: the loss above the entropy at the end and along the way, bytes saved for backward, time."""

    name: str
    excess: float
    curve: list[float]
    kept: int
    seconds: float


def model_for(precision: str) -> Any:
    if precision in RECIPES:
        return sd.linen.with_recipe(Gpt(), {"block_*": precision})
    return Gpt(dtype=jnp.dtype(precision))


def variables_for(model: Any, precision: str, plain: Any) -> Any:
    """The same parameters for every precision; a recipe that keeps state has it beside them."""
    if precision not in RECIPES or not sd.init_state(precision):
        return plain
    return {**initial(model, jax.random.key(0)), **plain}


def train_all(steps: int, bar: tqdm) -> tuple[list[Run], dict[str, Linear]]:
    """A run for each precision, and the layers of the one in float32 after training."""
    bar.set_description_str("initialising")
    plain, layers, runs = initial(Gpt(), jax.random.key(0)), {}, []
    for name in (*PLAIN, *RECIPES):
        begun, model = time.perf_counter(), model_for(name)
        bar.set_description_str(f"compiling {name}")
        variables = variables_for(model, name, plain)
        state, excess, curve = fit(model, steps, variables=variables, report=lambda e, name=name: _step(bar, name, e))
        seconds = time.perf_counter() - begun
        layers = layers or linear_layers(state)
        runs.append(Run(name, excess, curve, sum(kept_bytes(name, layer) for layer in layers.values()), seconds))
        bar.update(COMPILING)
        tqdm.write(line(runs[-1], runs[0]))
    return runs, layers


def _step(bar: tqdm, name: str, excess: float) -> None:
    bar.set_description_str(f"training {name}, {excess:.3f} nats above the entropy", refresh=False)
    bar.update()


def accuracy(layers: dict[str, Linear], bar: tqdm) -> demo_page.Ratios:
    """Signal-to-noise ratios by recipe, layer and matmul."""
    ratios: demo_page.Ratios = {}
    for recipe in RECIPES:
        bar.set_description_str(f"accuracy of {recipe}")
        ratios[recipe] = {}
        for name, layer in layers.items():
            ratios[recipe][name] = snr(recipe, layer)
            bar.update(LAYER)
    return ratios


def times_here(bar: tqdm) -> list[Timed]:
    """Times of a large layer where there is a GPU; on a CPU they would say nothing and take minutes."""
    if not on_gpu():
        return []
    found = []
    bar.set_description_str("timing a large layer")
    for timed in times(RECIPES):
        found.append(timed)
        bar.update(TIMING)
    return found


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


HEAD = f"{'':<13}{'excess':>9}{'gap to float32':>16}{'saved for backward':>20}{'seconds':>10}"


def line(run: Run, float32: Run) -> str:
    gap = "" if run is float32 else f"{run.excess - float32.excess:+.4f}"
    kept = f"{run.kept / 1024:,.0f} KiB {run.kept / float32.kept:4.0%}"
    return f"{run.name:<13}{run.excess:>9.4f}{gap:>16}{kept:>20}{run.seconds:>10.1f}"


def work(steps: int) -> int:
    """What the whole takes, in training steps."""
    runs = (len(PLAIN) + len(RECIPES)) * (COMPILING + steps)
    return runs + len(RECIPES) * LAYERS * LAYER + on_gpu() * (1 + len(RECIPES)) * TIMING


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help="of each run")
    args = parser.parse_args()
    print(
        f"A GPT of two blocks, {args.steps} steps each, on a source of {SOURCE.entropy:.4f} nats per symbol.\n"
        f"{STEPS} steps take two to three minutes on two idle cores, half of it compiling.\n\n{HEAD}"
    )
    with tqdm(total=work(args.steps), bar_format=BAR, smoothing=0, leave=False) as bar:
        runs, layers = train_all(args.steps, bar)
        ratios = accuracy(layers, bar)
        timed = times_here(bar)
    PAGE.write_text(demo_page.page(runs, ratios, timed, args.steps))
    print(
        "\nexcess: nats per symbol above the entropy of the source, on sequences that were not trained on.\n"
        "saved for backward: residuals of the eight linear layers, activations or codes.\n"
        f"Loss curves, the accuracy of every matmul, and what to do next: {PAGE.resolve()}"
    )


if __name__ == "__main__":
    main()
