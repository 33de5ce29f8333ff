"""TransformerEngine's tutorial on Dense layers, with sizes for CPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tables import params_of

from benchmarks import te_tutorial
from scaledot.compat import transformer_engine as te

# tests/test_dot_on_meshes.py covers every recipe on meshes; two recipes suffice to test TransformerEngine's names.
RELATED = ("Float8CurrentScaling", "Float8BlockScaling")  # to delayed scaling and MXFP8
EXHAUSTIVE = (*RELATED, "NVFP4BlockScaling")


@pytest.mark.end_to_end
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("recipe", params_of(te_tutorial.RECIPES, EXHAUSTIVE, name=lambda r: type(r).__name__))
def test_the_tutorial_passes_its_accuracy_test(recipe):
    layer = te_tutorial.Layer(recipe, te_tutorial.CPU)
    layer.compare()
    assert all(0 < error <= 1 for error in layer.errors_over_tolerance().values())


@pytest.mark.end_to_end
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("recipe", params_of(te_tutorial.RECIPES, EXHAUSTIVE, name=lambda r: type(r).__name__))
def test_the_tutorial_runs_on_four_devices(recipe, kind, capsys):
    """With DP=2 and TP=2, as in its last part: a mesh, the resources of its axes, and sharded arrays."""
    layer = te_tutorial.Layer(recipe, te_tutorial.Size(4, 64, 256, 256))
    utils, rngs = te.quickstart_jax_utils, {"sr_rng": jax.random.key(1)}
    expected = utils.create_train_step_fn(layer.quantised.apply)(layer.variables, layer.x, layer.dy, rngs)
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(kind,) * 2, devices=jax.devices()[:4])

    def put(x, *axes):
        return jax.device_put(x, NamedSharding(mesh, P(*axes)))

    with jax.set_mesh(mesh), te.global_shard_guard(te.MeshResource(dp_resource="dp", tp_resource="tp")):
        x, dy = put(layer.x, "dp"), put(layer.dy, "dp", None, "tp")
        variables = jax.tree.map(lambda leaf: put(leaf, *((None, "tp") if leaf.ndim == 2 else ())), layer.variables)
        loss, (dvariables, dx) = utils.create_train_step_fn(layer.quantised.apply)(variables, x, dy, rngs)
        ms = utils.speedometer(layer.quantised.apply, variables, x, dy, timing_iters=1, warmup_iters=1, rngs=rngs)
    assert ms > 0
    assert capsys.readouterr().out.startswith("Mean time")
    assert dx.sharding.is_equivalent_to(x.sharding, x.ndim)
    assert loss.dtype == expected[0].dtype
    for a, b in zip(jax.tree.leaves((dvariables, dx)), jax.tree.leaves(expected[1]), strict=True):
        a, b = (np.asarray(each, np.float32) for each in (a, b))
        assert np.linalg.norm(a - b) <= 2.0**-8 * np.linalg.norm(b)  # order of accumulation, rounded to bfloat16


@pytest.mark.usefixtures("standard_promotion")
def test_the_tutorial_has_parameters_and_fp8_collections():
    layer = te_tutorial.Layer(te.DelayedScaling(amax_history_len=8), te_tutorial.CPU)
    collections = layer.variables
    assert set(collections) == {"params", te.NVTE_FP8_COLLECTION_NAME}
    (held,) = collections[te.NVTE_FP8_COLLECTION_NAME].values()
    assert jax.tree.map(jnp.shape, held) == {
        f"{tensor}_{kind}": shape
        for tensor in ("x", "kernel", "grad")
        for kind, shape in (("scale", (1,)), ("amax_history", (8,)))
    }
    for stateless in te_tutorial.RECIPES[1:]:
        assert set(te_tutorial.Layer(stateless, te_tutorial.CPU).variables) == {"params"}


@pytest.mark.usefixtures("standard_promotion")
def test_the_speedometer_prints_and_returns_milliseconds(capsys):
    times = te_tutorial.Layer(te.MXFP8BlockScaling(), te_tutorial.Size(1, 8, 32, 16)).time(2)
    printed = [float(line.split()[2]) for line in capsys.readouterr().out.splitlines()]
    assert printed == list(times.values())
    assert all(ms > 0 for ms in printed)
    with pytest.raises(ValueError, match="a recipe is an argument"):
        te.quickstart_jax_utils.create_train_step_fn(lambda w, x: x @ w, {"enabled": True})


@pytest.mark.usefixtures("standard_promotion")
def test_compare_fwd_bwd_detects_a_difference():
    layer = te_tutorial.Layer(te.MXFP8BlockScaling(), te_tutorial.Size(1, 8, 32, 16))
    wrong = {"params": jax.tree.map(lambda w: w + 1, layer.plain_variables["params"])}
    with pytest.raises(AssertionError, match="result differs"):
        te.quickstart_jax_utils.compare_fwd_bwd(
            layer.plain.apply, layer.plain_variables, layer.plain.apply, wrong, input=layer.x, output_grad=layer.dy
        )
