"""What a training matmul keeps for its backward pass: codes instead of arrays, and types instead of primals."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from scaledot.parallel.types import Like
from scaledot.state import State

# The names under which jax.checkpoint finds the results of matmuls and what they keep for the backward pass.
GEMM_NAME = "scaledot_gemm"
BATCHED_GEMM_NAME = "scaledot_batched_gemm"
RESIDUAL_NAME = "scaledot_residual"


class Residuals(NamedTuple):
    """x and w are quantised operands as Bits. inside_x, inside_w: where a straight-through gradient passes, None for
    everywhere. amax: of x and w under delayed scaling. like: the types of x, w and bias."""

    x: Any
    w: Any
    unclipped_x: jax.Array | None
    unclipped_w: jax.Array | None
    state: State
    amax: dict[str, jax.Array]
    groups: jax.Array | None
    key: jax.Array | None
    like: tuple[Like, Like, Like | None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bits:
    """A narrow float array as integers.

    jax.checkpoint rounds the floats that it saves with lax.reduce_precision, which takes the largest float8_e4m3fn for
    an infinity and turns it into NaN; integers it leaves alone.
    """

    bits: jax.Array
    dtype: Any = dataclasses.field(metadata={"static": True})


def as_bits(tree: Any) -> Any:
    """The tree with every float of at most 8 bits as Bits."""

    def pack(leaf: jax.Array) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.floating) or jnp.finfo(leaf.dtype).bits > 8:
            return leaf
        unsigned = jnp.uint8 if jnp.finfo(leaf.dtype).bits == 8 else jnp.uint4
        return Bits(lax.bitcast_convert_type(leaf, unsigned), leaf.dtype)

    return jax.tree.map(pack, tree)


def from_bits(tree: Any) -> Any:
    def unpack(leaf: Any) -> Any:
        return lax.bitcast_convert_type(leaf.bits, leaf.dtype) if isinstance(leaf, Bits) else leaf

    return jax.tree.map(unpack, tree, is_leaf=lambda leaf: isinstance(leaf, Bits))


def named(tree: Any, name: str) -> Any:
    """A quantised operand that jax.checkpoint finds by name; its float codes are saved as integers."""
    return from_bits(jax.tree.map(lambda leaf: checkpoint_name(leaf, name), as_bits(tree)))


@jax.custom_jvp
def differentiated_once(tree: Any) -> Any:
    """The tree itself. Codes have no derivative, so a second one would be zero without a word."""
    return tree


@functools.partial(differentiated_once.defjvp, symbolic_zeros=True)
def _refuse(primals: tuple[Any], tangents: tuple[Any]):
    leaves = jax.tree.leaves(tangents, is_leaf=lambda t: isinstance(t, jax.custom_derivatives.SymbolicZero))
    kinds = (jax.custom_derivatives.SymbolicZero,)
    if not all(isinstance(t, kinds) or getattr(t, "dtype", None) == jax.dtypes.float0 for t in leaves):
        raise TypeError(
            "a product under a recipe can be differentiated once: its gradients are products of codes, which have no "
            "derivative. Use plain products where second derivatives are needed"
        )
    return primals[0], tangents[0]
