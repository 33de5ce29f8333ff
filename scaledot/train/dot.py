"""dot_general, einsum and dense under a recipe."""

import dataclasses
import functools
from typing import Any, Unpack

import jax

from scaledot.contraction import Contraction, from_dimension_numbers
from scaledot.kernels import table
from scaledot.kernels.layouts import logical, stored
from scaledot.ops.einsum import two_operands
from scaledot.ops.operands import contract, float_operand
from scaledot.parallel.specs import Shardings, shardings_of
from scaledot.parallel.types import ONE_DEVICE, Partitioning, partitioning_of
from scaledot.recipes import PRODUCTS, Cast, Recipe
from scaledot.state import State
from scaledot.train.casts import Arrays
from scaledot.train.dot_sharded import Sharded, multiply_sharded
from scaledot.train.flatten import Flattened, flatten
from scaledot.train.kind import Matmul, Operands, Step
from scaledot.train.options import Keywords, Options, result_dtype
from scaledot.train.resolved_cast import OperandDims, ResolvedCast
from scaledot.train.vjp import multiply
from scaledot.train.weight_codes import WeightCodes, weight_operand


def dot_general(
    x,
    w,
    dimension_numbers,
    precision=None,
    preferred_element_type=None,
    *,
    recipe: str | Recipe,
    state: State | None = None,
    key=None,
    **options: Unpack[Keywords],
):
    """`jax.lax.dot_general` of operands that are quantised, forward and backward, as a recipe says.

    The result has dtype `preferred_element_type` or the promotion of both; gradients have the dtypes of x and w. What
    is kept for the backward pass is codes.

    Args:
      w: an array, or a weight that `cast_weights` has cast under the same recipe.
      recipe: a Recipe or its name.
      state: for a recipe with delayed scaling, from `init_state`; then (y, state) is returned, and the state that is
        returned is the one to give to the next use within the same differentiated function. The gradient of a state
        is the next state.
      key: for a recipe that rounds stochastically, new in each step. A forward pass that nobody differentiates needs
        it only if forward casts are stochastic.
      **options: `out_sharding`, `specs`, `overlap`, `on_indivisible` and `kernel`; see
        `scaledot.train.options.Keywords`.

    >>> import jax.numpy as jnp
    >>> x, w = jnp.ones((2, 64)), jnp.ones((64, 3))
    >>> dot_general(x, w, (((1,), (0,)), ((), ())), recipe="mxfp8")
    Array([[64., 64., 64.],
           [64., 64., 64.]], dtype=float32)
    """
    x, (w, codes) = float_operand(x, "x"), weight_operand(w)
    contraction = from_dimension_numbers(dimension_numbers, x.ndim, w.ndim)
    how = Options.of(recipe, result_dtype(preferred_element_type, x.dtype, w.dtype), precision, options)
    return contract_under(how, contraction, x, w, None, state, key, codes)


def einsum(
    subscripts: str,
    x,
    w,
    *,
    recipe: str | Recipe,
    state: State | None = None,
    key=None,
    precision=None,
    preferred_element_type=None,
    **options: Unpack[Keywords],
):
    """`jnp.einsum` of two operands under a recipe; arguments as in `dot_general`.

    >>> import jax.numpy as jnp
    >>> x, w = jnp.ones((2, 5, 32)), jnp.ones((32, 4, 8))
    >>> einsum("bsd,dhk->bshk", x, w, recipe="fp8_current").shape
    (2, 5, 4, 8)
    """
    x, (w, codes) = float_operand(x, "x"), weight_operand(w)
    shape = w.shape
    how = Options.of(recipe, result_dtype(preferred_element_type, x.dtype, w.dtype), precision, options)
    (x_labels, x), (w_labels, w), out = two_operands(subscripts, x, w)
    if codes is not None and w.shape != shape:
        raise ValueError(f"{subscripts!r} sums or broadcasts axes of {codes.spec} alone, which was cast as it is")
    return contract_under(how, Contraction(x_labels, w_labels, out), x, w, None, state, key, codes)


def dense(
    x,
    w,
    b=None,
    *,
    recipe: str | Recipe,
    state: State | None = None,
    key=None,
    precision=None,
    preferred_element_type=None,
    **options: Unpack[Keywords],
):
    """x (..., k) times w (k, ...) plus b, which has the trailing axes of w.

    The bias is added in float32 before the one rounding of the result, which has the dtype of x unless
    `preferred_element_type` says otherwise: w may be a float32 master weight. Other arguments as in `dot_general`.

    >>> import jax.numpy as jnp
    >>> dense(jnp.ones((2, 32)), jnp.ones((32, 2)), jnp.array([0.0, 0.5]), recipe="mxfp8")
    Array([[32. , 32.5],
           [32. , 32.5]], dtype=float32)
    """
    x, (w, codes) = float_operand(x, "x"), weight_operand(w)
    b = None if b is None else float_operand(b, "b")
    are_whole = options.get("specs") is None  # shards inside a shard_map may be cut differently, and are checked later
    if not x.ndim or not w.ndim or (are_whole and x.shape[-1] != w.shape[0]):
        raise ValueError(f"the last axis of `x` {x.shape} must be as long as the first of `w` {w.shape}")
    if b is not None and b.ndim != w.ndim - 1:
        raise ValueError(f"`b` {b.shape} must have the trailing axes of `w` {w.shape}")
    contraction = _last_by_first(x.ndim, w.ndim)
    preferred = x.dtype if preferred_element_type is None else preferred_element_type
    how = Options.of(recipe, result_dtype(preferred, x.dtype, w.dtype), precision, options)
    return contract_under(how, contraction, x, w, b, state, key, codes)


