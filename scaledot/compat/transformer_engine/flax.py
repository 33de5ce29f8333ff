"""Recipes for Flax linen layers, under their names; see `scaledot.linen`."""

from typing import Any

from flax import linen as nn

from scaledot import linen, train
from scaledot.compat.transformer_engine.not_offered import refuse
from scaledot.compat.transformer_engine.quantize.grouped import summing_groups
from scaledot.compat.transformer_engine.recipe import core_recipe


def make_dot_general_cls(quantization_recipe: Any) -> type[linen.DotGeneral]:
    """A class for `nn.Dense(..., dot_general=cls())` or `nn.Dense(..., dot_general_cls=cls)`.

    It makes no parameters; only DelayedScaling makes variables, in the collection `_overwrite_with_gradient`. NVFP4
    draws its keys from the stream `sr_rng`. Batch dimensions, `precision` and `preferred_element_type` are honoured.

    >>> import jax, jax.numpy as jnp
    >>> from flax import linen as nn
    >>> from scaledot.compat.transformer_engine.recipe import MXFP8BlockScaling
    >>> layer = nn.Dense(8, use_bias=False, dot_general=make_dot_general_cls(MXFP8BlockScaling())())
    >>> jax.tree.map(jnp.shape, layer.init(jax.random.key(0), jnp.ones((2, 32))))
    {'params': {'kernel': (32, 8)}}
    """
    return linen.make_dot_general_cls(core_recipe(quantization_recipe))


class GroupedDense(linen.GroupedDense):
    """The experts of a mixture; called without arguments, an instance is itself, so that it passes for its class."""

    def __call__(self, *args, **kwargs):
        return self.multiplied(*args, **kwargs) if args or kwargs else self

    @nn.compact
    def multiplied(self, x, kernel, group_sizes, **options):
        groups = summing_groups(group_sizes, x.shape[0])
        return self.under_recipe(train.ragged_dot, x, kernel, groups, **options)


def make_grouped_dense_cls(quantization_recipe: Any, quantization_checkpoint_name: str | None = None) -> GroupedDense:
    """A module that is called with (x, kernel, group_sizes), for the experts of a mixture; a recipe of None is plain.

    >>> import jax.numpy as jnp
    >>> experts = make_grouped_dense_cls("mxfp8")
    >>> x, kernel = jnp.ones((4, 32)), jnp.ones((2, 32, 8))
    >>> experts.apply({}, x, kernel, jnp.array([1, 3])).shape
    (4, 8)
    """
    if quantization_checkpoint_name is not None:
        raise ValueError(
            "`quantization_checkpoint_name` can only be None: what is kept has the name 'scaledot_residual' "
            "(scaledot.checkpoint_policies.save_quantized_residuals)"
        )
    return GroupedDense(core_recipe(quantization_recipe))


__all__ = ["make_dot_general_cls", "make_grouped_dense_cls"]
__getattr__ = refuse(__name__)
