"""`compat.qwix`: names, their documented behaviour, and comparison with Qwix itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data import normal
from jax import lax
from tables import EACH_FORMAT, params_of

import scaledot as sd
from scaledot import format_variants
from scaledot.compat import qwix
from scaledot.compat.qwix import HowToQuantize, QArray
from scaledot.numerics import encode

MATRIX = (((1,), (0,)), ((), ()))
NAMES = """QArray HowToQuantize quantize quantize_api dequantize calibrate compute_scale_zero_point
quantize_with_scale_zero_point get_scale_shape split_axis transpose_array get_tiled_axes call_with_generic_broadcast
validate_qarray reshape rewriting_take MaybeQArray ShapeT clip_to_calibration clip_gradient_to_calibration
get_accumulator_and_result_type dot_general einsum ragged_dot ragged_dot_general conv_general_dilated
to_qwix from_qwix dot quantize_model quantize_params PtqProvider QtProvider QtRule QuantizationProvider
QuantizationRule DotGeneralQtConfig RaggedDotQtConfig ConvGeneralQtConfig dot_general_qt einsum_qt ragged_dot_qt
conv_general_qt get_noise_fn broadcast_to"""
FLOAT8 = ["float8_e3m4", "float8_e4m3", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz"]
QTYPES = [
    jnp.int8,
    jnp.int4,
    "int2",
    "int3",
    "int5",
    "int6",
    "int7",
    jnp.float8_e4m3fn,
    jnp.float8_e5m2,
    "nf4",
    "mxfp8",
    "mxfp4",
    "uint8",
    "uint4",
    *FLOAT8,
]


def name(qtype):
    return qtype if isinstance(qtype, str) else np.dtype(qtype).name


EACH_QTYPE = params_of(QTYPES, ("int2", "int3", "int5", "int6", "int7", "uint4", "float8_e5m2", *FLOAT8), name)


def test_all_names_exist():
    assert sorted(NAMES.split()) == sorted(qwix.__all__)
    assert all(hasattr(qwix, each) for each in NAMES.split())


@pytest.mark.jax_versions
def test_public_names_of_qwix_exist_or_say_what_to_use():
    real = pytest.importorskip("qwix")
    for each in sorted(vars(real)):
        if each.startswith("_"):
            continue
        if not hasattr(qwix, each):
            with pytest.raises(AttributeError, match=f"Qwix's '{each}' is not provided: "):
                getattr(qwix, each)


def test_importing_a_name_that_is_not_provided_says_what_to_use():
    with pytest.raises(ImportError, match=r"'OdmlQatProvider' is not provided: .* train with QtProvider"):
        from scaledot.compat.qwix import OdmlQatProvider  # noqa: F401
    with pytest.raises(AttributeError, match="has no attribute 'quantise'"):
        qwix.quantise  # noqa: B018


def test_quantize_takes_the_arguments_of_qwix_or_a_howtoquantize():
    x, how = normal(0, (8, 64)), HowToQuantize(qtype=jnp.int8, channelwise_axes=[0], tiled_axes={1: 16})
    by_arguments = qwix.quantize(x, jnp.int8, channelwise_axes=[0], tiled_axes={1: 16}, scale_dtype=jnp.bfloat16)
    by_how = qwix.quantize(x, how, scale_dtype=jnp.bfloat16)
    assert by_how.dtype == by_arguments.dtype == jnp.bfloat16
    np.testing.assert_array_equal(by_arguments.qvalue, by_how.qvalue)
    np.testing.assert_array_equal(by_arguments.scale, by_how.scale)
    with pytest.raises(ValueError, match="`qtype` is a HowToQuantize"):
        qwix.quantize(x, how, channelwise_axes=[1])


# ------------------------------------------------------------------------------------------------ element types

BF16 = np.arange(2**16, dtype=np.uint16).view(jnp.bfloat16).astype(np.float32)


@pytest.mark.parametrize("element", FLOAT8)
def test_every_code_of_a_float_decodes_as_ml_dtypes_and_encodes_back(element):
    format, codes = getattr(format_variants.qwix, element), np.arange(256, dtype=np.uint8)
    expected = codes.view(format.element_dtype).astype(np.float32)
    values = np.asarray(jax.jit(lambda c: encode.decode(c, format))(jnp.asarray(codes.view(format.element_dtype))))
    np.testing.assert_array_equal(values, expected)
    finite = np.isfinite(expected)
    encoded = np.asarray(jax.jit(lambda x: encode.encode(x, format))(jnp.asarray(expected)))
    np.testing.assert_array_equal(encoded.view(np.uint8)[finite], codes[finite])
    assert np.isnan(encoded[np.isnan(expected)].astype(np.float32)).all()


@pytest.mark.parametrize("element", FLOAT8)
def test_every_bfloat16_encodes_to_the_nearest_float8_and_saturates(element):
    format = getattr(format_variants.qwix, element)
    x = BF16[~np.isnan(BF16)]
    encoded = np.asarray(jax.jit(lambda x: encode.encode(x, format))(jnp.asarray(x)))
    expected = np.clip(x, -format.max, format.max).astype(format.element_dtype)
    np.testing.assert_array_equal(encoded.view(np.uint8), expected.view(np.uint8))
    rounded = np.asarray(jax.jit(lambda x: encode.round_to_element(x, format))(jnp.asarray(x)))
    np.testing.assert_array_equal(rounded.view(np.uint32), expected.astype(np.float32).view(np.uint32))


@pytest.mark.parametrize(("element", "largest"), [("uint8", 255), ("uint4", 15)])
def test_unsigned_integers_round_to_nearest_even_and_saturate(element, largest):
    format = getattr(format_variants.qwix, element)
    assert (format.max, format.integer_range) == (largest + 0.5, (0, largest))
    x = BF16[~np.isnan(BF16)]
    codes = np.asarray(encode.encode(jnp.asarray(x), format)).astype(np.float32)
    np.testing.assert_array_equal(codes, np.clip(np.round(x), 0, largest))
    np.testing.assert_array_equal(
        encode.decode(jnp.arange(largest + 1).astype(element), format), np.arange(largest + 1)
    )
    q = qwix.quantize(jnp.array([[0.25, -1.0, 2.0]]), element)
    np.testing.assert_array_equal(q.qvalue[0, 1:].astype(jnp.int32), [0, largest])  # Qwix, too, drops negative elements


def test_mx_scales_of_bfloat16_are_those_of_float32_and_never_saturate():
    """amax / 448 is 1.04 * 2^-20, of which a bfloat16 log2 is -20."""
    x = jnp.full((1, 32), 1.8203125 * 2.0**-12, jnp.bfloat16)
    q = qwix.quantize(x, "mxfp8")
    assert float(q.scale[0, 0]) == float(qwix.quantize(x.astype(jnp.float32), "mxfp8").scale[0, 0]) == 2.0**-19
    theirs = pytest.importorskip("qwix").quantize(x, "mxfp8", tiled_axes={1: 32})
    assert float(theirs.scale[0, 0]) == 2.0**-20
    error, their_error = (abs(float(y[0, 0] / x[0, 0]) - 1) for y in (qwix.dequantize(q), qwix.dequantize(theirs)))
    assert error < their_error


# -------------------------------------------------------------------------------------------------- QArray


def test_a_qarray_is_values_times_scale_repeated_over_tiles():
    q = QArray(jnp.arange(8, dtype=jnp.int8).reshape(2, 4), jnp.array([[1.0, 10.0]]), jnp.array([[1, 2]], jnp.int8))
    np.testing.assert_array_equal(qwix.dequantize(q), [[-1, 0, 0, 10], [3, 4, 40, 50]])
    assert (q.shape, q.ndim, q.dtype, q.qtype) == ((2, 4), 2, jnp.float32, jnp.int8)
    assert (q.scale_tile_shape, q.zero_point_tile_shape) == ((2, 2), (2, 2))
    assert QArray(q.qvalue, q.scale).zero_point_tile_shape is None
    assert q.astype(jnp.bfloat16).dtype == jnp.bfloat16
    assert jax.tree.structure(q).num_leaves == 3
    np.testing.assert_array_equal(jax.jit(qwix.dequantize)(q), qwix.dequantize(q))


@pytest.mark.parametrize(
    "verb", [lambda x: x.T, lambda x: x.mT, lambda x: x.transpose(1, 2, 0), lambda x: x.swapaxes(0, 1)]
)
def test_transposition_permutes_values_and_scales(verb):
    q = qwix.quantize_api(normal(0, (2, 4, 6)), jnp.int8, channelwise_axes=[0], tiled_axes={2: 3})
    np.testing.assert_array_equal(qwix.dequantize(verb(q)), verb(qwix.dequantize(q)))


@pytest.mark.parametrize(
    ("shape", "scale", "new", "fits"),
    [
        ((2, 2, 6), (2, 1, 3), (4, 3, 2), (2, 3, 1)),
        ((2, 2, 6), (1, 1, 1), (24,), (1,)),
        ((2, 6), (2, 1), (2, 3, 2), (2, 1, 1)),
        ((4, 6), (4, 6), (24,), (24,)),
        ((2, 6), (2, 1), (4, 3), (2, 1)),
        ((2, 2, 6), (1, 2, 2), (4, 3, 2), None),
        ((4, 6), (1, 6), (24,), None),
    ],
)
def test_reshape_keeps_scales_if_tiles_stay_whole(shape, scale, new, fits):
    codes, scales = np.arange(np.prod(shape), dtype=np.int8), np.arange(1, 1 + np.prod(scale), dtype=np.float32)
    q = QArray(jnp.asarray(codes.reshape(shape)), jnp.asarray(scales.reshape(scale)))
    if fits is None:
        with pytest.raises(ValueError, match="cannot reshape"):
            q.reshape(*new)
        return
    for changed in (q.reshape(*new), q.reshape(new), qwix.reshape(q, *new)):
        assert changed.scale.shape == fits
        np.testing.assert_array_equal(qwix.dequantize(changed), qwix.dequantize(q).reshape(new))


@pytest.mark.parametrize(
    "index",
    [
        0, (slice(None), 1), (Ellipsis, 3), (None, 0), (slice(0, 1),), (0, slice(None), slice(None)),
        (slice(None), np.array([1, 0, 1])), (slice(None), slice(None), 5), (jnp.array(1),), [0, 1],
    ],
    ids=str,
)  # fmt: skip
def test_indexing_commutes_with_dequantize(index):
    q = qwix.quantize_api(normal(0, (2, 4, 6)), jnp.int8, channelwise_axes=[0], tiled_axes={2: 3})
    at = tuple(index) if isinstance(index, list) else index
    np.testing.assert_array_equal(qwix.dequantize(q[index]), qwix.dequantize(q)[at])
    np.testing.assert_array_equal(qwix.rewriting_take(q, index).qvalue, q[index].qvalue)


def test_a_slice_through_a_tile_is_an_error():
    q = qwix.quantize_api(normal(0, (2, 6)), jnp.int8, tiled_axes={1: 3})
    with pytest.raises(ValueError, match=r"."):
        q[:, 1:4]


@pytest.mark.parametrize(
    ("q", "message"),
    [
        (QArray(jnp.ones((2, 4), jnp.int8), jnp.ones(4)), "rank"),
        (QArray(jnp.ones((2, 4), jnp.int8), jnp.ones((1, 3))), "divide"),
        (QArray(jnp.ones((2, 4), jnp.int16), jnp.ones((1, 4))), "at most 8 bits"),
        (QArray(jnp.ones((2, 4), jnp.int8), jnp.ones((1, 4), jnp.int32)), "a float of at least 16 bits"),
        (QArray(jnp.ones((2, 4), jnp.int8), jnp.ones((1, 4)), jnp.ones((1, 3), jnp.int8)), "zero_point"),
        (QArray(jnp.ones((2, 4), jnp.int8), jnp.ones((1, 4)), jnp.ones((1, 4), jnp.int4)), "`zero_point` is int4"),
    ],
)
def test_invalid_qarrays_are_refused(q, message):
    with pytest.raises(ValueError, match=message):
        qwix.validate_qarray(q)
    with pytest.raises(ValueError, match=message):
        qwix.dequantize(q)


# ------------------------------------------------------------------------------------------- HowToQuantize


def test_how_to_quantize_is_frozen_and_has_keyword_arguments_only():
    how = HowToQuantize(qtype=jnp.int8)
    assert (how.channelwise_axes, dict(how.tiled_axes), how.calibration_method, how.noise_fn) == (
        (),
        {},
        "absmax",
        None,
    )
    with pytest.raises(AttributeError):
        how.qtype = jnp.int4  # type: ignore[misc]
    with pytest.raises(TypeError):
        HowToQuantize(jnp.int8)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ({"channelwise_axes": [0]}, (8, 1)),
        ({"channelwise_axes": [-1]}, (1, 64)),
        ({"tiled_axes": {1: 16}}, (1, 4)),
        ({"tiled_axes": {-1: 16}, "channelwise_axes": [-2]}, (8, 4)),
        ({"tiled_axes": {1: 1}}, (1, 64)),
        ({"tiled_axes": {1: 1.0}}, (1, 1)),
        ({"tiled_axes": {1: 1 / 4}}, (1, 4)),
    ],
)
def test_axes_can_be_negative_and_tile_sizes_fractions(axes, expected):
    how = HowToQuantize(qtype=jnp.int8, **axes)
    assert qwix.get_scale_shape((8, 64), how) == expected
    assert qwix.quantize(normal(0, (8, 64)), how).scale.shape == expected


def test_an_axis_cannot_be_both_channelwise_and_tiled():
    with pytest.raises(ValueError, match="both channelwise and tiled"):
        qwix.quantize(normal(0, (8, 64)), HowToQuantize(qtype=jnp.int8, channelwise_axes=[1], tiled_axes={-1: 16}))
    with pytest.raises(ValueError, match="cannot be tiled"):
        qwix.quantize(normal(0, (8, 64)), HowToQuantize(qtype=jnp.int8, tiled_axes={1: 24}))


@pytest.mark.parametrize("qtype", ["mxfp8", "mxfp4"])
def test_mx_types_have_tiles_of_32_on_the_last_axis(qtype):
    q = qwix.quantize_api(normal(0, (4, 2, 64)), qtype)
    assert q.scale.shape == (4, 2, 2)
    assert np.array_equal(np.exp2(np.round(np.log2(q.scale))), q.scale)
    assert float(jnp.max(jnp.abs(q.qvalue.astype(jnp.float32)))) <= (448 if qtype == "mxfp8" else 6)
    assert qwix.quantize_api(normal(0, (64, 3)), qtype, tiled_axes={0: 32}).scale.shape == (2, 3)
    with pytest.raises(ValueError, match="tiles of 32"):
        HowToQuantize(qtype=qtype, tiled_axes={1: 16})


# ---------------------------------------------------------------------------------------------- arithmetic


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("qtype", EACH_QTYPE)
def test_scales_have_the_dtype_of_the_array(qtype, dtype):
    x = normal(0, (8, 64), dtype)
    x = jnp.abs(x) if name(qtype).startswith("uint") else x
    q = qwix.quantize_api(x, qtype, channelwise_axes=[0])
    assert (q.scale.dtype, q.dtype, qwix.dequantize(q).dtype, q.qtype) == (dtype, dtype, dtype, qtype)
    error = jnp.abs(qwix.dequantize(q).astype(jnp.float32) - x.astype(jnp.float32))
    largest = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=1, keepdims=True)
    step = {"int2": 1, "int3": 0.4, "int4": 0.2, "nf4": 0.2, "mxfp4": 0.4}.get(name(qtype), 0.14)
    assert np.all(error <= step * largest)


def test_integer_bounds_are_half_integers_and_a_zero_scale_becomes_one():
    x = jnp.array([[51.0, -25.5], [0.0, 0.0]])
    q = qwix.quantize_api(x, jnp.int8, channelwise_axes=[0])
    np.testing.assert_array_equal(q.scale, [[np.float32(51) / np.float32(127.5)], [1.0]])
    assert qwix.quantize_api(x, jnp.int4, channelwise_axes=[0]).scale[0, 0] == np.float32(51) / np.float32(7.5)
    scale_dtype = qwix.quantize_api(x.astype(jnp.bfloat16), jnp.int8, scale_dtype=jnp.float32).scale.dtype
    assert scale_dtype == jnp.float32


def test_float16_arrays_keep_small_scales():
    x = normal(0, (4, 64), jnp.float16) * jnp.float16(0.01)
    q = qwix.quantize_api(x, jnp.int8, channelwise_axes=[0])
    assert np.max(np.abs(q.qvalue.astype(jnp.int32))) >= 127


@pytest.mark.parametrize("qtype", [jnp.int8, jnp.int4])
def test_asymmetric_calibration_gives_a_zero_point_of_the_qvalue_dtype(qtype):
    x = jnp.array([[1.0, 5.0, 3.0, 2.0], [-1.0, 3.0, 0.0, 1.0]])
    q = qwix.quantize_api(x, qtype, channelwise_axes=[0], calibration_method="minmax")
    assert q.zero_point.dtype == q.qvalue.dtype
    steps = 255 if qtype == jnp.int8 else 15
    np.testing.assert_allclose(q.scale[:, 0], np.array([5.0, 4.0]) / steps, rtol=1e-6)
    np.testing.assert_allclose(qwix.dequantize(q), x, atol=float(q.scale.max()) / 2 + 1e-6)
    assert np.all(np.asarray(qwix.dequantize(q[1:]))[0, 2] == 0)
    with pytest.raises(ValueError, match="zero point"):
        qwix.quantize_api(x, jnp.float8_e4m3fn, calibration_method="minmax")


def test_calibration_methods():
    x = normal(0, (4, 64))
    how = HowToQuantize(qtype=jnp.int8, channelwise_axes=[0])

    def stats(method):
        return qwix.calibrate(x, HowToQuantize(qtype=jnp.int8, channelwise_axes=[0], calibration_method=method))

    np.testing.assert_array_equal(stats("absmax")["absmax"][:, 0], np.abs(x).max(1))
    np.testing.assert_allclose(stats("absmax,0.5")["absmax"][:, 0], np.abs(x).max(1) / 2)
    np.testing.assert_allclose(stats("rms,3")["absmax"][:, 0], 3 * np.sqrt(np.mean(np.square(x), 1)), rtol=1e-5)
    np.testing.assert_array_equal(stats("minmax")["min"][:, 0], x.min(1))
    assert {k: v.shape for k, v in stats("fixed,3").items()} == {"absmax": (1, 1)}
    assert {k: float(v[0, 0]) for k, v in stats("fixed,-1,3").items()} == {"min": -1.0, "max": 3.0}
    assert {k: float(v[0, 0]) for k, v in stats("fixed,-2,2").items()} == {"absmax": 2.0}
    for wrong in ("rms", "fixed", "fixed,1,2", "median"):
        with pytest.raises(ValueError, match="calibration"):
            stats(wrong)
    scale, zero = qwix.compute_scale_zero_point(qwix.calibrate(x, how), jnp.int8)
    assert zero is None
    given = qwix.quantize_with_scale_zero_point(x, jnp.int8, scale, None)
    np.testing.assert_array_equal(given.qvalue, qwix.quantize(x, how).qvalue)
    with pytest.raises(ValueError, match="floats of at least 16 bits"):
        qwix.quantize_with_scale_zero_point(x.astype(jnp.int32), jnp.int8, scale, None)


def test_a_noise_function_makes_rounding_stochastic():
    x = jnp.full((1, 1000), 0.25).at[0, 0].set(127.5)

    def noise(shape):
        return jax.random.uniform(jax.random.key(3), shape) - 0.5

    q = qwix.quantize(x, HowToQuantize(qtype=jnp.int8, noise_fn=noise))
    expected = jnp.round(x + noise(x.shape))
    np.testing.assert_array_equal(q.qvalue[0, 1:], expected[0, 1:])
    assert 150 < int(jnp.sum(q.qvalue[0, 1:] == 1)) < 350


def test_clip_to_calibration():
    x = jnp.array([[-3.0, -0.5, 0.5, 3.0]])
    bounds = {"absmax": jnp.array([[1.0, 2.0]])}
    np.testing.assert_array_equal(qwix.clip_to_calibration(x, bounds, {1: 2}), [[-1.0, -0.5, 0.5, 2.0]])
    g = jnp.ones_like(x)
    np.testing.assert_array_equal(qwix.clip_gradient_to_calibration(g, x, bounds, "absmax,0.5"), [[0, 1, 1, 0]])
    np.testing.assert_array_equal(qwix.clip_gradient_to_calibration(g, x, bounds, "absmax"), g)
    np.testing.assert_array_equal(qwix.clip_gradient_to_calibration(g, x, bounds, "absmax,1.5"), g)
    bounds = {"min": jnp.array([[-1.0]]), "max": jnp.array([[0.5]])}
    np.testing.assert_array_equal(qwix.clip_gradient_to_calibration(g, x, bounds, "fixed,-1,0.5"), [[0, 1, 1, 0]])
    with pytest.raises(ValueError, match="absmax"):
        qwix.clip_to_calibration(x, {"mean": x}, {})


def test_helpers_split_transpose_and_broadcast():
    assert qwix.split_axis(jnp.ones((4, 6)), {-1: 2, 0: 1 / 2}).shape == (2, 2, 3, 2)
    with pytest.raises(ValueError, match="cannot be tiled"):
        qwix.split_axis(jnp.ones((4, 6)), {1: 4})
    q = qwix.quantize_api(normal(0, (4, 6)), jnp.int8, channelwise_axes=[0], tiled_axes={1: 3})
    assert qwix.get_tiled_axes(q) == {1: 3}
    with pytest.raises(ValueError, match="left out"):
        qwix.transpose_array(jnp.ones((2, 3)), [1])
    with pytest.raises(ValueError, match="cannot broadcast"):
        qwix.call_with_generic_broadcast(jnp.add, jnp.ones((4,)), jnp.ones((3,)))


@pytest.mark.parametrize(
    ("dtypes", "preferred", "expected"),
    [
        ((jnp.int8, jnp.int8), None, (jnp.int32, jnp.float32)),
        ((jnp.int8, jnp.bfloat16), None, (jnp.float32, jnp.float32)),
        ((jnp.int8, jnp.int8), jnp.bfloat16, (jnp.int32, jnp.bfloat16)),
        ((jnp.float8_e4m3fn,), None, (jnp.float32, jnp.float32)),
    ],
)
def test_accumulator_and_result_types(dtypes, preferred, expected):
    arrays = [
        jnp.ones((2, 2), dtype) if dtype == jnp.bfloat16 else QArray(jnp.ones((2, 2), dtype), jnp.ones((1, 1)))
        for dtype in dtypes
    ]
    assert qwix.get_accumulator_and_result_type(*arrays, preferred_element_type=preferred) == expected
    raw = [jnp.ones(2, jnp.int8), jnp.ones(2, jnp.int4)]
    assert qwix.get_accumulator_and_result_type(*raw, preferred_element_type=None) == (jnp.int32, jnp.int32)
    raw = [jnp.ones(2, jnp.float8_e4m3fn)]
    assert qwix.get_accumulator_and_result_type(*raw, preferred_element_type=None)[1] == jnp.bfloat16


# ------------------------------------------------------------------------------------------------ operators


@pytest.mark.parametrize("qtype", EACH_QTYPE)
def test_operators_compute_with_dequantised_values(qtype):
    x, w = normal(0, (8, 64)), normal(1, (64, 4))
    tiles = {} if not name(qtype).startswith("mx") else {0: 32}
    qx, qw = (
        qwix.quantize_api(x, qtype, channelwise_axes=[0]),
        qwix.quantize_api(w, qtype, channelwise_axes=[1], tiled_axes=tiles),
    )
    expected = np.asarray(qwix.dequantize(qx), np.float64) @ np.asarray(qwix.dequantize(qw), np.float64)
    tolerance = {"rtol": 1e-5, "atol": 1e-5 * np.abs(expected).max()}
    np.testing.assert_allclose(qwix.dot_general(qx, qw, MATRIX), expected, **tolerance)
    np.testing.assert_allclose(qwix.einsum("mk,kn->mn", qx, qw), expected, **tolerance)
    np.testing.assert_allclose(qwix.dot_general(qwix.dequantize(qx), qw, MATRIX), expected, **tolerance)
    experts = qwix.quantize_api(
        jnp.stack([w, 2 * w]), qtype, channelwise_axes=[0, 2], tiled_axes={1: 32} if tiles else {}
    )
    values = np.asarray(qwix.dequantize(experts), np.float64)
    rows = np.asarray(qwix.dequantize(qx), np.float64)
    expected = np.concatenate([rows[:3] @ values[0], rows[3:7] @ values[1], np.zeros((1, 4))])
    y = qwix.ragged_dot(qx, experts, jnp.array([3, 4]))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_int32_accumulators_are_scaled_in_float32():
    x = jnp.full((1, 1024), 127.0, jnp.bfloat16).at[0, 0].set(1)
    one = jnp.ones((1, 1), jnp.bfloat16)
    q = QArray(x.astype(jnp.int8), one)
    y = qwix.dot_general(q, q, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    assert float(y[0, 0]) == 127**2 * 1023 + 1


def test_convolutions_compute_with_dequantised_values():
    image, kernel = normal(0, (2, 5, 5, 4)) + 1, normal(1, (3, 3, 4, 6))
    qi = qwix.quantize_api(image, jnp.int8, channelwise_axes=[0], calibration_method="minmax")
    qk = qwix.quantize_api(kernel, jnp.int8, channelwise_axes=[3])
    numbers = ("NHWC", "HWIO", "NHWC")
    y = qwix.conv_general_dilated(qi, qk, (1, 1), "SAME", dimension_numbers=numbers)
    expected = lax.conv_general_dilated(
        qwix.dequantize(qi), qwix.dequantize(qk), (1, 1), "SAME", dimension_numbers=numbers, precision="highest"
    )
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5 * float(jnp.max(jnp.abs(expected))))


@pytest.mark.parametrize(("a", "b"), [((64,), (64,)), ((3, 64), (64,)), ((2, 3, 64), (5, 64, 4)), ((), (3, 4))])
def test_dot_contracts_like_jnp_dot(a, b):
    x, w = normal(0, a), normal(1, b)
    expected = jnp.dot(x, qwix.dequantize(qwix.quantize(w, jnp.int8)), precision="highest")
    y = qwix.dot(x, qwix.quantize(w, jnp.int8))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5 * float(jnp.max(jnp.abs(expected))))


def test_mismatched_axes_raise():
    q = qwix.quantize_api(normal(0, (64, 4)), jnp.int8)
    with pytest.raises(ValueError, match="has 8 elements and axis 0 of rhs has 64"):
        qwix.dot_general(jnp.ones((2, 8)), q, MATRIX)


@pytest.mark.parametrize("qtype", ["nvfp4", "nvint4", "if4"])
def test_a_second_scale_is_not_dropped_silently(qtype):
    with pytest.raises(ValueError, match=f"`qtype` '{qtype}' needs a second scale"):
        qwix.quantize_api(normal(0, (4, 64)), qtype)


# ------------------------------------------------------------------------------------------- comparison with Qwix


@pytest.mark.parametrize("format", EACH_FORMAT)
def test_conversion_to_and_from_qwix_keeps_every_value(format):
    real = pytest.importorskip("qwix")
    q = sd.quantize(normal(0, (4, 64)), format)
    refused = {"mxfp6_e2m3": "6-bit", "mxfp6_e3m2": "6-bit", "if4": "two grids"}
    exact = not q.format.two_level
    if format in refused or not exact:
        with pytest.raises(ValueError, match=refused.get(format, "two levels")):
            qwix.to_qwix(q)
        if format in refused:
            return
    converted = qwix.to_qwix(q, fold=True)
    assert isinstance(converted, real.QArray)
    expected = sd.dequantize(q)
    np.testing.assert_allclose(real.dequantize(converted), expected, rtol=0 if exact else 1e-6)
    np.testing.assert_allclose(sd.dequantize(qwix.from_qwix(converted)), expected, rtol=0 if exact else 1e-6)


def test_arrays_that_a_qarray_cannot_represent_are_refused():
    pytest.importorskip("qwix")
    x = normal(0, (4, 48))
    with pytest.raises(ValueError, match="rotated"):
        qwix.to_qwix(sd.quantize(x, "int8", rotation=sd.Hadamard()))
    with pytest.raises(ValueError, match="short block"):
        qwix.to_qwix(sd.quantize(x, "mxfp8", pad=True))
    with pytest.raises(TypeError, match="has no qvalue"):
        qwix.from_qwix(x)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("qtype", [q for q in QTYPES if not name(q).startswith("mx")], ids=name)
def test_codes_equal_those_of_qwix_up_to_the_last_bit_of_a_division(qtype, dtype):
    real = pytest.importorskip("qwix")
    x = normal(0, (16, 128), dtype)
    options = {"channelwise_axes": [0], "tiled_axes": {1: 32}}
    ours = qwix.quantize_api(x, qtype, **options)
    with jax.numpy_dtype_promotion("standard"):
        theirs = real.quantize(x, qtype, **options)
    assert (ours.qvalue.dtype, ours.scale.dtype, ours.scale.shape) == (
        theirs.qvalue.dtype,
        theirs.scale.dtype,
        theirs.scale.shape,
    )
    np.testing.assert_allclose(
        ours.scale.astype(jnp.float32), theirs.scale.astype(jnp.float32), rtol=2e-7 if dtype == jnp.float32 else 2**-7
    )
    codes = [
        np.asarray(q.qvalue.astype(jnp.int8 if "int" in q.qvalue.dtype.name else jnp.float32), np.float32)
        for q in (ours, theirs)
    ]
    # XLA multiplies by reciprocals: near a tie either of two codes may result.
    assert np.mean(codes[0] != codes[1]) < 0.02


OPERATORS = {
    "dot_general": ((2, 200), (200, 3), lambda of, x, w, **how: of.dot_general(x, w, MATRIX, **how)),
    "einsum": ((2, 200), (200, 3), lambda of, x, w, **how: of.einsum("mk,kn->mn", x, w, **how)),
    "ragged_dot": ((2, 200), (1, 200, 3), lambda of, x, w, **how: of.ragged_dot(x, w, jnp.array([2]), **how)),
    "conv_general_dilated": (
        (2, 50, 4),
        (3, 50, 4),
        lambda of, x, w, **how: of.conv_general_dilated(x, w, (1,), "VALID", **how),
    ),
}


@pytest.mark.parametrize("operator", OPERATORS)
def test_plain_narrow_arrays_accumulate_as_qwix_does(operator):
    real = pytest.importorskip("qwix")
    x_shape, w_shape, call = OPERATORS[operator]
    pairs = [(jnp.int8, jnp.int8), (jnp.int4, jnp.int4), (jnp.float8_e4m3fn, jnp.float8_e4m3fn)]
    if operator != "conv_general_dilated":  # jax.lax, and so Qwix, has no convolutions of two dtypes
        pairs += [(jnp.int8, jnp.int4), (jnp.int8, jnp.float8_e4m3fn)]
    for dtypes in pairs:
        x, w = (jnp.full(shape, 2, dtype) for shape, dtype in zip((x_shape, w_shape), dtypes, strict=True))
        y = call(qwix, x, w)
        with jax.numpy_dtype_promotion("standard"):
            theirs = jax.eval_shape(lambda x, w: call(real, x, w), x, w)
            # XLA does not compile Qwix's dots and convolutions of two int4 arrays on CPUs; only types are compared.
            if dtypes != (jnp.int4, jnp.int4):
                np.testing.assert_array_equal(y, call(real, x, w))
        assert (y.dtype, y.shape) == (theirs.dtype, theirs.shape)
        np.testing.assert_array_equal(np.asarray(y, np.float32), np.full(y.shape, 2 * 2 * 200, np.float32))


@pytest.mark.parametrize("operator", OPERATORS)
def test_plain_narrow_arrays_times_a_qarray_accumulate_as_qwix_does(operator):
    real = pytest.importorskip("qwix")
    x_shape, w_shape, call = OPERATORS[operator]
    scale = jnp.full((1,) * len(w_shape), 0.5, jnp.float16)
    for dtype in (jnp.int8, jnp.int4, jnp.float8_e4m3fn):
        x, codes = jnp.full(x_shape, 3, dtype), jnp.full(w_shape, 2, dtype)
        ours = jax.eval_shape(lambda x, q: call(qwix, x, q), x, QArray(codes, scale))
        with jax.numpy_dtype_promotion("standard"):
            theirs = jax.eval_shape(lambda x, q: call(real, x, q), x, real.QArray(codes, scale))
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    y = call(qwix, jnp.full(x_shape, 3, jnp.int4), QArray(jnp.full(w_shape, 2, jnp.int8), scale))
    np.testing.assert_array_equal(np.asarray(y, np.float32), np.full(y.shape, 3 * 2 * 200 * 0.5, np.float32))


@pytest.mark.parametrize("operator", OPERATORS)
def test_plain_integers_accumulate_in_int32_for_every_preferred_dtype(operator):
    x_shape, w_shape, call = OPERATORS[operator]
    x, w = jnp.ones(x_shape, jnp.int8), jnp.ones(w_shape, jnp.int8)
    for rhs in (w, QArray(w, jnp.ones((1,) * w.ndim))):
        jaxpr = jax.make_jaxpr(lambda x, rhs: call(qwix, x, rhs, preferred_element_type=jnp.float32))(x, rhs)
        assert jaxpr.out_avals[0].dtype == jnp.float32
        assert "preferred_element_type=int32" in str(jaxpr)


@pytest.mark.parametrize(
    ("subscripts", "shapes", "expected"),
    [
        ("mk,kn,np->mp", [(2, 64), (64, 3), (3, 2)], 64 * 3 * 8),
        ("mkj,kn->mn", [(2, 8, 20), (8, 3)], 8 * 20 * 4),
        ("mk->m", [(2, 100)], 200),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn], ids=name)
def test_einsum_of_plain_narrow_arrays_reduces_no_axis_in_their_dtype(subscripts, shapes, expected, dtype):
    y = qwix.einsum(subscripts, *(jnp.full(shape, 2, dtype) for shape in shapes))
    assert y.dtype == (jnp.int32 if dtype == jnp.int8 else jnp.bfloat16)
    np.testing.assert_array_equal(y, np.full(y.shape, expected))


@pytest.mark.parametrize("sizes", [(4, 8), (8, 4), (8, 1)])
@pytest.mark.parametrize("qtype", [None, "int8"])
def test_einsum_repeats_entries_where_one_size_divides_the_other(sizes, qtype):
    x, w = (normal(i, (2, 3, size, 8)) for i, size in enumerate(sizes))
    operands = [a if qtype is None else qwix.quantize(a, qtype, channelwise_axes=[2]) for a in (x, w)]
    dequantised = [qwix.dequantize(a) if isinstance(a, QArray) else a for a in operands]
    repeated = [np.repeat(np.asarray(a, np.float64), 8 // a.shape[2], 2) for a in dequantised]
    expected = np.einsum("BTNH,BSNH->BTNS", *repeated)
    actual = qwix.einsum("BTNH,BSNH->BTNS", *operands)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_einsum_names_sizes_that_do_not_divide_each_other():
    with pytest.raises(ValueError, match="cannot broadcast"):
        qwix.einsum("ij,jk->ik", jnp.ones((2, 3)), jnp.ones((4, 2)))


def test_group_sizes_past_the_last_row_are_clipped_as_by_lax_ragged_dot():
    x, w, sizes = normal(0, (8, 16)), normal(1, (4, 16, 4)), jnp.array([5, 2, 6, 1])
    q = qwix.quantize(w, "int8", channelwise_axes=[0, 2])
    expected = lax.ragged_dot(x, qwix.dequantize(q), sizes)
    np.testing.assert_allclose(qwix.ragged_dot(x, q, sizes), expected, rtol=0, atol=1e-5 * float(abs(expected).max()))
    config = qwix.RaggedDotQtConfig(lhs_qtype=None, rhs_qtype="int8")
    np.testing.assert_array_equal(
        qwix.ragged_dot_qt(x, w, sizes, config), qwix.ragged_dot_qt(x, w, jnp.array([5, 2, 1, 0]), config)
    )
