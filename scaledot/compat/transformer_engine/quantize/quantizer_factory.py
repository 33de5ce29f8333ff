"""QuantizerFactory: creates quantizers by scaling mode, and quantizer sets by scaling mode or recipe."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scaledot.compat.transformer_engine.quantize.global_recipe import get_global_quantize_recipe
from scaledot.compat.transformer_engine.quantize.metadata import QuantizeMeta, QuantizeMetaSet
from scaledot.compat.transformer_engine.quantize.quantizer_class import Quantizer
from scaledot.compat.transformer_engine.quantize.quantizer_set import QuantizerSet
from scaledot.compat.transformer_engine.quantize.scaling_modes import QuantizeLayout, ScalingMode
from scaledot.compat.transformer_engine.recipe import core_recipe
from scaledot.recipes import UNQUANTISED, Cast, Gemm, Recipe

_RNG_STATE = "stochastic_rounding_rng_state"
_OPTIONS = {
    ScalingMode.DELAYED_TENSOR_SCALING: ("scale", "amax_history", "margin", "amax_compute_algo"),
    ScalingMode.NVFP4_1D_SCALING: (_RNG_STATE, "use_rht"),
    ScalingMode.NVFP4_2D_SCALING: (_RNG_STATE,),
}


class QuantizerFactory:
    """Creates quantizers by scaling mode, and quantizer sets by scaling mode or recipe.

    >>> quantizer = QuantizerFactory.create(1, ScalingMode.MXFP8_1D_SCALING, jnp.float8_e4m3fn, QuantizeLayout.ROWWISE)
    >>> quantizer.quantize(jnp.ones((2, 64))).scale_inv.shape
    (2, 2)
    """

    @staticmethod
    def create(
        n_quantizers: int = 1,
        scaling_mode: ScalingMode | None = None,
        q_dtype=None,
        q_layout: QuantizeLayout | None = None,
        n_groups: int | None = None,
        checkpoint_name: str | None = None,
        **options,
    ) -> Any:
        """Returns one quantizer, or a tuple of `n_quantizers`; None for NO_SCALING.

        q_layout: ROWWISE_COLWISE if None. n_groups: of grouped tensors; delayed scaling then has a state for each.
        options: `scale`, `amax_history`, `margin` and `amax_compute_algo` for delayed scaling;
          `stochastic_rounding_rng_state` and `use_rht` for NVFP4.

        >>> QuantizerFactory.create(2, ScalingMode.NO_SCALING)
        (None, None)
        """
        if not isinstance(scaling_mode, ScalingMode):
            raise TypeError(f"`scaling_mode` must be a ScalingMode, not {scaling_mode!r}")
        _check_options(scaling_mode, options)
        q_layout = QuantizeLayout.ROWWISE_COLWISE if q_layout is None else q_layout
        if not isinstance(q_layout, QuantizeLayout):
            raise TypeError(f"`q_layout` must be a QuantizeLayout, not {q_layout!r}")
        if scaling_mode is ScalingMode.NO_SCALING:
            quantizers: list[Quantizer | None] = [None] * n_quantizers
        else:
            shared = {"q_dtype": q_dtype, "scaling_mode": scaling_mode, "q_layout": q_layout, "n_groups": n_groups}
            shared["checkpoint_name"] = checkpoint_name
            quantizers = [_quantizer(**shared, **_with_own_key(options, i)) for i in range(n_quantizers)]
        return quantizers[0] if n_quantizers == 1 else tuple(quantizers)

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
        quantize_meta_set: QuantizeMetaSet | None = None,
    ) -> Any:
        """Returns one QuantizerSet, or a tuple of them, for a scaling mode and two dtypes or for a recipe.

        Without either, the recipe is that of `autocast`, and outside of it nothing is quantised.

        stochastic_rounding_rng_state: a key, for recipes with stochastic rounding; pass a new one in each step.
        quantize_meta_set: options of each quantizer, as in TransformerEngine: only those for which it has
          `stochastic_rounding_rng_state` and `use_rht` use stochastic rounding and a Hadamard transform.

        >>> mode, dtypes = ScalingMode.CURRENT_TENSOR_SCALING, (jnp.float8_e4m3fn, jnp.float8_e5m2)
        >>> QuantizerFactory.create_set(1, mode, *dtypes).dgrad.q_dtype
        dtype(float8_e5m2)
        """
        if scaling_mode is None and fp8_recipe is None:
            fp8_recipe = get_global_quantize_recipe()
        if scaling_mode is not None and fp8_recipe is not None:
            raise ValueError("pass `scaling_mode` with its dtypes, or `fp8_recipe`, not both")
        layout = QuantizeLayout.ROWWISE if is_2x2x is False else QuantizeLayout.ROWWISE_COLWISE
        shared = {"q_layout": layout, "n_groups": n_groups, "checkpoint_name": checkpoint_name}
        if fp8_recipe is not None and (fwd_dtype is not None or bwd_dtype is not None):
            raise ValueError("`fp8_recipe` determines the dtypes; `fwd_dtype` and `bwd_dtype` must be None")
        sets = []
        for i in range(n_quantizer_sets):
            key = _own_key(stochastic_rounding_rng_state, i)
            if fp8_recipe is not None:
                sets.append(_set_by_recipe(core_recipe(fp8_recipe), key, shared, quantize_meta_set))
            else:
                mode = ScalingMode.NO_SCALING if scaling_mode is None else scaling_mode
                quantizers = _set_by_mode(mode, fwd_dtype, bwd_dtype, key, shared)
                sets.append(_with_metas(quantizers, quantize_meta_set))
        return sets[0] if n_quantizer_sets == 1 else tuple(sets)


def _quantizer(q_dtype, scaling_mode: ScalingMode, **options) -> Quantizer:
    if q_dtype is None:
        dtypes = " or ".join(sorted(format.element for format in scaling_mode.formats))
        raise ValueError(f"`q_dtype` of {scaling_mode.name} must be {dtypes}, not None")
    if options.get("format") is None:
        scaling_mode.format_of(q_dtype)  # raises if the mode does not support the dtype
    if scaling_mode.spec.delayed:
        groups = options.get("n_groups")
        options.setdefault("scale", jnp.ones(groups or 1, jnp.float32))
        options.setdefault("amax_history", _empty_history(1024, groups))
    return Quantizer(q_dtype=np.dtype(q_dtype), scaling_mode=scaling_mode, **options)


def _empty_history(length: int, groups: int | None) -> jax.Array:
    return jnp.zeros((length,) if groups is None else (groups, length), jnp.float32)


def _check_options(mode: ScalingMode, options: dict[str, Any]) -> None:
    allowed = _OPTIONS.get(mode, ())
    unknown = [name for name in options if name not in allowed]
    if unknown:
        raise TypeError(f"{mode.name} has no option {unknown[0]!r}; it takes {', '.join(allowed) or 'none'}")


def _with_metas(quantizers: QuantizerSet, metas: QuantizeMetaSet | None) -> QuantizerSet:
    """Returns the quantizers with the options of their QuantizeMetas."""
    if metas is None:
        return quantizers
    pairs = ((quantizers.x, metas.x), (quantizers.kernel, metas.kernel), (quantizers.dgrad, metas.grad))
    return QuantizerSet(*(None if quantizer is None else _with_meta(quantizer, meta) for quantizer, meta in pairs))


def _with_meta(quantizer: Quantizer, meta: QuantizeMeta) -> Quantizer:
    options = meta.get_kwargs_dictionary()
    _check_options(quantizer.scaling_mode, options)
    return dataclasses.replace(quantizer, **options)


def _set_by_mode(mode: ScalingMode, fwd_dtype, bwd_dtype, key, shared: dict[str, Any]) -> QuantizerSet:
    """Returns quantizers of x, kernel and gradient in one mode; with a key, gradients use stochastic rounding."""
    if key is not None and _RNG_STATE not in _OPTIONS.get(mode, ()):
        raise ValueError(f"{mode.name} rounds to nearest; `{_RNG_STATE}` must be None")
    create, rng_state = QuantizerFactory.create, {} if key is None else {_RNG_STATE: key}
    return QuantizerSet(
        create(1, mode, fwd_dtype, **shared),
        create(1, mode, fwd_dtype, **_kernel_options(mode, shared)),
        create(1, mode, bwd_dtype, **shared, **rng_state),
    )


def _kernel_options(mode: ScalingMode, shared: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of the kernel's quantizer.

    fwd contracts axis 0 of a kernel (k, n). With a ROWWISE layout (`is_2x2x=False`) only fwd is quantised, and kernels
    must have 1D blocks along axis 0, so its quantizer is COLWISE.
    """
    forward_only = shared["q_layout"] is QuantizeLayout.ROWWISE and mode.is_1d_block_scaling()
    return {**shared, "q_layout": QuantizeLayout.COLWISE} if forward_only else shared


