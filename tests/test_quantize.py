"""quantize and dequantize: properties of every format, block shapes, calibrations, groups, and invalid input."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tables import EXHAUSTIVE_ONLY_FORMATS, params_of

import scaledot as sd
from scaledot import format_variants

FORMATS = [*sd.FORMATS.values(), replace(sd.FORMATS["nvfp4"], name="four_over_six", search="four_over_six")]
JITTED = {f.name: jax.jit(functools.partial(sd.quantize, format=f)) for f in FORMATS}
every_format = pytest.mark.parametrize(
    "format", params_of(FORMATS, (*EXHAUSTIVE_ONLY_FORMATS, "four_over_six"), name=lambda f: f.name)
)


def draw_array(data, shape=(3, 64)):
    """Random magnitudes over many binades, and zeros. Each test uses one shape, because each shape is compiled."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    x = rng.standard_normal(shape) * 2.0 ** data.draw(st.integers(-60, 60))
    x = x * np.exp2(rng.integers(-12, 12, (*shape[:-1], 1)))
    x[rng.random(shape) < data.draw(st.sampled_from([0, 0.1, 0.9]))] = 0
    return x.astype(np.float32)


def raw(leaf):
    return np.asarray(leaf).reshape(-1).view(np.uint8)


def same_tree(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(raw(left), raw(right))


@every_format
@given(st.data())
def test_requantizing_with_the_same_scales_is_the_identity(format, data):
    """q(dq(q(x))) = q(x) if the scales of the first cast are passed to the second."""
    q = sd.quantize(draw_array(data), format)
    again = sd.quantize(sd.dequantize(q), format, scale=q.scale, tensor_scale=q.tensor_scale)
    np.testing.assert_array_equal(sd.dequantize(again), sd.dequantize(q))
    same_tree(again, q)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "int8", "nf4", "fp8_e4m3"])
@given(st.data())
def test_requantizing_gives_the_same_dequantised_values(name, data):
    """Also with recomputed scales, because the block amax is unchanged."""
    values = sd.dequantize(sd.quantize(draw_array(data), name))
    again = sd.dequantize(sd.quantize(values, name))
    np.testing.assert_allclose(again, values, rtol=2.0**-22)


@every_format
@given(st.data())
def test_quantisation_is_monotonic(format, data):
    x = np.sort(draw_array(data, (64,)))
    assert np.all(np.diff(np.asarray(sd.dequantize(sd.quantize(x, format, block=(0,))))) >= 0)


@every_format
@given(st.data())
def test_quantisation_is_odd(format, data):
    x = draw_array(data)
    if format.codebook is not None:  # nf4 is not symmetric
        return
    np.testing.assert_array_equal(
        sd.dequantize(sd.quantize(-x, format)), -np.asarray(sd.dequantize(sd.quantize(x, format)))
    )


@pytest.mark.optimized
@every_format
@given(st.data())
def test_jit_is_bit_identical_to_eager(format, data):
    x = draw_array(data)
    same_tree(JITTED[format.name](x), sd.quantize(x, format))


@pytest.mark.optimized
@pytest.mark.parametrize(
    "format", params_of(FORMATS, {f.name for f in FORMATS} - {"fp8_e4m3", "int8"}, lambda f: f.name)
)
def test_disable_jit_is_bit_identical(format):
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    key = jax.random.key(0)
    compiled = sd.quantize(x, format, rounding="stochastic", key=key)
    with jax.disable_jit():
        same_tree(sd.quantize(x, format, rounding="stochastic", key=key), compiled)
        eager = sd.dequantize(compiled)
    np.testing.assert_array_equal(eager, sd.dequantize(compiled))


@every_format
@given(st.data())
def test_vmap_equals_a_loop(format, data):
    x = draw_array(data, (3, 2, 64))
    mapped = jax.vmap(lambda x: sd.quantize(x, format))(x)
    for i in range(3):
        same_tree(jax.tree.map(lambda leaf: leaf[i], mapped), sd.quantize(x[i], format))  # noqa: B023


@every_format
@given(st.data())
def test_quantisation_commutes_with_transpose(format, data):
    x = draw_array(data, (64, 64))
    same_tree(sd.quantize(x, format, axis=0).T, sd.quantize(x.T, format, axis=-1))


