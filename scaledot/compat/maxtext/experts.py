"""Sparse experts of MaxText: its grouped matmul under the recipe of the layer that is being traced."""

import contextvars
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from maxtext.kernels import megablox  # pyright: ignore[reportMissingImports]
from maxtext.layers import moe  # pyright: ignore[reportMissingImports]

from scaledot import train
from scaledot.compat.maxtext.matmuls import key_of_step
from scaledot.compat.maxtext.replaced import original
from scaledot.recipes import Recipe


class ExpertsRecipe(NamedTuple):
    """The recipe of a layer's experts and the `checkpoint_name` of its residuals: static attributes of the layer."""

    recipe: Recipe
    residual_name: str


class _Call(NamedTuple):
    """A call of `sparse_matmul` that is being traced; `numbers` numbers its grouped matmuls, for their keys."""

    experts: ExpertsRecipe
    key: jax.Array | None
    numbers: Iterator[int]


# MaxText calls its grouped matmul from closures of `RoutedMoE.sparse_matmul`, without a reference to the layer.
_current: contextvars.ContextVar[_Call | None] = contextvars.ContextVar("sparse_matmul", default=None)


def sparse_matmul(layer, *args, **kwargs):
    """MaxText's `RoutedMoE.sparse_matmul`, inside which `gmm` uses the recipe of the layer, if it has one."""
    experts = getattr(layer, "experts_recipe", None)
    call = None
    if experts is not None:
        key = layer.rngs.params.key[...] if experts.recipe.stochastic else None
        call = _Call(experts, key, itertools.count())
    token = _current.set(call)
    try:
        return original(moe.RoutedMoE, "sparse_matmul")(layer, *args, **kwargs)
    finally:
        _current.reset(token)


def gmm(lhs, rhs, group_sizes, preferred_element_type=None, *args, **options):
    """MaxText's `megablox.gmm` under the recipe of the current layer: lhs (m, k), rhs (groups, k, n) -> (m, n)."""
    current = _current.get()
    if current is None:
        return original(megablox, "gmm")(lhs, rhs, group_sizes, preferred_element_type, *args, **options)
    _check_supported(options)
    (recipe, residual_name), key, numbers = current
    if key is not None:
        key = _key_of_device(key_of_step(jax.random.fold_in(key, next(numbers)), lhs))
    return train.ragged_dot(
        lhs,
        rhs,
        group_sizes,
        preferred_element_type=preferred_element_type,
        recipe=recipe,
        key=key,
        residual_name=residual_name,
    )


def _check_supported(options: dict[str, Any]) -> None:
    """Raises for arguments of megablox.gmm that change its result and are not implemented."""
    offset = options.get("group_offset")
    if not (offset is None or (isinstance(offset, int) and offset == 0)):
        raise ValueError(
            "experts under a recipe need `group_offset` 0; MaxText passes another with use_ring_of_experts=true and "
            "use_ragged_sort=true: set one of them to false, or map the experts to None in `rules`"
        )
    for name in ("partial_sum", "existing_out"):
        if options.get(name) is not None:
            raise ValueError(f"experts under a recipe do not take `{name}`; map them to None in `rules`")
    if options.get("transpose_rhs"):
        raise ValueError("experts under a recipe do not take `transpose_rhs`; map them to None in `rules`")


def _key_of_device(key: jax.Array) -> jax.Array:
    """A different key on each device of a shard_map, inside which rows are numbered from 0 on every device."""
    for axis in jax.sharding.get_abstract_mesh().manual_axes:
        key = jax.random.fold_in(key, jax.lax.axis_index(axis))
    return key
