"""Recipes in Flax linen, through its own seams: `dot_general_cls`, and interception for models that have none.

    nn.Dense(features, dot_general_cls=sd.linen.make_dot_general_cls("mxfp8"))
    model = sd.linen.with_recipe(model, "fp8_delayed")        # every Dense, DenseGeneral, Einsum and Conv of a model
    print(sd.linen.explain(model, x))                         # which layers those are, and which stay as they are

Parameters are not touched. Only a recipe with delayed scaling makes variables, in the collection
`_overwrite_with_gradient`, which Flax's TrainState replaces by its gradient and keeps from the optimizer: float32
`x_scale` (the factor that x is multiplied by, of shape (1,)) and `x_amax_history`, and likewise for `kernel` and
`grad`. They must be differentiated together with the parameters, `jax.grad(loss)(variables)`: a gradient with respect
to `params` alone raises. A forward pass under jit cannot tell a history that was never trained from one that was.

Stochastic rounding draws keys from the rng stream `sr_rng` or, where `apply` is given none, as everywhere in linen from
its default stream `params`.

On a mesh, `specs` says how x, w and the result of a layer lie, and `overlap` along which axes transfers overlap with
products, as in `scaledot.train.dot_general`.

A layer that is called twice merges what both calls have seen. Where it is called twice through a lifted transform
(nn.remat, or nn.scan with the collection broadcast), the calls can only see each other if the collection is mutable:
`model.apply(variables, x, mutable=["_overwrite_with_gradient"])`.
"""

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

try:
    from flax import linen as nn
except ModuleNotFoundError as error:
    raise ImportError("scaledot.linen needs Flax, which is not installed: pip install 'scaledot[flax]'") from error
from flax.core.scope import Scope
from flax.linen import dtypes
from flax.traverse_util import flatten_dict, unflatten_dict

from scaledot import train
from scaledot.contraction import parse_einsum
from scaledot.path_patterns import Given, PathPatterns, RecipesByPath, table, warn_of_overlooked
from scaledot.recipes import UNQUANTISED, Recipe, find_recipe
from scaledot.state import TENSOR_NAMES, AmaxHistory, State, check_state, init_state, merge_named
from scaledot.train.conv import groups_reason
from scaledot.train.weight_codes import promote_around

STATE_COLLECTION = "_overwrite_with_gradient"
KEY_STREAM = "sr_rng"
DEFAULT_STREAM = "params"  # from which linen's make_rng draws where there is no stream of the name

# States by root scope and module path. A layer that is called again must start from the state that its last call
# returned (see `scaledot.state`). Where variables are immutable, as in most losses, linen has no place for that state:
# collections refuse writes, and nn.Dense builds a new DotGeneral for every call. Each `apply` and lifted transform has
# its own root scope, so no tracer reaches another trace, and a weak key frees the states with their scope.
_RETURNED_STATES: weakref.WeakKeyDictionary[Scope, dict[tuple[str, ...], State]] = weakref.WeakKeyDictionary()


