"""Custom partitioning of kernels on automatic mesh axes: each device runs them on its shards.

The kernels here run on any device: XLA's casts and matmuls as table rows that are marked opaque to XLA, with the result
layouts of the Hopper kernels, so that they are partitioned as those are.
"""

import dataclasses
import itertools
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
from scaledot.contraction import Contraction
from scaledot.kernels import table
from scaledot.kernels.layouts import Transposed
from scaledot.kernels.operands import OuterProduct
from scaledot.kernels.spec import CastArguments, CastOutput, CastProblem
from scaledot.kernels.table import Kernel
from scaledot.numerics.hadamard import random_signs
from scaledot.ops.casts import run_casts
from scaledot.ops.operands import contract
from scaledot.parallel.custom_partition import Leaf, propagation_rule
from scaledot.parallel.types import partition_reason
from scaledot.recipes import RECIPES
from scaledot.train.resolved_cast import OperandDims, ResolvedCast

BOTH = Layout(
    {"dp": 2, "tp": 2}, P("dp", "tp", None), P("dp", "tp"), P("tp"), P("dp", "tp", None)
)  # batch and sequence: rows of a device are not contiguous
ALL_LAYOUTS = {**LAYOUTS, "batch and sequence": BOTH}


@dataclasses.dataclass
class KernelShapes:
    """The shapes that kernels were traced with."""

    casts: set
    matmuls: set


@pytest.fixture
def traced(monkeypatch):
    """Puts kernels that XLA cannot partition in front of the tables; returns the shapes that they are traced with."""
    traced = KernelShapes(set(), set())

    def run_cast(problem: CastProblem, x, arguments: CastArguments):
        traced.casts.add(problem.shape)
        result = table._reference_cast(problem, x, arguments)
        pairs = zip(result.arrays, problem.outputs, strict=True)
        return result._replace(arrays=tuple(Transposed(q.T) if output.contracted == 0 else q for q, output in pairs))

    def run_matmul(problem, lhs, rhs, group_sizes=None):
        traced.matmuls.add((lhs.shape, rhs.shape))
        return table._DEQUANTIZE.run(problem, lhs, rhs)

    def not_a_matrix(problem) -> str | None:
        return None if len(problem.shape) == 2 and problem.groups is None else "it casts matrices"

    def not_scaled(problem) -> str | None:
        both = problem.lhs.format is not None and problem.rhs.format is not None
        return None if both and not problem.contraction.batch else "it multiplies scaled matrices"

    place = {"environment_reason": lambda p: None if p is None else partition_reason(p), "is_opaque": True}
    cast = Kernel("opaque_cast", not_a_matrix, lambda problem: "an opaque cast", run_cast, **place)
    matmul = Kernel("opaque_matmul", not_scaled, lambda problem: "an opaque matmul", run_matmul, **place)
    monkeypatch.setattr(table, "CASTS", (cast, table.XLA_CAST))
    monkeypatch.setattr(table, "DOT", (table.DOT[0], matmul, *table.DOT[1:]))
    return traced


DEFAULT_RECIPES = {
    "column": "fp8_current",
    "row": "fp8_block",
    "sequence to column": "mxfp8",
    "row to sequence": "fp8_delayed",
    "fsdp": "int8",
    "all": "nvfp4",
    "batch and sequence": "fp8_block",
}
assert set(DEFAULT_RECIPES) == set(ALL_LAYOUTS)
assert set(DEFAULT_RECIPES.values()) == set(SCALINGS)


def marks(name: str, layout_name: str) -> list:
    """By default each layout runs one recipe, and each recipe of SCALINGS runs.

    In "all" a device has contiguous rows, for which nvfp4 draws random numbers on shards; of other rows see
    test_stochastic_rounding_of_noncontiguous_rows_is_bit_identical_to_single_device.

    Unoptimised, XLA of jax 0.10.2 emits invalid CPU code for some programs with 4-bit codes.
    """
    is_default = DEFAULT_RECIPES[layout_name] == name
    has_four_bits = any(cast.format.bits == 4 for *_, cast in RECIPES[name].casts())
    return [pytest.mark.exhaustive] * (not is_default) + [pytest.mark.optimized] * has_four_bits


