"""jax.export, Flax's msgpack and Orbax restore a ScaledArray bit for bit."""

import dataclasses
import json
import subprocess
import sys
import warnings

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import scaledot as sd
from scaledot import serialization

pytestmark = pytest.mark.jax_versions

HADAMARD = sd.Hadamard(mask=0xBEEF)
WITH_QUIRKS = dataclasses.replace(
    sd.FORMATS["int8"], name="mine", quirks=sd.Quirks(least_scale=1e-12, empty_scale="eps")
)
FORMATS = [*map(sd.find_format, ("fp8_e5m2", "mxfp8", "mxfp6_e2m3", "nvfp4", "int4", "nf4")), WITH_QUIRKS]


def random_bits(shape, dtype):
    bits = jnp.uint4 if np.dtype(dtype) in (jnp.uint4, jnp.int4, jnp.float4_e2m1fn) else f"uint{8 * dtype.itemsize}"
    numbers = np.random.default_rng(0).integers(0, 256, (*shape, 4), np.uint8).view(np.uint32)[..., 0]
    return jax.lax.bitcast_convert_type(jnp.asarray(numbers).astype(bits), dtype)


def array_of(format):
    """Random codes and scales; nvfp4 has a rotation too, and int4 zero points."""
    scale = random_bits((4, 2), format.scale_dtype(jnp.bfloat16))
    return sd.ScaledArray(
        random_bits((4, 64), format.code_dtype),
        scale,
        random_bits((), np.dtype(np.float32)) if format.two_level else None,
        random_bits(scale.shape, format.code_dtype) if format.name == "int4" else None,
        format=format,
        block=(32,),
        dtype=np.dtype(jnp.bfloat16),
        rotation=HADAMARD if format.name == "nvfp4" else None,
    )


@pytest.fixture(scope="module")
def tree():
    return {format.name: array_of(format) for format in FORMATS}


def assert_same(a, b):
    """Structure with all static fields, dtypes, shapes and bits."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes()


def run(code, *args):
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_static_fields_survive_json(tree):
    for q in tree.values():
        static = serialization.static_fields(q)
        text = serialization.to_json(**static)
        assert serialization.from_json(text) == static
        assert json.loads(text)["format"]["element"] == q.format.element


def test_json_of_another_version_is_refused(tree):
    record = json.loads(serialization.to_json(**serialization.static_fields(tree["mxfp8"])))
    with pytest.raises(ValueError, match="saved in version 2; this scaledot reads version 1"):
        serialization.from_json(json.dumps({**record, "version": 2}).encode())
    newer = {**record, "format": {**record["format"], "shear": 1}}
    with pytest.raises(ValueError, match="a saved Format has fields that this scaledot does not have: shear"):
        serialization.from_json(json.dumps(newer).encode())


def test_an_exported_function_takes_and_returns_scaled_arrays(tree):
    states = sd.init_state("fp8_delayed")
    exported = jax.export.export(jax.jit(lambda tree, states: (tree, states)))(tree, states)
    restored = jax.export.deserialize(exported.serialize())
    assert restored.in_tree == exported.in_tree
    assert_same(restored.call(tree, states), (tree, states))


def test_another_process_loads_an_export_after_importing_scaledot(tree, tmp_path):
    exported = jax.export.export(jax.jit(lambda q, states: q))(tree["nf4"], sd.init_state("fp8_delayed"))
    (tmp_path / "exported").write_bytes(exported.serialize())
    code = """
import sys, jax, scaledot
exported = jax.export.deserialize(open(sys.argv[1], "rb").read())
(q, states), _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)
print(q, q.format == scaledot.FORMATS["nf4"], type(states["x"]).__name__)
"""
    printed = "ScaledArray(nf4[4,64], block=(32,), dtype=bfloat16) True AmaxHistory\n"
    assert run(code, str(tmp_path / "exported")) == printed


def test_flax_restores_the_bits(tree):
    flax = pytest.importorskip("flax")
    params = {"layer": tree, "bias": np.ones(3, np.float32)}
    target = jax.eval_shape(lambda: params)
    assert_same(flax.serialization.from_bytes(target, flax.serialization.to_bytes(params)), params)


def test_leaves_of_a_state_dict_are_arrays(tree):
    flax = pytest.importorskip("flax")
    state = flax.serialization.to_state_dict(tree["nvfp4"])
    assert set(state) == {"data", "scale", "tensor_scale", "static"}
    assert {type(leaf) for leaf in jax.tree.leaves(state)} <= {np.ndarray, type(jnp.ones(()))}


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("mxfp8", r"cannot restore '\./w' as ScaledArray\(mxfp8.*`format.element` was 'float4_e2m1fn' when saved"),
        ("rotation", r"`rotation` was Hadamard\(size=16, mask=48879, axis=-1\) when saved and is None now"),
        ("tensor_scale", "the arrays data, scale, tensor_scale were saved, data, scale are expected"),
    ],
)
def test_flax_refuses_a_target_that_differs(tree, target, message):
    flax = pytest.importorskip("flax")
    saved = flax.serialization.to_bytes({"w": tree["nvfp4"]})
    other = tree["mxfp8"] if target == "mxfp8" else dataclasses.replace(tree["nvfp4"], **{target: None})
    with pytest.raises(ValueError, match=message):
        flax.serialization.from_bytes({"w": other}, saved)


def test_flax_does_not_restore_a_plain_kernel_as_a_scaled_array(tree):
    flax = pytest.importorskip("flax")
    saved = flax.serialization.to_bytes({"w": np.ones((4, 64), np.float32)})
    with pytest.raises(ValueError, match="the saved object is not a ScaledArray"):
        flax.serialization.from_bytes({"w": tree["nvfp4"]}, saved)


def test_flax_may_be_imported_after_scaledot_and_is_not_imported_by_it():
    pytest.importorskip("flax")
    code = """
import sys, numpy as np, scaledot as sd
array = np.ones((2, 32), np.int8)
q = sd.ScaledArray(array, array, format=sd.FORMATS["int8"], block=(1,), dtype=np.dtype("float32"))
assert not any(name.split(".")[0] == "flax" for name in sys.modules)
from flax import serialization
print(type(serialization.from_bytes(q, serialization.to_bytes(q))).__name__)
assert not any(type(finder).__module__.startswith("scaledot") for finder in sys.meta_path)
"""
    assert run(code) == "ScaledArray\n"


def test_orbax_restores_the_bits(tree, tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # orbax's own deprecations
        checkpointer = ocp.StandardCheckpointer()
        checkpointer.save(tmp_path / "saved", sd.orbax.to_saveable(tree))
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "saved", jax.eval_shape(sd.orbax.to_saveable, tree))
        checkpointer.close()
    assert_same(sd.orbax.from_saveable(restored), tree)


def test_saveable_codes_keep_their_bits_and_shapes_keep_their_shardings():
    codes = jnp.arange(16, dtype=jnp.uint4)
    q = sd.ScaledArray(codes, jnp.ones(1), format=sd.FORMATS["nf4"], block=(16,), dtype=np.dtype(np.float32))
    saved = sd.orbax.to_saveable({"w": q, "bias": codes})
    assert saved["bias"] is codes
    assert (np.asarray(saved["w"].data).astype(int) & 15).tolist() == list(range(16))
    shape = jax.ShapeDtypeStruct((16,), jnp.uint4, sharding=codes.sharding)
    changed = sd.orbax.to_saveable(dataclasses.replace(q, data=shape)).data
    assert (changed.dtype, changed.sharding) == (jnp.int4, codes.sharding)