class Quantized(nn.Module):
    """A product under a recipe; owns the state of delayed scaling and nothing else."""

    recipe: Recipe

    @nn.nowrap
    def under_recipe(self, verb: Callable[..., Any], *args, **kwargs) -> jax.Array:
        """The verb of `train`, with this module's state and key.

        An initialising pass makes the state and multiplies unquantised: it needs shapes, and no kernel to be compiled.
        """
        if self.is_initializing():
            if self.recipe.delayed:
                self._current_state()
            return verb(*args, recipe=UNQUANTISED, **kwargs)
        if self.recipe.stochastic:
            kwargs["key"] = self._key()
        if not self.recipe.delayed:
            return verb(*args, recipe=self.recipe, **kwargs)
        y, state = verb(*args, recipe=self.recipe, state=self._current_state(), **kwargs)
        self._hand_on(state)
        return y

    @nn.nowrap
    def _key(self) -> jax.Array | None:
        """A key from the stream of stochastic rounding or linen's default one; None where neither was given."""
        has_stream = self.has_rng(KEY_STREAM) or self.has_rng(DEFAULT_STREAM)
        return self.make_rng(KEY_STREAM) if has_stream else None

    @nn.nowrap
    def _current_state(self) -> State:
        """The state in the variables, or where these are immutable the one that the previous call returned, if any."""
        initial = init_state(self.recipe)
        if not self.has_variable(STATE_COLLECTION, "x_scale") and not self.is_mutable_collection(STATE_COLLECTION):
            raise ValueError(
                f"{self.recipe.name} keeps state, but the variables have no {STATE_COLLECTION!r} for "
                f"{'/'.join(self.path)!r}; give all that init returned: "
                f"apply({{'params': ..., {STATE_COLLECTION!r}: ...}}, ...), and TrainState.create(params=variables)"
            )
        stored = {t: self._variables(t, history) for t, history in initial.items()}
        check_state(self.recipe, stored, f"variables of {'/'.join(self.path)}")
        return self._returned_states.get(self.path, stored)

    @nn.nowrap
    def _variables(self, tensor: str, initial: AmaxHistory) -> AmaxHistory:
        history = self.variable(STATE_COLLECTION, f"{TENSOR_NAMES[tensor]}_amax_history", lambda: initial.history)
        multiplier = self.variable(
            STATE_COLLECTION, f"{TENSOR_NAMES[tensor]}_scale", lambda: initial.multiplier.reshape(1)
        )
        return AmaxHistory(history.value, multiplier.value)

    @nn.nowrap
    def _hand_on(self, state: State) -> None:
        """Keeps the state for the next call of this layer."""
        if self.is_mutable_collection(STATE_COLLECTION):
            for tensor, (history, multiplier) in state.items():
                self.put_variable(STATE_COLLECTION, f"{TENSOR_NAMES[tensor]}_amax_history", history)
                self.put_variable(STATE_COLLECTION, f"{TENSOR_NAMES[tensor]}_scale", multiplier)
        else:
            self._returned_states[self.path] = state

    @property
    def _returned_states(self) -> dict[tuple[str, ...], State]:
        """The states that modules returned in this `apply` or lifted transform, by path."""
        assert self.scope is not None
        return _RETURNED_STATES.setdefault(self.scope.root, {})


class OnMesh(Quantized):
    """A product under a recipe that knows how its arrays lie."""

    specs: train.Specs | None = None
    overlap: str | tuple[str, ...] = ()
    on_indivisible: str = "raise"

    @nn.nowrap
    def lying(self, out_sharding) -> dict[str, Any]:
        """Arguments about the mesh. A model is initialised with few examples, which need not divide by it."""
        if self.is_initializing():
            return {"out_sharding": out_sharding}
        how = {"specs": self.specs, "overlap": self.overlap, "on_indivisible": self.on_indivisible}
        return {"out_sharding": out_sharding, **how}


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


class ConvGeneralDilated(OnMesh):
    """`jax.lax.conv_general_dilated` under a recipe, as nn.Conv calls it; `overlap` has no effect on it."""

    @nn.compact
    def __call__(self, x, w, window_strides, padding, *, out_sharding=None, **window):
        how = self.lying(out_sharding)
        how.pop("overlap", None)
        return self.under_recipe(train.conv_general_dilated, x, w, window_strides, padding, **window, **how)


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
    recipe: str | Recipe,
    *,
    specs: train.Specs | None = None,
    overlap: str | tuple[str, ...] = (),
    on_indivisible: str = "raise",
) -> type[DotGeneral]:
    """A class for `nn.Dense(..., dot_general_cls=cls)` or `nn.Dense(..., dot_general=cls())`.

    >>> layer = nn.Dense(8, dot_general_cls=make_dot_general_cls("mxfp8"))
    >>> jax.tree.map(jnp.shape, layer.init(jax.random.key(0), jnp.ones((2, 32))))
    {'params': {'bias': (8,), 'kernel': (32, 8)}}
    """
    return _with_default(DotGeneral, recipe, specs=specs, overlap=overlap, on_indivisible=on_indivisible)


