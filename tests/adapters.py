"""Helpers of the tests of `scaledot.lora`: random arrays, quantised trees, adapters."""

import jax
import jax.numpy as jnp
import numpy as np

import scaledot as sd
from scaledot import lora

WIDTH, RANK, ROWS = 32, 4, 8
CONFIG = lora.Config(rank=RANK, alpha=8)
KEY = jax.random.key(0)


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32) / 4)


def quantized(tree, name: str | None):
    """Matrices of a tree in a format, with blocks along their rows; a stack of matrices one by one."""

    def cast(w):
        return jax.vmap(cast)(w) if w.ndim > 2 else sd.quantize(w, name, axis=0, pad=True)

    return tree if name is None else jax.tree.map(cast, tree)


def randomised(adapters):
    """Adapters whose B is not zero."""
    leaves, tree = jax.tree.flatten(adapters)
    return tree.unflatten([leaf + normal(i, *leaf.shape) for i, leaf in enumerate(leaves)])


def with_adapters(f, *args, rules=CONFIG):
    return randomised(lora.init(f, rules, key=KEY)(*args))
