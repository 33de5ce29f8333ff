"""Shardings of a dense layer on meshes of CPU devices, and a training step of it under a recipe."""

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
MODES = ("explicit", "specs", "shard_map")  # explicit mesh axes, `specs` on automatic ones, `specs` inside a shard_map

BATCH, SEQUENCE, INPUTS, OUTPUTS = 4, 256, 512, 256


class Layout(NamedTuple):
    """Mesh axes, and PartitionSpecs of x (batch, sequence, inputs), w (inputs, outputs), bias (outputs,) and y."""

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


def cases(layouts, modes=MODES, default_layouts=LAYOUTS):
    """Every recipe with every layout in every mode.

    By default each of `default_layouts` runs in one mode with one recipe of SCALINGS, in turn; the rest is marked
    `exhaustive`.
    """
    default = {
        (SCALINGS[(i + 2 * j) % len(SCALINGS)], layout, mode)
        for (i, layout), (j, mode) in itertools.product(enumerate(layouts), enumerate(modes))
        if i % len(modes) == j and layout in default_layouts
    }
    return [
        pytest.param(*case, marks=() if case in default else pytest.mark.exhaustive)
        for case in itertools.product(RECIPES, layouts, modes)
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
    """Random arrays whose rows differ in magnitude, so that shards differ from the tensor in amax."""
    return Arrays(*map(jnp.asarray, _random_arrays()))


@functools.cache
def _random_arrays() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    x = np.exp(rng.standard_normal((BATCH, SEQUENCE, 1))) * rng.standard_normal((BATCH, SEQUENCE, INPUTS))
    w = rng.standard_normal((INPUTS, OUTPUTS)) / math.sqrt(INPUTS)
    bias, g = rng.standard_normal(OUTPUTS), rng.standard_normal((BATCH, SEQUENCE, OUTPUTS))
    x, w, bias, g = (a.astype(np.float32) for a in (x, w, bias, g))
    return x.astype(jnp.bfloat16), w, bias, g.astype(jnp.bfloat16)


def step(recipe: Recipe, **options):
    """A function (arrays, state) -> ({y, dx, dw, db}, next state); `options` are those of `train.dense`."""
    key = jax.random.key(7) if recipe.stochastic else None

    def layer(x, w, bias, state):
        stateful = {"state": state} if recipe.delayed else {}
        y = train.dense(x, w, bias, recipe=recipe, key=key, **stateful, **options)
        return y[0] if recipe.delayed else y

    def run(arrays: Arrays, state):
        y, pullback = jax.vjp(layer, arrays.x, arrays.w, arrays.bias, state)
        dx, dw, db, state = pullback(arrays.g)
        return {"y": y, "dx": dx, "dw": dw, "db": db}, state

    return run


def first_state(recipe: Recipe):
    return init_state(recipe) if recipe.delayed else {}


def summation_order_bound(magnitude, k: int, expected) -> np.ndarray:
    """The largest difference of two matmuls over K elements that accumulate in float32 in different orders.

    magnitude: the matmul of the operands' magnitudes. An accumulation in any order is within k * 2^-24 * magnitude of
    the exact result; quantised magnitudes are at most twice those of the operands. expected: one of the results, both
    of which are rounded to its dtype.
    """
    unit = float(jnp.finfo(expected.dtype).eps) / 2
    accumulation = 2 * 2 * k * 2.0**-24 * np.asarray(magnitude, np.float64)
    rounded = np.abs(np.asarray(expected, np.float64)).reshape(accumulation.shape)
    return (1 + unit) * accumulation + 2 * unit / (1 - unit) * rounded


def assert_equal_up_to_summation_order(found, expected, plain, x, w, k: int):
    """Asserts that y, dx and dw, for a gradient of ones, differ by at most `summation_order_bound`."""
    y, pullback = jax.vjp(plain, jnp.abs(x).astype(jnp.float32), jnp.abs(w).astype(jnp.float32))
    for a, b, magnitude in zip(found, expected, (y, *pullback(jnp.ones_like(y))), strict=True):
        difference = np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64))
        assert (difference <= summation_order_bound(magnitude, k, b)).all()


def bound(result: str, arrays: Arrays, expected) -> np.ndarray:
    """`summation_order_bound` of y, dx, dw or db of a step, in the shape of a matrix."""
    x, w, bias, g = (np.abs(np.asarray(a, np.float64)) for a in arrays)
    x, g = (a.reshape(-1, a.shape[-1]) for a in (x, g))
    magnitude_and_k = {
        "y": (x @ w + bias, INPUTS),
        "dx": (g @ w.T, OUTPUTS),
        "dw": (x.T @ g, len(x)),
        "db": (g.sum(0), len(g)),
    }
    return summation_order_bound(*magnitude_and_k[result], expected)


@functools.cache
def on_one_device(name: str):
    recipe = RECIPES[name]
    return jax.jit(step(recipe))(arrays(), first_state(recipe))


def require_same(name: str, found, state):
    """Asserts that results match one device up to the order of accumulation, and that the state is bit-identical."""
    expected, next_state = on_one_device(name)
    for result, value in found.items():
        difference = np.abs(np.asarray(value, np.float64) - np.asarray(expected[result], np.float64))
        allowed = bound(result, arrays(), expected[result]).reshape(difference.shape)
        assert (difference <= allowed).all(), f"{result} differs by {np.max(difference / allowed):.3g} x the bound"
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(next_state), strict=True):
        np.testing.assert_array_equal(a, b)
