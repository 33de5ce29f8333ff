"""What the verbs of training check and return alike."""

import jax
import jax.numpy as jnp
import numpy as np

from scaledot.kernels.spec import promoted
from scaledot.ops.operands import element_type
from scaledot.recipes import Recipe
from scaledot.state import State, check_state, checked_use


def returned(recipe: Recipe, y: jax.Array, state: State):
    return (y, state) if recipe.delayed else y


def checked_state(recipe: Recipe, state, w: jax.Array) -> State:
    """The state of a product by w, {} for a recipe that keeps none; raises if w is differentiated without it."""
    if recipe.delayed and state is None:
        raise ValueError(
            f"{recipe.name} scales by the history of earlier steps: give a `state`, at first "
            f"init_state({recipe.name!r})"
        )
    if not recipe.delayed and state:
        raise ValueError(f"`state` is given, but {recipe.name} keeps none")
    check_state(recipe, state or {})
    return checked_use(recipe, state, w) if recipe.delayed else {}


def result_dtype(preferred, x: jax.Array, w: jax.Array) -> np.dtype:
    dtype = element_type(preferred) or promoted(x.dtype, w.dtype)
    if not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits < 16:
        raise TypeError(f"`preferred_element_type` must be a float dtype of at least 16 bits, not {dtype}")
    return dtype
