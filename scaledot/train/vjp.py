"""The custom_vjp that every training matmul and convolution goes through.

| pass | casts | matmuls |
|---|---|---|
| forward, not differentiated | x and w for fwd | fwd |
| forward, differentiated | x for fwd and wgrad, w for fwd and dgrad | fwd |
| backward | g for dgrad and wgrad | dgrad, wgrad |

Residuals of the differentiated forward pass are the operands x of wgrad and w of dgrad (codes, or the array if the
recipe does not cast it), masks of unclipped elements for straight-through gradients, the state and amaxes of delayed
scaling, the group sizes and the key; under mean subtraction (see `means`) also the mean of x if wgrad has a term of
means, and w itself if dgrad has one.

Both casts of a tensor start from the full-precision tensor, unless the recipe says `requantized` (from the operand of
fwd) or `subtract_mean`; equal casts are computed once. The gradient of the `state` of delayed scaling is the next state
(see `scaledot.state`). A `TrainOp` casts and multiplies the operands.
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
from scaledot.ops.cast_spec import check_one_key
from scaledot.parallel.types import PrimalType, has_explicit_axes, varying
from scaledot.programs import program, run_as_program
from scaledot.state import AmaxHistory, State
from scaledot.train.casts import OperandCaster, check_key
from scaledot.train.means import has_mean_term
from scaledot.train.residuals import (
    BATCHED_GEMM_NAME,
    GEMM_NAME,
    Residuals,
    as_bits,
    forbid_second_derivative,
    from_bits,
)
from scaledot.train.train_op import Matmul, MeanTerm, Operands, StaticArgs, TokenMeans
from scaledot.train.weight_codes import WeightCodes


def quantised_matmul(
    static: StaticArgs, operands: Operands, state: State, key: jax.Array | None, weight_codes: WeightCodes | None = None
) -> tuple[jax.Array, State]:
    """Returns y and the state to pass to the next use.

    weight_codes: the codes of w if it was cast by `cast_weights`, else None.
    """
    if key is not None and static.options.recipe.stochastic:
        check_one_key(key)
    if callable(static.options.kernel):  # may choose another kernel in each call, so that no jitted function is cached
        return typing.cast(tuple[jax.Array, State], _quantised_matmul(static, operands, state, key, weight_codes))
    return run_as_program(
        _quantised_matmul_with_tables, table.tables(), static, arrays=(operands, state, key, weight_codes)
    )


def _quantised_matmul_with_tables(
    tables, static: StaticArgs, operands: Operands, state: State, key, weight_codes: WeightCodes | None
):
    """`_quantised_matmul`; the kernel tables are an argument because the cache of jitted functions is keyed by them."""
    return _quantised_matmul(static, operands, state, key, weight_codes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _quantised_matmul(
    static: StaticArgs, operands: Operands, state: State, key: jax.Array | None, weight_codes: WeightCodes | None
) -> tuple[jax.Array, State]:
    """The forward matmul without residuals."""
    caster = OperandCaster(static, operands.groups, state, key, weight_codes)
    means = caster.token_means("x", operands.x, ("fwd",))
    x = caster.cast("x", operands.x, ("fwd",), means=means).operands["fwd"]
    w = caster.cast("w", operands.w, ("fwd",)).operands["fwd"]
    return _fwd_matmul(static, operands, x, w, means), state


def _fwd_matmul(static: StaticArgs, operands: Operands, x, w, means: TokenMeans | None) -> jax.Array:
    matmul = Matmul.of("fwd", static.options.dtype, static.options, static.options.out_sharding)
    term = None
    if means is not None and has_mean_term(static.options.recipe, "fwd"):
        term = MeanTerm(means.mean, operands.w)
    return static.op.multiply(matmul, x, w, operands.groups, operands.bias, term)


def _forward(
    static: StaticArgs, operands: Operands, state: State, key: jax.Array | None, weight_codes: WeightCodes | None
):
    check_key(static.options.recipe, key, static.options.recipe.stochastic)
    operands = forbid_second_derivative(operands)
    caster = OperandCaster(static, operands.groups, state, key, weight_codes)
    means = caster.token_means("x", operands.x, ("fwd", "wgrad"))
    if means is not None:
        means = means._replace(mean=checkpoint_name(means.mean, static.options.residual_name))
    x, saved_x = caster.cast_and_save("x", operands.x, "wgrad", means)
    w, saved_w = caster.cast_and_save("w", operands.w, "dgrad")
    unclipped_x = caster.unclipped_mask("dgrad", "x", operands.x, x.operands["fwd"])
    unclipped_w = caster.unclipped_mask("wgrad", "w", operands.w, w.operands["fwd"])
    name = BATCHED_GEMM_NAME if static.op.has_batch else GEMM_NAME
    y = checkpoint_name(_fwd_matmul(static, operands, x.operands["fwd"], w.operands["fwd"], means), name)
    bias_type = None if operands.bias is None else PrimalType.of(operands.bias)
    primal_types = PrimalType.of(operands.x), PrimalType.of(operands.w), bias_type
    tensors = (("x", operands.x, x), ("w", operands.w, w))
    amaxes = {name: caster.amax(name, array, cast) for name, array, cast in tensors if name in state}
    residuals = Residuals(
        as_bits(saved_x), as_bits(saved_w), unclipped_x, unclipped_w, state, amaxes, operands.groups, key, primal_types
    )
    if means is not None and has_mean_term(static.options.recipe, "wgrad"):
        residuals = residuals._replace(mean_x=means.mean)
    if has_mean_term(static.options.recipe, "dgrad"):  # w is a parameter, which is in memory anyway
        residuals = residuals._replace(plain_w=operands.w)
    return (y, state), residuals


def _backward(static: StaticArgs, residuals: Residuals, cotangents: tuple[jax.Array, State]):
    g, later_state = cotangents
    g = forbid_second_derivative(g)
    groups, (x_type, w_type, bias_type) = residuals.groups, residuals.primal_types
    caster = OperandCaster(static, groups, residuals.state, residuals.key)
    x, w = from_bits(residuals.x), from_bits(residuals.w)
    cast_g, means = caster.cast_gradient(g, bias_type is not None)
    dgrad_term, wgrad_term = _gradient_terms(residuals, means)
    dx = _gradient(static, "dgrad", cast_g.operands["dgrad"], w, groups, x_type, residuals.unclipped_x, dgrad_term)
    dw = _gradient(static, "wgrad", x, cast_g.operands["wgrad"], groups, w_type, residuals.unclipped_w, wgrad_term)
    db = None if bias_type is None else _as_primal(caster.bias_gradient(g, cast_g), bias_type)
    amaxes = residuals.amax | ({"g": caster.amax("g", g, cast_g)} if "g" in residuals.state else {})
    state = _next_state(static, residuals.state, amaxes, later_state)
    return Operands(dx, dw, db, _no_tangent(groups)), state, _no_tangent(residuals.key), None


_quantised_matmul.defvjp(_forward, _backward)


def _gradient_terms(residuals: Residuals, means: TokenMeans | None) -> tuple[MeanTerm | None, MeanTerm | None]:
    """The terms that means add to dgrad and wgrad. means: those of g."""
    if means is None:
        return None, None
    dgrad = None if residuals.plain_w is None else MeanTerm(means.mean, residuals.plain_w)
    return dgrad, None if residuals.mean_x is None else MeanTerm(residuals.mean_x, means.sum)


def _gradient(
    static: StaticArgs,
    name: str,
    lhs,
    rhs,
    groups,
    primal: PrimalType,
    unclipped_mask: jax.Array | None,
    mean_term: MeanTerm | None,
) -> jax.Array:
    """dgrad or wgrad with the aval of `primal`; zero where the forward cast clipped."""
    sharding = primal.aval.sharding if has_explicit_axes(primal.aval.sharding) else None
    matmul = Matmul.of(name, primal.aval.dtype, static.options, sharding)
    result = static.op.multiply(matmul, lhs, rhs, groups, mean_term=mean_term)
    if result.shape != primal.aval.shape:
        # An operand padded to a multiple of the Hadamard size has a padded gradient.
        result = result[tuple(slice(size) for size in primal.aval.shape)]
    if unclipped_mask is not None:
        result = jnp.where(unclipped_mask, result, jnp.zeros_like(result))
    return _as_primal(result, primal)


def _as_primal(gradient: jax.Array, primal: PrimalType) -> jax.Array:
    """The gradient, reduced over mesh axes that the primal does not vary over, in the primal's dtype."""
    return primal.reduced(gradient).astype(primal.aval.dtype)


