"""explain: which kernels a matmul and its casts would take, and why not the others."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from scaledot.kernels import table
from scaledot.kernels.spec import CastProblem, Problem


def explain(verb: Callable[..., Any], *args, **kwargs) -> str:
    """What `verb(*args, **kwargs)` would do, as text: one line per kernel for each cast and each matmul.

    Nothing is computed; arrays may be jax.ShapeDtypeStructs. A function of `train` is explained forward and backward.

    >>> import jax.numpy as jnp, scaledot as sd
    >>> w = sd.quantize(jnp.ones((256, 64)), "int8", axis=0)
    >>> print(sd.explain(sd.matmul, w.T, w).splitlines()[0])
    dot mk,kn->mn: int8[64,256] in blocks of (0,) x int8[256,64] in blocks of (0, 1) -> float32
    >>> print(sd.explain(sd.quantize, jnp.ones((256, 64)), "int8").splitlines()[0])
    cast float32[256,64] -> int8 in blocks of (0,)
    """
    return "\n".join(map(table.explain, problems(verb, *args, **kwargs))) or "nothing is multiplied or cast"


def problems(verb: Callable[..., Any], *args, **kwargs) -> list[Problem | CastProblem]:
    """The casts and matmuls of `verb(*args, **kwargs)`, in the order in which it asks for kernels."""
    parameters = inspect.signature(verb).parameters if callable(verb) else {}
    has_keywords = any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    if "kernel" not in parameters and not has_keywords:
        raise TypeError(f"`verb` must take `kernel`, as scaledot.matmul and scaledot.quantize do; {verb!r} does not")
    trains = "recipe" in parameters
    if trains and "key" in parameters and kwargs.get("key") is None:
        kwargs["key"] = jax.random.key(0)  # the backward pass may need one
    kwargs.pop("kernel", None)
    leaves, tree = jax.tree.flatten((args, kwargs))
    at = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")]
    found: list[Problem | CastProblem] = []

    def record(problem: Problem | CastProblem) -> None:
        found.append(problem)

    def call(arrays: list[Any]) -> Any:
        given = dict(zip(at, arrays, strict=True))
        args, kwargs = jax.tree.unflatten(tree, [given.get(i, leaf) for i, leaf in enumerate(leaves)])
        return verb(*args, kernel=record, **kwargs)

    jax.eval_shape(_differentiated(call) if trains else call, [leaves[i] for i in at])
    return found


def _differentiated(f: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """f and its gradient with respect to all arrays of floats."""

    def step(arrays: list[Any]) -> Any:
        floats = {i: a for i, a in enumerate(arrays) if jnp.issubdtype(a.dtype, jnp.floating)}
        result, backward = jax.vjp(lambda floats: f([floats.get(i, a) for i, a in enumerate(arrays)]), floats)
        return backward(jax.tree.map(jnp.ones_like, result))

    return step
