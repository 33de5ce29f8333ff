"""Recipes of a MaxText model: its matmuls are created without one and get that of their path when the model exists.

MaxText asks its quantisation object for a matmul per layer without saying which layer it is for. When the model is
built, it calls `maybe_quantize_model`, where paths are known.
"""

import dataclasses
import functools
from typing import Any

import jax
from flax import nnx
from maxtext.layers import linears, moe, nnx_wrappers, quantizations  # pyright: ignore[reportMissingImports]
from maxtext.utils import max_logging  # pyright: ignore[reportMissingImports]

from scaledot.compat.maxtext.experts import ExpertsRecipe
from scaledot.compat.maxtext.matmuls import DotGeneral, ExpertEinsum
from scaledot.compat.maxtext.replaced import original
from scaledot.path_patterns import RecipesByPath, Rules, table, warn_of_overlooked
from scaledot.recipes import UNQUANTISED, Recipe
from scaledot.state import TENSOR_NAMES, init_state

EXPERT_MATMULS = (moe.WI_0, moe.WI_1, moe.WO)


@dataclasses.dataclass(unsafe_hash=True)
class Quantization(quantizations.Fp8Quantization):
    """The matmuls that MaxText creates.

    Derived from Fp8Quantization, because MaxText creates the state of dense experts' einsums only for that class.
    """

    recipe: Recipe
    residual_name: str
    folds_data: bool
    needs_apply_rngs: bool = dataclasses.field(kw_only=True)  # a class variable in MaxText
    quantize_dtype = None  # Megablox would quantise the operands of sparse experts to it

    def dot_general_cls(self, mesh_axes: tuple[str, ...] = ()):
        return functools.partial(DotGeneral, self.recipe, **self._fields)

    def einsum(self, dtype=None, mesh_axes: tuple[str, ...] = ()):
        return ExpertEinsum(self.recipe, dtype=dtype, **self._fields)

    @property
    def _fields(self) -> dict[str, Any]:
        return {"residual_name": self.residual_name, "folds_data": self.folds_data}


class Settings:
    """The arguments of `install`, and the functions with which it replaces MaxText's."""

    def __init__(self, rules: Rules, residual_name: str):
        self.rules = rules
        self.residual_name = residual_name
        self._logged = ""

    def configure_quantization(self, config: Any, quant_mode_str: str = "train") -> Quantization:
        """The quantisation object of a model."""
        if config.quantization:
            chosen = getattr(config.quantization, "value", config.quantization)
            raise ValueError(
                f"`quantization` of MaxText is {chosen!r}, but scaledot.compat.maxtext.install has set the recipes; "
                "leave `quantization` empty"
            )
        if quant_mode_str != "train":
            raise ValueError(f"recipes are for training, but the model is built with quant_mode_str={quant_mode_str!r}")
        recipes = [recipe for recipe in RecipesByPath(self.rules).by_path.values() if recipe is not None]
        delayed = next((recipe for recipe in recipes if recipe.delayed), None)
        if delayed is not None:
            _check_delayed(delayed, recipes, config)
        stochastic = any(recipe.stochastic for recipe in recipes)
        return Quantization(
            delayed or UNQUANTISED,  # variables must be created while MaxText constructs a layer
            self.residual_name,
            folds_data=bool(config.scan_layers),
            needs_apply_rngs=stochastic,
        )

    def maybe_quantize_model(self, model: Any, config: Any) -> Any:
        """Sets the recipe of each layer of a new model, and logs them."""
        if not isinstance(model, nnx.Module):
            raise TypeError(f"recipes need MaxText's NNX models, and this one is of type {type(model).__name__}")
        recipes = RecipesByPath(self.rules)
        for path, node in list(nnx.iter_graph(model)):
            if _is_matmul(node):
                _set_recipe(node, recipes, path)
            elif isinstance(node, moe.RoutedMoE) and config.sparse_matmul:
                _set_sparse_experts(node, recipes, "/".join(map(str, path)), config, self.residual_name)
        recipes.check_all_matched()
        warn_of_overlooked(recipes.layers, stacklevel=2)
        self._log(table(dict(sorted(recipes.layers.items()))))
        return model

    def _log(self, recipes: str) -> None:
        """Logs the recipes of layers once, though MaxText builds a model several times."""
        if recipes != self._logged:
            max_logging.log(f"Recipes of layers:\n{recipes}")
        self._logged = recipes


