"""`compat.transformer_engine`: functions and quantizers have the results of the corresponding scaledot functions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data import normal
from tables import params_of
from te_modes import E2M1, E4M3, E5M2, EACH_MODE, KEY, STATELESS_MODE, assert_same_leaves, quantizer

import scaledot as sd
from benchmarks import te_tutorial
from scaledot import recipes, train
from scaledot.compat import transformer_engine as te
from scaledot.compat.transformer_engine import cpp_extensions as tex
from scaledot.compat.transformer_engine import flax as te_flax
from scaledot.compat.transformer_engine.quantize import QuantizeLayout, ScalingMode


def test_quantize_dbias_sums_the_unquantised_array():
    x = normal(0, (6, 32, 64), jnp.bfloat16)
    q = quantizer(ScalingMode.MXFP8_1D_SCALING)
    tensor, dbias = tex.quantize_dbias(x, q, flatten_axis=-1)
    assert_same_leaves(tensor, tex.quantize(x, q))
    assert dbias.dtype == x.dtype
    np.testing.assert_array_equal(dbias, jnp.sum(x.astype(jnp.float32), axis=(0, 1)).astype(x.dtype))
    assert tex.quantize_dbias(x, q, flatten_axis=1)[1].shape == (32, 64)
    assert tex.quantize_dbias(x, q, is_dbias=False)[1] is None


@STATELESS_MODE
def test_each_group_of_rows_is_quantised_like_a_separate_array(mode):
    x, sizes = normal(0, (64, 256)), jnp.array([16, 0, 48])
    tensor = tex.grouped_quantize(x, quantizer(mode, n_groups=3), sizes)
    for held in (tensor.rowwise, tensor.colwise):
        groups = held.dequantize()
        assert [g.shape[0] for g in groups] == [16, 0, 48]
        for rows, group in ((x[:16], groups[0]), (x[16:], groups[2])):
            alone = tex.quantize(rows, quantizer(mode))
            expected = sd.dequantize((alone.colwise if held.is_colwise else alone.rowwise).array)
            np.testing.assert_array_equal(group, expected)
        assert held.original_shape == x.shape
    assert_same_leaves(jax.jit(lambda x, s: tex.grouped_quantize(x, quantizer(mode, n_groups=3), s))(x, sizes), tensor)


@STATELESS_MODE
def test_each_matrix_of_a_stack_is_quantised_like_a_separate_array(mode):
    w = normal(0, (2, 64, 256))
    tensor = tex.grouped_quantize(w, quantizer(mode, n_groups=2))
    for held in (tensor.rowwise, tensor.colwise):
        for matrix, group in zip(w, held.dequantize(), strict=True):
            alone = tex.quantize(matrix, quantizer(mode))
            np.testing.assert_array_equal(
                group, sd.dequantize((alone.colwise if held.is_colwise else alone.rowwise).array)
            )


def test_the_factory_builds_a_grouped_tensor_from_flat_codes_and_one_scale_per_group():
    x, sizes = normal(0, (4, 32)), jnp.array([1, 3])
    mode = ScalingMode.CURRENT_TENSOR_SCALING
    quantised = tex.grouped_quantize(x, quantizer(mode, QuantizeLayout.ROWWISE, n_groups=2), sizes)
    built = te.ScaledTensorFactory.create_1x(
        quantised.data.ravel(), quantised.scale_inv[:2, 0], None, mode, group_sizes=sizes, original_shape=(4, 32)
    )
    assert isinstance(built, te.GroupedScaledTensor1x)
    for a, b in zip(built.dequantize(), quantised.dequantize(), strict=True):
        np.testing.assert_array_equal(a, b.astype(jnp.bfloat16))


def test_invalid_groups_raise_errors_that_name_them():
    mode, x = ScalingMode.MXFP8_1D_SCALING, jnp.ones((8, 32))
    for sizes, words in (([3, 4], r"\[3, 4\] sum to 7, not to 8 rows"), ([8], "is 2, but there are 1 groups")):
        with pytest.raises(ValueError, match=words):
            tex.grouped_quantize(x, quantizer(mode, n_groups=2), jnp.array(sizes))
    with pytest.raises(ValueError, match=r"n_groups=2"):
        tex.grouped_quantize(x, quantizer(mode), jnp.array([4, 4]))
    with pytest.raises(ValueError, match="`flatten_axis` 1 of a grouped tensor must be -1"):
        tex.grouped_quantize(jnp.ones((2, 8, 32)), quantizer(mode, n_groups=2), flatten_axis=1)
    with pytest.raises(ValueError, match=r"must have shape \(groups, m, k\)"):
        tex.grouped_quantize(x, quantizer(mode, n_groups=8))
    with pytest.raises(ValueError, match="sum to 7"):
        te.grouped_dense(x, jnp.ones((2, 32, 4)), jnp.array([3, 4]))
    for change, words in (({"group_offset": 1}, "group_offset"), ({"kernel_fsdp_info": ("fsdp", 0)}, "fsdp_info")):
        with pytest.raises(ValueError, match=words):
            te.grouped_dense(x, jnp.ones((2, 32, 4)), jnp.array([4, 4]), **change)


def test_dequantize_accepts_tensors_only():
    held = tex.quantize(jnp.ones((2, 32)), quantizer(ScalingMode.MXFP8_1D_SCALING))
    np.testing.assert_array_equal(tex.dequantize(held), jnp.ones((2, 32)))
    with pytest.raises(TypeError, match="not Array"):
        tex.dequantize(jnp.ones(2))


@EACH_MODE
def test_gemm_equals_dot_general(mode):
    x, w, g = normal(0, (64, 256)), normal(1, (256, 128)), normal(2, (64, 128))
    q = quantizer(mode)
    x2, w2, g2 = (tex.quantize(a, q) for a in (x, w, g))
    numbers = {"fwd": ((1,), (0,)), "dgrad": ((1,), (1,)), "wgrad": ((0,), (0,))}
    pairs = {"fwd": (x2.rowwise, w2.colwise), "dgrad": (g2.rowwise, w2.rowwise), "wgrad": (x2.colwise, g2.colwise)}
    for matmul, (left, right) in pairs.items():
        expected = sd.dot_general(left.array, right.array, (numbers[matmul], ((), ())))
        np.testing.assert_array_equal(tex.gemm(left, right, contracting_dims=numbers[matmul]), expected)
    both = tex.gemm(x2, w2)
    np.testing.assert_array_equal(both, tex.gemm(x2.rowwise, w2.colwise))
    np.testing.assert_array_equal(tex.gemm(x, w, lhs_quantizer=q, rhs_quantizer=q), both)
    quantizers = te.QuantizerSet(q, q, q)
    np.testing.assert_array_equal(tex.gemm(x, w, quantizer_set=quantizers), both)
    np.testing.assert_allclose(tex.gemm(x2, w2, bias=jnp.arange(128.0)), both + jnp.arange(128.0)[None], rtol=1e-6)
    if mode.is_1d_block_scaling():
        with pytest.raises(ValueError, match="`rhs` is contracted over dims \\(0,\\), which needs its colwise"):
            tex.gemm(x2, w2.rowwise)


def test_gemm_of_plain_operands_and_several_axes():
    x, w = normal(0, (2, 3, 4, 32)), normal(1, (4, 32, 5))
    plain = tex.gemm(te.NoScaleTensor(x), w, contracting_dims=((2, 3), (0, 1)))
    np.testing.assert_array_equal(plain, jax.lax.dot_general(x, w, (((2, 3), (0, 1)), ((), ()))))
    q = quantizer(ScalingMode.MXFP8_1D_SCALING)
    y = tex.gemm(x, w, contracting_dims=((-2, -1), (0, 1)), lhs_quantizer=q, rhs_quantizer=q)
    left, right = sd.quantize(x, "mxfp8"), sd.quantize(w, "mxfp8", axis=1)
    np.testing.assert_array_equal(y, sd.dot_general(left, right, (((2, 3), (0, 1)), ((), ()))))
    with pytest.raises(ValueError, match="transpose_batch_sequence"):
        tex.gemm(x, w, transpose_batch_sequence=True)


@pytest.mark.parametrize(
    "recipe",
    params_of(
        [r for r in te_tutorial.RECIPES if not r.delayed()],
        ("Float8CurrentScaling", "Float8BlockScaling"),
        lambda r: type(r).__name__,
    ),
)
def test_dense_equals_train_dense(recipe):
    x, w, b = normal(0, (2, 16, 64)), normal(1, (64, 48)), normal(2, (48,))
    quantizers = te.QuantizerFactory.create_set(fp8_recipe=recipe, stochastic_rounding_rng_state=KEY)

    def theirs(x, w, b):
        return te.dense.dense(x, w, b, contracting_dims=((-1,), (0,)), quantizer_set=quantizers)

    def ours(x, w, b):
        return train.dense(x, w, b, recipe=recipe.core, key=KEY)

    g = normal(3, (2, 16, 48))
    for f in (theirs, ours):
        y, vjp = jax.vjp(f, x, w, b)
        f.results = (y, *vjp(g))
    assert_same_leaves(theirs.results, ours.results)


def test_the_gradient_of_a_delayed_quantizer_set_is_the_next_set():
    x, w = normal(0, (8, 32)), normal(1, (32, 16))
    recipe = te.DelayedScaling(amax_history_len=4)
    quantizers = te.QuantizerFactory.create_set(fp8_recipe=recipe)

    def loss(w, quantizers):
        return (te.dense.dense(x, w, quantizer_set=quantizers) ** 2).sum()

    def reference(w, state):
        y, state = train.dense(x, w, recipe=recipe.core, state=state)
        return (y**2).sum()

    state = sd.init_state(recipe.core)
    for _ in range(3):
        dw, quantizers = jax.jit(jax.grad(loss, argnums=(0, 1)))(w, quantizers)
        expected, state = jax.jit(jax.grad(reference, argnums=(0, 1)))(w, state)
        np.testing.assert_array_equal(dw, expected)
        for name, tensor in (("x", "x"), ("kernel", "w"), ("dgrad", "g")):
            held = getattr(quantizers, name)
            np.testing.assert_array_equal(held.amax_history, state[tensor].history)
            assert held.scale.shape == (1,)
            assert float(held.scale[0]) == float(state[tensor].multiplier)


def test_updating_a_quantizer_records_the_amax_and_computes_the_next_multiplier():
    """Amaxes 2, 8, 1 give the multipliers 1, 224, 56; TransformerEngine calls the multiplier `scale`."""
    q = quantizer(ScalingMode.DELAYED_TENSOR_SCALING, amax_history=jnp.zeros(4))
    multipliers = []
    for amax in (2.0, 8.0, 1.0):
        multipliers.append(float(q.scale[0]))
        q = q.update(tex.quantize(jnp.full((2, 4), amax), q).rowwise.amax)
    assert multipliers == [1, 224, 56]
    current = quantizer(ScalingMode.CURRENT_TENSOR_SCALING)
    assert current.update(jnp.ones(1)) is current


def test_dense_without_quantizers_is_a_plain_matmul():
    x, w, b = normal(0, (8, 32), jnp.bfloat16), normal(1, (32, 16)), normal(2, (16,))
    y = te.dense.dense(x, w, b)
    assert y.dtype == jnp.bfloat16
    exact = x.astype(jnp.float32) @ w + b[None]
    np.testing.assert_allclose(y.astype(jnp.float32), exact, rtol=1e-2, atol=1e-2)
    with pytest.raises(ValueError, match="transpose_batch_sequence"):
        te.dense.dense(x, w, transpose_batch_sequence=True)


@pytest.mark.parametrize("recipe", params_of([None, "mxfp8", "nvfp4", "fp8_delayed"], ["nvfp4"]))
def test_grouped_dense_equals_train_ragged_dot(recipe):
    x, w, b, sizes = normal(0, (12, 64)), normal(1, (3, 64, 32)), normal(2, (3, 32)), jnp.array([5, 0, 7])
    quantizers = (
        te.QuantizerFactory.create_set(fp8_recipe=recipe, stochastic_rounding_rng_state=KEY) if recipe else None
    )
    options = {"quantizer_set": quantizers} if quantizers else {}
    y = te.grouped_dense(x, w, sizes, bias=b, **options)
    used = recipe or recipes.Recipe("plain", recipes.Gemm(), recipes.Gemm(), recipes.Gemm())
    state = sd.init_state(used) if recipe == "fp8_delayed" else None
    expected = train.ragged_dot(x, w, sizes, b, recipe=used, key=KEY, state=state)
    np.testing.assert_array_equal(y, expected[0] if state else expected)
    transposed = te.grouped_dense(x, jnp.swapaxes(w, 1, 2), sizes, ((1,), (2,)), b, **options)
    np.testing.assert_array_equal(transposed, y)
    with pytest.raises(ValueError, match="contracting_dims"):
        te.grouped_dense(x, w, sizes, ((0,), (1,)))


def test_a_quantizer_rounds_stochastically_and_rotates_as_quantize_does():
    x = normal(0, (64, 32))
    raw = jnp.array([[1, 2, 3, 4]], jnp.uint32)
    q = quantizer(ScalingMode.NVFP4_1D_SCALING, stochastic_rounding_rng_state=raw, use_rht=True)
    tensor = tex.quantize(x, q)
    assert (tensor.rowwise.has_rht_applied, tensor.colwise.has_rht_applied) == (False, True)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(raw[0, :2]), 3), 4)
    rows = sd.quantize(x, "nvfp4", rounding="stochastic", key=key)
    columns = sd.quantize(
        x, "nvfp4", axis=0, rounding="stochastic", key=jax.random.fold_in(key, 1), rotation=sd.Hadamard()
    )
    assert_same_leaves(tensor.rowwise.array.data, rows.data)
    np.testing.assert_array_equal(sd.dequantize(tensor.colwise.array), sd.dequantize(columns))
    np.testing.assert_allclose(tensor.colwise.dequantize(), sd.dequantize(columns).T, atol=1e-6)
    assert np.linalg.norm(tensor.colwise.dequantize() - x.T) < 0.3 * np.linalg.norm(x)
    flat = quantizer(ScalingMode.NVFP4_1D_SCALING, stochastic_rounding_rng_state=raw[0])
    assert_same_leaves(tex.quantize(x, flat).rowwise.data, tensor.rowwise.data)
    with pytest.raises(ValueError, match=r"axis 0 of .* multiple of 16"):
        tex.quantize(x[:20], q)
    with pytest.raises(ValueError, match=r"\(4,\) or \(devices, 4\)"):
        tex.quantize(x, quantizer(ScalingMode.NVFP4_1D_SCALING, stochastic_rounding_rng_state=raw[0, :3]))


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: te.QuantizerFactory.create(1, "mxfp8"), TypeError, "must be a ScalingMode"),
        (lambda: te.QuantizerFactory.create(1, ScalingMode.MXFP8_1D_SCALING), ValueError, "`q_dtype`.*float8"),
        (
            lambda: quantizer(ScalingMode.MXFP8_1D_SCALING, foo=1),
            TypeError,
            "MXFP8_1D_SCALING has no option 'foo'; it takes none",
        ),
        (lambda: te.QuantizerFactory.create(1, ScalingMode.MXFP8_1D_SCALING, jnp.int8), ValueError, "not int8"),
        (lambda: te.QuantizerFactory.create_set(fp8_recipe="nvfp4"), ValueError, "stochastic_rounding_rng_state"),
        (lambda: te.QuantizerFactory.create_set(fp8_recipe="fp8_qat"), ValueError, "straight-through"),
        (
            lambda: te.QuantizerFactory.create_set(fp8_recipe="int8", stochastic_rounding_rng_state=KEY),
            ValueError,
            "no ScalingMode",
        ),
        (
            lambda: te.QuantizerFactory.create_set(1, ScalingMode.MXFP8_1D_SCALING, E4M3, E4M3, fp8_recipe="mxfp8"),
            ValueError,
            "not both",
        ),
    ],
)
def test_invalid_quantizers_raise_errors_that_say_why(make, kind, words):
    with pytest.raises(kind, match=words):
        make()


def test_create_and_create_set_return_several_quantizers():
    first, second = te.QuantizerFactory.create(2, ScalingMode.MXFP8_1D_SCALING, E4M3)
    assert first.cast() == second.cast()
    sets = te.QuantizerFactory.create_set(2, ScalingMode.CURRENT_TENSOR_SCALING, E4M3, E5M2, is_2x2x=False)
    assert sets[0].core == dataclasses.replace(recipes.FP8_CURRENT, name="quantizer_set")
    assert sets[1].x.q_layout is QuantizeLayout.ROWWISE
    assert te.noop_quantizer_set.core is None


def test_recipes_that_a_quantizer_set_cannot_express_are_refused():
    for recipe in (
        te.MXFP8BlockScaling(backward_override="high_precision"),
        dataclasses.replace(recipes.MXFP8, wgrad=recipes.Gemm()),
    ):
        with pytest.raises(ValueError, match="no QuantizerSet has the casts"):
            te.QuantizerFactory.create_set(fp8_recipe=recipe)
    assert te.QuantizerFactory.create_set(fp8_recipe=None).core is None


def test_options_of_quantizer_sets():
    create_set = te.QuantizerFactory.create_set
    one_sided = create_set(1, ScalingMode.MXFP8_1D_SCALING, E4M3, E4M3, is_2x2x=False)
    assert one_sided.kernel.q_layout is QuantizeLayout.COLWISE
    assert create_set(fp8_recipe="mxfp8", is_2x2x=False).kernel.q_layout is QuantizeLayout.COLWISE
    x, w = normal(0, (4, 64)), normal(1, (64, 8))
    y = tex.gemm(tex.quantize(x, one_sided.x), tex.quantize(w, one_sided.kernel))
    np.testing.assert_array_equal(
        y, sd.dot_general(*(sd.quantize(a, "mxfp8", axis=n) for a, n in ((x, 1), (w, 0))), (((1,), (0,)), ((), ())))
    )
    stochastic = create_set(1, ScalingMode.NVFP4_1D_SCALING, E2M1, E2M1, stochastic_rounding_rng_state=KEY)
    assert (stochastic.x.cast().rounding, stochastic.dgrad.cast().rounding) == ("nearest", "stochastic")
    two = create_set(2, fp8_recipe="nvfp4", stochastic_rounding_rng_state=KEY)
    assert not np.array_equal(*(jax.random.key_data(quantizers.key) for quantizers in two))
    raw = create_set(fp8_recipe="nvfp4", stochastic_rounding_rng_state=jax.random.PRNGKey(0))
    assert te.dense.dense(x, w, quantizer_set=raw).shape == (4, 8)
    for words, options in (
        ("determines the dtypes", {"fwd_dtype": E4M3, "fp8_recipe": "mxfp8"}),
        (
            "rounds to nearest",
            {
                "scaling_mode": ScalingMode.MXFP8_1D_SCALING,
                "fwd_dtype": E4M3,
                "bwd_dtype": E4M3,
                "stochastic_rounding_rng_state": KEY,
            },
        ),
    ):
        with pytest.raises(ValueError, match=words):
            create_set(**options)
    with pytest.raises(TypeError, match="must be a QuantizeLayout"):
        quantizer(ScalingMode.MXFP8_1D_SCALING, "rowwise")
    with pytest.raises(TypeError, match=r"must come from QuantizerFactory\.create_set"):
        te.dense.dense(x, w, quantizer_set=te.MXFP8BlockScaling())


def test_several_quantizers_and_matrices_round_with_independent_bits():
    first, second = te.QuantizerFactory.create(2, ScalingMode.NVFP4_1D_SCALING, E2M1, stochastic_rounding_rng_state=KEY)
    x = normal(0, (32, 64))
    assert not np.array_equal(*(np.asarray(tex.quantize(x, q).rowwise.data, np.float32) for q in (first, second)))
    grouped = quantizer(ScalingMode.NVFP4_1D_SCALING, stochastic_rounding_rng_state=KEY, n_groups=2)
    codes = np.asarray(tex.grouped_quantize(jnp.stack([x, x]), grouped).rowwise.data, np.float32)
    assert not np.array_equal(codes[0], codes[1])


def test_blocks_can_run_along_a_middle_axis():
    x = normal(2, (32, 64, 96)) * jnp.where(jnp.arange(32) == 0, 1e6, 1.0)[:, None, None]
    w, q = normal(5, (64, 16)), quantizer(ScalingMode.MXFP8_1D_SCALING)
    y = tex.gemm(x, w, contracting_dims=((1,), (0,)), lhs_quantizer=q, rhs_quantizer=q)
    numbers = (((1,), (0,)), ((), ()))
    np.testing.assert_array_equal(
        y, sd.dot_general(sd.quantize(x, "mxfp8", axis=1), sd.quantize(w, "mxfp8", axis=0), numbers)
    )
    with pytest.raises(ValueError, match="blocks along axis 0"):
        tex.gemm(tex.quantize(x, q, flatten_axis=1).colwise, w, contracting_dims=((1,), (0,)))


def test_an_amax_that_is_passed_is_used():
    x, amax = normal(0, (16, 64)), jnp.array([10.0])
    held = tex.quantize(te.NoScaleTensor(x, amax), quantizer(ScalingMode.CURRENT_TENSOR_SCALING)).rowwise
    np.testing.assert_allclose(448 * held.scale_inv, amax, rtol=1e-6)
    amax_of_x = jnp.max(jnp.abs(x)).reshape(1)
    for mode in (ScalingMode.CURRENT_TENSOR_SCALING, ScalingMode.NVFP4_1D_SCALING):
        computed, passed = (tex.quantize(a, quantizer(mode)).rowwise for a in (x, te.NoScaleTensor(x, amax_of_x)))
        np.testing.assert_array_equal(passed.amax, amax_of_x)
        np.testing.assert_allclose(passed.dequantize(), computed.dequantize(), rtol=1e-6)
    second = tex.quantize(te.NoScaleTensor(x, amax), quantizer(ScalingMode.NVFP4_1D_SCALING)).rowwise
    np.testing.assert_allclose(second.tensor_scale, 10 / 2688, rtol=1e-6)
    zero = tex.quantize(te.NoScaleTensor(x * 0, jnp.zeros(1)), quantizer(ScalingMode.CURRENT_TENSOR_SCALING))
    np.testing.assert_array_equal(zero.dequantize(), 0 * x)


@pytest.mark.parametrize(
    "mode", [ScalingMode.NVFP4_1D_SCALING, ScalingMode.CURRENT_TENSOR_SCALING], ids=lambda m: m.name
)
def test_tensors_report_the_amax_of_their_input(mode):
    for x in (normal(0, (32, 64)), jnp.zeros((32, 64)), jnp.full((32, 64), 1e-37)):
        np.testing.assert_array_equal(tex.quantize(x, quantizer(mode)).rowwise.amax, jnp.max(jnp.abs(x)).reshape(1))
    rotated = tex.quantize(normal(0, (32, 64)), quantizer(ScalingMode.NVFP4_1D_SCALING, use_rht=True)).colwise
    np.testing.assert_allclose(rotated.amax, rotated.tensor_scale * 2688, rtol=1e-6)


def test_the_factory_builds_grouped_tensors_from_codes_or_says_what_does_not_fit():
    mode, sizes = ScalingMode.NVFP4_1D_SCALING, jnp.array([3, 5])
    x = normal(0, (8, 32))
    quantised = tex.grouped_quantize(x, quantizer(mode, QuantizeLayout.ROWWISE, n_groups=2), sizes)
    amax = jnp.stack([jnp.abs(x[:3]).max(), jnp.abs(x[3:]).max()])
    built = te.ScaledTensorFactory.create(
        quantised.data,
        quantised.scale_inv,
        amax=amax,
        scaling_mode=mode,
        dq_dtype=jnp.float32,
        group_sizes=sizes,
        original_shape=(8, 32),
    )
    for a, b in zip(built.dequantize(), quantised.dequantize(), strict=True):
        np.testing.assert_array_equal(a, b)
    codes, tensor_wide = jnp.ones((8, 32), E4M3), ScalingMode.CURRENT_TENSOR_SCALING
    for change, words in (
        ({"data_layout": "T"}, "must be 'N'"),
        ({"group_sizes": jnp.array([3, 3])}, "sum to 6, not to 8"),
        ({"scale_inv": jnp.ones((8, 2))}, "does not fit"),
    ):
        arguments = {"data": codes, "scale_inv": jnp.ones(2), "scaling_mode": tensor_wide, "group_sizes": sizes}
        with pytest.raises(ValueError, match=words):
            te.ScaledTensorFactory.create_1x(**{**arguments, "original_shape": (8, 32), **change})
    with pytest.raises(TypeError, match="dq_dtype="):
        te.ScaledTensorFactory.create_1x(codes, jnp.ones(1), None, tensor_wide, jnp.float32)


@pytest.mark.parametrize("is_grouped", [False, True], ids=["dense", "grouped_dense"])
def test_codes_are_saved_under_the_checkpoint_name_of_their_quantizers(is_grouped):
    named = te.QuantizerFactory.create_set(1, ScalingMode.MXFP8_1D_SCALING, E4M3, E4M3, checkpoint_name="codes")
    x, w = normal(0, (8, 64)), normal(1, (64, 16))

    def matmul(x, w):
        if is_grouped:
            return te.grouped_dense(x, w[None], jnp.array([8]), quantizer_set=named)
        return te.dense.dense(x, w, quantizer_set=named)

    policy = jax.checkpoint_policies.save_only_these_names("codes")
    f = jax.checkpoint(lambda x, w: jnp.sin(matmul(jnp.cos(x), w)).sum(), policy=policy)
    program = str(jax.make_jaxpr(jax.grad(f, argnums=1))(x, w))
    assert "name=codes" in program
    assert "scaledot_residual" not in program


def test_quantizer_sets_of_micro_batches_can_be_merged():
    x, w = normal(0, (8, 32)), normal(1, (32, 16))
    start = te.QuantizerFactory.create_set(fp8_recipe=te.DelayedScaling(amax_history_len=4))

    def step(quantizers, x):
        return jax.grad(lambda q: te.dense.dense(x, w, quantizer_set=q).sum())(quantizers)

    merged = te.QuantizerSet.merge(step(start, x[:4]), step(start, x[4:]))
    assert_same_leaves(merged, step(start, x))
    assert te.QuantizerSet.merge(te.noop_quantizer_set).core is None


@pytest.mark.usefixtures("standard_promotion")
def test_make_grouped_dense_cls_is_called_as_in_transformer_engine():
    from flax import linen as nn

    class Experts(nn.Module):
        @nn.compact
        def __call__(self, x, kernel, sizes):
            return te_flax.make_grouped_dense_cls(te.MXFP8BlockScaling())(x, kernel, sizes)

    x, kernel, sizes = normal(0, (8, 32)), normal(1, (2, 32, 16)), jnp.array([3, 5])
    expected = train.ragged_dot(x, kernel, sizes, recipe="mxfp8")
    np.testing.assert_array_equal(Experts().apply({}, x, kernel, sizes), expected)
    np.testing.assert_array_equal(te_flax.make_grouped_dense_cls("mxfp8")().apply({}, x, kernel, sizes), expected)
    plain = te_flax.make_grouped_dense_cls(None).apply({}, x, kernel, sizes)
    np.testing.assert_allclose(plain, jax.lax.ragged_dot(x, kernel, sizes), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="sum to 7"):
        Experts().apply({}, x, kernel, jnp.array([3, 4]))


@pytest.mark.parametrize(
    "module", ["", ".flax", ".quantize", ".cpp_extensions", ".recipe", ".sharding", ".quantize.tensor"]
)
def test_importing_an_unsupported_name_says_what_to_use_instead(module):
    with pytest.raises(ImportError, match="'TransformerLayer' is not provided: compose it of"):
        exec(f"from {te.__name__}{module} import TransformerLayer")


def test_the_shape_of_a_bias_is_checked():
    x, w = jnp.ones((2, 32)), jnp.ones((32, 4))
    for f in (te.dense.dense, tex.gemm):
        with pytest.raises(ValueError, match=r"`bias` \(1,\) must have the shape of .*\(4,\)"):
            f(x, w, jnp.ones(1))
    assert tex.gemm(x.astype(jnp.bfloat16), w).dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="amax_scope"):
        tex.quantize(x, None, amax_scope="tpsp")


def test_differentiating_without_the_quantizer_set_warns():
    x, w = normal(0, (8, 32)), normal(1, (32, 16))
    quantizers = te.QuantizerFactory.create_set(fp8_recipe=te.DelayedScaling(amax_history_len=4))
    with pytest.warns(UserWarning, match="differentiated without its `quantizer_set`"):
        jax.eval_shape(jax.grad(lambda w: te.dense.dense(x, w, quantizer_set=quantizers).sum()), w)
    jax.eval_shape(jax.grad(lambda w: te.grouped_dense(x, w, jnp.array([8]), quantizer_set=quantizers).sum()), w[None])
