"""Residuals of a training matmul: codes instead of full-precision operands, and avals instead of primals."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from scaledot.parallel.types import PrimalType
from scaledot.state import State

# The `checkpoint_name`s of matmul results and of residuals, for the policies of `jax.checkpoint`.
GEMM_NAME = "scaledot_gemm"
BATCHED_GEMM_NAME = "scaledot_batched_gemm"
RESIDUAL_NAME = "scaledot_residual"


class Residuals(NamedTuple):
    """What the forward pass saves for the backward pass.

    x, w: the operands of wgrad and dgrad, narrow floats as Bits. unclipped_x, unclipped_w: masks of straight-through
    gradients, None for no mask. amax: of x and w under delayed scaling. primal_types: the avals of x, w and bias.
    mean_x, plain_w: the mean of x and the unquantised w, for the terms of means in wgrad and dgrad; None without them.
    """

    x: Any
    w: Any
    unclipped_x: jax.Array | None
    unclipped_w: jax.Array | None
    state: State
    amax: dict[str, jax.Array]
    groups: jax.Array | None
    key: jax.Array | None
    primal_types: tuple[PrimalType, PrimalType, PrimalType | None]
    mean_x: jax.Array | None = None
    plain_w: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bits:
    """An array of floats of at most 8 bits, bitcast to unsigned integers.

    jax.checkpoint applies lax.reduce_precision to the floats that it saves, which turns the largest float8_e4m3fn into
    NaN; integers are saved unchanged.
    """

    bits: jax.Array
    dtype: Any = dataclasses.field(metadata={"static": True})


def as_bits(tree: Any) -> Any:
    """The tree with every array of floats of at most 8 bits as Bits."""

    def pack(leaf: jax.Array) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.floating) or jnp.finfo(leaf.dtype).bits > 8:
            return leaf
        unsigned = jnp.uint8 if jnp.finfo(leaf.dtype).bits == 8 else jnp.uint4
        return Bits(lax.bitcast_convert_type(leaf, unsigned), leaf.dtype)

    return jax.tree.map(pack, tree)


def from_bits(tree: Any) -> Any:
    """The inverse of `as_bits`."""

    def unpack(leaf: Any) -> Any:
        return lax.bitcast_convert_type(leaf.bits, leaf.dtype) if isinstance(leaf, Bits) else leaf

    return jax.tree.map(unpack, tree, is_leaf=lambda leaf: isinstance(leaf, Bits))


def named(tree: Any, name: str) -> Any:
    """A quantised operand whose arrays carry a `checkpoint_name`, narrow floats as integers."""
    return from_bits(jax.tree.map(lambda leaf: checkpoint_name(leaf, name), as_bits(tree)))


@jax.custom_jvp
def forbid_second_derivative(tree: Any) -> Any:
    """The tree itself; raises TypeError if differentiated.

    Codes have no derivative, so a second derivative would silently be zero.
    """
    return tree


@functools.partial(forbid_second_derivative.defjvp, symbolic_zeros=True)
def _refuse(primals: tuple[Any], tangents: tuple[Any]):
    leaves = jax.tree.leaves(tangents, is_leaf=lambda t: isinstance(t, jax.custom_derivatives.SymbolicZero))
    zero = jax.custom_derivatives.SymbolicZero
    if not all(isinstance(t, zero) or getattr(t, "dtype", None) == jax.dtypes.float0 for t in leaves):
        raise TypeError(
            "a matmul under a recipe can be differentiated once: its gradients are matmuls of codes, which have no "
            "derivative. Use jax.lax matmuls where second derivatives are needed"
        )
    return primals[0], tangents[0]
