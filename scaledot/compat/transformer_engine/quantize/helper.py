"""autocast, which gives modules without a recipe one, and queries about recipes and scaling modes.

    with te.autocast(enabled=True, recipe=MXFP8BlockScaling()):
        variables = model.init(key, x)              # a model of compat.transformer_engine.flax
        y = jax.jit(model.apply)(variables, x)

`autocast` only fills in the missing recipe of this package's modules (and of `QuantizerFactory.create_set`) while they
are traced; a recipe that is passed as an argument takes precedence, and layers of other libraries are not affected.
"""

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from scaledot.compat.transformer_engine import recipe as recipe_classes
from scaledot.compat.transformer_engine.quantize.amax_compute_algo import AmaxComputeAlgo
from scaledot.compat.transformer_engine.quantize.config import (
    NVTE_FP8_COLLECTION_NAME,
    TensorSource,
    get_quantize_config_with_recipe,
)
from scaledot.compat.transformer_engine.quantize.global_recipe import get_global_quantize_recipe, recipe_context
from scaledot.compat.transformer_engine.quantize.scaling_modes import ScalingMode, is_scaling_mode_supported
from scaledot.compat.transformer_engine.recipe import DelayedScaling, Recipe, core_recipe
from scaledot.compat.transformer_engine.sharding import MeshResource, global_shard_guard
from scaledot.compat.transformer_engine.unsupported import module_getattr

_RECIPES = {
    cls.__name__: cls
    for cls in (
        DelayedScaling,
        recipe_classes.Float8CurrentScaling,
        recipe_classes.MXFP8BlockScaling,
        recipe_classes.NVFP4BlockScaling,
        recipe_classes.Float8BlockScaling,
    )
}


@contextlib.contextmanager
def autocast(enabled: bool = False, recipe: Any = None, mesh_resource: MeshResource | None = None) -> Iterator[None]:
    """Context manager that gives modules without a recipe one; functions under jit are traced once per recipe.

    Args:
      enabled: False leaves modules without a recipe unquantised, also inside another `autocast`.
      recipe: DelayedScaling() if None.
      mesh_resource: as in `global_shard_guard`; None keeps the current one.

    >>> import jax, jax.numpy as jnp
    >>> from scaledot.compat.transformer_engine.flax import DenseGeneral
    >>> x, layer = jnp.ones((2, 32)), DenseGeneral(features=4)
    >>> with autocast(enabled=True, recipe="fp8_delayed"):
    ...     variables = layer.init(jax.random.key(0), x)
    >>> sorted(variables["_overwrite_with_gradient"])[:2]
    ['grad_amax_history', 'grad_scale']
    """
    recipe = DelayedScaling() if recipe is None else recipe
    core_recipe(recipe)  # raises unless it is a recipe
    guard = contextlib.nullcontext() if mesh_resource is None else global_shard_guard(mesh_resource)
    with guard, recipe_context(recipe if enabled else None):
        yield


@contextlib.contextmanager
def fp8_autocast(
    enabled: bool = False, fp8_recipe: Any = None, mesh_resource: MeshResource | None = None
) -> Iterator[None]:
    """`autocast` under its deprecated name.

    >>> with warnings.catch_warnings(action="ignore"), fp8_autocast(enabled=True):
    ...     print(get_global_quantize_recipe().amax_history_len)
    1024
    """
    warnings.warn("fp8_autocast is deprecated; use autocast(enabled, recipe)", DeprecationWarning, stacklevel=3)
    with autocast(enabled, fp8_recipe, mesh_resource):
        yield


def get_quantization_recipe(name: str) -> Recipe:
    """Returns the recipe of a class name, with default options.

    >>> get_quantization_recipe("MXFP8BlockScaling") == recipe_classes.MXFP8BlockScaling()
    True
    """
    if name not in _RECIPES:
        raise ValueError(f"`name` must be one of {', '.join(_RECIPES)}, not {name!r}")
    return _RECIPES[name]()


def is_quantize_recipe_supported(recipe_name: str) -> tuple[bool, str]:
    """Returns (supported, reason if not) for a class name; every recipe runs on every device.

    >>> is_quantize_recipe_supported("NVFP4BlockScaling")
    (True, '')
    """
    return get_quantize_config_with_recipe(get_quantization_recipe(recipe_name)).is_supported()


def is_fp8_available(
    scaling_mode: ScalingMode = ScalingMode.DELAYED_TENSOR_SCALING, gpu_id: int | None = None
) -> tuple[bool, str]:
    """`is_scaling_mode_supported` under its deprecated name.

    >>> with warnings.catch_warnings(action="ignore"):
    ...     is_fp8_available()
    (True, '')
    """
    warnings.warn("is_fp8_available is deprecated; use is_scaling_mode_supported", DeprecationWarning, stacklevel=2)
    return is_scaling_mode_supported(scaling_mode, gpu_id)


def get_supported_scaling_modes() -> list[ScalingMode]:
    """Returns all scaling modes except NO_SCALING; every device supports them.

    They include FP8_1D_BLOCK_SCALING and FP8_2D_BLOCK_SCALING, which TransformerEngine's JAX API does not have; all
    functions that take a mode or a quantizer accept these two as well.

    >>> ScalingMode.NVFP4_1D_SCALING in get_supported_scaling_modes()
    True
    """
    return [mode for mode in ScalingMode if mode is not ScalingMode.NO_SCALING]


def get_supported_quantization_recipes() -> list[Recipe]:
    """Returns a recipe of each class, with default options; every device supports them.

    They include Float8BlockScaling, which TransformerEngine supports in PyTorch only; all functions and modules that
    take a recipe accept it.

    >>> [type(recipe).__name__ for recipe in get_supported_quantization_recipes()][:2]
    ['DelayedScaling', 'Float8CurrentScaling']
    """
    return [cls() for cls in _RECIPES.values()]


def update_collections(new: Mapping[str, Any], original: Mapping[str, Any]) -> Any:
    """Returns `original`, a dict or FrozenDict of collections, with the collections of `new` added or replaced.

    >>> update_collections({"params": 2}, {"params": 1, "cache": 0})
    {'params': 2, 'cache': 0}
    """
    for name, collections in (("new", new), ("original", original)):
        if not isinstance(collections, Mapping):
            raise TypeError(f"`{name}` must be a dict or FrozenDict of collections, not {type(collections).__name__}")
    return type(original)({**original, **new})  # pyright: ignore[reportCallIssue]


__all__ = [
    "NVTE_FP8_COLLECTION_NAME",
    "AmaxComputeAlgo",
    "TensorSource",
    "autocast",
    "fp8_autocast",
    "get_global_quantize_recipe",
    "get_quantization_recipe",
    "get_quantize_config_with_recipe",
    "get_supported_quantization_recipes",
    "get_supported_scaling_modes",
    "is_fp8_available",
    "is_quantize_recipe_supported",
    "is_scaling_mode_supported",
    "update_collections",
]
__getattr__ = module_getattr(__name__)
