"""Names of TransformerEngine that are not here, and what to write instead."""

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
    "collective_gemm_bootstrap": "nothing needs to be started: collectives are JAX's own",
}


def refuse(module: str) -> Callable[[str], object]:
    """A module's `__getattr__`."""

    def getattr_(name: str) -> object:
        if name in INSTEAD:
            raise AttributeError(f"TransformerEngine's {name!r} is not offered: {INSTEAD[name]}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return getattr_
