"""Times of a large linear layer on this machine's GPU, forward and backward, in each precision."""

import functools
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import scaledot as sd
from scaledot import train


class Shape(NamedTuple):
    """x is (tokens, inputs) and w (inputs, outputs)."""

    tokens: int
    inputs: int
    outputs: int


LARGE = Shape(8192, 4096, 14336)  # the up projection of an 8B Llama


class Timed(NamedTuple):
    """The median time of a step in one precision, and the FLOP rate of its three matmuls."""

    name: str
    milliseconds: float
    teraflops: float


def times(recipes: Sequence[str], shape: Shape = LARGE, repeats: int = 20) -> Iterator[Timed]:
    """Times forward and backward pass of x w in bfloat16 and under each recipe; w is a float32 master weight."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (shape.tokens, shape.inputs), jnp.bfloat16)
    w = jax.random.normal(keys[1], (shape.inputs, shape.outputs), jnp.float32)
    g = jax.random.normal(keys[2], (shape.tokens, shape.outputs), jnp.bfloat16)
    flops = 3 * 2 * shape.tokens * shape.inputs * shape.outputs
    for name in ("bfloat16", *recipes):
        state = {} if name == "bfloat16" else sd.init_state(name)
        seconds = _median_seconds(functools.partial(_step, name, x, w, g, state), repeats)
        yield Timed(name, 1e3 * seconds, flops / seconds / 1e12)


@functools.partial(jax.jit, static_argnums=0)
def _step(precision: str, x: jax.Array, w: jax.Array, g: jax.Array, state: Any) -> Any:
    """Returns the result and the gradients of x, w and the state."""

    def layer(x, w, state):
        if precision == "bfloat16":
            return x @ w.astype(x.dtype)
        result = train.dense(x, w, recipe=precision, key=jax.random.key(1), state=state or None)
        return result[0] if state else result

    y, vjp = jax.vjp(layer, x, w, state)
    return y, *vjp(g)


def _median_seconds(call: functools.partial, repeats: int) -> float:
    jax.block_until_ready(call())
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
