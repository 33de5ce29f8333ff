"""Recipes in Flax NNX: products that are modules, layers that take a recipe, and models converted in place.

    model = sd.nnx.with_recipe(model, "fp8_delayed")          # every Linear, LinearGeneral, Einsum and Conv of a model
    print(sd.nnx.explain(model))                              # which layers those are, and which stay as they are
    layer = sd.nnx.Linear(64, 32, recipe="mxfp8", rngs=rngs)  # or layer by layer

State of delayed scaling lives in Variables of type `ScalingState`, which no optimizer over nnx.Param sees. It is
differentiated together with the parameters, and its gradient is its next value; `apply_gradients` does both:

    grads = nnx.grad(loss, argnums=nnx.DiffState(0, sd.nnx.TRAINED))(model, batch)
    sd.nnx.apply_gradients(model, optimizer, grads)

`nnx.grad(loss)(model)`, with respect to the parameters alone, raises: histories would stay empty. A forward pass under
jit cannot tell a history that was never trained from one that was.

Stochastic rounding draws keys from the stream `sr_rng` of the `rngs` that a module was made with, or from their default
stream, except after `model.eval()`.

Weights can be cast once for several micro-batches; `attach` takes the State of the Params:

    graphdef, params, others = nnx.split(model, nnx.Param, ...)
    cast = sd.train.cast_weights(params, recipe)
    def loss(params, others, batch):
        return loss_of(nnx.merge(graphdef, cast.attach(params), others), batch)

On a mesh, `specs` says how x, w and the result of a layer lie, and `overlap` along which axes transfers overlap with
products, as in `scaledot.train.dot_general`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

try:
    from flax import nnx
except ModuleNotFoundError as error:
    raise ImportError("scaledot.nnx needs Flax, which is not installed: pip install 'scaledot[flax]'") from error
from flax.errors import TraceContextError
from flax.nnx.nn import dtypes

from scaledot import train
from scaledot.path_patterns import Given, Layer, PathPatterns, RecipesByPath, table, warn_of_overlooked
from scaledot.recipes import Recipe, find_recipe
from scaledot.state import TENSOR_NAMES, AmaxHistory, State, check_state, init_state, merge_named
from scaledot.train.conv import groups_reason
from scaledot.train.weight_codes import promote_around

KEY_STREAM = "sr_rng"


class ScalingState(nnx.Variable):
    """A history or a factor of delayed scaling; its gradient is its next value."""


TRAINED = nnx.Any(nnx.Param, ScalingState)  # what to differentiate with respect to


class Quantized(nnx.Module):
    """A product under a recipe; owns the state of delayed scaling and a stream of keys, where it needs them."""

    def __init__(self, recipe: str | Recipe, *, rngs: nnx.Rngs | None = None):
        self.recipe = find_recipe(recipe)
        self.deterministic = False  # model.eval() sets it: a forward pass draws no keys
        self.keys = nnx.data(rngs[KEY_STREAM].fork() if rngs is not None and self.recipe.stochastic else None)
        for tensor, (history, multiplier) in init_state(self.recipe).items():
            setattr(self, f"{TENSOR_NAMES[tensor]}_amax_history", ScalingState(history))
            setattr(self, f"{TENSOR_NAMES[tensor]}_scale", ScalingState(multiplier.reshape(1)))

    def under_recipe(self, verb: Callable[..., Any], *args, **kwargs) -> jax.Array:
        """The verb of `train`, with this module's state and key."""
        forward_needs_key = any(what.endswith("of fwd") for what in self.recipe.stochastic)
        if self.keys is not None and (forward_needs_key or not self.deterministic):
            kwargs["key"] = self.keys()
        if not self.recipe.delayed:
            return verb(*args, recipe=self.recipe, **kwargs)
        state = {t: AmaxHistory(*(v[...] for v in self._variables(t))) for t in self.recipe.delayed}
        check_state(self.recipe, state, type(self).__name__)
        y, state = verb(*args, recipe=self.recipe, state=state, **kwargs)
        self._leave(state)
        return y

    def _variables(self, tensor: str) -> tuple[ScalingState, ScalingState]:
        return getattr(self, f"{TENSOR_NAMES[tensor]}_amax_history"), getattr(self, f"{TENSOR_NAMES[tensor]}_scale")

    def _leave(self, state: State) -> None:
        """Hand the state on to the next use of this module."""
        try:
            for tensor, parts in state.items():
                for variable, value in zip(self._variables(tensor), parts, strict=True):
                    variable[...] = value
        except TraceContextError:
            # A model that a transform closes over can be read there and not written: uses inside are on their own.
            pass


