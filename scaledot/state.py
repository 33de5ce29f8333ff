"""The state of delayed scaling: a history of largest magnitudes and the factor made from it, for each tensor.

A state is a plain pytree, `{"x": AmaxHistory, "w": AmaxHistory, "g": AmaxHistory}`, that goes through a product like
this: the product returns it unchanged beside its result, and **the gradient of a state is the next state**. The largest
magnitude of a gradient is only known in the backward pass, and a gradient is the only thing that comes out of one.

    y, state = train.dense(x, w, recipe=FP8_DELAYED, state=state)      # inside the loss
    dw, state = jax.grad(loss, argnums=(0, 1))(w, state)               # the step

JAX adds up the gradients of a value that is used twice, which would ruin a history. A product therefore hands on the
state that it was given, and its backward pass merges what comes back from later uses by max: a layer used twice, a
scan over micro-batches and a rematerialised block give the largest magnitude of all uses, exactly, as long as each
use takes the state that the last one returned. `merge` does the same for states of separate gradient calls.

Where a sum slipped through all the same (a state used twice instead of handed on), history and factor no longer fit
together: no factor of a true state is larger than its own history allows. Then the smaller one is used, which saturates
nothing that a true state would not, and the history is begun afresh.

A state that is not differentiated has no next state: its history stays empty and its multiplier 1, at which small
gradients underflow to zero. `checked_use` raises where a gradient with respect to w leaves the state out, and warns
once where a forward pass has an empty state that is not traced. A state that is an argument of a jitted forward pass
may be that of a trained model or not: nothing can be said there.
"""

import contextlib
import contextvars
import functools
import typing
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero

from scaledot import deprecated
from scaledot.formats import Format
from scaledot.numerics.bits import LARGEST_MULTIPLIER, divide
from scaledot.recipes import Cast, Recipe, find_recipe


class AmaxHistory(NamedTuple):
    """float32 `history` of amaxes, newest last (slot 0 is for the coming step), and the quantisation `multiplier`."""

    history: Any
    multiplier: Any

    @property
    def factor(self) -> Any:
        """The old name of `multiplier`."""
        deprecated.warn("`AmaxHistory.factor` was renamed to `multiplier`")
        return self.multiplier


jax.export.register_namedtuple_serialization(AmaxHistory, serialized_name="scaledot.AmaxHistory")


State = dict[str, AmaxHistory]

# Tensors in the names that TransformerEngine gives to variables: kernel_amax_history, kernel_scale (the factor).
TENSOR_NAMES = {"x": "x", "w": "kernel", "g": "grad"}


def init_state(recipe: str | Recipe) -> State:
    """The state of one product before its first step; {} for a recipe that keeps none.

    >>> state = init_state("fp8_delayed")
    >>> sorted(state), state["x"].history.shape, float(state["x"].multiplier)
    (['g', 'w', 'x'], (1024,), 1.0)
    """
    return {tensor: _empty(cast) for tensor, cast in find_recipe(recipe).delayed.items()}


def _empty(cast: Cast) -> AmaxHistory:
    assert cast.delayed is not None
    return AmaxHistory(jnp.zeros(cast.delayed.length, jnp.float32), jnp.ones((), jnp.float32))


def merge(*states: Any) -> Any:
    """One state of several that came from the same one, as if their steps had been one step.

    Micro-batches whose gradients are taken one by one each give a next state; merged, they are the one that all of them
    in a single batch would have given. Any pytree of states will do, such as those of a whole model.

    >>> from scaledot.recipes import FP8_DELAYED
    >>> start = init_state(FP8_DELAYED)
    >>> a, b = (step(FP8_DELAYED, start, {t: jnp.float32(amax) for t in "xwg"}) for amax in (2.0, 8.0))
    >>> float(merge(a, b)["x"].multiplier)
    56.0
    """
    if not states:
        raise ValueError("merge needs at least one state")
    expected = dict(described_leaves(states[0]))
    for state in states[1:]:
        check_tree(state, expected, "state", "the first one")
    return jax.tree.map(merged, *states, is_leaf=lambda node: isinstance(node, AmaxHistory))


def merged(*states: AmaxHistory) -> AmaxHistory:
    """Histories by max, and the factor of the largest magnitude: the smallest of those that saw any in this step."""
    lives = [(s.history[..., -1] > 0).reshape(s.multiplier.shape) for s in states]
    seen = [jnp.where(live, s.multiplier, np.float32(np.inf)) for live, s in zip(lives, states, strict=True)]
    smallest = functools.reduce(jnp.minimum, seen)
    multiplier = jnp.where(functools.reduce(jnp.logical_or, lives), smallest, states[0].multiplier)
    return AmaxHistory(functools.reduce(jnp.maximum, [s.history for s in states]), multiplier)


