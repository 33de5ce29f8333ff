"""dot_general, einsum and dense under a recipe."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from scaledot.array import ScaledArray
from scaledot.kernels.operands import Factor, lay
from scaledot.kernels.spec import Contraction, promoted
from scaledot.ops.contraction import from_dimension_numbers, labels
from scaledot.ops.einsum import two_terms
from scaledot.ops.operands import Choice, as_operand, contract, element_type
from scaledot.ops.quantize import amax
from scaledot.recipes import PRODUCTS, Cast, Recipe, find_recipe
from scaledot.state import State, check_state
from scaledot.train.casts import Laid, Sides
from scaledot.train.product import Operands, Rule, product


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

    >>> x, w = jnp.ones((2, 64)), jnp.ones((64, 3))
    >>> dot_general(x, w, (((1,), (0,)), ((), ())), recipe="mxfp8")
    Array([[64., 64., 64.],
           [64., 64., 64.]], dtype=float32)
    """
    x, w = float_operand(x, "x"), float_operand(w, "w")
    contraction = from_dimension_numbers(dimension_numbers, x.ndim, w.ndim)
    wanted = {"precision": precision, "out_sharding": out_sharding, "kernel": kernel}
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
    kernel: Choice = None,
):
    """`jnp.einsum` of two operands under a recipe; arguments as in `dot_general`.

    >>> x, w = jnp.ones((2, 5, 32)), jnp.ones((32, 4, 8))
    >>> einsum("bsd,dhk->bshk", x, w, recipe="fp8_current").shape
    (2, 5, 4, 8)
    """
    x, w = float_operand(x, "x"), float_operand(w, "w")
    preferred_element_type = result_dtype(preferred_element_type, x, w)
    (x_labels, x), (w_labels, w), out = two_terms(subscripts, x, w)
    wanted = {"precision": precision, "out_sharding": out_sharding, "kernel": kernel}
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
    kernel: Choice = None,
):
    """x (..., k) times w (k, ...) plus b, which has the trailing axes of w.

    The bias is added in float32 before the one rounding of the result, which has the dtype of x unless
    `preferred_element_type` says otherwise: w may be a float32 master weight. Other arguments as in `dot_general`.

    >>> dense(jnp.ones((2, 32)), jnp.ones((32, 2)), jnp.array([0.0, 0.5]), recipe="mxfp8")
    Array([[32. , 32.5],
           [32. , 32.5]], dtype=float32)
    """
    x, w = float_operand(x, "x"), float_operand(w, "w")
    b = None if b is None else float_operand(b, "b")
    if not x.ndim or not w.ndim or x.shape[-1] != w.shape[0]:
        raise ValueError(f"the last axis of `x` {x.shape} must be as long as the first of `w` {w.shape}")
    if b is not None and b.shape != w.shape[1:]:
        raise ValueError(f"`b` {b.shape} must have the trailing axes of `w` {w.shape}")
    contraction = from_dimension_numbers((((x.ndim - 1,), (0,)), ((), ())), x.ndim, w.ndim)
    preferred = x.dtype if preferred_element_type is None else preferred_element_type
    wanted = {"precision": precision, "out_sharding": out_sharding, "kernel": kernel}
    return contract_under(recipe, contraction, x, w, b, preferred, state, key, **wanted)


def contract_under(recipe, contraction: Contraction, x, w, b, preferred, state, key, **wanted):
    """A contraction of checked operands under a recipe."""
    recipe = find_recipe(recipe)
    rows, summed, columns = flattened(contraction, cuts=any(cast.cuts for _, _, cast in recipe.casts()))
    left, right, out, bias = (
        Form.of(of, groups)
        for of, groups in (
            (contraction.lhs, rows + summed),
            (contraction.rhs, summed + columns),
            (contraction.out, rows + columns),
            (contraction.rhs_free, columns),
        )
    )
    sharding = wanted.pop("out_sharding") if out.groups else None
    kind = Dot(Contraction(left.flat, right.flat, out.flat))
    rule = Rule(kind, recipe, result_dtype(preferred, x, w), **wanted)
    given = Operands(left.enter(x), right.enter(w), None if b is None else bias.enter(b), None)
    y, state = product(rule, given, checked_state(recipe, state), key)
    y = out.leave(y, dict(zip(contraction.lhs + contraction.rhs, x.shape + w.shape, strict=True)))
    return returned(recipe, y if sharding is None else jax.sharding.reshard(y, sharding), state)


def returned(recipe: Recipe, y: jax.Array, state: State):
    return (y, state) if recipe.delayed else y


def float_operand(x, name: str) -> jax.Array:
    x = as_operand(x, name)
    if isinstance(x, ScaledArray):
        raise TypeError(f"`{name}` is already quantised ({x}); train with plain arrays, or use scaledot.dot_general")
    if not jnp.issubdtype(x.dtype, jnp.floating) or jnp.finfo(x.dtype).bits < 16:
        raise TypeError(f"`{name}` must be a float array of at least 16 bits to be trained, not {x.dtype}")
    return x


