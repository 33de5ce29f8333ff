"""Training steps with the Hopper kernels, compared with XLA's in JAX's interpreter."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data import normal
from hopper import needs_mosaic
from tables import params_of

import scaledot as sd
from scaledot import train
from scaledot.kernels.hopper import (
    cast_8bit,
    cast_four_bit,
    cast_microscaled,
    support,
)

pytestmark = pytest.mark.jax_versions


RECIPES = {
    "fp8_current": "xla_codes",
    "fp8_delayed": "xla_codes",
    "fp8_block": "xla_codes",
    "mxfp8": "xla_upcast",
    "nvfp4": "xla_upcast",
    "int8_block": "xla_integer",
    "nvfp4_plus": "xla_upcast",
    "if4": "xla_upcast",
    "quartet_ii": "xla_upcast",
}


# Tokens, inputs and outputs of a layer, multiples of the rotation size.
ROTATED_SIZES = {
    **dict.fromkeys(("nvfp4", "int8_block"), (32, 80, 40)),
    **dict.fromkeys(("nvfp4_plus", "if4", "quartet_ii"), (128,) * 3),
}


def step(recipe: str | sd.Recipe, kernel: str | None, sizes: tuple[int, int, int] = (30, 72, 40)):
    """Returns the result, gradients and next state of a layer whose sizes are not multiples of a tile."""
    tokens, inputs, outputs = sizes
    batch = 3 if tokens < 128 else 1  # interpreted kernels are slow
    x, w = normal(0, (batch, tokens, inputs), jnp.bfloat16), normal(1, (inputs, outputs))
    dy = normal(2, (batch, tokens, outputs), jnp.bfloat16)
    state = sd.init_state(recipe)

    def loss(x, w, b, state):
        key = jax.random.key(7)
        y = train.dense(x, w, b, recipe=recipe, state=state or None, key=key, kernel=kernel)
        y = y[0] if state else y
        return jnp.vdot(y, dy).astype(jnp.float32), y

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True))
    (_, y), gradients = step(x, w, normal(3, (outputs,)), state)
    return y, gradients


@needs_mosaic
@pytest.mark.parametrize("recipe", params_of(RECIPES, ("fp8_current", "mxfp8", "if4", "quartet_ii")))
def test_a_training_step_agrees_with_the_reference(hopper, monkeypatch, recipe):
    casts = []
    for module in (cast_8bit, cast_microscaled, cast_four_bit):
        monkeypatch.setattr(
            module, "run", lambda *arguments, run=module.run: casts.append(arguments) or run(*arguments)
        )
    jax.clear_caches()  # so that the step is traced again
    sizes = ROTATED_SIZES.get(recipe, (30, 72, 40))
    found = step(recipe, None, sizes)
    # x and w of Quartet II are cast again for the backward pass.
    assert len(casts) == (5 if recipe == "quartet_ii" else 3), "a tensor was cast by XLA"
    expected = step(recipe, RECIPES[recipe], sizes)
    for path, leaf in jax.tree_util.tree_leaves_with_path(expected):
        other = dict(jax.tree_util.tree_leaves_with_path(found))[path]
        assert other.dtype == leaf.dtype
        assert other.shape == leaf.shape
        # Codes are equal; float32 accumulation in another order may change a bfloat16 result by one ulp.
        np.testing.assert_allclose(
            np.asarray(other, np.float32), np.asarray(leaf, np.float32), rtol=2.0**-7, atol=1e-5, err_msg=str(path)
        )


def stochastic_recipe(cast: sd.Cast, weight_cast: sd.Cast) -> sd.Recipe:
    """Returns a recipe with stochastic rounding of gradients."""
    gradient = dataclasses.replace(cast, rounding="stochastic")
    gemms = sd.Gemm(cast, weight_cast), sd.Gemm(gradient, weight_cast), sd.Gemm(cast, gradient)
    return sd.Recipe("stochastic", *gemms)


@needs_mosaic
@pytest.mark.parametrize(
    "blocks", [pytest.param((None, None), marks=pytest.mark.exhaustive), ((1, 128), (128, 128))], ids=str
)
def test_gradients_with_stochastic_rounding_agree_with_the_reference(hopper, blocks):
    recipe = stochastic_recipe(*(sd.Cast("fp8_e4m3", block) for block in blocks))
    sizes = (50, 72, 40) if blocks[0] is None else (50, 300, 200)  # more than one block along every contracting dim
    found, expected = step(recipe, None, sizes), step(recipe, "xla_codes", sizes)
    for other, leaf in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(other, np.float32), np.asarray(leaf, np.float32), rtol=2.0**-7, atol=1e-5)


@needs_mosaic
@pytest.mark.parametrize("recipe", params_of(RECIPES, ("fp8_current", "mxfp8", "if4", "quartet_ii")))
def test_programs_on_a_gpu_machine_also_have_the_xla_kernels(monkeypatch, recipe):
    """They run if arrays are placed on the CPU, and must take operands in the layouts of the Hopper kernels."""
    monkeypatch.setattr(support, "mesh_reason", lambda: None)
    monkeypatch.setattr(support, "sm_count", lambda: 132)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    jaxpr = str(jax.make_jaxpr(lambda: step(recipe, None))())
    assert "call_exported" in jaxpr
    assert "platform_index" in jaxpr


@needs_mosaic
def test_residuals_are_codes(hopper):
    bits = {"fp8_current": 8, "mxfp8": 8, "nvfp4": 4, "int8_block": 8}
    for recipe, each in bits.items():
        x, w = normal(0, (64, 512), jnp.bfloat16), normal(1, (512, 512))

        def backward(x, w, recipe=recipe):
            return jax.vjp(lambda x, w: train.dense(x, w, recipe=recipe, key=jax.random.key(0)), x, w)[1]

        residuals = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(backward, x, w)))
        codes = (x.size + w.size) * each // 8
        assert codes <= residuals < 1.3 * codes, recipe
