"""explain: the kernels that a matmul and its casts would run, and why not the others."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from scaledot.kernels import table
from scaledot.kernels.spec import CastProblem, Problem


def explain(verb: Callable[..., Any], *args, **kwargs) -> str:
    """Which kernels `verb(*args, **kwargs)` would run, as text: for each cast and matmul one line per kernel.

    Traces without computing; arrays may be jax.ShapeDtypeStructs. For a function of `train` it lists the forward and
    the backward pass.

    >>> import jax.numpy as jnp, scaledot as sd
    >>> w = sd.quantize(jnp.ones((256, 64)), "int8", axis=0)
    >>> print(sd.explain(sd.matmul, w.T, w).splitlines()[0])
    dot mk,kn->mn: int8[64,256] in blocks of (0,) x int8[256,64] in blocks of (0, 1) -> float32
    >>> print(sd.explain(sd.quantize, jnp.ones((256, 64)), "int8").splitlines()[0])
    cast float32[256,64] -> int8 in blocks of (0,)
    """
    return "\n".join(map(table.explain, problems(verb, *args, **kwargs))) or "no matmul and no cast"


def problems(verb: Callable[..., Any], *args, **kwargs) -> list[Problem | CastProblem]:
    """The casts and matmuls of `verb(*args, **kwargs)`, in the order in which kernels are chosen."""
    parameters = inspect.signature(verb).parameters if callable(verb) else {}
    has_keywords = any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    if "kernel" not in parameters and not has_keywords:
        raise TypeError(f"`verb` must take `kernel`, as scaledot.matmul and scaledot.quantize do; {verb!r} does not")
    has_backward = "recipe" in parameters
    if has_backward and "key" in parameters and kwargs.get("key") is None:
        kwargs["key"] = jax.random.key(0)  # the backward pass may need one
    kwargs.pop("kernel", None)
    leaves, tree = jax.tree.flatten((args, kwargs))
    array_indices = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")]
    found: list[Problem | CastProblem] = []

    def record(problem: Problem | CastProblem) -> None:
        found.append(problem)

    def call(arrays: list[Any]) -> Any:
        traced = dict(zip(array_indices, arrays, strict=True))
        args, kwargs = jax.tree.unflatten(tree, [traced.get(i, leaf) for i, leaf in enumerate(leaves)])
        return verb(*args, kernel=record, **kwargs)

    jax.eval_shape(_with_gradient(call) if has_backward else call, [leaves[i] for i in array_indices])
    return found


def _with_gradient(f: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Runs f and its backward pass with respect to all float arrays."""

    def step(arrays: list[Any]) -> Any:
        floats = {i: a for i, a in enumerate(arrays) if jnp.issubdtype(a.dtype, jnp.floating)}
        result, backward = jax.vjp(lambda floats: f([floats.get(i, a) for i, a in enumerate(arrays)]), floats)
        return backward(jax.tree.map(jnp.ones_like, result))

    return step
