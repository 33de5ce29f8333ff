"""Jitted programs, cached by function and static arguments, so that equal eager calls share one."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax
from jax.core import Tracer

TRACES_TYPES_ONLY = contextvars.ContextVar("TRACES_TYPES_ONLY", default=False)


@contextlib.contextmanager
def for_types() -> Iterator[None]:
    """Context in which functions are traced only for the shapes and dtypes of results: kernels are not lowered."""
    token = TRACES_TYPES_ONLY.set(True)
    try:
        yield
    finally:
        TRACES_TYPES_ONLY.reset(token)


@functools.lru_cache(maxsize=4096)
def program(f: Callable[..., Any], *static: Hashable) -> Callable[..., Any]:
    """jax.jit of f with its leading arguments fixed to `static`; the same object for equal arguments.

    JAX traces, lowers and compiles it once per shapes and dtypes, whether it is called eagerly or inside another
    program. Calling a jitted function is faster without static arguments, so they are bound here.
    """

    def run(*arrays):
        return f(*static, *arrays)

    return jax.jit(functools.wraps(f)(run))


def run_as_program(f: Callable[..., Any], *static: Hashable, arrays: tuple[Any, ...]) -> Any:
    """f(*static, *arrays): as a cached jitted program if called eagerly, inlined if an array is traced."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(arrays)):
        return f(*static, *arrays)
    return program(f, *static)(*arrays)
