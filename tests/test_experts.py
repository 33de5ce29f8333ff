"""Ragged matmuls whose experts and features are sharded over eight CPU devices match one device."""

import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import first_state, summation_order_bound

import scaledot as sd
from scaledot import train
from scaledot.recipes import RECIPES

ROWS, GROUPS, INPUTS, OUTPUTS = 256, 8, 256, 256
KEY = jax.random.key(7)
SIZES = np.array([50, 0, 77, 1, 30, 64, 0, 20])  # uneven and empty groups, and 14 rows that belong to none


class Layout(NamedTuple):
    """Mesh axes, and PartitionSpecs of x (rows, k), w (groups, k, n) and y (rows, n)."""

    axes: dict[str, int]
    x: P
    w: P
    y: P

    @property
    def bias(self) -> P:
        return P(self.w[0], *self.w[2:])

    @property
    def specs(self) -> train.Specs:
        return train.Specs(self.x, self.w, self.y)

    def mesh(self, kind: AxisType):
        sizes = tuple(self.axes.values())
        devices = jax.devices()[: math.prod(sizes)]
        return jax.make_mesh(sizes, tuple(self.axes), axis_types=(kind,) * len(sizes), devices=devices)


EXPERT_AND_TENSOR = {"ep": 2, "tp": 2}
LAYOUTS = {
    "experts": Layout({"ep": 4}, P("ep"), P("ep"), P("ep")),
    "column": Layout(EXPERT_AND_TENSOR, P("ep"), P("ep", None, "tp"), P("ep", "tp")),
    "row": Layout(EXPERT_AND_TENSOR, P("ep", "tp"), P("ep", "tp"), P("ep")),
    "data": Layout({"dp": 2, "ep": 4}, P(("dp", "ep")), P("ep"), P(("dp", "ep"))),
    "fsdp": Layout({"fsdp": 2, "ep": 2}, P(("fsdp", "ep")), P("ep", "fsdp"), P(("fsdp", "ep"))),
    "replicated rows": Layout({"ep": 8}, P(), P("ep"), P()),
    "sequence to column": Layout(EXPERT_AND_TENSOR, P(("ep", "tp")), P("ep", None, "tp"), P("ep", "tp")),
    "row to sequence": Layout(EXPERT_AND_TENSOR, P("ep", "tp"), P("ep", "tp"), P(("ep", "tp"))),
    "repeated": Layout({"dp": 2, "ep": 4}, P("dp"), P(("dp", "ep")), P()),
}
REPRESENTATIVE = {  # every mode, with casts of each kind
    ("fp8_block", "row", "explicit"),
    ("int8", "data", "shard_map"),
    ("fp8_current", "fsdp", "specs"),
    ("fp8_delayed", "repeated", "shard_map"),
}


class Arrays(NamedTuple):
    x: Any
    w: Any
    bias: Any
    g: Any

    def on(self, layout: Layout, mesh) -> "Arrays":
        specs = layout.x, layout.w, layout.bias, layout.y
        return Arrays(*(jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(self, specs, strict=True)))


@functools.cache
def arrays() -> Arrays:
    """Random arrays whose rows and groups differ in magnitude, so that shards differ from the tensor in amax."""
    normal = np.random.default_rng(0).normal
    x = np.exp(normal(size=(ROWS, 1))) * normal(size=(ROWS, INPUTS))
    w = np.exp(normal(size=(GROUPS, 1, 1))) * normal(size=(GROUPS, INPUTS, OUTPUTS)) / math.sqrt(INPUTS)
    bias, g = normal(size=(GROUPS, OUTPUTS)), normal(size=(ROWS, OUTPUTS))
    return Arrays(*(a.astype(np.float32) for a in (x, w, bias, g)))


