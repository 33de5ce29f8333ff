"""make_dot_general_cls and make_grouped_dense_cls: quantised matmuls for the layers of Flax, from `scaledot.linen`."""

from collections.abc import Callable
from typing import Any

from flax import linen as nn

from scaledot import linen, train
from scaledot.compat.transformer_engine.flax.base import TransformerEngineBase
from scaledot.compat.transformer_engine.quantize.global_recipe import get_global_quantize_recipe
from scaledot.compat.transformer_engine.quantize.grouped import checked_group_sizes
from scaledot.compat.transformer_engine.quantize.quantizer_set import QuantizerSet
from scaledot.compat.transformer_engine.recipe import core_recipe
from scaledot.flax_hooks.linen import fields_set


def recipe_filled_in(module: linen.Quantized):
    """A context manager inside which a module without a recipe has that of `autocast`."""
    recipe = get_global_quantize_recipe() if module.recipe is None else module.recipe
    return fields_set(module, {"recipe": core_recipe(recipe)})


class DotGeneral(linen.DotGeneral):
    """`scaledot.linen.DotGeneral` under the recipe of `autocast` while it is traced."""

    recipe: Any = None

    @nn.nowrap
    def under_recipe(self, function: Callable[..., Any], *args, **kwargs) -> Any:
        with recipe_filled_in(self):
            return super().under_recipe(function, *args, **kwargs)


def make_dot_general_cls(
    quantization_recipe: Any, quantization_checkpoint_name: str | None = None
) -> type[linen.DotGeneral]:
    """Returns a module class for `nn.Dense(..., dot_general=cls())` or `nn.Dense(..., dot_general_cls=cls)`.

    quantization_recipe: None takes that of `autocast`, and outside of it leaves the matmul unquantised.
    quantization_checkpoint_name: the `jax.ad_checkpoint` name of the residuals.

    The module has no parameters. Only DelayedScaling creates variables, in the collection `_overwrite_with_gradient`;
    NVFP4 draws its keys from the RNG stream `sr_rng`. Batch dims, `precision` and `preferred_element_type` are
    honoured.

    >>> import jax, jax.numpy as jnp
    >>> from flax import linen as nn
    >>> from scaledot.compat.transformer_engine.recipe import MXFP8BlockScaling
    >>> layer = nn.Dense(8, use_bias=False, dot_general=make_dot_general_cls(MXFP8BlockScaling())())
    >>> jax.tree.map(jnp.shape, layer.init(jax.random.key(0), jnp.ones((2, 32))))
    {'params': {'kernel': (32, 8)}}
    """
    if quantization_recipe is not None:
        return linen.make_dot_general_cls(core_recipe(quantization_recipe), residual_name=quantization_checkpoint_name)

    class Named(DotGeneral):
        residual_name: str | None = quantization_checkpoint_name

    Named.__name__ = DotGeneral.__name__  # part of the path of its variables
    return Named


class GroupedDense(linen.GroupedDense):
    """The grouped matmul of mixture-of-experts layers; a recipe of None is that of `autocast`.

    Calling an instance without arguments returns the instance: TransformerEngine's users call the result of
    `make_grouped_dense_cls` first as a class and then as a module.
    """

    recipe: Any = None

    def __call__(self, *args, **kwargs):
        return self.grouped_dense(*args, **kwargs) if args or kwargs else self

    @nn.compact
    def grouped_dense(self, x, kernel, group_sizes, **options):
        groups = checked_group_sizes(group_sizes, x.shape[0])
        with recipe_filled_in(self):
            return self.under_recipe(train.ragged_dot, x, kernel, groups, **options)


def make_grouped_dense_cls(quantization_recipe: Any, quantization_checkpoint_name: str | None = None) -> GroupedDense:
    """Returns a module that is called with (x, kernel, group_sizes).

    quantization_recipe: None takes that of `autocast`, and outside of it leaves the matmul unquantised.
    quantization_checkpoint_name: the `jax.ad_checkpoint` name of the residuals.

    >>> import jax.numpy as jnp
    >>> experts = make_grouped_dense_cls("mxfp8")
    >>> x, kernel = jnp.ones((4, 32)), jnp.ones((2, 32, 8))
    >>> experts.apply({}, x, kernel, jnp.array([1, 3])).shape
    (4, 8)
    """
    recipe = None if quantization_recipe is None else core_recipe(quantization_recipe)
    return GroupedDense(recipe, residual_name=quantization_checkpoint_name)


def wrap_function_in_te_state_module(
    f: Callable[..., Any],
    quantization_recipe: Any,
    name: str | None = None,
    quantization_checkpoint_name: str | None = None,
) -> type[TransformerEngineBase]:
    """Returns a module class that calls `f(generate_quantizer_set, *args, **kwargs)`.

    f: a function whose first argument creates quantizers: `generate_quantizer_set(postfix="", n_groups=None)` returns
      a QuantizerSet of the recipe, whose state of delayed scaling is in variables of the module.
    name: that of the class, after "TEWrapper_"; by default that of f.

    >>> import jax.numpy as jnp
    >>> from scaledot.compat.transformer_engine.dense import dense
    >>> def project(generate_quantizer_set, x, kernel):
    ...     return dense(x, kernel, quantizer_set=generate_quantizer_set())
    >>> module = wrap_function_in_te_state_module(project, "mxfp8")()
    >>> type(module).__name__, module.apply({}, jnp.ones((2, 32)), jnp.ones((32, 4))).shape
    ('TEWrapper_project', (2, 4))
    """

    class Wrapper(TransformerEngineBase):
        @nn.compact
        def __call__(self, *args, **kwargs):
            def generate_quantizer_set(postfix: str = "", n_groups: int | None = None) -> QuantizerSet:
                return self.generate_quantizer_set(
                    postfix,
                    quantization_checkpoint_name=quantization_checkpoint_name,
                    fp8_recipe=quantization_recipe,
                    n_groups=n_groups,
                )

            return f(generate_quantizer_set, *args, **kwargs)

    Wrapper.__name__ = f"TEWrapper_{name or f.__name__}"
    return Wrapper
