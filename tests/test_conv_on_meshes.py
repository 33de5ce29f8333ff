"""Training convolutions whose images and features are sharded over CPU devices match one device."""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import first_state, summation_order_bound

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
    """Random arrays whose images and features differ in magnitude, so that shards differ from the tensor in amax."""
    normal = np.random.default_rng(0).normal
    x = np.exp(normal(size=(*IMAGE[:1], 1, 1, IMAGE[-1]))) * normal(size=IMAGE)
    w = np.exp(normal(size=(1, 1, *KERNEL[2:]))) * normal(size=KERNEL)
    return Arrays(*(a.astype(np.float32) for a in (x, w, normal(size=RESULT))))


def step(recipe, **options):
    """A function (x, w, g, state) -> ((y, dx, dw), next state); `options` are those of `train.conv_general_dilated`."""
    key = jax.random.key(7) if recipe.stochastic else None

    def layer(x, w, state):
        stateful = {"state": state} if recipe.delayed else {}
        y = train.conv_general_dilated(x, w, recipe=recipe, key=key, **WINDOW, **stateful, **options)
        return y[0] if recipe.delayed else y

    def run(x, w, g, state):
        y, pullback = jax.vjp(layer, x, w, state)
        dx, dw, state = pullback(g)
        return (y, dx, dw), state

    return run


@functools.cache
def on_one_device(name: str):
    recipe = RECIPES[name]
    return jax.jit(step(recipe))(*arrays(), first_state(recipe))


@functools.cache
def magnitudes_and_k() -> list[tuple[jax.Array, int]]:
    """Returns, for y, dx and dw, the same convolution of absolute values, and how many products each result adds up."""
    x, w, g = map(np.abs, arrays())
    y, pullback = jax.vjp(lambda x, w: jax.lax.conv_general_dilated(x, w, **WINDOW), x, w)
    window = KERNEL[0] * KERNEL[1]
    sizes_of_k = window * KERNEL[2], window * KERNEL[3], RESULT[0] * RESULT[1] * RESULT[2]
    return list(zip((y, *pullback(jnp.asarray(g))), sizes_of_k, strict=True))


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
    """Whether blocks or rotations along the images in wgrad are larger than the shard of a device."""
    devices = 4 if layout in ("images", "fsdp") else 2
    sizes = (max(*cast.block_2d, cast.rotation.size if cast.rotation else 0) for *_, cast in RECIPES[name].casts())
    return any(size > IMAGE[0] // devices for size in sizes)


MODES = {"explicit": explicit, "specs": automatic, "shard_map": shard_map}
EVERY = [
    pytest.param(*case, marks=() if case in REPRESENTATIVE else pytest.mark.exhaustive)
    for case in itertools.product(RECIPES, LAYOUTS, MODES)
    if not blocks_are_cut(*case[:2]) and not RECIPES[case[0]].mean_subtracted
]


@pytest.mark.parametrize(("name", "layout", "mode"), EVERY)
def test_a_convolution_on_a_mesh_matches_one_device(name, layout, mode):
    specs = LAYOUTS[layout]
    found, state = MODES[mode](specs, RECIPES[name])
    expected, next_state = on_one_device(name)
    for result, value, other, (magnitude, k), spec in zip(
        ("y", "dx", "dw"), found, expected, magnitudes_and_k(), (specs.y, specs.x, specs.w), strict=True
    ):
        difference = np.abs(np.asarray(value) - np.asarray(other))
        allowed = summation_order_bound(magnitude, k, other)
        assert (difference <= allowed).all(), f"{result} differs by {np.max(difference / allowed):.3g} x the bound"
        assert value.sharding.is_equivalent_to(NamedSharding(value.sharding.mesh, spec), value.ndim), result
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(next_state), strict=True):
        np.testing.assert_array_equal(a, b)


def test_sharded_positions_and_grouped_features_raise():
    x, w = jnp.ones((4, 8, 8, 64)), jnp.ones((3, 3, 64, 32))
    conv = functools.partial(train.conv_general_dilated, x, recipe="fp8_current", **WINDOW)
    with jax.set_mesh(mesh_of(AxisType.Auto)):
        with pytest.raises(ValueError, match="`x` is split over 'tp' along positions, along which windows slide"):
            conv(w, specs=train.Specs(P("dp", "tp"), P(), P("dp")))
        with pytest.raises(ValueError, match="`y` is split over 'tp' along features, of which there are groups"):
            conv(w[:, :, :16], feature_group_count=4, specs=train.Specs(P("dp"), P(), P("dp", None, None, "tp")))