def step(recipe, **options):
    """A function (arrays, state, sizes) -> ({y, dx, dw, db}, next state); `options` are those of `train.ragged_dot`."""
    key = KEY if recipe.stochastic else None

    def layer(x, w, bias, state, sizes):
        stateful = {"state": state} if recipe.delayed else {}
        y = train.ragged_dot(x, w, sizes, bias, recipe=recipe, key=key, **stateful, **options)
        return y[0] if recipe.delayed else y

    def run(arrays: Arrays, state, sizes):
        y, pullback = jax.vjp(functools.partial(layer, sizes=sizes), arrays.x, arrays.w, arrays.bias, state)
        dx, dw, db, state = pullback(arrays.g)
        return {"y": y, "dx": dx, "dw": dw, "db": db}, state

    return run


@functools.cache
def on_one_device(name: str):
    recipe = RECIPES[name]
    return jax.jit(step(recipe))(arrays(), first_state(recipe), jnp.asarray(SIZES))


def bound(result: str, expected) -> np.ndarray:
    """meshes.summation_order_bound of y, dx, dw or db; a changed code would differ by more."""
    x, w, bias, g = (np.abs(np.asarray(a, np.float64)) for a in arrays())
    group = np.searchsorted(np.cumsum(SIZES), np.arange(ROWS), side="right")
    member = np.eye(GROUPS + 1)[group][:, :GROUPS]  # zeros for rows that belong to no group
    magnitude_and_k = {
        "y": lambda: (np.einsum("tg,tk,gkn->tn", member, x, w, optimize=True) + member @ bias, INPUTS),
        "dx": lambda: (np.einsum("tg,tn,gkn->tk", member, g, w, optimize=True), OUTPUTS),
        "dw": lambda: (np.einsum("tg,tk,tn->gkn", member, x, g, optimize=True), max(SIZES)),
        "db": lambda: (member.T @ g, max(SIZES)),
    }
    magnitude, k = magnitude_and_k[result]()
    return summation_order_bound(magnitude, k, expected)


def require_same(name: str, found, state):
    """As meshes.require_same; db is bit-identical, because rows of a group are never sharded.

    dw differs by the order of accumulation, which XLA's CPU backend chooses by the shapes of a device's matmul.
    """
    expected, next_state = on_one_device(name)
    for result, value in found.items():
        if result == "db":
            np.testing.assert_array_equal(value, expected[result], result)
        difference = np.abs(np.asarray(value, np.float64) - np.asarray(expected[result], np.float64))
        allowed = bound(result, expected[result])
        worst = np.max(np.where(difference > 0, difference / np.maximum(allowed, 1e-300), 0))
        assert worst <= 1, f"{result} differs by {worst:.3g} x the bound"
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(next_state), strict=True):
        np.testing.assert_array_equal(a, b)


def explicit(layout: Layout, recipe):
    mesh = layout.mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        arguments = arrays().on(layout, mesh), first_state(recipe), jnp.asarray(SIZES)
        return jax.jit(step(recipe, out_sharding=layout.y))(*arguments)


def specs(layout: Layout, recipe):
    mesh = layout.mesh(AxisType.Auto)
    with jax.set_mesh(mesh):
        arguments = arrays().on(layout, mesh), first_state(recipe), jnp.asarray(SIZES)
        return jax.jit(step(recipe, specs=layout.specs))(*arguments)