def make_einsum_cls(
    recipe: str | Recipe,
    *,
    specs: train.Specs | None = None,
    overlap: str | tuple[str, ...] = (),
    on_indivisible: str = "raise",
) -> type[Einsum]:
    """A class whose instances are called as `jnp.einsum(subscripts, x, kernel)`, for projections of attention."""
    return _with_default(Einsum, recipe, specs=specs, overlap=overlap, on_indivisible=on_indivisible)


def make_conv_general_dilated_cls(
    recipe: str | Recipe, *, specs: train.Specs | None = None, on_indivisible: str = "raise"
) -> type[ConvGeneralDilated]:
    """A class for `nn.Conv(..., conv_general_dilated_cls=cls)`."""
    return _with_default(ConvGeneralDilated, recipe, specs=specs, on_indivisible=on_indivisible)


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
    rules: Given | RecipesByPath,
    *,
    specs: train.SpecsByPath | PathPatterns = None,
    overlap: str | tuple[str, ...] = (),
    on_indivisible: str = "raise",
):
    """Inside, every Dense, DenseGeneral, Einsum and Conv of any linen model takes the recipe that its path has.

    Layers that were given a `dot_general` or `conv_general_dilated` of their own keep it. Layers to which a rule gives
    a recipe that they cannot take stay as they are, and a warning names them. Flax caches what nn.jit has traced
    without regard to interception: inside nn.jit give layers a `dot_general_cls` instead. Other arguments as in
    `with_recipe`.
    """
    chosen = rules if isinstance(rules, RecipesByPath) else RecipesByPath(rules)
    lying = specs if isinstance(specs, PathPatterns) else PathPatterns(specs, "specs")
    with _intercepted(chosen, lying, overlap, on_indivisible):
        yield
    warn_of_overlooked(chosen.layers, stacklevel=3)


def _intercepted(chosen: RecipesByPath, lying: PathPatterns, overlap: str | tuple[str, ...], on_indivisible: str):
    """A context in which layers take the recipes that are chosen for them."""

    def interceptor(call, args, kwargs, context: nn.module.InterceptorContext):
        layer = context.module
        recipe = _recipe_for(layer, context.method_name, chosen, args, kwargs)
        if recipe is None:
            return call(*args, **kwargs)
        specs = lying.value_for("/".join(layer.path))
        on_mesh = {"specs": specs, "overlap": overlap, "on_indivisible": on_indivisible}
        if isinstance(layer, nn.Einsum):
            with _fields_set(layer, _promotion(layer)):
                return _einsum_layer(layer, Einsum(recipe, **on_mesh), *args, **kwargs)
        seam, product = _SEAMS[isinstance(layer, nn.Conv)]
        fields = {f"{seam}_cls": _with_default(product, recipe, **on_mesh), **_promotion(layer)}
        with _fields_set(layer, fields):
            return call(*args, **kwargs)

    return nn.intercept_methods(interceptor)


def _recipe_for(
    layer: nn.Module, method: str, chosen: RecipesByPath, args: tuple, kwargs: dict[str, Any]
) -> Recipe | None:
    """The recipe for this call of a layer's method; None where it multiplies by no kernel, or has to stay as it is."""
    multiplies = isinstance(layer, _MULTIPLIES) and method == "__call__"
    if not multiplies and not (isinstance(layer, nn.Embed) and method == "attend"):
        return None
    inputs = args[0] if args else kwargs.get("inputs")
    obstacle = functools.partial(_obstacle, layer, inputs)
    return chosen.decide("/".join(layer.path), type(layer).__name__, _own_product(layer), obstacle)


@contextlib.contextmanager
def _fields_set(layer: nn.Module, fields: Mapping[str, Any]):
    """Sets fields of a bound layer for one call.

    Calling `layer.clone` with the fields set would not touch the layer, but linen would record it as one more call:
    `capture_intermediates` would return each output twice, and interceptors would run again.
    """
    before = {name: getattr(layer, name) for name in fields}
    try:
        for name, value in fields.items():
            object.__setattr__(layer, name, value)  # a bound module refuses assignments
        yield
    finally:
        for name, value in before.items():
            object.__setattr__(layer, name, value)


