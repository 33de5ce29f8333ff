"""Shardings of the leaves of ScaledArrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import scaledot as sd
from scaledot import sharding

pytestmark = pytest.mark.jax_versions

MESH = AbstractMesh((2, 4), ("dp", "tp"))
W = jax.ShapeDtypeStruct((256, 512), jnp.float32)


def shapes(format: str, **options) -> sd.ScaledArray:
    return jax.eval_shape(lambda w: sd.quantize(w, format, **options), W)


def entries(q: sd.ScaledArray) -> dict[str, tuple]:
    leaves = {name: getattr(q, name) for name in ("data", "scale", "tensor_scale", "zero")}
    return {name: tuple(spec) for name, spec in leaves.items() if spec is not None}


CASES = [  # format, options, spec, specs of leaves
    ("mxfp8", {}, P("dp", "tp"), {"data": ("dp", "tp"), "scale": ("dp", "tp")}),
    ("fp8_e4m3", {}, P("dp", "tp"), {"data": ("dp", "tp"), "scale": (None, None)}),
    ("fp8_e4m3", {"block": (128, 128)}, P("dp", "tp"), {"data": ("dp", "tp"), "scale": ("dp", "tp")}),
    ("int8", {"axis": 0}, P(("dp", "tp"), None), {"data": (("dp", "tp"), None), "scale": (None, None)}),
    ("int8", {"axis": 1}, P(("dp", "tp")), {"data": (("dp", "tp"), None), "scale": (("dp", "tp"), None)}),
    ("nvfp4", {}, P(None, "tp"), {"data": (None, "tp"), "scale": (None, "tp"), "tensor_scale": ()}),
    (
        "int8",
        {"axis": 0, "calibration": "minmax"},
        P("dp", "tp"),
        {"data": ("dp", "tp"), "scale": (None, "tp"), "zero": (None, "tp")},
    ),
]


@pytest.mark.parametrize(("format", "options", "spec", "expected"), CASES)
def test_scales_are_sharded_with_their_blocks(format, options, spec, expected):
    assert entries(sharding.specs(shapes(format, **options), spec, mesh=MESH)) == expected


def test_a_sharding_that_cuts_blocks_replicates_scales_or_gathers_data_or_raises():
    q, spec = shapes("fp8_e4m3", block=(128, 128)), P("tp", None)  # 64 of 128 rows each
    assert entries(sharding.specs(q, spec, mesh=MESH)) == {"data": ("tp", None), "scale": (None, None)}
    gathered = sharding.specs(q, spec, mesh=MESH, on_indivisible="gather")
    assert entries(gathered) == {"data": (None, None), "scale": (None, None)}
    with pytest.raises(ValueError, match="256 elements in 4 shards of 64 would cut blocks of 128; shard it over 2"):
        sharding.specs(q, spec, mesh=MESH, on_indivisible="raise")
    assert "would cut blocks of 128" in sharding.explain(q, spec, mesh=MESH)


def test_wrong_specs_raise_errors_that_name_them():
    q = shapes("mxfp8")
    with pytest.raises(ValueError, match="the mesh has no axis 'model'; it has 'dp', 'tp'"):
        sharding.specs(q, P("model"), mesh=MESH)
    with pytest.raises(ValueError, match="has 3 entries, but the array of shape"):
        sharding.specs(q, P(None, None, "tp"), mesh=MESH)
    odd = jax.ShapeDtypeStruct((10, 3), jnp.float32)
    with pytest.raises(ValueError, match="of 10 elements cannot be sharded evenly over 4 devices of 'tp'; 8 or 12"):
        sharding.specs(odd, P("tp"), mesh=MESH)
    assert tuple(sharding.specs(odd, P("tp"), mesh=MESH, on_indivisible="gather")) == (None, None)
    with pytest.raises(ValueError, match="there is no mesh"):
        sharding.specs(q, P("tp"))
    with pytest.raises(ValueError, match="`on_indivisible` must be one of drop, gather, raise"):
        sharding.specs(q, P("tp"), mesh=MESH, on_indivisible="pad")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("format", ["mxfp8", "nvfp4", "int4", "nf4"])
def test_arrays_are_placed_by_their_specs(format, kind):
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(kind,) * 2)
    q = sd.quantize(jax.random.normal(jax.random.key(0), W.shape), format)
    sharded = sharding.shard(q, P("dp", "tp"), mesh=mesh)
    expected = sharding.shardings(q, P("dp", "tp"), mesh=mesh)
    for leaf, expected_sharding in zip(jax.tree.leaves(sharded), jax.tree.leaves(expected), strict=True):
        assert leaf.sharding.is_equivalent_to(expected_sharding, leaf.ndim)
    with jax.set_mesh(mesh):
        resharded = jax.jit(lambda q: sharding.constrain(q, P("tp", None)))(sharded)
    np.testing.assert_array_equal(np.asarray(sd.dequantize(resharded)), np.asarray(sd.dequantize(q)))
    assert resharded.data.sharding.spec[0] == "tp"


def test_trees_have_specs_of_their_own():
    tree = {"w": shapes("mxfp8"), "b": jax.ShapeDtypeStruct((512,), jnp.float32)}
    found = sharding.specs(tree, {"w": P(None, "tp"), "b": P("tp")}, mesh=MESH)
    assert tuple(found["w"].scale) == (None, "tp")
    assert tuple(found["b"]) == ("tp",)


def test_logical_axes_follow_the_rules_of_flax_or_those_passed():
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    q = sd.quantize(jnp.ones((256, 512)), "mxfp8")
    rules = [("embed", "dp"), ("mlp", "tp"), ("heads", "tp")]

    def constrained(names, **options):
        return jax.jit(lambda q: sharding.apply_sharding_constraint_by_logical_axes(q, names, **options))(q)

    with jax.set_mesh(mesh):
        assert constrained(("embed", "mlp"), rules=rules).scale.sharding.spec == P("dp", "tp")
        with nn.logical_axis_rules(rules):
            assert constrained(("embed", "heads")).data.sharding.spec == P("dp", "tp")
        sharded = sharding.shard(q, P("dp", None), mesh=mesh)
        unchanged = jax.jit(
            lambda q: sharding.apply_sharding_constraint_by_logical_axes(q, ("other", None), rules=rules)
        )
        assert unchanged(sharded).data.sharding.spec[0] == "dp"
    assert sharding.apply_sharding_constraint_by_logical_axes(q, ("embed", "mlp"), rules=rules) is q
    assert tuple(sharding.logical_spec(("mlp", "heads"), rules)) == ("tp", None)  # each mesh axis is used once
