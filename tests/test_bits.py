"""float32 arithmetic against numpy, which rounds correctly and keeps subnormals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaledot.kernels.hopper.cast_arithmetic import nearest_reciprocal, scale_reciprocal
from scaledot.numerics import bits, rounding

pytestmark = pytest.mark.optimized  # tests the bits of compiled programs

NORMAL = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False)


def flushed(x):
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def numpy_divide(a, b):
    with np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore"):
        return flushed(flushed(a) / flushed(b))


def random_floats(seed, count):
    """Finite float32 numbers from uniform bit patterns, so that every exponent occurs."""
    pattern = np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)
    return pattern[(pattern & 0x7F800000) != 0x7F800000].view(np.float32)


@pytest.mark.parametrize("jit", [False, True])
def test_divide_is_correctly_rounded(jit):
    a, b = random_floats(0, 400_000), random_floats(1, 400_000)
    count = min(len(a), len(b))
    a, b = a[:count], b[:count]
    divide = jax.jit(bits.divide) if jit else bits.divide
    np.testing.assert_array_equal(divide(jnp.asarray(a), jnp.asarray(b)), numpy_divide(a, b))


@pytest.mark.parametrize("divisor", [448.0, 6.0, 7.5, 127.0, 127.5, 2688.0, 3.0])
def test_divide_by_a_constant_is_correctly_rounded(divisor):
    """XLA's own division would multiply by the reciprocal."""
    a = np.abs(random_floats(2, 200_000))
    got = jax.jit(lambda a: bits.divide(a, np.float32(divisor)))(a)
    np.testing.assert_array_equal(got, numpy_divide(a, np.float32(divisor)))


@given(NORMAL, NORMAL)
def test_divide_is_correctly_rounded_for_simple_numbers(a, b):
    a, b = np.float32(a), np.float32(b)
    np.testing.assert_array_equal(bits.divide(a, b), numpy_divide(a, b))


@pytest.mark.parametrize(
    ("a", "b"), [(0, 0), (1, 0), (-1, 0), (0, -1), (np.inf, 2), (2, np.inf), (np.nan, 1), (1, np.nan), (np.inf, np.inf)]
)
def test_divide_of_special_values(a, b):
    a, b = np.float32(a), np.float32(b)
    np.testing.assert_array_equal(bits.divide(a, b), numpy_divide(a, b))


@pytest.mark.parametrize("ulps", [-1, 0, 1])
def test_a_reciprocal_that_is_an_ulp_off_is_corrected(ulps):
    x = np.abs(random_floats(3, 400_000))
    powers = np.float32(2) ** np.arange(-125, 126, dtype=np.float32)
    x = np.concatenate([x, powers, np.nextafter(powers, np.float32(0)), np.nextafter(powers, np.float32(np.inf))])
    x = x[(x > 2.0**-125) & (x < 2.0**125)]
    expected = np.float32(1) / x
    approximate = (expected.view(np.int32) + np.int32(ulps)).view(np.float32)
    np.testing.assert_array_equal(nearest_reciprocal(jnp.asarray(x), jnp.asarray(approximate)), expected)


def test_the_reciprocal_of_a_scale_is_that_of_the_reference():
    x = np.concatenate([np.abs(random_floats(4, 400_000)), np.array([0.0, 2.0**-140, 2.0**-126, 2.0**127], np.float32)])
    expected = np.minimum(numpy_divide(np.float32(1), x), np.finfo(np.float32).max)
    np.testing.assert_array_equal(scale_reciprocal(jnp.asarray(x)), expected)


def test_flush_keeps_signs_and_normals():
    x = np.array([1e-45, -1e-45, 0.0, -0.0, 2.0**-126, -(2.0**-126), 1.5], np.float32)
    got = np.asarray(bits.flush(jnp.asarray(x)))
    np.testing.assert_array_equal(got, [0.0, -0.0, 0.0, -0.0, 2.0**-126, -(2.0**-126), 1.5])
    np.testing.assert_array_equal(np.signbit(got), np.signbit(x))


def test_powers_of_two_are_exact():
    exponent = np.arange(-126, 128)
    np.testing.assert_array_equal(bits.power_of_two(jnp.asarray(exponent)), np.ldexp(np.float32(1), exponent))
    x = np.array([1.0, 1.5, 1.999, 2.0, 3e-30, 0.75], np.float32)
    np.testing.assert_array_equal(bits.floor_power_of_two(jnp.asarray(x)), 2.0 ** np.floor(np.log2(x.astype(float))))
    np.testing.assert_array_equal(bits.ceil_power_of_two(jnp.asarray(x)), 2.0 ** np.ceil(np.log2(x.astype(float))))


def test_floor_by_log2_follows_float32_log2():
    """The reference is float64 log2 rounded to float32, which is correctly rounded except for near-ties."""
    powers = np.ldexp(np.float64(1), np.arange(-100, 101))
    below = [np.nextafter(powers.astype(np.float32), np.float32(0))]
    for _ in range(90):
        below.append(np.nextafter(below[-1], np.float32(0)))
    x = np.stack(below)
    expected = np.exp2(np.floor(np.log2(x.astype(np.float64)).astype(np.float32)).astype(np.float64))
    np.testing.assert_array_equal(bits.floor_power_of_two_by_log2(jnp.asarray(x)), expected.astype(np.float32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("jit", [False, True])
def test_stored_float32_converts_every_16_bit_float(dtype, jit):
    x = np.arange(1 << 16, dtype=np.uint16).view(jnp.dtype(dtype))
    convert = jax.jit(rounding.stored_float32) if jit else rounding.stored_float32
    np.testing.assert_array_equal(convert(jnp.asarray(x)), x.astype(np.float32))