CASES = [pytest.param(*case, marks=marks(*case)) for case in itertools.product(RECIPES, ALL_LAYOUTS)]


@pytest.mark.parametrize(("name", "layout_name"), CASES)
def test_a_step_matches_one_device(traced, name, layout_name):
    layout, recipe = ALL_LAYOUTS[layout_name], RECIPES[name]
    mesh = layout.mesh(AxisType.Auto)
    placed = arrays().on(layout, mesh)
    found, state = jax.jit(step(recipe))(placed, first_state(recipe))
    require_same(name, found, state)
    devices, tokens = mesh.size, placed.x.shape[0] * placed.x.shape[1]
    # Devices cast shards of x, and the matmuls are partitioned, too.
    assert min(shape[0] for shape in traced.casts) < tokens
    if recipe.fwd.lhs is not None:  # otherwise XLA multiplies unquantised x, without the kernel
        smallest = min(np.prod(lhs) * np.prod(rhs) for lhs, rhs in traced.matmuls)
        assert smallest <= tokens * 512 * 512 * 256 // devices


def outputs_of(recipe, x) -> list[tuple[tuple[CastOutput, ...], sd.Cast]]:
    """The outputs of a matrix for the casts of a recipe, and the casts."""
    found = []
    for matmul, tensor, cast in recipe.casts():
        if cast.delayed is None:
            axis = {"fwd": 1, "dgrad": 1, "wgrad": 0}[matmul] if tensor != "w" else {"fwd": 0, "dgrad": 1}[matmul]
            dims = OperandDims("ab", "ab"[1 - axis], "ab"[axis])
            spec = ResolvedCast.on(cast, dims).spec(x.shape, x.dtype)
            key, signs = (0 if draws else None for draws in (cast.rounding != "nearest", draws_signs(cast)))
            found.append(((CastOutput(spec, key, axis, signs=signs),), cast))
    return found


def draws_signs(cast: sd.Cast) -> bool:
    return cast.rotation is not None and cast.rotation.draws_signs


def arguments_of(cast: sd.Cast, key) -> CastArguments:
    signs = (random_signs(jax.random.fold_in(key, 1), cast.rotation.size),) if draws_signs(cast) else ()
    return CastArguments(keys=() if cast.rounding == "nearest" else (key,), signs=signs)


@pytest.mark.parametrize("spec", [P("a", "b"), P("b", "a"), P(None, ("a", "b")), P(("b", "a"))], ids=str)
@pytest.mark.parametrize("name", STATELESS_RECIPES)
def test_codes_and_scales_are_bit_identical_to_single_device(traced, name, spec):
    """Also with stochastic rounding."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((1024, 1024)) * np.geomspace(0.01, 100, 1024), jnp.float32)
    casts, key = outputs_of(RECIPES[name], x), jax.random.key(5)

    def run(x, key):
        return [run_casts(x, outputs, arguments_of(cast, key)).arrays for outputs, cast in casts]

    expected = jax.jit(run)(x, key)
    traced.casts.clear()
    found = jax.jit(run)(jax.device_put(x, NamedSharding(mesh, spec)), key)
    assert (1024 * 1024 // 8) in {np.prod(shape) for shape in traced.casts}
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("spec", [P("a", "b"), P(None, ("a", "b"))], ids=str)
def test_shards_subtract_their_part_of_a_mean(traced, spec):
    """The mean has one number per column, and is sharded as columns are."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((64, 256)), jnp.float32)
    mean = jnp.arange(256, dtype=jnp.float32)[None]
    cast = ResolvedCast.on(sd.Cast("mxfp8", subtract_mean=True), OperandDims("ab", "a", "b"))
    outputs = (CastOutput(cast.spec(x.shape, x.dtype), None, 1),)

    def run(x, mean):
        return run_casts(x, outputs, CastArguments(mean=mean)).arrays

    expected = jax.jit(run)(x, mean)
    traced.casts.clear()
    found = jax.jit(run)(jax.device_put(x, NamedSharding(mesh, spec)), mean)
    assert {np.prod(shape) for shape in traced.casts} >= {x.size // 8}
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_outer_product_is_added_to_a_partitioned_matmul(traced):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    rng = np.random.default_rng(3)
    lhs, rhs = (jnp.asarray(rng.integers(-4, 5, (64, 64)), jnp.float32) for _ in range(2))
    bias = OuterProduct(*(jnp.asarray(rng.integers(-4, 5, 64), jnp.float32) for _ in range(2)))

    @jax.jit
    def run(lhs, rhs, bias):
        q = [sd.quantize(x, "mxfp8", axis=axis) for x, axis in ((lhs, 1), (rhs, 0))]
        return contract(Contraction("mk", "kn", "mn"), *q, bias=bias, preferred_element_type=jnp.bfloat16)

    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in ((lhs, P("a", "b")), (rhs, P("b", None)))]
    found = run(*placed, bias)
    assert traced.matmuls
    exact = np.asarray(lhs) @ np.asarray(rhs) + np.outer(*bias)  # integers that float32 represents
    np.testing.assert_array_equal(found, exact.astype(jnp.bfloat16))