@every_format
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_narrow_inputs_quantise_as_their_float32_values(format, dtype):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 64)), dtype)
    q, from_float32 = sd.quantize(x, format), sd.quantize(x.astype(jnp.float32), format)
    assert q.dtype == dtype
    assert sd.dequantize(q).dtype == dtype
    np.testing.assert_array_equal(np.asarray(q.data).view(np.uint8), np.asarray(from_float32.data).view(np.uint8))
    np.testing.assert_array_equal(sd.dequantize(q), sd.dequantize(from_float32).astype(dtype))
    assert sd.quantize(x, format, dtype=jnp.float16).dtype == jnp.float16


@every_format
def test_stochastic_codes_depend_on_the_key(format):
    x = np.random.default_rng(0).standard_normal((8, 256)).astype(np.float32)
    one, two, other = (sd.quantize(x, format, rounding="stochastic", key=jax.random.key(k)) for k in (0, 0, 1))
    same_tree(one, two)
    assert np.any(np.asarray(one.data).view(np.uint8) != np.asarray(other.data).view(np.uint8))


def relative_bias(format, options, draws):
    """The relative error of the mean of many draws, and its limit for an unbiased cast.

    The limit is 1.2 times the error of one draw / sqrt(draws).
    """
    x = np.random.default_rng(0).standard_normal((16, 256)).astype(np.float32)

    def cast(key):
        return sd.dequantize(sd.quantize(x, format, rounding="stochastic", key=key, **options))

    values = np.asarray(jax.lax.map(cast, jax.random.split(jax.random.key(0), draws)), np.float64)
    errors = np.linalg.norm(values.mean(0) - x), np.linalg.norm(values[0] - x)
    return errors[0] / np.linalg.norm(x), 1.2 * errors[1] / np.linalg.norm(x) / np.sqrt(draws)


GUARDED = replace(sd.FORMATS["nvfp4"], guard=True)


@pytest.mark.parametrize(
    ("format", "options"),
    [("mxfp4", {"rule": "ceil"}), ("fp8_e4m3", {}), ("int4", {}), ("nf4", {}), (GUARDED, {})],
    ids=str,
)
def test_the_mean_of_many_stochastic_casts_is_the_input(format, options):
    bias, limit = relative_bias(format, options, draws=400)
    assert bias < limit


@pytest.mark.parametrize(("format", "options"), [("nvfp4", {}), ("mxfp4", {"rule": "floor"})])
def test_stochastic_casts_that_clip_are_biased(format, options):
    bias, limit = relative_bias(format, options, draws=1000)
    assert bias > limit


@every_format
def test_nonfinite_elements_change_neither_scales_nor_other_elements(format):
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    x[0, :3] = 0.0
    clean = sd.quantize(x, format)
    x[0, :3] = np.inf, -np.inf, np.nan
    q = sd.quantize(x, format)
    np.testing.assert_array_equal(np.asarray(q.scale).view(np.uint8), np.asarray(clean.scale).view(np.uint8))
    got, expected = np.asarray(sd.dequantize(q)), np.asarray(sd.dequantize(clean))
    np.testing.assert_array_equal(got[:, 3:], expected[:, 3:])
    assert got[0, 0] > 0 > got[0, 1]
    assert np.isnan(got[0, 2]) if format.is_float and format.bits == 8 else got[0, 2] == 0


@every_format
def test_zeros_keep_their_signs(format):
    x = np.zeros((2, 64), np.float32)
    x[1] = -0.0
    got = np.asarray(sd.dequantize(sd.quantize(x, format)))
    np.testing.assert_array_equal(got, 0)
    if format.is_float:
        np.testing.assert_array_equal(np.signbit(got), np.signbit(x))


@every_format
def test_subnormals_are_flushed_to_zero(format):
    x = np.full((2, 64), 1e-40, np.float32)
    q = sd.quantize(x, format)
    np.testing.assert_array_equal(sd.dequantize(q), 0)
    same_tree(q, sd.quantize(np.zeros_like(x), format))


@every_format
@pytest.mark.parametrize("largest", [1e38, 1e-30, 1e-35])
def test_extreme_magnitudes_keep_their_accuracy(format, largest):
    """Scales and multipliers are clamped to normal numbers, which may increase the error by a constant factor only."""
    x = np.linspace(0.1, 1, 64, dtype=np.float32)
    plain, extreme = (
        np.asarray(sd.dequantize(sd.quantize(x * np.float32(s), format)), np.float64) for s in (1, largest)
    )
    assert np.abs(extreme / largest - x).max() <= 2.5 * np.abs(plain - x).max() + 1e-6


