"""Jitted programs that equal calls share."""

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax


@functools.lru_cache(maxsize=4096)
def program(f: Callable[..., Any], *static: Hashable) -> Callable[..., Any]:
    """f with its leading arguments fixed, jitted: one object for equal ones.

    JAX traces, lowers and compiles it once for arrays of equal types, wherever it is called, eagerly or inside another
    program. A jitted function without static arguments is quicker to call than one with.
    """

    def run(*arrays):
        return f(*static, *arrays)

    return jax.jit(functools.wraps(f)(run))