@pytest.mark.optimized  # see `marks`
def test_stochastic_rounding_of_noncontiguous_rows_is_bit_identical_to_single_device(traced):
    """Rows that are not contiguous in the matrix are all-gathered, because random numbers are drawn from one offset."""
    layout, recipe = ALL_LAYOUTS["batch and sequence"], RECIPES["nvfp4"]
    found, _ = jax.jit(step(recipe))(arrays().on(layout, layout.mesh(AxisType.Auto)), {})
    require_same("nvfp4", found, {})


def fsdp_and_tensor_parallel():
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    rng = np.random.default_rng(2)

    def place(shape, *spec):
        return jax.device_put(jnp.asarray(rng.standard_normal(shape), jnp.float32), NamedSharding(mesh, P(*spec)))

    return mesh, place((8, 128, 512), "fsdp"), place((512, 512), "fsdp", "tp")


def test_operands_are_all_gathered_as_codes_and_gradients_reduce_scattered(traced):
    _, x, w = fsdp_and_tensor_parallel()

    def update(w, x):
        gradient = jax.grad(lambda w: jnp.sum(train.dense(x, w, recipe="int8_block", key=jax.random.key(0)) ** 2))(w)
        return w - gradient

    text = jax.jit(update, out_shardings=w.sharding).lower(w, x).compile().as_text()
    gathered = re.findall(r"= (\w+)\[([\d,]*)\]\S* all-gather\(", text)
    assert gathered == [("f32", "256,4"), ("s8", "256,512")]  # scales of 128 codes, and codes
    assert {lhs for lhs, _ in traced.matmuls} >= {(256, 512)}  # a quarter of the tokens, all of the inputs
    assert len(re.findall(r" reduce-scatter\(", text)) == 1, "partial results of dw are reduce-scattered"


def test_sequence_shards_are_all_gathered_as_codes(traced):
    """x is sharded along tokens and the result along features, over the same mesh axis."""
    mesh, x, w = fsdp_and_tensor_parallel()
    x = jax.device_put(x, NamedSharding(mesh, P("fsdp", "tp")))
    out = NamedSharding(mesh, P("fsdp", None, "tp"))
    text = jax.jit(lambda x, w: train.dense(x, w, recipe="int8"), out_shardings=out).lower(x, w).compile().as_text()
    gathered = re.findall(r"= (\w+)\[([\d,]*)\]\S* all-gather\(", text)
    assert sorted(gathered)[-1] == ("s8", "256,512")  # a quarter of the batch with all of its tokens
    sizes = [np.prod([int(n) for n in shape.split(",")]) for dtype, shape in gathered if dtype != "s8"]
    assert all(size <= 1024 for size in sizes), gathered  # a scale for each row or column