@every_format
@pytest.mark.parametrize("shape", [(0,), (0, 64), (3, 0)])
def test_empty_arrays_work(format, shape):
    q = sd.quantize(np.zeros(shape, np.float32), format)
    assert sd.dequantize(q).shape == shape
    assert q.shape == shape


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_a_0d_array_is_one_tensor(name):
    q = sd.quantize(np.float32(2.5), name)
    assert (q.scale.shape, q.block) == ((), ())
    assert float(sd.dequantize(q)) == 2.5


def test_a_0d_array_has_no_axis_to_block():
    with pytest.raises(ValueError, match=r"`axis` -1 is out of range for an array with 0 axes"):
        sd.quantize(np.float32(2.5), "mxfp8")


@pytest.mark.parametrize(
    ("block", "axis", "stored", "grid"),
    [
        (None, -1, (0, 0, 0), (1, 1, 1)),
        ((0,), -1, (0,), (4, 6, 1)),
        ((0,), 0, (0, 1, 1), (1, 6, 8)),
        ((0, 0), -1, (0, 0), (4, 1, 1)),
        (2, -1, (2,), (4, 6, 4)),
        ((2,), 1, (2, 1), (4, 3, 8)),
        ((3, 4), -1, (3, 4), (4, 2, 2)),
        ((2, 3), 1, (2, 3, 1), (2, 2, 8)),
        ((2, 4), (0, -1), (2, 1, 4), (2, 6, 2)),
        ((1, 4), -1, (4,), (4, 6, 2)),
        (1, -1, (), (4, 6, 8)),
    ],
)
def test_block_entries_apply_to_the_axes_that_end_at_axis(block, axis, stored, grid):
    x = np.random.default_rng(0).standard_normal((4, 6, 8)).astype(np.float32)
    q = sd.quantize(x, "fp8_e4m3", block=block, axis=axis)
    assert (q.block, q.scale.shape) == (stored, grid)
    full = (1,) * (3 - len(stored)) + stored
    for index in np.ndindex(grid):
        patch = x[tuple(slice(i * (b or 99), (i + 1) * (b or 99)) for i, b in zip(index, full, strict=True))]
        expected = np.float32(1) / (np.float32(448) / np.abs(patch).max())
        assert q.scale[index] == expected


def test_padding_changes_the_shape_of_scales_only():
    x = np.random.default_rng(0).standard_normal((5, 100)).astype(np.float32)
    q = sd.quantize(x, "mxfp8", pad=True)
    assert (q.shape, q.scale.shape) == ((5, 100), (5, 4))
    padded = sd.quantize(np.pad(x, ((0, 0), (0, 28))), "mxfp8")
    np.testing.assert_array_equal(np.asarray(q.scale).view(np.uint8), np.asarray(padded.scale).view(np.uint8))
    np.testing.assert_array_equal(sd.dequantize(q), np.asarray(sd.dequantize(padded))[:, :100])
    square = sd.quantize(x, "fp8_e4m3", block=(4, 64), pad=True)
    assert square.scale.shape == (2, 2)
    assert sd.dequantize(square).shape == (5, 100)


def test_stochastic_bits_do_not_depend_on_padding():
    """They are a function of the flat index in the unpadded array."""
    x = np.random.default_rng(0).standard_normal((5, 96)).astype(np.float32)
    key = jax.random.key(0)
    short = sd.quantize(x, "int8", block=64, pad=True, rounding="stochastic", key=key, scale=np.float32(0.02))
    exact = sd.quantize(x, "int8", block=32, rounding="stochastic", key=key, scale=np.float32(0.02))
    np.testing.assert_array_equal(short.data, exact.data)


def test_scales_that_are_passed_are_used_unchanged():
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    q = sd.quantize(x, "fp8_e4m3", scale=0.5)
    np.testing.assert_array_equal(q.scale, [[0.5]])
    assert np.asarray(q.data).astype(np.float32)[0, 0] == np.asarray(jnp.asarray(x[0, 0] * 2).astype(jnp.float8_e4m3fn))
    ref = sd.quantize(x, "mxfp8")
    same_tree(sd.quantize(x, "mxfp8", scale=ref.scale), ref)
    two = sd.quantize(x, "nvfp4", tensor_scale=np.ones((1,), np.float32))
    assert two.tensor_scale.shape == ()
    assert float(two.tensor_scale) == 1