def _with_own_key(options: dict[str, Any], index: int) -> dict[str, Any]:
    """Returns the options of quantizer number `index`, with its own stochastic-rounding key."""
    return options | {_RNG_STATE: _own_key(options[_RNG_STATE], index)} if _RNG_STATE in options else options


def _own_key(state, index: int):
    """Derives a different key for each index, from a JAX key or a TransformerEngine RNG state."""
    if state is None or index == 0:
        return state
    if jnp.issubdtype(state.dtype, jax.dtypes.prng_key) or state.shape == (2,):
        return jax.random.fold_in(state, index)
    return state.at[..., -1].add(index)


def _set_by_recipe(recipe: Recipe, key, shared: dict[str, Any], metas: QuantizeMetaSet | None = None) -> QuantizerSet:
    """Returns the quantizers with the casts of a recipe; raises if no three quantizers have them.

    metas: if passed, they decide which quantizers use stochastic rounding and a Hadamard transform.
    """
    if metas is not None:
        recipe, key = _without_randomness(recipe), None
    if recipe.dgrad is None or recipe.wgrad is None:
        raise ValueError(
            f"recipe {recipe.name} has a straight-through backward pass, which a QuantizerSet cannot express; "
            "use `scaledot.train`, which takes the recipe"
        )
    x, kernel, g = (
        _quantizer_of_casts(recipe, rowwise, colwise, key, shared)
        for rowwise, colwise in (
            (recipe.fwd.lhs, recipe.wgrad.lhs),
            (recipe.fwd.rhs, recipe.dgrad.rhs),
            (recipe.dgrad.lhs, recipe.wgrad.rhs),
        )
    )
    if kernel is not None:
        kernel = dataclasses.replace(kernel, **_kernel_options(kernel.scaling_mode, shared))
    quantizers = QuantizerSet(x, kernel, g)
    if recipe.stochastic and key is None:
        raise ValueError(
            f"recipe {recipe.name} uses random numbers for {', '.join(recipe.stochastic)}; pass `{_RNG_STATE}`, a "
            "new key in each step"
        )
    if dataclasses.replace(quantizers.core or UNQUANTISED, name=recipe.name) != recipe:
        raise ValueError(f"no QuantizerSet has the casts of\n{recipe}\nuse `scaledot.train`, which takes the recipe")
    return _with_metas(quantizers, metas)


