"""The linear layers of the demo's model: their tensors, residual bytes and the accuracy of their matmuls."""

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
    """The tensors of one layer in one step; g is the gradient of its output."""

    x: jax.Array
    w: jax.Array
    g: jax.Array


def linear_layers(state: TrainState) -> dict[str, Linear]:
    """Returns the tensors of all blocks' linear layers by path, in a step on a new batch.

    Output gradients are those of zero arrays that are added to the outputs.
    """

    def loss(offsets: dict[str, jax.Array] | None, params: Any, tokens: jax.Array):
        captured = collections.OrderedDict()  # jit returns its keys in this order, but those of a dict sorted

        def capture(call, args, kwargs, context):
            y, layer = call(*args, **kwargs), context.module
            if not isinstance(layer, nn.Dense) or len(layer.path) < 2:
                return y
            name = "/".join(layer.path)
            captured[name] = args[0], layer.variables["params"]["kernel"], y
            return y if offsets is None else y + offsets[name]

        with nn.intercept_methods(capture):
            logits = state.apply_fn(params, tokens[:, :-1])
        return loss_and_excess(logits, tokens)[0], captured

    tokens = batches(jax.random.key(1), 1)[0]
    _, shapes = jax.eval_shape(lambda *args: loss(None, *args), state.params, tokens)
    zeros = {name: jnp.zeros(y.shape, y.dtype) for name, (_, _, y) in shapes.items()}
    gradients, captured = jax.jit(jax.grad(loss, has_aux=True))(zeros, state.params, tokens)
    return {name: Linear(x, w, gradients[name]) for name, (x, w, _) in captured.items()}


def residual_bytes(precision: str, layer: Linear) -> int:
    """Bytes that a layer saves as residuals besides its parameters: activations, or codes and scales of x and w."""
    if precision not in sd.RECIPES:
        return layer.x.size * jnp.dtype(precision).itemsize
    state = sd.init_state(precision)

    def residuals(*args: Any) -> Any:
        return jax.vjp(lambda x, w, state: _dense(precision, x, w, state)[0], *args)[1]

    leaves = jax.tree.leaves(jax.eval_shape(residuals, layer.x, layer.w, state))
    arrays = [leaf for leaf in leaves if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    return sum(math.ceil(leaf.size * _bits(leaf.dtype) / 8) for leaf in arrays) - state_bytes


def _bits(dtype: Any) -> int:
    return 4 if dtype == jnp.uint4 else 8 * dtype.itemsize


def _dense(recipe: str, x: jax.Array, w: jax.Array, state: Any) -> tuple[jax.Array, Any]:
    """Returns the layer's output under a recipe, and its delayed-scaling state."""
    result = train.dense(x, w, recipe=recipe, key=jax.random.key(2), state=state or None)
    return result if isinstance(result, tuple) else (result, state)


@functools.partial(jax.jit, static_argnums=0)
def _matmuls(recipe: str, layer: Linear, state: Any) -> tuple[dict[str, jax.Array], Any]:
    """Returns the results of fwd, dgrad and wgrad, and the state of the next step."""
    (y, _), vjp = jax.vjp(lambda *args: _dense(recipe, *args), layer.x, layer.w, state)
    dx, dw, next_state = vjp((layer.g, jax.tree.map(jnp.zeros_like, state)))
    return {"y": y, "dx": dx, "dw": dw}, next_state


def snr(recipe: str, layer: Linear) -> dict[str, float]:
    """Signal-to-noise ratios in dB of fwd, dgrad and wgrad of a layer under a recipe."""
    actual, next_state = _matmuls(recipe, layer, sd.init_state(recipe))
    if next_state:  # delayed scaling has useful scales from the second step on
        actual, _ = _matmuls(recipe, layer, next_state)
    x, w, g = layer
    exact = {"y": x @ w, "dx": g @ w.T, "dw": jnp.einsum("bsk,bsn->kn", x, g)}
    return {name: _decibels(expected, actual[name]) for name, expected in exact.items()}


def _decibels(exact: jax.Array, actual: jax.Array) -> float:
    signal, noise = (np.sum(np.square(np.asarray(a, np.float64))) for a in (exact, exact - actual))
    return 10 * math.log10(signal / noise)