def test_the_largest_e8m0_scale_is_applied_without_a_subnormal():
    """The reciprocal of code 254 is 2^-127."""
    x = np.linspace(0.25, 1, 32, dtype=np.float32) * np.float32(2.0**127)
    scale = jnp.asarray(np.full((1,), 254, np.uint8)).view(jnp.float8_e8m0fnu)
    q = sd.quantize(x, "mxfp8", scale=scale)
    expected = (x * np.float64(2.0**-127)).astype(jnp.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(q.data).astype(np.float32), expected)
    np.testing.assert_array_equal(sd.dequantize(q), expected * np.float32(2.0**127))


@pytest.mark.parametrize(
    ("calibration", "expected"),
    [
        ("absmax", lambda a: a.max(1)),
        ("absmax,0.5", lambda a: a.max(1) * 0.5),
        ("rms,2", lambda a: 2 * np.sqrt((a**2).mean(1))),
        ("percentile,90", lambda a: np.percentile(a, 90, axis=1)),
        ("percentile,100", lambda a: a.max(1)),
    ],
)
def test_calibrations_map_the_expected_magnitude_to_the_largest_code(calibration, expected):
    x = np.random.default_rng(0).standard_normal((6, 4, 32)).astype(np.float32).reshape(24, 32)
    q = sd.quantize(x, "int8", block=32, calibration=calibration)
    np.testing.assert_allclose(np.asarray(q.scale)[:, 0] * 127, expected(np.abs(x.astype(np.float64))), rtol=1e-6)


@pytest.mark.parametrize("calibration", ["rms,2", "percentile,90"])
def test_calibrations_ignore_padding_and_infinities(calibration):
    x = np.random.default_rng(0).standard_normal((3, 40)).astype(np.float32)
    with_infinities = np.insert(x, 5, np.inf, axis=1)
    q = sd.quantize(with_infinities, "int8", block=64, calibration=calibration, pad=True)
    clean = sd.quantize(x, "int8", block=(0,), calibration=calibration)
    np.testing.assert_allclose(q.scale, clean.scale, rtol=1e-6)


def test_fixed_calibrations_are_per_tensor():
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    q = sd.quantize(x, "int8", calibration="fixed,2.54")
    np.testing.assert_array_equal(q.scale, np.float32([[2.54]]) / np.float32(127))
    q = sd.quantize(x, "int8", calibration="fixed,-1,3")
    assert q.zero.shape == (1, 1)
    np.testing.assert_array_equal(q.scale, np.float32([[4]]) / np.float32(255))
    assert float(sd.dequantize(q).max()) == pytest.approx(min(3, x.max()), abs=0.02)


@pytest.mark.parametrize("format", ["int4", "int2", "mxfp4", "nf4", "fp8_e4m3", "nvfp4"])
def test_mse_is_never_worse_than_absmax(format):
    x = np.random.default_rng(0).standard_t(4, (16, 128)).astype(np.float32)
    plain, searched = (sd.dequantize(sd.quantize(x, format, calibration=c)) for c in ("absmax", "mse"))
    assert np.sum((searched - x) ** 2) <= np.sum((plain - x) ** 2) * (1 + 1e-6)


def test_four_over_six_keeps_the_smaller_error():
    x = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)
    both = replace(sd.FORMATS["nvfp4"], search="four_over_six")
    amax = np.asarray(sd.amax(x, block=16))
    down = np.float32(np.abs(x).max()) / np.float32(2688)

    def error(mapped_to):
        scale = jnp.asarray(np.minimum(amax / mapped_to / down, 448)).astype(jnp.float8_e4m3fn)
        return relative_error(sd.quantize(x, "nvfp4", scale=scale, tensor_scale=down))

    def relative_error(q):
        """The root of the squared error of each block, relative to its amax."""
        return np.linalg.norm((np.asarray(sd.dequantize(q)) - x).reshape(16, 4, 16), axis=-1) / amax

    found, expected = relative_error(sd.quantize(x, both)), np.minimum(error(6), error(4))
    # The errors of 16 elements are rounded to multiples of 2^-8 code, which is at most a fourth of the amax.
    np.testing.assert_allclose(found, expected, rtol=0, atol=2 * 4 * 2.0**-9 / 4)
    for scale in (6, 4):  # neither is the better one for all blocks
        assert np.max(error(scale) - expected) > 2 * 4 * 2.0**-9 / 4


def test_four_over_six_maps_amax_to_6_at_a_tie():
    """6 is representable with scale 1 and with scale 1.5; published implementations keep the first."""
    format = replace(sd.FORMATS["nvfp4"], search="four_over_six")
    q = sd.quantize(jnp.zeros(16).at[0].set(6.0), format, tensor_scale=1.0)
    np.testing.assert_array_equal(q.scale.astype(jnp.float32), [1.0])


