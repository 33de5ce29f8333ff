"""TransformerEngine's names that scaledot does not provide, with their replacements, and the errors that name them."""

import dis
import importlib
import sys
import types
from collections.abc import Callable

_LAYER = "use a Flax layer with flax.make_dot_general_cls(recipe) or scaledot.linen.with_recipe(model, recipe)"
_FACTORY = "use QuantizerFactory.create(scaling_mode=..., q_dtype=..., q_layout=...)"
_RECIPE = (
    "pass the recipe as an argument: flax.make_dot_general_cls(recipe), or scaledot.linen.with_recipe(model, recipe)"
)
_ATTENTION = "use jax.nn.dot_product_attention"

INSTEAD = {
    "autocast": _RECIPE,
    "fp8_autocast": _RECIPE,
    "update_collections": "train with Flax's TrainState, which replaces `_overwrite_with_gradient` by its gradient",
    "get_delayed_scaling": _RECIPE,
    "CustomRecipe": "pass a scaledot.Recipe of Gemms and Casts as the recipe",
    "Dense": _LAYER,
    "DenseGeneral": _LAYER,
    "LayerNorm": "use flax.linen.LayerNorm or RMSNorm",
    "LayerNormDenseGeneral": _LAYER,
    "LayerNormMLP": _LAYER,
    "TransformerLayer": _LAYER,
    "TransformerEngineBase": _LAYER,
    "MultiHeadAttention": _LAYER,
    "DotProductAttention": _ATTENTION,
    "RelativePositionBiases": _ATTENTION,
    "extend_logical_axis_rules": "use flax.linen.logical_axis_rules, or global_shard_guard to name mesh axes",
    "layernorm_dense": "normalise, then call dense",
    "layernorm_mlp": "normalise, then call dense twice",
    "CurrentScaleQuantizer": _FACTORY,
    "DelayedScaleQuantizer": _FACTORY,
    "BlockScaleQuantizer": _FACTORY,
    "NVFP4Quantizer": _FACTORY,
    "GroupedQuantizer": _FACTORY + " with n_groups=",
    "compute_scale_from_amax": "use `update` of a Quantizer, or scaledot.state.multiplier_from",
    "apply_padding_to_scale_inv": "scales are not padded",
    "remove_padding_from_scale_inv": "scales are not padded",
    "AmaxScope": "amax is that of the global array; for shards' own, pass a scaledot.Recipe with amax_scope='local'",
    "collective_gemm_bootstrap": "no initialisation is needed: collectives are XLA's",
}


def module_getattr(module: str, on_demand: tuple[str, ...] = ()) -> Callable[[str], object]:
    """Returns a module's `__getattr__`, which imports submodules `on_demand` and raises for names in INSTEAD.

    `module.name` raises AttributeError, as hasattr requires. `from module import name` raises ImportError, because
    Python would replace an AttributeError by its own ImportError, without the replacement's name.
    """

    def getattr_(name: str) -> object:
        if name in on_demand:
            return importlib.import_module(f"{module}.{name}")
        if name not in INSTEAD:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        message = f"TransformerEngine's {name!r} is not provided: {INSTEAD[name]}"
        if _executes_from_import(sys._getframe(1)):
            raise ImportError(message)
        raise AttributeError(message)

    return getattr_


def _executes_from_import(frame: types.FrameType) -> bool:
    """Whether the frame's current instruction is IMPORT_FROM, that of `from module import name`.

    The instruction is the only way to tell the two accesses apart: `__getattr__` gets nothing but the name, and no
    class can derive from both AttributeError and ImportError.
    """
    return frame.f_code.co_code[frame.f_lasti] == dis.opmap["IMPORT_FROM"]
