"""Reads jaxprs.

Names and parameters of some primitives differ between jax releases; nothing else here depends on the release.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Literal

# Primitives that call one jaxpr once, and for each the name of the parameter that holds the jaxpr. Their operands are
# the inputs of that jaxpr.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "shard_map": "jaxpr",
}


class Closed(NamedTuple):
    """A jaxpr with the values of its constants."""

    jaxpr: Jaxpr
    consts: tuple[Any, ...]


def closed(jaxpr: Any) -> Closed:
    """A ClosedJaxpr, or a Jaxpr with or without constants, as a Closed."""
    return Closed(getattr(jaxpr, "jaxpr", jaxpr), tuple(getattr(jaxpr, "consts", ())))


def scan_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """The numbers of constants and of carried values of a scan."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()  # jax 0.11 and newer
    return len(list(consts)), len(list(carry))


def type_of(atom: Any) -> Any:
    """The type of a variable or literal, with shape and dtype."""
    return atom.aval


def inner_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """All jaxprs in the parameters of an equation, also those of kernels and of reductions."""
    return [closed(value).jaxpr for param in eqn.params.values() for value in _jaxprs(param)]


def _jaxprs(param: Any) -> list[Any]:
    if hasattr(param, "eqns"):
        return [param]
    return [value for item in param for value in _jaxprs(item)] if isinstance(param, (tuple, list)) else []


def read(env: dict[Any, Any], atoms: Sequence[Any], literal: Any) -> list[Any]:
    """The entries of variables in `env`; `literal` is called with the value of a literal."""
    return [literal(atom.val) if isinstance(atom, Literal) else env[atom] for atom in atoms]
