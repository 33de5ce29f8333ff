"""Orbax restores trees that hold ScaledArrays bit for bit: sharded, in the background, and into other shardings."""

import dataclasses
import math
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import scaledot as sd
from scaledot.format_variants import qwix
from scaledot.parallel.sharding import shard

ocp = pytest.importorskip("orbax.checkpoint")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # inside Orbax

SHAPE = (16, 128)
# Rows of FORMATS have every dtype of codes but these.
OTHERS = {"float8_e4m3": qwix.float8_e4m3, "uint4": qwix.uint4, "float8_e5m2fnuz": qwix.float8_e5m2fnuz}
EACH = {**sd.FORMATS, **OTHERS}


def mesh(*sizes):
    names = ("x", "y")[: len(sizes)]
    kinds = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.make_mesh(sizes, names, axis_types=kinds, devices=jax.devices()[: math.prod(sizes)])


def all_codes(format, shape=SHAPE):
    """Every bit pattern of a code, in order."""
    dtype = format.code_dtype
    width = 2 if format.name == "int2" else format.bits
    bits = jnp.arange(math.prod(shape), dtype=jnp.uint32).reshape(shape) % 2**width
    unsigned = jnp.uint4 if dtype in (jnp.int4, jnp.uint4, jnp.float4_e2m1fn) else jnp.uint8
    return jax.lax.bitcast_convert_type(bits.astype(unsigned), dtype)


def array_of(format):
    """All codes, with scales of a quantised array; integer formats with zero points."""
    x = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    q = sd.quantize(x, format)
    zero = all_codes(format, q.scale.shape) if not format.is_float and format.codebook is None else None
    return dataclasses.replace(q, data=all_codes(format), zero=zero)


def assert_same(a, b):
    """Structure with all static fields, dtypes, shapes and bits."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes()


@pytest.fixture(scope="module")
def tree():
    arrays = {name: array_of(format) for name, format in EACH.items()}
    return {"arrays": arrays, "bias": jnp.arange(8.0), "codes": jnp.arange(8, dtype=jnp.uint4), "step": jnp.int32(7)}


@pytest.fixture(scope="module")
def saved(tree, tmp_path_factory):
    path = tmp_path_factory.mktemp("orbax") / "saved"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sd.orbax.save(path, tree)
    return path


def test_every_format_is_restored_bit_for_bit(tree, saved):
    assert_same(sd.orbax.restore(saved, jax.eval_shape(lambda: tree)), tree)


def test_dtypes_that_are_converted_are_those_that_tensorstore_lacks():
    tensorstore = pytest.importorskip("tensorstore")
    lacking = set()
    for name in ("int2", "uint2", "int4", "uint4", "float4_e2m1fn", "float8_e4m3", "float8_e4m3fn", "float8_e8m0fnu"):
        try:
            tensorstore.dtype(name)
        except (TypeError, ValueError):
            lacking.add(np.dtype(getattr(ml_dtypes, name)))
    assert lacking == set(sd.orbax._SAVED_AS)


@pytest.mark.parametrize("name", list(EACH))
def test_saveable_arrays_convert_back(tree, name):
    q = tree["arrays"][name]
    saveable = sd.orbax.to_saveable({"w": q})
    assert not {leaf.dtype for leaf in jax.tree.leaves(saveable)} & set(sd.orbax._SAVED_AS)
    assert_same(sd.orbax.from_saveable(saveable), {"w": q})


def sharded_tree(of_mesh, spec):
    """The same arrays in host memory and on a mesh."""
    w = np.random.default_rng(1).standard_normal((64, 256)).astype(np.float32)
    whole = {name: sd.quantize(w, name) for name in ("fp8_e4m3", "nvfp4", "nf4", "mxfp6_e2m3", "int4")}
    return jax.tree.map(np.array, whole), shard(whole, spec, mesh=of_mesh)


def structs(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def test_shards_saved_in_the_background_are_restored_into_other_shardings(tmp_path):
    whole, placed = sharded_tree(mesh(8), P("x", None))
    _, other = sharded_tree(mesh(2, 4), P("y", "x"))
    with ocp.StandardCheckpointer() as checkpointer:
        sd.orbax.save(tmp_path / "saved", placed, checkpointer=checkpointer)
        jax.tree.map(lambda x: x.delete(), placed)  # saving has copied them
        checkpointer.wait_until_finished()
        restored = sd.orbax.restore(tmp_path / "saved", structs(other), checkpointer=checkpointer)
    assert_same(restored, whole)
    assert [x.sharding for x in jax.tree.leaves(restored)] == [x.sharding for x in jax.tree.leaves(other)]
    codes = restored["nf4"].data
    assert codes.dtype == jnp.uint4
    assert {shard.data.shape for shard in codes.addressable_shards} == {(16, 128)}


def test_a_target_of_another_format_is_refused_by_name(tree, saved):
    target = jax.eval_shape(lambda: tree)
    int4 = dataclasses.replace(target["arrays"]["nf4"], format=sd.FORMATS["int4"])
    target["arrays"]["nf4"] = int4
    with pytest.raises(
        ValueError, match=r"\['arrays'\]\['nf4'\].*`format.name` was 'nf4' when saved and is 'int4' now"
    ):
        sd.orbax.restore(saved, target)


def test_a_scaled_array_that_was_not_saved_is_refused_by_name(tree, saved):
    target = jax.eval_shape(lambda: tree) | {"bias": jax.eval_shape(lambda: tree["arrays"]["nf4"])}
    with pytest.raises(ValueError, match=r"ScaledArray at \['bias'\]"):
        sd.orbax.restore(saved, target)


def test_relative_paths_are_those_of_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    q = {"w": sd.quantize(jnp.ones((2, 64)), "nf4")}
    sd.orbax.save("saved", q)
    assert_same(sd.orbax.restore(tmp_path / "saved", q), q)
