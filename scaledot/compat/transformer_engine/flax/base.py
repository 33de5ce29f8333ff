"""TransformerEngineBase: the base class of linen modules that own the quantizers of their matmuls.

    class Projection(TransformerEngineBase):
        @nn.compact
        def __call__(self, x, kernel):
            return te.dense.dense(x, kernel, quantizer_set=self.generate_quantizer_set(fp8_recipe=MXFP8BlockScaling()))

Delayed scaling stores a scale and an amax history per tensor in the collection `_overwrite_with_gradient`, under the
names that `scaledot.linen` uses. Their gradient is their value for the next step, as Flax's TrainState expects. Each
set may be used for one matmul per step: gradients of two uses are added.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from scaledot.compat.transformer_engine.quantize.global_recipe import get_global_quantize_recipe
from scaledot.compat.transformer_engine.quantize.quantizer_class import Quantizer
from scaledot.compat.transformer_engine.quantize.quantizer_factory import QuantizerFactory
from scaledot.compat.transformer_engine.quantize.quantizer_set import QuantizerSet
from scaledot.compat.transformer_engine.recipe import core_recipe
from scaledot.linen import KEY_STREAM, STATE_COLLECTION
from scaledot.state import AmaxHistory


class TransformerEngineBase(nn.Module):
    """Base class of linen modules with quantizers; only delayed scaling creates variables.

    >>> import jax
    >>> from scaledot.compat.transformer_engine.recipe import DelayedScaling
    >>> class Layer(TransformerEngineBase):
    ...     @nn.compact
    ...     def __call__(self):
    ...         return self.generate_quantizer_set("_0", fp8_recipe=DelayedScaling(amax_history_len=4)).x.scale
    >>> variables = Layer().init(jax.random.key(0))
    >>> variables["_overwrite_with_gradient"]["x_0_amax_history"]
    Array([0., 0., 0., 0.], dtype=float32)
    """

    @nn.nowrap
    def generate_quantizer_set(
        self,
        postfix: str = "",
        variable_collection: str | None = None,
        quantization_checkpoint_name: str | None = None,
        fp8_recipe: Any = None,
        n_groups: int | None = None,
    ) -> QuantizerSet:
        """Returns the quantizers of one matmul's x, kernel and gradient.

        postfix: appended to `x`, `kernel` and `grad` in the names of variables: `x{postfix}_scale`, and so on.
        variable_collection: the collection of these variables, `_overwrite_with_gradient` if None.
        quantization_checkpoint_name: the `jax.ad_checkpoint` name of the residuals of the matmul.
        fp8_recipe: a recipe; None takes that of `autocast`, and outside of it leaves the matmul unquantised. Stochastic
          rounding draws its key from the rng stream `sr_rng`, or from linen's default stream without such a stream.
        n_groups: the number of groups, for `grouped_dense`.
        """
        recipe = core_recipe(get_global_quantize_recipe() if fp8_recipe is None else fp8_recipe)
        key = self.make_rng(KEY_STREAM) if recipe.stochastic else None
        quantizers = QuantizerFactory.create_set(
            n_groups=n_groups,
            checkpoint_name=quantization_checkpoint_name,
            fp8_recipe=recipe,
            stochastic_rounding_rng_state=key,
        )
        collection = STATE_COLLECTION if variable_collection is None else variable_collection
        return dataclasses.replace(
            quantizers,
            x=self._with_variables(quantizers.x, collection, f"x{postfix}"),
            kernel=self._with_variables(quantizers.kernel, collection, f"kernel{postfix}"),
            dgrad=self._with_variables(quantizers.dgrad, collection, f"grad{postfix}"),
        )

    @nn.nowrap
    def _with_variables(self, quantizer: Quantizer | None, collection: str, name: str) -> Quantizer | None:
        """Returns the quantizer with its delayed-scaling state in variables, created if they do not exist."""
        if quantizer is None or not quantizer.scaling_mode.spec.delayed:
            return quantizer
        scale = self.variable(collection, f"{name}_scale", lambda: jnp.ones(1, jnp.float32))
        history = self.variable(collection, f"{name}_amax_history", lambda: jnp.zeros_like(quantizer.amax_history))
        return quantizer.with_state(AmaxHistory(history.value, scale.value))
