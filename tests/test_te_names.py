"""`compat.transformer_engine`: every name exists with an example, and recipe classes map to scaledot's recipes."""

import dataclasses
import importlib
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data import normal

import scaledot as sd
from scaledot import recipes, train
from scaledot.compat import transformer_engine as te
from scaledot.compat.transformer_engine import cpp_extensions as tex
from scaledot.compat.transformer_engine import flax as te_flax
from scaledot.compat.transformer_engine.recipe import core_recipe

# Names that TransformerEngine's tutorial and its pages on quantisation and tensors import, by module.
NAMES = {
    "": """DelayedScaling Float8CurrentScaling MXFP8BlockScaling NVFP4BlockScaling Float8BlockScaling ScalingMode
        QuantizeLayout TensorUsage AbstractBaseTensor AbstractBaseTensor1x ScaledTensor NoScaleTensor ScaledTensor1x
        ScaledTensor2x GroupedScaledTensor1x ScaledTensorFactory QuantizerFactory MeshResource global_shard_guard
        with_sharding_constraint_by_logical_axes grouped_dense CollectiveOp Format
        autocast fp8_autocast update_collections""",
    "dense": "dense grouped_dense",
    "flax": """make_dot_general_cls make_grouped_dense_cls wrap_function_in_te_state_module DenseGeneral LayerNorm
        LayerNormDenseGeneral LayerNormMLP""",
    "flax.module": "TransformerEngineBase make_dot_general_cls make_grouped_dense_cls",
    "sharding": "MeshResource global_shard_guard with_sharding_constraint_by_logical_axes",
    "recipe": "DelayedScaling Float8CurrentScaling MXFP8BlockScaling NVFP4BlockScaling Float8BlockScaling Format",
    "quantize": """ScalingMode QuantizeLayout TensorUsage NoScaleTensor ScaledTensor1x ScaledTensor2x
        GroupedScaledTensor1x ScaledTensorFactory QuantizerFactory is_scaling_mode_supported autocast fp8_autocast
        get_global_quantize_recipe get_quantize_config_with_recipe get_quantization_recipe TensorSource is_fp8_available
        is_quantize_recipe_supported get_supported_scaling_modes get_supported_quantization_recipes update_collections
        get_device_compute_capability is_fp8_gemm_with_all_layouts_supported""",
    "quantize.helper": "autocast fp8_autocast update_collections get_quantization_recipe is_fp8_available",
    "layernorm": "layernorm canonicalize_norm_type",
    "activation": "activation",
    "layernorm_dense": "layernorm_dense",
    "layernorm_mlp": "layernorm_mlp",
    "quantize.tensor": "AbstractBaseTensor AbstractBaseTensor1x ScaledTensor ScaledTensor1x ScaledTensorFactory",
    "cpp_extensions": """quantize quantize_dbias grouped_quantize dequantize gemm CollectiveOp act_lu dact_lu
        quantize_dact_dbias normalization_fwd normalization_bwd layernorm_fwd layernorm_bwd rmsnorm_fwd rmsnorm_bwd""",
    "cpp_extensions.activation": "ActivationParams ClampedSwigluParams act_lu",
    "cpp_extensions.quantization": "quantize quantize_dbias grouped_quantize",
    "quickstart_jax_utils": "speedometer compare_fwd_bwd",
}


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, names in NAMES.items() for n in names.split()])
def test_every_name_exists_and_has_an_example(module, name):
    found = getattr(importlib.import_module(f"{te.__name__}.{module}".rstrip(".")), name)
    assert ">>>" in inspect.getdoc(found)


def test_checkpoint_policies_are_those_of_scaledot():
    assert te.checkpoint_policies.checkpoint_dots_and_te_gemms is (
        sd.checkpoint_policies.checkpoint_dots_and_quantized_gemms
    )
    assert te.checkpoint_policies.dots_and_te_gemms_with_no_batch_dims is (
        sd.checkpoint_policies.dots_and_quantized_gemms_with_no_batch_dims
    )


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (te.DelayedScaling(), recipes.FP8_DELAYED),
        (te.Float8CurrentScaling(), recipes.FP8_CURRENT),
        (te.MXFP8BlockScaling(), recipes.MXFP8),
        (te.NVFP4BlockScaling(), recipes.NVFP4),
        (te.Float8BlockScaling(), recipes.FP8_BLOCK),
    ],
    ids=lambda value: getattr(value, "name", type(value).__name__),
)
def test_recipe_classes_map_to_recipes(theirs, ours):
    assert theirs.core == ours
    assert te.QuantizerFactory.create_set(fp8_recipe=theirs, stochastic_rounding_rng_state=jax.random.key(0)).core == (
        dataclasses.replace(ours, name="quantizer_set")
    )


def test_current_scaling_warns_that_a_margin_has_no_effect():
    with pytest.warns(UserWarning, match="`margin` 5.0 of Float8CurrentScaling has no effect") as caught:
        recipe = te.Float8CurrentScaling(margin=5.0)
    assert caught[0].filename == __file__
    assert recipe == te.Float8CurrentScaling(margin=0)
    assert dataclasses.replace(recipe, use_power_2_scales=True).core.fwd.lhs.format.pow2


