"""`quantize_model`: a Flax linen or NNX model under the rules of a provider."""

from collections.abc import Collection
from typing import Any

from scaledot.compat.qwix.rules import PtqProvider, QuantizationProvider


def quantize_model(
    model: Any,
    provider: QuantizationProvider,
    *model_inputs: Any,
    methods: Collection[str] = ("__call__",),
    **model_inputs_kwargs: Any,
) -> Any:
    """Returns a model whose contractions are quantised as the rules of the provider say.

    Contractions are found in the traced program, so those that modules write themselves (jnp.einsum, jnp.dot, @) are
    quantised like those of Flax's layers. A linen model is returned as an object with `init` and `apply`, an NNX model
    as a copy with another class.

    Args:
      provider: a QtProvider for training, or a PtqProvider for inference with quantised weights, see `quantize_params`.
      model_inputs, model_inputs_kwargs: of an NNX model, the arguments of a call. Their elements do not matter.
      methods: the names of methods that are quantised; one for an NNX model.

    >>> import jax, jax.numpy as jnp
    >>> from flax import linen as nn
    >>> from scaledot.compat import qwix
    >>> model, x = nn.Dense(8), jnp.ones((2, 32))
    >>> params = model.init(jax.random.key(0), x)["params"]
    >>> rules = [qwix.QuantizationRule(weight_qtype=jnp.int4, tile_size=16)]
    >>> quantized = qwix.quantize_model(model, qwix.PtqProvider(rules))
    >>> abstract = jax.eval_shape(quantized.init, jax.random.key(0), x)["params"]
    >>> params = qwix.quantize_params(params, abstract)
    >>> params["kernel"].array.scale.shape, quantized.apply({"params": params}, x).shape
    ((2, 8), (2, 8))
    """
    from flax import linen, nnx

    from scaledot.compat.qwix import linen_model, nnx_model

    if not isinstance(provider, QuantizationProvider):
        raise TypeError(f"`provider` must be a PtqProvider or a QtProvider, not {provider!r}")
    if isinstance(model, linen_model.QuantizedModel):
        model = model.model
    if isinstance(model, linen.Module):
        if model_inputs or model_inputs_kwargs:
            raise ValueError("`model_inputs` are for NNX models; a linen model takes them in `init` and `apply`")
        if isinstance(provider, PtqProvider):
            return linen_model.PtqModel(model, provider, methods)
        return linen_model.QuantizedModel(model, provider, methods)
    if not isinstance(model, nnx.Module):
        raise TypeError(f"`model` must be a linen or an NNX Module, not {type(model).__name__}")
    if not model_inputs and not model_inputs_kwargs:
        raise ValueError("an NNX model needs `model_inputs`, the arguments of a call")
    (method,) = methods
    return nnx_model.quantize_nnx_model(model, provider, method, model_inputs, model_inputs_kwargs)
