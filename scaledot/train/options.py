"""What the verbs of training take beside their operands: checked once, then one frozen record."""

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
from scaledot.ops.operands import Choice, element_type
from scaledot.parallel.specs import Specs
from scaledot.parallel.transfers import Axes
from scaledot.recipes import Recipe, find_recipe
from scaledot.state import State, check_state, checked_use
from scaledot.train.residuals import RESIDUAL_NAME

ON_INDIVISIBLE = ("raise", "gather")


class Keywords(TypedDict, total=False):
    """The keyword arguments that the verbs hand on to `Options.of`.

    out_sharding: the sharding of the result, along explicit mesh axes.
    specs: the PartitionSpecs of x, w and the result along automatic mesh axes, or along those of a surrounding
      shard_map, inside which x and w are shards. Operands are all-gathered as codes, and partial sums reduced in
      float32, where that is needed.
    overlap: mesh axes along which shards travel around a ring while others are multiplied: no operand is gathered
      before it is used, and no sum is complete before it is scattered.
    on_indivisible: what to do where a sharding would cut blocks: "raise", or "gather" that axis first, in the precision
      that the array has.
    kernel: the name of a matmul kernel (`scaledot.explain` lists them), or a function from a problem to a name; None
      takes the first that supports it.
    """

    out_sharding: Any
    specs: Specs | None
    overlap: str | Axes
    on_indivisible: str
    kernel: Choice


@hash_once
@dataclasses.dataclass(frozen=True)
class Options:
    """Everything that a call says beside its arrays; `Keywords` says what the fields mean.

    dtype: of the result. residual_name: under which jax.checkpoint finds what is kept for the backward pass.
    """

    recipe: Recipe
    dtype: np.dtype
    precision: Any = None
    out_sharding: Any = None
    specs: Specs | None = None
    overlap: Axes = ()
    on_indivisible: str = "raise"
    kernel: Choice = None
    residual_name: str = RESIDUAL_NAME

    @classmethod
    def of(
        cls,
        recipe: str | Recipe,
        dtype: np.dtype,
        precision,
        keywords: Keywords,
        refused: Collection[str] = (),
        residual_name: str = RESIDUAL_NAME,
    ) -> "Options":
        """The checked arguments of a verb. refused: keywords that others take and this one does not."""
        taken = [name for name in Keywords.__annotations__ if name not in refused]
        unknown = [name for name in keywords if name not in taken]
        if unknown:
            raise TypeError(f"there is no argument `{unknown[0]}` here; keyword arguments are {', '.join(taken)}")
        given: dict[str, Any] = {**keywords}
        overlap = given.get("overlap") or ()
        given["overlap"] = (overlap,) if isinstance(overlap, str) else tuple(overlap)
        given["specs"] = _checked_specs(given.get("specs"))
        if given.get("on_indivisible", "raise") not in ON_INDIVISIBLE:
            raise ValueError(f"`on_indivisible` must be raise or gather, not {given['on_indivisible']!r}")
        precision = tuple(precision) if isinstance(precision, list) else precision
        check_hashable({"precision": precision, **given})
        return cls(find_recipe(recipe), dtype, precision, **given, residual_name=residual_name)

    def returned(self, y: jax.Array, state: State):
        """What a verb returns: y, and with delayed scaling the state for the next use."""
        return (y, state) if self.recipe.delayed else y

    def checked_state(self, state: State | None, w: jax.Array) -> State:
        """The state of a matmul by w, {} for a recipe that keeps none; raises if w is differentiated without it."""
        recipe = self.recipe
        if recipe.delayed and state is None:
            raise ValueError(
                f"{recipe.name} scales by the history of earlier steps: give a `state`, at first "
                f"init_state({recipe.name!r})"
            )
        if not recipe.delayed and state:
            raise ValueError(f"`state` is given, but {recipe.name} keeps none")
        check_state(recipe, state or {})
        return checked_use(recipe, state, w) if state else {}


def _checked_specs(specs: Any) -> Specs | None:
    if specs is None:
        return None
    is_three = isinstance(specs, (tuple, list)) and len(specs) == len(Specs._fields)
    if not is_three or not all(isinstance(spec, PartitionSpec) for spec in specs):
        raise TypeError(f"`specs` must be Specs(x, w, y), a PartitionSpec for each of them, not {specs!r}")
    return Specs(*specs)


def result_dtype(preferred, x: np.dtype, w: np.dtype) -> np.dtype:
    """The dtype of a matmul of arrays of dtypes x and w."""
    dtype = element_type(preferred) or promoted(x, w)
    if not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits < 16:
        raise TypeError(f"`preferred_element_type` must be a float dtype of at least 16 bits, not {dtype}")
    return dtype