class OnMesh(Quantized):
    """A product under a recipe that knows how its arrays lie."""

    def __init__(
        self,
        recipe: str | Recipe,
        *,
        rngs: nnx.Rngs | None = None,
        specs: train.Specs | None = None,
        overlap: str | tuple[str, ...] = (),
        on_indivisible: str = "raise",
    ):
        super().__init__(recipe, rngs=rngs)
        self.lying = nnx.static({"specs": specs, "overlap": overlap, "on_indivisible": on_indivisible})


class DotGeneral(OnMesh):
    """`jax.lax.dot_general` under a recipe, as nnx.Linear and nnx.LinearGeneral call it."""

    def __call__(self, x, w, dimension_numbers, precision=None, preferred_element_type=None, out_sharding=None):
        wanted = dimension_numbers, precision, preferred_element_type
        return self.under_recipe(train.dot_general, x, w, *wanted, out_sharding=out_sharding, **self.lying)


class EinsumOp(OnMesh):
    """`jnp.einsum` of an input and a kernel under a recipe, as nnx.Einsum calls it."""

    def __call__(self, subscripts, x, w, *, precision=None, preferred_element_type=None, out_sharding=None):
        wanted = {"preferred_element_type": preferred_element_type, "out_sharding": out_sharding}
        return self.under_recipe(train.einsum, subscripts, x, w, precision=precision, **wanted, **self.lying)


class ConvGeneralDilated(OnMesh):
    """`jax.lax.conv_general_dilated` under a recipe, as nnx.Conv calls it; `overlap` has no effect on it."""

    def __call__(self, x, w, window_strides, padding, *, out_sharding=None, **window):
        how = {name: value for name, value in self.lying.items() if name != "overlap"}
        how["out_sharding"] = out_sharding
        return self.under_recipe(train.conv_general_dilated, x, w, window_strides, padding, **window, **how)


class GroupedDense(Quantized):
    """Rows in groups, each times its own matrix: (rows, k), (groups, k, n), sizes -> (rows, n).

    specs: how they lie on a mesh, as in `train.ragged_dot`.
    """

    def __init__(self, recipe: str | Recipe, *, rngs: nnx.Rngs | None = None, specs: train.Specs | None = None):
        super().__init__(recipe, rngs=rngs)
        self.specs = specs

    def __call__(
        self, x, kernel, group_sizes, bias=None, precision=None, preferred_element_type=None, out_sharding=None
    ):
        how = {"out_sharding": out_sharding, "specs": self.specs}
        return self.under_recipe(
            train.ragged_dot, x, kernel, group_sizes, bias, precision, preferred_element_type, **how
        )


def promote_dtype(args: tuple, /, *, dtype=None, inexact=True) -> tuple:
    """NNX's own `promote_dtype` of arrays that lets a `train.CastWeight` pass.

    For layers whose parameters come from `train.CastWeights.attach`; `with_recipe` and the layers of this module set
    it. A weight that was cast from another dtype than the layer computes in is refused.
    """
    own = functools.partial(dtypes.promote_dtype, dtype=dtype, inexact=inexact)
    return tuple(promote_around(lambda arrays: own(tuple(arrays)), args))


class _WithDotGeneral:
    """The constructor of layers whose matmul is a `DotGeneral`."""

    def __init__(
        self,
        in_features,
        out_features,
        *,
        recipe: str | Recipe,
        rngs: nnx.Rngs,
        specs=None,
        overlap=(),
        on_indivisible="raise",
        **options,
    ):
        product = DotGeneral(recipe, rngs=rngs, specs=specs, overlap=overlap, on_indivisible=on_indivisible)
        options = {"promote_dtype": promote_dtype, **options}
        layer: Any = super()  # nnx.Linear or nnx.LinearGeneral
        layer.__init__(in_features, out_features, rngs=rngs, dot_general=product, **options)