def test_quantize_both_with_a_scale_per_element():
    rows, columns = sd.quantize_both(jnp.arange(1.0, 7.0).reshape(2, 3), "int8", block=(1, 1))
    assert rows.scale.shape == columns.scale.shape == (2, 3)
    np.testing.assert_array_equal(rows.data, np.full((2, 3), 127))


def test_tensor_scales_per_leading_index():
    q = sd.quantize(jnp.ones((2, 16)), "nvfp4", tensor_scale=jnp.array([1.0, 0.5]))
    np.testing.assert_array_equal(q.tensor_scale, [1.0, 0.5])
    np.testing.assert_allclose(sd.dequantize(q), np.ones((2, 16)), rtol=0.05)


@every_format
def test_quantize_both_equals_two_casts(format):
    x = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)
    rows, columns = sd.quantize_both(x, format)
    same_tree(rows, sd.quantize(x, format))
    same_tree(columns, sd.quantize(x, format, axis=0))


def test_quantize_both_returns_one_array_if_codes_are_equal():
    x = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)
    for format, block in [("fp8_e4m3", None), ("nvfp4", (16, 16)), ("fp8_e4m3", (64, 64))]:
        rows, columns = sd.quantize_both(x, format, block=block)
        assert rows is columns
    rows, columns = sd.quantize_both(x, "fp8_e4m3", block=(1, 64))
    assert (rows.block, columns.block) == ((64,), (64, 1))


def test_quantize_both_uses_independent_random_bits_and_rotates_along_each_axis():
    x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    key = jax.random.key(0)
    rows, columns = sd.quantize_both(x, "nvfp4", rounding="stochastic", key=key, rotation=(None, sd.Hadamard()))
    same_tree(rows, sd.quantize(x, "nvfp4", rounding="stochastic", key=key))
    key = jax.random.fold_in(key, 1)
    same_tree(columns, sd.quantize(x, "nvfp4", axis=0, rounding="stochastic", key=key, rotation=sd.Hadamard()))
    assert columns.rotation.axis == -2


def test_dbias_is_the_float32_column_sum():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 7, 64)), jnp.bfloat16)
    q, dbias = sd.quantize_dbias(x, "mxfp8")
    same_tree(q, sd.quantize(x, "mxfp8"))
    assert dbias.dtype == jnp.float32
    np.testing.assert_allclose(dbias, np.asarray(x, np.float64).sum((0, 1)), rtol=1e-5, atol=1e-5)


def test_requantize_goes_through_float32():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((64, 64)), jnp.bfloat16)
    q = sd.quantize(x, "mxfp8")
    r = sd.requantize(q, "int8", axis=0)
    same_tree(r, sd.quantize(sd.dequantize(q, jnp.float32), "int8", axis=0, dtype=jnp.bfloat16))
    assert r.dtype == jnp.bfloat16


GROUPS = [[10, 0, 33, 21], [64], [7, 50, 0]]


@pytest.mark.parametrize(
    "format", params_of(["fp8_e4m3", "mxfp8", "nvfp4", "int8", "nf4"], ["fp8_e4m3", "int8", "nf4"])
)
@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("sizes", GROUPS, ids=str)
def test_each_group_is_quantised_like_a_separate_array(format, axis, sizes):
    x = np.random.default_rng(0).standard_normal((64, 64)) * np.exp(np.arange(64)[:, None] / 8)
    x = x.astype(np.float32)
    q = jax.jit(lambda x, s: sd.quantize_grouped(x, s, format, axis=axis))(x, jnp.array(sizes))
    values = np.asarray(sd.dequantize(q))
    start = 0
    for size in sizes:
        alone = sd.quantize(x[start : start + size], format, axis=axis, pad=True)
        np.testing.assert_array_equal(values[start : start + size], sd.dequantize(alone))
        start += size
    np.testing.assert_array_equal(values[start:], 0)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int32])
def test_narrow_group_sizes_do_not_wrap(dtype):
    x = np.random.default_rng(0).standard_normal((300, 32)).astype(np.float32)
    sizes = np.array([100, 100, 50])
    same_tree(sd.quantize_grouped(x, sizes.astype(dtype), "fp8_e4m3"), sd.quantize_grouped(x, sizes, "fp8_e4m3"))