def test_options_of_recipe_classes_change_the_casts():
    delayed = te.DelayedScaling(2, amax_history_len=16, amax_compute_algo="most_recent", fp8_format=te.E4M3).core
    assert delayed.dgrad.lhs.delayed == recipes.Delayed(16, "most_recent", 2)
    assert delayed.dgrad.lhs.format.name == "fp8_e4m3"
    assert te.MXFP8BlockScaling(fp8_format=te.HYBRID).core.dgrad.lhs.format.name == "mxfp8_e5m2"
    assert te.MXFP8BlockScaling(enable_2d_quantization=True).core.fwd.rhs.block_2d == (32, 32)
    assert te.Float8CurrentScaling(use_power_2_scales=True).core.fwd.lhs.format.pow2
    assert te.Float8BlockScaling(use_f32_scales=False).core.fwd.rhs.format.pow2
    assert te.Float8BlockScaling(w_block_scaling_dim=1).core.fwd.rhs.block_2d == (1, 128)
    bare = te.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True).core
    assert {str(cast) for _, _, cast in bare.casts()} == {"nvfp4 1×16"}


def test_backward_override_computes_gradients_in_high_precision():
    assert te.MXFP8BlockScaling(backward_override="high_precision").core.dgrad == recipes.Gemm()
    assert te.MXFP8BlockScaling(backward_override="dequantized").core.wgrad is None
    x, w = normal(0, (8, 64)), normal(1, (64, 4))
    recipe = te.MXFP8BlockScaling(backward_override="dequantized").core
    dw = jax.grad(lambda w: train.dense(x, w, recipe=recipe).sum())(w)
    values = sd.dequantize(sd.quantize(x, "mxfp8"))
    np.testing.assert_allclose(dw, np.broadcast_to(values.sum(0)[:, None], w.shape), rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: te.DelayedScaling(fp8_dpa=True), "fp8_dpa.*can only be False"),
        (lambda: te.DelayedScaling(scaling_factor_compute_algo=max), "scaling_factor_compute_algo.*can only be None"),
        (lambda: te.DelayedScaling(reduce_amax=False), "reduce_amax"),
        (lambda: te.DelayedScaling(amax_compute_algo=max), "not a function"),
        (lambda: te.DelayedScaling(backward_override="dequantized"), "backward_override.*can only be None"),
        (lambda: te.DelayedScaling(fp8_format=te.Format.E5M2), "E5M2"),
        (lambda: te.MXFP8BlockScaling(margin=1), "margin"),
        (lambda: te.MXFP8BlockScaling(backward_override="fp64"), "backward_override"),
        (lambda: te.NVFP4BlockScaling(nvfp4_4over6="all"), "NVFP4_FOUR_OVER_SIX"),
        (lambda: te.Float8BlockScaling(w_block_scaling_dim=3), "w_block_scaling_dim"),
    ],
)
def test_unsupported_values_of_fields_raise_errors_that_name_the_field(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_a_recipe_must_be_an_instance():
    with pytest.raises(TypeError, match=r"pass an instance, MXFP8BlockScaling\(\)"):
        te_flax.make_dot_general_cls(te.MXFP8BlockScaling)
    with pytest.raises(TypeError, match=r"DelayedScaling\(\), .*a scaledot.Recipe or its name, not 8"):
        core_recipe(8)
    with pytest.raises(ValueError, match="mxfp8"):
        core_recipe("mxfp9")
    with pytest.raises(TypeError, match="use a subclass"):
        te.Recipe().core  # noqa: B018


@pytest.mark.parametrize("module", [te, te.quantize, tex, te_flax], ids=lambda m: m.__name__)
def test_unsupported_names_say_what_to_use_instead(module):
    for name, words in {
        "get_delayed_scaling": "get_global_quantize_recipe",
        "TransformerLayer": "LayerNormMLP",
        "NVFP4Quantizer": "create",
    }.items():
        with pytest.raises(AttributeError, match=words):
            getattr(module, name)
    with pytest.raises(AttributeError, match="no attribute 'no_such_thing'"):
        module.no_such_thing  # noqa: B018


def test_dense_is_a_module_as_in_transformer_engine():
    from scaledot.compat.transformer_engine.dense import dense

    assert inspect.ismodule(te.dense)
    assert te.dense.dense is dense
    assert te.dense.grouped_dense is te.grouped_dense
    for name in ("quantize", "recipe", "sharding", "checkpoint_policies", "cpp_extensions", "flax"):
        assert inspect.ismodule(getattr(te, name))


@pytest.mark.parametrize(
    "convert", [lambda d: d, np.dtype, lambda d: np.dtype(d).type], ids=["jnp", "numpy", "ml_dtypes"]
)
def test_compatible_dtypes_contain_scalar_types_and_dtypes(convert):
    mode = te.ScalingMode
    for scaled in (mode.DELAYED_TENSOR_SCALING, mode.CURRENT_TENSOR_SCALING, mode.MXFP8_1D_SCALING):
        dtypes = scaled.get_compatible_q_dtypes()
        assert convert(jnp.float8_e4m3fn) in dtypes
        assert convert(jnp.float8_e5m2) in dtypes
        assert convert(jnp.bfloat16) not in dtypes
        assert dtypes == {convert(jnp.float8_e4m3fn), convert(jnp.float8_e5m2)}
    assert convert(jnp.float4_e2m1fn) in mode.NVFP4_2D_SCALING.get_compatible_q_dtypes()
    plain = mode.NO_SCALING.get_compatible_q_dtypes()
    assert {convert(jnp.float16), convert(jnp.bfloat16), convert(jnp.float32)} == plain
    assert "no dtype" not in plain
