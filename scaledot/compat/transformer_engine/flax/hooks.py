"""make_dot_general_cls and make_grouped_dense_cls: quantised matmuls for the layers of Flax, from `scaledot.linen`."""

from typing import Any

from flax import linen as nn

from scaledot import linen, train
from scaledot.compat.transformer_engine.quantize.grouped import checked_group_sizes
from scaledot.compat.transformer_engine.recipe import core_recipe


def make_dot_general_cls(quantization_recipe: Any) -> type[linen.DotGeneral]:
    """Returns a module class for `nn.Dense(..., dot_general=cls())` or `nn.Dense(..., dot_general_cls=cls)`.

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
    return linen.make_dot_general_cls(core_recipe(quantization_recipe))


class GroupedDense(linen.GroupedDense):
    """The grouped matmul of mixture-of-experts layers.

    Calling an instance without arguments returns the instance: TransformerEngine's users call the result of
    `make_grouped_dense_cls` first as a class and then as a module.
    """

    def __call__(self, *args, **kwargs):
        return self.grouped_dense(*args, **kwargs) if args or kwargs else self

    @nn.compact
    def grouped_dense(self, x, kernel, group_sizes, **options):
        groups = checked_group_sizes(group_sizes, x.shape[0])
        return self.under_recipe(train.ragged_dot, x, kernel, groups, **options)


def make_grouped_dense_cls(quantization_recipe: Any, quantization_checkpoint_name: str | None = None) -> GroupedDense:
    """Returns a module that is called with (x, kernel, group_sizes); a recipe of None leaves it unquantised.

    >>> import jax.numpy as jnp
    >>> experts = make_grouped_dense_cls("mxfp8")
    >>> x, kernel = jnp.ones((4, 32)), jnp.ones((2, 32, 8))
    >>> experts.apply({}, x, kernel, jnp.array([1, 3])).shape
    (4, 8)
    """
    if quantization_checkpoint_name is not None:
        raise ValueError(
            "`quantization_checkpoint_name` must be None: residuals are named 'scaledot_residual', which "
            "scaledot.checkpoint_policies.save_quantized_residuals saves"
        )
    return GroupedDense(core_recipe(quantization_recipe))
