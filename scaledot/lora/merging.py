"""`merge`: parameters with the changes of their adapters added."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from scaledot.array import ScaledArray
from scaledot.lora.config import Rules
from scaledot.lora.program import AdaptedParameter, Adapters, with_adapters
from scaledot.ops.quantize import dequantize, quantize
from scaledot.transform.program import ParamArgs, flattened


def merge(
    fn: Callable[..., Any], rules: Rules, *, params: ParamArgs = 0, requantize: bool = False, dtype: Any = None
) -> Callable[..., Any]:
    """A function of (adapters, arguments of `fn`) that returns the parameters plus scaling · A B.

    It returns the argument at position `params`, or a tuple of them for several positions. Sums are computed in float32
    and rounded once. Other arguments are only traced and may be ShapeDtypeStructs.

    Args:
      fn, rules, params: as in `init`.
      requantize: whether a ScaledArray is quantised again, to its format and blocks, with scales of the merged weight
        (by `absmax`, or `minmax` if it has zero points). That rounds the change of the adapters to the format's codes:
        measure the model after it. By default a merged ScaledArray becomes a plain array.
      dtype: of plain arrays that were ScaledArrays, by default the `dtype` of these. Others keep their own.

    >>> from scaledot.lora import Config
    >>> adapters = {"w": {"a": jnp.ones((3, 1)), "b": jnp.ones((1, 2))}}
    >>> merge(lambda w, x: x @ w, Config(rank=1, alpha=2))(adapters, jnp.zeros((3, 2)), jnp.ones((5, 3)))
    Array([[2., 2.],
           [2., 2.],
           [2., 2.]], dtype=float32)
    """
    transform = with_adapters(fn, rules, params)

    def call(adapters: Adapters, *args: Any, **kwargs: Any) -> Any:
        program, _ = transform.program(args, kwargs)
        program.check(adapters)
        leaves, tree = flattened(args, kwargs)
        found = [program.parameters.get(transform.param_name(path, len(args)) or "") for path, _ in leaves]
        merged = [
            _merged(leaf, parameter, adapters, requantize, dtype) if parameter else leaf
            for parameter, (_, leaf) in zip(found, leaves, strict=True)
        ]
        new_args, _ = jax.tree.unflatten(tree, merged)
        return new_args[params] if isinstance(params, int) else tuple(new_args[position] for position in params or ())

    return call


def _merged(leaf: Any, parameter: AdaptedParameter, adapters: Adapters, requantize: bool, dtype: Any) -> Any:
    accumulation = jnp.promote_types(leaf.dtype, jnp.float32)
    values = dequantize(leaf, accumulation) if isinstance(leaf, ScaledArray) else jnp.asarray(leaf, accumulation)
    for name, use in zip(parameter.names, parameter.uses, strict=True):
        a, b = (adapters[name][factor].astype(accumulation) for factor in ("a", "b"))
        values += parameter.config.scaling * use.change(a, b, leaf.shape)
    if isinstance(leaf, ScaledArray) and requantize:
        return _like(leaf, values, parameter.path)
    return values.astype(dtype if isinstance(leaf, ScaledArray) and dtype is not None else leaf.dtype)


def _like(q: ScaledArray, values: jax.Array, path: str) -> ScaledArray:
    """The values in the format, blocks and dtype of q, with one tensor scale for each that q has."""
    if q.rotation is not None:
        raise ValueError(f"`requantize` of {path!r}: {q!r} is rotated; merge to a plain array and quantise that")
    calibration = "absmax" if q.zero is None else "minmax"

    def cast(values: jax.Array) -> ScaledArray:
        return quantize(values, q.format, block=q.block or (1,), calibration=calibration, pad=True, dtype=q.dtype)

    for _ in range(0 if q.tensor_scale is None else q.tensor_scale.ndim):
        cast = jax.vmap(cast)
    return cast(values)
