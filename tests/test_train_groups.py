"""ragged_dot under every recipe: each group is quantised and multiplied as if it were an array of its own."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data import normal
from tables import EXHAUSTIVE_ONLY_RECIPES, STATELESS, params_of
from training import KEY, assert_same, dense, nearest, ragged_dot, residuals_of

from scaledot import train
from scaledot.recipes import RECIPES

pytestmark = pytest.mark.jax_versions


@pytest.mark.parametrize("recipe", params_of(STATELESS, (*EXHAUSTIVE_ONLY_RECIPES, "fp8_current", "nvfp4")))
def test_a_ragged_dot_is_a_dense_per_group(recipe):
    """Uneven and empty groups, and rows of no group. Random bits differ, so stochastic casts round to nearest here."""
    recipe = nearest(RECIPES[recipe])
    sizes = np.array([26, 0, 26, 6])
    x, w, b = normal(0, (64, 96)), normal(1, (4, 96, 48)), normal(2, (4, 48))
    g = normal(3, (64, 48))

    @jax.jit
    def grouped(x, w, b, g, sizes):
        y, vjp = jax.vjp(lambda x, w, b: ragged_dot(x, w, sizes, b, recipe=recipe, key=KEY), x, w, b)
        return y, *vjp(g)

    @jax.jit
    def alone(x, w, b, g):
        y, vjp = jax.vjp(lambda x, w, b: dense(x, w, b, recipe=recipe, key=KEY), x, w, b)
        return y, *vjp(g)

    y, dx, dw, db = grouped(x, w, b, g, jnp.asarray(sizes))
    for i, (start, stop) in enumerate(itertools.pairwise([0, *np.cumsum(sizes)])):
        rows = slice(int(start), int(stop))
        expected = alone(x[rows], w[i], b[i], g[rows])
        for a, e in zip((y[rows], dx[rows], dw[i], db[i]), expected, strict=True):
            assert_same(a, e)
    assert not np.any(y[58:])
    assert not np.any(dx[58:])


def test_traced_sizes_are_clipped_to_the_rows():
    """As in jax.lax.ragged_dot. Unclipped, wgrad would index rows past the end."""
    x, w, g = normal(0, (40, 32)), normal(1, (4, 32, 16)), normal(2, (40, 16))

    @jax.jit
    def grouped(sizes):
        y, vjp = jax.vjp(lambda x, w: ragged_dot(x, w, sizes, recipe="fp8_block"), x, w)
        return y, *vjp(g)

    for actual, expected in zip(grouped(jnp.array([10, 25, 9, 8])), grouped(jnp.array([10, 25, 5, 0])), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_groups_save_codes_as_residuals_and_need_a_key():
    sizes, x, w = jnp.array([20, 44]), normal(0, (64, 96)), normal(1, (2, 96, 48))
    residuals = residuals_of(lambda x, w: ragged_dot(x, w, sizes, recipe="nvfp4", key=KEY), x, w)
    large = [r for r in residuals if r.size >= x.size]
    assert {r.dtype.name for r in large} == {"uint4"}
    with pytest.raises(ValueError, match="random numbers"):
        jax.grad(lambda w: ragged_dot(x, w, sizes, recipe="nvfp4").sum())(w)


def test_an_x_without_rows_gives_a_zero_gradient_of_w():
    w = normal(1, (2, 64, 32))
    x, sizes = jnp.zeros((0, 64)), jnp.zeros(2, int)
    y, vjp = jax.vjp(lambda x, w: train.ragged_dot(x, w, sizes, recipe="fp8_current"), x, w)
    dx, dw = vjp(jnp.zeros_like(y))
    assert (y.shape, dx.shape) == ((0, 32), (0, 64))
    assert not np.any(dw)


def test_a_last_group_of_one_row_has_a_scale_of_its_own():
    """With one scale per group, the gradient of the group's matrix is that of `dense` of the row."""
    x, g = (normal(seed, (4, 32)).at[3].multiply(2.0**-20) for seed in (0, 1))
    w = normal(2, (2, 32, 32))

    def wgrad(f, w):
        return jax.vjp(f, w)[1]

    (grouped,) = wgrad(lambda w: train.ragged_dot(x, w, jnp.array([3, 1]), recipe="fp8_current"), w)(g)
    (alone,) = wgrad(lambda w: train.dense(x[3:], w, recipe="fp8_current"), w[1])(g[3:])
    np.testing.assert_allclose(grouped[1], alone, rtol=1e-6)