def promote_dtype(*args, dtype=None, inexact=True) -> list[Any]:
    """`flax.linen.dtypes.promote_dtype` of arrays that lets a `train.CastWeight` pass.

    For layers with a `dot_general_cls` whose parameters come from `train.CastWeights.attach`; `with_recipe` sets it.
    A weight that was cast from another dtype than the layer computes in is refused.

    >>> layer = nn.Dense(8, dot_general_cls=make_dot_general_cls("mxfp8"), promote_dtype=promote_dtype)
    >>> params = layer.init(jax.random.key(0), jnp.ones((2, 32)))["params"]
    >>> cast = train.cast_weights(params, "mxfp8")
    >>> layer.apply({"params": cast.attach(params)}, jnp.ones((2, 32))).shape
    (2, 8)
    """
    return promote_around(lambda arrays: dtypes.promote_dtype(*arrays, dtype=dtype, inexact=inexact), args)


def _promotion(layer: nn.Module) -> dict[str, Any]:
    """The field with which a layer passes on a CastWeight; one with a `promote_dtype` of its own keeps that."""
    held = getattr(layer, "promote_dtype", None)
    if held is None and isinstance(layer.get_variable("params", "kernel"), train.CastWeight):
        raise TypeError(
            f"{type(layer).__name__} {'/'.join(layer.path)!r} has no `promote_dtype` in this version of Flax, and so "
            "cannot take a CastWeight; leave its kernel out with `select` of cast_weights, or update Flax"
        )
    return {"promote_dtype": promote_dtype} if held is dtypes.promote_dtype else {}


_SEAMS = ("dot_general", DotGeneral), ("conv_general_dilated", ConvGeneralDilated)
_WITHOUT_SEAM = (nn.ConvTranspose, nn.ConvLocal, nn.OptimizedLSTMCell, nn.Embed)  # of nn.Embed the method `attend`
_MULTIPLIES = (nn.Dense, nn.DenseGeneral, nn.Einsum, nn.Conv, *_WITHOUT_SEAM[:-1])


def _own_product(layer: nn.Module) -> str | None:
    """The seam of a layer for which it was given a product."""
    fields = ((seam, f) for seam, _ in _SEAMS for f in (seam, f"{seam}_cls"))
    return next((seam for seam, field in fields if getattr(layer, field, None) is not None), None)


def _obstacle(layer: nn.Module, inputs: Any, recipe: Recipe) -> str | None:
    """Why a layer cannot take a recipe."""
    if isinstance(layer, _WITHOUT_SEAM):
        return "Flax has no hook for its contraction"
    if isinstance(layer, nn.Conv):
        groups = layer.feature_group_count
        return groups_reason(recipe, groups, inputs.shape[-1] // groups, layer.features // groups)
    return None


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


@dataclasses.dataclass(frozen=True)
class Run:
    """A method of a model under its rules. Equal for equal models and rules, so that jax.jit traces it once for all."""

    owner: "WithRecipe"
    __name__: str

    def __call__(self, *args, **kwargs):
        return self.owner._run(self.__name__, *args, **kwargs)


class WithRecipe:
    """A model whose `init`, `apply` and relatives run under rules; everything else is the model's own.

    Two are equal if their models and rules are.
    """

    _RUNS = ("init", "init_with_output", "lazy_init", "apply", "tabulate")

    def __init__(
        self,
        model: nn.Module,
        rules: Given,
        specs: train.SpecsByPath = None,
        overlap: str | tuple[str, ...] = (),
        on_indivisible: str = "raise",
    ):
        self.model, self._rules, self._specs, self._how = model, rules, specs, (overlap, on_indivisible)
        by_path = (patterns.by_path for patterns in self._patterns())  # a misspelt recipe is found here
        self._key = _frozen((model, *by_path, self._how))
        self._hash = hash(self._key)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, WithRecipe) and self._key == other._key)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self):
        return WithRecipe, (self.model, self._rules, self._specs, *self._how)

    def clone(self, **changes) -> "WithRecipe":
        return WithRecipe(self.model.clone(**changes), self._rules, self._specs, *self._how)

    def __getattr__(self, name: str):
        if name.startswith("_") or name == "model":
            raise AttributeError(name)
        if name in ("bind", "unbind", "copy"):
            raise AttributeError(f"{name!r} would lose the rules; use apply, clone, or `with recipes_by_path(rules):`")
        if name not in self._RUNS:
            return getattr(self.model, name)
        self.__dict__[name] = Run(self, name)  # kept: jax.jit forgets what it traced of an object that is gone
        return self.__dict__[name]

    def _run(self, name: str, *args, **kwargs):
        """A method of the model, under the rules."""
        rules, specs = self._patterns()
        with _intercepted(rules, specs, *self._how):
            result = getattr(self.model, name)(*args, **kwargs)
        if kwargs.get("method") is None:  # another method may well use a part of the model
            rules.check_all_matched()
            specs.check_all_matched()
        warn_of_overlooked(rules.layers, stacklevel=3)
        return result

    def _explain(self, *args, **kwargs) -> str:
        """See `explain`."""
        rules, specs = self._patterns()
        with _intercepted(rules, specs, *self._how):
            jax.eval_shape(functools.partial(self.model.init, **kwargs), jax.random.key(0), *args)
        return table(rules.layers)

    def _patterns(self) -> tuple[RecipesByPath, PathPatterns]:
        return RecipesByPath(self._rules), PathPatterns(self._specs, "specs")

    def __repr__(self) -> str:
        return f"WithRecipe({self.model!r}, {self._rules!r})"


