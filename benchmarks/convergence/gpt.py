"""A tiny GPT on a source of known entropy, under every recipe and with parts of NVFP4's recipe taken out.

The model is that of `examples.gpt_linen`: all four linear layers of each block are quantised in all three products.
Seeds are paired: a row differs from float32 in its rule only, it starts from the same parameters and sees the same
batches. What counts is the gap of the excess loss on held-out sequences to that of float32. Seeds run side by side
under vmap, steps in a scan.

A finished row is written down at once, and a run that was interrupted goes on where it stopped.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import scaledot as sd
from examples import gpt_linen
from examples.gpt_training import batches, loss_and_excess
from scaledot.recipes import MXFP8, NVFP4, PRODUCTS, RECIPES, Cast, Gemm, Recipe

CHUNK = 50  # steps of one scan
POINT = 10  # steps that one point of a curve is the mean of
HELD_OUT = 200  # batches
NV, MX4 = sd.FORMATS["nvfp4"], sd.FORMATS["mxfp4"]


@dataclasses.dataclass(frozen=True)
class Row:
    """What is trained, and the gap in nats that it must keep: above `least`, below `most`."""

    name: str
    rules: Any = None
    dtype: Any = None
    least: float | None = None
    most: float | None = None

    def model(self) -> Any:
        model = gpt_linen.Gpt(dtype=self.dtype)
        return model if self.rules is None else sd.linen.with_recipe(model, self.rules)


def changed(recipe: Recipe, name: str, change: Callable[[Cast], Cast]) -> Recipe:
    """The recipe with every cast changed."""

    def both(gemm: Gemm | None) -> Any:
        return None if gemm is None else Gemm(*(None if c is None else change(c) for c in (gemm.lhs, gemm.rhs)))

    return Recipe(name, *(both(getattr(recipe, product)) for product in PRODUCTS))


def _in_blocks(recipe: str | Recipe) -> dict[str, Any]:
    return {"block_*": recipe}


def _line(cast: Cast) -> Cast:
    return dataclasses.replace(cast, block=(1, 16))


def _in_format(format: sd.Format) -> Callable[[Cast], Cast]:
    return lambda cast: dataclasses.replace(cast, format=format)


def _mxfp4(cast: Cast) -> Cast:
    return Cast(dataclasses.replace(MX4, rule="ceil"), rounding=cast.rounding, rotation=cast.rotation)


EIGHT_BITS = {"most": 0.010}
FOUR_BITS = {"least": 0.010, "most": 0.035}  # less would mean that something is not quantised
MXFP4 = changed(NVFP4, "mxfp4", _mxfp4)


def rows() -> Iterator[Row]:
    """float32 first; every recipe; then what is left of NVFP4 without each of its parts."""
    yield Row("float32")
    yield Row("bfloat16", dtype=jnp.bfloat16, most=0.001)
    for name, recipe in RECIPES.items():
        yield Row(name, _in_blocks(recipe), **_bounds(recipe))
    yield Row("mxfp4", _in_blocks(MXFP4))
    replace = dataclasses.replace
    ablations = {
        "nvfp4, no Hadamard": lambda cast: replace(cast, rotation=None),
        "nvfp4, no stochastic rounding": lambda cast: replace(cast, rounding="nearest"),
        "nvfp4, 1×16 weights": _line,
        "nvfp4, guarded": _in_format(replace(NV, name="nvfp4_guarded", guard=True)),
    }
    for name, change in ablations.items():
        yield Row(name, _in_blocks(changed(NVFP4, name, change)))
    yield Row("nvfp4, last block float32", {"block_1/*": None, "block_*": NVFP4})
    one_level = changed(NVFP4, "one level", _in_format(replace(NV, name="nvfp4_one_level", two_level=False)))
    yield Row("nvfp4, no tensor scale", _in_blocks(one_level), least=0.1)
    unscaled = changed(MXFP8, "unscaled", lambda cast: Cast(sd.FORMATS["fp8_e4m3"], calibration="fixed,448"))
    yield Row("fp8, no scaling", _in_blocks(unscaled), least=0.1)


def _bounds(recipe: Recipe) -> dict[str, float]:
    narrowest = min(cast.format.bits for _, _, cast in recipe.casts())
    if narrowest >= 8:
        return EIGHT_BITS
    return {} if recipe.dgrad is None else FOUR_BITS


def run(steps: int, seeds: int, journal: Path, progress) -> list[dict]:
    """One record for each row."""
    done = _finished(journal, steps, seeds)
    data = Data.draw(steps, seeds)
    found: list[dict] = []
    for row in rows():
        progress.set_description(row.name)
        if row.name not in done:
            excess, curve = train(row, data, progress)
            done[row.name] = {"name": row.name, "excess": excess, "curve": curve}
            with journal.open("a") as file:
                file.write(json.dumps({"steps": steps, "seeds": seeds, **done[row.name]}) + "\n")
        else:
            progress.update(steps // CHUNK)
        found.append(_judged(row, done[row.name], done["float32"]))
        progress.write(line(found[-1]))
    return found


def updates(steps: int) -> int:
    return len(list(rows())) * (steps // CHUNK)


@dataclasses.dataclass(frozen=True)
class Data:
    """Keys and batches that all rows share: (seeds, steps, batch, length)."""

    init_keys: jax.Array
    rounding_keys: jax.Array
    train: jax.Array
    held_out: jax.Array

    @classmethod
    def draw(cls, steps: int, seeds: int) -> "Data":
        keys = jax.vmap(lambda seed: jax.random.split(jax.random.key(seed), 4))(jnp.arange(seeds))
        train = jnp.stack([batches(key, steps) for key in keys[:, 1]])
        held_out = jnp.stack([batches(key, HELD_OUT) for key in keys[:, 2]])
        return cls(keys[:, 0], keys[:, 3], train, held_out)


def train(row: Row, data: Data, progress) -> tuple[list[float], list[float]]:
    """The excess of each seed on held-out sequences, and the mean excess of training along the way."""
    model, steps = row.model(), data.train.shape[1]
    states = jax.vmap(lambda key: gpt_linen.start(model, key, steps))(data.init_keys)

    @functools.partial(jax.jit, donate_argnums=0)
    def advance(states, tokens, first):
        def step(state, at):
            tokens, index = at
            keys = jax.vmap(jax.random.fold_in, (0, None))(data.rounding_keys, index)
            return jax.vmap(gpt_linen.train_step)(state, tokens, keys)

        return jax.lax.scan(step, states, (jnp.moveaxis(tokens, 1, 0), first + jnp.arange(CHUNK)))

    curve = []
    for first in range(0, steps, CHUNK):
        states, excess = advance(states, data.train[:, first : first + CHUNK], first)
        curve += jnp.mean(excess.reshape(-1, POINT * excess.shape[1]), axis=1).tolist()
        progress.update()
    return np.asarray(jax.vmap(evaluate)(states, data.held_out), float).tolist(), curve


@jax.jit
def evaluate(state, held_out: jax.Array) -> jax.Array:
    """The mean excess on batches (count, batch, length) that were not trained on."""

    def excess(tokens):
        return loss_and_excess(state.apply_fn(state.params, tokens[:, :-1]), tokens)[1]

    return jnp.mean(jax.lax.map(excess, held_out))


def _finished(journal: Path, steps: int, seeds: int) -> dict[str, dict]:
    lines = map(json.loads, journal.read_text().splitlines()) if journal.exists() else []
    return {line["name"]: line for line in lines if (line.pop("steps"), line.pop("seeds")) == (steps, seeds)}


def _judged(row: Row, found: dict, float32: dict) -> dict:
    gaps = np.subtract(found["excess"], float32["excess"])
    gap, error = float(gaps.mean()), float(gaps.std(ddof=1) / np.sqrt(len(gaps)))
    held = (row.least is None or gap > row.least) and (row.most is None or gap < row.most)
    met = None if row.least is None and row.most is None else held
    return {**found, "gap": gap, "gap_standard_error": error, "least": row.least, "most": row.most, "met": met}


def line(row: dict) -> str:
    """One row for people."""
    verdict = {True: "met", False: "MISSED", None: ""}[row["met"]]
    excess = float(np.mean(row["excess"]))
    numbers = f"{excess:8.4f} {row['gap']:+9.4f} ± {row['gap_standard_error']:.4f}"
    return f"{row['name']:<30}{numbers}  {bounds(row):<18}{verdict}".rstrip()


def bounds(row: dict) -> str:
    """What the gap must be, in words."""
    sides = ((">", row["least"]), ("<", row["most"]))
    return ", ".join(f"{sign} {value:g}" for sign, value in sides if value is not None)


def relations(rows: list[dict]) -> list[dict]:
    """What must hold between rows."""
    gap = {row["name"]: row["gap"] for row in rows}
    worse = gap["mxfp4"] - gap["nvfp4"]
    better = gap["nvfp4"] - gap["nvfp4, last block float32"]
    return [
        {"what": "mxfp4 loses more than nvfp4 by 0.005", "value": worse, "met": worse > 0.005},
        {"what": "nvfp4 gains by leaving the last block in float32", "value": better, "met": better > 0},
    ]
