"""The state of delayed scaling: an amax history and a quantisation multiplier for each tensor.

A state is a pytree `{"x": AmaxHistory, "w": AmaxHistory, "g": AmaxHistory}`. A matmul returns its state unchanged along
with its result, and **the gradient with respect to a state is the next state**: the amax of a gradient is only known in
the backward pass, whose only outputs are gradients.

    y, state = train.dense(x, w, recipe=FP8_DELAYED, state=state)      # in the loss
    dw, state = jax.grad(loss, argnums=(0, 1))(w, state)               # the training step

JAX adds the gradients of a value with several uses, which would corrupt a history. Therefore a matmul returns the state
for the next use, and its backward pass merges the cotangent of that state by max: a layer that is used twice, a scan
over micro-batches and a rematerialised block all record the exact amax over their uses, if each use takes the state
that the previous one returned. `merge` does the same for the states of separate gradient computations.

If a state is used twice without passing it on, JAX returns the sum of two next states. This is detected, because the
multiplier of a valid state is at most format.max / amax of its history: the smaller of the two is used, which saturates
no element that a valid state would not, and the history is cleared.

`ragged_dot` also takes the state of `init_state(recipe, groups=...)`: a history and a multiplier for each group.

A state that is not differentiated never advances: its history stays all zeros and its multiplier 1, at which small
gradients underflow to zero. `checked_use` raises if w is differentiated without the state, and warns once if a forward
pass uses a concrete state with an all-zero history. The elements of a traced state are not known, so it does not warn.
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
    """The amax history and the quantisation multiplier of one tensor, both float32.

    history: (length,), newest last; slot 0 is for the next step. multiplier: a scalar, or of shape (1,) in Flax.
    With one state per group, history is (groups, length) and multiplier (groups,).
    """

    history: Any
    multiplier: Any

    @property
    def factor(self) -> Any:
        """The old name of `multiplier`."""
        deprecated.warn("`AmaxHistory.factor` was renamed to `multiplier`", frames=1)
        return self.multiplier


jax.export.register_namedtuple_serialization(AmaxHistory, serialized_name="scaledot.AmaxHistory")


State = dict[str, AmaxHistory]

# Prefixes of TransformerEngine's variable names: kernel_amax_history, kernel_scale (which is the multiplier).
TENSOR_NAMES = {"x": "x", "w": "kernel", "g": "grad"}


def init_state(recipe: str | Recipe, groups: int | None = None) -> State:
    """The initial state of one matmul; {} for a recipe without delayed scaling.

    groups: the number of groups of a `ragged_dot`, each with its own history and multiplier; None for one of all.

    >>> state = init_state("fp8_delayed")
    >>> sorted(state), state["x"].history.shape, float(state["x"].multiplier)
    (['g', 'w', 'x'], (1024,), 1.0)
    >>> init_state("fp8_delayed", groups=4)["w"].multiplier
    Array([1., 1., 1., 1.], dtype=float32)
    """
    if groups is not None and groups < 1:
        raise ValueError(f"`groups` must be at least 1, not {groups}")
    return {tensor: _zero_history(cast, groups) for tensor, cast in find_recipe(recipe).delayed.items()}


def _zero_history(cast: Cast, groups: int | None) -> AmaxHistory:
    assert cast.delayed is not None
    lead = () if groups is None else (groups,)
    return AmaxHistory(jnp.zeros((*lead, cast.delayed.length), jnp.float32), jnp.ones(lead, jnp.float32))


def is_per_group(state: Any) -> bool:
    """Whether a state has a history for each group, as that of `init_state(recipe, groups=...)`."""
    histories = state.values() if isinstance(state, dict) else ()
    return any(isinstance(tensor, AmaxHistory) and jnp.ndim(tensor.history) == 2 for tensor in histories)


def merge(*states: Any) -> Any:
    """Merges the next states of several gradient computations that started from the same state, e.g. of micro-batches.

    The result is the next state of a single computation over all of their data. Each argument may be a pytree of
    states, such as that of a whole model.

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
    """`merge` for the AmaxHistory of one tensor.

    Returns the elementwise maximum of histories, and the smallest multiplier of those whose newest amax is not 0.
    """
    updated = [(s.history[..., -1] > 0).reshape(s.multiplier.shape) for s in states]
    observed = [jnp.where(new, s.multiplier, np.float32(np.inf)) for new, s in zip(updated, states, strict=True)]
    smallest = functools.reduce(jnp.minimum, observed)
    multiplier = jnp.where(functools.reduce(jnp.logical_or, updated), smallest, states[0].multiplier)
    return AmaxHistory(functools.reduce(jnp.maximum, [s.history for s in states]), multiplier)