@pytest.mark.parametrize("format", ["nvfp4", "int4"])
def test_mse_calibration_ignores_infinities(format):
    options = {"calibration": "mse"}
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    x[:, 0] = 0
    clean = sd.quantize(x, format, **options)
    x[:, 0] = np.inf
    np.testing.assert_array_equal(raw(sd.quantize(x, format, **options).scale), raw(clean.scale))


def test_zero_points_round_the_product_and_the_difference_separately():
    x = np.array([[-5.625, 0.625]], np.float32)
    assert int(sd.quantize(x, "int8", calibration="minmax").zero[0, 0]) == 102


def test_code_255_of_an_e8m0_scale_is_nan():
    q = sd.quantize(np.ones((1, 32), np.float32), "mxfp8")
    bad = jnp.full(q.scale.shape, 255, jnp.uint8).view(jnp.float8_e8m0fnu)
    assert np.all(np.isnan(sd.dequantize(replace(q, scale=bad))))


def test_float16_scales_may_be_subnormal():
    x = (np.random.default_rng(0).standard_normal((4, 64)) * 1e-3).astype(np.float16)
    q = sd.quantize(x, format_variants.compressed_tensors.int8)
    expected = (np.abs(x.astype(np.float32)).max(1) / np.float32(127.5)).astype(np.float16)
    np.testing.assert_array_equal(np.asarray(q.scale)[:, 0], expected)


def test_square_blocks_start_anew_in_each_group():
    x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    q = sd.quantize_grouped(x, np.array([20, 44]), "nvfp4", block=(16, 16))
    for rows in (slice(0, 20), slice(20, 64)):
        alone = sd.quantize(x[rows], "nvfp4", block=(16, 16), pad=True)
        np.testing.assert_array_equal(np.asarray(sd.dequantize(q))[rows], sd.dequantize(alone))


def test_amax_ignores_nonfinite_elements():
    x = np.array([[1, -3, np.nan], [np.inf, 2, 1e-40]], np.float32)
    assert float(sd.amax(x)) == 3
    assert sd.amax(x).shape == ()
    np.testing.assert_array_equal(sd.amax(x, block=(0,)), [[3], [2]])
    np.testing.assert_array_equal(sd.amax(x, block=(0,), axis=0), [[1, 3, 0]])
    assert float(sd.amax(np.zeros((0, 3), np.float32))) == 0


@pytest.mark.optimized
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("spec", [PartitionSpec("a", "b"), PartitionSpec(None, "b")], ids=str)
@pytest.mark.parametrize("format", params_of(["fp8_e4m3", "mxfp8", "nvfp4", "int4", "nf4"], ["int4", "nf4"]))
def test_sharded_quantisation_is_bit_identical_to_single_device(format, spec, axis_type):
    """No shard cuts a block, and random bits are hashed from the global index of an element."""
    x = np.random.default_rng(0).standard_normal((8, 256)).astype(np.float32)
    options = {"rounding": "stochastic", "key": jax.random.key(0)}
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(axis_type, axis_type))
    with jax.set_mesh(mesh):
        sharded = sd.quantize(jax.device_put(x, NamedSharding(mesh, spec)), format, **options)
        values = np.asarray(sd.dequantize(sharded))
    alone = sd.quantize(x, format, **options)
    same_tree(sharded, alone)
    np.testing.assert_array_equal(values, sd.dequantize(alone))


