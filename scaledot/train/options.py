"""Keyword arguments of the functions of `scaledot.train`, checked once and passed on as one frozen, hashable record."""

import dataclasses
from collections.abc import Collection
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from scaledot.hashing import hash_once
from scaledot.kernels.spec import promoted
from scaledot.ops.cast_spec import check_hashable
from scaledot.ops.operands import KernelChoice, element_type
from scaledot.parallel.specs import Specs
from scaledot.parallel.transfers import Axes
from scaledot.recipes import Recipe, find_recipe
from scaledot.state import State, check_state, checked_use, is_per_group
from scaledot.train.residuals import RESIDUAL_NAME

ON_INDIVISIBLE = ("raise", "gather")


class Keywords(TypedDict, total=False):
    """Keyword arguments that `dense`, `dot_general` and the other functions of `scaledot.train` share.

    out_sharding: the sharding of the result, along explicit mesh axes.
    specs: the PartitionSpecs of x, w and the result along automatic mesh axes, or along the axes of a surrounding
      shard_map, inside which x and w are shards. Where needed, operands are all-gathered as codes and partial results
      are reduced in float32.
    overlap: mesh axes along which collectives overlap with matmuls: instead of an all-gather before the matmul, shards
      of an operand go around a collective-permute ring and are multiplied as they arrive; instead of a reduce-scatter
      after it, accumulators go around the ring.
    on_indivisible: for a sharding that would cut blocks, "raise" an error, or "gather" that dim first, unquantised.
    kernel: the name of a matmul kernel (`scaledot.explain` lists them), or a function from a Problem to a name; None
      for the first kernel that supports the problem.
    residual_name: the `jax.ad_checkpoint.checkpoint_name` of the residuals, by which a policy of jax.checkpoint saves
      them; None for "scaledot_residual", which the policies of `scaledot.checkpoint_policies` save.
    """

    out_sharding: Any
    specs: Specs | None
    overlap: str | Axes
    on_indivisible: str
    kernel: KernelChoice
    residual_name: str | None


@hash_once
@dataclasses.dataclass(frozen=True)
class Options:
    """The static arguments of a call; see `Keywords`. dtype: that of the result."""

    recipe: Recipe
    dtype: np.dtype
    precision: Any = None
    out_sharding: Any = None
    specs: Specs | None = None
    overlap: Axes = ()
    on_indivisible: str = "raise"
    kernel: KernelChoice = None
    residual_name: str = RESIDUAL_NAME

    @classmethod
    def of(
        cls,
        recipe: str | Recipe,
        dtype: np.dtype,
        precision,
        keywords: Keywords,
        unsupported: Collection[str] = (),
    ) -> "Options":
        """The Options of checked arguments. unsupported: fields of Keywords that the calling function does not take."""
        supported = [name for name in Keywords.__annotations__ if name not in unsupported]
        unknown = [name for name in keywords if name not in supported]
        if unknown:
            raise TypeError(f"there is no argument `{unknown[0]}` here; keyword arguments are {', '.join(supported)}")
        fields: dict[str, Any] = {**keywords}
        overlap = fields.get("overlap") or ()
        fields["overlap"] = (overlap,) if isinstance(overlap, str) else tuple(overlap)
        fields["specs"] = _checked_specs(fields.get("specs"))
        if fields.get("on_indivisible", "raise") not in ON_INDIVISIBLE:
            raise ValueError(f"`on_indivisible` must be 'raise' or 'gather', not {fields['on_indivisible']!r}")
        fields["residual_name"] = _checked_name(fields.get("residual_name"))
        precision = tuple(precision) if isinstance(precision, list) else precision
        check_hashable({"precision": precision, **fields})
        return cls(find_recipe(recipe), dtype, precision, **fields)

    def returned(self, y: jax.Array, state: State):
        """The return value of a function of `scaledot.train`: y, or (y, state) with delayed scaling."""
        return (y, state) if self.recipe.delayed else y

    def checked_state(self, state: State | None, w: jax.Array, groups: int | None = None) -> State:
        """The checked state, {} without delayed scaling; raises ValueError if w is differentiated and state is not.

        groups: the number of groups of a ragged matmul, whose state may have a history for each.
        """
        recipe = self.recipe
        if recipe.delayed and state is None:
            raise ValueError(
                f"{recipe.name} uses delayed scaling and needs a `state`; in the first step, pass "
                f"init_state({recipe.name!r})"
            )
        if not recipe.delayed and state:
            raise ValueError(f"`state` is passed, but {recipe.name} has no delayed scaling; leave it out")
        check_state(recipe, state or {}, groups=groups if is_per_group(state or {}) else None)
        return checked_use(recipe, state, w) if state else {}


def _checked_specs(specs: Any) -> Specs | None:
    if specs is None:
        return None
    is_three = isinstance(specs, (tuple, list)) and len(specs) == len(Specs._fields)
    if not is_three or not all(isinstance(spec, PartitionSpec) for spec in specs):
        raise TypeError(f"`specs` must be Specs(x, w, y), three PartitionSpecs, not {specs!r}")
    return Specs(*specs)


def _checked_name(name: Any) -> str:
    if name is not None and not isinstance(name, str):
        raise TypeError(f"`residual_name` must be a string, or None for {RESIDUAL_NAME!r}, not {name!r}")
    return name or RESIDUAL_NAME


def result_dtype(preferred, x: np.dtype, w: np.dtype) -> np.dtype:
    """The dtype of a matmul of dtypes x and w: `preferred`, or their promotion."""
    dtype = element_type(preferred) or promoted(x, w)
    if not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits < 16:
        raise TypeError(f"`preferred_element_type` must be a float dtype of at least 16 bits, not {dtype}")
    return dtype
