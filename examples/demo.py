"""Trains a small GPT in seven precisions, in about five minutes on two CPU cores.

    python -m examples.demo

The model is that of `gpt_linen`, trained on sequences of known entropy in float32, in bfloat16 and under five recipes,
from the same parameters and on the same batches. Prints the final loss and the residual bytes of each, and writes
demo.html: loss curves, the signal-to-noise ratio of every matmul of every linear layer, and, on a GPU, times of a large
layer.
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
from examples.demo_layers import Linear, linear_layers, residual_bytes, snr
from examples.demo_times import Timed, times
from examples.gpt_linen import Gpt, fit, init_variables
from examples.gpt_training import SOURCE

PLAIN = ("float32", "bfloat16")
RECIPES = ("fp8_current", "fp8_delayed", "mxfp8", "nvfp4", "nvfp4_plus")
STEPS = 400
PAGE = Path("demo.html")

# Units of the progress bar: one training step, or work that takes as long on two cores.
COMPILING, LAYER, TIMING = 300, 40, 100
LAYERS = 8  # linear layers of the model
BAR = "{percentage:3.0f}% |{bar:30}| {elapsed}, about {remaining} to go: {desc}"


@dataclasses.dataclass(frozen=True)
class Run:
    """The result of one precision: final excess loss, its training curve, bytes saved as residuals, and time."""

    name: str
    excess: float
    curve: list[float]
    residual_bytes: int
    seconds: float


def model_for(precision: str) -> Any:
    if precision in RECIPES:
        return sd.linen.with_recipe(Gpt(), {"block_*": precision})
    return Gpt(dtype=jnp.dtype(precision))


def variables_for(model: Any, precision: str, params: Any) -> Any:
    """The same parameters for every precision, with the delayed-scaling state of a recipe that has one."""
    if precision not in RECIPES or not sd.init_state(precision):
        return params
    return {**init_variables(model, jax.random.key(0)), **params}


def train_all(steps: int, bar: tqdm) -> tuple[list[Run], dict[str, Linear]]:
    """Trains in each precision; returns the runs, and the linear layers of the model trained in float32."""
    bar.set_description_str("initialising")
    params, layers, runs = init_variables(Gpt(), jax.random.key(0)), {}, []
    for name in (*PLAIN, *RECIPES):
        started, model = time.perf_counter(), model_for(name)
        bar.set_description_str(f"compiling {name}")
        variables = variables_for(model, name, params)
        state, excess, curve = fit(model, steps, variables=variables, report=lambda e, name=name: _step(bar, name, e))
        seconds = time.perf_counter() - started
        layers = layers or linear_layers(state)
        runs.append(Run(name, excess, curve, sum(residual_bytes(name, layer) for layer in layers.values()), seconds))
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
    """Times of a large layer on a GPU; empty on a CPU, where they would be meaningless and take minutes."""
    if not on_gpu():
        return []
    measured = []
    bar.set_description_str("timing a large layer")
    for timed in times(RECIPES):
        measured.append(timed)
        bar.update(TIMING)
    return measured


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


HEAD = f"{'':<13}{'excess':>9}{'gap to float32':>16}{'residuals':>20}{'seconds':>10}"


def line(run: Run, float32: Run) -> str:
    gap = "" if run is float32 else f"{run.excess - float32.excess:+.4f}"
    residuals = f"{run.residual_bytes / 1024:,.0f} KiB {run.residual_bytes / float32.residual_bytes:4.0%}"
    return f"{run.name:<13}{run.excess:>9.4f}{gap:>16}{residuals:>20}{run.seconds:>10.1f}"


def work(steps: int) -> int:
    """The total of the progress bar, in training steps."""
    runs = (len(PLAIN) + len(RECIPES)) * (COMPILING + steps)
    return runs + len(RECIPES) * LAYERS * LAYER + on_gpu() * (1 + len(RECIPES)) * TIMING


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps of each run")
    args = parser.parse_args()
    print(
        f"A GPT of two blocks, {args.steps} steps each, on a source of {SOURCE.entropy:.4f} nats per symbol.\n"
        f"{STEPS} steps take about five minutes on two idle cores, half of it compiling.\n\n{HEAD}"
    )
    with tqdm(total=work(args.steps), bar_format=BAR, smoothing=0, leave=False) as bar:
        runs, layers = train_all(args.steps, bar)
        ratios = accuracy(layers, bar)
        timed = times_here(bar)
    PAGE.write_text(demo_page.page(runs, ratios, timed, args.steps))
    print(
        "\nexcess: nats per symbol above the entropy of the source, on held-out sequences.\n"
        "residuals: saved for the backward pass by the eight linear layers, activations or codes.\n"
        f"Loss curves, the accuracy of every matmul, and next steps: {PAGE.resolve()}"
    )


if __name__ == "__main__":
    main()
