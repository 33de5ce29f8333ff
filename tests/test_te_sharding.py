"""`compat.transformer_engine`: logical names of mesh axes, and collective GEMMs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data import normal
from jax.sharding import AxisType, PartitionSpec
from meshes import assert_equal_up_to_summation_order
from tables import params_of
from te_modes import assert_same_leaves, quantizer

from scaledot.compat import transformer_engine as te
from scaledot.compat.transformer_engine import cpp_extensions as tex
from scaledot.compat.transformer_engine.quantize import QuantizeLayout, ScalingMode
from scaledot.plan.hlo import collectives


def test_stacked_tensors_are_sharded_by_logical_names_of_axes():
    mesh = jax.make_mesh((2, 4, 1), ("dp", "tp", "fsdp"), axis_types=(AxisType.Auto,) * 3)
    q = quantizer(ScalingMode.CURRENT_TENSOR_SCALING, QuantizeLayout.COLWISE)
    names = (None, te.sharding.BATCH_AXES, te.sharding.HIDDEN_TP_AXES)
    with jax.set_mesh(mesh), te.global_shard_guard(te.MeshResource("dp", "tp", fsdp_resource="fsdp")):
        stacked = jax.vmap(q.quantize)(jnp.ones((8, 64, 128)))
        sharded = jax.jit(lambda t: te.with_sharding_constraint_by_logical_axes(t, names))(stacked)
        assert sharded.data.sharding.spec == PartitionSpec(None, "tp", "dp")


def test_a_collective_gemm_shards_results_and_gradients():
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    ops = te.CollectiveOpSet.create(te.CollectiveOp.ALL_GATHER)
    x, w = normal(0, (4, 32, 64)), normal(1, (64, 32))

    def f(x, w):
        return te.dense.dense(x, w, contracting_dims=((2,), (0,)), collective_op_set=ops)

    with jax.set_mesh(mesh), te.global_shard_guard(te.MeshResource(fsdp_resource="dp", tpsp_resource="tp")):
        assert jax.jit(f)(x, w).sharding.spec == PartitionSpec("dp", None, "tp")
        dx = jax.jit(jax.grad(lambda x: f(x, w).sum()))(x)
    assert dx.sharding.spec == PartitionSpec("dp", "tp")


def test_constraints_by_logical_axes_follow_global_shard_guard_and_flax_rules():
    from flax import linen as nn

    x = jnp.ones((8, 64))
    names = (te.sharding.BATCH_AXES, te.sharding.HIDDEN_TP_AXES)
    constrain = te.with_sharding_constraint_by_logical_axes
    assert constrain(x, names) is x
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
    resource = te.MeshResource(dp_resource="data", tp_resource="model")
    with jax.set_mesh(mesh), te.global_shard_guard(resource):
        assert jax.jit(lambda x: constrain(x, names))(x).sharding.spec == PartitionSpec("data", "model")
        assert constrain(x, None) is x
        tensor = tex.quantize(x, quantizer(ScalingMode.NVFP4_1D_SCALING))
        sharded = jax.jit(lambda t: constrain(t, names))(tensor)
        assert sharded.rowwise.data.sharding.spec == PartitionSpec("data", "model")
        assert sharded.colwise.data.sharding.spec == PartitionSpec("model", "data")
        assert sharded.rowwise.scale_inv.sharding.spec == PartitionSpec("data", "model")
        assert_same_leaves(sharded, tensor)
        with pytest.raises(ValueError, match="one name for each axis"):
            constrain(x, names[:1])
        with nn.logical_axis_rules([("rows", "model")]):
            assert jax.jit(lambda x: constrain(x, ("rows", None)))(x).sharding.spec == PartitionSpec("model")
    absent = te.MeshResource(dp_resource="absent")
    missing = pytest.raises(ValueError, match="no axis 'absent'; it has 'data', 'model'")
    with jax.set_mesh(mesh), te.global_shard_guard(absent), missing:
        constrain(x, names)
    assert te.sharding.global_mesh_resource() == te.MeshResource()
    with pytest.raises(TypeError, match="must be a MeshResource"), te.global_shard_guard("data"):
        pass


def test_tp_resource_and_tpsp_resource_cannot_both_be_in_use():
    mesh = jax.make_mesh((2, 2, 2), ("dp", "tp", "tpsp"), axis_types=(AxisType.Auto,) * 3)
    both = te.MeshResource(dp_resource="dp", tp_resource="tp", tpsp_resource="tpsp")
    refused = pytest.raises(ValueError, match="'tp' and `tpsp_resource` 'tpsp' are both set")
    with jax.set_mesh(mesh), refused, te.global_shard_guard(both):
        pass
    with pytest.raises(ValueError, match="both 'tp'; use one"):
        te.MeshResource(tp_resource="tp", tpsp_resource="tp")
    idle = jax.make_mesh((2, 1, 2), ("dp", "tp", "tpsp"), axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[:4])
    with jax.set_mesh(idle), te.global_shard_guard(both):
        x = te.with_sharding_constraint_by_logical_axes(jnp.ones((4, 4)), (None, te.sharding.W_TP_AXES))
        assert x.sharding.spec == PartitionSpec(None, "tpsp")


@pytest.mark.optimized
@pytest.mark.parametrize(
    "op",
    params_of(
        [te.CollectiveOp.ALL_GATHER, te.CollectiveOp.REDUCE_SCATTER], ["REDUCE_SCATTER"], name=lambda op: op.name
    ),
)
def test_collective_gemms_transfer_codes_and_accumulators_in_rings(op):
    """Forward and backward; kernels are also sharded over fsdp."""
    x, w = normal(0, (4, 256, 256), jnp.bfloat16), normal(1, (256, 256))
    ops, names = te.CollectiveOpSet.create(op), (te.sharding.W_FSDP_AXES, te.sharding.W_TP_AXES)
    options = {
        "contracting_dims": ((2,), (0,)),
        "quantizer_set": te.QuantizerFactory.create_set(fp8_recipe="fp8_current"),
        "kernel_axes": names if op.is_all_gather else names[::-1],
    }

    def step(x, w, **collective):
        y, vjp = jax.vjp(lambda x, w: te.dense.dense(x, w, **options, **collective), x, w)
        return y, *vjp(jnp.ones_like(y))

    single = jax.jit(step)(x, w)
    mesh = jax.make_mesh((2, 4), ("fsdp", "tpsp"), axis_types=(AxisType.Auto,) * 2)
    resource = te.MeshResource(fsdp_resource="fsdp", tpsp_resource="tpsp")
    with jax.set_mesh(mesh), te.global_shard_guard(resource):
        program = jax.jit(lambda x, w: step(x, w, collective_op_set=ops)).lower(x, w).compile()
        found = program(x, w)
    assert_equal_up_to_summation_order(found, single, jnp.matmul, x, w, 1024)
    large = [one for one in collectives(program.as_text(), dict(mesh.shape)) if one.bytes > 4096]
    in_rings = [one for one in large if one.axes == ("tpsp",)]
    assert {one.kind for one in in_rings} == {"collective-permute"}
    assert {one.dtype for one in in_rings} == {"u8", "f32"}
    assert not [one for one in large if one.kind == "all-gather" and one.dtype != "u8"]


@pytest.mark.parametrize("op", te.CollectiveOp, ids=lambda op: op.name)
def test_collective_gemms_match_one_device_and_have_the_declared_sharding(op):
    x, w = normal(0, (2, 8, 64)), normal(1, (64, 32))
    options = {"contracting_dims": ((2,), (0,)), "quantizer_set": te.QuantizerFactory.create_set(fp8_recipe="mxfp8")}
    ops = te.CollectiveOpSet.create(op)
    single = te.dense.dense(x, w, **options)
    np.testing.assert_array_equal(te.dense.dense(x, w, collective_op_set=ops, **options), single)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
    with jax.set_mesh(mesh), te.global_shard_guard(te.MeshResource(dp_resource="data", tpsp_resource="model")):
        y = jax.jit(lambda x, w: te.dense.dense(x, w, collective_op_set=ops, **options))(x, w)
        np.testing.assert_allclose(y, single, rtol=1e-5, atol=1e-4)
        if op.is_all_gather:
            assert y.sharding.spec == PartitionSpec("data", None, "model")
        if op.is_reduce_scatter:
            assert y.sharding.spec == PartitionSpec("data", "model")
