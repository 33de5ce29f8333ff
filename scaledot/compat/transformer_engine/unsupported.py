"""TransformerEngine's names that scaledot does not provide, with their replacements, and the errors that name them."""

import functools

from scaledot.compat import hints

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
    "grouped_gemm": "use grouped_dense, or scaledot.ragged_dot",
    "GroupedNoScaleTensor": "pass the unquantised array to grouped_dense",
    "AmaxScope": "amax is that of the global array; for shards' own, pass a scaledot.Recipe with amax_scope='local'",
    "collective_gemm_bootstrap": "no initialisation is needed: collectives are XLA's",
}

module_getattr = functools.partial(hints.module_getattr, "TransformerEngine", INSTEAD)