def _check_delayed(delayed: Recipe, recipes: list[Recipe], config: Any) -> None:
    if config.gradient_accumulation_steps > 1:
        raise ValueError(
            f"{delayed.name} has delayed scaling, whose state MaxText does not differentiate with "
            f"gradient_accumulation_steps={config.gradient_accumulation_steps}: its amax histories would stay empty. "
            "Use a recipe without delayed scaling, such as 'fp8_current'"
        )
    other = next((r for r in recipes if r.delayed and _state_shapes(r) != _state_shapes(delayed)), None)
    if other is not None:
        raise ValueError(f"amax histories of {delayed.name} and {other.name} in one model must have equal lengths")


def _state_shapes(recipe: Recipe) -> Any:
    return jax.tree.map(jax.numpy.shape, init_state(recipe))


def _is_matmul(node: Any) -> bool:
    return isinstance(node, nnx_wrappers.ToNNX) and isinstance(node.to_nnx__module, (DotGeneral, ExpertEinsum))


def _set_recipe(node: Any, recipes: RecipesByPath, path: tuple[Any, ...]) -> None:
    """Sets the recipe of a matmul by the path of its layer; the state of layers without delayed scaling is deleted."""
    *layer, name = map(str, path)
    matmul = node.to_nnx__module
    recipe = None
    if isinstance(matmul, DotGeneral):
        recipe = recipes.decide("/".join(layer), "DenseGeneral", None, lambda _: None)
    elif name in EXPERT_MATMULS:  # others dispatch tokens by masks, and have no weight
        recipe = recipes.decide("/".join([*layer[:-1], name]), "RoutedMoE", None, lambda _: None)
    recipe = recipe or UNQUANTISED
    node.to_nnx__module = matmul.clone(recipe=recipe)
    if not recipe.delayed:
        _delete_state(node)
    if not recipe.stochastic:
        node.release_rngs()


def _delete_state(node: Any) -> None:
    for tensor in TENSOR_NAMES.values():
        for name in (f"{tensor}_scale", f"{tensor}_amax_history"):
            if name in vars(node):
                delattr(node, name)


def _set_sparse_experts(node: Any, recipes: RecipesByPath, path: str, config: Any, residual_name: str) -> None:
    """Sets the recipe of a layer whose experts are one grouped matmul each for wi_0, wi_1 and wo."""
    obstacle = functools.partial(_obstacle, config)
    decided = {name: recipes.decide(f"{path}/{name}", "RoutedMoE", None, obstacle) for name in EXPERT_MATMULS}
    if len(set(decided.values())) > 1:
        raise ValueError(f"`rules` must assign one recipe to wi_0, wi_1 and wo of the sparse experts of {path!r}")
    node.quant_einsums = None  # of dense experts
    recipe = next(iter(decided.values()))
    if recipe is not None:
        node.experts_recipe = nnx.static(ExpertsRecipe(recipe, residual_name))


def _obstacle(config: Any, recipe: Recipe) -> str | None:
    """Why sparse experts do not support a recipe; None if they do."""
    if recipe.delayed:
        return "sparse experts run inside a shard_map, which cannot return amax histories; use current scaling"
    if config.use_tokamax_gmm or not config.megablox:
        return "with megablox=false or use_tokamax_gmm=true MaxText calls a grouped matmul that cannot be replaced"
    return None


def compute_dot_general(
    inputs,
    kernel,
    axis,
    contract_ind,
    matmul_precision,
    quant_dot_general,
    initializing,
    out_sharding=None,
    **options,
):
    """MaxText's matmul of a layer, which also passes `out_sharding` (with shard_mode=explicit) to a matmul of ours."""
    if initializing or out_sharding is None or not _is_matmul(quant_dot_general):
        return original(linears, "_compute_dot_general_nnx")(
            inputs,
            kernel,
            axis,
            contract_ind,
            matmul_precision,
            quant_dot_general,
            initializing,
            out_sharding,
            **options,
        )
    ndim = inputs.ndim + kernel.ndim - len(axis) - len(contract_ind)
    sharding = linears.truncate_out_sharding(out_sharding, ndim)
    numbers = ((axis, contract_ind), ((), ()))
    return quant_dot_general(inputs, kernel, numbers, precision=None, out_sharding=sharding, mutable=["aqt"])
