"""`compat.transformer_engine`: grouped quantizers, whose delayed scaling has a state per group, and grouped_gemm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data import normal
from te_modes import E4M3, E5M2, assert_same_leaves, quantizer

import scaledot as sd
from scaledot import train
from scaledot.compat import transformer_engine as te
from scaledot.compat.transformer_engine import cpp_extensions as tex
from scaledot.compat.transformer_engine.quantize import GroupedNoScaleTensor, QuantizeLayout, ScalingMode

DELAYED = ScalingMode.DELAYED_TENSOR_SCALING
SIZES = jnp.array([5, 0, 7])


def inputs():
    return normal(0, (12, 64)), normal(1, (3, 64, 32)) * jnp.array([1.0, 4.0, 16.0])[:, None, None], normal(2, (3, 32))


def test_a_grouped_quantizer_has_a_state_for_each_group():
    q = quantizer(DELAYED, n_groups=3)
    assert (q.scale.shape, q.amax_history.shape) == ((3,), (3, 1024))
    tensor = tex.grouped_quantize(inputs()[0], q, SIZES)
    q = q.update(tensor.rowwise.amax)
    amaxes = [float(np.abs(rows).max(initial=0)) for rows in np.split(inputs()[0], [5, 5])]
    np.testing.assert_array_equal(tensor.rowwise.amax, np.array(amaxes, np.float32))
    np.testing.assert_allclose(q.scale, [448 / amaxes[0], 1, 448 / amaxes[2]], rtol=1e-6)
    alone = [each.update(amax) for each, amax in zip(quantizer(DELAYED, n_groups=3).quantizers, amaxes, strict=True)]
    for each, expected in zip(q.quantizers, alone, strict=True):
        assert_same_leaves(each, expected)
    assert [each.n_groups for each in q.quantizers] == [None] * 3


@pytest.mark.parametrize("is_stack", [False, True], ids=["rows", "stack"])
def test_each_group_is_quantised_by_its_own_delayed_scale(is_stack):
    q = quantizer(DELAYED, n_groups=3).update(jnp.array([1.0, 100.0, 3.0]))
    x, w, _ = inputs()
    tensor = tex.grouped_quantize(w, q) if is_stack else tex.grouped_quantize(x, q, SIZES)
    groups = list(w) if is_stack else jnp.split(x, [5, 5])
    for held in (tensor.rowwise, tensor.colwise):
        assert (held.first_dims is None) == is_stack
        assert held.last_dims is None
        np.testing.assert_array_equal(held.group_sizes, [1, 1, 1] if is_stack else SIZES)
        for found, group, multiplier in zip(held.dequantize(), groups, q.scale, strict=True):
            expected = sd.quantize(group, "fp8_e4m3", block=(0, 0), multiplier=multiplier) if group.size else group
            np.testing.assert_array_equal(found, sd.dequantize(expected) if group.size else group)


def test_a_state_that_groups_share_can_still_be_passed():
    shared = {"scale": jnp.full(1, 2.0), "amax_history": jnp.zeros(4)}
    tensor = tex.grouped_quantize(inputs()[0], quantizer(DELAYED, QuantizeLayout.ROWWISE, n_groups=3, **shared), SIZES)
    np.testing.assert_array_equal(tensor.scale_inv, np.full((12, 1), 0.5))


def test_the_gradient_of_a_grouped_quantizer_set_is_the_next_set():
    x, w, b = inputs()
    recipe = te.DelayedScaling(amax_history_len=4)
    quantizers = te.QuantizerFactory.create_set(fp8_recipe=recipe, n_groups=3)
    state = sd.init_state(recipe.core, groups=3)

    @jax.jit
    def step(quantizers, state):
        def loss(w, quantizers):
            return (te.grouped_dense(x, w, SIZES, bias=b, quantizer_set=quantizers) ** 2).sum()

        def expected_loss(w, state):
            return (train.ragged_dot(x, w, SIZES, b, recipe=recipe.core, state=state)[0] ** 2).sum()

        return jax.grad(loss, (0, 1))(w, quantizers), jax.grad(expected_loss, (0, 1))(w, state)

    for _ in range(2):
        (dw, quantizers), (expected, state) = step(quantizers, state)
        np.testing.assert_array_equal(dw, expected)
        for tensor, found in (("x", quantizers.x), ("w", quantizers.kernel), ("g", quantizers.dgrad)):
            assert_same_leaves(found.state, state[tensor])
    assert len(np.unique(quantizers.kernel.scale)) == 3


@pytest.mark.parametrize(
    "mode", [ScalingMode.NO_SCALING, DELAYED, ScalingMode.MXFP8_1D_SCALING], ids=lambda mode: mode.name
)
def test_grouped_gemm_is_a_gemm_per_group(mode):
    x, w, b = inputs()
    quantizers = te.QuantizerFactory.create_set(1, mode, E4M3, E5M2, n_groups=3)
    alone = te.QuantizerFactory.create_set(1, mode, E4M3, E5M2)
    lhs, rhs = GroupedNoScaleTensor(x, first_dims=SIZES), GroupedNoScaleTensor(w)
    run = jax.jit(tex.grouped_gemm, static_argnames=("contracting_dims", "use_async_d2h_group_sizes"))
    options = {"contracting_dims": ((1,), (1,)), "use_async_d2h_group_sizes": True}
    y = run(lhs, rhs, bias=b, quantizer_set=quantizers, **options)
    for rows, i in ((slice(5), 0), (slice(5, 12), 2)):
        expected = tex.gemm(x[rows], w[i], b[i], quantizer_set=alone)
        np.testing.assert_allclose(y[rows], expected, rtol=1e-5, atol=1e-5)
    swapped = GroupedNoScaleTensor(jnp.swapaxes(w, 1, 2))
    np.testing.assert_allclose(
        tex.grouped_gemm(lhs, swapped, bias=b, quantizer_set=quantizers), y, rtol=1e-5, atol=1e-5
    )
    if quantizers.x is not None:
        cast = tex.grouped_quantize(x, quantizers.x, SIZES), tex.grouped_quantize(w, quantizers.kernel)
        np.testing.assert_allclose(tex.grouped_gemm(*cast, ((1,), (1,)), b), y, rtol=1e-5, atol=1e-5)


def test_grouped_gemm_contracts_the_rows_of_groups():
    """The matmul of a weight gradient, of unquantised tensors and of tensors with one scale per group."""
    x, _, _ = inputs()
    g = normal(3, (12, 32))
    lhs, rhs = (GroupedNoScaleTensor(a, first_dims=SIZES) for a in (x, g))
    dw = tex.grouped_gemm(lhs, rhs, ((0,), (0,)))
    assert dw.shape == (3, 64, 32)
    for rows, i in ((slice(5), 0), (slice(5, 5), 1), (slice(5, 12), 2)):
        np.testing.assert_allclose(dw[i], x[rows].T @ g[rows], rtol=1e-5, atol=1e-5)
    quantizers = te.QuantizerFactory.create_set(1, ScalingMode.CURRENT_TENSOR_SCALING, E4M3, E4M3, n_groups=3)
    quantised = tex.grouped_gemm(lhs, rhs, ((0,), (0,)), quantizer_set=quantizers)
    values = (
        sd.dequantize(tex.grouped_quantize(a, q, SIZES).colwise.array)
        for a, q in ((x, quantizers.x), (g, quantizers.kernel))
    )
    expected = tex.grouped_gemm(*(GroupedNoScaleTensor(a, first_dims=SIZES) for a in values), ((0,), (0,)))
    np.testing.assert_allclose(quantised, expected, rtol=1e-5, atol=1e-4)


def test_arguments_of_grouped_gemm_are_checked():
    x, w, b = inputs()
    lhs, rhs, stack = GroupedNoScaleTensor(x, first_dims=SIZES), GroupedNoScaleTensor(w), GroupedNoScaleTensor(w[0])
    only_rowwise = tex.grouped_quantize(w, quantizer(ScalingMode.MXFP8_1D_SCALING, QuantizeLayout.ROWWISE, n_groups=3))
    dims = ((1,), (1,))
    for words, kind, arguments in (
        ("`lhs` must be a grouped tensor, not Array", TypeError, (x, rhs, dims)),
        ("`lhs` must have `first_dims`", ValueError, (stack, rhs, dims)),
        (r"must be \(\(1,\), \(1,\)\) or \(\(1,\), \(2,\)\)", ValueError, (lhs, rhs, ((0,), (1,)))),
        ("`bias` .* must be .groups, n.", ValueError, (lhs, rhs, dims, b[:2])),
        ("needs its colwise orientation", ValueError, (lhs, only_rowwise, dims)),
        ("`group_offset` must be None", ValueError, (lhs, rhs, dims, None, None, None, SIZES)),
    ):
        with pytest.raises(kind, match=words):
            tex.grouped_gemm(*arguments)
    with pytest.raises(ValueError, match="one size for each of 2 GEMMs"):
        tex.grouped_gemm_copy_group_sizes(SIZES, num_gemms=2)
    with pytest.raises(ValueError, match="`last_dims` must be None"):
        te.ScaledTensorFactory.create_1x(x, None, original_shape=x.shape, last_dims=SIZES)


def test_a_grouped_tensor_without_scales_keeps_its_groups():
    x, w, _ = inputs()
    held = tex.grouped_quantize(x, None, SIZES)
    assert isinstance(held, GroupedNoScaleTensor)
    np.testing.assert_array_equal(held.group_sizes, SIZES)
    np.testing.assert_array_equal(GroupedNoScaleTensor(w).group_sizes, [1, 1, 1])
    built = te.ScaledTensorFactory.create_1x(x.ravel(), None, original_shape=x.shape, first_dims=SIZES)
    assert_same_leaves(built, held)


def test_grouped_dbias_sums_the_rows_of_each_group():
    g = normal(0, (12, 8), jnp.bfloat16)
    found = tex.grouped_dbias(g, SIZES)
    expected = np.stack([np.asarray(rows, np.float32).sum(0) for rows in np.split(g, [5, 5])])
    assert found.dtype == g.dtype
    np.testing.assert_array_equal(found, jnp.asarray(expected).astype(jnp.bfloat16))