def shard_map(layout: Layout, recipe):
    mesh = layout.mesh(AxisType.Auto)
    in_specs = (Arrays(layout.x, layout.w, layout.bias, layout.y), P(), P())
    out_specs = ({"y": layout.y, "dx": layout.x, "dw": layout.w, "db": layout.bias}, P())
    mapped = jax.shard_map(step(recipe, specs=layout.specs), mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    return jax.jit(mapped)(arrays().on(layout, mesh), first_state(recipe), jnp.asarray(SIZES))


MODES = {"explicit": explicit, "specs": specs, "shard_map": shard_map}
EVERY = [
    pytest.param(*case, marks=() if case in REPRESENTATIVE else pytest.mark.exhaustive)
    for case in itertools.product(RECIPES, LAYOUTS, MODES)
]


@pytest.mark.parametrize(("name", "layout_name", "mode"), EVERY)
def test_a_step_on_a_mesh_matches_one_device(name, layout_name, mode):
    layout, recipe = LAYOUTS[layout_name], RECIPES[name]
    found, state = MODES[mode](layout, recipe)
    require_same(name, found, state)
    specs = {"y": layout.y, "dx": layout.x, "dw": layout.w, "db": layout.bias}
    for result, value in found.items():
        sharding = NamedSharding(value.sharding.mesh, specs[result])
        assert value.sharding.is_equivalent_to(sharding, value.ndim), result


def test_a_rotation_along_sharded_groups_pads_features_that_it_does_not_divide():
    """w of dgrad is rotated along 200 outputs: every device computes random numbers for 256."""
    layout, draw = LAYOUTS["experts"], np.random.default_rng(1).normal
    x, w, g = (draw(size=shape).astype(np.float32) for shape in ((32, 16), (4, 16, 200), (32, 200)))
    sizes = jnp.array([9, 0, 20, 3])

    def dx(w, **options):
        y = functools.partial(train.ragged_dot, w=w, group_sizes=sizes, recipe="quartet_ii", key=KEY, **options)
        return jax.vjp(y, x)[1](g)[0]

    expected = jax.jit(dx)(w)
    mesh = layout.mesh(AxisType.Auto)
    with jax.set_mesh(mesh):
        found = jax.jit(functools.partial(dx, specs=layout.specs))(jax.device_put(w, NamedSharding(mesh, layout.w)))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("library", [sd.linen, sd.nnx], ids=["linen", "nnx"])
def test_grouped_layers_accept_specs(library):
    layout, (x, w, bias, _) = LAYOUTS["column"], arrays()
    recipe = RECIPES["fp8_current"]
    layer = library.GroupedDense(recipe, specs=layout.specs)
    apply = functools.partial(layer.apply, {}) if library is sd.linen else layer
    mesh = layout.mesh(AxisType.Auto)
    with jax.set_mesh(mesh):
        y = jax.jit(lambda *operands: apply(*operands))(x, w, jnp.asarray(SIZES), bias)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, layout.y), 2)
    expected = train.ragged_dot(x, w, SIZES, bias, recipe=recipe)
    assert (np.abs(np.asarray(y) - np.asarray(expected)) <= bound("y", expected)).all()


def test_wrong_shardings_raise_errors_that_name_them():
    def raises(match, specs, x=(64, 256), w=(8, 256, 64), recipe="fp8_block", **options):
        with pytest.raises(ValueError, match=match):
            train.ragged_dot(jnp.ones(x), jnp.ones(w), jnp.ones(w[0], int), recipe=recipe, specs=specs, **options)

    mesh = jax.make_mesh((2, 4), ("tp", "ep"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        valid = train.Specs(P("ep"), P("ep"), P("ep"))
        raises("`w` has 6 groups, .* evenly over 4 devices of 'ep'; 4 or 8 would fit", valid, w=(6, 256, 64))
        raises("`x` has 62 rows, .* evenly over 4 devices of 'ep'; 60 or 64 would fit", valid, x=(62, 256))
        raises("`x` has no rows to split", valid, x=(0, 256))
        raises("no axis 'expert'; it has 'tp', 'ep'", train.Specs(P("ep"), P("expert"), P("ep")))
        raises(r"`specs\.x` .* has 3 entries for an array of 2 axes", train.Specs(P("ep", None, None), P("ep"), P()))
        raises("`out_sharding` and `specs` both give", valid, out_sharding=P("ep"))
        cut = train.Specs(P("ep"), P("ep", None, "tp"), P("ep", "tp"))
        raises("`w` is sharded over 'tp' so that a device has 32 elements of an axis, which cut blocks of 128", cut)
        raises("'k' .* has global size 256 in `x` and 512 in `w`", valid, w=(8, 512, 64))


def test_groups_that_do_not_divide_raise_errors_that_say_what_would_fit():
    mesh = jax.make_mesh((4,), ("ep",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    x, w = jnp.ones((8, 32)), jnp.ones((3, 32, 16))
    specs = train.Specs(P(), P("ep"), P())
    message = r"`w` has 3 groups, which cannot be split evenly over 4 devices of 'ep'; 4 would fit"
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
        train.ragged_dot(x, w, jnp.array([1, 2, 3]), recipe="fp8_current", specs=specs)