def merge_named(*flat: Mapping[tuple, Any]) -> dict[tuple, Any]:
    """`merge` for the separate variables of Flax: {path: array} with paths that end in x_amax_history, x_scale etc."""

    def to_histories(variables: Mapping[tuple, Any]) -> dict[tuple, AmaxHistory]:
        histories = {}
        for *path, name in variables:
            tensor, _, kind = name.partition("_")
            if kind == "amax_history":
                histories[*path, tensor] = AmaxHistory(variables[*path, name], variables[*path, f"{tensor}_scale"])
        return histories

    variables = {}
    for (*path, tensor), (history, multiplier) in merge(*map(to_histories, flat)).items():
        variables |= {(*path, f"{tensor}_amax_history"): history, (*path, f"{tensor}_scale"): multiplier}
    return variables


def check_state(recipe: Recipe, state: Any, name: str = "state", groups: int | None = None) -> None:
    """Raises unless `state` has the structure of init_state(recipe, groups), with the first path that differs."""
    expected = {path: f"float32[{size}]" for path, size in _leaves(recipe, groups)}
    if not isinstance(state, dict) and expected:
        raise TypeError(f"`{name}` must be a state from init_state({recipe.name!r}), not {type(state).__name__}")
    check_tree(state, expected, name, recipe.name)
    for tensor in recipe.delayed:
        if not isinstance(state[tensor], AmaxHistory):
            kind = type(state[tensor]).__name__
            raise TypeError(
                f"`{name}[{tensor!r}]` must be an AmaxHistory, not a {kind}; write AmaxHistory(**{name}[{tensor!r}])"
            )


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _require_state_gradient(recipe_name: str, state: State, w: jax.Array) -> State:
    """Returns `state`; its JVP rule raises ValueError if w is differentiated and no leaf of the state is.

    A gradient with respect to x alone is allowed: for a saliency map of a trained model, or a frozen layer with a
    trained history.
    """
    return state


@functools.partial(_require_state_gradient.defjvp, symbolic_zeros=True)
def _refuse_constant_state(recipe_name: str, primals: tuple[State, jax.Array], tangents: tuple[Any, Any]):
    state, w = tangents
    if not is_zero(w) and all(map(is_zero, jax.tree.leaves(state))):
        raise ValueError(
            f"{recipe_name} is differentiated with respect to `w` and not with respect to its `state`. The gradient of "
            "a state is the next state; without it the amax history is never updated, and small gradients underflow. "
            "Differentiate with respect to both. "
            "JAX: jax.grad(loss, argnums=(0, 1))(w, state). "
            "Flax linen: jax.grad(loss)(variables), where `variables` has the collections 'params' and "
            "'_overwrite_with_gradient'. "
            "Flax NNX: nnx.grad(loss, argnums=nnx.DiffState(0, scaledot.nnx.TRAINED))(model)"
        )
    return primals[0], state


def is_zero(tangent: Any) -> bool:
    """Whether a tangent, in a JVP rule with `symbolic_zeros`, is a symbolic zero."""
    return isinstance(tangent, SymbolicZero) or getattr(tangent, "dtype", None) == jax.dtypes.float0


_unchecked = contextvars.ContextVar("_unchecked", default=False)


@contextlib.contextmanager
def unchecked():
    """Disables `checked_use`: for passes that initialise a model, and for states that are constants on purpose."""
    token = _unchecked.set(True)
    try:
        yield
    finally:
        _unchecked.reset(token)


def checked_use(recipe: Recipe, state: State, w: jax.Array) -> State:
    """Returns `state`, and checks that the gradient of w is only computed together with that of the state.

    Raises ValueError if w is differentiated and `state` is not. Warns once if `state` is concrete and all its histories
    are zero.
    """
    if _unchecked.get():
        return state
    if isinstance(w, Tracer):
        return typing.cast(State, _require_state_gradient(recipe.name, state, w))
    if not _warn_once.cache_info().currsize and _is_known_to_be_zero(state):
        _warn_once(recipe.name)
    return state


def _is_known_to_be_zero(state: State) -> bool:
    """Whether all histories are zero; False if a leaf is traced or not fully addressable."""
    leaves = jax.tree.leaves(state)
    if any(isinstance(leaf, Tracer) or not getattr(leaf, "is_fully_addressable", True) for leaf in leaves):
        return False
    return not any(np.asarray(tensor.history).any() for tensor in state.values())


@functools.cache
def _warn_once(recipe_name: str) -> None:
    warnings.warn(
        f"a forward pass under {recipe_name} has an all-zero amax history and casts with quantisation multiplier 1. "
        "Training steps, which differentiate with respect to the state, fill the history: pass the state they return. "
        "This warning is issued once, and only for a state that is not traced",
        stacklevel=2,
    )


