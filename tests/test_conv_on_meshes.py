"""Convolutions under recipes whose images and features are split over CPU devices are those of one device."""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import first_state, reordered

from scaledot import train
from scaledot.recipes import RECIPES

IMAGE, KERNEL, RESULT = (256, 5, 3, 256), (3, 2, 256, 256), (256, 3, 3, 256)
WINDOW = {"window_strides": (2, 1), "padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}
AXES = {"dp": 2, "tp": 2}
LAYOUTS = {
    "images": train.Specs(P(("dp", "tp")), P(), P(("dp", "tp"))),
    "column": train.Specs(P("dp"), P(None, None, None, "tp"), P("dp", None, None, "tp")),
    "row": train.Specs(P("dp", None, None, "tp"), P(None, None, "tp"), P("dp")),
    "fsdp": train.Specs(P(("dp", "tp")), P(None, None, None, "tp"), P(("dp", "tp"))),
}
pytestmark = pytest.mark.optimized  # XLA's unoptimised convolutions of integers take minutes

REPRESENTATIVE = {
    ("int8", "row", "shard_map"),
    ("fp8_delayed", "column", "explicit"),
}


def mesh_of(kind: AxisType):
    return jax.make_mesh(tuple(AXES.values()), tuple(AXES), axis_types=(kind,) * 2, devices=jax.devices()[:4])


class Arrays(NamedTuple):
    x: np.ndarray
    w: np.ndarray
    g: np.ndarray

    def on(self, specs: train.Specs, mesh):
        return [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(self, specs, strict=True)]


@functools.cache
def arrays() -> Arrays:
    """Images and features of very different magnitudes, so that a scale of a part is not one of the whole."""
    normal = np.random.default_rng(0).normal
    x = np.exp(normal(size=(*IMAGE[:1], 1, 1, IMAGE[-1]))) * normal(size=IMAGE)
    w = np.exp(normal(size=(1, 1, *KERNEL[2:]))) * normal(size=KERNEL)
    return Arrays(*(a.astype(np.float32) for a in (x, w, normal(size=RESULT))))


def step(recipe, **how):
    """y, dx, dw and the next state."""
    key = jax.random.key(7) if recipe.stochastic else None

    def layer(x, w, state):
        given = {"state": state} if recipe.delayed else {}
        y = train.conv_general_dilated(x, w, recipe=recipe, key=key, **WINDOW, **given, **how)
        return y[0] if recipe.delayed else y

    def run(x, w, g, state):
        y, pull = jax.vjp(layer, x, w, state)
        dx, dw, state = pull(g)
        return (y, dx, dw), state

    return run


@functools.cache
def on_one_device(name: str):
    recipe = RECIPES[name]
    return jax.jit(step(recipe))(*arrays(), first_state(recipe))


@functools.cache
def bounds() -> list[np.ndarray]:
    """What two orders of the same float32 sums may differ by, see meshes.reordered."""
    x, w, g = map(np.abs, arrays())
    y, pull = jax.vjp(lambda x, w: jax.lax.conv_general_dilated(x, w, **WINDOW), x, w)
    window = KERNEL[0] * KERNEL[1]
    terms = window * KERNEL[2], window * KERNEL[3], RESULT[0] * RESULT[1] * RESULT[2]
    totals = (y, *pull(jnp.asarray(g)))
    return [reordered(np.asarray(t), n) for t, n in zip(totals, terms, strict=True)]


def explicit(specs: train.Specs, recipe):
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        return jax.jit(step(recipe, out_sharding=specs.y))(*arrays().on(specs, mesh), first_state(recipe))


def automatic(specs: train.Specs, recipe):
    mesh = mesh_of(AxisType.Auto)
    with jax.set_mesh(mesh):
        return jax.jit(step(recipe, specs=specs))(*arrays().on(specs, mesh), first_state(recipe))


def shard_map(specs: train.Specs, recipe):
    mesh, (x, w, y) = mesh_of(AxisType.Auto), specs
    run = jax.shard_map(step(recipe, specs=specs), mesh=mesh, in_specs=(x, w, y, P()), out_specs=((y, x, w), P()))
    return jax.jit(run)(*arrays().on(specs, mesh), first_state(recipe))


def blocks_are_cut(name: str, layout: str) -> bool:
    """Whether blocks down the images of wgrad are longer than what a device has."""
    devices = 4 if layout in ("images", "fsdp") else 2
    return any(max(cast.tile) > IMAGE[0] // devices for *_, cast in RECIPES[name].casts())


WAYS = {"explicit": explicit, "specs": automatic, "shard_map": shard_map}
EVERY = [
    pytest.param(*case, marks=() if case in REPRESENTATIVE else pytest.mark.exhaustive)
    for case in itertools.product(RECIPES, LAYOUTS, WAYS)
    if not blocks_are_cut(*case[:2])
]


@pytest.mark.parametrize(("name", "layout", "way"), EVERY)
def test_a_convolution_on_a_mesh_is_that_of_one_device(name, layout, way):
    specs = LAYOUTS[layout]
    found, state = WAYS[way](specs, RECIPES[name])
    expected, next_state = on_one_device(name)
    for of, value, other, allowed, spec in zip(
        ("y", "dx", "dw"), found, expected, bounds(), (specs.y, specs.x, specs.w), strict=True
    ):
        apart = np.abs(np.asarray(value) - np.asarray(other))
        assert (apart <= allowed).all(), f"{of} is {np.max(apart / allowed):.3g} of what is allowed apart"
        assert value.sharding.is_equivalent_to(NamedSharding(value.sharding.mesh, spec), value.ndim), of
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(next_state), strict=True):
        np.testing.assert_array_equal(a, b)


def test_positions_and_features_in_groups_are_not_split():
    x, w = jnp.ones((4, 8, 8, 64)), jnp.ones((3, 3, 64, 32))
    conv = functools.partial(train.conv_general_dilated, x, recipe="fp8_current", **WINDOW)
    with jax.set_mesh(mesh_of(AxisType.Auto)):
        with pytest.raises(ValueError, match="`x` is split over 'tp' along positions, along which windows slide"):
            conv(w, specs=train.Specs(P("dp", "tp"), P(), P("dp")))
        with pytest.raises(ValueError, match="`y` is split over 'tp' along features, of which there are groups"):
            conv(w[:, :, :16], feature_group_count=4, specs=train.Specs(P("dp"), P(), P("dp", None, None, "tp")))
