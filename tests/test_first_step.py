"""Tracing and lowering before the first step: an additional dense layer adds no distinct kernel and little work.

Steps are lowered for a Hopper GPU on a machine without one. Nothing is compiled or run. Work is counted as calls of
functions, because their number, unlike their time, is the same on every machine.
"""

import cProfile
import gc
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from hopper import lowered_for_hopper, needs_mosaic
from tables import params_of

import scaledot as sd
from scaledot import train
from scaledot.recipes import RECIPES

pytestmark = [needs_mosaic, pytest.mark.jax_versions]

WITH_KERNELS = ("fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4", "int8", "int8_block", "fp8_qat")
MAX_CALLS = 40_000  # of functions per additional layer, about 0.04 s
FEW, MANY = 4, 16
TOKENS, WIDTH = 8192, 4096


def lowered(recipe: str, layers: int, **options) -> str:
    """Returns the StableHLO text of a training step of equal layers."""
    delayed = bool(RECIPES[recipe].delayed)

    def loss(weights, states, x, key):
        for index, (w, state) in enumerate(zip(weights, states, strict=True)):
            state_argument = {"state": state} if delayed else {}
            y = train.dense(x, w, recipe=recipe, key=jax.random.fold_in(key, index), **state_argument, **options)
            x = y[0] if delayed else y
        return jnp.mean(x.astype(jnp.float32))

    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * layers
    states = [sd.init_state(recipe) if delayed else {}] * layers
    x = jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.bfloat16)
    traced = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(weights, states, x, jax.random.key(0))
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def kernel_count(text: str) -> int:
    """Returns the number of distinct kernels in StableHLO text."""
    return len(set(re.findall(r'kernel_hash = "((?:[^"\\]|\\.)*)"', text)))


def test_initialising_a_model_lowers_no_kernel(monkeypatch, standard_promotion):
    layer = nn.Dense(256, dot_general_cls=sd.linen.make_dot_general_cls("fp8_delayed"))
    x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    with lowered_for_hopper(monkeypatch):
        init = jax.jit(layer.init).trace(jax.random.key(0), x)
        variables = jax.eval_shape(layer.init, jax.random.key(0), x)
        apply = jax.jit(layer.apply).trace(variables, x)
        texts = [traced.lower(lowering_platforms=("cuda",)).as_text() for traced in (init, apply)]
    assert [kernel_count(text) > 0 for text in texts] == [False, True]
    assert set(variables) == {"params", "_overwrite_with_gradient"}


def counted(recipe: str, layers: int) -> tuple[int, str]:
    """Returns the number of calls of Python and C functions that lower a step, and its StableHLO text."""
    jax.clear_caches()
    gc.collect()  # finalisers of what earlier tests left are calls, too
    with cProfile.Profile() as profile:
        text = lowered(recipe, layers)
    return sum(entry.callcount for entry in profile.getstats()), text


# Others have the kernels of casts and matmuls of these.
@pytest.mark.parametrize("recipe", params_of(WITH_KERNELS, set(WITH_KERNELS) - {"fp8_delayed", "fp8_block", "nvfp4"}))
def test_an_additional_layer_adds_few_calls_and_no_kernel(monkeypatch, recipe):
    with lowered_for_hopper(monkeypatch):
        lowered(recipe, 2)  # work that is done once per process
        calls, text = counted(recipe, FEW)
        more_calls, more_text = counted(recipe, MANY)
    assert kernel_count(text), "no kernel was used"
    assert kernel_count(more_text) == kernel_count(text)
    assert (more_calls - calls) / (MANY - FEW) <= MAX_CALLS
