"""The factory of quantizers and of sets of them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scaledot.compat.transformer_engine.quantize.quantizer import Quantizer
from scaledot.compat.transformer_engine.quantize.quantizer_set import QuantizerSet
from scaledot.compat.transformer_engine.quantize.scaling_modes import QuantizeLayout, ScalingMode
from scaledot.compat.transformer_engine.recipe import core_recipe
from scaledot.recipes import UNQUANTISED, Cast, Recipe

_CHANCE = "stochastic_rounding_rng_state"
_OPTIONS = {
    ScalingMode.DELAYED_TENSOR_SCALING: ("scale", "amax_history", "margin", "amax_compute_algo"),
    ScalingMode.NVFP4_1D_SCALING: (_CHANCE, "use_rht"),
    ScalingMode.NVFP4_2D_SCALING: (_CHANCE,),
}


class QuantizerFactory:
    """Quantizers by mode, and sets of them by mode or recipe.

    >>> quantizer = QuantizerFactory.create(1, ScalingMode.MXFP8_1D_SCALING, jnp.float8_e4m3fn, QuantizeLayout.ROWWISE)
    >>> quantizer.quantize(jnp.ones((2, 64))).scale_inv.shape
    (2, 2)
    """

    @staticmethod
    def create(
        n_quantizers: int = 1,
        scaling_mode: ScalingMode | None = None,
        q_dtype=None,
        q_layout: QuantizeLayout = QuantizeLayout.ROWWISE_COLWISE,
        n_groups: int | None = None,
        checkpoint_name: str | None = None,
        **options,
    ) -> Any:
        """One quantizer, or a tuple of them; None for NO_SCALING.

        options: `scale`, `amax_history`, `margin` and `amax_compute_algo` of delayed scaling,
        `stochastic_rounding_rng_state` and `use_rht` of NVFP4.

        >>> QuantizerFactory.create(2, ScalingMode.NO_SCALING)
        (None, None)
        """
        if not isinstance(scaling_mode, ScalingMode):
            raise TypeError(f"`scaling_mode` must be a ScalingMode, not {scaling_mode!r}")
        allowed = _OPTIONS.get(scaling_mode, ())
        unknown = [name for name in options if name not in allowed]
        if unknown:
            raise TypeError(
                f"{scaling_mode.name} has no option {unknown[0]!r}; it takes {', '.join(allowed) or 'none'}"
            )
        if not isinstance(q_layout, QuantizeLayout):
            raise TypeError(f"`q_layout` must be a QuantizeLayout, not {q_layout!r}")
        if scaling_mode is ScalingMode.NO_SCALING:
            made: list[Quantizer | None] = [None] * n_quantizers
        else:
            how = {"q_dtype": q_dtype, "scaling_mode": scaling_mode, "q_layout": q_layout, "n_groups": n_groups}
            how["checkpoint_name"] = checkpoint_name
            made = [_quantizer(**how, **_of_one(options, i)) for i in range(n_quantizers)]
        return made[0] if n_quantizers == 1 else tuple(made)

    @staticmethod
    def create_set(
        n_quantizer_sets: int = 1,
        scaling_mode: ScalingMode | None = None,
        fwd_dtype=None,
        bwd_dtype=None,
        is_2x2x: bool | None = None,
        n_groups: int | None = None,
        checkpoint_name: str | None = None,
        fp8_recipe: Any = None,
        stochastic_rounding_rng_state=None,
    ) -> Any:
        """One set of quantizers, or a tuple of them, by a mode and two dtypes or by a recipe.

        stochastic_rounding_rng_state: a key, for recipes that round by chance, new in each step.

        >>> mode, dtypes = ScalingMode.CURRENT_TENSOR_SCALING, (jnp.float8_e4m3fn, jnp.float8_e5m2)
        >>> QuantizerFactory.create_set(1, mode, *dtypes).dgrad.q_dtype
        dtype(float8_e5m2)
        """
        if scaling_mode is not None and fp8_recipe is not None:
            raise ValueError("give `scaling_mode` with its dtypes, or `fp8_recipe`, not both")
        layout = QuantizeLayout.ROWWISE if is_2x2x is False else QuantizeLayout.ROWWISE_COLWISE
        shared = {"q_layout": layout, "n_groups": n_groups, "checkpoint_name": checkpoint_name}
        if fp8_recipe is not None and (fwd_dtype is not None or bwd_dtype is not None):
            raise ValueError("`fp8_recipe` has dtypes of its own; leave `fwd_dtype` and `bwd_dtype` away")
        made = []
        for i in range(n_quantizer_sets):
            key = _own_key(stochastic_rounding_rng_state, i)
            if fp8_recipe is not None:
                made.append(set_of(core_recipe(fp8_recipe), key, shared))
            else:
                mode = ScalingMode.NO_SCALING if scaling_mode is None else scaling_mode
                made.append(_set_by_mode(mode, fwd_dtype, bwd_dtype, key, shared))
        return made[0] if n_quantizer_sets == 1 else tuple(made)


def _quantizer(q_dtype, scaling_mode: ScalingMode, **options) -> Quantizer:
    if q_dtype is None:
        dtypes = " or ".join(sorted(format.element for format in scaling_mode.formats))
        raise ValueError(f"`q_dtype` of {scaling_mode.name} must be given: {dtypes}")
    if options.get("format") is None:
        scaling_mode.format_of(q_dtype)  # raises unless the mode has codes of that dtype
    if scaling_mode.row.delayed:
        options.setdefault("scale", jnp.ones(1, jnp.float32))
        options.setdefault("amax_history", jnp.zeros(1024, jnp.float32))
    return Quantizer(q_dtype=np.dtype(q_dtype), scaling_mode=scaling_mode, **options)


def _set_by_mode(mode: ScalingMode, fwd_dtype, bwd_dtype, key, shared: dict[str, Any]) -> QuantizerSet:
    """x, kernel and gradient in one mode; a key rounds gradients by chance."""
    if key is not None and _CHANCE not in _OPTIONS.get(mode, ()):
        raise ValueError(f"{mode.name} rounds to nearest; leave `{_CHANCE}` away")
    create, chance = QuantizerFactory.create, {} if key is None else {_CHANCE: key}
    return QuantizerSet(
        create(1, mode, fwd_dtype, **shared),
        create(1, mode, fwd_dtype, **_of_kernel(mode, shared)),
        create(1, mode, bwd_dtype, **shared, **chance),
    )


def _of_kernel(mode: ScalingMode, shared: dict[str, Any]) -> dict[str, Any]:
    """Forward sums over the rows of a kernel: where only forward is served, its blocks run down them."""
    only_forward = shared["q_layout"] is QuantizeLayout.ROWWISE and mode.is_1d_block_scaling()
    return {**shared, "q_layout": QuantizeLayout.COLWISE} if only_forward else shared


def _of_one(options: dict[str, Any], index: int) -> dict[str, Any]:
    """The options of one quantizer of several."""
    return options | {_CHANCE: _own_key(options[_CHANCE], index)} if _CHANCE in options else options


def _own_key(state, index: int):
    """Another key for each index, from a JAX key or from numbers as theirs."""
    if state is None or index == 0:
        return state
    if jnp.issubdtype(state.dtype, jax.dtypes.prng_key) or state.shape == (2,):
        return jax.random.fold_in(state, index)
    return state.at[..., -1].add(index)


def set_of(recipe: Recipe, key, shared: dict[str, Any]) -> QuantizerSet:
    """The quantizers whose casts a recipe has; raises for a recipe that no three quantizers can say."""
    if recipe.dgrad is None or recipe.wgrad is None:
        raise ValueError(f"{recipe.name} is straight through in its backward pass, which quantizers cannot say")
    x, kernel, g = (
        _for_casts(recipe, row, column, key, shared)
        for row, column in (
            (recipe.fwd.lhs, recipe.wgrad.lhs),
            (recipe.fwd.rhs, recipe.dgrad.rhs),
            (recipe.dgrad.lhs, recipe.wgrad.rhs),
        )
    )
    if kernel is not None:
        kernel = dataclasses.replace(kernel, **_of_kernel(kernel.scaling_mode, shared))
    made = QuantizerSet(x, kernel, g)
    found = made.core or UNQUANTISED
    if recipe.stochastic and key is None:
        words = f"{recipe.name} rounds {', '.join(recipe.stochastic)} by chance"
        raise ValueError(f"{words}; give `{_CHANCE}`, a key that is new in each step")
    if dataclasses.replace(found, name=recipe.name) != recipe:
        raise ValueError(
            f"no set of quantizers has the casts of\n{recipe}\nuse `scaledot.train`, which takes the recipe"
        )
    return made


def _for_casts(recipe: Recipe, row: Cast | None, column: Cast | None, key, shared: dict[str, Any]) -> Quantizer | None:
    if row is None or column is None:
        return None
    options = dict(shared)
    if row.rounding == "stochastic":
        options[_CHANCE] = key
    if row.delayed is not None:
        options["amax_history"] = jnp.zeros(row.delayed.length, jnp.float32)
        options |= {"margin": row.delayed.margin, "amax_compute_algo": row.delayed.algorithm}
    dtype = jnp.dtype(row.format.element)
    mode = _mode_of(recipe, row)
    own = None if mode.format_of(dtype) == row.format else row.format
    return _quantizer(dtype, mode, format=own, use_rht=column.rotation is not None, **options)


def _mode_of(recipe: Recipe, cast: Cast) -> ScalingMode:
    tile = None if cast.is_per_tensor else cast.tile
    for mode in ScalingMode:
        row = mode.row
        same = any((f.element, f.scale) == (cast.format.element, cast.format.scale) for f in mode.formats)
        if same and row.tile == tile and row.delayed == (cast.delayed is not None):
            return mode
    raise ValueError(f"no ScalingMode is a cast to {cast}, as {recipe.name} has; use `scaledot.train`")
