"""Checkpoint policies: recomputed matmuls and casts, counted in the jaxpr, and the dtypes of saved residuals."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data import normal
from flax import linen as nn
from flax import nnx
from reference import equations
from tables import params_of

import scaledot as sd
from scaledot import train
from scaledot.recipes import RECIPES

KEY = jax.random.key(7)
POLICIES = sd.checkpoint_policies


# One recipe for each code path; others run with --all.
DEFAULT = ("fp8_current", "fp8_delayed", "fp8_block")
EACH_RECIPE = params_of(RECIPES, [name for name in RECIPES if name not in DEFAULT])
X, WS = normal(0, (64, 256), spread=0.1), [normal(1, (256, 128), spread=0.1), normal(2, (128, 256), spread=0.1)]


def block(recipe, x, ws, state=None):
    for i, w in enumerate(ws):
        if state is None:
            x = train.dense(x, w, recipe=recipe, key=jax.random.fold_in(KEY, i), precision="highest")
        else:
            x, state = train.dense(x, w, recipe=recipe, state=state, precision="highest")
        x = jnp.tanh(x)  # its gradient needs the result of the matmul
    return x


def counts(f, *args):
    """The numbers of matmuls and casts in the jaxpr of a gradient."""
    jaxpr = jax.make_jaxpr(jax.grad(lambda *args: jnp.sum(f(*args))))(*args)
    counter = Counter(
        "dot" if e.primitive.name == "dot_general" else "cast"
        for e in equations(jaxpr.jaxpr)
        if e.primitive.name == "dot_general" or e.params.get("name") == "quantize_leaves"
    )
    return counter["dot"], counter["cast"]


@pytest.mark.parametrize("recipe", EACH_RECIPE)
def test_no_matmul_is_recomputed(recipe):
    state = {"state": sd.init_state(recipe)} if recipe == "fp8_delayed" else {}
    f = functools.partial(block, recipe, **state)
    plain_dots, plain_casts = counts(f, X, WS)
    recomputed_dots, _ = counts(jax.checkpoint(f), X, WS)
    assert recomputed_dots > plain_dots
    for policy in (POLICIES.checkpoint_dots_and_quantized_gemms, POLICIES.dots_and_quantized_gemms_with_no_batch_dims):
        assert counts(jax.checkpoint(f, policy=policy), X, WS)[0] == plain_dots
    both = counts(jax.checkpoint(f, policy=POLICIES.save_quantized_residuals_and_gemms), X, WS)
    assert both == (plain_dots, plain_casts)


def test_saved_codes_are_not_quantised_again():
    """With per-tensor scales, fwd multiplies the codes that are saved."""
    f = functools.partial(block, "fp8_current")
    plain_dots, plain_casts = counts(f, X, WS)
    dots, casts = counts(jax.checkpoint(f, policy=POLICIES.save_quantized_residuals), X, WS)
    assert casts == plain_casts < counts(jax.checkpoint(f), X, WS)[1]
    assert dots > plain_dots  # tanh needs results, which are not saved


def test_residuals_saved_by_a_policy_are_codes():
    f = jax.checkpoint(functools.partial(block, "mxfp8"), policy=POLICIES.save_quantized_residuals)
    _, vjp = jax.vjp(f, X, WS)
    inputs = {id(a) for a in jax.tree.leaves((X, WS))}
    saved = [r for r in jax.tree.leaves(vjp) if id(r) not in inputs and r.size >= 64 * 128]
    assert {r.dtype.name for r in saved} == {"uint8"}


@pytest.mark.parametrize("recipe", params_of(["fp8_current", "nvfp4"], ["nvfp4"]))
def test_gradients_do_not_depend_on_the_policy(recipe):
    """jax.checkpoint applies lax.reduce_precision to saved floats, which would turn the largest float8 into NaN."""
    f = functools.partial(block, recipe)

    @functools.partial(jax.jit, static_argnums=0)
    def grads(f):
        return jax.grad(lambda x, ws: f(x, ws).sum(), argnums=(0, 1))(X, WS)

    policies = POLICIES.checkpoint_dots_and_quantized_gemms, POLICIES.save_quantized_residuals_and_gemms
    for policy in (*policies, jax.checkpoint_policies.everything_saveable):
        for a, b in zip(*(jax.tree.leaves(grads(g)) for g in (f, jax.checkpoint(f, policy=policy))), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())


def test_policies_distinguish_matmuls_with_batch_dims():
    x, w = normal(0, (2, 32, 64), spread=0.1), normal(1, (2, 64, 32), spread=0.1)
    numbers = (((2,), (1,)), ((0,), (0,)))

    def f(x, w):
        return jnp.tanh(train.dot_general(x, w, numbers, recipe="fp8_current"))

    plain, _ = counts(f, x, w)
    saved, _ = counts(jax.checkpoint(f, policy=POLICIES.checkpoint_dots_and_quantized_gemms), x, w)
    recomputed, _ = counts(jax.checkpoint(f, policy=POLICIES.dots_and_quantized_gemms_with_no_batch_dims), x, w)
    assert saved == plain < recomputed


def linen_layer(residual_name):
    layer = nn.Dense(128, dot_general_cls=sd.linen.make_dot_general_cls("fp8_current", residual_name=residual_name))
    variables = layer.init(KEY, X)
    return lambda x: layer.apply(variables, x)


def linen_model(residual_name):
    model = sd.linen.with_recipe(nn.Dense(128), "fp8_current", residual_name=residual_name)
    variables = model.init(KEY, X)
    return lambda x: model.apply(variables, x)


def nnx_model(residual_name):
    layer = nnx.Linear(256, 128, rngs=nnx.Rngs(0))
    return sd.nnx.with_recipe(layer, "fp8_current", residual_name=residual_name)


def experts(residual_name):
    matmul = sd.linen.make_grouped_dense_cls("fp8_current", residual_name=residual_name)()
    return lambda x: matmul.apply({}, x, WS[0][None], jnp.array([64]))


@pytest.mark.parametrize("layer", [linen_layer, linen_model, nnx_model, experts])
def test_residuals_have_the_name_that_a_hook_chooses(layer):
    def saved(residual_name, policy_name):
        policy = jax.checkpoint_policies.save_only_these_names(policy_name)
        matmul = layer(residual_name)
        _, vjp = jax.vjp(jax.checkpoint(lambda x: matmul(x), policy=policy), X)
        return sum(leaf.size for leaf in jax.tree.leaves(vjp) if leaf.dtype == jnp.uint8)

    codes = saved(None, "scaledot_residual")
    assert codes > 0
    assert saved("quantization", "quantization") == codes
    assert saved("quantization", "scaledot_residual") == saved(None, "quantization") < codes


def test_the_name_of_residuals_is_a_string():
    with pytest.raises(TypeError, match="`residual_name` must be a string, or None for 'scaledot_residual', not 3"):
        train.dense(X, WS[0], recipe="mxfp8", residual_name=3)
