"""The weights of a trained model as its forward pass quantises them, for serving and for checkpoints.

A model that was trained under a recipe multiplied by quantised weights in every forward pass. `forward_weights` returns
exactly these codes and scales, so that a served model computes what training computed.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from scaledot import state
from scaledot.array import ScaledArray
from scaledot.kernels.table import XLA_CAST
from scaledot.ops.operands import float_operand
from scaledot.path_patterns import PathPatterns, RecipesByPath, Rules
from scaledot.recipes import Recipe
from scaledot.state import AmaxHistory
from scaledot.train.casts import cast_of
from scaledot.train.resolved_cast import OperandDims, ResolvedCast
from scaledot.train.weights import KERNEL, keyed_leaves, unboxed

_DIMS = OperandDims("kn", "n", "k")  # a kernel (inputs, outputs) in fwd


def forward_weights(params: Any, recipe: Rules, *, dtype: Any = None, states: Any = None) -> Any:
    """`params` with a ScaledArray in place of each kernel: the operand w of fwd, bit for bit.

    Args:
      params: a pytree of parameters, such as linen's `params` or an `nnx.State` of Params. Leaves named "kernel" with
        two axes (inputs, outputs) are quantised.
      recipe: a Recipe, its name, or {path pattern of layers: recipe or None}, as in `linen.with_recipe`.
      dtype: the dtype in which layers compute, such as the `dtype` of nn.Dense; None for that of the parameters. Also
        {path pattern: dtype}.
      states: for delayed scaling of w, the states of all layers: {path of a layer: state}, or the collection
        "_overwrite_with_gradient" of linen.

    >>> import jax.numpy as jnp
    >>> forward_weights({"up": {"kernel": jnp.ones((64, 32)), "bias": jnp.ones(32)}}, "mxfp8")["up"]["kernel"]
    ScaledArray(mxfp8[64,32], block=(32, 1), dtype=float32)
    """
    recipes, dtypes = RecipesByPath(recipe), PathPatterns(dtype, "dtype")
    leaves, tree = keyed_leaves(params)
    results = []
    for path, leaf in leaves:
        layer, _, name = path.rpartition("/")
        chosen = recipes.recipe_for(layer) if name == KERNEL else None
        w = leaf if chosen is None else _forward_weight(path, unboxed(leaf), chosen, dtypes.value_for(layer), states)
        results.append(w)
    recipes.looked_up |= {path.rpartition("/")[0] for path, _ in leaves}
    recipes.check_all_matched()
    return tree.unflatten(results)


def _forward_weight(path: str, w: Any, recipe: Recipe, dtype: Any, states_of_layers: Any) -> ScaledArray | jax.Array:
    cast = cast_of(recipe, "fwd", "w")
    w = float_operand(w, path)
    if cast is None:
        return w
    if w.ndim != 2:
        raise ValueError(
            f"`{path}` has {w.ndim} axes; kernels of 2 axes (inputs, outputs) are quantised: map it to None"
        )
    if cast.rounding != "nearest":
        raise ValueError(
            f"{recipe.name} rounds w of fwd stochastically, differently in each step; map `{path}` to None"
        )
    multiplier = None
    if cast.delayed is not None:
        multiplier = state.multiplier_of(cast, _history(path, recipe, states_of_layers))
    w = w.astype(w.dtype if dtype is None else np.dtype(dtype))
    return ResolvedCast.on(cast, _DIMS).quantize(w, multiplier=multiplier, kernel=XLA_CAST.name)


def _history(path: str, recipe: Recipe, states_of_layers: Any) -> AmaxHistory:
    """The amax history of a kernel, from a state of this layer or the variables of linen."""
    layer = path.rpartition("/")[0]
    if isinstance(states_of_layers, Mapping) and isinstance(states_of_layers.get(layer), Mapping):
        own = states_of_layers[layer]
        if isinstance(own.get("w"), AmaxHistory):
            return own["w"]
    leaves = dict(keyed_leaves(states_of_layers)[0]) if states_of_layers is not None else {}
    prefix = f"{layer}/" if layer else ""
    for found, history in leaves.items():
        inner, _, name = found.removeprefix(prefix).rpartition("/")
        if found.startswith(prefix) and "/" not in inner and name == "kernel_amax_history":
            return AmaxHistory(unboxed(history), unboxed(leaves[found.replace("amax_history", "scale")]))
    raise ValueError(f"{recipe.name} scales w by its amax history; `states` has none for `{path}`")