def _leaves(recipe: Recipe, groups: int | None) -> Iterator[tuple[str, str]]:
    """The path and the shape, as text, of each leaf of init_state(recipe, groups)."""
    for tensor, cast in recipe.delayed.items():
        assert cast.delayed is not None
        yield f"{tensor}/history", f"{'' if groups is None else f'{groups},'}{cast.delayed.length}"
        yield f"{tensor}/multiplier", "" if groups in (None, 1) else str(groups)


def check_tree(tree: Any, expected: dict[str, str], name: str, owner: str) -> None:
    """Raises ValueError unless the leaves of `tree` are `expected`, as {path: dtype[shape]}."""
    actual = dict(described_leaves(tree))
    for path in [*expected, *actual]:
        if actual.get(path) != expected.get(path):
            has, needs = actual.get(path, "nothing"), expected.get(path, "nothing")
            raise ValueError(f"`{name}` does not match {owner}: at {path!r} it has {has} and should have {needs}")


def described_leaves(tree: Any) -> Iterator[tuple[str, str]]:
    """Yields the path and the dtype[shape] of each leaf; a multiplier of shape (1,) counts as a scalar."""
    for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        shape = () if path.endswith("multiplier") and jnp.shape(leaf) == (1,) else jnp.shape(leaf)
        yield path, f"{jnp.result_type(leaf)}[{','.join(map(str, shape))}]"


# compute(cache_key, f, *scalars) returns f(*scalars) for float32 scalars, possibly in a kernel cached by `cache_key`.
Compute = Callable[..., jax.Array]


def _inline(cache_key: Hashable, f: Callable[..., jax.Array], *scalars: jax.Array) -> jax.Array:
    return f(*scalars)


def multiplier_of(cast: Cast, state: AmaxHistory, compute: Compute = _inline) -> jax.Array:
    """The quantisation multiplier of this step, () or (groups,): the stored one, at most format.max / amax of history.

    The limit only applies to an invalid state, such as a sum of two. A multiplier of 0, the zero gradient of a state
    that no matmul used in the last step, is replaced by 1.
    """
    assert cast.delayed is not None
    amax = jnp.max(state.history, axis=-1) if cast.delayed.algorithm == "max" else state.history[..., -1]
    compute = compute if amax.ndim == 0 else _inline
    multiplier = state.multiplier.reshape(amax.shape)
    return compute(("multiplier", cast), functools.partial(_clamp_multiplier, cast), multiplier, amax)


def _clamp_multiplier(cast: Cast, multiplier: jax.Array, amax: jax.Array) -> jax.Array:
    multiplier = jnp.where(multiplier > 0, jnp.minimum(multiplier, LARGEST_MULTIPLIER), np.float32(1))
    limit = _multiplier_for_cast(cast, amax)  # 0 if the history is all zeros
    return jnp.where(limit > 0, jnp.minimum(multiplier, limit), multiplier)


def _multiplier_for_cast(cast: Cast, amax: jax.Array) -> jax.Array:
    assert cast.delayed is not None
    return multiplier_from(cast.format, amax, cast.delayed.margin)


def multiplier_from(format: Format, amax: jax.Array, margin: float = 0) -> jax.Array:
    """The quantisation multiplier (format.max / amax) / 2^margin, at most 2^126; 0 if amax is 0."""
    multiplier = jnp.minimum(divide(np.float32(format.max), amax) * np.float32(2.0**-margin), LARGEST_MULTIPLIER)
    return jnp.where(amax > 0, multiplier, np.float32(0))


def step(recipe: Recipe, state: State, amax: dict[str, jax.Array]) -> State:
    """The next state of all tensors. amax: for each tensor, its finite amax in this step."""
    return {tensor: advance(cast, state[tensor], amax[tensor]) for tensor, cast in recipe.delayed.items()}


def advance(cast: Cast, state: AmaxHistory, amax: jax.Array, compute: Compute = _inline) -> AmaxHistory:
    """The next state of one tensor: records `amax`, computes the multiplier, and clears the slot of the next amax.

    amax: (), or (groups,) for a state with a history for each group.
    """
    delayed = cast.delayed
    assert delayed is not None
    current = multiplier_of(cast, state, compute)
    is_valid = current == state.multiplier.reshape(current.shape)
    history = jnp.where(is_valid[..., None], state.history, np.float32(0)).at[..., 0].set(amax)
    largest = jnp.max(history, axis=-1) if delayed.algorithm == "max" else amax
    compute = compute if amax.ndim == 0 else _inline
    multiplier = compute(("next multiplier", cast), functools.partial(_next_multiplier, cast), largest, current)
    if delayed.length > 1:  # a single slot is overwritten by the next step anyway
        history = jnp.roll(history, -1, axis=-1).at[..., 0].set(np.float32(0))
    return AmaxHistory(history, multiplier.reshape(state.multiplier.shape))


def _next_multiplier(cast: Cast, amax: jax.Array, current: jax.Array) -> jax.Array:
    return jnp.where(amax > 0, _multiplier_for_cast(cast, amax), current)