X = np.ones((4, 100), np.float32)
KEYS = jax.random.split(jax.random.key(0), 3)
BAD = [
    ("mxfp9", X, {}, ValueError, "did you mean 'mxfp8'"),
    ("mxfp8", X, {}, ValueError, r"cannot cut axis -1 of 100 into blocks of 32; pass pad=True \(counts as 128\)"),
    ("mxfp8", X, {}, ValueError, r"or use a `block` of 25 there \(quantising shape \(4, 100\) to mxfp8\)"),
    ("mxfp8", X, {"axis": 2}, ValueError, r"`axis` 2 is out of range for an array with 2 axes"),
    ("fp8_e4m3", X, {"axis": 2}, ValueError, r"`axis` 2 is out of range"),
    ("fp8_e4m3", X, {"block": (2, 2), "axis": 0}, ValueError, r"`block` \(2, 2\) has 2 entries ending at `axis` 0"),
    ("fp8_e4m3", X, {"block": (2, 2), "axis": (0, -2)}, ValueError, "names the same axis of a 2-d array twice"),
    ("fp8_e4m3", X, {"block": (2, 2), "axis": (0,)}, ValueError, r"names 1 axes but `block` \(2, 2\) has 2 entries"),
    ("fp8_e4m3", X, {"block": -1}, ValueError, "`block` -1 must hold sizes of at least 1"),
    ("fp8_e4m3", X, {"block": 0.5}, ValueError, "`block` 0.5 must hold sizes"),
    ("fp8_e4m3", X.astype(np.int32), {}, TypeError, "`x` must be a float array of at least 16 bits, not int32"),
    ("int8", X.astype(np.float64) * 1e60, {}, ValueError, r"magnitude .*e\+60, but casts compute in float32"),
    ("fp8_e4m3", X.astype(">f4"), {}, TypeError, r"`x` is float32 in non-native byte order \('>f4'\).*np.float32"),
    ("fp8_e4m3", X > 0, {}, TypeError, "not bool"),
    ("fp8_e4m3", X + 1j, {}, TypeError, "not complex"),
    ("fp8_e4m3", jnp.ones(4, jnp.float8_e4m3fn), {}, TypeError, "not float8_e4m3fn"),
    ("fp8_e4m3", X, {"rounding": "stochastic"}, ValueError, "`rounding` 'stochastic' needs a `key`"),
    ("fp8_e4m3", X, {"rounding": "up"}, ValueError, "`rounding` 'up' is not known"),
    ("int8", X, {"rounding": "stochastic", "key": KEYS}, ValueError, r"one key, not an array of keys of shape \(3,\)"),
    ("fp8_e4m3", X, {"rule": "ceil"}, ValueError, "`rule` 'ceil' does not apply to float32 scales"),
    ("mxfp8", X, {"rule": "ciel", "block": 25}, ValueError, "takes one of ceil, floor, even, even1, ceil_log2"),
    ("fp8_e4m3", X, {"calibration": "max"}, ValueError, "`calibration` 'max' is not known; use one of absmax"),
    ("fp8_e4m3", X, {"calibration": "rms"}, ValueError, "has 0 numbers; 'rms' takes 1"),
    ("fp8_e4m3", X, {"calibration": "rms,x"}, ValueError, "must be numbers"),
    ("fp8_e4m3", X, {"calibration": "percentile,0"}, ValueError, r"a percentile must be in \(0, 100\]"),
    ("int8", X, {"calibration": "fixed,1,2"}, ValueError, "the range must contain 0"),
    ("int8", X, {"calibration": "fixed,-1"}, ValueError, "must be positive"),
    ("int8", X, {"calibration": "fixed,1", "block": 10}, ValueError, "one scale for the whole tensor"),
    ("fp8_e4m3", X, {"calibration": "minmax"}, ValueError, "computes a zero point, which fp8_e4m3 cannot hold"),
    ("fp8_e4m3", X, {"tensor_scale": 1.0}, ValueError, "`tensor_scale` was passed, but fp8_e4m3 has one level"),
    ("fp8_e4m3", X, {"scale": np.ones((3, 3), np.float32)}, ValueError, r"`scale` has shape \(3, 3\); blocks of"),
    ("fp8_e4m3", X, {"scale": 1.0, "calibration": "mse"}, ValueError, "nothing to calibrate"),
    ("mxfp8", X, {"scale": np.float32(1), "block": 25}, TypeError, "`scale` is float32; mxfp8 stores float8_e8m0fnu"),
    ("nvfp4", X, {"scale": np.float32(1), "block": 25}, ValueError, "is relative to a `tensor_scale`; pass both"),
    ("nvfp4", X, {"tensor_scale": np.ones(3), "block": 25}, ValueError, "does not match the leading axes"),
    ("fp8_e4m3", X, {"rotation": 16}, TypeError, "`rotation` must be a Hadamard"),
    ("fp8_e4m3", X, {"rotation": sd.Hadamard()}, ValueError, "cannot rotate axis -1 of 100 in groups of 16"),
    ("fp8_e4m3", X * np.nan, {"nan": "raise"}, ValueError, "holds 400 NaN"),
    ("fp8_e4m3", None, {}, TypeError, "`x` must be an array of numbers, not NoneType"),
    ("fp8_e4m3", [[1.0], [1.0, 2.0]], {}, TypeError, "`x` must be an array of numbers, not list"),
    ("mxfp8", X, {"axis": "a"}, TypeError, "`axis` must be an integer, not 'a'"),
    ("mxfp8", X, {"axis": 1.0, "block": 25}, TypeError, r"`axis` must be an integer, not 1\.0"),
    ("mxfp8", X, {"axis": (0.0, 1), "block": (1, 25)}, TypeError, r"`axis` must hold integers, not \(0\.0, 1\)"),
    ("mxfp8", X, {"block": 25.0}, ValueError, r"`block` 25\.0 must hold sizes"),
    (
        "mxfp8",
        X,
        {"calibration": ["absmax"]},
        TypeError,
        r"`calibration` must be hashable",
    ),
    ({}, X, {}, TypeError, "`format` must be hashable, not {}"),
    ("mxfp8", X, {"block": 10**9}, ValueError, "into blocks of 1000000000"),
    ("fp8_e4m3", X, {"rounding": "stochastic", "key": 0}, TypeError, "`key` must be a key such as jax.random.key"),
    ("fp8_e4m3", X, {"scale": "abc"}, TypeError, "`scale` must be an array of numbers, not str"),
    ("nvfp4", X, {"block": (2, 20), "tensor_scale": np.ones(4)}, ValueError, r"in front of blocks of \(2, 20\)"),
    ("fp8_e4m3", X, {"dtype": "foo"}, TypeError, "`dtype` 'foo' is not a dtype"),
    ("fp8_e4m3", X, {"dtype": np.int32}, TypeError, "`dtype` must be a float dtype, not int32"),
    ("fp8_e4m3", X, {"nan": "drop"}, ValueError, "`nan` 'drop' is not known"),
    (replace(sd.FORMATS["mxfp8"], search="four_over_six"), X, {}, ValueError, "block scales of float4_e2m1fn elements"),
    (replace(sd.FORMATS["int8"], bound="whole"), X, {}, ValueError, "`bound` 'whole' of int8 is not known"),
    (replace(sd.FORMATS["int8"], element="int9"), X, {}, ValueError, "integers have 2 to 8 bits"),
    (replace(sd.FORMATS["nf4"], codebook=(1.0, 0.0)), X, {}, ValueError, "2 to 16 values in rising order"),
    (replace(sd.FORMATS["int8"], two_level=True), X, {}, ValueError, "needs float8_e4m3fn block scales"),
]