def _frozen(value: Any) -> Any:
    """What can be hashed and is equal for equal models: containers go by their contents, the rest by identity."""
    if isinstance(value, nn.Module):
        fields = (field.name for field in dataclasses.fields(value) if field.name != "parent")
        return type(value), *(_frozen(getattr(value, name)) for name in fields)
    if isinstance(value, (list, tuple)):
        return type(value), *map(_frozen, value)
    if isinstance(value, Mapping):
        return type(value), *((key, _frozen(item)) for key, item in value.items())
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


def with_recipe(
    model: nn.Module,
    rules: Given,
    *,
    specs: train.SpecsByPath = None,
    overlap: str | tuple[str, ...] = (),
    on_indivisible: str = "raise",
) -> WithRecipe:
    """The model with low-precision products in every Dense, DenseGeneral, Einsum and Conv that the rules name.

    Layers that cannot take the recipe that a rule gives them, such as ConvTranspose, stay as they are, and a warning
    names them; `explain` lists what each layer takes.

    Args:
      rules: a recipe for all of them, or {path pattern: recipe or None}, in which the first match decides.
      specs: how x, w and results lie on a mesh: `train.Specs` for all layers, or {path pattern: Specs or None}.
      overlap: mesh axes along which transfers overlap with products.
      on_indivisible: what to do where devices would have parts of blocks: "raise", or "gather" that axis first.

    >>> model = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(8)])
    >>> model = with_recipe(model, {"layers_0": "mxfp8", "*": None})
    >>> variables = model.init(jax.random.key(0), jnp.ones((2, 32)))
    >>> model.apply(variables, jnp.ones((2, 32))).shape
    (2, 8)
    """
    return WithRecipe(model, rules, specs, overlap, on_indivisible)


def explain(model: WithRecipe, *args, **kwargs) -> str:
    """A table of the layers of a model that multiply by a kernel: the recipe that each takes, or why it takes none.

    Nothing is computed. Other arguments are those of `model.init` after the key, arrays or their shapes.

    >>> model = nn.Sequential([nn.Conv(8, (3,)), nn.ConvTranspose(8, (3,)), nn.Dense(8)])
    >>> print(explain(with_recipe(model, {"layers_1": None, "*": "mxfp8"}), jnp.ones((2, 16, 32))))
    layers_0  Conv           mxfp8
    layers_1  ConvTranspose  none: no rule gives it one
    layers_2  Dense          mxfp8
    """
    return model._explain(*args, **kwargs)
