"""Recipes in Flax NNX: matmuls as modules, layers with a `recipe` argument, and in-place conversion of models.

    model = sd.nnx.with_recipe(model, "fp8_delayed")          # every Linear, LinearGeneral, Einsum and Conv of a model
    print(sd.nnx.explain(model))                              # the recipe of each layer, or why it has none
    layer = sd.nnx.Linear(64, 32, recipe="mxfp8", rngs=rngs)  # or layer by layer
    model = sd.nnx.quantize_params(model, "int4")             # inference with quantised kernels

The state of delayed scaling is in Variables of type `ScalingState`, which optimizers over nnx.Param ignore. It is
differentiated together with the parameters, and its gradient is its next value; `apply_gradients` updates both:

    grads = nnx.grad(loss, argnums=nnx.DiffState(0, sd.nnx.TRAINED))(model, batch)
    sd.nnx.apply_gradients(model, optimizer, grads)

`nnx.grad(loss)(model)`, with respect to the parameters alone, raises: histories would stay empty. Inside jit, a forward
pass with a history that was never trained cannot be detected.

Stochastic rounding draws keys from the stream `sr_rng` of the `rngs` that a module was constructed with, or from their
default stream, except after `model.eval()`.

Weights can be cast once for several micro-batches; `attach` takes the State of the Params:

    graphdef, params, others = nnx.split(model, nnx.Param, ...)
    cast = sd.train.cast_weights(params, recipe)
    def loss(params, others, batch):
        return loss_of(nnx.merge(graphdef, cast.attach(params), others), batch)

On a mesh, `specs` has the PartitionSpecs of x, w and the result of a layer, and `overlap` the mesh axes along which
collectives overlap with matmuls, as in `scaledot.train.dot_general`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

try:
    from flax import nnx
except ModuleNotFoundError as error:
    raise ImportError("scaledot.nnx needs Flax, which is not installed: pip install 'scaledot[flax]'") from error
from flax.errors import TraceContextError

from scaledot import train
from scaledot.flax_hooks import MatmulUnderRecipe
from scaledot.flax_hooks.nnx import NO_HOOK, WITHOUT_HOOK, hook_of, multiplying, promote_dtype, promotes_itself
from scaledot.inference.nnx import quantize_params, quantized_layers
from scaledot.path_patterns import Layer, PathPatterns, RecipesByPath, Rules, table, warn_of_overlooked
from scaledot.recipes import Recipe, find_recipe
from scaledot.state import TENSOR_NAMES, AmaxHistory, State, check_state, init_state, merge_named
from scaledot.train.conv import groups_reason

__all__ = [
    "TRAINED",
    "Conv",
    "ConvGeneralDilated",
    "DotGeneral",
    "Einsum",
    "EinsumOp",
    "GroupedDense",
    "Linear",
    "LinearGeneral",
    "OnMesh",
    "Quantized",
    "ScalingState",
    "apply_gradients",
    "explain",
    "merge_states",
    "promote_dtype",
    "quantize_params",
    "with_recipe",
]

KEY_STREAM = "sr_rng"


class ScalingState(nnx.Variable):
    """An amax history or a quantisation multiplier of delayed scaling; its gradient is its next value."""


TRAINED = nnx.Any(nnx.Param, ScalingState)  # the filter of Variables to differentiate with respect to


class Quantized(nnx.Module, MatmulUnderRecipe):
    """Base class of matmuls under a recipe, with the state of delayed scaling and the rng stream that these need.

    residual_name: the `checkpoint_name` of residuals, as in `scaledot.train.dot_general`.
    """

    def __init__(self, recipe: str | Recipe, *, rngs: nnx.Rngs | None = None, residual_name: str | None = None):
        self.recipe = find_recipe(recipe)
        self.residual_name = residual_name
        self.deterministic = False  # model.eval() sets it: keys are drawn only if fwd needs them
        self.keys = nnx.data(rngs[KEY_STREAM].fork() if rngs is not None and self.recipe.stochastic else None)
        for tensor, (history, multiplier) in init_state(self.recipe).items():
            setattr(self, f"{TENSOR_NAMES[tensor]}_amax_history", ScalingState(history))
            setattr(self, f"{TENSOR_NAMES[tensor]}_scale", ScalingState(multiplier.reshape(1)))

    def under_recipe(self, function: Callable[..., Any], *args, **kwargs) -> jax.Array:
        """Calls a function of `scaledot.train` with the recipe, the state and a key of this module."""
        kwargs["residual_name"] = self.residual_name
        forward_needs_key = any(cast.endswith("of fwd") for cast in self.recipe.stochastic)
        if self.keys is not None and (forward_needs_key or not self.deterministic):
            kwargs["key"] = self.keys()
        if not self.recipe.delayed:
            return function(*args, recipe=self.recipe, **kwargs)
        state = {t: AmaxHistory(*(v[...] for v in self._variables(t))) for t in self.recipe.delayed}
        check_state(self.recipe, state, type(self).__name__)
        y, state = function(*args, recipe=self.recipe, state=state, **kwargs)
        self._leave(state)
        return y

    def _variables(self, tensor: str) -> tuple[ScalingState, ScalingState]:
        return getattr(self, f"{TENSOR_NAMES[tensor]}_amax_history"), getattr(self, f"{TENSOR_NAMES[tensor]}_scale")

    def _leave(self, state: State) -> None:
        """Stores the state for the next call of this module."""
        try:
            for tensor, history in state.items():
                for variable, value in zip(self._variables(tensor), history, strict=True):
                    variable[...] = value
        except TraceContextError:
            # A transform cannot write to a model that it closes over: calls inside it are not merged.
            pass


class OnMesh(Quantized):
    """Base class of matmuls under a recipe with shardings of operands and result."""

    def __init__(
        self,
        recipe: str | Recipe,
        *,
        rngs: nnx.Rngs | None = None,
        specs: train.Specs | None = None,
        overlap: str | tuple[str, ...] = (),
        on_indivisible: str = "raise",
        residual_name: str | None = None,
    ):
        super().__init__(recipe, rngs=rngs, residual_name=residual_name)
        self.mesh_arguments = nnx.static({"specs": specs, "overlap": overlap, "on_indivisible": on_indivisible})


class DotGeneral(OnMesh):
    """`jax.lax.dot_general` under a recipe, as nnx.Linear and nnx.LinearGeneral call it."""

    def __call__(self, x, w, dimension_numbers, precision=None, preferred_element_type=None, out_sharding=None):
        arguments = dimension_numbers, precision, preferred_element_type
        return self.under_recipe(train.dot_general, x, w, *arguments, out_sharding=out_sharding, **self.mesh_arguments)


class EinsumOp(OnMesh):
    """`jnp.einsum` of an input and a kernel under a recipe, as nnx.Einsum calls it."""

    def __call__(self, subscripts, x, w, *, precision=None, preferred_element_type=None, out_sharding=None):
        keywords = {"preferred_element_type": preferred_element_type, "out_sharding": out_sharding}
        return self.under_recipe(train.einsum, subscripts, x, w, precision=precision, **keywords, **self.mesh_arguments)


class ConvGeneralDilated(OnMesh):
    """`jax.lax.conv_general_dilated` under a recipe, as nnx.Conv calls it; `overlap` is ignored."""

    def __call__(self, x, w, window_strides, padding, *, out_sharding=None, **window):
        keywords = {name: value for name, value in self.mesh_arguments.items() if name != "overlap"}
        keywords["out_sharding"] = out_sharding
        return self.under_recipe(train.conv_general_dilated, x, w, window_strides, padding, **window, **keywords)


class GroupedDense(Quantized):
    """`train.ragged_dot` under a recipe: x (rows, k), kernel (groups, k, n), group_sizes (groups,) -> (rows, n).

    specs: the PartitionSpecs of x, kernel and result.
    """

    def __init__(
        self,
        recipe: str | Recipe,
        *,
        rngs: nnx.Rngs | None = None,
        specs: train.Specs | None = None,
        residual_name: str | None = None,
    ):
        super().__init__(recipe, rngs=rngs, residual_name=residual_name)
        self.specs = specs

    def __call__(
        self, x, kernel, group_sizes, bias=None, precision=None, preferred_element_type=None, out_sharding=None
    ):
        keywords = {"out_sharding": out_sharding, "specs": self.specs}
        return self.under_recipe(
            train.ragged_dot, x, kernel, group_sizes, bias, precision, preferred_element_type, **keywords
        )


class _WithDotGeneral:
    """Mixin: the constructor of layers whose matmul is a `DotGeneral`."""

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
        dot_general = DotGeneral(recipe, rngs=rngs, specs=specs, overlap=overlap, on_indivisible=on_indivisible)
        options = {"promote_dtype": promote_dtype, **options}
        layer: Any = super()  # nnx.Linear or nnx.LinearGeneral
        layer.__init__(in_features, out_features, rngs=rngs, dot_general=dot_general, **options)


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
        einsum_op = EinsumOp(recipe, rngs=rngs, specs=specs, overlap=overlap, on_indivisible=on_indivisible)
        options = {"promote_dtype": promote_dtype, **options}
        super().__init__(einsum_str, kernel_shape, bias_shape, rngs=rngs, einsum_op=einsum_op, **options)


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
        conv = ConvGeneralDilated(recipe, rngs=rngs, specs=specs, on_indivisible=on_indivisible)
        super().__init__(in_features, out_features, kernel_size, rngs=rngs, conv_general_dilated=conv, **options)


_MATMULS = {"dot_general": DotGeneral, "einsum_op": EinsumOp, "conv_general_dilated": ConvGeneralDilated}


def with_recipe(
    model: nnx.Module,
    rules: Rules,
    *,
    rngs: nnx.Rngs | None = None,
    specs: train.SpecsByPath = None,
    overlap: str | tuple[str, ...] = (),
    on_indivisible: str = "raise",
    residual_name: str | None = None,
) -> nnx.Module:
    """Sets the recipes of a model's Linear, LinearGeneral, Einsum and Conv layers in place, and returns the model.

    Layers with a matmul of their own keep it. Layers that do not support the recipe of their rule, such as
    ConvTranspose, stay unquantised, with a warning that names them; `explain` lists the recipe of each layer. Layers
    that are stacked for nnx.scan have a state each only if they are constructed with a recipe, inside nnx.vmap.

    Args:
      rules: a recipe for all layers, or {path pattern: recipe or None}; the first match applies.
      rngs: for recipes with stochastic rounding: keys are drawn from its stream `sr_rng`, or its default stream.
      specs: PartitionSpecs of x, w and result: `train.Specs` for all layers, or {path pattern: Specs or None}.
      overlap: mesh axes along which collectives overlap with matmuls.
      on_indivisible: for a sharding that would cut blocks, "raise" an error, or "gather" that axis first.
      residual_name: the `checkpoint_name` of residuals, for a policy of jax.checkpoint; None for "scaledot_residual".

    >>> model = nnx.Sequential(nnx.Linear(32, 32, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(32, 8, rngs=nnx.Rngs(1)))
    >>> model = with_recipe(model, {"layers/0": "mxfp8", "*": None})
    >>> model(jax.numpy.ones((2, 32))).shape
    (2, 8)
    """
    recipes, specs_by_path = RecipesByPath(rules), PathPatterns(specs, "specs")
    for path, layer in multiplying(model):
        hook = hook_of(layer)
        own = hook.attribute if hook is not None and hook.holds_other(layer) else None
        recipe = recipes.decide(path, type(layer).__name__, own, functools.partial(_obstacle, layer))
        if recipe is not None and hook is not None:
            options: dict[str, Any] = {"specs": specs_by_path.value_for(path), "overlap": overlap}
            options |= {"on_indivisible": on_indivisible, "residual_name": residual_name}
            matmul = _MATMULS[hook.attribute](recipe, rngs=rngs, **options)
            setattr(layer, hook.attribute, nnx.data(matmul))
            if not promotes_itself(layer):
                setattr(layer, "promote_dtype", promote_dtype)  # noqa: B010  (not a field of every layer)
    recipes.check_all_matched()
    specs_by_path.check_all_matched()
    warn_of_overlooked(recipes.layers, stacklevel=2)
    return model


def explain(model: nnx.Module, *args, **kwargs) -> str:
    """A table of the layers of a model that multiply by a kernel: the recipe of each, or why it has none.

    Of layers that `quantize_params` quantised, it has the format and block of the kernel, and its bytes before and
    after. With the arguments of a call of the model, arrays or ShapeDtypeStructs, it also has the kernel that computes
    the matmul on this machine; nothing is computed.

    >>> layers = [nnx.Linear(32, 32, rngs=nnx.Rngs(i)) for i in range(3)]
    >>> model = with_recipe(nnx.Sequential(*layers), {"layers/0": "mxfp8", "*": None})
    >>> model = quantize_params(model, {"layers/1": "int8", "*": None})
    >>> print(explain(model, jax.numpy.ones((2, 32))))
    layers/0  Linear  mxfp8
    layers/1  Linear  int8   blocks (0, 1)  4096 -> 1152 bytes  xla_codes
    layers/2  Linear  none: neither a recipe nor quantised weights
    """
    quantized = quantized_layers(model, args, kwargs)
    return table({path: quantized.get(path) or _layer(layer) for path, layer in multiplying(model)})


def _obstacle(layer: nnx.Module, recipe: Recipe) -> str | None:
    """Why a layer does not support a recipe; None if it does."""
    if isinstance(layer, WITHOUT_HOOK):
        return NO_HOOK
    if isinstance(layer, nnx.Conv):
        groups = layer.feature_group_count
        return groups_reason(recipe, groups, layer.in_features // groups, layer.out_features // groups)
    return None


def _layer(layer: nnx.Module) -> Layer:
    """The row of `explain` for a layer."""
    type_name, hook = type(layer).__name__, hook_of(layer)
    if hook is None:
        return Layer(type_name, None, NO_HOOK)
    matmul = getattr(layer, hook.attribute)
    if isinstance(matmul, Quantized):
        return Layer(type_name, matmul.recipe)
    replaced = f"it has a {hook.attribute} of its own"
    return Layer(type_name, None, replaced if hook.holds_other(layer) else "neither a recipe nor quantised weights")


def apply_gradients(model: nnx.Module, optimizer: nnx.Optimizer, grads: nnx.State) -> None:
    """Updates parameters by the optimizer, and overwrites scaling states with their gradients."""
    states, param_grads = nnx.split_state(grads, ScalingState, ...)
    optimizer.update(model, param_grads)
    nnx.update(model, states)


def merge_states(*states: nnx.State) -> nnx.State:
    """Merges the ScalingStates of several gradient calls; see `scaledot.state.merge`."""
    first, *_ = flat = [dict(nnx.to_flat_state(state)) for state in states]
    values = merge_named(*({path: leaf[...] for path, leaf in one.items()} for one in flat))
    return nnx.from_flat_state([(path, leaf.replace(values[path])) for path, leaf in first.items()])