def _next_state(static: StaticArgs, state: State, amaxes: dict[str, jax.Array], later: State) -> State:
    """The state advanced by the amaxes of this use.

    later: the cotangent of the returned state, in which the amaxes of later uses are already merged.
    """
    casts = static.options.recipe.delayed
    if not casts:
        return {}
    amaxes = {tensor: _global_amax(amaxes[tensor], state[tensor]) for tensor in casts}
    # A jitted program is traced and lowered once for all layers with states of the same shape.
    return program(_advance, table.tables(), tuple(casts.items()), static.op.partitioning)(state, amaxes, later)


def _advance(kernel_tables, casts, partitioning, state: State, amaxes: dict[str, jax.Array], later: State) -> State:
    """The body of `_next_state`; the tables are an argument because the cache of jitted programs is keyed by them."""
    compute = table.scalar_runner(partitioning)
    return {
        tensor: states.merged(states.advance(cast, state[tensor], amaxes[tensor], compute), later[tensor])
        for tensor, cast in casts
    }


def _global_amax(amax: jax.Array, state: AmaxHistory) -> jax.Array:
    """The amax, max-reduced over the mesh axes of a shard_map over which the state is replicated."""
    axes = varying(amax) - varying(state.history)
    return lax.pmax(amax, tuple(axes)) if axes else amax


def _no_tangent(x: jax.Array | None) -> Any:
    return None if x is None else np.zeros(jnp.shape(x), jax.dtypes.float0)
