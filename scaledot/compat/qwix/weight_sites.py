"""Finds the contractions of a program that multiply by a parameter, for `quantize_params`.

A parameter counts if it is an operand itself, up to a conversion of its dtype: its axes are then those of the operand.
A parameter that the program transposes first, such as an embedding table that serves as output layer, is not quantised,
as in Qwix. One that is stored in another shape than it is used in is quantised in the latter, unless only slices of it
are reshaped. The parameters of layers that are stacked for a scan have a leading axis more.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn, Literal

from scaledot.transform.jaxprs import CALLS, closed, scan_counts, type_of


class WeightSite(NamedTuple):
    """A contraction by a parameter.

    param: the path of the parameter. stacked: the number of its leading axes that surrounding scans iterate over.
    shape: of the parameter, after a reshape if there is one. index: of the operand, 0 or 1. ndim: of the operand.
    contracting, free: its axes; free ones have a scale per index.
    """

    param: str
    stacked: int
    shape: tuple[int, ...]
    primitive: str
    scope: str
    index: int
    ndim: int
    contracting: tuple[int, ...]
    free: tuple[int, ...]

    @property
    def module_path(self) -> str:
        return self.param.rpartition("/")[0]


class _Weight(NamedTuple):
    """A value that is a parameter, maybe reshaped to `shape`, or a slice along its leading axes."""

    param: str
    stacked: int
    shape: tuple[int, ...]


_Env = dict[Any, _Weight]
_SAME_AXES = ("convert_element_type", "copy", "optimization_barrier", "sharding_constraint")


def find(jaxpr: Any, params: Sequence[str | None], scope: str = "") -> Iterator[WeightSite]:
    """Yields the contractions by parameters of a jaxpr. params: the path of each input; None for other inputs."""
    inner = closed(jaxpr).jaxpr
    weights = [
        None if param is None else _Weight(param, 0, type_of(var).shape)
        for param, var in zip(params, inner.invars, strict=True)
    ]
    return _find(inner, weights, scope)


def _find(jaxpr: Any, ins: Sequence[_Weight | None], scope: str) -> Iterator[WeightSite]:
    env: _Env = {var: weight for var, weight in zip(jaxpr.invars, ins, strict=True) if weight is not None}
    for eqn in jaxpr.eqns:
        operands = [None if isinstance(atom, Literal) else env.get(atom) for atom in eqn.invars]
        here = "/".join(filter(None, (scope, str(eqn.source_info.name_stack))))
        name = eqn.primitive.name
        if name in _SAME_AXES:
            env |= {var: weight for var, weight in zip(eqn.outvars, operands, strict=True) if weight is not None}
        elif name == "reshape" and operands[0] is not None and not operands[0].stacked:
            env[eqn.outvars[0]] = operands[0]._replace(shape=tuple(eqn.params["new_sizes"]))
        elif name in ("dot_general", "conv_general_dilated"):
            yield from _site(eqn, operands, here)
        elif any(operands):
            for inner, inner_ins in _inner(eqn, operands):
                yield from _find(closed(inner).jaxpr, inner_ins, here)


def _inner(eqn: JaxprEqn, operands: list[_Weight | None]) -> Iterator[tuple[Any, list[_Weight | None]]]:
    """The jaxprs of an equation, with the weights among their inputs."""
    name, params = eqn.primitive.name, eqn.params
    if name in CALLS:
        yield params[CALLS[name]], operands
    elif name == "cond":
        yield from ((branch, operands[1:]) for branch in params["branches"])
    elif name == "while":
        body = operands[params["cond_nconsts"] :]
        carried = len(body) - params["body_nconsts"]
        yield params["body_jaxpr"], [*body[: params["body_nconsts"]], *[None] * carried]
    elif name == "scan":
        consts, carry = scan_counts(eqn)
        sliced = [None if w is None else w._replace(stacked=w.stacked + 1) for w in operands[consts + carry :]]
        yield params["jaxpr"], [*operands[:consts], *[None] * carry, *sliced]


def _site(eqn: JaxprEqn, operands: list[_Weight | None], scope: str) -> Iterator[WeightSite]:
    found = [index for index, weight in enumerate(operands[:2]) if weight is not None]
    if len(found) != 1:
        return
    (index,), numbers = found, eqn.params["dimension_numbers"]
    weight, ndim = operands[index], type_of(eqn.invars[index]).ndim
    assert weight is not None
    if eqn.primitive.name == "dot_general":
        contracting = tuple(numbers[0][index])
    elif index == 1:
        contracting = tuple(numbers.rhs_spec[1:])
    else:
        return  # a parameter as the image of a convolution
    free = tuple(axis for axis in range(ndim) if axis not in contracting)
    yield WeightSite(*weight, eqn.primitive.name, scope, index, ndim, contracting, free)