def _without_randomness(recipe: Recipe) -> Recipe:
    """Returns the recipe with rounding to nearest and no Hadamard transforms."""

    def plain(cast: Cast | None) -> Cast | None:
        return None if cast is None else dataclasses.replace(cast, rounding="nearest", rotation=None)

    gemms = (None if gemm is None else Gemm(plain(gemm.lhs), plain(gemm.rhs)) for gemm in (recipe.dgrad, recipe.wgrad))
    dgrad, wgrad = gemms
    fwd = Gemm(plain(recipe.fwd.lhs), plain(recipe.fwd.rhs))
    return dataclasses.replace(recipe, fwd=fwd, dgrad=dgrad, wgrad=wgrad)


def _quantizer_of_casts(
    recipe: Recipe, rowwise: Cast | None, colwise: Cast | None, key, shared: dict[str, Any]
) -> Quantizer | None:
    if rowwise is None or colwise is None:
        return None
    options = dict(shared)
    if rowwise.rounding == "stochastic":
        options[_RNG_STATE] = key
    if rowwise.delayed is not None:
        options["amax_history"] = _empty_history(rowwise.delayed.length, shared["n_groups"])
        options |= {"margin": rowwise.delayed.margin, "amax_compute_algo": rowwise.delayed.algorithm}
    dtype = jnp.dtype(rowwise.format.element)
    mode = mode_of(recipe, rowwise)
    format = None if mode.format_of(dtype) == rowwise.format else rowwise.format
    return _quantizer(dtype, mode, format=format, use_rht=colwise.rotation is not None, **options)


def mode_of(recipe: Recipe, cast: Cast) -> ScalingMode:
    """Returns the scaling mode of a cast of a recipe."""
    block = None if cast.is_per_tensor else cast.block_2d
    for mode in ScalingMode:
        spec = mode.spec
        same_dtypes = any((f.element, f.scale) == (cast.format.element, cast.format.scale) for f in mode.formats)
        if same_dtypes and spec.block == block and spec.delayed == (cast.delayed is not None):
            return mode
    raise ValueError(f"no ScalingMode quantises to {cast}, which recipe {recipe.name} needs; use `scaledot.train`")
