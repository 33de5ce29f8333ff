"""Encoding and decoding of every element type: every code, every tie, special values, stochastic rounding."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import scaledot as sd
from scaledot.numerics import encode as elements
from scaledot.numerics import rounding

pytestmark = pytest.mark.optimized  # tests the bits of compiled programs

FLOATS = ["fp8_e4m3", "fp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4"]
EVERY = [*FLOATS, "int8", "int7", "int6", "int5", "int4", "int3", "int2", "nf4"]
encode = jax.jit(elements.encode, static_argnums=1)
decode = jax.jit(elements.decode, static_argnums=1)
uniform_of = jax.jit(rounding.uniform_of, static_argnums=1)
BF16 = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)


def all_codes(format):
    raw = np.arange(2**format.bits)
    if format.is_integer:
        signed = raw - 2 ** (format.bits - 1)
        low, high = format.integer_range
        return elements.narrow(jnp.asarray(signed[(signed >= low) & (signed <= high)], jnp.int8), format.code_dtype)
    return elements.narrow(jnp.asarray(raw, jnp.uint8), format.code_dtype)


def grid_values(format):
    values = np.asarray(decode(all_codes(format), format))
    return np.unique(values[np.isfinite(values)])


@pytest.mark.parametrize("name", EVERY)
def test_every_code_decodes_and_encodes_back(name):
    format = sd.FORMATS[name]
    codes = all_codes(format)
    values = np.asarray(decode(codes, format))
    finite = np.isfinite(values)
    specials = {"fp8_e4m3": 2, "fp8_e5m2": 8}.get(name, 0)  # NaN and infinities
    assert finite.sum() == finite.size - specials
    encoded = np.asarray(encode(jnp.asarray(values), format))
    np.testing.assert_array_equal(encoded.view(np.uint8)[finite], np.asarray(codes).view(np.uint8)[finite])


@pytest.mark.parametrize("name", FLOATS)
def test_every_code_decodes_as_ml_dtypes_does(name):
    format = sd.FORMATS[name]
    reference = np.arange(2**format.bits, dtype=np.uint8).view(format.element_dtype).astype(np.float32)
    values = np.asarray(decode(all_codes(format), format))
    np.testing.assert_array_equal(values, reference)
    np.testing.assert_array_equal(np.signbit(values), np.signbit(reference))


@pytest.mark.parametrize("name", FLOATS)
def test_every_bfloat16_encodes_to_the_nearest_code(name):
    """ml_dtypes rounds to nearest even, but overflows where `encode` saturates."""
    format = sd.FORMATS[name]
    x = BF16[~np.isnan(BF16)]
    x = np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)
    expected = np.clip(x, -format.max, format.max).astype(format.element_dtype)
    np.testing.assert_array_equal(np.asarray(encode(jnp.asarray(x), format)).view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("name", FLOATS)
def test_midpoints_and_their_neighbours_round_to_nearest_even(name):
    format = sd.FORMATS[name]
    grid = grid_values(format)
    middle = ((grid[1:].astype(np.float64) + grid[:-1]) / 2).astype(np.float32)
    x = np.concatenate([middle, np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(-np.inf))])
    expected = x.astype(format.element_dtype)
    np.testing.assert_array_equal(np.asarray(encode(jnp.asarray(x), format)).view(np.uint8), expected.view(np.uint8))


def test_fp4_is_nearest_over_every_bfloat16_in_range():
    """Brute force over the 8 magnitudes, with the ties written out."""
    format = sd.FORMATS["mxfp4"]
    x = BF16[np.abs(BF16) <= 8]
    x = x[(np.abs(x) >= np.finfo(np.float32).tiny) | (x == 0)]
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    distance = np.abs(np.minimum(np.abs(x), 6)[:, None] - grid)
    tied = distance == distance.min(axis=1, keepdims=True)
    to_even = {0.25: 0, 0.75: 1, 1.25: 1, 1.75: 2, 2.5: 2, 3.5: 4, 5.0: 4}
    nearest = np.array([to_even.get(abs(float(v)), grid[row][0]) for v, row in zip(x, tied, strict=True)])
    got = np.asarray(decode(encode(jnp.asarray(x), format), format))
    np.testing.assert_array_equal(got, np.copysign(nearest, x))
    np.testing.assert_array_equal(np.signbit(got), np.signbit(x))


@pytest.mark.parametrize(("x", "expected"), [(np.nan, np.nan), (np.inf, 448), (-np.inf, -448), (1e30, 448)])
def test_e4m3_saturates_and_keeps_nan(x, expected):
    got = decode(encode(jnp.float32(x).reshape(1), sd.FORMATS["fp8_e4m3"]), sd.FORMATS["fp8_e4m3"])
    np.testing.assert_array_equal(got, [np.float32(expected)])


@pytest.mark.parametrize("name", ["mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "int8", "int4", "nf4"])
def test_nan_becomes_zero_where_no_nan_exists(name):
    format = sd.FORMATS[name]
    got = decode(encode(jnp.array([np.nan, -np.nan, np.inf, -np.inf], jnp.float32), format), format)
    np.testing.assert_array_equal(got, [0, 0, format.max, -format.max])


def test_nf4_rounds_a_tie_to_the_lower_index():
    entries = np.array(sd.FORMATS["nf4"].codebook, np.float32)
    middle = (entries[1:] + entries[:-1]) / np.float32(2)
    for x, expected in [(middle, np.arange(15)), (np.nextafter(middle, np.float32(2)), np.arange(1, 16))]:
        got = np.asarray(encode(jnp.asarray(x), sd.FORMATS["nf4"])).astype(int)
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("name", EVERY)
def test_stochastic_rounding_is_unbiased(name):
    """The mean of n draws that round by a step s is within 5 standard errors, 5 s / (2 sqrt n), of the input."""
    format = sd.FORMATS[name]
    grid = grid_values(format)
    inner = np.linspace(0.03, 0.97, 13, dtype=np.float32)
    at = np.unique(np.linspace(0, len(grid) - 2, 9).astype(int))
    low, high = grid[at], grid[at + 1]
    x = (low[:, None] + (high - low)[:, None] * inner).astype(np.float32).ravel()
    draws = 4096
    tiled = jnp.broadcast_to(jnp.asarray(x), (draws, x.size))
    values = decode(encode(tiled, format, uniform_of(jax.random.key(7), tiled.shape)), format)
    mean = np.asarray(values, np.float64).mean(axis=0)
    step = np.repeat(high - low, inner.size)
    assert np.all(np.abs(mean - x) <= 5 * step / (2 * np.sqrt(draws)))
    assert np.all((values >= np.repeat(low, inner.size)[None]) & (values <= np.repeat(high, inner.size)[None]))


@pytest.mark.parametrize("name", EVERY)
def test_stochastic_rounding_is_exact_on_representable_values(name):
    format = sd.FORMATS[name]
    grid = jnp.asarray(grid_values(format))
    decoded = decode(encode(grid, format, uniform_of(jax.random.key(0), grid.shape)), format)
    np.testing.assert_array_equal(decoded, grid)


def test_uniform_numbers_are_uniform_in_all_24_bits():
    u = np.asarray(uniform_of(jax.random.key(3), (1024, 1024)), np.float64)
    count = u.size
    assert u.min() >= 0
    assert u.max() < 1
    np.testing.assert_array_equal(u * 2**24, np.round(u * 2**24))
    histogram = np.bincount((u.ravel() * 256).astype(int), minlength=256)
    assert np.abs(histogram - count / 256).max() < 6 * np.sqrt(count / 256)
    low_bits = np.bincount((u.ravel() * 2**24).astype(int) % 256, minlength=256)
    assert np.abs(low_bits - count / 256).max() < 6 * np.sqrt(count / 256)


@pytest.mark.parametrize("shift", [(0, 1), (1, 0), (1, 1), (0, 16)])
def test_uniform_numbers_of_neighbours_and_of_keys_are_uncorrelated(shift):
    u = np.asarray(uniform_of(jax.random.key(3), (512, 512)), np.float64) - 0.5
    other = np.asarray(uniform_of(jax.random.key(4), (512, 512)), np.float64) - 0.5
    bound = 6 / 12 / np.sqrt(u.size)
    assert abs(np.mean(u * np.roll(u, shift, (0, 1)))) < bound
    assert abs(np.mean(u * np.roll(other, shift, (0, 1)))) < bound


def test_uniform_numbers_depend_on_the_flat_index_only():
    key = jax.random.key(11)
    flat = np.asarray(uniform_of(key, (24,)))
    np.testing.assert_array_equal(np.asarray(uniform_of(key, (2, 3, 4))).ravel(), flat)
    raw = jax.random.key_data(key)
    np.testing.assert_array_equal(uniform_of(raw, (24,)), flat)


def test_random_bits_of_a_key_are_stable():
    """A run resumed with a later release draws the same bits; the reference is the hash in Python integers."""

    def mix(h):
        h = (h ^ h >> 16) * 0x7FEB352D % 2**32
        h = (h ^ h >> 15) * 0x846CA68B % 2**32
        return h ^ h >> 16

    first, second = 0x9E3779B9, 0x85EBCA6B
    for word in (7, 11):
        first = mix(first ^ mix((word + 0x27D4EB2F) % 2**32))
        second = mix((second + mix(word ^ 0x165667B1)) % 2**32)
    expected = []
    for index in range(24):
        h = (index * 0x9E3779B1 + first) % 2**32
        h = ((h ^ h >> 16) * 0x7FEB352D + second) % 2**32
        h = (h ^ h >> 15) * 0x846CA68B % 2**32
        expected.append((h >> 8) * 2.0**-24)
    actual = np.asarray(uniform_of(jnp.array([7, 11], jnp.uint32), (4, 6))).ravel()
    np.testing.assert_array_equal(actual, np.float32(expected))
