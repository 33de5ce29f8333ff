"""The one differentiated matmul: any contraction under a Recipe, with state and key threaded through.

Forward casts x and w and multiplies. Differentiated, it also casts them for the matmuls of the backward pass, from
full precision, and keeps those codes instead of the arrays. Backward casts the gradient once for each of dgrad and
wgrad, and multiplies.

How operands are laid out, cast and multiplied is the business of a Kind: `dot`, `ragged` or `conv`.
"""

import functools
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from scaledot import state as states
from scaledot.kernels import table
from scaledot.parallel.types import Like, has_explicit_axes, varying
from scaledot.programs import run_as_program
from scaledot.state import AmaxHistory, State
from scaledot.train.casts import Casts, check_key
from scaledot.train.kind import Matmul, Operands, Step
from scaledot.train.residuals import (
    BATCHED_GEMM_NAME,
    GEMM_NAME,
    Residuals,
    as_bits,
    differentiated_once,
    from_bits,
)
from scaledot.train.weight_codes import WeightCodes


def multiply(
    step: Step, operands: Operands, state: State, key: jax.Array | None, codes: WeightCodes | None = None
) -> tuple[jax.Array, State]:
    """The result, and the state to give to the next use. codes: of w, if it was cast before."""
    if callable(step.options.kernel):  # which may answer differently every time
        return typing.cast(tuple[jax.Array, State], _multiply(step, operands, state, key, codes))
    return run_as_program(_multiply_by, table.tables(), step, arrays=(operands, state, key, codes))


def _multiply_by(tables, step: Step, operands: Operands, state: State, key, codes: WeightCodes | None):
    """`_multiply`, whose kernels are chosen from these tables."""
    return _multiply(step, operands, state, key, codes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(
    step: Step, operands: Operands, state: State, key: jax.Array | None, codes: WeightCodes | None
) -> tuple[jax.Array, State]:
    """The forward matmul alone, as it is computed when nobody differentiates."""
    casts = Casts(step, operands.groups, state, key, codes)
    x, w = (casts.made(tensor, a, ("fwd",)).operands["fwd"] for tensor, a in (("x", operands.x), ("w", operands.w)))
    return _multiply_codes(step, operands, x, w), state


def _multiply_codes(step: Step, operands: Operands, x, w) -> jax.Array:
    matmul = Matmul.of("fwd", step.options.dtype, step.options, step.options.out_sharding)
    return step.kind.multiply(matmul, x, w, operands.groups, operands.bias)


def _forward(step: Step, operands: Operands, state: State, key: jax.Array | None, codes: WeightCodes | None):
    check_key(step.options.recipe, key, step.options.recipe.stochastic)
    operands = differentiated_once(operands)
    casts = Casts(step, operands.groups, state, key, codes)
    x, kept_x = casts.cast_and_save("x", operands.x, "wgrad")
    w, kept_w = casts.cast_and_save("w", operands.w, "dgrad")
    unclipped_x = casts.unclipped_mask("dgrad", "x", operands.x, x.operands["fwd"])
    unclipped_w = casts.unclipped_mask("wgrad", "w", operands.w, w.operands["fwd"])
    name = BATCHED_GEMM_NAME if step.kind.has_batch else GEMM_NAME
    y = checkpoint_name(_multiply_codes(step, operands, x.operands["fwd"], w.operands["fwd"]), name)
    like = Like.of(operands.x), Like.of(operands.w), None if operands.bias is None else Like.of(operands.bias)
    amaxes = {t: casts.amax(t, a, made) for t, a, made in (("x", operands.x, x), ("w", operands.w, w)) if t in state}
    kept = Residuals(
        as_bits(kept_x), as_bits(kept_w), unclipped_x, unclipped_w, state, amaxes, operands.groups, key, like
    )
    return (y, state), kept


def _backward(step: Step, kept: Residuals, cotangents: tuple[jax.Array, State]):
    g, later = cotangents
    g = differentiated_once(g)
    x_like, w_like, bias_like = kept.like
    casts = Casts(step, kept.groups, kept.state, kept.key)
    x, w = from_bits(kept.x), from_bits(kept.w)
    made = casts.made("g", g, ("dgrad", "wgrad"), sums=bias_like is not None)
    dx = _gradient(step, "dgrad", made.operands["dgrad"], w, kept.groups, x_like, kept.unclipped_x)
    dw = _gradient(step, "wgrad", x, made.operands["wgrad"], kept.groups, w_like, kept.unclipped_w)
    db = None if bias_like is None else _as_primal(casts.bias_gradient(g, made), bias_like)
    amaxes = kept.amax | ({"g": casts.amax("g", g, made)} if "g" in kept.state else {})
    state = _next_state(step, kept.state, amaxes, later)
    return Operands(dx, dw, db, _no_tangent(kept.groups)), state, _no_tangent(kept.key), None


_multiply.defvjp(_forward, _backward)


def _gradient(step: Step, name: str, lhs, rhs, groups, like: Like, unclipped_mask: jax.Array | None) -> jax.Array:
    """One matmul of the backward pass, typed as its primal; zero where the forward cast clipped."""
    sharding = like.type.sharding if has_explicit_axes(like.type.sharding) else None
    result = step.kind.multiply(Matmul.of(name, like.type.dtype, step.options, sharding), lhs, rhs, groups)
    # A forward operand that was padded for its rotation has gradients for the zeros, too.
    result = result[tuple(slice(size) for size in like.type.shape)] if result.shape != like.type.shape else result
    if unclipped_mask is not None:
        result = jnp.where(unclipped_mask, result, jnp.zeros_like(result))
    return _as_primal(result, like)


def _as_primal(gradient: jax.Array, like: Like) -> jax.Array:
    return like.reduced(gradient).astype(like.type.dtype)


def _next_state(step: Step, state: State, amaxes: dict[str, jax.Array], later: State) -> State:
    """The next state, merged with what later uses of the same state have seen."""
    advanced = {}
    for tensor, cast in step.options.recipe.delayed.items():
        amax = _largest_anywhere(amaxes[tensor], state[tensor])
        mine = states.advance(cast, state[tensor], amax, table.scalar_program(step.kind.partitioning))
        advanced[tensor] = states.merged(mine, later[tensor])
    return advanced


def _largest_anywhere(amax: jax.Array, state: AmaxHistory) -> jax.Array:
    """The largest magnitude over the devices of a shard_map that share the state."""
    axes = varying(amax) - varying(state.history)
    return lax.pmax(amax, tuple(axes)) if axes else amax


def _no_tangent(x: jax.Array | None) -> Any:
    return None if x is None else np.zeros(jnp.shape(x), jax.dtypes.float0)
