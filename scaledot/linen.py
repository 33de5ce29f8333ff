"""Recipes in Flax linen, through its own seams: `dot_general_cls`, and interception for models that have none.

    nn.Dense(features, dot_general_cls=sd.linen.make_dot_general_cls("mxfp8"))
    model = sd.linen.with_recipe(model, "fp8_delayed")        # every Dense, DenseGeneral and Einsum of a model

Parameters are not touched. Only a recipe with delayed scaling makes variables, in the collection
`_overwrite_with_gradient`, which Flax's TrainState replaces by its gradient and keeps from the optimizer: float32
`x_scale` (the factor that x is multiplied by, of shape (1,)) and `x_amax_history`, and likewise for `kernel` and
`grad`. Stochastic rounding draws keys from the rng stream `sr_rng`.

On a mesh, `specs` says how x, w and the result of a layer lie, and `overlap` along which axes transfers overlap with
products, as in `scaledot.train.dot_general`.

A layer that is called twice merges what both calls have seen. Where it is called twice through a lifted transform
(nn.remat, or nn.scan with the collection broadcast), the calls can only see each other if the collection is mutable:
`model.apply(variables, x, mutable=["_overwrite_with_gradient"])`.
"""

import contextlib
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core.scope import Scope
from flax.traverse_util import flatten_dict, unflatten_dict

from scaledot import train
from scaledot.ops.contraction import parse_einsum
from scaledot.recipes import Recipe, find_recipe
from scaledot.rules import Given, Patterns, Rules
from scaledot.state import TENSOR_NAMES, AmaxHistory, State, check_state, init_state, merge_named

STATE_COLLECTION = "_overwrite_with_gradient"
KEY_STREAM = "sr_rng"

# The states that calls have left, by path. A root scope belongs to one call of apply, or of a lifted transform, so to
# one trace.
_LATEST: weakref.WeakKeyDictionary[Scope, dict[tuple[str, ...], State]] = weakref.WeakKeyDictionary()


class Quantized(nn.Module):
    """A product under a recipe; owns the state of delayed scaling and nothing else."""

    recipe: Recipe

    @nn.nowrap
    def under_recipe(self, verb: Callable[..., Any], *args, **kwargs) -> jax.Array:
        """The verb of `train`, with this module's state and key."""
        if self.recipe.stochastic and self.has_rng(KEY_STREAM):
            kwargs["key"] = self.make_rng(KEY_STREAM)
        elif self.recipe.stochastic and self.is_initializing():
            kwargs["key"] = jax.random.key(0)  # nothing is learnt from this pass
        if not self.recipe.delayed:
            return verb(*args, recipe=self.recipe, **kwargs)
        y, state = verb(*args, recipe=self.recipe, state=self._stored_state(), **kwargs)
        self._leave(state)
        return y

    @nn.nowrap
    def _stored_state(self) -> State:
        initial = init_state(self.recipe)
        if not self.has_variable(STATE_COLLECTION, "x_scale") and not self.is_mutable_collection(STATE_COLLECTION):
            raise ValueError(
                f"{self.recipe.name} keeps state, but the variables have no {STATE_COLLECTION!r} for "
                f"{'/'.join(self.path)!r}; give all that init returned: "
                f"apply({{'params': ..., {STATE_COLLECTION!r}: ...}}, ...), and TrainState.create(params=variables)"
            )
        stored = {t: self._variables(t, history) for t, history in initial.items()}
        check_state(self.recipe, stored, f"variables of {'/'.join(self.path)}")
        return self._latest.get(self.path, stored)

    @nn.nowrap
    def _variables(self, tensor: str, initial: AmaxHistory) -> AmaxHistory:
        history = self.variable(STATE_COLLECTION, f"{TENSOR_NAMES[tensor]}_amax_history", lambda: initial.history)
        factor = self.variable(STATE_COLLECTION, f"{TENSOR_NAMES[tensor]}_scale", lambda: initial.factor.reshape(1))
        return AmaxHistory(history.value, factor.value)

    @nn.nowrap
    def _leave(self, state: State) -> None:
        """Hand the state on to the next call."""
        if self.is_mutable_collection(STATE_COLLECTION):
            for tensor, (history, factor) in state.items():
                self.put_variable(STATE_COLLECTION, f"{TENSOR_NAMES[tensor]}_amax_history", history)
                self.put_variable(STATE_COLLECTION, f"{TENSOR_NAMES[tensor]}_scale", factor)
        else:
            self._latest[self.path] = state

    @property
    def _latest(self) -> dict[tuple[str, ...], State]:
        assert self.scope is not None
        return _LATEST.setdefault(self.scope.root, {})


