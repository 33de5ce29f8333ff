"""TransformerEngine's Dense tutorial, of a size for CPUs."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import te_tutorial
from scaledot.compat import transformer_engine as te


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("recipe", te_tutorial.RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_the_tutorial_passes_its_own_accuracy_test(recipe):
    layer = te_tutorial.Layer(recipe, te_tutorial.CPU)
    layer.compare()
    assert all(0 < part <= 1 for part in layer.worst().values())


@pytest.mark.usefixtures("standard_promotion")
def test_the_tutorials_variables():
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
def test_comparing_finds_a_difference():
    layer = te_tutorial.Layer(te.MXFP8BlockScaling(), te_tutorial.Size(1, 8, 32, 16))
    wrong = {"params": jax.tree.map(lambda w: w + 1, layer.plain_variables["params"])}
    with pytest.raises(AssertionError, match="result differs"):
        te.quickstart_jax_utils.compare_fwd_bwd(
            layer.plain.apply, layer.plain_variables, layer.plain.apply, wrong, input=layer.x, output_grad=layer.dy
        )
