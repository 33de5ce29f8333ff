"""What tests of training share: recipes, arrays, and how results are compared."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from scaledot import train
from scaledot.recipes import FP8_DELAYED, PRODUCTS, Delayed, Gemm, Recipe

KEY = jax.random.key(7)
PRECISE = {"precision": "highest"}  # CUDA's tensor cores sum 8-bit floats with fewer bits than float32 unless asked
dense, ragged_dot, einsum, dot_general, conv_general_dilated = (
    functools.partial(verb, **PRECISE)
    for verb in (train.dense, train.ragged_dot, train.einsum, train.dot_general, train.conv_general_dilated)
)


def with_casts(recipe, **changes):
    """The recipe with these fields of every cast changed."""

    def changed(gemm):
        if gemm is None:
            return None
        return Gemm(*(None if c is None else dataclasses.replace(c, **changes) for c in (gemm.lhs, gemm.rhs)))

    return Recipe(recipe.name, *(changed(getattr(recipe, product)) for product in PRODUCTS))


def nearest(recipe):
    """The recipe without chance."""
    return with_casts(recipe, rounding="nearest")


def delayed(**how):
    """FP8_DELAYED with another history."""
    return with_casts(FP8_DELAYED, delayed=Delayed(**how))


SHORT = delayed(length=4)


def assert_same(a, b):
    """Equal up to the order of float32 sums of some hundred products."""
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5 * float(np.max(np.abs(b), initial=1e-30)))


def vjp_of(f, g, *args):
    """The result of f and its gradients for a cotangent g, as one program."""

    @jax.jit
    def run(g, *args):
        y, vjp = jax.vjp(f, *args)
        return y, *vjp(g if g is not None else jnp.ones_like(y))

    return run(g, *args)


def kept_by(f, *args):
    """What the backward pass of f keeps: arrays of floats or of codes."""
    _, vjp = jax.vjp(f, *args)
    return [r for r in jax.tree.leaves(vjp) if not jnp.issubdtype(r.dtype, jax.dtypes.prng_key)]
