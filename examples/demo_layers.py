"""A look at the linear layers of the demo's model: tensors, bytes saved for backward, accuracy of their matmuls."""

import collections
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.training.train_state import TrainState

import scaledot as sd
from examples.gpt_training import batches, loss_and_excess
from scaledot import train


class Linear(NamedTuple):
    """One layer in one step; g is the gradient of its result."""

    x: jax.Array
    w: jax.Array
    g: jax.Array


def linear_layers(state: TrainState) -> dict[str, Linear]:
    """The linear layers of all blocks by path, in a step on a fresh batch."""

    def loss(shifts: dict[str, jax.Array] | None, params: Any, tokens: jax.Array):
        """What is added to a result has the gradient of the result."""
        seen = collections.OrderedDict()  # which jit returns in this order, and a dict sorted

        def look(call, args, kwargs, context):
            y, layer = call(*args, **kwargs), context.module
            if not isinstance(layer, nn.Dense) or len(layer.path) < 2:
                return y
            name = "/".join(layer.path)
            seen[name] = args[0], layer.variables["params"]["kernel"], y
            return y if shifts is None else y + shifts[name]

        with nn.intercept_methods(look):
            logits = state.apply_fn(params, tokens[:, :-1])
        return loss_and_excess(logits, tokens)[0], seen

    tokens = batches(jax.random.key(1), 1)[0]
    _, shapes = jax.eval_shape(lambda *args: loss(None, *args), state.params, tokens)
    zeros = {name: jnp.zeros(y.shape, y.dtype) for name, (_, _, y) in shapes.items()}
    gradients, seen = jax.jit(jax.grad(loss, has_aux=True))(zeros, state.params, tokens)
    return {name: Linear(x, w, gradients[name]) for name, (x, w, _) in seen.items()}


def kept_bytes(precision: str, layer: Linear) -> int:
    """What a layer keeps for its backward pass, beside its parameters: activations, or codes of x and w."""
    if precision not in sd.RECIPES:
        return layer.x.size * jnp.dtype(precision).itemsize
    state = sd.init_state(precision)

    def residuals(*args: Any) -> Any:
        return jax.vjp(lambda x, w, state: _product(precision, x, w, state)[0], *args)[1]

    leaves = jax.tree.leaves(jax.eval_shape(residuals, layer.x, layer.w, state))
    kept = [leaf for leaf in leaves if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
    histories = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    return sum(math.ceil(leaf.size * _bits(leaf.dtype) / 8) for leaf in kept) - histories


def _bits(dtype: Any) -> int:
    return 4 if dtype == jnp.uint4 else 8 * dtype.itemsize


def _product(recipe: str, x: jax.Array, w: jax.Array, state: Any) -> tuple[jax.Array, Any]:
    """The layer under a recipe, and the state that it hands on."""
    returned = train.dense(x, w, recipe=recipe, key=jax.random.key(2), state=state or None)
    return returned if isinstance(returned, tuple) else (returned, state)


@functools.partial(jax.jit, static_argnums=0)
def _products(recipe: str, layer: Linear, state: Any) -> tuple[dict[str, jax.Array], Any]:
    """All three products of a layer, and the state of the next step."""
    (y, _), vjp = jax.vjp(lambda *args: _product(recipe, *args), layer.x, layer.w, state)
    dx, dw, after = vjp((layer.g, jax.tree.map(jnp.zeros_like, state)))
    return {"y": y, "dx": dx, "dw": dw}, after


def snr(recipe: str, layer: Linear) -> dict[str, float]:
    """Signal to noise in dB of the three products of a layer under a recipe."""
    found, after = _products(recipe, layer, sd.init_state(recipe))
    if after:  # scales of earlier steps need an earlier step
        found, _ = _products(recipe, layer, after)
    x, w, g = layer
    exact = {"y": x @ w, "dx": g @ w.T, "dw": jnp.einsum("bsk,bsn->kn", x, g)}
    return {product: _decibels(values, found[product]) for product, values in exact.items()}


def _decibels(exact: jax.Array, found: jax.Array) -> float:
    signal, noise = (np.sum(np.square(np.asarray(a, np.float64))) for a in (exact, exact - found))
    return 10 * math.log10(signal / noise)