@pytest.mark.parametrize(("format", "x", "options", "error", "message"), BAD, ids=[b[4][:40] for b in BAD])
def test_invalid_arguments_are_refused(format, x, options, error, message):
    sd.quantize(X, "mxfp8", axis=1, block=25)  # the cached checks of this call must not apply to a similar one
    with pytest.raises(error, match=message):
        sd.quantize(x, format, **options)


def test_nan_raise_needs_a_concrete_array():
    with pytest.raises(ValueError, match="needs a concrete array"):
        jax.jit(lambda x: sd.quantize(x, "fp8_e4m3", nan="raise"))(X)


def test_quantize_refuses_a_quantised_array():
    with pytest.raises(TypeError, match=r"already quantised .* use requantize"):
        sd.quantize(sd.quantize(X, "fp8_e4m3"), "int8")


@pytest.mark.parametrize(
    ("x", "sizes", "options", "error", "message"),
    [
        (X, [5, 5], {}, ValueError, r"`group_sizes` \[5, 5\] must not be negative nor sum to more than 4 rows"),
        (X, [-1, 5], {}, ValueError, "must not be negative"),
        (X, [], {}, TypeError, "1-d integer array"),
        (X, np.zeros((0,), np.int32), {}, ValueError, "`group_sizes` is empty"),
        (X, [1.5], {}, TypeError, "1-d integer array"),
        (X[0], [4], {}, ValueError, "`x` must be a matrix of rows in groups"),
        (X, [4], {"block": 32}, ValueError, "cannot cut axis -1 of 100 into blocks of 32"),
        (X[:, :96], [4], {"block": 4, "axis": 0, "rotation": sd.Hadamard(4, 1)}, ValueError, "would mix groups"),
    ],
)
def test_invalid_groups_are_refused(x, sizes, options, error, message):
    with pytest.raises(error, match=message):
        sd.quantize_grouped(x, np.asarray(sizes), "fp8_e4m3", **options)


def test_quantize_both_needs_two_axes_and_quantize_dbias_one():
    with pytest.raises(ValueError, match="must have at least 2 axes"):
        sd.quantize_both(X[0], "fp8_e4m3")
    with pytest.raises(TypeError, match="takes no `axis`"):
        sd.quantize_both(X, "fp8_e4m3", axis=0)
    with pytest.raises(ValueError, match="at least 1 axis"):
        sd.quantize_dbias(np.float32(1), "fp8_e4m3")
