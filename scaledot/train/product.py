"""The one differentiated product: any contraction under a Recipe, with state and key threaded through.

Forward casts x and w and multiplies. Differentiated, it also casts them for the products of the backward pass, from
full precision, and keeps those codes instead of the arrays. Backward casts the gradient once for each of dgrad and
wgrad, and multiplies. A cast that gives the same codes in both of a tensor's products is made once.

How operands are laid out, cast and multiplied is the business of a Kind: `dots`, `groups` or `convolutions`.
"""

import dataclasses
import functools
import typing
from collections.abc import Hashable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from scaledot import state as states
from scaledot.kernels.manual import summed_as, varying
from scaledot.kernels.spec import sum_dtype
from scaledot.kernels.table import XLA_CAST
from scaledot.ops.operands import Choice
from scaledot.recipes import PRODUCTS, Cast, Gemm, Recipe
from scaledot.state import AmaxHistory, State
from scaledot.train.casts import CastRequest, Made

# The names under which jax.checkpoint finds the results of products and what they keep for the backward pass.
GEMM_NAME = "scaledot_gemm"
BATCHED_GEMM_NAME = "scaledot_batched_gemm"
RESIDUAL_NAME = "scaledot_residual"


class Kind(Protocol):
    """A kind of product. `groups` are the sizes of ragged groups, None elsewhere."""

    @property
    def has_batch(self) -> bool:
        """Whether it is several products side by side."""
        ...

    def lay(self, cast: Cast, product: str, tensor: str) -> Hashable:
        """The cast laid on a tensor; equal ones give equal codes."""
        ...

    def cast(self, request: CastRequest, x: jax.Array, groups) -> Made:
        """Codes of x for several products, in the forms that `multiply` takes."""
        ...

    def plain(self, product: str, tensor: str, x: jax.Array, groups) -> Any:
        """An unquantised operand in the form that `multiply` takes."""
        ...

    def inside(self, laid, x: jax.Array, q) -> jax.Array | None:
        """Where a cast did not clip."""
        ...

    def amax(self, tensor: str, x: jax.Array, groups) -> jax.Array:
        """The largest finite magnitude that takes part."""
        ...

    def multiply(self, product: str, lhs, rhs, groups, **wanted) -> jax.Array: ...

    def multiply_and_add(self, x, w, bias: jax.Array, groups, **wanted) -> jax.Array:
        """The forward product and a bias, rounded once."""
        ...

    def bias_gradient(self, g: jax.Array, groups) -> jax.Array:
        """Sums of g over everything that shares a bias, in float32, or float64 where g is."""
        ...


@dataclasses.dataclass(frozen=True)
class Rule:
    """Everything about a product that is known before data."""

    kind: Kind
    recipe: Recipe
    dtype: np.dtype
    precision: Any = None
    out_sharding: Any = None
    kernel: Choice = None
    residual_name: str = RESIDUAL_NAME


class Operands(NamedTuple):
    x: jax.Array
    w: jax.Array
    bias: jax.Array | None
    groups: jax.Array | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Like:
    """What is remembered of a primal: its type and nothing else."""

    type: Any = dataclasses.field(metadata={"static": True})


