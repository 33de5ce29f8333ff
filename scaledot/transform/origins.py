"""`Origin`: what a value of a program depends on, and how equations pass it on."""

import dataclasses
from collections.abc import Sequence

from jax.extend.core import JaxprEqn

from scaledot.transform.jaxprs import inner_jaxprs, scan_counts
from scaledot.transform.views import View, scanned, views_of_outputs


@dataclasses.dataclass(frozen=True)
class Origin:
    """What a value depends on: the paths of parameters, and whether it depends on other arguments, too.

    view: how it is read from its only parameter; None if it was computed in another way.
    """

    is_data: bool = False
    params: frozenset[str] = frozenset()
    view: View | None = None

    @property
    def is_weight(self) -> bool:
        return not self.is_data and bool(self.params)


CONSTANT = Origin()
DATA = Origin(is_data=True)


def join(origins: Sequence[Origin]) -> Origin:
    """The origin, without a view, of a value that is computed from values of these origins."""
    return Origin(any(o.is_data for o in origins), frozenset().union(*(o.params for o in origins)))


def rearranged(eqn: JaxprEqn, origins: Sequence[Origin]) -> list[Origin] | None:
    """Origins of the outputs of an equation that only rearranges or converts a parameter; None for other equations."""
    if not origins or origins[0].view is None or inner_jaxprs(eqn):
        return None
    views = views_of_outputs(eqn, origins[0].view)
    return None if views is None else [dataclasses.replace(origins[0], view=view) for view in views]


def passed(eqn: JaxprEqn, origins: list[Origin]) -> list[Origin]:
    """Origins of the operands of an equation as its jaxprs receive them.

    A scan slices stacked parameters. Values that loops carry, and those of a shard_map or of a custom derivative rule,
    have no view: the rewritten equation takes them as plain arrays.
    """
    without = [dataclasses.replace(origin, view=None) for origin in origins]
    if eqn.primitive.name in ("shard_map", "custom_jvp_call", "custom_vjp_call"):
        return without
    if eqn.primitive.name == "while":
        consts = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        return [*origins[:consts], *without[consts:]]
    if eqn.primitive.name == "scan":
        consts, carry = scan_counts(eqn)
        end, length = consts + carry, eqn.params["length"]
        slices = [dataclasses.replace(origin, view=scanned(origin.view, length)) for origin in origins[end:]]
        return [*origins[:consts], *without[consts:end], *slices]
    return origins
