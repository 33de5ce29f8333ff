"""dot_general, einsum and dense under a recipe."""

import dataclasses
from typing import Any

import jax

from scaledot.contraction import Contraction, from_dimension_numbers
from scaledot.kernels import table
from scaledot.kernels.layouts import logical
from scaledot.kernels.placement import devices_of
from scaledot.ops.einsum import two_terms
from scaledot.ops.operands import Choice, contract, float_operand
from scaledot.recipes import PRODUCTS, Cast, Recipe, find_recipe
from scaledot.state import State
from scaledot.train.arguments import checked_state, result_dtype, returned
from scaledot.train.casts import Arrays, Laid, Sides
from scaledot.train.flatten import Layout, flattened
from scaledot.train.partitioned import Partitioned, product_of_parts
from scaledot.train.product import Operands, Rule, product
from scaledot.train.splits import Specs, splits_of


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
    out_sharding=None,
    specs: Specs | None = None,
    overlap: str | tuple[str, ...] = (),
    on_indivisible: str = "raise",
    kernel: Choice = None,
):
    """`jax.lax.dot_general` of operands that are quantised, forward and backward, as a recipe says.

    The result has dtype `preferred_element_type` or the promotion of both; gradients have the dtypes of x and w. What
    is kept for the backward pass is codes.

    Args:
      recipe: a Recipe or its name.
      state: for a recipe with delayed scaling, from `init_state`; then (y, state) is returned, and the state that is
        returned is the one to give to the next use within the same differentiated function. The gradient of a state
        is the next state.
      key: for a recipe that rounds stochastically, new in each step. A forward pass that nobody differentiates needs
        it only if forward casts are stochastic.
      out_sharding: how the result lies, along explicit mesh axes.
      specs: how x, w and the result lie along automatic mesh axes, or along those of a surrounding shard_map, whose
        parts x and w are then. Operands are gathered as codes, and sums added in float32, where that is needed.
      overlap: mesh axes along which transfers are made in rings, while parts of products are computed: no operand is
        gathered before it is used, and no sum is made before it is scattered.
      on_indivisible: what to do where devices would have parts of blocks: "raise", or "gather" that axis first, in the
        precision that the array has.

    >>> import jax.numpy as jnp
    >>> x, w = jnp.ones((2, 64)), jnp.ones((64, 3))
    >>> dot_general(x, w, (((1,), (0,)), ((), ())), recipe="mxfp8")
    Array([[64., 64., 64.],
           [64., 64., 64.]], dtype=float32)
    """
    x, w = float_operand(x, "x"), float_operand(w, "w")
    contraction = from_dimension_numbers(dimension_numbers, x.ndim, w.ndim)
    wanted = {"precision": precision, "out_sharding": out_sharding, "kernel": kernel}
    wanted |= {"specs": specs, "overlap": overlap, "on_indivisible": on_indivisible}
    return contract_under(recipe, contraction, x, w, None, preferred_element_type, state, key, **wanted)


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
    out_sharding=None,
    specs: Specs | None = None,
    overlap: str | tuple[str, ...] = (),
    on_indivisible: str = "raise",
    kernel: Choice = None,
):
    """`jnp.einsum` of two operands under a recipe; arguments as in `dot_general`.

    >>> import jax.numpy as jnp
    >>> x, w = jnp.ones((2, 5, 32)), jnp.ones((32, 4, 8))
    >>> einsum("bsd,dhk->bshk", x, w, recipe="fp8_current").shape
    (2, 5, 4, 8)
    """
    x, w = float_operand(x, "x"), float_operand(w, "w")
    preferred_element_type = result_dtype(preferred_element_type, x, w)
    (x_labels, x), (w_labels, w), out = two_terms(subscripts, x, w)
    wanted = {"precision": precision, "out_sharding": out_sharding, "kernel": kernel}
    wanted |= {"specs": specs, "overlap": overlap, "on_indivisible": on_indivisible}
    contraction = Contraction(x_labels, w_labels, out)
    return contract_under(recipe, contraction, x, w, None, preferred_element_type, state, key, **wanted)


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
    out_sharding=None,
    specs: Specs | None = None,
    overlap: str | tuple[str, ...] = (),
    on_indivisible: str = "raise",
    kernel: Choice = None,
):
    """x (..., k) times w (k, ...) plus b, which has the trailing axes of w.

    The bias is added in float32 before the one rounding of the result, which has the dtype of x unless
    `preferred_element_type` says otherwise: w may be a float32 master weight. Other arguments as in `dot_general`.

    >>> import jax.numpy as jnp
    >>> dense(jnp.ones((2, 32)), jnp.ones((32, 2)), jnp.array([0.0, 0.5]), recipe="mxfp8")
    Array([[32. , 32.5],
           [32. , 32.5]], dtype=float32)
    """
    x, w = float_operand(x, "x"), float_operand(w, "w")
    b = None if b is None else float_operand(b, "b")
    are_whole = specs is None  # parts inside a shard_map may be cut differently
    if not x.ndim or not w.ndim or (are_whole and x.shape[-1] != w.shape[0]):
        raise ValueError(f"the last axis of `x` {x.shape} must be as long as the first of `w` {w.shape}")
    if b is not None and (b.ndim != w.ndim - 1 or (are_whole and b.shape != w.shape[1:])):
        raise ValueError(f"`b` {b.shape} must have the trailing axes of `w` {w.shape}")
    contraction = from_dimension_numbers((((x.ndim - 1,), (0,)), ((), ())), x.ndim, w.ndim)
    preferred = x.dtype if preferred_element_type is None else preferred_element_type
    wanted = {"precision": precision, "out_sharding": out_sharding, "kernel": kernel}
    wanted |= {"specs": specs, "overlap": overlap, "on_indivisible": on_indivisible}
    return contract_under(recipe, contraction, x, w, b, preferred, state, key, **wanted)


