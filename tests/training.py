"""Helpers of the training tests: recipes, functions at full precision, comparison of results, residuals."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from scaledot import train
from scaledot.recipes import FP8_DELAYED, Delayed, Gemm, Recipe
from scaledot.recipes.casts import GEMM_OPERANDS

KEY = jax.random.key(7)
PRECISE = {"precision": "highest"}  # tensor cores accumulate FP8 with fewer bits than float32 by default
dense, ragged_dot, einsum, dot_general, conv_general_dilated = (
    functools.partial(function, **PRECISE)
    for function in (train.dense, train.ragged_dot, train.einsum, train.dot_general, train.conv_general_dilated)
)


def assert_same_bits(found, expected):
    """Asserts that two trees have equal leaves."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def with_casts(recipe, **changes):
    """The recipe with these fields of every cast changed."""

    def changed(gemm):
        if gemm is None:
            return None
        return Gemm(*(None if c is None else dataclasses.replace(c, **changes) for c in (gemm.lhs, gemm.rhs)))

    return Recipe(recipe.name, *(changed(getattr(recipe, matmul)) for matmul in GEMM_OPERANDS))


def nearest(recipe):
    """The recipe with every cast rounding to nearest."""
    return with_casts(recipe, rounding="nearest")


def without_means(recipe):
    """The recipe with no mean subtracted."""
    return with_casts(recipe, subtract_mean=False) if recipe.mean_subtracted else recipe


def delayed(**fields):
    """FP8_DELAYED with these fields of Delayed."""
    return with_casts(FP8_DELAYED, delayed=Delayed(**fields))


SHORT_HISTORY = delayed(length=4)  # fp8_delayed with amax histories of four steps


def assert_same(a, b):
    """Equal up to the order of float32 accumulation over a few hundred elements along K."""
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5 * float(np.max(np.abs(b), initial=1e-30)))


def vjp_of(f, g, *args):
    """The result of f and its gradients for a cotangent g, in one jitted function."""

    @jax.jit
    def run(g, *args):
        y, vjp = jax.vjp(f, *args)
        return y, *vjp(g if g is not None else jnp.ones_like(y))

    return run(g, *args)


def residuals_of(f, *args):
    """The arrays that f saves as residuals, without keys."""
    _, vjp = jax.vjp(f, *args)
    return [r for r in jax.tree.leaves(vjp) if not jnp.issubdtype(r.dtype, jax.dtypes.prng_key)]
