"""The recipe of the innermost `autocast`, as part of JAX's trace context.

The recipe is a user context of JAX: jit traces again if it differs from that of the cached trace, and other threads do
not see it.
"""

from typing import Any

import jax

recipe_context = jax.make_user_context(default_value=None)


def get_global_quantize_recipe() -> Any:
    """Returns the recipe of the innermost `autocast`; None outside, or if that one is not enabled.

    >>> from scaledot.compat.transformer_engine.quantize import autocast
    >>> with autocast(enabled=True, recipe="mxfp8"):
    ...     print(get_global_quantize_recipe())
    mxfp8
    """
    return recipe_context.value