def merge_named(*flat: Mapping[tuple, Any]) -> dict[tuple, Any]:
    """`merge` for variables that Flax keeps apart: {path: array}, paths end in x_amax_history, x_scale and so on."""

    def paired(variables: Mapping[tuple, Any]) -> dict[tuple, AmaxHistory]:
        pairs = {}
        for *path, name in variables:
            tensor, _, kind = name.partition("_")
            if kind == "amax_history":
                pairs[*path, tensor] = AmaxHistory(variables[*path, name], variables[*path, f"{tensor}_scale"])
        return pairs

    merged_states = merge(*map(paired, flat))
    found = {}
    for (*path, tensor), (history, multiplier) in merged_states.items():
        found |= {(*path, f"{tensor}_amax_history"): history, (*path, f"{tensor}_scale"): multiplier}
    return found


def check_state(recipe: Recipe, state: Any, name: str = "state") -> None:
    """Raise unless the state is one of this recipe; names the first path that differs."""
    expected = {path: f"float32[{size}]" for path, size in _leaves(recipe)}
    if not isinstance(state, dict) and expected:
        raise TypeError(f"`{name}` must be what init_state({recipe.name!r}) gives, not {type(state).__name__}")
    check_tree(state, expected, name, recipe.name)
    for tensor in recipe.delayed:
        if not isinstance(state[tensor], AmaxHistory):
            found = type(state[tensor]).__name__
            raise TypeError(
                f"`{name}` must hold an AmaxHistory at {tensor!r}, not a {found}; make it AmaxHistory(**it)"
            )


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _differentiated_with(recipe_name: str, state: State, w: jax.Array) -> State:
    """The state itself. Differentiating with respect to w and not with respect to any leaf of the state raises.

    w is only looked at. A gradient through x alone is let through: that is what a saliency map of a trained model, or
    a frozen layer with a trained history, asks for.
    """
    return state


@functools.partial(_differentiated_with.defjvp, symbolic_zeros=True)
def _refuse_constant_state(recipe_name: str, primals: tuple[State, jax.Array], tangents: tuple[Any, Any]):
    state, w = tangents
    if not is_zero(w) and all(map(is_zero, jax.tree.leaves(state))):
        raise ValueError(
            f"{recipe_name} is differentiated with respect to `w` and not with respect to its `state`. The gradient of "
            "a state is the next state; without it the amax history stays as it is, empty at first, and small "
            "gradients underflow. Differentiate with respect to both. "
            "JAX: jax.grad(loss, argnums=(0, 1))(w, state). "
            "Flax linen: jax.grad(loss)(variables), where `variables` has the collections 'params' and "
            "'_overwrite_with_gradient'. "
            "Flax NNX: nnx.grad(loss, argnums=nnx.DiffState(0, scaledot.nnx.TRAINED))(model)"
        )
    return primals[0], state


def is_zero(tangent: Any) -> bool:
    """Whether a tangent, as a rule with symbolic zeros gets it, is known to be zero without its value."""
    return isinstance(tangent, SymbolicZero) or getattr(tangent, "dtype", None) == jax.dtypes.float0


_unchecked = contextvars.ContextVar("_unchecked", default=False)


@contextlib.contextmanager
def unchecked():
    """Inside, `checked_use` checks nothing: for a pass that initialises a model, and for states that are constants."""
    token = _unchecked.set(True)
    try:
        yield
    finally:
        _unchecked.reset(token)


def checked_use(recipe: Recipe, state: State, w: jax.Array) -> State:
    """The state, for a product by w: raises if w is differentiated without it, warns if it is seen to be empty."""
    if _unchecked.get():
        return state
    if isinstance(w, Tracer):
        return typing.cast(State, _differentiated_with(recipe.name, state, w))
    if not _warn_once.cache_info().currsize and _is_seen_to_be_empty(state):
        _warn_once(recipe.name)
    return state


def _is_seen_to_be_empty(state: State) -> bool:
    """Whether the numbers of a state can be read, being neither traced nor on other hosts, and no history has any."""
    leaves = jax.tree.leaves(state)
    if any(isinstance(leaf, Tracer) or not getattr(leaf, "is_fully_addressable", True) for leaf in leaves):
        return False
    return not any(np.asarray(tensor.history).any() for tensor in state.values())