class Linear(_WithDotGeneral, nnx.Linear):
    """nnx.Linear under a recipe.

    >>> layer = Linear(64, 32, recipe="mxfp8", rngs=nnx.Rngs(0))
    >>> layer(jax.numpy.ones((2, 64))).shape
    (2, 32)
    """


class LinearGeneral(_WithDotGeneral, nnx.LinearGeneral):
    """nnx.LinearGeneral under a recipe."""


class Einsum(nnx.Einsum):
    """nnx.Einsum under a recipe."""

    def __init__(
        self,
        einsum_str,
        kernel_shape,
        bias_shape=None,
        *,
        recipe: str | Recipe,
        rngs: nnx.Rngs,
        specs=None,
        overlap=(),
        on_indivisible="raise",
        **options,
    ):
        product = EinsumOp(recipe, rngs=rngs, specs=specs, overlap=overlap, on_indivisible=on_indivisible)
        options = {"promote_dtype": promote_dtype, **options}
        super().__init__(einsum_str, kernel_shape, bias_shape, rngs=rngs, einsum_op=product, **options)


class Conv(nnx.Conv):
    """nnx.Conv under a recipe."""

    def __init__(
        self,
        in_features,
        out_features,
        kernel_size,
        *,
        recipe: str | Recipe,
        rngs: nnx.Rngs,
        specs=None,
        on_indivisible="raise",
        **options,
    ):
        product = ConvGeneralDilated(recipe, rngs=rngs, specs=specs, on_indivisible=on_indivisible)
        super().__init__(in_features, out_features, kernel_size, rngs=rngs, conv_general_dilated=product, **options)


class Seam(NamedTuple):
    """The attribute of a kind of layer that holds its product, what Flax has there, and what is put there instead."""

    kind: type[nnx.Module]
    attribute: str
    plain: Any
    product: type[OnMesh]

    def holds_other(self, layer: nnx.Module) -> bool:
        """Whether a layer was given a product that is neither Flax's nor ours."""
        held = getattr(layer, self.attribute)
        return not isinstance(held, Quantized) and held not in (None, self.plain)


_SEAMS = (
    Seam(nnx.Linear, "dot_general", jax.lax.dot_general, DotGeneral),
    Seam(nnx.LinearGeneral, "dot_general", jax.lax.dot_general, DotGeneral),
    Seam(nnx.Einsum, "einsum_op", jax.numpy.einsum, EinsumOp),
    Seam(nnx.Conv, "conv_general_dilated", jax.lax.conv_general_dilated, ConvGeneralDilated),
)
_WITHOUT_SEAM, _NO_SEAM = (nnx.ConvTranspose, nnx.LoRA), "Flax has no hook for its contraction"


