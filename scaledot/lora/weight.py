"""A frozen weight with low-rank factors, as it passes through a rewritten program, and the matmuls of the factors."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from scaledot.lora.config import Config
from scaledot.lora.uses import Use, operand_dims, use_of
from scaledot.numerics.rounding import uniform_of
from scaledot.transform.custom_weight import CustomWeight
from scaledot.transform.site import Site

Factors = dict[str, jax.Array]  # {"a": A, "b": B}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class AdaptedWeight(CustomWeight):
    """A weight with the factors of each of its uses; views change `base` only, scans slice stacked factors as well."""

    base: Any
    factors: tuple[Factors, ...]
    uses: tuple[Use, ...] = dataclasses.field(metadata={"static": True})
    config: Config = dataclasses.field(metadata={"static": True})

    def with_base(self, base: Any) -> "AdaptedWeight":
        return dataclasses.replace(self, base=base)

    def contract(self, site: Site, x: jax.Array, y: jax.Array, key: jax.Array | None, *rest: Any) -> jax.Array:
        """y + scaling · (dropout(x) A) B."""
        use = use_of(site)
        factors = self.factors[self.uses.index(use)]
        x = x if key is None or not self.config.dropout else _dropped_out(x, self.config.dropout, key)
        return y + _low_rank(site, use, x, factors["a"], factors["b"], self.config.scaling, *rest)


def _dropped_out(x: jax.Array, probability: float, key: jax.Array) -> jax.Array:
    """x with elements zero with `probability` and the others scaled up, so that its mean over keys is x."""
    is_kept = uniform_of(key, x.shape) >= probability
    return jnp.where(is_kept, x / (1 - probability), jnp.zeros((), x.dtype))


def _low_rank(site: Site, use: Use, x: jax.Array, a: jax.Array, b: jax.Array, scaling: float, *rest: Any) -> jax.Array:
    """scaling · (x A) B with the dims and the dtype of the site's result."""
    a, b = a.astype(x.dtype), b.astype(x.dtype)
    keywords = {"precision": site.params["precision"]}
    if site.primitive == "ragged_dot_general":
        (group_sizes,) = rest
        hidden = lax.ragged_dot(x, a, group_sizes, **keywords) * scaling
        return lax.ragged_dot(hidden, b, group_sizes, preferred_element_type=site.out.dtype, **keywords)
    (x_contracting, x_batch), (contracting, _) = operand_dims(site)
    batch, inputs = len(use.batch), len(use.contracting)
    a = a.reshape(*a.shape[:batch], *use.sizes(use.contracting), a.shape[-1])
    b = b.reshape(*b.shape[:-1], *use.sizes(use.free))
    by_axis = dict(zip(contracting, x_contracting, strict=True))
    pairs = tuple(by_axis[axis] for axis in use.contracting), tuple(range(batch, batch + inputs))
    leading = tuple(range(batch))
    hidden = lax.dot_general(x, a, (pairs, (x_batch, leading)), **keywords) * scaling
    last = ((hidden.ndim - 1,), (batch,)), (leading, leading)
    y = lax.dot_general(hidden, b, last, preferred_element_type=site.out.dtype, **keywords)
    if site.weight == 1:
        return y
    free = len(use.free)  # dot_general has the free dims of its first operand first, which is the weight here
    return jnp.moveaxis(y, range(y.ndim - free, y.ndim), range(batch, batch + free))
