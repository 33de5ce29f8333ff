"""Layouts of a layer on meshes of CPU devices, and a step of it under a recipe."""

import functools
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from scaledot import init_state, train
from scaledot.recipes import RECIPES, Recipe

REPRESENTATIVE = ("fp8_current", "fp8_block", "nvfp4")
SCALINGS = ("fp8_current", "fp8_block", "nvfp4", "fp8_delayed", "mxfp8", "int8")  # one recipe of each kind of scale
WAYS = ("explicit", "specs", "shard_map")  # to say how arrays lie

BATCH, SEQUENCE, INPUTS, OUTPUTS = 4, 256, 512, 256


class Layout(NamedTuple):
    """Mesh axes and how x (batch, sequence, inputs), w (inputs, outputs), bias and y lie."""

    axes: dict[str, int]
    x: P
    w: P
    bias: P
    y: P

    def mesh(self, kind: AxisType):
        sizes = tuple(self.axes.values())
        devices = jax.devices()[: math.prod(sizes)]
        return jax.make_mesh(sizes, tuple(self.axes), axis_types=(kind,) * len(sizes), devices=devices)

    @property
    def specs(self) -> train.Specs:
        return train.Specs(self.x, self.w, self.y)


DATA_AND_TENSOR = {"dp": 2, "tp": 2}
LAYOUTS = {
    "column": Layout(DATA_AND_TENSOR, P("dp", None, None), P(None, "tp"), P("tp"), P("dp", None, "tp")),
    "row": Layout(DATA_AND_TENSOR, P("dp", None, "tp"), P("tp", None), P(None), P("dp", None, None)),
    "sequence to column": Layout(DATA_AND_TENSOR, P("dp", "tp", None), P(None, "tp"), P("tp"), P("dp", None, "tp")),
    "row to sequence": Layout(DATA_AND_TENSOR, P("dp", None, "tp"), P("tp", None), P(None), P("dp", "tp", None)),
    "fsdp": Layout({"fsdp": 4}, P("fsdp", None, None), P("fsdp", None), P(None), P("fsdp", None, None)),
    "all": Layout(
        {"dp": 2, "fsdp": 2, "tp": 2},
        P(("dp", "fsdp"), None, None),
        P("fsdp", "tp"),
        P("tp"),
        P(("dp", "fsdp"), None, "tp"),
    ),
}


def cases(layouts, ways=WAYS, taken=LAYOUTS):
    """Every recipe on every layout in every way.

    By default each of the layouts `taken` is run in one way, ways and SCALINGS taking turns; the rest is `exhaustive`.
    """
    default = {
        (SCALINGS[(i + 2 * j) % len(SCALINGS)], layout, way)
        for (i, layout), (j, way) in itertools.product(enumerate(layouts), enumerate(ways))
        if i % len(ways) == j and layout in taken
    }
    return [
        pytest.param(*case, marks=() if case in default else pytest.mark.exhaustive)
        for case in itertools.product(RECIPES, layouts, ways)
    ]


class Arrays(NamedTuple):
    x: jax.Array
    w: jax.Array
    bias: jax.Array
    g: jax.Array

    def on(self, layout: Layout, mesh) -> "Arrays":
        specs = layout.x, layout.w, layout.bias, layout.y
        return Arrays(*(jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(self, specs, strict=True)))


def arrays() -> Arrays:
    """Rows and columns of very different magnitudes, so that a scale of a part is not one of the whole."""
    return Arrays(*map(jnp.asarray, _drawn()))


@functools.cache
def _drawn() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    x = np.exp(rng.standard_normal((BATCH, SEQUENCE, 1))) * rng.standard_normal((BATCH, SEQUENCE, INPUTS))
    w = rng.standard_normal((INPUTS, OUTPUTS)) / math.sqrt(INPUTS)
    bias, g = rng.standard_normal(OUTPUTS), rng.standard_normal((BATCH, SEQUENCE, OUTPUTS))
    x, w, bias, g = (a.astype(np.float32) for a in (x, w, bias, g))
    return x.astype(jnp.bfloat16), w, bias, g.astype(jnp.bfloat16)


def step(recipe: Recipe, **how):
    """y, dx, dw, db and the next state from arrays and a state."""
    key = jax.random.key(7) if recipe.stochastic else None

    def layer(x, w, bias, state):
        given = {"state": state} if recipe.delayed else {}
        y = train.dense(x, w, bias, recipe=recipe, key=key, **given, **how)
        return y[0] if recipe.delayed else y

    def run(arrays: Arrays, state):
        y, pull = jax.vjp(layer, arrays.x, arrays.w, arrays.bias, state)
        dx, dw, db, state = pull(arrays.g)
        return {"y": y, "dx": dx, "dw": dw, "db": db}, state

    return run


def first_state(recipe: Recipe):
    return init_state(recipe) if recipe.delayed else {}


def reordered(total, terms: int, dtype=jnp.float32):
    """What two orders of the same float32 sum, rounded to dtype, may differ by; `total` is that of magnitudes.

    Each is within terms * 2^-24 of it; operands are known to within the coarsest cast, so magnitudes are taken twice.
    Then either result is rounded.
    """
    return 2 * total * (2 * terms * 2.0**-24 + float(jnp.finfo(dtype).eps))


def require_reordered(found, expected, plain, x, w, terms: int):
    """y, dx and dw of a product, for a gradient of ones, in another order of sums of at most so many terms."""
    y, pull = jax.vjp(plain, jnp.abs(x).astype(jnp.float32), jnp.abs(w).astype(jnp.float32))
    for a, b, total in zip(found, expected, (y, *pull(jnp.ones_like(y))), strict=True):
        apart = np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64))
        assert (apart <= reordered(np.asarray(total, np.float64), terms, a.dtype)).all()


def bound(of: str, arrays: Arrays, dtype) -> np.ndarray:
    """`reordered` for a result of a step."""
    x, w, bias, g = (np.abs(np.asarray(a, np.float64)) for a in arrays)
    x, g = (a.reshape(-1, a.shape[-1]) for a in (x, g))
    totals = {"y": (x @ w + bias, INPUTS), "dx": (g @ w.T, OUTPUTS), "dw": (x.T @ g, len(x)), "db": (g.sum(0), len(g))}
    return reordered(*totals[of], dtype)


@functools.cache
def on_one_device(name: str):
    recipe = RECIPES[name]
    return jax.jit(step(recipe))(arrays(), first_state(recipe))


def require_same(name: str, found, state):
    """A step that one device makes, but for the order of float32 sums."""
    expected, next_state = on_one_device(name)
    for of, value in found.items():
        apart = np.abs(np.asarray(value, np.float64) - np.asarray(expected[of], np.float64))
        allowed = bound(of, arrays(), value.dtype).reshape(apart.shape)
        assert (apart <= allowed).all(), f"{of} is {np.max(apart / allowed):.3g} of what is allowed apart"
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(next_state), strict=True):
        np.testing.assert_array_equal(a, b)