def with_recipe(
    model: nnx.Module,
    rules: Given,
    *,
    rngs: nnx.Rngs | None = None,
    specs: train.SpecsByPath = None,
    overlap: str | tuple[str, ...] = (),
    on_indivisible: str = "raise",
) -> nnx.Module:
    """The model itself, changed: its Linear, LinearGeneral, Einsum and Conv layers take the recipes of their rules.

    Layers that were given a product of their own keep it. Layers that cannot take the recipe that a rule gives them,
    such as ConvTranspose, stay as they are, and a warning names them; `explain` lists what each layer has. Layers that
    are stacked for nnx.scan have states of their own only if they are made with a recipe, inside nnx.vmap.

    Args:
      rules: a recipe for all of them, or {path pattern: recipe or None}, in which the first match decides.
      rngs: for recipes with stochastic rounding: where keys come from, of the stream `sr_rng` or the default one.
      specs: how x, w and results lie on a mesh: `train.Specs` for all layers, or {path pattern: Specs or None}.
      overlap: mesh axes along which transfers overlap with products.
      on_indivisible: what to do where devices would have parts of blocks: "raise", or "gather" that axis first.

    >>> model = nnx.Sequential(nnx.Linear(32, 32, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(32, 8, rngs=nnx.Rngs(1)))
    >>> model = with_recipe(model, {"layers/0": "mxfp8", "*": None})
    >>> model(jax.numpy.ones((2, 32))).shape
    (2, 8)
    """
    chosen, lying = RecipesByPath(rules), PathPatterns(specs, "specs")
    for path, layer in _multiplying(model):
        seam = _seam_of(layer)
        own = seam.attribute if seam is not None and seam.holds_other(layer) else None
        recipe = chosen.decide(path, type(layer).__name__, own, functools.partial(_obstacle, layer))
        if recipe is not None and seam is not None:
            on_mesh: dict[str, Any] = {"specs": lying.value_for(path), "overlap": overlap}
            product = seam.product(recipe, rngs=rngs, on_indivisible=on_indivisible, **on_mesh)
            setattr(layer, seam.attribute, nnx.data(product))
            if getattr(layer, "promote_dtype", None) is dtypes.promote_dtype:
                setattr(layer, "promote_dtype", promote_dtype)  # noqa: B010  (not a field of every layer)
    chosen.check_all_matched()
    lying.check_all_matched()
    warn_of_overlooked(chosen.layers, stacklevel=2)
    return model


def explain(model: nnx.Module) -> str:
    """A table of the layers of a model that multiply by a kernel, and the recipe that each takes.

    >>> model = nnx.Sequential(nnx.Linear(32, 32, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(32, 8, rngs=nnx.Rngs(1)))
    >>> print(explain(with_recipe(model, {"layers/0": "mxfp8", "*": None})))
    layers/0  Linear  mxfp8
    layers/2  Linear  none: its dot_general is plain
    """
    return table({path: _layer(layer) for path, layer in _multiplying(model)})


def _multiplying(model: nnx.Module) -> list[tuple[str, nnx.Module]]:
    """The layers that multiply by a kernel, with their paths."""
    modules = list(nnx.iter_modules(model))
    kinds = (*(seam.kind for seam in _SEAMS), *_WITHOUT_SEAM)
    return [("/".join(map(str, path)), layer) for path, layer in modules if isinstance(layer, kinds)]


def _seam_of(layer: nnx.Module) -> Seam | None:
    return next((seam for seam in _SEAMS if isinstance(layer, seam.kind)), None)


def _obstacle(layer: nnx.Module, recipe: Recipe) -> str | None:
    """Why a layer cannot take a recipe."""
    if isinstance(layer, _WITHOUT_SEAM):
        return _NO_SEAM
    if isinstance(layer, nnx.Conv):
        groups = layer.feature_group_count
        return groups_reason(recipe, groups, layer.in_features // groups, layer.out_features // groups)
    return None


def _layer(layer: nnx.Module) -> Layer:
    """What a layer has now."""
    kind, seam = type(layer).__name__, _seam_of(layer)
    if seam is None:
        return Layer(kind, None, _NO_SEAM)
    product = getattr(layer, seam.attribute)
    if isinstance(product, Quantized):
        return Layer(kind, product.recipe)
    words = f"it has a {seam.attribute} of its own" if seam.holds_other(layer) else f"its {seam.attribute} is plain"
    return Layer(kind, None, words)


def apply_gradients(model: nnx.Module, optimizer: nnx.Optimizer, grads: nnx.State) -> None:
    """One step: the optimizer updates parameters, and scaling states become their gradients."""
    states, others = nnx.split_state(grads, ScalingState, ...)
    optimizer.update(model, others)
    nnx.update(model, states)


def merge_states(*states: nnx.State) -> nnx.State:
    """One state of the ScalingStates that several gradient calls gave; see `scaledot.state.merge`."""
    first, *_ = flat = [dict(nnx.to_flat_state(state)) for state in states]
    values = merge_named(*({path: leaf[...] for path, leaf in one.items()} for one in flat))
    return nnx.from_flat_state([(path, leaf.replace(values[path])) for path, leaf in first.items()])
