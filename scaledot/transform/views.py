"""How the operand of a matmul is read from a parameter: by transposes, reshapes, slices and scans over stacked layers.

A `View` is a chain of such steps. It is a linear map of the parameter, so a change of the operand can be written back
to the parameter: `written_back` applies the transposed map. Conversions between float dtypes, sharding constraints and
`stop_gradient` leave the elements where they are and are not steps.

A weight (layers, inputs, heads * dim) that a scan slices and an attention layer reshapes to (inputs, heads, dim) has
the steps ("scan", layers), ("reshape", (inputs, heads, dim)).
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from scaledot.transform.jaxprs import type_of

Step = tuple[Any, ...]  # the name of an operation and its arguments
View = tuple[Step, ...]

_SAME_ELEMENTS = ("copy", "copy_p", "stop_gradient", "sharding_constraint")


def views_of_outputs(eqn: JaxprEqn, view: View) -> list[View] | None:
    """Views of the outputs of an equation whose first operand has a view; None if they are not views."""
    name, params = eqn.primitive.name, eqn.params
    if name in _SAME_ELEMENTS or (name == "convert_element_type" and _is_float(params["new_dtype"])):
        return [view]
    if name == "transpose":
        return [(*view, ("transpose", tuple(params["permutation"])))]
    if name == "slice":
        return [(*view, ("slice", *(params[field] for field in ("start_indices", "limit_indices", "strides"))))]
    if name == "split":
        return [(*view, step) for step in _parts(type_of(eqn.invars[0]).shape, params["axis"], params["sizes"])]
    old, new = type_of(eqn.invars[0]).shape, type_of(eqn.outvars[0]).shape
    if name in ("reshape", "squeeze", "broadcast_in_dim") and math.prod(old) == math.prod(new):
        return [(*view, ("reshape", new))]
    return None


def scanned(view: View | None, length: int) -> View | None:
    """The view of one layer, for a view of stacked layers that a scan slices along axis 0."""
    return None if view is None else (*view, ("scan", length))


def stacked_sizes(view: View) -> tuple[int, ...]:
    """The lengths of the scans that slice the parameter, from the outermost."""
    return tuple(step[1] for step in view if step[0] == "scan")


def written_back(view: View, shape: tuple[int, ...], operand: jax.Array) -> jax.Array:
    """An array in the `shape` of the parameter whose view is `operand`, and that is zero where the view does not read.

    operand: with a leading axis for each scan.

    >>> written_back((("slice", (1, 0), (2, 2), None), ("transpose", (1, 0))), (3, 2), jnp.array([[1.0], [2.0]]))
    Array([[0., 0.],
           [1., 2.],
           [0., 0.]], dtype=float32)
    """
    transposed = jax.linear_transpose(functools.partial(_read, view), jax.ShapeDtypeStruct(shape, operand.dtype))
    return transposed(operand)[0]


def _read(view: View, parameter: jax.Array) -> jax.Array:
    for position, (name, *arguments) in enumerate(view):
        if name == "scan":
            return jax.vmap(functools.partial(_read, view[position + 1 :]))(parameter)
        parameter = _OPERATIONS[name](parameter, *arguments)
    return parameter


_OPERATIONS: dict[str, Callable[..., jax.Array]] = {
    "transpose": jnp.transpose,
    "reshape": jnp.reshape,
    "slice": lax.slice,
}


def _parts(shape: tuple[int, ...], axis: int, sizes: tuple[int, ...]) -> list[Step]:
    """The steps that read the parts of a split."""
    ends = list(itertools.accumulate(map(int, sizes), initial=0))
    full = [(0, size) for size in shape]
    ranges = [[*full[:axis], span, *full[axis + 1 :]] for span in itertools.pairwise(ends)]
    return [("slice", *zip(*spans, strict=True), None) for spans in ranges]


def _is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)
