"""The custom_vjp that every training matmul and convolution goes through.

| pass | casts | matmuls | residuals |
|---|---|---|---|
| forward, not differentiated | x and w for fwd | fwd | |
| forward, differentiated | x for fwd and wgrad, w for fwd and dgrad | fwd | codes of x and w, keys, amaxes |
| backward | g for dgrad and wgrad | dgrad, wgrad | |

Both casts of a tensor start from the full-precision tensor; where they give equal codes, there is one. The gradient of
the `state` of delayed scaling is the next state (see `scaledot.state`). How operands are cast and multiplied is up to
a `TrainOp`.
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
from scaledot.train.casts import OperandCaster, check_key
from scaledot.train.residuals import (
    BATCHED_GEMM_NAME,
    GEMM_NAME,
    Residuals,
    as_bits,
    differentiated_once,
    from_bits,
)
from scaledot.train.train_op import Matmul, Operands, StaticArgs
from scaledot.train.weight_codes import WeightCodes


def multiply(
    static: StaticArgs, operands: Operands, state: State, key: jax.Array | None, codes: WeightCodes | None = None
) -> tuple[jax.Array, State]:
    """y and the state to pass to the next use. codes: those of a w that `cast_weights` has cast."""
    if callable(static.options.kernel):  # may choose another kernel in each call, so that no jitted function is cached
        return typing.cast(tuple[jax.Array, State], _multiply(static, operands, state, key, codes))
    return run_as_program(_multiply_with_tables, table.tables(), static, arrays=(operands, state, key, codes))


def _multiply_with_tables(tables, static: StaticArgs, operands: Operands, state: State, key, codes: WeightCodes | None):
    """`_multiply`; the kernel tables are an argument because the cache of jitted functions is keyed by them."""
    return _multiply(static, operands, state, key, codes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(
    static: StaticArgs, operands: Operands, state: State, key: jax.Array | None, codes: WeightCodes | None
) -> tuple[jax.Array, State]:
    """The forward matmul without residuals."""
    caster = OperandCaster(static, operands.groups, state, key, codes)
    x, w = (caster.cast(tensor, a, ("fwd",)).operands["fwd"] for tensor, a in (("x", operands.x), ("w", operands.w)))
    return _fwd_matmul(static, operands, x, w), state


def _fwd_matmul(static: StaticArgs, operands: Operands, x, w) -> jax.Array:
    matmul = Matmul.of("fwd", static.options.dtype, static.options, static.options.out_sharding)
    return static.op.multiply(matmul, x, w, operands.groups, operands.bias)


def _forward(static: StaticArgs, operands: Operands, state: State, key: jax.Array | None, codes: WeightCodes | None):
    check_key(static.options.recipe, key, static.options.recipe.stochastic)
    operands = differentiated_once(operands)
    caster = OperandCaster(static, operands.groups, state, key, codes)
    x, saved_x = caster.cast_and_save("x", operands.x, "wgrad")
    w, saved_w = caster.cast_and_save("w", operands.w, "dgrad")
    unclipped_x = caster.unclipped_mask("dgrad", "x", operands.x, x.operands["fwd"])
    unclipped_w = caster.unclipped_mask("wgrad", "w", operands.w, w.operands["fwd"])
    name = BATCHED_GEMM_NAME if static.op.has_batch else GEMM_NAME
    y = checkpoint_name(_fwd_matmul(static, operands, x.operands["fwd"], w.operands["fwd"]), name)
    like = Like.of(operands.x), Like.of(operands.w), None if operands.bias is None else Like.of(operands.bias)
    cast = (("x", operands.x, x), ("w", operands.w, w))
    amaxes = {t: caster.amax(t, a, operand) for t, a, operand in cast if t in state}
    residuals = Residuals(
        as_bits(saved_x), as_bits(saved_w), unclipped_x, unclipped_w, state, amaxes, operands.groups, key, like
    )
    return (y, state), residuals


def _backward(static: StaticArgs, residuals: Residuals, cotangents: tuple[jax.Array, State]):
    g, later_state = cotangents
    g = differentiated_once(g)
    groups, (x_like, w_like, bias_like) = residuals.groups, residuals.like
    caster = OperandCaster(static, groups, residuals.state, residuals.key)
    x, w = from_bits(residuals.x), from_bits(residuals.w)
    cast = caster.cast("g", g, ("dgrad", "wgrad"), column_sums=bias_like is not None)
    dx = _gradient(static, "dgrad", cast.operands["dgrad"], w, groups, x_like, residuals.unclipped_x)
    dw = _gradient(static, "wgrad", x, cast.operands["wgrad"], groups, w_like, residuals.unclipped_w)
    db = None if bias_like is None else _as_primal(caster.bias_gradient(g, cast), bias_like)
    amaxes = residuals.amax | ({"g": caster.amax("g", g, cast)} if "g" in residuals.state else {})
    state = _next_state(static, residuals.state, amaxes, later_state)
    return Operands(dx, dw, db, _no_tangent(groups)), state, _no_tangent(residuals.key), None


_multiply.defvjp(_forward, _backward)


def _gradient(
    static: StaticArgs, name: str, lhs, rhs, groups, like: Like, unclipped_mask: jax.Array | None
) -> jax.Array:
    """dgrad or wgrad with the aval of its primal (`like`); zero where the forward cast clipped."""
    sharding = like.type.sharding if has_explicit_axes(like.type.sharding) else None
    result = static.op.multiply(Matmul.of(name, like.type.dtype, static.options, sharding), lhs, rhs, groups)
    # A forward operand that was padded to whole groups of a rotation has gradients for its padding, too.
    result = result[tuple(slice(size) for size in like.type.shape)] if result.shape != like.type.shape else result
    if unclipped_mask is not None:
        result = jnp.where(unclipped_mask, result, jnp.zeros_like(result))
    return _as_primal(result, like)


def _as_primal(gradient: jax.Array, like: Like) -> jax.Array:
    """The gradient, reduced over mesh axes that the primal does not vary over, in the primal's dtype."""
    return like.reduced(gradient).astype(like.type.dtype)


def _next_state(static: StaticArgs, state: State, amaxes: dict[str, jax.Array], later: State) -> State:
    """The state advanced by the amaxes of this use, merged with `later`, the next state of later uses."""
    advanced = {}
    for tensor, cast in static.options.recipe.delayed.items():
        amax = _global_amax(amaxes[tensor], state[tensor])
        history = states.advance(cast, state[tensor], amax, table.scalar_runner(static.op.partitioning))
        advanced[tensor] = states.merged(history, later[tensor])
    return advanced


def _global_amax(amax: jax.Array, state: AmaxHistory) -> jax.Array:
    """The amax, max-reduced over the mesh axes of a shard_map over which the state is replicated."""
    axes = varying(amax) - varying(state.history)
    return lax.pmax(amax, tuple(axes)) if axes else amax


def _no_tangent(x: jax.Array | None) -> Any:
    return None if x is None else np.zeros(jnp.shape(x), jax.dtypes.float0)
