"""`CustomWeight`: a parameter that computes its own contractions, such as a frozen weight with a low-rank adapter."""

import abc
from typing import Any

import jax

from scaledot.transform.site import Site


class CustomWeight(abc.ABC):
    """A parameter of a rewritten program that stands for `base`, an array or a ScaledArray, where it has a `View`.

    Steps of a view apply to `base`; scan slices all leaves of the pytree. At a contraction `contract` is called with
    the result of `base`.
    """

    base: Any

    @abc.abstractmethod
    def with_base(self, base: Any) -> "CustomWeight":
        """The same parameter after a step of its view."""

    @abc.abstractmethod
    def contract(self, site: Site, x: jax.Array, y: jax.Array, key: jax.Array | None, *rest: Any) -> jax.Array:
        """The result of a contraction with x, where y is that of `base`; rest: further operands, such as group sizes.

        key: a raw key of this site and loop iteration; None if the program is called without one.
        """
