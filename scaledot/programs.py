"""Jitted programs that equal calls share."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax
from jax.core import Tracer

IS_FOR_TYPES = contextvars.ContextVar("IS_FOR_TYPES", default=False)


@contextlib.contextmanager
def for_types() -> Iterator[None]:
    """Inside, functions are traced for the types of their results only, so kernels need not be lowered."""
    token = IS_FOR_TYPES.set(True)
    try:
        yield
    finally:
        IS_FOR_TYPES.reset(token)


@functools.lru_cache(maxsize=4096)
def program(f: Callable[..., Any], *static: Hashable) -> Callable[..., Any]:
    """f with its leading arguments fixed, jitted: one object for equal ones.

    JAX traces, lowers and compiles it once for arrays of equal types, wherever it is called, eagerly or inside another
    program. A jitted function without static arguments is quicker to call than one with.
    """

    def run(*arrays):
        return f(*static, *arrays)

    return jax.jit(functools.wraps(f)(run))


def run_as_program(f: Callable[..., Any], *static: Hashable, arrays: tuple[Any, ...]) -> Any:
    """f(*static, *arrays): eagerly as one program that equal calls share, inside another trace as it is."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(arrays)):
        return f(*static, *arrays)
    return program(f, *static)(*arrays)
