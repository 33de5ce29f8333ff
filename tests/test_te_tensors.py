"""`compat.transformer_engine`: tensors are views of ScaledArrays, and pytrees."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data import normal
from tables import fp4_optimized
from te_modes import E2M1, E4M3, EACH_MODE, MODE_ROWS, MODES, assert_same_leaves, quantizer

import scaledot as sd
from scaledot import train
from scaledot.compat import transformer_engine as te
from scaledot.compat.transformer_engine import cpp_extensions as tex
from scaledot.compat.transformer_engine.quantize import QuantizeLayout, ScalingMode, TensorUsage


@EACH_MODE
def test_rowwise_and_colwise_codes_equal_those_of_quantize(mode):
    x = normal(0, (128, 256))
    tensor = tex.quantize(x, quantizer(mode))
    cast = quantizer(mode).cast()
    multiplier = {"multiplier": jnp.ones(())} if cast.delayed else {}
    rows = sd.quantize(x, cast.format, block=cast.block_2d, **multiplier)
    columns = sd.quantize(x, cast.format, axis=(1, 0), block=cast.block_2d, **multiplier)
    for held, q in ((tensor.rowwise, rows), (tensor.colwise, columns)):
        assert_same_leaves(held.array.data, q.data)
        np.testing.assert_array_equal(sd.dequantize(held.array), sd.dequantize(q))
    assert_same_leaves(tensor.rowwise.dequantize(), sd.dequantize(rows))
    assert tensor.dequantize().shape == tensor.rowwise.data.shape == x.shape
    assert tensor.get_tensor().dtype == MODES[mode]


@EACH_MODE
def test_data_and_scales_have_transformer_engines_layouts(mode):
    tensor = tex.quantize(jnp.ones((32, 64, 128)), quantizer(mode), flatten_axis=-2)
    rowwise, colwise = tensor.rowwise, tensor.colwise
    assert (rowwise.data_layout, rowwise.data.shape, rowwise.flatten_axis) == ("N", (32, 64, 128), 1)
    if mode is ScalingMode.MXFP8_1D_SCALING:
        assert (colwise.data_layout, colwise.data.shape, colwise.flatten_axis) == ("N", (32, 64, 128), 1)
        assert (rowwise.scale_inv.shape, colwise.scale_inv.shape) == ((32, 64, 4), (1, 64, 128))
    else:
        assert (colwise.data_layout, colwise.data.shape, colwise.flatten_axis) == ("T", (64, 128, 32), 2)
        assert colwise.dequantize().shape == (64, 128, 32)
    if mode.is_tensor_scaling():
        assert rowwise.scale_inv.shape == colwise.scale_inv.shape == rowwise.amax.shape == (1,)
    if mode is ScalingMode.NVFP4_1D_SCALING:
        assert (rowwise.scale_inv.shape, colwise.scale_inv.shape) == ((32, 64, 8), (64, 128, 2))
    assert rowwise.scale_inv.dtype == mode.get_scale_dtype()
    assert colwise.array.shape == (32, 64, 128)


@EACH_MODE
@pytest.mark.parametrize(("shape", "flatten_axis"), [((32, 64, 128), -2), ((35, 50), -1)])
def test_scale_shapes_of_a_mode_are_those_of_its_tensors(mode, shape, flatten_axis):
    tensor = jax.eval_shape(lambda x: tex.quantize(x, quantizer(mode), flatten_axis=flatten_axis), jnp.ones(shape))
    repeated = mode is ScalingMode.NVFP4_2D_SCALING
    shapes = mode.get_scale_shape_2x(shape, False, flatten_axis, broadcast_2d_scale_shape_to_1d=repeated)
    assert shapes == (tensor.rowwise.scale_inv.shape, tensor.colwise.scale_inv.shape)


@pytest.mark.parametrize(
    ("mode", "shape", "flatten_axis", "expected"),
    [
        (ScalingMode.MXFP8_1D_SCALING, (64, 96), -1, ((128, 4), (4, 128))),
        (ScalingMode.MXFP8_1D_SCALING, (64, 2, 32), -2, ((128, 4, 1), (4, 4, 32))),
        (ScalingMode.NVFP4_1D_SCALING, (64, 32), -1, ((128, 4), (128, 4))),
        (ScalingMode.CURRENT_TENSOR_SCALING, (64, 32), -1, ((1,), (1,))),
        (ScalingMode.NO_SCALING, (64, 32), -1, ((0,), (0,))),
    ],
)
def test_padded_scale_shapes_fill_tiles_of_128_by_4(mode, shape, flatten_axis, expected):
    assert mode.get_scale_shape_2x(shape, flatten_axis=flatten_axis) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((64, 32), "T"), "`data_layout` of these MXFP8_1D_SCALING codes must be 'N', not 'T'"),
        (((64, 32), "N", False, True, 0), "`flatten_axis` 0 leaves no dims before it"),
        (((2, 48, 32), "N"), "96 scales .* padded to 128, .*`?is_padded=False`?"),
    ],
)
def test_impossible_scale_shapes_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        ScalingMode.MXFP8_1D_SCALING.get_scale_shape(*arguments)


@EACH_MODE
def test_shapes_need_not_be_multiples_of_the_block(mode):
    x = normal(0, (35, 50))
    tensor = tex.quantize(x, quantizer(mode))
    for held in (tensor.rowwise, tensor.colwise):
        got = sd.dequantize(held.array)
        bound = 0.5 if mode is ScalingMode.DELAYED_TENSOR_SCALING else 0.3
        assert np.linalg.norm(got - x) < bound * np.linalg.norm(x)


@EACH_MODE
def test_get_tensor_returns_the_orientation_of_its_usage(mode):
    x = normal(0, (32, 256))
    both = tex.quantize(x, quantizer(mode))
    for usage in (TensorUsage.LHS, TensorUsage.RHS_TRANS):
        assert both.get_tensor(usage) is both.rowwise
    for usage in (TensorUsage.RHS, TensorUsage.LHS_TRANS):
        assert both.get_tensor(usage=usage) is both.colwise
    rows, columns = (
        tex.quantize(x, quantizer(mode, layout)) for layout in (QuantizeLayout.ROWWISE, QuantizeLayout.COLWISE)
    )
    assert_same_leaves(rows, both.rowwise)
    assert_same_leaves(columns, both.colwise)
    assert rows.get_tensor(TensorUsage.LHS) is rows
    with pytest.raises(ValueError, match=f"LHS_TRANS needs the colwise.*{mode.name} tensor has only the rowwise"):
        rows.get_tensor(TensorUsage.LHS_TRANS)
    with pytest.raises(ValueError, match="RHS_TRANS needs the rowwise"):
        columns.get_tensor(TensorUsage.RHS_TRANS)


def test_an_unquantised_tensor_has_every_usage():
    plain = tex.quantize(jnp.ones((2, 4)), None)
    assert isinstance(plain, te.NoScaleTensor)
    assert all(plain.get_tensor(usage) is plain for usage in TensorUsage)
    assert plain.get_tensor() is plain.data
    assert tex.quantize(plain, None) is plain
    assert_same_leaves(
        tex.quantize(plain, quantizer(ScalingMode.MXFP8_1D_SCALING)).rowwise.data, jnp.full((2, 4), 256, E4M3)
    )
    assert te.ScaledTensorFactory.create(plain.data, None).dequantize() is plain.data


@EACH_MODE
def test_the_factory_builds_the_tensors_of_quantize_from_codes_and_scales(mode):
    x = normal(0, (64, 256), jnp.bfloat16)
    made = tex.quantize(x, quantizer(mode))
    rows, columns = made.rowwise, made.colwise
    built = te.ScaledTensorFactory.create(
        rows.data,
        rows.scale_inv,
        columns.data,
        columns.scale_inv,
        rows.amax,
        columns.amax,
        scaling_mode=mode,
        dequantizer=None,
        dq_dtype=jnp.bfloat16,
        q_layout=QuantizeLayout.ROWWISE_COLWISE,
    )
    for a, b in ((built.rowwise, rows), (built.colwise, columns)):
        np.testing.assert_array_equal(a.dequantize(), b.dequantize())
        assert (
            dataclasses.replace(a, tensor_scale=b.tensor_scale, format=b.format).stored_array.block
            == b.stored_array.block
        )
        assert a.dequantize().dtype == jnp.bfloat16
    one = te.ScaledTensorFactory.create(
        columns.data, columns.scale_inv, amax=columns.amax, scaling_mode=mode, q_layout=QuantizeLayout.COLWISE
    )
    np.testing.assert_array_equal(one.dequantize(), columns.dequantize())


def test_scales_of_square_nvfp4_blocks_are_repeated_for_each_row():
    x = normal(0, (3, 40, 64))
    tensor = tex.quantize(x, quantizer(ScalingMode.NVFP4_2D_SCALING), flatten_axis=2)
    held, expected = tensor.rowwise, sd.quantize(x, "nvfp4", block=(16, 16), pad=True)
    assert (held.scale_inv.shape, tensor.colwise.scale_inv.shape) == ((3, 40, 4), (64, 3, 3))
    np.testing.assert_array_equal(held.scale_inv, jnp.repeat(expected.scale, 16, axis=1)[:, :40])
    assert held.array.block == expected.block
    np.testing.assert_array_equal(held.array.scale, expected.scale)
    one_per_block = te.ScaledTensorFactory.create_1x(
        held.data, expected.scale, held.amax, held.scaling_mode, dq_dtype=jnp.float32
    )
    np.testing.assert_array_equal(one_per_block.dequantize(), held.dequantize())


def test_orientations_of_square_blocks_are_rounded_with_independent_bits():
    x, key = normal(0, (32, 64)), jax.random.key(0)
    tensor = tex.quantize(x, quantizer(ScalingMode.NVFP4_2D_SCALING, stochastic_rounding_rng_state=key))
    np.testing.assert_array_equal(tensor.rowwise.array.scale, tensor.colwise.array.scale)
    assert np.any(np.asarray(tensor.rowwise.data, np.float32) != np.asarray(tensor.colwise.data, np.float32).T)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"flatten_axis": 0}, "`flatten_axis` 0 must have dims on both sides"),
        ({"flatten_axis": 2}, "`flatten_axis` 2 must"),
        ({"scale_inv": jnp.ones((4, 3), jnp.float8_e8m0fnu)}, r"`scale_inv` \(4, 3\) does not fit.*should be \(4, 2\)"),
        ({"data_layout": "T"}, "`data_layout` of rowwise MXFP8_1D_SCALING codes must be 'N'"),
        ({"data_layout": "X"}, "must be 'N' or 'T'"),
        ({"q_layout": QuantizeLayout.ROWWISE_COLWISE}, "needs `colwise_data`"),
        ({"group_sizes": jnp.array([4])}, "must be passed with `original_shape`"),
        ({"data": jnp.ones((4, 64), E2M1)}, "MXFP8_1D_SCALING supports codes of .*not float4_e2m1fn"),
    ],
)
def test_the_factory_raises_errors_that_name_what_does_not_fit(change, words):
    codes = {"data": jnp.ones((4, 64), E4M3), "scale_inv": jnp.ones((4, 2), jnp.float8_e8m0fnu)}
    with pytest.raises(ValueError, match=words):
        te.ScaledTensorFactory.create(**{**codes, "scaling_mode": ScalingMode.MXFP8_1D_SCALING, **change})
    scale = jnp.ones((4, 4), E4M3)
    with pytest.raises(ValueError, match="amax / 2688"):
        te.ScaledTensorFactory.create(jnp.ones((4, 64), E2M1), scale, scaling_mode=ScalingMode.NVFP4_1D_SCALING)


@pytest.mark.parametrize("mode", fp4_optimized(MODE_ROWS))
def test_tensors_are_pytrees(mode):
    q, x = quantizer(mode), normal(0, (3, 32, 256))
    tensors = [tex.quantize(matrix, q) for matrix in x]
    assert_same_leaves(jax.jit(lambda x: tex.quantize(x, q))(x[0]), tensors[0])
    stacked = jax.vmap(lambda x: tex.quantize(x, q))(x)
    assert_same_leaves(jax.tree.map(lambda *leaves: jnp.stack(leaves), *tensors), stacked)
    values = jnp.stack([t.colwise.dequantize() for t in tensors])
    np.testing.assert_array_equal(jax.vmap(lambda t: t.colwise.dequantize())(stacked), values)
    np.testing.assert_array_equal(stacked.colwise.dequantize(), values)
    assert stacked.colwise.array.shape == x.shape
    _, scanned = jax.lax.scan(lambda carry, t: (carry, t.colwise.dequantize()), None, stacked)
    np.testing.assert_array_equal(scanned, values)
    chosen = jax.lax.cond(jnp.array(True), lambda: tensors[1], lambda: tensors[2])
    assert_same_leaves(chosen, tensors[1])
    assert_same_leaves(jax.device_put(tensors[0], jax.devices()[0]), tensors[0])


def test_gradients_with_respect_to_the_other_operand_of_a_tensor():
    x, w = normal(0, (8, 64)), normal(1, (64, 32))
    held = tex.quantize(x, quantizer(ScalingMode.MXFP8_1D_SCALING))

    @jax.jit
    def loss(w, held):
        return te.dense.dense(
            held.dequantize(), w, quantizer_set=te.QuantizerFactory.create_set(fp8_recipe="mxfp8")
        ).sum()

    expected = jax.grad(lambda w: train.dense(held.dequantize(), w, recipe="mxfp8").sum())(w)
    np.testing.assert_array_equal(jax.grad(loss)(w, held), expected)


def test_a_checkpoint_policy_can_save_a_tensor_by_name_without_turning_448_into_nan():
    named = quantizer(ScalingMode.CURRENT_TENSOR_SCALING, QuantizeLayout.ROWWISE, checkpoint_name="codes")

    def f(x, w):
        held = tex.quantize(jax.lax.stop_gradient(x), named).checkpoint(named)
        return jnp.sum(jnp.sin(held.dequantize() * w))

    x, w = normal(0, (4, 8)), normal(1, (4, 8))
    policy = jax.checkpoint_policies.save_only_these_names("codes")
    expected = jax.grad(f, argnums=1)(x, w)
    np.testing.assert_allclose(jax.grad(jax.checkpoint(f, policy=policy), argnums=1)(x, w), expected, rtol=1e-6)
    assert np.all(np.isfinite(expected))
    text = str(jax.make_jaxpr(lambda x: tex.quantize(x, named).checkpoint(named))(x))
    assert text.count("name=codes") == 3
    plain = tex.quantize(x, None)
    assert plain.checkpoint(None) is plain