def contract_under(
    recipe,
    contraction: Contraction,
    x,
    w,
    b,
    preferred,
    state,
    key,
    specs: Specs | None = None,
    overlap: str | tuple[str, ...] = (),
    on_indivisible: str = "raise",
    **wanted,
):
    """A contraction of checked operands under a recipe."""
    recipe = find_recipe(recipe)
    splits = splits_of(contraction, x, w, specs, wanted["out_sharding"])
    devices = devices_of(x, w) if splits is None else None  # otherwise shards are multiplied inside a shard_map
    to_matrices = table.casts_matrices(devices) or any(cast.cuts for _, _, cast in recipe.casts())
    rows, summed, columns = flattened(contraction, to_matrices)
    left, right, out, bias = layouts = tuple(
        Layout.of(of, groups)
        for of, groups in (
            (contraction.lhs, rows + summed),
            (contraction.rhs, summed + columns),
            (contraction.out, rows + columns),
            (contraction.rhs_free, columns),
        )
    )
    kind = Dot(Contraction(left.flat, right.flat, out.flat), devices or 1)
    dtype, state = result_dtype(preferred, x, w), checked_state(recipe, state, w)
    if splits is not None:
        overlap = (overlap,) if isinstance(overlap, str) else tuple(overlap)
        parts = Partitioned.of(kind, contraction, layouts, x, w, splits, recipe.amax_scope, overlap)
        wanted["out_sharding"] = None
        rule = Rule(kind, recipe, dtype, **wanted)
        return returned(recipe, *product_of_parts(rule, parts, Operands(x, w, b, None), state, key, on_indivisible))
    sharding = wanted.pop("out_sharding") if out.groups else None
    rule = Rule(kind, recipe, dtype, **wanted)
    given = Operands(left.enter(x), right.enter(w), None if b is None else bias.enter(b), None)
    y, state = product(rule, given, state, key)
    y = out.leave(y, dict(zip(contraction.lhs + contraction.rhs, x.shape + w.shape, strict=True)))
    return returned(recipe, y if sharding is None else jax.sharding.reshard(y, sharding), state)


@dataclasses.dataclass(frozen=True)
class Dot(Arrays):
    """A contraction in which x has kept and summed axes, w summed and kept ones, and both may have batch axes."""

    contraction: Contraction
    devices: int = 1

    @property
    def out(self) -> str:
        return self.contraction.out

    @property
    def features(self) -> str:
        return self.contraction.rhs_free

    @property
    def has_batch(self) -> bool:
        return bool(self.contraction.batch)

    def of(self, product: str) -> Contraction:
        return self.contraction if product == "fwd" else getattr(self.contraction, product)

    def sides(self, product: str, tensor: str) -> Sides:
        of = self.of(product)
        side = PRODUCTS[product].index(tensor)
        return Sides((of.lhs, of.rhs)[side], (of.lhs_free, of.rhs_free)[side], of.contracted)

    def lay(self, cast: Cast, product: str, tensor: str) -> Laid:
        return Laid.on(cast, self.sides(product, tensor))

    def contracted_axis(self, product: str, tensor: str, x: jax.Array) -> int | None:
        return self.sides(product, tensor).axis if x.ndim == 2 else None

    def inside(self, laid: Laid, x: jax.Array, q) -> jax.Array | None:
        return super().inside(laid, x, logical(q))

    def logical(self, q) -> Any:
        return logical(q)

    def multiply_and_add(self, x, w, bias: jax.Array, groups, **wanted) -> jax.Array:
        return contract(self.of("fwd"), logical(x), logical(w), bias=bias, **wanted)

    def multiply(self, product: str, lhs, rhs, groups, **wanted) -> jax.Array:
        return contract(self.of(product), logical(lhs), logical(rhs), **wanted)
