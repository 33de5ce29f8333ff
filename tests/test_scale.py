"""Scale rules against their definitions in numpy, over every finite bfloat16 amax."""

import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import scaledot as sd
from scaledot.numerics.scale import e8m0_code, scales_of

pytestmark = pytest.mark.optimized  # tests the bits of compiled programs

MX = ["mxfp8", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4"]
BF16 = np.arange(2**15, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
AMAX = BF16[np.isfinite(BF16) & ((np.finfo(np.float32).tiny <= BF16) | (BF16 == 0))]


@functools.partial(jax.jit, static_argnums=1)
def _scales(amax, format, tensor_amax=None):
    return scales_of(amax, format, np.dtype("float32"), None, tensor_amax)


def ceil_by_definition(amax, format):
    """From the bits of the float32 product amax * (1 / format max), which numpy does not flush when it is subnormal."""
    with np.errstate(under="ignore"):
        product = amax * np.float32(1 / format.max)
    pattern = product.view(np.uint32)
    field, mantissa = (pattern >> 23).astype(int), (pattern & 0x7FFFFF).astype(int)
    rounded_up = np.where((mantissa != 0) & (field < 254), field + 1, field)
    return np.where(field == 0, (mantissa > 0x400000).astype(int), rounded_up)


def by_exponent(amax, format, exponent_of):
    codes = [0 if a == 0 else exponent_of(float(a)) - format.emax + 127 for a in amax]
    return np.clip(codes, 0, 254)


def floor_log2(a):
    return math.frexp(a)[1] - 1


def even(mantissa_bits):
    """floor(log2) of a value rounded half up to `mantissa_bits`."""

    def exponent(a):
        fraction, e = math.frexp(a)  # fraction in [0.5, 1)
        steps = 2 ** (mantissa_bits + 1)
        return e - 1 if math.floor(fraction * steps + 0.5) < steps else e

    return exponent


@pytest.mark.whole_product
@pytest.mark.parametrize("name", MX)
@pytest.mark.parametrize("rule", ["ceil", "floor", "even", "even1", "ceil_log2"])
def test_e8m0_rules_over_every_bfloat16(name, rule):
    format = replace(sd.FORMATS[name], rule=rule)
    if rule == "ceil":
        expected = ceil_by_definition(AMAX, format)
    else:
        exponent_of = {
            "floor": floor_log2,
            "even": even(format.mantissa_bits),
            "even1": even(1),
            "ceil_log2": lambda a: floor_log2(a) + (math.frexp(a)[0] != 0.5),
        }[rule]
        expected = by_exponent(AMAX, format, exponent_of)
    got = jax.jit(lambda a: e8m0_code(a, format))(AMAX)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("name", "amax", "code"),
    [
        ("mxfp8", 0, 0),
        ("mxfp8", 1e-38, 0),
        ("mxfp8", 1.0, 119),
        ("mxfp8", 1.5, 119),
        ("mxfp8", 447, 127),
        ("mxfp8", 448, 127),
        ("mxfp8", 450, 128),
        ("mxfp8", 3.3895e38, 247),
        ("mxfp8_e5m2", 1, 112),
        ("mxfp8_e5m2", 57344, 127),
        ("mxfp8_e5m2", 57345, 128),
    ],
)
def test_ceil_rule_on_examples_computed_by_hand(name, amax, code):
    q = sd.quantize(np.array([amax] + [0] * 31, np.float32), name)
    assert int(np.asarray(q.scale).view(np.uint8)[0]) == code


@pytest.mark.parametrize("name", MX)
def test_ceil_rule_never_saturates_the_amax(name):
    format = replace(sd.FORMATS[name], rule="ceil")
    code = np.asarray(e8m0_code(jnp.asarray(AMAX), format)).astype(int)
    assert np.all(AMAX.astype(np.float64) * 2.0 ** (127 - code) <= format.max * (1 + 2.0**-23))


def test_fp8_per_tensor_on_an_example_computed_by_hand():
    x = np.array([-3, 0.1, 0.7, 2.5], np.float32)
    q = sd.quantize(x, "fp8_e4m3")
    np.testing.assert_array_equal(np.asarray(q.data).astype(np.float32), [-448, 15, 104, 384])
    np.testing.assert_array_equal(q.scale, [np.float32(1) / (np.float32(448) / np.float32(3))])
    np.testing.assert_array_equal(sd.dequantize(q), np.float32([-3, 0.10044643, 0.6964286, 2.5714285]))
    q = sd.quantize(x, "fp8_e5m2")
    np.testing.assert_array_equal(np.asarray(q.data).astype(np.float32), [-57344, 1792, 14336, 49152])


def test_nvfp4_on_an_example_computed_by_hand():
    sign = np.tile([1, -1], 8)
    x = (sign * np.arange(1, 17) / 10).astype(ml_dtypes.bfloat16)
    q = sd.quantize(x, "nvfp4", tensor_scale=np.float32(12) / np.float32(2688))
    assert float(np.asarray(q.scale, np.float32)[0]) == 60
    expected = [0.5, -0.5, 1, -1.5, 2, -2, 3, -3, 3, -4, 4, -4, 4, -6, 6, -6]
    np.testing.assert_array_equal(np.asarray(q.data).astype(np.float32), expected)


def nvfp4_by_definition(x, amax):
    """Codes, block scales, tensor scale and dequantised values in numpy float32."""
    f32 = np.float32
    tensor_amax = np.abs(x).max()
    tensor_multiplier, tensor_scale = f32(2688) / tensor_amax, tensor_amax / f32(2688)
    scale = np.minimum(amax * (tensor_multiplier * f32(1 / 6)), f32(448)).astype(ml_dtypes.float8_e4m3fn)
    with np.errstate(divide="ignore"):
        multiplier = np.minimum(f32(1) / (scale.astype(f32) * (f32(1) / tensor_multiplier)), np.finfo(f32).max)
    multiplier = np.where(scale.astype(f32) == 0, f32(0), multiplier)
    codes = np.clip(x * np.repeat(multiplier, 16, 1), -6, 6).astype(ml_dtypes.float4_e2m1fn)
    values = codes.astype(f32) * np.repeat(scale.astype(f32), 16, 1) * tensor_scale
    return codes, scale, tensor_scale, values


@pytest.mark.parametrize("log_std", [0.0, 2.0, 6.0])
def test_nvfp4_follows_its_definition(log_std):
    """Blocks have log-normal magnitudes, so that some block scales are 0 for the largest `log_std`."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((64, 256)) * np.exp(log_std * rng.standard_normal((64, 16)).repeat(16, 1))
    x = x.astype(np.float32)
    codes, scale, tensor_scale, values = nvfp4_by_definition(x, np.abs(x).reshape(64, 16, 16).max(-1))
    q = sd.quantize(x, "nvfp4")
    np.testing.assert_array_equal(np.asarray(q.scale).view(np.uint8), scale.view(np.uint8))
    np.testing.assert_array_equal(np.asarray(q.data).view(np.uint8), codes.view(np.uint8))
    assert float(q.tensor_scale) == tensor_scale
    np.testing.assert_array_equal(sd.dequantize(q), values)


@pytest.mark.parametrize("largest", [12.0, 3.0, 5.25])
def test_two_orders_of_nvfp4_scale_arithmetic_follow_their_definitions(largest):
    amax = AMAX[largest >= AMAX]
    multiplier = np.float32(2688) / np.float32(largest)
    orders = {
        "multiply": amax * (multiplier * np.float32(1 / 6)),
        "divide_multiply": (amax / np.float32(6)) * multiplier,
    }
    for rule, relative in orders.items():
        format = replace(sd.FORMATS["nvfp4"], rule=rule)
        scales = _scales(jnp.asarray(amax), format, jnp.float32(largest))
        expected = np.minimum(relative, np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
        np.testing.assert_array_equal(np.asarray(scales.scale).view(np.uint8), expected.view(np.uint8))
    differ = np.mean(orders["multiply"] != orders["divide_multiply"])
    assert differ > 0.01  # in float32; few differences remain after rounding to E4M3


def test_16x16_nvfp4_codes_of_the_transpose_are_transposed():
    x = np.random.default_rng(0).standard_normal((64, 96)).astype(np.float32)
    q, t = sd.quantize(x, "nvfp4", block=(16, 16)), sd.quantize(x.T, "nvfp4", block=(16, 16))
    np.testing.assert_array_equal(np.asarray(q.T.data).view(np.uint8), np.asarray(t.data).view(np.uint8))


def test_with_guard_no_element_saturates():
    """Without it, an E4M3 scale that is rounded down maps the block amax above 6."""
    x = np.random.default_rng(0).standard_normal((256, 512)).astype(np.float32)
    amax = jnp.asarray(np.abs(x).reshape(256, 32, 16).max(-1))
    for guard, clips in [(False, True), (True, False)]:
        scales = _scales(amax, replace(sd.FORMATS["nvfp4"], guard=guard), jnp.max(amax))
        largest = np.asarray(amax * scales.multipliers[0])
        assert (largest.max() > 6 * (1 + 1e-6)) == clips


@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_scales_over_every_bfloat16(name, pow2):
    format = replace(sd.FORMATS[name], pow2=pow2)
    scales = _scales(AMAX, format)
    with np.errstate(divide="ignore", over="ignore"):
        multiplier = np.minimum(np.float32(format.max) / AMAX, np.float32(2.0**126))
    multiplier = np.where(AMAX == 0, np.float32(1), multiplier)
    if pow2:
        multiplier = np.ldexp(np.float32(1), np.frexp(multiplier)[1] - 1)
    np.testing.assert_array_equal(scales.multipliers[0], multiplier)
    np.testing.assert_array_equal(scales.scale, np.float32(1) / multiplier)


@pytest.mark.parametrize("name", ["int8", "int4", "nf4"])
def test_integer_and_codebook_scales_over_every_bfloat16(name):
    format = sd.FORMATS[name]
    scales = _scales(AMAX, format)
    scale = AMAX / np.float32(format.max)
    scale = np.where(AMAX == 0, np.float32(1), np.maximum(scale, np.float32(2.0**-126)))
    np.testing.assert_array_equal(scales.scale, scale)
    exact = [np.asarray(m, np.float64) for m in scales.multipliers]  # one is a power of two, so the product is exact
    with np.errstate(over="ignore", under="ignore"):
        reciprocal = (1 / scale.astype(np.float64)).astype(np.float32)
    normal = reciprocal >= np.finfo(np.float32).tiny
    np.testing.assert_array_equal(np.prod(exact, axis=0)[normal], np.minimum(reciprocal, 2.0**126)[normal])
    np.testing.assert_allclose(
        np.prod(exact, axis=0), np.minimum(1 / scale.astype(np.float64), 2.0**126), rtol=2.0**-24
    )


@pytest.mark.parametrize("bits", range(2, 9))
def test_asymmetric_integers_follow_their_definition(bits):
    x = (np.random.default_rng(0).standard_normal((32, 128)) + 0.7).astype(np.float32)
    q = sd.quantize(x, f"int{bits}", calibration="minmax")
    lo, hi = np.minimum(x.min(1), 0), np.maximum(x.max(1), 0)
    scale = (hi - lo) / np.float32(2**bits - 1)
    inverse, low, high = np.float32(1) / scale, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    zero = np.clip(np.rint(np.float32(low) - lo * inverse), low, high)
    codes = np.clip(np.rint(x * inverse[:, None]) + zero[:, None], low, high)
    np.testing.assert_array_equal(q.scale[:, 0], scale)
    np.testing.assert_array_equal(np.asarray(q.zero).astype(np.float32)[:, 0], zero)
    np.testing.assert_array_equal(np.asarray(q.data).astype(np.float32), codes)
    np.testing.assert_array_equal(sd.dequantize(q), (codes - zero[:, None]).astype(np.float32) * scale[:, None])
    assert q.zero.dtype == q.data.dtype


@pytest.mark.parametrize("element", ["int2", "int3", "int4"])
def test_the_largest_float32_does_not_underflow_to_code_zero(element):
    rules = ("ceil", "floor", "even", "even1", "ceil_log2")
    mx = {"name": "mx", "scale": "float8_e8m0fnu", "block": (32,)}
    formats = {rule: replace(sd.FORMATS[element], rule=rule, **mx) for rule in rules}
    x = np.full((1, 32), np.finfo(np.float32).max)
    dequantised = jax.jit(lambda x: {rule: sd.dequantize(sd.quantize(x, row)) for rule, row in formats.items()})(x)
    assert {rule: bool((values >= x / 4).all()) for rule, values in dequantised.items()} == dict.fromkeys(rules, True)
