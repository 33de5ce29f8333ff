"""`init` and `adapted`: the factors of a function's adapters, and the function with them."""

import math
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from scaledot.lora.config import Config, Rules
from scaledot.lora.program import Adapters, with_adapters
from scaledot.lora.uses import Use
from scaledot.lora.weight import Factors
from scaledot.numerics.rounding import FoldedKey, uniform_of
from scaledot.transform.program import ParamArgs


def init(
    fn: Callable[..., Any], rules: Rules, *, key: jax.Array, params: ParamArgs = 0
) -> Callable[..., dict[str, Factors]]:
    """A function of the arguments of `fn` that returns new adapters of `adapted(fn, rules)`.

    They are a dictionary {path of the parameter: {"a": (inputs, rank), "b": (rank, outputs)}}. A is uniform in
    ±1/sqrt(inputs) and B is zero, so that the adapted function starts as `fn`. Axes of scans over stacked layers, and
    batch dims of the weight such as experts, come first. A parameter that is sliced before its matmuls has an adapter
    for each slice, the second one under "path#2". Arguments may be ShapeDtypeStructs.

    Args:
      fn: any function of arrays and pytrees, such as the `apply` of a linen model.
      rules: a `Config`, or {path pattern: Config or None}; the first match applies, and without a match a matmul has no
        adapter. A rule that gives no matmul an adapter raises with the reason.
      key: of `jax.random`. The factors of a path depend on the key and the path only.
      params: the position of the argument of `fn` that holds parameters, or several positions.

    >>> adapters = init(lambda params, x: x @ params["w"], Config(2, 4), key=jax.random.key(0))
    >>> jax.tree.map(jnp.shape, adapters({"w": jnp.ones((32, 64))}, jnp.ones((3, 32))))
    {'w': {'a': (32, 2), 'b': (2, 64)}}
    """
    transform = with_adapters(fn, rules, params)

    def call(*args: Any, **kwargs: Any) -> dict[str, Factors]:
        program, _ = transform.program(args, kwargs)
        return {
            name: _initial(key, name, use, parameter.config)
            for parameter in program.parameters.values()
            for name, use in zip(parameter.names, parameter.uses, strict=True)
        }

    return call


def _initial(key: jax.Array, name: str, use: Use, config: Config) -> Factors:
    """Uniform numbers are hashes, as in stochastic rounding: Threefry takes seconds to compile for a model's shapes."""
    shapes, limit = use.factor_shapes(config.rank), 1 / math.sqrt(use.inputs)
    uniform = uniform_of(FoldedKey(key, zlib.crc32(name.encode())), shapes["a"])
    a = (limit * (2 * uniform - 1)).astype(config.dtype)
    return {"a": a, "b": jnp.zeros(shapes["b"], config.dtype)}


def adapted(fn: Callable[..., Any], rules: Rules, *, params: ParamArgs = 0) -> Callable[..., Any]:
    """A function of (adapters, arguments of `fn`) that computes `fn` with its matmuls plus low-rank adapters.

    A matmul x w becomes x w + scaling · (x A) B, wherever it is, also inside jit, scan, while, cond and checkpoint.
    Parameters are frozen: gradients exist for the adapters, and for arguments that are not parameters. A parameter may
    be a ScaledArray; then its codes are the only residual of w, and dx is their matmul with the gradient.

    For activations in low precision, quantise the result; adapters stay in the dtype of x:
    `transform.quantized(adapted(fn, rules), "fp8_current", params=1)`.

    Args:
      fn, rules, params: as in `init`. Positions count the arguments of `fn`.

    Returns:
      A function that takes one more keyword argument, `dropout_key`: a new key in each step of training. Without it
      there is no dropout.

    >>> params, x = {"w": jnp.ones((32, 64))}, jnp.ones((3, 32))
    >>> f, rules = lambda params, x: x @ params["w"], Config(rank=2, alpha=4)
    >>> adapters = init(f, rules, key=jax.random.key(0))(params, x)
    >>> bool(jnp.all(adapted(f, rules)(adapters, params, x) == f(params, x)))
    True
    """
    transform = with_adapters(fn, rules, params)

    def call(adapters: Adapters, *args: Any, dropout_key: jax.Array | None = None, **kwargs: Any) -> Any:
        program, inputs = transform.program(args, kwargs)
        return program(adapters, inputs, dropout_key)

    call.__name__ = call.__qualname__ = f"adapted_{getattr(fn, '__name__', type(fn).__name__)}"
    call.__doc__ = fn.__doc__
    return call
