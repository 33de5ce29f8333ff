"""`Site`: a contraction of a program, as rules see it."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from scaledot.transform.views import View

PRIMITIVES = ("dot_general", "conv_general_dilated", "ragged_dot_general")


@dataclasses.dataclass(frozen=True)
class Site:
    """One contraction of a program.

    path: that of the layer, which is the path of its weight without the last part, if it has several; of a weight
    computed from several parameters, the paths of their layers, joined by " + "; without a weight, `scope`, or the name
    of the primitive if that is empty. names: the strings that the pattern of a rule is compared with: `path`, the paths
    of these parameters with and without their last part, and `scope`. scope: the `jax.named_scope`. operands: "weight"
    (data times a parameter), "activations" (data times data), "constant" (data times a constant), "parameters" or
    "constants" (without data). weight: the index of the weight, 0 or 1; for two activations 1. lhs, rhs, out: types
    with shape and dtype. flops: of one execution. lengths: those of the scans around it. in_loop: whether a while loop,
    whose number of iterations is unknown, is around it. params: those of the primitive. parameters: the paths of the
    parameters that the weight is computed from. view: how the weight is read from its only parameter, if it is only
    rearranged; else None.
    """

    path: str
    names: tuple[str, ...]
    scope: str
    primitive: str
    operands: str
    weight: int
    lhs: Any
    rhs: Any
    out: Any
    flops: int
    lengths: tuple[int, ...]
    in_loop: bool
    params: Mapping[str, Any] = dataclasses.field(repr=False, compare=False)
    parameters: tuple[str, ...] = ()
    view: View | None = dataclasses.field(default=None, repr=False)

    @property
    def total_flops(self) -> int:
        """FLOPs of all executions; iterations of a while loop count once."""
        return self.flops * math.prod(self.lengths)