class Residuals(NamedTuple):
    """What the backward pass needs. x and w are bits of codes; `like` are the types of x, w and bias."""

    x: Any
    w: Any
    inside_x: jax.Array | None
    inside_w: jax.Array | None
    state: State
    amax: dict[str, jax.Array]
    groups: jax.Array | None
    key: jax.Array | None
    like: tuple[Like, Like, Like | None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(rule: Rule, operands: Operands, state: State, key: jax.Array | None) -> tuple[jax.Array, State]:
    """The forward product alone, as it is computed when nobody differentiates."""
    casts = Casts(rule, operands.groups, state, key)
    x, w = (casts.made(tensor, a, ("fwd",)).operands["fwd"] for tensor, a in (("x", operands.x), ("w", operands.w)))
    return _forward_product(rule, operands, x, w), state


def _forward_product(rule: Rule, operands: Operands, x, w) -> jax.Array:
    wanted = {"precision": rule.precision, "out_sharding": rule.out_sharding, "kernel": rule.kernel}
    if operands.bias is None:
        return rule.kind.multiply("fwd", x, w, operands.groups, preferred_element_type=rule.dtype, **wanted)
    return rule.kind.multiply_and_add(x, w, operands.bias, operands.groups, preferred_element_type=rule.dtype, **wanted)


def multiply_then_add(
    kind: Any, x, w, bias: jax.Array, groups, preferred_element_type: np.dtype, **wanted
) -> jax.Array:
    """A forward product and its bias, in float32 until the one rounding."""
    wide = sum_dtype(preferred_element_type)
    y = kind.multiply("fwd", x, w, groups, preferred_element_type=wide, **wanted)
    return kind.add_bias(y, bias.astype(wide), groups).astype(preferred_element_type)


def _forward(rule: Rule, operands: Operands, state: State, key: jax.Array | None):
    _check_key(rule.recipe, key, rule.recipe.stochastic)
    operands = _differentiated_once(operands)
    casts = Casts(rule, operands.groups, state, key)
    x, kept_x = casts.made_and_kept("x", operands.x, "wgrad")
    w, kept_w = casts.made_and_kept("w", operands.w, "dgrad")
    inside_x = casts.inside("dgrad", "x", operands.x, x.operands["fwd"])
    inside_w = casts.inside("wgrad", "w", operands.w, w.operands["fwd"])
    name = BATCHED_GEMM_NAME if rule.kind.has_batch else GEMM_NAME
    y = checkpoint_name(_forward_product(rule, operands, x.operands["fwd"], w.operands["fwd"]), name)
    x_like, w_like = Like(jax.typeof(operands.x)), Like(jax.typeof(operands.w))
    like = x_like, w_like, None if operands.bias is None else Like(jax.typeof(operands.bias))
    amaxes = {t: casts.amax(t, a, made) for t, a, made in (("x", operands.x, x), ("w", operands.w, w)) if t in state}
    kept = Residuals(as_bits(kept_x), as_bits(kept_w), inside_x, inside_w, state, amaxes, operands.groups, key, like)
    return (y, state), kept


def _backward(rule: Rule, kept: Residuals, cotangents: tuple[jax.Array, State]):
    g, later = cotangents
    g = _differentiated_once(g)
    x_like, w_like, bias_like = kept.like
    casts = Casts(rule, kept.groups, kept.state, kept.key)
    x, w = from_bits(kept.x), from_bits(kept.w)
    made = casts.made("g", g, ("dgrad", "wgrad"), sums=bias_like is not None)
    dx = casts.gradient("dgrad", made.operands["dgrad"], w, x_like, kept.inside_x)
    dw = casts.gradient("wgrad", x, made.operands["wgrad"], w_like, kept.inside_w)
    db = None if bias_like is None else _as_primal(casts.sums(g, made), bias_like)
    amaxes = kept.amax | ({"g": casts.amax("g", g, made)} if "g" in kept.state else {})
    return Operands(dx, dw, db, _no_tangent(kept.groups)), _next(rule, kept.state, amaxes, later), _no_tangent(kept.key)


_product.defvjp(_forward, _backward)


def product(rule: Rule, operands: Operands, state: State, key: jax.Array | None) -> tuple[jax.Array, State]:
    """The result, and the state to give to the next use."""
    return typing.cast(tuple[jax.Array, State], _product(rule, operands, state, key))


def _next(rule: Rule, state: State, amaxes: dict[str, jax.Array], later: State) -> State:
    """The next state, merged with what later uses of the same state have seen."""
    advanced = {}
    for tensor, cast in rule.recipe.delayed.items():
        mine = states.advance(cast, state[tensor], _largest_anywhere(amaxes[tensor], state[tensor]))
        advanced[tensor] = states.merged(mine, later[tensor])
    return advanced


def _largest_anywhere(amax: jax.Array, state: AmaxHistory) -> jax.Array:
    """The largest magnitude over the devices of a shard_map that share the state."""
    axes = varying(amax) - varying(state.history)
    return lax.pmax(amax, tuple(axes)) if axes else amax


class Casts:
    """The casts of one pass, each made once."""

    def __init__(self, rule: Rule, groups, state: State, key: jax.Array | None):
        self.rule, self.groups, self.state, self.key = rule, groups, state, key

    def made(
        self, tensor: str, x: jax.Array, products: tuple[str, ...], residual: str | None = None, sums: bool = False
    ) -> Made:
        """x as each product takes it: cast, or as it is. That for `residual` is saved for the backward pass."""
        kind, recipe = self.rule.kind, self.rule.recipe
        casts = {p: cast for p in products if (cast := cast_of(recipe, p, tensor)) is not None}
        plain = {p: kind.plain(p, tensor, x, self.groups) for p in products if p not in casts}
        made = Made({})
        for delayed in dict.fromkeys(cast.delayed for cast in casts.values()):  # one pass has one factor
            same = {p: cast for p, cast in casts.items() if cast.delayed == delayed}
            found = kind.cast(self._request(tensor, same, residual, sums), x, self.groups)
            made = Made(made.operands | found.operands, *(found[1:] if made.amax is None else made[1:]))
        return made._replace(operands={p: (made.operands | plain)[p] for p in products})

    def _request(self, tensor: str, casts: dict[str, Cast], residual: str | None, sums: bool) -> CastRequest:
        laid = {p: self.rule.kind.lay(cast, p, tensor) for p, cast in casts.items()}
        keys = {laid[p]: self._key(laid[p], cast, tensor) for p, cast in casts.items()}
        factor = self._factor(next(iter(casts.values())), tensor)
        kernel = XLA_CAST.name if isinstance(self.rule.kernel, str) else self.rule.kernel  # that names a matmul
        return CastRequest(tensor, laid, keys, residual, factor, tensor in self.state, sums, kernel)

    def made_and_kept(self, tensor: str, x: jax.Array, later: str) -> tuple[Made, Any]:
        """x as forward takes it, and as a product of the backward pass does, named; straight-through they are one.

        Forward takes what carries the name where it is the same cast.
        """
        recipe = self.rule.recipe
        later = "fwd" if getattr(recipe, later) is None else later
        made = self.made(tensor, x, (later, "fwd"), later)
        kept = made.operands[later]
        if cast_of(recipe, later, tensor) is None:
            return made, kept
        named = from_bits(jax.tree.map(lambda leaf: checkpoint_name(leaf, self.rule.residual_name), as_bits(kept)))
        return made._replace(operands={p: named if q is kept else q for p, q in made.operands.items()}), named

    def amax(self, tensor: str, x: jax.Array, made: Made) -> jax.Array:
        return self.rule.kind.amax(tensor, x, self.groups) if made.amax is None else made.amax

    def sums(self, g: jax.Array, made: Made) -> jax.Array:
        """Sums of a gradient over everything that shares a bias, as `Kind.bias_gradient` has them."""
        return self.rule.kind.bias_gradient(g, self.groups) if made.sums is None else made.sums

    def inside(self, product: str, tensor: str, x: jax.Array, q) -> jax.Array | None:
        """Where a straight-through gradient passes; None for everywhere."""
        cast = cast_of(self.rule.recipe, "fwd", tensor)
        if cast is None or not cast.clips or getattr(self.rule.recipe, product) is not None:
            return None
        return self.rule.kind.inside(self.rule.kind.lay(cast, "fwd", tensor), x, q)

    def gradient(self, product: str, lhs, rhs, like: Like, inside: jax.Array | None) -> jax.Array:
        """One product of the backward pass, typed as its primal."""
        sharding = like.type.sharding
        result = self.rule.kind.multiply(
            product,
            lhs,
            rhs,
            self.groups,
            preferred_element_type=like.type.dtype,
            precision=self.rule.precision,
            out_sharding=sharding if jax.sharding.AxisType.Explicit in sharding.mesh.axis_types else None,
            kernel=self.rule.kernel,
        )
        # A forward operand that was padded for its rotation has gradients for the zeros, too.
        result = result[tuple(slice(size) for size in like.type.shape)] if result.shape != like.type.shape else result
        if inside is not None:
            result = jnp.where(inside, result, jnp.zeros_like(result))
        return _as_primal(result, like)

    def _factor(self, cast: Cast, tensor: str) -> jax.Array | None:
        return None if cast.delayed is None else states.factor_of(cast, self.state[tensor])

    def _key(self, laid: Hashable, cast: Cast, tensor: str) -> jax.Array | None:
        """Independent bits for each cast of a step; one that serves two products has those of the first."""
        if cast.rounding != "stochastic":
            return None
        recipe, lay = self.rule.recipe, self.rule.kind.lay
        every = [(p, t) for p, tensors in PRODUCTS.items() for t in tensors]
        served = ((p, cast_of(recipe, p, t)) for p, t in every if t == tensor)
        product = next(p for p, c in served if c is not None and lay(c, p, tensor) == laid)
        _check_key(recipe, self.key, (f"{tensor} of {product}",))
        assert self.key is not None
        return jax.random.fold_in(self.key, every.index((product, tensor)))


def cast_of(recipe: Recipe, product: str, tensor: str) -> Cast | None:
    gemm: Gemm | None = getattr(recipe, product)
    return None if gemm is None else (gemm.lhs, gemm.rhs)[PRODUCTS[product].index(tensor)]


def _check_key(recipe: Recipe, key, stochastic: tuple[str, ...]) -> None:
    if stochastic and key is None:
        words = f"{recipe.name} rounds {', '.join(stochastic)} by chance"
        raise ValueError(
            f"{words}; give a `key`, new in each step (in Flax a stream `sr_rng`: linen takes it in "
            "apply(..., rngs={'sr_rng': key}), NNX in with_recipe(..., rngs=nnx.Rngs(sr_rng=0)) or for each layer)"
        )


@jax.custom_jvp
def _differentiated_once(tree: Any) -> Any:
    """The tree itself. Codes have no derivative, so a second one would be zero without a word."""
    return tree


@functools.partial(_differentiated_once.defjvp, symbolic_zeros=True)
def _refuse(primals: tuple[Any], tangents: tuple[Any]):
    leaves = jax.tree.leaves(tangents, is_leaf=lambda t: isinstance(t, jax.custom_derivatives.SymbolicZero))
    kinds = (jax.custom_derivatives.SymbolicZero,)
    if not all(isinstance(t, kinds) or getattr(t, "dtype", None) == jax.dtypes.float0 for t in leaves):
        raise TypeError(
            "a product under a recipe can be differentiated once: its gradients are products of codes, which have no "
            "derivative. Use plain products where second derivatives are needed"
        )
    return primals[0], tangents[0]


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


def _as_primal(gradient: jax.Array, like: Like) -> jax.Array:
    """A gradient in the dtype of its primal, summed over the mesh axes along which the primal is one."""
    return summed_as(gradient, like.type).astype(like.type.dtype)


def _no_tangent(x: jax.Array | None) -> Any:
    return None if x is None else np.zeros(jnp.shape(x), jax.dtypes.float0)
