"""QuantizeMeta and QuantizeMetaSet: options of quantizers that are not part of a recipe, such as states and keys."""

import dataclasses
from typing import Any

import jax
import numpy as np

from scaledot.compat.transformer_engine.unsupported import module_getattr


@jax.tree_util.register_pytree_with_keys_class
class QuantizeMeta:
    """Options of one quantizer: `scale` and `amax_history`, or `stochastic_rounding_rng_state` and `use_rht`.

    >>> QuantizeMeta(use_rht=True).get_kwargs_dictionary()
    {'use_rht': True}
    """

    def __init__(self, **kwargs: Any):
        self._kwargs = kwargs

    def get_kwargs_dictionary(self) -> dict[str, Any]:
        """Returns the options."""
        return self._kwargs

    @staticmethod
    def merge(a: "QuantizeMeta", b: "QuantizeMeta") -> "QuantizeMeta":
        """Returns the options of both; raises if they differ in one.

        >>> QuantizeMeta.merge(QuantizeMeta(scale=1), QuantizeMeta(use_rht=True)).get_kwargs_dictionary()
        {'scale': 1, 'use_rht': True}
        """
        first, second = a.get_kwargs_dictionary(), b.get_kwargs_dictionary()
        for name in first.keys() & second.keys():
            if not np.array_equal(first[name], second[name]):
                raise ValueError(f"`{name}` is {first[name]!r} in one QuantizeMeta and {second[name]!r} in the other")
        return QuantizeMeta(**first, **{name: value for name, value in second.items() if name not in first})

    def tree_flatten_with_keys(self):
        arrays = {name: value for name, value in self._kwargs.items() if hasattr(value, "dtype")}
        static = {name: value for name, value in self._kwargs.items() if name not in arrays}
        children = [(jax.tree_util.DictKey(name), value) for name, value in arrays.items()]
        return children, (tuple(arrays), tuple(static.items()))

    @classmethod
    def tree_unflatten(cls, names_and_static, children):
        names, static = names_and_static
        return cls(**dict(zip(names, children, strict=True)), **dict(static))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class QuantizeMetaSet:
    """The QuantizeMeta of each tensor of a layer.

    >>> metas = QuantizeMetaSet(x=QuantizeMeta(), kernel=QuantizeMeta(), grad=QuantizeMeta(use_rht=True))
    >>> metas.grad.get_kwargs_dictionary()
    {'use_rht': True}
    """

    x: QuantizeMeta
    kernel: QuantizeMeta
    grad: QuantizeMeta


__all__ = ["QuantizeMeta", "QuantizeMetaSet"]
__getattr__ = module_getattr(__name__)