@functools.cache
def _last_by_first(x_ndim: int, w_ndim: int) -> Contraction:
    """The last axis of x contracted with the first of w."""
    return from_dimension_numbers((((x_ndim - 1,), (0,)), ((), ())), x_ndim, w_ndim)


def contract_under(
    options: Options, contraction: Contraction, x, w, b, state: State | None, key, codes: WeightCodes | None = None
):
    """A contraction of checked operands: y, or (y, state) with delayed scaling. codes: of w, if it was cast before."""
    if codes is not None:
        codes.spec.check_use(options.recipe, contraction)
    operands, state = Operands(x, w, b, None), options.checked_state(state, w)
    splits = shardings_of(contraction, jax.typeof(x), jax.typeof(w), options.specs, options.out_sharding)
    if splits is None:
        return options.returned(*_contract_whole(options, contraction, operands, state, key, codes))
    if codes is not None:
        raise ValueError(
            f"{codes.spec} was cast whole; with `specs`, or sharded over explicit mesh axes, a matmul casts shards: "
            "leave the weight out of cast_weights with `select`"
        )
    return options.returned(*_contract_sharded(options, contraction, splits, operands, state, key))


def _contract_whole(options: Options, contraction: Contraction, operands: Operands, state: State, key, codes):
    """Operands on one device, or that XLA partitions as it likes."""
    _check_bias(contraction, operands)
    partitioning = partitioning_of(operands.x, operands.w)
    to_matrices = table.casts_matrices(partitioning) or options.recipe.cuts
    flat = flatten(contraction, to_matrices if codes is None else codes.spec.to_matrices)
    sharding = options.out_sharding if flat.g.groups else None  # of the result before it is flattened
    if sharding is not None:
        options = dataclasses.replace(options, out_sharding=None)
    x, w, b, _ = operands
    given = Operands(flat.x.enter(x), flat.w.enter(w), None if b is None else flat.bias.enter(b), None)
    sizes = dict(zip(contraction.lhs + contraction.rhs, x.shape + w.shape, strict=True))
    y, state = multiply(Step(Dot.of(flat, partitioning, sizes), options), given, state, key, codes)
    y = flat.g.leave(y, sizes)
    return y if sharding is None else jax.sharding.reshard(y, sharding), state


def _check_bias(contraction: Contraction, operands: Operands) -> None:
    w, b = operands.w, operands.bias
    features = tuple(size for c, size in zip(contraction.rhs, w.shape, strict=True) if c in contraction.rhs_free)
    if b is not None and b.shape != features:
        raise ValueError(f"`b` {b.shape} must have the trailing axes of `w` {w.shape}")


def _contract_sharded(options: Options, contraction: Contraction, splits: Shardings, operands: Operands, state, key):
    """Operands that are sharded as the splits say, multiplied inside a shard_map."""
    flat = flatten(contraction, table.casts_matrices(None) or options.recipe.cuts)
    kind = Sharded.of(Dot(flat.flat), flat, operands, splits, options)
    return multiply_sharded(kind, options, operands, state, key)


@dataclasses.dataclass(frozen=True)
class Dot(Arrays):
    """A contraction of x (batch, free, contracted) and w (batch, contracted, free), with axes in any order.

    members: in a program that XLA partitions, the sizes of the axes that each label was flattened from.
    """

    contraction: Contraction
    partitioning: Partitioning = ONE_DEVICE
    members: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @classmethod
    def of(cls, flat: Flattened, partitioning: Partitioning, sizes: dict[str, int]) -> "Dot":
        """The flattened contraction in a program that XLA partitions so. sizes: of the labels before flattening."""
        return cls(flat.flat, partitioning, () if partitioning.devices == 1 else flat.members(sizes))

    @property
    def out(self) -> str:
        return self.contraction.out

    @property
    def features(self) -> str:
        return self.contraction.rhs_free

    @property
    def has_batch(self) -> bool:
        return bool(self.contraction.batch)

    def sides(self, matmul: str, tensor: str) -> OperandDims:
        of, side = self.contraction.of(matmul), PRODUCTS[matmul].index(tensor)
        return OperandDims((of.lhs, of.rhs)[side], (of.lhs_free, of.rhs_free)[side], of.contracted)

    def resolve_cast(self, cast: Cast, matmul: str, tensor: str) -> ResolvedCast:
        return ResolvedCast.on(cast, self.sides(matmul, tensor))

    def contracted_axis(self, matmul: str, tensor: str, ndim: int) -> int | None:
        return self.sides(matmul, tensor).axis if ndim == 2 else None

    def unclipped_mask(self, resolved: ResolvedCast, x: jax.Array, q) -> jax.Array | None:
        return super().unclipped_mask(resolved, x, logical(q))

    def logical(self, q) -> Any:
        return logical(q)

    def multiply(self, matmul: Matmul, lhs, rhs, groups, bias: jax.Array | None = None) -> jax.Array:
        of = self.contraction.of(matmul.name)
        (lhs, left), (rhs, right) = stored(lhs, of.lhs), stored(rhs, of.rhs)
        wanted = {**matmul.keywords, "partitioning": self.partitioning, "members": dict(self.members)}
        return contract(Contraction(left, right, of.out), lhs, rhs, bias=bias, **wanted)

    def members_of(self, matmul: str, tensor: str) -> tuple[tuple[int, ...], ...] | None:
        return tuple(dict(self.members)[c] for c in self.sides(matmul, tensor).labels) if self.members else None
