"""Kernels in programs that XLA partitions along automatic mesh axes: each device runs them on its shards.

The kernels here are stand-ins that any device runs: XLA's casts and matmuls behind rows of the table that XLA cannot
look into, in the layouts that the kernels for Hopper have. What they do to shards is what those do.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import LAYOUTS, SCALINGS, Layout, arrays, first_state, require_same, step
from tables import STATELESS_RECIPES

import scaledot as sd
from scaledot import train
from scaledot.kernels import table
from scaledot.kernels.layouts import Transposed
from scaledot.kernels.spec import CastArguments, CastProblem, View
from scaledot.kernels.table import Kernel
from scaledot.ops.casts import make_casts
from scaledot.parallel.custom_partition import Leaf, propagation_rule
from scaledot.parallel.types import partition_reason
from scaledot.recipes import RECIPES
from scaledot.train.resolved_cast import OperandDims, ResolvedCast

BOTH = Layout(
    {"dp": 2, "tp": 2}, P("dp", "tp", None), P("dp", "tp"), P("tp"), P("dp", "tp", None)
)  # batch and sequence: rows of a device are not contiguous
PLACES = {**LAYOUTS, "batch and sequence": BOTH}


@dataclasses.dataclass
class FromAmax:
    """The shapes that kernels were run on, while programs were partitioned."""

    casts: set
    matmuls: set


@pytest.fixture
def seen(monkeypatch):
    """A table whose first rows are kernels that XLA cannot partition."""
    seen = FromAmax(set(), set())

    def run_cast(problem: CastProblem, x, given: CastArguments):
        seen.casts.add(problem.shape)
        made = table._reference_cast(problem, x, given)
        pairs = zip(made.arrays, problem.views, strict=True)
        return made._replace(arrays=tuple(Transposed(q.T) if view.contracted == 0 else q for q, view in pairs))

    def run_matmul(problem, lhs, rhs, group_sizes=None):
        seen.matmuls.add((lhs.shape, rhs.shape))
        return table._DEQUANTIZE.run(problem, lhs, rhs)

    def two_axes(problem) -> str | None:
        return None if len(problem.shape) == 2 and problem.groups is None else "it casts matrices"

    def scaled(problem) -> str | None:
        both = problem.lhs.format is not None and problem.rhs.format is not None
        return None if both and not problem.contraction.batch else "it multiplies scaled matrices"

    place = {"place_reason": lambda p: None if p is None else partition_reason(p), "is_opaque": True}
    cast = Kernel("opaque_cast", two_axes, lambda problem: "an opaque cast", run_cast, **place)
    matmul = Kernel("opaque_matmul", scaled, lambda problem: "an opaque matmul", run_matmul, **place)
    monkeypatch.setattr(table, "CASTS", (cast, table.XLA_CAST))
    monkeypatch.setattr(table, "DOT", (table.DOT[0], matmul, *table.DOT[1:]))
    return seen


def marks(name: str, layout: str) -> list:
    """By default each layout takes one recipe of each kind of scale in turn.

    Unoptimised, XLA of jax 0.10.2 makes invalid code for CPUs of some programs with 4-bit codes.
    """
    scalings = list(SCALINGS)
    taken = name in scalings and scalings.index(name) % 3 == list(PLACES).index(layout) % 3
    has_four_bits = any(cast.format.bits == 4 for *_, cast in RECIPES[name].casts())
    return [pytest.mark.exhaustive] * (not taken) + [pytest.mark.optimized] * has_four_bits


CASES = [pytest.param(name, layout, marks=marks(name, layout)) for name in RECIPES for layout in PLACES]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_step_is_that_of_one_device(seen, name, layout):
    lay, recipe = PLACES[layout], RECIPES[name]
    mesh = lay.mesh(AxisType.Auto)
    placed = arrays().on(lay, mesh)
    found, state = jax.jit(step(recipe))(placed, first_state(recipe))
    require_same(name, found, state)
    devices, tokens = mesh.size, placed.x.shape[0] * placed.x.shape[1]
    # Devices cast shards of x, and no matmul is computed whole on every one of them.
    assert min(shape[0] for shape in seen.casts) < tokens
    smallest = min(np.prod(lhs) * np.prod(rhs) for lhs, rhs in seen.matmuls)
    assert smallest < tokens * 512 * 512 * 256 // devices


def views_of(recipe, x) -> list[tuple[tuple[View, ...], bool]]:
    """The casts of a matrix that the matmuls of a recipe take, and whether they round stochastically."""
    found = []
    for matmul, tensor, cast in recipe.casts():
        if cast.delayed is None:
            axis = {"fwd": 1, "dgrad": 1, "wgrad": 0}[matmul] if tensor != "w" else {"fwd": 0, "dgrad": 1}[matmul]
            sides = OperandDims("ab", "ab"[1 - axis], "ab"[axis])
            laid = ResolvedCast.on(cast, sides)
            drawn = cast.rounding == "stochastic"
            found.append(((View(laid.spec(x.shape, x.dtype), 0 if drawn else None, axis),), drawn))
    return found


@pytest.mark.parametrize("spec", [P("a", "b"), P("b", "a"), P(None, ("a", "b")), P(("b", "a"))], ids=str)
@pytest.mark.parametrize("name", STATELESS_RECIPES)
def test_codes_and_scales_are_those_of_one_device(seen, name, spec):
    """To the bit, numbers of stochastic rounding included."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((1024, 1024)) * np.geomspace(0.01, 100, 1024), jnp.float32)
    casts, key = views_of(RECIPES[name], x), jax.random.key(5)

    def run(x, key):
        given = CastArguments(keys=(key,))
        return [make_casts(x, views, given if drawn else CastArguments()).arrays for views, drawn in casts]

    whole = jax.jit(run)(x, key)
    seen.casts.clear()
    parts = jax.jit(run)(jax.device_put(x, NamedSharding(mesh, spec)), key)
    assert (1024 * 1024 // 8) in {np.prod(shape) for shape in seen.casts}
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.optimized  # see `marks`
def test_rows_of_batch_and_sequence_draw_the_numbers_of_one_device(seen):
    """Rows of a device that are several runs of the whole matrix are gathered where they are rounded stochastically."""
    lay, recipe = PLACES["batch and sequence"], RECIPES["nvfp4"]
    found, _ = jax.jit(step(recipe))(arrays().on(lay, lay.mesh(AxisType.Auto)), {})
    require_same("nvfp4", found, {})


def fsdp_and_tensor_parallel():
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    rng = np.random.default_rng(2)

    def place(shape, *spec):
        return jax.device_put(jnp.asarray(rng.standard_normal(shape), jnp.float32), NamedSharding(mesh, P(*spec)))

    return mesh, place((8, 128, 512), "fsdp"), place((512, 512), "fsdp", "tp")


def test_operands_are_gathered_as_codes_and_gradients_scattered(seen):
    _, x, w = fsdp_and_tensor_parallel()

    def update(w, x):
        gradient = jax.grad(lambda w: jnp.sum(train.dense(x, w, recipe="int8_block", key=jax.random.key(0)) ** 2))(w)
        return w - gradient

    text = jax.jit(update, out_shardings=w.sharding).lower(w, x).compile().as_text()
    gathered = re.findall(r"= (\w+)\[([\d,]*)\]\S* all-gather\(", text)
    assert gathered == [("f32", "256,4"), ("s8", "256,512")]  # scales of 128 codes, and codes
    assert {lhs for lhs, _ in seen.matmuls} >= {(256, 512)}  # a quarter of the tokens, all of the inputs
    assert len(re.findall(r" reduce-scatter\(", text)) == 1, "partial sums of dw leave each device its part"


def test_sequence_shards_are_gathered_as_codes(seen):
    """Of tokens that are sharded over the axis along which the result has its features."""
    mesh, x, w = fsdp_and_tensor_parallel()
    x = jax.device_put(x, NamedSharding(mesh, P("fsdp", "tp")))
    out = NamedSharding(mesh, P("fsdp", None, "tp"))
    text = jax.jit(lambda x, w: train.dense(x, w, recipe="int8"), out_shardings=out).lower(x, w).compile().as_text()
    gathered = re.findall(r"= (\w+)\[([\d,]*)\]\S* all-gather\(", text)
    assert sorted(gathered)[-1] == ("s8", "256,512")  # a fourth of the batch with all of its tokens
    sizes = [np.prod([int(n) for n in shape.split(",")]) for dtype, shape in gathered if dtype != "s8"]
    assert all(size <= 1024 for size in sizes), gathered  # a scale for each row or column


def test_blocks_that_a_mesh_would_cut_are_gathered(seen):
    """XLA has chosen the sharding, not the caller: 8 devices share 512 in parts of 64, and blocks are 128 long."""
    mesh = jax.make_mesh((8,), ("tp",), axis_types=(AxisType.Auto,))
    x, w = (jnp.asarray(np.random.default_rng(3).standard_normal(s), jnp.float32) for s in ((256, 512), (512, 256)))
    expected = jax.jit(lambda x, w: train.dense(x, w, recipe="fp8_block"))(x, w)
    seen.casts.clear()
    x, w = jax.device_put(x, NamedSharding(mesh, P(None, "tp"))), jax.device_put(w, NamedSharding(mesh, P("tp")))
    found = jax.jit(lambda x, w: train.dense(x, w, recipe="fp8_block"))(x, w)
    assert (256, 64) not in seen.casts
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block"])
@pytest.mark.parametrize("sharded", [P("a"), P(None, "a")], ids=["examples", "rows"])
def test_under_vmap_every_example_is_cast_alone(seen, recipe, sharded):
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    x, w = (jnp.asarray(np.random.default_rng(4).standard_normal(s), jnp.float32) for s in ((4, 512, 256), (256, 128)))
    x = x * jnp.geomspace(1, 1000, 4)[:, None, None]

    def mapped(x, w):
        return jax.vmap(lambda x: train.dense(x, w, recipe=recipe))(x)

    expected = jnp.stack([train.dense(each, w, recipe=recipe) for each in x])
    seen.casts.clear()
    found = jax.jit(mapped)(jax.device_put(x, NamedSharding(mesh, sharded)), w)
    np.testing.assert_array_equal(found, expected)
    if sharded == P(None, "a"):
        assert (128, 256) in seen.casts


def test_constraints_inside_a_program_decide(seen):
    """Arrays come from one device; with_sharding_constraint names the mesh."""
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(AxisType.Auto,))
    x, w = jnp.ones((1024, 256)), jnp.ones((256, 128))

    @jax.jit
    def f(x, w):
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("dp")))
        return train.dense(x, w, recipe="fp8_current")

    with jax.set_mesh(mesh):
        y = f(x, w)
    assert (128, 256) in seen.casts
    np.testing.assert_array_equal(y, jnp.full((1024, 128), 256.0))