class OnMesh(Quantized):
    """A product under a recipe that knows how its arrays lie."""

    specs: train.Specs | None = None
    overlap: str | tuple[str, ...] = ()

    @nn.nowrap
    def lying(self, out_sharding) -> dict[str, Any]:
        """Arguments about the mesh. A model is initialised with few examples, which need not divide by it."""
        if self.is_initializing():
            return {"out_sharding": out_sharding}
        return {"out_sharding": out_sharding, "specs": self.specs, "overlap": self.overlap}


class DotGeneral(OnMesh):
    """`jax.lax.dot_general` under a recipe, as nn.Dense and nn.DenseGeneral call it."""

    @nn.compact
    def __call__(self, x, w, dimension_numbers, precision=None, preferred_element_type=None, out_sharding=None):
        wanted = dimension_numbers, precision, preferred_element_type
        return self.under_recipe(train.dot_general, x, w, *wanted, **self.lying(out_sharding))


class Einsum(OnMesh):
    """`jnp.einsum` of an input and a kernel under a recipe."""

    @nn.compact
    def __call__(self, subscripts, x, w, *, precision=None, preferred_element_type=None, out_sharding=None):
        wanted = {"precision": precision, "preferred_element_type": preferred_element_type}
        return self.under_recipe(train.einsum, subscripts, x, w, **wanted, **self.lying(out_sharding))


class GroupedDense(Quantized):
    """Rows in groups, each times its own matrix: (rows, k), (groups, k, n), sizes -> (rows, n).

    specs: how they lie on a mesh, as in `train.ragged_dot`.
    """

    specs: train.Specs | None = None

    @nn.compact
    def __call__(
        self, x, kernel, group_sizes, bias=None, precision=None, preferred_element_type=None, out_sharding=None
    ):
        how = {"out_sharding": out_sharding, "specs": self.specs}
        return self.under_recipe(
            train.ragged_dot, x, kernel, group_sizes, bias, precision, preferred_element_type, **how
        )


def make_dot_general_cls(
    recipe: str | Recipe, *, specs: train.Specs | None = None, overlap: str | tuple[str, ...] = ()
) -> type[DotGeneral]:
    """A class for `nn.Dense(..., dot_general_cls=cls)` or `nn.Dense(..., dot_general=cls())`.

    >>> layer = nn.Dense(8, dot_general_cls=make_dot_general_cls("mxfp8"))
    >>> jax.tree.map(jnp.shape, layer.init(jax.random.key(0), jnp.ones((2, 32))))
    {'params': {'bias': (8,), 'kernel': (32, 8)}}
    """
    return _with_default(DotGeneral, recipe, specs=specs, overlap=overlap)


def make_einsum_cls(
    recipe: str | Recipe, *, specs: train.Specs | None = None, overlap: str | tuple[str, ...] = ()
) -> type[Einsum]:
    """A class whose instances are called as `jnp.einsum(subscripts, x, kernel)`, for projections of attention."""
    return _with_default(Einsum, recipe, specs=specs, overlap=overlap)


def make_grouped_dense_cls(recipe: str | Recipe) -> type[GroupedDense]:
    """A class whose instances are called with (x, kernel, group_sizes), for the experts of a mixture."""
    return _with_default(GroupedDense, recipe)


def merge_states(*collections: Mapping[str, Any]) -> dict[str, Any]:
    """One `_overwrite_with_gradient` of those that several gradient calls gave; see `scaledot.state.merge`."""
    return unflatten_dict(merge_named(*(flatten_dict(collection) for collection in collections)))


def _with_default(base, recipe: str | Recipe, **fields):
    defaults = {"recipe": find_recipe(recipe), **fields}
    return type(
        base.__name__,
        (base,),
        {**defaults, "__annotations__": dict.fromkeys(defaults, Any), "__module__": __name__},
    )


