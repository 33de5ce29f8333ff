"""ScaledArray: a pytree whose transpose, reshape and indexing commute with dequantisation."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from tables import EACH_FORMAT, fp4_optimized

import scaledot as sd

LAYOUTS = [  # format, block
    ("fp8_e4m3", (0, 0, 0)),
    ("fp8_e4m3", (0, 0)),
    ("int8", (0,)),
    ("mxfp8", (32,)),
    ("mxfp4", (32, 1)),
    ("nvfp4", (16, 16)),
    ("nf4", (64,)),
    ("int4", (8, 4, 32)),
    ("int8", (1,)),
]


def sample(shape=(8, 64, 128), seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def make(format, block, shape=(8, 64, 128), **options):
    return sd.quantize(sample(shape), format, block=block, **options)


def same(a, b):
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


layouts = pytest.mark.parametrize(("format", "block"), LAYOUTS)


@layouts
def test_shape_and_dtype_are_those_of_the_quantised_array(format, block):
    q = make(format, block)
    assert (q.shape, q.ndim, q.size, len(q), q.dtype) == ((8, 64, 128), 3, 8 * 64 * 128, 8, np.float32)
    assert q.scale.ndim == q.ndim


@layouts
@pytest.mark.parametrize("axes", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (0, -1, -2)])
def test_transpose_commutes_with_dequantize(format, block, axes):
    q = make(format, block)
    same(sd.dequantize(q.transpose(axes)), sd.dequantize(q).transpose(axes))
    same(sd.dequantize(q.transpose(*axes)), sd.dequantize(q).transpose(axes))


@layouts
def test_transposing_twice_is_the_same_tree(format, block):
    q = make(format, block)
    assert jax.tree.structure(q.T.T) == jax.tree.structure(q)
    assert jax.tree.structure(q.mT.mT) == jax.tree.structure(q)
    same(sd.dequantize(q.swapaxes(0, 2)), sd.dequantize(q).swapaxes(0, 2))
    same(sd.dequantize(q.mT), sd.dequantize(q).mT)


@pytest.mark.parametrize(
    ("format", "block", "shape"),
    [
        ("fp8_e4m3", (0, 0, 0), (64, 1024)),
        ("fp8_e4m3", (0, 0, 0), (-1,)),
        ("fp8_e4m3", (0, 0), (2, 4, 64, 128)),
        ("fp8_e4m3", (0, 0), (8, 64 * 128)),
        ("int8", (0,), (512, 128)),
        ("int8", (0,), (65536,)),
        ("mxfp8", (32,), (512, 128)),
        ("mxfp8", (32,), (8 * 64 * 128,)),
        ("mxfp8", (32,), (8, 64, 2, 64)),
        ("mxfp8", (32,), (8, 64, 4, 32)),
        ("mxfp8", (32,), (8, 64, 8, 16)),
        ("nf4", (64,), (512, 1, 128)),
        ("nvfp4", (16, 16), (2, 4, 64, 128)),
        ("mxfp4", (32, 1), (4, 2, 64, 128)),
        ("int8", (1,), (16, 4096)),
    ],
)
def test_reshape_keeps_values_and_scales(format, block, shape):
    q = make(format, block)
    r = q.reshape(shape)
    same(sd.dequantize(r), sd.dequantize(q).reshape(shape))
    assert r.scale.size == q.scale.size
    same(sd.dequantize(r.reshape(q.shape)), sd.dequantize(q))


@pytest.mark.parametrize(
    ("format", "block", "shape", "message"),
    [
        (
            "mxfp4",
            (32, 1),
            (8, 8192),
            r"axes \[-2, -1\] of \[64, 128\] to \[8192\]: that would cut blocks of \[32, 1\]",
        ),
        ("nf4", (64,), (8, 64, 3, 128), r"cannot reshape \(8, 64, 128\) of 65536 elements to \(8, 64, 3, 128\)"),
        ("nf4", (64,), (-1, -1), r"cannot reshape"),
    ],
)
def test_a_reshape_that_would_cut_blocks_is_refused(format, block, shape, message):
    q = make(format, block)
    with pytest.raises(ValueError, match=message):
        q.reshape(shape)


@given(st.data())
def test_reshape_never_changes_dequantised_values(data):
    shapes = [
        (8, 64, 128),
        (512, 128),
        (8, 8192),
        (2, 4, 64, 128),
        (8, 64, 4, 32),
        (8, 64, 8, 16),
        (64, 8, 128),
        (65536,),
    ]
    format, block = data.draw(st.sampled_from(LAYOUTS))
    q = make(format, block)
    values = np.asarray(sd.dequantize(q))
    for shape in data.draw(st.lists(st.sampled_from(shapes), min_size=1, max_size=3)):
        with contextlib.suppress(ValueError):  # reshapes that would cut blocks are tested above
            q = q.reshape(shape)
        same(sd.dequantize(q), values.reshape(q.shape))


INDICES = [
    3,
    -1,
    slice(2, 5),
    (slice(None), 5),
    (Ellipsis, 7),
    (2, 3, 40),
    (None, slice(None, None, 2)),
    (slice(None), slice(32, 64), slice(64, 128)),
    (Ellipsis, slice(0, 64)),
    (Ellipsis, None),
    np.array([0, 3, 3]),
    (slice(None), np.array([[1, 63], [-2, 7]])),
    (slice(None), slice(None), np.array([0, 33, 127])),
    (np.array([1, 2]), slice(None), np.array([5, 6])),
    (2, slice(None), np.array([5, 6])),
    (np.array([1, 2]), np.array([5, 6])),
    (np.array([0, 1]), 3, slice(0, 64)),
    (slice(0, 0),),
    [1, 2],
]


@layouts
@pytest.mark.parametrize("index", INDICES, ids=str)
def test_indexing_commutes_with_dequantize(format, block, index):
    q = make(format, block)
    numpy_index = np.array(index) if isinstance(index, list) else index
    same(sd.dequantize(q[index]), np.asarray(sd.dequantize(q))[numpy_index])


def test_a_slice_that_would_cut_a_block_is_refused():
    q = make("mxfp8", (32,))
    with pytest.raises(
        ValueError, match=r"slice 0:48:1 of axis -1 would cut blocks of 32; start and stop at multiples"
    ):
        q[..., :48]
    with pytest.raises(ValueError, match="would cut"):
        q[..., ::2]


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (99, IndexError, "index 99 is out of bounds for axis 0 of 8"),
        ((0, 0, 0, 0), IndexError, "too many indices"),
        ((..., ...), IndexError, "single ellipsis"),
        (np.array([True, False]), TypeError, "boolean mask"),
        (True, TypeError, "boolean mask"),
        ("a", TypeError, "indexed by str"),
        (1.5, TypeError, "indexed by float"),
    ],
)
def test_invalid_indices_are_refused(index, error, message):
    with pytest.raises(error, match=message):
        make("int8", (0,))[index]


def test_a_traced_index_selects_codes_and_scales():
    q = make("mxfp8", (32,))
    got = jax.jit(lambda q, i: sd.dequantize(q[i, :, i]))(q, 5)
    same(got, np.asarray(sd.dequantize(q))[5, :, 5])


def test_short_last_blocks_survive_slicing():
    q = sd.quantize(sample((4, 200)), "fp8_e4m3", block=128, pad=True)
    assert q.scale.shape == (4, 2)
    same(sd.dequantize(q[:, 128:]), np.asarray(sd.dequantize(q))[:, 128:])


def test_iteration_gives_rows():
    q = make("mxfp8", (32,))
    same(np.stack([sd.dequantize(row) for row in q]), sd.dequantize(q))


def per_expert():
    return jax.vmap(lambda x: sd.quantize(x, "nvfp4"))(sample())


def test_tensor_scales_per_leading_index_are_sliced_and_transposed():
    q = per_expert()
    assert q.tensor_scale.shape == (8,)
    values = np.asarray(sd.dequantize(q))
    same(sd.dequantize(q[2]), values[2])
    same(sd.dequantize(q[1:5]), values[1:5])
    same(sd.dequantize(q.mT), values.swapaxes(1, 2))
    same(sd.dequantize(q.reshape(8, 32, 256)), values.reshape(8, 32, 256))


def test_operations_that_would_break_up_tensor_scales_are_refused():
    q = per_expert()
    with pytest.raises(ValueError, match="must stay in front"):
        q.transpose(1, 0, 2)
    with pytest.raises(ValueError, match=r"must stay \(8,\)"):
        q.reshape(512, 128)
    with pytest.raises(IndexError, match="`tensor_scale` has the leading 1 axes"):
        q[np.array([0, 1])]


def test_rotation_follows_its_axis():
    q = make("nvfp4", (16,), rotation=sd.Hadamard())
    values = np.asarray(sd.dequantize(q))
    assert q.rotation.axis == -1
    assert q.T.rotation.axis == -3
    np.testing.assert_allclose(sd.dequantize(q.T), values.T, atol=1e-6)
    np.testing.assert_allclose(sd.dequantize(q.reshape(512, 128)), values.reshape(512, 128), atol=1e-6)
    np.testing.assert_allclose(sd.dequantize(q[:, 3, 16:48]), values[:, 3, 16:48], atol=1e-6)
    with pytest.raises(IndexError, match="rotated in groups of 16"):
        q[..., 3]
    with pytest.raises(ValueError, match="axis -1 is rotated and must not be merged or split"):
        q.reshape(8, 64, 2, 64)


def test_astype_changes_only_the_dtype():
    q = make("mxfp8", (32,)).astype(jnp.bfloat16)
    assert q.dtype == jnp.bfloat16
    assert sd.dequantize(q).dtype == jnp.bfloat16
    with pytest.raises(TypeError, match="`dtype` must be a float dtype, not int32"):
        q.astype(jnp.int32)


@pytest.mark.parametrize(
    ("format", "options", "expected"),
    [
        ("mxfp8", {}, 4096 + 128),
        ("mxfp4", {}, 2048 + 128),
        ("nvfp4", {}, 2048 + 256 + 4),
        ("mxfp6_e2m3", {}, 3072 + 128),
        ("int3", {}, 1536 + 32 * 4),
        ("int4", {"calibration": "minmax"}, 2048 + 32 * 4 + 16),
        ("fp8_e4m3", {}, 4096 + 4),
    ],
)
def test_nbytes_counts_packed_bits(format, options, expected):
    assert sd.quantize(sample((32, 128)), format, **options).nbytes == expected


def test_repr_fits_a_line():
    assert repr(make("mxfp8", (32,))) == "ScaledArray(mxfp8[8,64,128], block=(32,), dtype=float32)"


@pytest.mark.parametrize("format", fp4_optimized(EACH_FORMAT))
def test_every_format_supports_jax_transformations(format):
    x = sample((4, 8, 64))
    q = jax.jit(jax.vmap(lambda x: sd.quantize(x, format)))(x)
    values = np.asarray(sd.dequantize(q))
    same(jax.jit(sd.dequantize)(q), values)
    same(jax.vmap(sd.dequantize)(q), values)
    same(jax.lax.map(sd.dequantize, q), values)
    _, scanned = jax.lax.scan(lambda carry, row: (carry, sd.dequantize(row)), 0, q)
    same(scanned, values)
    same(jax.lax.cond(True, lambda q: q, lambda q: q, q).data, q.data)
    carried, _ = jax.lax.scan(lambda q, _: (q.mT.mT, None), q, None, length=2)
    same(sd.dequantize(carried), values)
    transferred = jax.device_put(q, jax.devices()[1])
    assert transferred.data.devices() == {jax.devices()[1]}
    same(sd.dequantize(transferred), values)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[q[i] for i in range(4)])
    same(sd.dequantize(stacked), values)


def test_leaves_may_be_shapes_shardings_or_specs():
    q = make("mxfp8", (32,))
    shapes = jax.eval_shape(lambda x: sd.quantize(x, "mxfp8"), jax.ShapeDtypeStruct((8, 64, 128), jnp.float32))
    assert shapes.shape == (8, 64, 128)
    assert shapes.nbytes == q.nbytes
    assert repr(shapes) == repr(q)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    shardings = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec("x")), q)
    assert isinstance(shardings, sd.ScaledArray)
    assert "mxfp8" in repr(shardings)
    same(sd.dequantize(jax.device_put(q, shardings)), sd.dequantize(q))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"scale": jnp.ones((8, 64, 1), jnp.float8_e8m0fnu)},
            ValueError,
            r"`q.scale` has shape \(8, 64, 1\), but blocks of",
        ),
        ({"scale": None}, ValueError, "`q.scale` has shape None"),
        ({"scale": jnp.ones((8, 64, 4))}, TypeError, "`q.scale` is float32, but mxfp8 stores float8_e8m0fnu"),
        ({"zero": jnp.ones((8, 64, 1))}, ValueError, "`q.zero` has shape"),
        ({"data": jnp.ones((8, 64, 128))}, TypeError, "`q.data` is float32, but mxfp8 stores float8_e4m3fn"),
        ({"tensor_scale": jnp.ones((3,))}, ValueError, r"`q.tensor_scale` of shape \(3,\) does not match"),
        ({"block": (1, 1, 1, 32)}, ValueError, "has more entries than the 3 axes"),
        ({"format": "mxfp8"}, TypeError, "`q.format` must be a Format, not 'mxfp8'"),
    ],
)
def test_inconsistent_leaves_are_refused_by_dequantize(changes, error, message):
    broken = dataclasses.replace(make("mxfp8", (32,)), **changes)
    with pytest.raises(error, match=message):
        sd.dequantize(broken)


def test_invalid_types_are_refused():
    with pytest.raises(TypeError, match="`q` must be a ScaledArray"):
        sd.dequantize(jnp.ones(3))
    with pytest.raises(TypeError, match="`dtype` must be a float dtype, not int32"):
        sd.dequantize(make("mxfp8", (32,)), jnp.int32)
    with pytest.raises(TypeError, match="axes and sizes must be integers"):
        make("mxfp8", (32,)).reshape("a")


def test_arrays_without_elements_are_reshaped_and_sliced():
    q = sd.quantize(np.zeros((0, 64), np.float32), "mxfp8")
    assert q.scale.shape == (0, 2)
    assert sd.dequantize(q.reshape(0, 2, 32)).shape == (0, 2, 32)
    assert sd.dequantize(q.T).shape == (64, 0)
    assert sd.dequantize(q[:, :32]).shape == (0, 32)


CONVERSIONS = {
    "np.asarray": np.asarray,
    "np.array of a list": lambda q: np.array([q, q]),
    "NumPy operator": lambda q: np.ones(q.shape, np.float32) * q,
    "jnp.asarray": jnp.asarray,
    "jnp.array of a list": lambda q: jnp.array([q, q]),
    "jnp function": lambda q: jnp.add(q, 1),
    "JAX operator": lambda q: jnp.ones((2, q.shape[0])) @ q,
    "jax.typeof": jax.typeof,
    "under jit": jax.jit(lambda q: jnp.sin(q)),
}


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
def test_implicit_conversion_raises_and_indexes_no_element(convert, monkeypatch):
    """NumPy would otherwise index all 784 x 512 elements one by one, which took more than ten minutes."""
    q = make("mxfp8", (32,), (784, 512))
    monkeypatch.setattr(sd.ScaledArray, "__getitem__", lambda *_: pytest.fail("an element was indexed"))
    with pytest.raises(TypeError, match=r"\[784,512\].* does not convert to an array .* scaledot.dequantize\(q\)"):
        convert(q)


def test_a_plain_flax_layer_refuses_a_quantised_kernel():
    nn = pytest.importorskip("flax.linen")
    params = {"kernel": make("mxfp8", (32,), (64, 32)), "bias": np.zeros(32, np.float32)}
    with pytest.raises(TypeError, match=r"write scaledot\.dequantize\(q\)"):
        nn.Dense(32).apply({"params": params}, np.ones((2, 64), np.float32))


def test_shape_dtype_and_tree_functions_need_no_conversion():
    q = make("mxfp8", (32,), (4, 32))
    assert (np.shape(q), jnp.shape(q), np.ndim(q), jnp.result_type(q)) == ((4, 32), (4, 32), 2, np.float32)
    host = jax.tree.map(np.asarray, jax.device_get(q))
    assert [type(leaf) for leaf in jax.tree.leaves(host)] == [np.ndarray] * 2
    same(sd.dequantize(host), sd.dequantize(q))
    assert len(list(q)) == len(q) == 4