def test_the_last_block_of_an_axis_may_be_short(seen):
    """30 blocks of 16, of which the last has one element."""
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(AxisType.Auto,))
    x, w = (jnp.asarray(np.random.default_rng(6).standard_normal(s), jnp.float32) for s in ((256, 465), (465, 128)))
    run = jax.jit(lambda x, w: train.dense(x, w, recipe="nvfp4"))
    expected = run(x, w)
    found = run(jax.device_put(x, NamedSharding(mesh, P("dp"))), w)
    assert (32, 465) in seen.casts
    np.testing.assert_array_equal(found, expected)


def test_rematerialised_layers_are_those_that_keep_their_residuals(seen):
    _, x, w = fsdp_and_tensor_parallel()

    def layer(x, w):
        return jax.nn.relu(train.dense(x, w, recipe="fp8_block"))

    def gradient(layer):
        def loss(w, x):
            return jnp.sum(jax.lax.scan(lambda x, _: (layer(x, w), None), x, length=2)[0])

        return jax.jit(jax.grad(loss))(w, x)

    np.testing.assert_array_equal(gradient(jax.checkpoint(layer)), gradient(layer))


def test_explain_says_that_devices_run_kernels_on_their_shards(seen):
    _, x, w = fsdp_and_tensor_parallel()
    text = sd.explain(train.dense, x, w, recipe="fp8_current")
    assert "TAKEN: an opaque cast; each of 8 devices runs it on its shards" in text
    assert (
        "TAKEN: an opaque matmul; each of 8 devices runs it on its shards, and operands are gathered as codes" in text
    )


def test_sizes_that_do_not_divide_have_factors_of_their_own():
    rule = propagation_rule([Leaf((96, 5), ("m", "k"))], [Leaf((96,), ("m",)), Leaf((7,), ("m",)), Leaf((), ())])
    assert rule == ("l0_0 l1_0 -> l0_0, own0, ", (), {})


def test_casts_of_groups_are_left_to_xla(seen):
    """They have no rule for shards."""
    mesh, x, _ = fsdp_and_tensor_parallel()
    experts = jax.device_put(jnp.ones((2, 512, 128)), NamedSharding(mesh, P(None, "fsdp")))
    rows = x.reshape(-1, 512)
    seen.casts.clear()
    jax.jit(lambda x, w: train.ragged_dot(x, w, jnp.array([1000, 24]), recipe="fp8_current"))(rows, experts)
    assert not seen.casts
