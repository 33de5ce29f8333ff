"""TransformerEngine's names that scaledot does not provide, with their replacements, and the errors that name them."""

import functools

from scaledot.compat import hints

LAYER = (
    "compose it of flax.LayerNormDenseGeneral, jax.nn.dot_product_attention and flax.LayerNormMLP, or use a Flax model "
    "with scaledot.linen.with_recipe(model, recipe)"
)
_FACTORY = "use QuantizerFactory.create(scaling_mode=..., q_dtype=..., q_layout=...)"
ATTENTION = "use jax.nn.dot_product_attention"
SOFTMAX = "use jax.nn.softmax with `where` for the mask"

INSTEAD = {
    "get_delayed_scaling": "use get_global_quantize_recipe(), the recipe of `autocast`",
    "CustomRecipe": "pass a scaledot.Recipe of Gemms and Casts as the recipe",
    "Dense": "use flax.DenseGeneral",
    "Softmax": SOFTMAX,
    "TransformerLayer": LAYER,
    "MultiHeadAttention": LAYER,
    "DotProductAttention": ATTENTION,
    "RelativePositionBiases": ATTENTION,
    "extend_logical_axis_rules": "use flax.linen.logical_axis_rules, or global_shard_guard to name mesh axes",
    "CurrentScaleQuantizer": _FACTORY,
    "DelayedScaleQuantizer": _FACTORY,
    "BlockScaleQuantizer": _FACTORY,
    "NVFP4Quantizer": _FACTORY,
    "GroupedQuantizer": _FACTORY + " with n_groups=",
    "compute_scale_from_amax": "use `update` of a Quantizer, or scaledot.state.multiplier_from",
    "apply_padding_to_scale_inv": "scales are not padded",
    "remove_padding_from_scale_inv": "scales are not padded",
    "AmaxScope": "amax is that of the global array; for shards' own, pass a scaledot.Recipe with amax_scope='local'",
}

module_getattr = functools.partial(hints.module_getattr, "TransformerEngine", INSTEAD)
