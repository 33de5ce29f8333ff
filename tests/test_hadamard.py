"""The random Hadamard transform against its definition as a matrix."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import scaledot as sd
from scaledot.numerics import hadamard
from scaledot.numerics.hadamard import Hadamard

pytestmark = pytest.mark.optimized  # tests the bits of compiled programs

rotate = jax.jit(hadamard.rotate, static_argnums=1)
unrotate = jax.jit(hadamard.unrotate, static_argnums=1)


def matrix(rotation):
    n = rotation.size
    sylvester = np.array([[(-1.0) ** (r & c).bit_count() for c in range(n)] for r in range(n)])
    return rotation.signs[:, None] * sylvester / np.sqrt(n)


def test_default_signs():
    signs = "+++-+------+-+--"
    np.testing.assert_array_equal(Hadamard().signs, [1 if s == "+" else -1 for s in signs])


def test_examples_computed_by_hand():
    unit = np.zeros(16, np.float32)
    unit[3] = 1
    np.testing.assert_array_equal(rotate(jnp.asarray(unit), Hadamard()) * 4, [-1, 1, 1, -1] * 4)
    ones = rotate(jnp.ones(16), Hadamard())
    np.testing.assert_array_equal(ones, [-1, 0, 1, 0, 1, 0, -1, 0, 1, 2, 1, 0, 1, 0, 1, -2])


@pytest.mark.parametrize("rotation", [Hadamard(), Hadamard(2, 0b01), Hadamard(64, 0xDEADBEEF12345678)])
def test_rotation_is_a_matmul_with_h_rounded_to_bfloat16(rotation):
    x = np.random.default_rng(0).standard_normal((5, 128)).astype(np.float32)
    h = matrix(rotation)
    np.testing.assert_allclose(h @ h.T, np.eye(rotation.size), atol=1e-12)
    exact = x.astype(ml_dtypes.bfloat16).astype(np.float64).reshape(5, -1, rotation.size) @ h
    got = np.asarray(rotate(jnp.asarray(x), rotation))
    np.testing.assert_array_equal(got, got.astype(ml_dtypes.bfloat16).astype(np.float32))
    np.testing.assert_allclose(got, exact.reshape(5, 128), rtol=2.0**-8, atol=1e-6)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_unrotate_undoes_rotate(axis):
    x = np.random.default_rng(0).standard_normal((32, 48)).astype(np.float32)
    rotation = Hadamard(axis=axis)
    np.testing.assert_allclose(unrotate(rotate(jnp.asarray(x), rotation), rotation), x, atol=0.05)


def test_rotating_both_operands_leaves_the_matmul_unchanged():
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((4, 64)).astype(np.float32), rng.standard_normal((64, 4)).astype(np.float32)
    rotated = np.asarray(rotate(jnp.asarray(x), Hadamard())) @ np.asarray(rotate(jnp.asarray(w), Hadamard(axis=0)))
    np.testing.assert_allclose(rotated, x @ w, atol=0.15)


def test_scales_of_a_rotated_cast_are_computed_after_the_rotation():
    x = np.zeros((1, 64), np.float32)
    x[0, 5] = 16.0
    q = sd.quantize(x, "nvfp4", rotation=Hadamard())
    assert float(q.tensor_scale) == np.float32(4) / np.float32(2688)
    np.testing.assert_allclose(sd.dequantize(q), x, atol=0.2)


@pytest.mark.parametrize(
    ("size", "mask", "message"), [(12, 0, "power of two"), (1, 0, "power of two"), (2, 9, "does not fit in")]
)
def test_invalid_hadamards_are_refused(size, mask, message):
    with pytest.raises(ValueError, match=message):
        Hadamard(size, mask)
