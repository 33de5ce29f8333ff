"""`compat.transformer_engine.flax`: linen modules that own quantizers, used as MaxText uses them.

MaxText subclasses TransformerEngineBase, bridges it to NNX, scans over layers, rematerialises them, and trains the
state of delayed scaling through its gradient. `Block` and `train` do the same in Flax alone.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data import normal
from flax import linen as nn
from flax import nnx
from jax import lax
from tables import params_of
from training import assert_same_bits

from scaledot import linen
from scaledot.compat import transformer_engine as te
from scaledot.compat.transformer_engine.flax.module import TransformerEngineBase
from scaledot.compat.transformer_engine.recipe import core_recipe
from scaledot.state import TENSOR_NAMES

STEPS, LAYERS, WIDTH = 4, 2, 64
# Relative difference of losses from those of unquantised training: that of MaxText's runs for NVFP4, rounded up.
RECIPES = {
    "delayed": (te.DelayedScaling(amax_history_len=16), 0.05),
    "current": (te.Float8CurrentScaling(), 0.05),
    "mxfp8": (te.MXFP8BlockScaling(), 0.05),
    "fp8_block": (te.Float8BlockScaling(), 0.05),
    "nvfp4": (te.NVFP4BlockScaling(), 0.35),
}


def te_matmul(recipe):
    """The class that MaxText creates for `dot_general_cls`."""

    class Matmul(TransformerEngineBase):
        @nn.compact
        def __call__(self, x, kernel, dims, **_):
            quantizers = self.generate_quantizer_set(quantization_checkpoint_name="quantization", fp8_recipe=recipe)
            return te.dense.dense(x, kernel, contracting_dims=dims[0], quantizer_set=quantizers)

    return Matmul


def hook(recipe):
    return linen.make_dot_general_cls(core_recipe(recipe))


class Block(nnx.Module):
    """x + gelu(x · kernel), whose matmul is a bridged linen module."""

    def __init__(self, matmul, rngs: nnx.Rngs):
        self.kernel = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (WIDTH, WIDTH)))
        self.matmul = nnx.bridge.ToNNX(matmul(), rngs=rngs)
        self.matmul.lazy_init(jnp.ones((1, WIDTH)), self.kernel[...], (((1,), (0,)), ((), ())))

    def __call__(self, x):
        return x + jax.nn.gelu(self.matmul(x, self.kernel[...], (((1,), (0,)), ((), ()))))


def train(matmul):
    """Trains scanned and rematerialised blocks; returns the losses and the final variables that are not parameters."""

    @nnx.split_rngs(splits=LAYERS)
    @nnx.vmap(in_axes=0)
    def blocks(rngs):
        return Block(matmul, rngs)

    graph, params, keys, state = nnx.split(blocks(nnx.Rngs(0)), nnx.Param, nnx.RngState, ...)
    x, y = normal(0, (32, WIDTH)), jnp.sin(normal(1, (32, WIDTH), spread=2.0))

    def loss(params, state, keys):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat(policy=jax.checkpoint_policies.save_only_these_names("quantization"))
        def forward(block, x):
            return block(x)

        return jnp.mean((forward(nnx.merge(graph, params, keys, state, copy=True), x) - y) ** 2)

    @jax.jit
    def step(params, state, keys):
        value, (gradient, state) = jax.value_and_grad(loss, argnums=(0, 1))(params, state, keys)
        return value, jax.tree.map(lambda p, g: p - 4.0 * g, params, gradient), state

    losses = []
    for i in range(STEPS):
        value, params, state = step(params, state, at_step(keys, i))
        losses.append(float(value))
    return losses, nnx.to_pure_dict(state)


def at_step(keys, step):
    """The rng streams of a step: their counters advance, their keys stay the same."""

    def advanced(leaf):
        return leaf if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf + jnp.asarray(step, leaf.dtype)

    return jax.tree.map(advanced, keys)


@functools.cache
def unquantised_losses():
    losses, state = train(te_matmul(None))
    assert not jax.tree.leaves(state)
    return losses


@pytest.mark.parametrize("name", params_of(RECIPES, ("current", "fp8_block")))  # as delayed, mxfp8
def test_quantizers_of_bridged_scanned_rematerialised_modules_train_as_the_hook_does(name):
    recipe, tolerance = RECIPES[name]
    losses, state = train(te_matmul(recipe))
    assert losses[-1] < losses[0] / 2
    np.testing.assert_allclose(losses, unquantised_losses(), rtol=tolerance)
    assert_same_bits((losses, state), train(hook(recipe)))
    if name != "delayed":
        assert not jax.tree.leaves(state)
        return
    for tensor in TENSOR_NAMES.values():
        assert state["matmul"][f"{tensor}_scale"].shape == (LAYERS, 1)
        entries = np.count_nonzero(state["matmul"][f"{tensor}_amax_history"], axis=1)
        np.testing.assert_array_equal(entries, [STEPS] * LAYERS)


def test_without_a_recipe_the_matmul_is_unquantised():
    x, w = normal(0, (4, 32)), normal(1, (32, 8))
    y = te_matmul(None)().apply({}, x, w, (((1,), (0,)), ((), ())))
    np.testing.assert_array_equal(y, lax.dot(x, w))


class Two(TransformerEngineBase):
    @nn.compact
    def __call__(self):
        first = self.generate_quantizer_set("_0", fp8_recipe=te.DelayedScaling(amax_history_len=4))
        return first, self.generate_quantizer_set("_1", "fp8_metas", fp8_recipe=te.DelayedScaling(amax_history_len=8))


def test_variables_have_the_postfix_and_collection_of_the_call():
    shapes = jax.tree.map(jnp.shape, Two().init(jax.random.key(0)))
    assert set(shapes) == {"_overwrite_with_gradient", "fp8_metas"}
    tensors = TENSOR_NAMES.values()
    assert shapes["_overwrite_with_gradient"] == {
        **{f"{t}_0_scale": (1,) for t in tensors},
        **{f"{t}_0_amax_history": (4,) for t in tensors},
    }
    assert shapes["fp8_metas"] == {
        **{f"{t}_1_scale": (1,) for t in tensors},
        **{f"{t}_1_amax_history": (8,) for t in tensors},
    }


def test_variables_are_the_state_of_the_quantizers():
    variables = Two().init(jax.random.key(0))
    variables["fp8_metas"]["kernel_1_scale"] = jnp.asarray([3.0])
    first, second = Two().apply(variables)
    assert (float(first.kernel.scale[0]), float(second.kernel.scale[0])) == (1.0, 3.0)


@pytest.mark.parametrize("stream", ["sr_rng", "params"])
def test_stochastic_rounding_draws_from_its_stream_or_from_the_default_one(stream):
    class Keyed(TransformerEngineBase):
        @nn.compact
        def __call__(self):
            return self.generate_quantizer_set(fp8_recipe=te.NVFP4BlockScaling()).key, self.make_rng("sr_rng")

    first, second = (jax.random.key_data(key) for key in Keyed().apply({}, rngs={stream: jax.random.key(1)}))
    assert not np.array_equal(first, second)
    again, _ = Keyed().apply({}, rngs={stream: jax.random.key(1)})
    np.testing.assert_array_equal(jax.random.key_data(again), first)
