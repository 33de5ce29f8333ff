"""Recipes in Flax linen, through `dot_general_cls` or, for models without such an argument, method interceptors.

    nn.Dense(features, dot_general_cls=sd.linen.make_dot_general_cls("mxfp8"))
    model = sd.linen.with_recipe(model, "fp8_delayed")        # every Dense, DenseGeneral, Einsum and Conv of a model
    print(sd.linen.explain(model, x))                         # the recipe of each layer, or why it has none

    params = sd.linen.quantize_params(model, params, "int4", x)      # inference with quantised kernels, see
    y = sd.linen.with_quantized_params(model).apply({"params": params}, x)         # `scaledot.inference`

Parameters are unchanged. Only recipes with delayed scaling create variables, in the collection
`_overwrite_with_gradient`, which Flax's TrainState overwrites with its gradient and hides from the optimizer: float32
`x_scale` (the quantisation multiplier of x, of shape (1,)) and `x_amax_history`, and likewise for `kernel` and `grad`.
They must be differentiated together with the parameters, `jax.grad(loss)(variables)`: a gradient with respect to
`params` alone raises. Inside jit, a forward pass with a history that was never trained cannot be detected.

Stochastic rounding draws keys from the rng stream `sr_rng`, or from linen's default stream `params` if `apply` has no
such stream.

On a mesh, `specs` has the PartitionSpecs of x, w and the result of a layer, and `overlap` the mesh axes along which
collectives overlap with matmuls, as in `scaledot.train.dot_general`.

A layer that is called twice merges the amaxes of both calls. If the calls are in a lifted transform (nn.remat, or
nn.scan with the collection broadcast), this needs a mutable collection:
`model.apply(variables, x, mutable=["_overwrite_with_gradient"])`.
"""

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

try:
    from flax import linen as nn
except ModuleNotFoundError as error:
    raise ImportError("scaledot.linen needs Flax, which is not installed: pip install 'scaledot[flax]'") from error
from flax.core.scope import Scope
from flax.traverse_util import flatten_dict, unflatten_dict

from scaledot import train
from scaledot.flax_hooks import MatmulUnderRecipe
from scaledot.flax_hooks.linen import (
    NO_HOOK,
    WITHOUT_HOOK,
    InterceptedModel,
    Run,
    einsum_layer,
    eval_shapes,
    fields_set,
    hook_of,
    multiplies,
    own_matmul,
    promote_dtype,
    promotes_itself,
)
from scaledot.inference.linen import WithQuantizedParams, quantize_params, with_quantized_params
from scaledot.path_patterns import PathPatterns, RecipesByPath, Rules, table, warn_of_overlooked
from scaledot.recipes import UNQUANTISED, Recipe, find_recipe
from scaledot.state import TENSOR_NAMES, AmaxHistory, State, check_state, init_state, merge_named
from scaledot.train.conv import groups_reason

__all__ = [
    "ConvGeneralDilated",
    "DotGeneral",
    "Einsum",
    "GroupedDense",
    "OnMesh",
    "Quantized",
    "Run",
    "WithQuantizedParams",
    "WithRecipe",
    "explain",
    "make_conv_general_dilated_cls",
    "make_dot_general_cls",
    "make_einsum_cls",
    "make_grouped_dense_cls",
    "merge_states",
    "promote_dtype",
    "quantize_params",
    "recipes_by_path",
    "with_quantized_params",
    "with_recipe",
]

STATE_COLLECTION = "_overwrite_with_gradient"
KEY_STREAM = "sr_rng"
DEFAULT_STREAM = "params"  # linen's make_rng falls back to it if there is no stream of the requested name

# States by root scope and module path. A second call of a layer must start from the state that its first call returned
# (see `scaledot.state`). With immutable variables, as in most losses, linen cannot store that state: collections reject
# writes, and nn.Dense creates a new DotGeneral in every call. Each `apply` and lifted transform has its own root scope,
# so no tracer leaks to another trace, and the weak key frees the states with their scope.
_RETURNED_STATES: weakref.WeakKeyDictionary[Scope, dict[tuple[str, ...], State]] = weakref.WeakKeyDictionary()


