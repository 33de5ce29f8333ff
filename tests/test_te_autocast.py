"""`compat.transformer_engine.autocast` and the queries of `quantize.helper`."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data import normal
from flax import linen as nn
from flax.core import FrozenDict

from scaledot import train
from scaledot.compat import transformer_engine as te
from scaledot.compat.transformer_engine import flax as te_flax
from scaledot.compat.transformer_engine.quantize import ScalingMode, TensorSource, helper

X, W = normal(0, (8, 32)), normal(1, (32, 16))
MXFP8, CURRENT = te.MXFP8BlockScaling(), te.Float8CurrentScaling()


class Projection(te_flax.module.TransformerEngineBase):
    recipe: object = None

    @nn.compact
    def __call__(self, x, w):
        return te.dense.dense(x, w, quantizer_set=self.generate_quantizer_set(fp8_recipe=self.recipe))


def expected(recipe):
    return train.dense(X, W, recipe=recipe) if recipe else X @ W


@pytest.mark.jax_versions
def test_a_jitted_function_is_traced_once_per_recipe():
    traces = []

    @jax.jit
    def project(x, w):
        traces.append(te.quantize.get_global_quantize_recipe())
        return Projection().apply({}, x, w)

    for _ in range(2):
        for recipe, name in ((MXFP8, "mxfp8"), (CURRENT, "fp8_current")):
            with te.autocast(enabled=True, recipe=recipe):
                np.testing.assert_array_equal(project(X, W), expected(name))
        np.testing.assert_array_equal(project(X, W), expected(None))
    assert traces == [MXFP8, CURRENT, None]


def test_the_recipe_of_an_argument_takes_precedence():
    with te.autocast(enabled=True, recipe=CURRENT):
        np.testing.assert_array_equal(Projection(MXFP8).apply({}, X, W), expected("mxfp8"))


def test_the_innermost_autocast_applies():
    with te.autocast(enabled=True, recipe=CURRENT):
        with te.autocast(enabled=True, recipe=MXFP8):
            assert te.quantize.get_global_quantize_recipe() == MXFP8
        with te.autocast(enabled=False, recipe=MXFP8):
            assert te.quantize.get_global_quantize_recipe() is None
        assert te.quantize.get_global_quantize_recipe() == CURRENT
    with te.autocast(enabled=True):
        assert te.quantize.get_global_quantize_recipe() == te.DelayedScaling()
    assert te.quantize.get_global_quantize_recipe() is None


def test_other_threads_have_no_recipe():
    found = []
    with te.autocast(enabled=True, recipe=MXFP8):
        thread = threading.Thread(target=lambda: found.append(te.quantize.get_global_quantize_recipe()))
        thread.start()
        thread.join()
    assert found == [None]


def test_an_exception_ends_the_context():
    with pytest.raises(KeyError), te.autocast(enabled=True, recipe=MXFP8):
        raise KeyError
    assert te.quantize.get_global_quantize_recipe() is None


def test_hooks_without_a_recipe_take_that_of_autocast():
    layer = nn.Dense(16, dot_general_cls=te_flax.make_dot_general_cls(None))
    variables = {"params": {"kernel": W, "bias": jnp.zeros(16)}}
    experts, sizes = te_flax.make_grouped_dense_cls(None), jnp.array([2, 6])
    kernels = normal(2, (2, 32, 16))
    with te.autocast(enabled=True, recipe=MXFP8):
        np.testing.assert_array_equal(layer.apply(variables, X), expected("mxfp8"))
        grouped = experts.apply({}, X, kernels, sizes)
    np.testing.assert_array_equal(layer.apply(variables, X), expected(None))
    np.testing.assert_array_equal(grouped, train.ragged_dot(X, kernels, sizes, recipe="mxfp8"))
    np.testing.assert_array_equal(experts.apply({}, X, kernels, sizes), jax.lax.ragged_dot(X, kernels, sizes))
    with te.autocast(enabled=True):
        state = layer.init(jax.random.key(0), X)["_overwrite_with_gradient"]
    assert sorted(state["DotGeneral_0"])[:2] == ["grad_amax_history", "grad_scale"]


def test_quantizer_sets_without_a_recipe_take_that_of_autocast():
    with te.autocast(enabled=True, recipe=CURRENT):
        quantizers = te.QuantizerFactory.create_set()
        by_mode = te.QuantizerFactory.create_set(scaling_mode=ScalingMode.NO_SCALING)
    assert quantizers.x.scaling_mode is ScalingMode.CURRENT_TENSOR_SCALING
    assert by_mode.x is None
    assert te.QuantizerFactory.create_set().x is None


def test_a_mesh_resource_is_that_of_the_guard():
    resource = te.MeshResource(dp_resource="data")
    with te.autocast(mesh_resource=resource):
        assert te.sharding.global_mesh_resource() == resource
        with te.autocast(enabled=True):
            assert te.sharding.global_mesh_resource() == resource
    assert te.sharding.global_mesh_resource() == te.MeshResource()


def test_deprecated_names_warn():
    with pytest.warns(DeprecationWarning, match="use autocast"), te.fp8_autocast(enabled=True, fp8_recipe=MXFP8):
        assert te.quantize.get_global_quantize_recipe() == MXFP8
    with pytest.warns(DeprecationWarning, match="is_scaling_mode_supported"):
        assert helper.is_fp8_available(ScalingMode.NVFP4_1D_SCALING) == (True, "")


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: te.autocast(recipe=8).__enter__(), TypeError, "MXFP8BlockScaling"),
        (lambda: te.autocast(mesh_resource="data").__enter__(), TypeError, "MeshResource"),
        (lambda: te.update_collections({}, [1]), TypeError, "`original` must be a dict"),
        (lambda: helper.get_quantization_recipe("FP9"), ValueError, "one of DelayedScaling, .*, not 'FP9'"),
    ],
)
def test_bad_input_is_explained(call, error, words):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize("kind", [dict, FrozenDict])
def test_updated_collections_have_the_type_of_the_original(kind):
    updated = te.update_collections({"state": 2}, kind({"params": 1, "state": 0}))
    assert isinstance(updated, kind)
    assert updated == kind({"params": 1, "state": 2})


def test_every_recipe_and_mode_is_supported():
    for recipe in helper.get_supported_quantization_recipes():
        name = type(recipe).__name__
        assert helper.get_quantization_recipe(name) == recipe
        assert helper.is_quantize_recipe_supported(name) == (True, "")
    assert set(helper.get_supported_scaling_modes()) == set(ScalingMode) - {ScalingMode.NO_SCALING}


def test_the_compute_capability_is_that_of_the_device(monkeypatch):
    assert te.quantize.get_device_compute_capability() == 0  # a CPU

    class Device:
        def __init__(self, capability):
            self.compute_capability = capability

    monkeypatch.setattr(jax, "local_devices", lambda: [Device("9.0"), Device("10.3"), Device("gfx942")])
    assert [te.quantize.get_device_compute_capability(i) for i in range(3)] == [90, 103, 0]


@pytest.mark.parametrize(
    ("recipe", "fields"),
    [
        (
            te.DelayedScaling(margin=2, amax_history_len=8, amax_compute_algo="most_recent"),
            {"MARGIN": 2, "AMAX_HISTORY_LEN": 8, "BWD_DTYPE": jnp.float8_e5m2, "FWD_DTYPE": jnp.float8_e4m3fn},
        ),
        (MXFP8, {"MARGIN": 0, "AMAX_HISTORY_LEN": 0, "BWD_DTYPE": jnp.float8_e4m3fn, "DISABLE_RHT": True}),
        (
            te.NVFP4BlockScaling(disable_rht=True),
            {"DISABLE_RHT": True, "DISABLE_STOCHASTIC_ROUNDING": False, "DISABLE_2D_QUANTIZATION": False},
        ),
        (
            te.NVFP4BlockScaling(disable_stochastic_rounding=True, disable_2d_quantization=True),
            {"DISABLE_RHT": False, "DISABLE_STOCHASTIC_ROUNDING": True, "DISABLE_2D_QUANTIZATION": True},
        ),
        (None, {"FWD_DTYPE": None, "BWD_DTYPE": None}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_config_has_the_settings_of_its_recipe(recipe, fields):
    config = te.quantize.get_quantize_config_with_recipe(recipe)
    assert {name: getattr(config, name) for name in fields} == fields
    assert config.is_fp8_enabled() == (recipe is not None)
    key = jax.random.key(0) if recipe == te.NVFP4BlockScaling(disable_rht=True) else None
    quantizers = te.QuantizerFactory.create_set(fp8_recipe=recipe, stochastic_rounding_rng_state=key)
    for source, quantizer in zip(TensorSource, (quantizers.x, quantizers.kernel, quantizers.dgrad), strict=True):
        mode = ScalingMode.NO_SCALING if quantizer is None else quantizer.scaling_mode
        assert config.get_scaling_mode(source) is mode


def test_the_algorithm_of_delayed_scaling_is_an_enum():
    config = te.quantize.get_quantize_config_with_recipe(te.DelayedScaling(amax_compute_algo="most_recent"))
    assert config.AMAX_COMPUTE_ALGO.value == "most_recent"
