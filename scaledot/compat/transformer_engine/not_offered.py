"""Names of TransformerEngine that are not here, and what to write instead."""

import dis
import importlib
import sys
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
    """A module's `__getattr__`, which loads submodules on demand and says what to write instead of other names.

    Python replaces the words of an AttributeError by its own where a name is imported from a module, but not those of
    an ImportError; so the kind depends on the instruction that asks.
    """

    def getattr_(name: str) -> object:
        if name in on_demand:
            return importlib.import_module(f"{module}.{name}")
        if name not in INSTEAD:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        asking = sys._getframe(1)
        imports = dis.opname[asking.f_code.co_code[asking.f_lasti]] == "IMPORT_FROM"
        raise (ImportError if imports else AttributeError)(
            f"TransformerEngine's {name!r} is not offered: {INSTEAD[name]}"
        )

    return getattr_