class Quantized(nn.Module, MatmulUnderRecipe):
    """Base class of matmuls under a recipe; its only variables are the state of delayed scaling.

    residual_name: the `checkpoint_name` of residuals, as in `scaledot.train.dot_general`.
    """

    recipe: Recipe
    residual_name: str | None = dataclasses.field(default=None, kw_only=True)

    @nn.nowrap
    def under_recipe(self, function: Callable[..., Any], *args, **kwargs) -> jax.Array:
        """Calls a function of `scaledot.train` with the recipe, the state and a key of this module.

        Initialisation creates the state and multiplies unquantised, because only shapes matter there and no kernels
        need to be compiled.
        """
        if self.is_initializing():
            if self.recipe.delayed:
                self._current_state()
            return function(*args, recipe=UNQUANTISED, **kwargs)
        kwargs["residual_name"] = self.residual_name
        if self.recipe.stochastic and "key" not in kwargs:
            kwargs["key"] = self._key()
        if not self.recipe.delayed:
            return function(*args, recipe=self.recipe, **kwargs)
        y, state = function(*args, recipe=self.recipe, state=self._current_state(), **kwargs)
        self._hand_on(state)
        return y

    @nn.nowrap
    def _key(self) -> jax.Array | None:
        """A key from the stream `sr_rng` or linen's default stream; None if `apply` has neither."""
        has_stream = self.has_rng(KEY_STREAM) or self.has_rng(DEFAULT_STREAM)
        return self.make_rng(KEY_STREAM) if has_stream else None

    @nn.nowrap
    def _current_state(self) -> State:
        """The state in the variables or, if these are immutable, the state that the previous call returned, if any."""
        initial = init_state(self.recipe)
        if not self.has_variable(STATE_COLLECTION, "x_scale") and not self.is_mutable_collection(STATE_COLLECTION):
            raise ValueError(
                f"{self.recipe.name} uses delayed scaling, but the variables have no {STATE_COLLECTION!r} for "
                f"{'/'.join(self.path)!r}; pass all collections that init returned: "
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
        """Stores the state for the next call of this layer."""
        if self.is_mutable_collection(STATE_COLLECTION):
            for tensor, (history, multiplier) in state.items():
                self.put_variable(STATE_COLLECTION, f"{TENSOR_NAMES[tensor]}_amax_history", history)
                self.put_variable(STATE_COLLECTION, f"{TENSOR_NAMES[tensor]}_scale", multiplier)
        else:
            self._returned_states[self.path] = state

    @property
    def _returned_states(self) -> dict[tuple[str, ...], State]:
        """The states that calls of modules returned within this `apply` or lifted transform, by module path."""
        assert self.scope is not None
        return _RETURNED_STATES.setdefault(self.scope.root, {})


class OnMesh(Quantized):
    """Base class of matmuls under a recipe with shardings of operands and result."""

    specs: train.Specs | None = None
    overlap: str | tuple[str, ...] = ()
    on_indivisible: str = "raise"

    @nn.nowrap
    def mesh_arguments(self, out_sharding) -> dict[str, Any]:
        """The keyword arguments about the mesh; no `specs` in `init`, whose example batch may not divide by it."""
        if self.is_initializing():
            return {"out_sharding": out_sharding}
        keywords = {"specs": self.specs, "overlap": self.overlap, "on_indivisible": self.on_indivisible}
        return {"out_sharding": out_sharding, **keywords}


class DotGeneral(OnMesh):
    """`jax.lax.dot_general` under a recipe, as nn.Dense and nn.DenseGeneral call it."""

    @nn.compact
    def __call__(self, x, w, dimension_numbers, precision=None, preferred_element_type=None, out_sharding=None):
        arguments = dimension_numbers, precision, preferred_element_type
        return self.under_recipe(train.dot_general, x, w, *arguments, **self.mesh_arguments(out_sharding))


class Einsum(OnMesh):
    """`jnp.einsum` of an input and a kernel under a recipe."""

    @nn.compact
    def __call__(self, subscripts, x, w, *, precision=None, preferred_element_type=None, out_sharding=None):
        keywords = {"precision": precision, "preferred_element_type": preferred_element_type}
        return self.under_recipe(train.einsum, subscripts, x, w, **keywords, **self.mesh_arguments(out_sharding))


class ConvGeneralDilated(OnMesh):
    """`jax.lax.conv_general_dilated` under a recipe, as nn.Conv calls it; `overlap` is ignored."""

    @nn.compact
    def __call__(self, x, w, window_strides, padding, *, out_sharding=None, **window):
        keywords = self.mesh_arguments(out_sharding)
        keywords.pop("overlap", None)
        return self.under_recipe(train.conv_general_dilated, x, w, window_strides, padding, **window, **keywords)


class GroupedDense(Quantized):
    """`train.ragged_dot` under a recipe: x (rows, k), kernel (groups, k, n), group_sizes (groups,) -> (rows, n).

    specs: the PartitionSpecs of x, kernel and result.
    """

    specs: train.Specs | None = None

    @nn.compact
    def __call__(
        self, x, kernel, group_sizes, bias=None, precision=None, preferred_element_type=None, out_sharding=None
    ):
        keywords = {"out_sharding": out_sharding, "specs": self.specs}
        return self.under_recipe(
            train.ragged_dot, x, kernel, group_sizes, bias, precision, preferred_element_type, **keywords
        )


def make_dot_general_cls(
    recipe: str | Recipe,
    *,
    specs: train.Specs | None = None,
    overlap: str | tuple[str, ...] = (),
    on_indivisible: str = "raise",
    residual_name: str | None = None,
) -> type[DotGeneral]:
    """A class for `nn.Dense(..., dot_general_cls=cls)` or `nn.Dense(..., dot_general=cls())`.

    >>> import jax.numpy as jnp
    >>> layer = nn.Dense(8, dot_general_cls=make_dot_general_cls("mxfp8"))
    >>> jax.tree.map(jnp.shape, layer.init(jax.random.key(0), jnp.ones((2, 32))))
    {'params': {'bias': (8,), 'kernel': (32, 8)}}
    """
    on_mesh = {"specs": specs, "overlap": overlap, "on_indivisible": on_indivisible}
    return _with_default(DotGeneral, recipe, residual_name=residual_name, **on_mesh)


def make_einsum_cls(
    recipe: str | Recipe,
    *,
    specs: train.Specs | None = None,
    overlap: str | tuple[str, ...] = (),
    on_indivisible: str = "raise",
    residual_name: str | None = None,
) -> type[Einsum]:
    """A module class with `__call__(subscripts, x, kernel)` like `jnp.einsum`, for attention projections."""
    on_mesh = {"specs": specs, "overlap": overlap, "on_indivisible": on_indivisible}
    return _with_default(Einsum, recipe, residual_name=residual_name, **on_mesh)


def make_conv_general_dilated_cls(
    recipe: str | Recipe,
    *,
    specs: train.Specs | None = None,
    on_indivisible: str = "raise",
    residual_name: str | None = None,
) -> type[ConvGeneralDilated]:
    """A class for `nn.Conv(..., conv_general_dilated_cls=cls)`."""
    on_mesh = {"specs": specs, "on_indivisible": on_indivisible}
    return _with_default(ConvGeneralDilated, recipe, residual_name=residual_name, **on_mesh)


def make_grouped_dense_cls(recipe: str | Recipe, *, residual_name: str | None = None) -> type[GroupedDense]:
    """A module class with `__call__(x, kernel, group_sizes)`, for mixture-of-experts layers."""
    return _with_default(GroupedDense, recipe, residual_name=residual_name)


def merge_states(*collections: Mapping[str, Any]) -> dict[str, Any]:
    """Merges the `_overwrite_with_gradient` collections of several gradient calls; see `scaledot.state.merge`."""
    return unflatten_dict(merge_named(*(flatten_dict(collection) for collection in collections)))


def _with_default(base, recipe: str | Recipe, **fields):
    """A subclass of a module class with defaults for its fields."""
    defaults = {"recipe": find_recipe(recipe), **fields}
    return type(
        base.__name__,
        (base,),
        {**defaults, "__annotations__": dict.fromkeys(defaults, Any), "__module__": __name__},
    )


@contextlib.contextmanager
def recipes_by_path(
    rules: Rules | RecipesByPath,
    *,
    specs: train.SpecsByPath | PathPatterns = None,
    overlap: str | tuple[str, ...] = (),
    on_indivisible: str = "raise",
    residual_name: str | None = None,
):
    """A context manager inside which every Dense, DenseGeneral, Einsum and Conv uses the recipe of its path.

    Layers with a `dot_general` or `conv_general_dilated` of their own keep it. Layers that do not support the recipe of
    their path stay unquantised, with a warning that names them. nn.jit caches traces regardless of interceptors: inside
    nn.jit, set the `dot_general_cls` of layers instead. Other arguments as in `with_recipe`.
    """
    recipes = rules if isinstance(rules, RecipesByPath) else RecipesByPath(rules)
    specs = specs if isinstance(specs, PathPatterns) else PathPatterns(specs, "specs")
    with _intercepted(recipes, specs, overlap, on_indivisible, residual_name):
        yield
    warn_of_overlooked(recipes.layers, stacklevel=3)


def _intercepted(
    recipes: RecipesByPath,
    specs: PathPatterns,
    overlap: str | tuple[str, ...],
    on_indivisible: str,
    residual_name: str | None,
):
    """A context manager inside which layers use the recipe and specs of their paths."""

    def interceptor(call, args, kwargs, context: nn.module.InterceptorContext):
        layer = context.module
        recipe = _recipe_for(layer, context.method_name, recipes, args, kwargs)
        if recipe is None:
            return call(*args, **kwargs)
        layer_specs = specs.value_for("/".join(layer.path))
        options = {"specs": layer_specs, "overlap": overlap, "on_indivisible": on_indivisible}
        options["residual_name"] = residual_name
        if isinstance(layer, nn.Einsum):
            with fields_set(layer, _promotion(layer)):
                return einsum_layer(layer, Einsum(recipe, **options), *args, **kwargs)
        matmul = ConvGeneralDilated if isinstance(layer, nn.Conv) else DotGeneral
        fields = {f"{hook_of(layer)}_cls": _with_default(matmul, recipe, **options), **_promotion(layer)}
        with fields_set(layer, fields):
            return call(*args, **kwargs)

    return nn.intercept_methods(interceptor)


def _recipe_for(
    layer: nn.Module, method: str, recipes: RecipesByPath, args: tuple, kwargs: dict[str, Any]
) -> Recipe | None:
    """The recipe for this call of a layer's method; None if it has no kernel to multiply by or stays unquantised."""
    if not multiplies(layer, method):
        return None
    inputs = args[0] if args else kwargs.get("inputs")
    obstacle = functools.partial(_obstacle, layer, inputs)
    return recipes.decide("/".join(layer.path), type(layer).__name__, own_matmul(layer), obstacle)


def _promotion(layer: nn.Module) -> dict[str, Any]:
    """The field `promote_dtype` with which a layer accepts a CastWeight; {} if the layer has one of its own."""
    if getattr(layer, "promote_dtype", None) is None and isinstance(
        layer.get_variable("params", "kernel"), train.CastWeight
    ):
        raise TypeError(
            f"{type(layer).__name__} {'/'.join(layer.path)!r} has no `promote_dtype` in this version of Flax, and so "
            "cannot take a CastWeight; leave its kernel out with `select` of cast_weights, or update Flax"
        )
    return {} if promotes_itself(layer) else {"promote_dtype": promote_dtype}


def _obstacle(layer: nn.Module, inputs: Any, recipe: Recipe) -> str | None:
    """Why a layer does not support a recipe; None if it does."""
    if isinstance(layer, WITHOUT_HOOK):
        return NO_HOOK
    if isinstance(layer, nn.Conv):
        groups = layer.feature_group_count
        return groups_reason(recipe, groups, inputs.shape[-1] // groups, layer.features // groups)
    return None


class WithRecipe(InterceptedModel):
    """A model whose `init`, `apply`, `lazy_init` and `tabulate` run under rules; other attributes are the model's.

    Two WithRecipes are equal if their models and rules are.
    """

    _LOST = "the rules; use apply, clone, or `with recipes_by_path(rules):`"

    def __init__(
        self,
        model: nn.Module,
        rules: Rules,
        specs: train.SpecsByPath = None,
        overlap: str | tuple[str, ...] = (),
        on_indivisible: str = "raise",
        residual_name: str | None = None,
    ):
        by_path = [patterns.by_path for patterns in _patterns(rules, specs)]  # raises for a misspelt recipe
        options = overlap, on_indivisible, residual_name
        super().__init__(model, rules, specs, *options, key=(*by_path, *options))

    def _run(self, name: str, *args, **kwargs):
        """Calls a method of the model under the rules."""
        with self._rules_applied(kwargs.get("method")) as rules:
            result = getattr(self.model, name)(*args, **kwargs)
        warn_of_overlooked(rules.layers, stacklevel=3)
        return result

    def _explain(self, *args, **kwargs) -> str:
        with self._rules_applied(kwargs.get("method")) as rules:
            eval_shapes(functools.partial(self.model.init, **kwargs), jax.random.key(0), *args)
        return table(rules.layers)

    @contextlib.contextmanager
    def _rules_applied(self, method: Any) -> Iterator[RecipesByPath]:
        """Intercepts layers; afterwards raises for rules and specs that match no layer, unless a `method` is given.

        A method other than the default may use only some layers.
        """
        rules, specs, *how = self._settings
        rules, specs = _patterns(rules, specs)
        with _intercepted(rules, specs, *how):
            yield rules
        if method is None:
            rules.check_all_matched()
            specs.check_all_matched()


def _patterns(rules: Rules, specs: train.SpecsByPath) -> tuple[RecipesByPath, PathPatterns]:
    return RecipesByPath(rules), PathPatterns(specs, "specs")


def with_recipe(
    model: nn.Module,
    rules: Rules,
    *,
    specs: train.SpecsByPath = None,
    overlap: str | tuple[str, ...] = (),
    on_indivisible: str = "raise",
    residual_name: str | None = None,
) -> WithRecipe:
    """The model with quantised matmuls in every Dense, DenseGeneral, Einsum and Conv that the rules match.

    Layers that do not support the recipe of their rule, such as ConvTranspose, stay unquantised, with a warning that
    names them; `explain` lists the recipe of each layer.

    Args:
      rules: a recipe for all layers, or {path pattern: recipe or None}; the first match applies.
      specs: PartitionSpecs of x, w and result: `train.Specs` for all layers, or {path pattern: Specs or None}.
      overlap: mesh axes along which collectives overlap with matmuls.
      on_indivisible: for a sharding that would cut blocks, "raise" an error, or "gather" that axis first.
      residual_name: the `checkpoint_name` of residuals, for a policy of jax.checkpoint; None for "scaledot_residual".

    >>> import jax.numpy as jnp
    >>> model = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(8)])
    >>> model = with_recipe(model, {"layers_0": "mxfp8", "*": None})
    >>> variables = model.init(jax.random.key(0), jnp.ones((2, 32)))
    >>> model.apply(variables, jnp.ones((2, 32))).shape
    (2, 8)
    """
    return WithRecipe(model, rules, specs, overlap, on_indivisible, residual_name)


def explain(model: InterceptedModel, *args, **kwargs) -> str:
    """A table of the layers of a model that multiply by a kernel: the recipe of each, or why it has none.

    Nothing is computed. Other arguments are those of `model.init` after the key: arrays or ShapeDtypeStructs.

    >>> import jax.numpy as jnp
    >>> model = nn.Sequential([nn.Conv(8, (3,)), nn.ConvTranspose(8, (3,)), nn.Dense(8)])
    >>> print(explain(with_recipe(model, {"layers_1": None, "*": "mxfp8"}), jnp.ones((2, 16, 32))))
    layers_0  Conv           mxfp8
    layers_1  ConvTranspose  none: its rule is None
    layers_2  Dense          mxfp8

    For a model of `with_quantized_params`, arguments are those of `model.apply`, and the table has the format and block
    of each kernel, its bytes before and after, and the kernel that computes the matmul on this machine; or why a kernel
    is not quantised.

    >>> model, x = nn.Sequential([nn.Dense(8), nn.Dense(8)]), jnp.ones((2, 32))
    >>> params = model.init(jax.random.key(0), x)["params"]
    >>> params = quantize_params(model, params, {"layers_0": "mxfp8", "*": None}, x)
    >>> print(explain(with_quantized_params(model), {"params": params}, x))
    layers_0  Dense  mxfp8  blocks (32, 1)  1024 -> 264 bytes  xla_codes
    layers_1  Dense  none: its kernel is float32[8,8]
    """
    if not isinstance(model, InterceptedModel):
        raise TypeError(f"`model` must be one of `with_recipe` or `with_quantized_params`, not {type(model).__name__}")
    return model._explain(*args, **kwargs)
