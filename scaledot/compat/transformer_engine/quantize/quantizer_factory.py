"""Sets of quantizers, which are recipes, and the factory of both."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scaledot.compat.transformer_engine.quantize.quantizer import Quantizer
from scaledot.compat.transformer_engine.quantize.scaling_modes import QuantizeLayout, ScalingMode
from scaledot.compat.transformer_engine.recipe import core_recipe
from scaledot.recipes import Cast, Gemm, Recipe
from scaledot.state import AmaxHistory, State


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class QuantizerSet:
    """The quantizers of a layer; None leaves a tensor as it is.

    >>> print(QuantizerFactory.create_set(fp8_recipe="mxfp8").core)
    quantizer_set
      fwd    x mxfp8 1×32      w mxfp8 1×32
      dgrad  g mxfp8 1×32      w mxfp8 1×32
      wgrad  x mxfp8 1×32      g mxfp8 1×32
    """

    x: Quantizer | None = None
    kernel: Quantizer | None = None
    dgrad: Quantizer | None = None

    @property
    def core(self) -> Recipe | None:
        """The recipe that the set stands for; None if nothing is quantised."""
        if self.x is None and self.kernel is None and self.dgrad is None:
            return None
        rows, columns = ({"x": q, "w": w, "g": g} for q, w, g in (self._casts(False), self._casts(True)))
        fwd, dgrad = Gemm(rows["x"], rows["w"]), Gemm(rows["g"], rows["w"])
        return Recipe("quantizer_set", fwd, dgrad, Gemm(columns["x"], columns["g"]))

    def _casts(self, is_colwise: bool) -> list[Cast | None]:
        return [None if q is None else q.cast(is_colwise) for q in (self.x, self.kernel, self.dgrad)]

    @property
    def state(self) -> State | None:
        """The state of delayed scaling, None if there is none."""
        named = {"x": self.x, "w": self.kernel, "g": self.dgrad}
        delayed = {t: q for t, q in named.items() if q is not None and q.scaling_mode.row.delayed}
        return {t: AmaxHistory(q.amax_history, q.scale) for t, q in delayed.items()} or None

    @property
    def key(self) -> jax.Array | None:
        """The key of the first stochastic quantizer; casts of a step draw independent bits from it."""
        keys = (q.key for q in (self.x, self.kernel, self.dgrad) if q is not None)
        return next((key for key in keys if key is not None), None)


noop_quantizer_set = QuantizerSet()
_OPTIONS = ("scale", "amax_history", "stochastic_rounding_rng_state", "margin", "amax_compute_algo", "use_rht")


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
        unknown = [name for name in options if name not in _OPTIONS]
        if unknown:
            raise TypeError(f"a quantizer has no option {unknown[0]!r}; it takes {', '.join(_OPTIONS)}")
        if scaling_mode is ScalingMode.NO_SCALING:
            made: list[Quantizer | None] = [None] * n_quantizers
        else:
            how = {"q_dtype": q_dtype, "scaling_mode": scaling_mode, "q_layout": q_layout, "n_groups": n_groups}
            made = [_quantizer(checkpoint_name=checkpoint_name, **how, **options) for _ in range(n_quantizers)]
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

        >>> quantizers = QuantizerFactory.create_set(1, ScalingMode.CURRENT_TENSOR_SCALING, *_E4M3_E5M2)
        >>> quantizers.dgrad.q_dtype
        dtype(float8_e5m2)
        """
        if scaling_mode is not None and fp8_recipe is not None:
            raise ValueError("give `scaling_mode` with its dtypes, or `fp8_recipe`, not both")
        layout = QuantizeLayout.ROWWISE if is_2x2x is False else QuantizeLayout.ROWWISE_COLWISE
        shared = {"q_layout": layout, "n_groups": n_groups, "checkpoint_name": checkpoint_name}
        if fp8_recipe is not None:
            one = set_of(core_recipe(fp8_recipe), stochastic_rounding_rng_state, shared)
        else:
            mode = ScalingMode.NO_SCALING if scaling_mode is None else scaling_mode
            dtypes = (fwd_dtype, fwd_dtype, bwd_dtype)
            one = QuantizerSet(*(QuantizerFactory.create(1, mode, dtype, **shared) for dtype in dtypes))
        return one if n_quantizer_sets == 1 else (one,) * n_quantizer_sets


_E4M3_E5M2 = (jnp.float8_e4m3fn, jnp.float8_e5m2)


def _quantizer(q_dtype, scaling_mode: ScalingMode, **options) -> Quantizer:
    if q_dtype is None:
        dtypes = " or ".join(sorted(dtype.name for dtype in scaling_mode.get_compatible_q_dtypes()))
        raise ValueError(f"`q_dtype` of {scaling_mode.name} must be given: {dtypes}")
    if options.get("format") is None:
        scaling_mode.format_of(q_dtype)  # raises unless the mode has codes of that dtype
    if scaling_mode.row.delayed:
        options.setdefault("scale", jnp.ones(1, jnp.float32))
        options.setdefault("amax_history", jnp.zeros(1024, jnp.float32))
    return Quantizer(q_dtype=np.dtype(q_dtype), scaling_mode=scaling_mode, **options)


def set_of(recipe: Recipe, key, shared: dict[str, Any]) -> QuantizerSet:
    """The quantizers whose casts a recipe has; raises for a recipe that no three quantizers can say."""
    if recipe.dgrad is None or recipe.wgrad is None:
        raise ValueError(f"{recipe.name} is straight through in its backward pass, which quantizers cannot say")
    pairs = (recipe.fwd.lhs, recipe.wgrad.lhs), (recipe.fwd.rhs, recipe.dgrad.rhs), (recipe.dgrad.lhs, recipe.wgrad.rhs)
    made = QuantizerSet(*(_for_casts(recipe, row, column, key, shared) for row, column in pairs))
    found = made.core
    if recipe.stochastic and key is None:
        words = f"{recipe.name} rounds {', '.join(recipe.stochastic)} by chance"
        raise ValueError(f"{words}; give `stochastic_rounding_rng_state`, a key that is new in each step")
    if found is not None and dataclasses.replace(found, name=recipe.name) != recipe:
        raise ValueError(
            f"no set of quantizers has the casts of\n{recipe}\nuse `scaledot.train`, which takes the recipe"
        )
    return made


def _for_casts(recipe: Recipe, row: Cast | None, column: Cast | None, key, shared: dict[str, Any]) -> Quantizer | None:
    if row is None or column is None:
        return None
    options = dict(shared)
    if row.rounding == "stochastic":
        options["stochastic_rounding_rng_state"] = key
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
        elements = [mode.format_of(d) for d in mode.get_compatible_q_dtypes()]
        same = any((f.element, f.scale) == (cast.format.element, cast.format.scale) for f in elements)
        if same and row.tile == tile and row.delayed == (cast.delayed is not None):
            return mode
    raise ValueError(f"no ScalingMode is a cast to {cast}, as {recipe.name} has; use `scaledot.train`")
