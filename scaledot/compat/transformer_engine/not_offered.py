"""Names of TransformerEngine that are not here, and what to write instead."""

import dis
import importlib
import sys
import types
from collections.abc import Callable

_LAYER = "use a layer of Flax and give it a recipe: flax.make_dot_general_cls(recipe), or scaledot.linen.with_recipe"
_FACTORY = "write QuantizerFactory.create(scaling_mode=..., q_dtype=..., q_layout=...)"
_RECIPE = (
    "a recipe is an argument here: flax.make_dot_general_cls(recipe), or scaledot.linen.with_recipe(model, recipe)"
)
_ATTENTION = "use jax.nn.dot_product_attention"

INSTEAD = {
    "autocast": _RECIPE,
    "fp8_autocast": _RECIPE,
    "update_collections": "train with Flax's TrainState, which replaces `_overwrite_with_gradient` by its gradient",
    "get_delayed_scaling": _RECIPE,
    "CustomRecipe": "a scaledot.Recipe of Gemms and Casts is given wherever a recipe is",
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
    "extend_logical_axis_rules": "give rules to flax.linen.logical_axis_rules; global_shard_guard names mesh axes",
    "layernorm_dense": "normalise, then call dense",
    "layernorm_mlp": "normalise, then call dense twice",
    "CurrentScaleQuantizer": _FACTORY,
    "DelayedScaleQuantizer": _FACTORY,
    "BlockScaleQuantizer": _FACTORY,
    "NVFP4Quantizer": _FACTORY,
    "GroupedQuantizer": _FACTORY + " with n_groups=",
    "grouped_gemm": "write grouped_dense, or scaledot.ragged_dot of arrays",
    "GroupedNoScaleTensor": "give the plain array to grouped_dense",
    "AmaxScope": "scales are those of whole arrays, however they are sharded",
    "collective_gemm_bootstrap": "nothing needs to be started: collectives are JAX's own",
}


def refuse(module: str, on_demand: tuple[str, ...] = ()) -> Callable[[str], object]:
    """Returns a `__getattr__` for a module: it imports submodules `on_demand` and raises what INSTEAD says of a name.

    `module.name` raises AttributeError, as hasattr needs. `from module import name` raises ImportError, because Python
    replaces an AttributeError there by an ImportError of its own, without our message.
    """

    def getattr_(name: str) -> object:
        if name in on_demand:
            return importlib.import_module(f"{module}.{name}")
        if name not in INSTEAD:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        message = f"TransformerEngine's {name!r} is not offered: {INSTEAD[name]}"
        if _executes_from_import(sys._getframe(1)):
            raise ImportError(message)
        raise AttributeError(message)

    return getattr_


def _executes_from_import(frame: types.FrameType) -> bool:
    """Whether the frame's current instruction is that of `from module import name`.

    Nothing else tells the two accesses apart: `__getattr__` gets the name alone, and no class can derive from both
    AttributeError and ImportError.
    """
    return frame.f_code.co_code[frame.f_lasti] == dis.opmap["IMPORT_FROM"]