@contextlib.contextmanager
def recipes_by_path(
    rules: Given | Rules, *, specs: train.SpecsByPath | Patterns = None, overlap: str | tuple[str, ...] = ()
):
    """Inside, every Dense, DenseGeneral and Einsum of any linen model takes the recipe that its path has in the rules.

    Layers that were given a `dot_general` of their own keep it. Flax caches what nn.jit has traced without regard to
    interception: inside nn.jit give layers a `dot_general_cls` instead. Other arguments as in `with_recipe`.
    """
    chosen = rules if isinstance(rules, Rules) else Rules(rules)
    lying = specs if isinstance(specs, Patterns) else Patterns(specs, "specs")

    def interceptor(call, args, kwargs, context: nn.module.InterceptorContext):
        layer = context.module
        if context.method_name != "__call__" or not isinstance(layer, (nn.Dense, nn.DenseGeneral, nn.Einsum)):
            return call(*args, **kwargs)
        recipe = chosen.recipe_for("/".join(layer.path))
        if recipe is None:
            return call(*args, **kwargs)
        on_mesh = {"specs": lying.value_for("/".join(layer.path)), "overlap": overlap}
        if isinstance(layer, nn.Einsum):
            return _einsum_layer(layer, Einsum(recipe, **on_mesh), *args, **kwargs)
        if layer.dot_general is not None or layer.dot_general_cls is not None:
            return call(*args, **kwargs)
        object.__setattr__(layer, "dot_general_cls", make_dot_general_cls(recipe, **on_mesh))
        try:
            return call(*args, **kwargs)
        finally:
            object.__setattr__(layer, "dot_general_cls", None)

    with nn.intercept_methods(interceptor):
        yield


def _einsum_layer(layer: nn.Einsum, product: Einsum, inputs, einsum_str: str | None = None) -> jax.Array:
    """What nn.Einsum computes; it has no seam of its own for the product."""
    text = nn.module.merge_param("einsum_str", layer.einsum_str, einsum_str)
    kernel = layer.param("kernel", layer.kernel_init, layer.shape, layer.param_dtype)
    (_, kernel_labels), out = parse_einsum(text, [jnp.ndim(inputs), kernel.ndim])
    sizes = dict(zip(kernel_labels, kernel.shape, strict=True))
    bias = None
    if layer.use_bias:
        shape = [sizes[c] for c in out if c in sizes]
        bias = layer.param("bias", layer.bias_init, shape, layer.param_dtype)
    inputs, kernel, bias = layer.promote_dtype(inputs, kernel, bias, dtype=layer.dtype)
    y = product(text, inputs, kernel, precision=layer.precision, preferred_element_type=layer.preferred_element_type)
    return y if bias is None else y + bias.reshape([sizes.get(c, 1) for c in out])


class WithRecipe:
    """A model whose `init`, `apply` and relatives run under rules; everything else is the model's own."""

    _RUNS = ("init", "init_with_output", "lazy_init", "apply", "tabulate")

    def __init__(
        self, model: nn.Module, rules: Given, specs: train.SpecsByPath = None, overlap: str | tuple[str, ...] = ()
    ):
        self.model, self._rules, self._specs, self._overlap = model, rules, specs, overlap
        Rules(rules)  # a misspelt recipe is found here and not in the middle of a trace

    def clone(self, **changes) -> "WithRecipe":
        return WithRecipe(self.model.clone(**changes), self._rules, self._specs, self._overlap)

    def __getattr__(self, name: str):
        if name.startswith("_") or name == "model":
            raise AttributeError(name)
        if name in ("bind", "unbind", "copy"):
            raise AttributeError(f"{name!r} would lose the rules; use apply, clone, or `with recipes_by_path(rules):`")
        found = getattr(self.model, name)
        if name not in self._RUNS:
            return found

        def run(*args, **kwargs):
            rules, specs = Rules(self._rules), Patterns(self._specs, "specs")
            with recipes_by_path(rules, specs=specs, overlap=self._overlap):
                result = found(*args, **kwargs)
            if kwargs.get("method") is None:  # another method may well use a part of the model
                rules.check_all_matched()
                specs.check_all_matched()
            return result

        return run

    def __repr__(self) -> str:
        return f"WithRecipe({self.model!r}, {self._rules!r})"


def with_recipe(
    model: nn.Module, rules: Given, *, specs: train.SpecsByPath = None, overlap: str | tuple[str, ...] = ()
) -> WithRecipe:
    """The model with low-precision products in every Dense, DenseGeneral and Einsum that the rules name.

    Args:
      rules: a recipe for all of them, or {path pattern: recipe or None}, in which the first match decides.
      specs: how x, w and results lie on a mesh: `train.Specs` for all layers, or {path pattern: Specs or None}.
      overlap: mesh axes along which transfers overlap with products.

    >>> model = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(8)])
    >>> model = with_recipe(model, {"layers_0": "mxfp8", "*": None})
    >>> variables = model.init(jax.random.key(0), jnp.ones((2, 32)))
    >>> model.apply(variables, jnp.ones((2, 32))).shape
    (2, 8)
    """
    return WithRecipe(model, rules, specs, overlap)
