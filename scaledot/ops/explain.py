"""explain: which kernel a contraction would take, and why not the others."""

import inspect
from collections.abc import Callable
from typing import Any

import jax

from scaledot.kernels import table
from scaledot.kernels.spec import Problem


def explain(verb: Callable[..., jax.Array], *args, **kwargs) -> str:
    """What `verb(*args, **kwargs)` would do, as text: one line per kernel for each product.

    Nothing is computed; arrays may be jax.ShapeDtypeStructs.

    >>> import jax.numpy as jnp, scaledot as sd
    >>> w = sd.quantize(jnp.ones((256, 64)), "int8", axis=0)
    >>> print(sd.explain(sd.matmul, w.T, w).splitlines()[0])
    dot mk,kn->mn: int8[64,256] in blocks of (0,) x int8[256,64] in blocks of (0, 1) -> float32
    """
    if not callable(verb) or "kernel" not in inspect.signature(verb).parameters:
        raise TypeError(f"`verb` must be a product such as scaledot.matmul, which takes `kernel`, not {verb!r}")
    kwargs.pop("kernel", None)
    leaves, tree = jax.tree.flatten((args, kwargs))
    at = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")]
    problems: list[Problem] = []

    def record(problem: Problem) -> None:
        problems.append(problem)

    def call(arrays: list[Any]) -> jax.Array:
        given = dict(zip(at, arrays, strict=True))
        args, kwargs = jax.tree.unflatten(tree, [given.get(i, leaf) for i, leaf in enumerate(leaves)])
        return verb(*args, kernel=record, **kwargs)

    jax.eval_shape(call, [leaves[i] for i in at])
    return "\n".join(table.explain(problem) for problem in problems) or "nothing is multiplied"
