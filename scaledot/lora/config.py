"""`Config`: rank, scaling and dropout of an adapter; and rules that choose one for each matmul by path.

Config(rank=8, alpha=16)                                              every matmul by a parameter
{"head": None, "*/attention/*": Config(16, 32), "*": Config(8, 16)}   by path; the first match applies

Patterns are those of `scaledot.transform.rules`: they match the path of a parameter, of its layer, or a named scope.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from scaledot.transform.rules import Conditions


@dataclasses.dataclass(frozen=True)
class Config:
    """An adapter of a matmul: y + scaling · (dropout(x) A) B, with A (inputs, rank) and B (rank, outputs).

    alpha: scaling is alpha / rank, or alpha / sqrt(rank) if `rank_stabilized` (rsLoRA), with which the size of the
    update does not depend on the rank. dropout: the probability with which an element of the adapter's input is zero in
    a call with a key. dtype: of A and B; matmuls compute in the dtype of x.

    >>> Config(rank=8, alpha=16).scaling, Config(rank=16, alpha=8, rank_stabilized=True).scaling
    (2.0, 2.0)
    """

    rank: int
    alpha: float
    _: dataclasses.KW_ONLY
    dropout: float = 0.0
    rank_stabilized: bool = False
    dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        if not isinstance(self.rank, int) or isinstance(self.rank, bool) or self.rank < 1:
            raise ValueError(f"`rank` must be a positive integer, not {self.rank!r}")
        if not math.isfinite(self.alpha):
            raise ValueError(f"`alpha` must be a finite number, not {self.alpha!r}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"`dropout` must be a probability in [0, 1), not {self.dropout!r}")
        if not jnp.issubdtype(self.dtype, jnp.floating) or jnp.finfo(self.dtype).bits < 16:
            raise ValueError(f"`dtype` must be a float dtype of at least 16 bits, not {self.dtype}")

    @property
    def scaling(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)

    def __str__(self) -> str:
        return f"rank {self.rank}, alpha {self.alpha:g}" + (f", dropout {self.dropout:g}" if self.dropout else "")


Rules = Config | Mapping[str, Config | None]


@dataclasses.dataclass(frozen=True)
class AdapterRule(Conditions):
    """A Config, or None for no adapter, for the matmuls by a parameter that match `path`."""

    config: Config | None


def parse_rules(rules: Rules) -> tuple[AdapterRule, ...]:
    """The ordered rules of an argument `rules`."""
    if isinstance(rules, Config):
        return (AdapterRule(rules),)
    if not isinstance(rules, Mapping) or not all(c is None or isinstance(c, Config) for c in rules.values()):
        raise TypeError(f"`rules` must be a lora.Config, or map path patterns to a lora.Config or None, not {rules!r}")
    if not rules:
        raise ValueError("`rules` must not be empty")
    return tuple(AdapterRule(config, path=pattern) for pattern, config in rules.items())
