"""TransformerEngine's names that scaledot does not provide, with their replacements, and the errors that name them."""

import dis
import importlib
import sys
import types
from collections.abc import Callable

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


def module_getattr(module: str, on_demand: tuple[str, ...] = (), others: str | None = None) -> Callable[[str], object]:
    """Returns a module's `__getattr__`, which imports submodules `on_demand` and raises for names in INSTEAD.

    others: the replacement of public names that are not in INSTEAD, for modules that provide nothing.
    `module.name` raises AttributeError, as hasattr requires. `from module import name` raises ImportError, because
    Python would replace an AttributeError by its own ImportError, without the replacement's name.
    """

    def getattr_(name: str) -> object:
        if name in on_demand:
            return importlib.import_module(f"{module}.{name}")
        instead = INSTEAD.get(name, None if name.startswith("_") else others)
        if instead is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        message = f"TransformerEngine's {name!r} is not provided: {instead}"
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