@functools.cache
def _warn_once(recipe_name: str) -> None:
    warnings.warn(
        f"a forward pass under {recipe_name} has an empty amax history and casts with quantisation multiplier 1. "
        "Training steps, which differentiate with respect to the state, fill the history: pass the state they return. "
        "This warning is given once, and only for a state that is not traced",
        stacklevel=2,
    )


def _leaves(recipe: Recipe):
    for tensor, cast in recipe.delayed.items():
        assert cast.delayed is not None
        yield f"{tensor}/history", str(cast.delayed.length)
        yield f"{tensor}/multiplier", ""


def check_tree(tree: Any, expected: dict[str, str], name: str, owner: str) -> None:
    """Raise unless the leaves of a tree are those expected, as {path: dtype[shape]}."""
    found = dict(described_leaves(tree))
    for path in [*expected, *found]:
        if found.get(path) != expected.get(path):
            here, there = found.get(path, "nothing"), expected.get(path, "nothing")
            raise ValueError(f"`{name}` does not match {owner}: at {path!r} it has {here} and should have {there}")


def described_leaves(tree: Any) -> Iterator[tuple[str, str]]:
    """The path of each leaf and its dtype[shape]; a factor may be written with an axis of 1."""
    for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        shape = () if path.endswith("multiplier") and jnp.shape(leaf) == (1,) else jnp.shape(leaf)
        yield path, f"{jnp.result_type(leaf)}[{','.join(map(str, shape))}]"


# Computes float32 scalars from others, by a function of a key and the scalars: as a kernel, if it likes.
Compute = Callable[..., jax.Array]


def _inline(key: Hashable, f: Callable[..., jax.Array], *scalars: jax.Array) -> jax.Array:
    return f(*scalars)


def multiplier_of(cast: Cast, state: AmaxHistory, compute: Compute = _inline) -> jax.Array:
    """The factor to cast with: the stored one, which in a true state is never above what the history allows.

    A state that took no part in a step has zeros for a gradient, and so for its next value: it begins again.
    """
    assert cast.delayed is not None
    remembered = jnp.max(state.history) if cast.delayed.algorithm == "max" else state.history[-1]
    return compute(
        ("multiplier", cast), functools.partial(_used_multiplier, cast), state.multiplier.reshape(()), remembered
    )


def _used_multiplier(cast: Cast, multiplier: jax.Array, remembered: jax.Array) -> jax.Array:
    multiplier = jnp.where(multiplier > 0, jnp.minimum(multiplier, LARGEST_MULTIPLIER), np.float32(1))
    limit = _multiplier(cast, remembered)  # 0 where the history is empty
    return jnp.where(limit > 0, jnp.minimum(multiplier, limit), multiplier)


def _multiplier(cast: Cast, amax: jax.Array) -> jax.Array:
    assert cast.delayed is not None
    return multiplier_from(cast.format, amax, cast.delayed.margin)


def multiplier_from(format: Format, amax: jax.Array, margin: int = 0) -> jax.Array:
    """(F / amax) / 2^margin, at most 2^126; 0 where amax is 0."""
    multiplier = jnp.minimum(divide(np.float32(format.max), amax) * np.float32(2.0**-margin), LARGEST_MULTIPLIER)
    return jnp.where(amax > 0, multiplier, np.float32(0))


def step(recipe: Recipe, state: State, amax: dict[str, jax.Array]) -> State:
    """The next state, from the largest finite magnitude of each tensor in this step."""
    return {tensor: advance(cast, state[tensor], amax[tensor]) for tensor, cast in recipe.delayed.items()}


def advance(cast: Cast, state: AmaxHistory, amax: jax.Array, compute: Compute = _inline) -> AmaxHistory:
    """One step of one history: record, derive the next factor, make room for the next step."""
    delayed = cast.delayed
    assert delayed is not None
    used = multiplier_of(cast, state, compute)
    intact = used == state.multiplier.reshape(())
    history = jnp.where(intact, state.history, np.float32(0)).at[0].set(amax)
    largest = jnp.max(history) if delayed.algorithm == "max" else amax
    multiplier = compute(("next factor", cast), functools.partial(_next_multiplier, cast), largest, used)
    if delayed.length > 1:  # a single slot is overwritten by the next step anyway
        history = jnp.roll(history, -1).at[0].set(np.float32(0))
    return AmaxHistory(history, multiplier.reshape(state.multiplier.shape))


def _next_multiplier(cast: Cast, largest: jax.Array, used: jax.Array) -> jax.Array:
    return jnp.where(largest > 0, _multiplier(cast, largest), used)