def test_shardings_that_cut_blocks_are_all_gathered(traced):
    """XLA may choose shards of 64 elements, which cut blocks of 128: not an error of the caller."""
    mesh = jax.make_mesh((8,), ("tp",), axis_types=(AxisType.Auto,))
    x, w = (jnp.asarray(np.random.default_rng(3).standard_normal(s), jnp.float32) for s in ((256, 512), (512, 256)))
    expected = jax.jit(lambda x, w: train.dense(x, w, recipe="fp8_block"))(x, w)
    traced.casts.clear()
    x, w = jax.device_put(x, NamedSharding(mesh, P(None, "tp"))), jax.device_put(w, NamedSharding(mesh, P("tp")))
    found = jax.jit(lambda x, w: train.dense(x, w, recipe="fp8_block"))(x, w)
    assert (256, 64) not in traced.casts
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block"])
@pytest.mark.parametrize("sharded", [P("a"), P(None, "a")], ids=["examples", "rows"])
def test_vmap_casts_every_example_independently(traced, recipe, sharded):
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    x, w = (jnp.asarray(np.random.default_rng(4).standard_normal(s), jnp.float32) for s in ((4, 512, 256), (256, 128)))
    x = x * jnp.geomspace(1, 1000, 4)[:, None, None]

    def mapped(x, w):
        return jax.vmap(lambda x: train.dense(x, w, recipe=recipe))(x)

    expected = jnp.stack([train.dense(each, w, recipe=recipe) for each in x])
    traced.casts.clear()
    found = jax.jit(mapped)(jax.device_put(x, NamedSharding(mesh, sharded)), w)
    np.testing.assert_array_equal(found, expected)
    if sharded == P(None, "a"):
        assert (128, 256) in traced.casts


def test_sharding_constraints_inside_jit_partition_kernels(traced):
    """The arguments are on one device; with_sharding_constraint shards them."""
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(AxisType.Auto,))
    x, w = jnp.ones((1024, 256)), jnp.ones((256, 128))

    @jax.jit
    def f(x, w):
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("dp")))
        return train.dense(x, w, recipe="fp8_current")

    with jax.set_mesh(mesh):
        y = f(x, w)
    assert (128, 256) in traced.casts
    np.testing.assert_array_equal(y, jnp.full((1024, 128), 256.0))


def test_the_last_block_of_an_axis_may_be_short(traced):
    """30 blocks of 16, of which the last has one element."""
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(AxisType.Auto,))
    x, w = (jnp.asarray(np.random.default_rng(6).standard_normal(s), jnp.float32) for s in ((256, 465), (465, 128)))
    run = jax.jit(lambda x, w: train.dense(x, w, recipe="nvfp4"))
    expected = run(x, w)
    found = run(jax.device_put(x, NamedSharding(mesh, P("dp"))), w)
    assert (32, 465) in traced.casts
    np.testing.assert_array_equal(found, expected)


def test_rematerialised_layers_match_those_that_save_residuals(traced):
    _, x, w = fsdp_and_tensor_parallel()

    def layer(x, w):
        return jax.nn.relu(train.dense(x, w, recipe="fp8_block"))

    def gradient(layer):
        def loss(w, x):
            return jnp.sum(jax.lax.scan(lambda x, _: (layer(x, w), None), x, length=2)[0])

        return jax.jit(jax.grad(loss))(w, x)

    np.testing.assert_array_equal(gradient(jax.checkpoint(layer)), gradient(layer))


def test_explain_says_that_kernels_run_on_shards(traced):
    _, x, w = fsdp_and_tensor_parallel()
    text = sd.explain(train.dense, x, w, recipe="fp8_current")
    assert "selected: an opaque cast; each of 8 devices runs it on its shards" in text
    sharded = "each of 8 devices runs it on its shards, and operands are all-gathered as codes"
    assert f"selected: an opaque matmul; {sharded}" in text


def test_sizes_that_do_not_divide_have_separate_factors_in_the_sharding_rule():
    rule = propagation_rule([Leaf((96, 5), ("m", "k"))], [Leaf((96,), ("m",)), Leaf((7,), ("m",)), Leaf((), ())])
    assert rule == ("l0_0 l1_0 -> l0_0, own0, ", (), {})


def test_casts_of_grouped_rows_are_partitioned_by_xla(traced):
    """They have no custom partitioning."""
    mesh, x, _ = fsdp_and_tensor_parallel()
    experts = jax.device_put(jnp.ones((2, 512, 128)), NamedSharding(mesh, P(None, "fsdp")))
    rows = x.reshape(-1, 512)
    traced.casts.clear()
    jax.jit(lambda x, w: train.ragged_dot(x, w, jnp.array([1000, 24]), recipe="fp8_current"))(rows, experts)
    assert not traced.casts
