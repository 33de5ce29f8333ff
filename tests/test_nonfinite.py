"""NaN and infinities in training propagate to the results of every matmul that uses them, and to nothing else.

`quantize` saturates them, so that one bad element changes no scale. A training step must propagate them: loss scaling
and gradient guards skip a step by its non-finite gradients.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data import normal
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from tables import EACH_RECIPE
from training import KEY, SHORT_HISTORY, conv_general_dilated, dense, einsum, ragged_dot, vjp_of

import scaledot as sd
from scaledot.formats import FORMATS, Format
from scaledot.recipes import RECIPES, Cast, Gemm, Recipe
from scaledot.train.resolved_cast import OperandDims, ResolvedCast

BAD = (np.nan, np.inf, -np.inf)
ROWS, INPUTS, OUTPUTS = 32, 128, 128
ROW, COLUMN = 3, 5  # where the bad element is


def finite(x) -> np.ndarray:
    return np.isfinite(np.asarray(x, np.float32))


def layer(recipe, apply=dense, **options):
    """A jitted function of x, w, b and g that returns the result, the gradients and the next state of a layer."""
    state = sd.init_state(recipe)

    @jax.jit
    def run(x, w, b, g):
        def forward(x, w, b, state):
            y = apply(x, w, b, recipe=recipe, state=state or None, key=KEY, **options)
            return y if state else (y, state)

        (_, after), vjp = primal = jax.vjp(forward, x, w, b, state)
        dx, dw, db, next_state = vjp((g, jax.tree.map(jnp.zeros_like, after)))
        return {"y": primal[0][0], "dx": dx, "dw": dw, "db": db}, next_state

    return run


def with_element(tensors: dict[str, jax.Array], name: str, bad: float, at=(ROW, COLUMN)) -> dict[str, jax.Array]:
    return tensors | {name: tensors[name].at[at].set(bad)}


@pytest.mark.parametrize("recipe", EACH_RECIPE)
def test_nonfinite_elements_propagate_to_the_results_that_use_them(recipe):
    run = layer(recipe)
    shapes = {"x": (ROWS, INPUTS), "w": (INPUTS, OUTPUTS), "b": (OUTPUTS,), "g": (ROWS, OUTPUTS)}
    tensors = {name: normal(i, shape) for i, (name, shape) in enumerate(shapes.items())}
    affected = {  # the part of each result that uses the bad element of each tensor
        "x": {"y": np.s_[ROW], "dw": np.s_[COLUMN]},
        "w": {"y": np.s_[:, COLUMN], "dx": np.s_[:, ROW]},
        "g": {"dx": np.s_[ROW], "dw": np.s_[:, COLUMN], "db": np.s_[COLUMN]},
    }
    for (tensor, parts), bad in itertools.product(affected.items(), BAD):
        results, state = run(**with_element(tensors, tensor, bad))
        for name, values in results.items():
            if name in parts:
                assert not finite(values[parts[name]]).any(), f"{bad} in {tensor} does not propagate to {name}"
            else:
                assert finite(values).all(), f"{bad} in {tensor} propagates to {name}"
        # Results of other tokens do not use the bad element, unless a mean over tokens is subtracted.
        if tensor != "w" and not RECIPES[recipe].mean_subtracted:
            others = np.delete(results["y" if tensor == "x" else "dx"], ROW, axis=0)
            assert finite(others).all(), f"{bad} in {tensor} propagates to other rows"
        assert all(finite(leaf).all() for leaf in jax.tree.leaves(state)), f"{bad} in {tensor} is in the amax history"


CASTS = {name: Cast(format) for name, format in FORMATS.items()} | {
    "fp8_e4m3 1x32": Cast("fp8_e4m3", (1, 32)),
    "fp8_e4m3 16x16": Cast("fp8_e4m3", (16, 16)),
    "fp8_e4m3 pow2 per channel": Cast(dataclasses.replace(FORMATS["fp8_e4m3"], pow2=True), (1, 0)),
    "int8 per tensor": Cast("int8", (0, 0)),
    "int8 minmax": Cast("int8", calibration="minmax"),
    "int8 fixed": Cast("int8", calibration="fixed,3"),
    "int4 clipped": Cast("int4", (1, 32), calibration="absmax,0.5"),
    "int4 mse": Cast("int4", (1, 32), calibration="mse"),
    "mxfp8 floor": Cast(dataclasses.replace(FORMATS["mxfp8"], rule="floor")),
    "nvfp4 16x16": Cast("nvfp4", (16, 16)),
    "nvfp4 rotated": Cast("nvfp4", rotation=sd.Hadamard()),
    "fp8_e5m2 with a multiplier": Cast("fp8_e5m2"),
    "fp4 with a multiplier": Cast(Format("fp4", "float4_e2m1fn")),
}


@pytest.mark.parametrize("name", CASTS)
def test_training_casts_of_nonfinite_elements_give_nan_blocks(name):
    """The block that contains the element is NaN; all other codes and scales are unaffected."""
    cast = CASTS[name]
    resolved = ResolvedCast.on(cast, OperandDims("mk", "m", "k"))
    multiplier = jnp.float32(2) if "multiplier" in name else None
    clean = normal(0, (32, 128)).at[ROW, COLUMN].set(0)
    quantize = jax.jit(lambda x: resolved.quantize(x, multiplier))
    expected = quantize(clean)
    rows, columns = (b or size for b, size in zip(cast.block_2d, clean.shape, strict=True))
    first = ROW // rows * rows, COLUMN // columns * columns
    block = np.s_[first[0] : first[0] + rows, first[1] : first[1] + columns]
    in_codes = cast.is_per_tensor and cast.format.bits == 8 and cast.format.is_float
    where = np.s_[ROW, COLUMN] if in_codes else block
    for bad in BAD:
        q = quantize(clean.at[ROW, COLUMN].set(bad))
        values, others = (np.array(sd.dequantize(dataclasses.replace(each, rotation=None))) for each in (q, expected))
        assert np.isnan(values[where]).all()
        values[where] = others[where] = 0
        np.testing.assert_array_equal(values, others)
        if q.tensor_scale is not None:
            assert q.tensor_scale == expected.tensor_scale


@pytest.mark.parametrize("recipe", ["int8", SHORT_HISTORY], ids=["int8", "fp8_delayed"])
def test_nonfinite_elements_propagate_within_their_group(recipe):
    """Not to other groups, one of which is empty; and non-finite rows of no group are ignored."""
    sizes = jnp.array([10, 0, 16])

    def apply(x, w, b, **options):
        return ragged_dot(x, w, sizes, b, **options)

    run = layer(recipe, apply)
    shapes = {"x": (ROWS, 48), "w": (3, 48, 16), "b": (3, 16), "g": (ROWS, 16)}
    tensors = {name: normal(i, shape) for i, (name, shape) in enumerate(shapes.items())}
    for tensor, bad in itertools.product("xg", BAD):
        clean = with_element(tensors, tensor, bad, at=(30, COLUMN))  # in a row of no group
        results, _ = run(**clean)
        assert all(finite(values).all() for values in results.values())
        results, state = run(**with_element(clean, tensor, bad, at=(20, COLUMN)))
        rows, column = results["y" if tensor == "x" else "dx"], np.s_[COLUMN] if tensor == "x" else np.s_[:, COLUMN]
        assert not finite(rows[20]).any()
        assert not finite(results["dw"][2][column]).any()
        assert finite(rows[:10]).all()
        assert finite(results["dw"][:2]).all()
        assert all(finite(leaf).all() for leaf in jax.tree.leaves(state))


def test_nonfinite_elements_propagate_through_convolutions():
    @jax.jit
    def run(x, w, g):
        numbers = ("NWC", "WIO", "NWC")
        y, vjp = jax.vjp(
            lambda x, w: conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=numbers, recipe="int8", key=KEY),
            x,
            w,
        )
        return y, *vjp(g)

    x, w, g = normal(0, (4, 6, 8)), normal(1, (3, 8, 16)), normal(2, (4, 6, 16))
    for bad in BAD:
        y, dx, dw = run(x.at[1, 2, 3].set(bad), w, g)
        assert not finite(y[1, 1:4]).any()
        assert not finite(dw[:, 3]).any()
        assert finite(dx).all()
        y, dx, dw = run(x, w, g.at[1, 2, 3].set(bad))
        assert not finite(dx[1, 1:4]).any()
        assert not finite(dw[..., 3]).any()
        assert finite(y).all()


def test_nonfinite_elements_propagate_within_their_batch_of_matmuls():
    x, w, g = normal(0, (2, 4, 32)), normal(1, (2, 32, 8)), normal(2, (2, 4, 8))

    @jax.jit
    def run(x, w, g):
        y, vjp = jax.vjp(lambda x, w: einsum("bmk,bkn->bmn", x, w, recipe="mxfp8"), x, w)
        return y, *vjp(g)

    for bad in BAD:
        y, dx, dw = run(x.at[1, 1, 3].set(bad), w, g.at[1, 2, 3].set(bad))
        assert not finite(y[1, 1]).any()
        assert not finite(dx[1, 2]).any()
        assert not finite(dw[1, 3]).any()
        assert not finite(dw[1, :, 3]).any()
        assert all(finite(values[0]).all() for values in (y, dx, dw))


@pytest.mark.parametrize("in_shard_map", [False, True], ids=["mesh", "shard_map"])
def test_nonfinite_elements_propagate_to_devices_that_share_a_scale(in_shard_map):
    """The contracting dim is sharded, so the scale of each row is shared by all devices."""
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    specs = sd.train.Specs(P(None, "tp"), P("tp", None), P())

    def step(x, w, g):
        y, vjp = jax.vjp(lambda x, w: dense(x, w, recipe="int8", key=KEY, specs=specs), x, w)
        return y, *vjp(g)

    if in_shard_map:
        out = (specs.y, specs.x, specs.w)
        step = jax.shard_map(step, mesh=mesh, in_specs=(specs.x, specs.w, specs.y), out_specs=out)
    x, w, g = normal(0, (8, 32)), normal(1, (32, 16)), normal(2, (8, 16))
    with jax.set_mesh(mesh):
        run = jax.jit(step)
        for bad in BAD:
            y, dx, dw = run(x.at[ROW, 20].set(bad), w, g)
            assert not finite(y[ROW]).any()
            assert finite(np.delete(y, ROW, axis=0)).all()
            assert not finite(dw[20]).any()
            assert finite(dx).all()
            y, dx, dw = run(x, w, g.at[ROW, COLUMN].set(bad))
            assert not finite(dx[ROW]).any()
            assert not finite(dw[:, COLUMN]).any()


@pytest.mark.parametrize("calibration", ["absmax,0.5", "minmax,0.5"])
def test_nonfinite_gradients_are_not_masked_where_the_scale_is_nan(calibration):
    """Straight-through gradients are zero where the forward cast clipped; a block with a NaN scale is not clipped."""
    recipe = Recipe("clipped", Gemm(Cast("int8", calibration=calibration), None))
    x, w, g = normal(0, (4, 32)), normal(1, (32, 8)), normal(2, (4, 8))
    _, dx, _ = vjp_of(lambda x, w: dense(x, w, recipe=recipe), g.at[1, 2].set(np.nan), x.at[1].set(np.nan), w)
    assert not finite(dx[1]).any()
    assert finite(np.delete(dx, 1, axis=0)).all()
