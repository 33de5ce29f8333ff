"""`compat.transformer_engine`: fields of quantizers, QuantizeMeta, and how TransformerEngine's code calls functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data import normal
from te_modes import E4M3, E5M2, KEY, assert_same_leaves, quantizer

import scaledot as sd
from scaledot.compat import transformer_engine as te
from scaledot.compat.transformer_engine import cpp_extensions as tex
from scaledot.compat.transformer_engine.quantize import QuantizeMeta, QuantizeMetaSet, ScalingMode
from scaledot.compat.transformer_engine.quantize.helper import AmaxComputeAlgo
from scaledot.compat.transformer_engine.sharding import get_mesh_axis_size


def test_the_amax_algorithm_of_a_quantizer_is_an_enum():
    q = te.QuantizerFactory.create_set(fp8_recipe=te.DelayedScaling(amax_compute_algo="most_recent")).x
    assert q.amax_compute_algo is AmaxComputeAlgo.MOST_RECENT
    assert jax.tree.map(lambda x: x, q).amax_compute_algo is AmaxComputeAlgo.MOST_RECENT
    q.amax_compute_algo = "max"
    assert (q.amax_compute_algo, q.cast().delayed.algorithm) == (AmaxComputeAlgo.MAX, "max")
    with pytest.raises(ValueError, match="`amax_compute_algo` must be 'max' or 'most_recent', not 'mean'"):
        q.amax_compute_algo = "mean"


def test_the_dtype_of_a_quantizer_can_be_assigned():
    q = quantizer(ScalingMode.CURRENT_TENSOR_SCALING)
    x = normal(0, (4, 32))
    run = jax.jit(lambda x, q: tex.quantize(x, q).rowwise)
    assert run(x, q).data.dtype == E4M3
    q.q_dtype = E5M2
    assert q.q_dtype == np.dtype(E5M2)
    assert run(x, q).data.dtype == E5M2
    np.testing.assert_array_equal(run(x, q).dequantize(), sd.dequantize(sd.quantize(x, "fp8_e5m2", block=(0, 0))))
    with pytest.raises(ValueError, match="not int8"):
        q.q_dtype = jnp.int8
    powers = te.QuantizerFactory.create_set(fp8_recipe=te.Float8CurrentScaling(use_power_2_scales=True)).x
    with pytest.raises(ValueError, match="`q_dtype` must be float8_e4m3fn, as the quantizer's `format`"):
        powers.q_dtype = E5M2


def test_quantizers_with_assigned_fields_are_pytrees():
    q = quantizer(ScalingMode.DELAYED_TENSOR_SCALING)
    q.scale = jnp.full(1, 2.0)
    leaves, structure = jax.tree.flatten(q)
    rebuilt = jax.tree.unflatten(structure, leaves)
    assert_same_leaves(rebuilt, q)
    q.q_dtype = E5M2
    assert jax.tree.structure(q) != structure
    assert rebuilt.q_dtype == np.dtype(E4M3)


def test_metas_decide_about_randomness_and_states():
    create_set = te.QuantizerFactory.create_set
    plain = QuantizeMetaSet(x=QuantizeMeta(), kernel=QuantizeMeta(), grad=QuantizeMeta())
    nearest = create_set(fp8_recipe=te.NVFP4BlockScaling(), quantize_meta_set=plain)
    assert nearest.core.stochastic == ()
    assert nearest.kernel.scaling_mode is ScalingMode.NVFP4_2D_SCALING
    assert not nearest.x.use_rht
    rng = QuantizeMeta(stochastic_rounding_rng_state=KEY, use_rht=True)
    random = create_set(
        fp8_recipe=te.NVFP4BlockScaling(),
        quantize_meta_set=QuantizeMetaSet(x=QuantizeMeta(use_rht=True), kernel=QuantizeMeta(), grad=rng),
    )
    expected = create_set(fp8_recipe=te.NVFP4BlockScaling(), stochastic_rounding_rng_state=KEY)
    assert random.core == expected.core
    state = QuantizeMeta(scale=jnp.full(1, 8.0), amax_history=jnp.zeros(3))
    delayed = create_set(
        fp8_recipe=te.DelayedScaling(margin=5.0), quantize_meta_set=QuantizeMetaSet(state, QuantizeMeta(), state)
    )
    assert (float(delayed.x.scale[0]), delayed.x.amax_history.shape, delayed.kernel.amax_history.shape) == (
        8.0,
        (3,),
        (1024,),
    )
    assert delayed.x.cast().delayed.margin == 5
    by_mode = create_set(1, ScalingMode.CURRENT_TENSOR_SCALING, E4M3, E5M2, quantize_meta_set=plain)
    assert by_mode.core == create_set(1, ScalingMode.CURRENT_TENSOR_SCALING, E4M3, E5M2).core
    with pytest.raises(TypeError, match="MXFP8_1D_SCALING has no option 'use_rht'"):
        create_set(
            fp8_recipe="mxfp8", quantize_meta_set=QuantizeMetaSet(QuantizeMeta(use_rht=True), *[QuantizeMeta()] * 2)
        )


def test_metas_are_pytrees_and_can_be_merged():
    meta = QuantizeMeta(scale=jnp.ones(1), use_rht=False)
    doubled = jax.tree.map(lambda leaf: 2 * leaf, QuantizeMetaSet(meta, QuantizeMeta(), meta))
    assert float(doubled.x.get_kwargs_dictionary()["scale"][0]) == 2.0
    assert doubled.grad.get_kwargs_dictionary()["use_rht"] is False
    merged = QuantizeMeta.merge(meta, QuantizeMeta(use_rht=False, amax_history=jnp.zeros(2)))
    assert sorted(merged.get_kwargs_dictionary()) == ["amax_history", "scale", "use_rht"]
    with pytest.raises(ValueError, match="`use_rht` is False in one QuantizeMeta and True in the other"):
        QuantizeMeta.merge(meta, QuantizeMeta(use_rht=True))


def test_a_fractional_margin_divides_multipliers_by_its_power_of_two():
    recipe = te.DelayedScaling(margin=0.5, amax_history_len=2)
    q = te.QuantizerFactory.create_set(fp8_recipe=recipe).x.update(4.0)
    np.testing.assert_allclose(q.scale, [448 / 4 / np.sqrt(2.0)], rtol=1e-6)


def test_calling_the_module_dense_calls_the_function():
    x, w = normal(0, (4, 32)), normal(1, (32, 8))
    np.testing.assert_array_equal(te.dense(x, w, bias=jnp.ones(8)), te.dense.dense(x, w, bias=jnp.ones(8)))


def test_gemm_ignores_unknown_keywords():
    x, w = normal(0, (4, 32)), normal(1, (32, 8))
    np.testing.assert_array_equal(tex.gemm(x, w, use_split_accumulator=True), tex.gemm(x, w))


def test_the_fp4_format_is_e2m1():
    assert te.NVFP4BlockScaling(fp4_format=te.Format.E2M1) == te.NVFP4BlockScaling()
    with pytest.raises(ValueError, match="`fp4_format` of NVFP4BlockScaling can only be"):
        te.NVFP4BlockScaling(fp4_format=te.Format.E4M3)
    with pytest.raises(ValueError, match="`fp8_format` E2M1 has four bits"):
        te.Float8CurrentScaling(fp8_format=te.Format.E2M1)
    assert te.DelayedScaling().float8_per_tensor_scaling()
    assert not te.MXFP8BlockScaling().float8_per_tensor_scaling()


def test_the_size_of_a_mesh_axis():
    mesh = jax.make_mesh((2,), ("dp",), devices=jax.devices()[:2])
    assert get_mesh_axis_size("dp", mesh) == 2
    with jax.set_mesh(mesh):
        assert get_mesh_axis_size("dp") == 2
        with pytest.raises(ValueError, match=r"`axis` 'tp' is not one of the mesh axes \('dp',\)"):
            get_mesh_axis_size("tp")
    assert get_mesh_axis_size(None, mesh) == 1


@pytest.mark.parametrize(
    "module",
    ["dense", "checkpoint_policies", "cpp_extensions.gemm", "cpp_extensions.quantization"]
    + [f"quantize.{name}" for name in ("quantizer", "metadata", "scaling_modes", "misc")],
)
def test_modules_of_transformer_engine_say_what_replaces_a_missing_name(module):
    with pytest.raises(ImportError, match="QuantizerFactory"):
        exec(f"from {te.__name__}.{module} import NVFP4Quantizer")
    with pytest.raises(ImportError, match="no_such_name"):
        exec(f"from {te.__name__}.{module} import no_such_name")