def checked_state(recipe: Recipe, state) -> State:
    if recipe.delayed and state is None:
        raise ValueError(
            f"{recipe.name} scales by the history of earlier steps: give a `state`, at first "
            f"init_state({recipe.name!r})"
        )
    if not recipe.delayed and state:
        raise ValueError(f"`state` is given, but {recipe.name} keeps none")
    check_state(recipe, state or {})
    return state or {}


def result_dtype(preferred, x: jax.Array, w: jax.Array) -> np.dtype:
    dtype = element_type(preferred) or promoted(x.dtype, w.dtype)
    if not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits < 16:
        raise TypeError(f"`preferred_element_type` must be a float dtype of at least 16 bits, not {dtype}")
    return dtype


@dataclasses.dataclass(frozen=True)
class Dot:
    """A contraction in which x has kept and summed axes, w summed and kept ones, and both may have batch axes."""

    contraction: Contraction

    @property
    def has_batch(self) -> bool:
        return bool(self.contraction.batch)

    def of(self, product: str) -> Contraction:
        return self.contraction if product == "fwd" else getattr(self.contraction, product)

    def lay(self, cast: Cast, product: str, tensor: str) -> Laid:
        of = self.of(product)
        side = PRODUCTS[product].index(tensor)
        return Laid.on(cast, Sides((of.lhs, of.rhs)[side], (of.lhs_free, of.rhs_free)[side], of.contracted))

    def quantize(self, laid: Laid, x: jax.Array, groups, factor, key) -> ScaledArray:
        return laid.quantize(x, factor, key)

    def plain(self, product: str, tensor: str, x: jax.Array, groups) -> jax.Array:
        return x

    def inside(self, laid: Laid, x: jax.Array, q: ScaledArray) -> jax.Array | None:
        return laid.inside(x, q)

    def amax(self, tensor: str, x: jax.Array, groups) -> jax.Array:
        return amax(x)

    def multiply(self, product: str, lhs, rhs, groups, **wanted) -> jax.Array:
        return contract(self.of(product), lhs, rhs, **wanted)

    def add_bias(self, y: jax.Array, bias: jax.Array, groups) -> jax.Array:
        return y + lay(Factor(bias, self.contraction.rhs_free), self.contraction.out)

    def bias_gradient(self, g: jax.Array, groups) -> jax.Array:
        out, features = self.contraction.out, self.contraction.rhs_free
        summed = jnp.sum(g.astype(jnp.float32), axis=tuple(a for a, c in enumerate(out) if c not in features))
        kept = [c for c in out if c in features]
        return summed.transpose([kept.index(c) for c in features])


class Group(NamedTuple):
    """Axes that are flattened, row-major, to one axis with a label of its own; none become an axis of 1."""

    label: str
    members: str


def flattened(contraction: Contraction, cuts: bool) -> tuple[tuple[Group, ...], ...]:
    """What to flatten among the rows of x, what is summed, and the columns of w, each one group or none.

    A recipe that cuts no axis into blocks needs no flattening, only something to sum over.
    """
    sides = contraction.lhs_free, contraction.contracted, contraction.rhs_free
    fresh = iter(labels(3, contraction.lhs + contraction.rhs))
    flatten = [not members or (cuts and len(members) > 1) for members in sides]
    rows, summed, columns = (
        (Group(members[:1] or next(fresh), members),) if flat else ()
        for members, flat in zip(sides, flatten, strict=True)
    )
    return rows, summed, columns


class Form(NamedTuple):
    """The groups that one array has, and its labels before and after they are flattened."""

    labels: str
    flat: str
    groups: tuple[Group, ...]

    @classmethod
    def of(cls, labels: str, groups: tuple[Group, ...]) -> "Form":
        first = {c: group.label for group in groups for c in group.members}
        flat = "".join(dict.fromkeys(first.get(c, c) for c in labels))
        return cls(labels, flat + "".join(group.label for group in groups if not group.members), groups)

    @property
    def grouped(self) -> str:
        """The original labels, in the order of the flat ones."""
        members = {group.label: group.members for group in self.groups}
        return "".join(members.get(c, c) for c in self.flat)

    def enter(self, x: jax.Array) -> jax.Array:
        if not self.groups:
            return x
        sizes = dict(zip(self.labels, x.shape, strict=True))
        members = {group.label: group.members for group in self.groups}
        x = x.transpose([self.labels.index(c) for c in self.grouped])
        return x.reshape([math.prod(sizes[m] for m in members.get(c, c)) for c in self.flat])

    def leave(self, y: jax.Array, sizes: dict[str, int]) -> jax.Array:
        if not self.groups:
            return y
        y = y.reshape([sizes[c] for c in self.grouped])
        return y.transpose([self.grouped.index(c) for c in self.labels])
