"""The named scope of a contraction under a recipe, by which it is recognised in a jaxpr and in a profile.

The operations of y = train.dense(x, w, recipe="fp8_current"), for x (8192, 4096) and w (4096, 1024), are in the scope
`scaledot[fp8_current|dot_general|4096|ab,bc->ac]`; those of the backward pass in `transpose(jvp(scaledot[...]))`.
"""

import re
from typing import Any, NamedTuple

import jax

_PATTERN = re.compile(r"scaledot\[([^|\]]*)\|([^|\]]*)\|(\d+)\|([^|\]]*)\]")


class ContractionScope(NamedTuple):
    """What the scope says. products: that are added up for each element of the result.

    equation: the labels of a dot_general as in einsum, "" for other primitives.

    >>> str(ContractionScope("mxfp8", "dot_general", 64, "mk,kn->mn"))
    'scaledot[mxfp8|dot_general|64|mk,kn->mn]'
    """

    recipe: str
    primitive: str
    products: int
    equation: str = ""

    def __str__(self) -> str:
        return f"scaledot[{'|'.join(map(str, self))}]"

    def named_scope(self) -> Any:
        """The context manager, which is also a decorator."""
        return jax.named_scope(str(self))


def innermost(name_stack: str) -> ContractionScope | None:
    """The last contraction in a name stack; None without one.

    >>> innermost("layers/scaledot[mxfp8|dot_general|64|mk,kn->mn]/jit(run)")
    ContractionScope(recipe='mxfp8', primitive='dot_general', products=64, equation='mk,kn->mn')
    """
    found = _PATTERN.findall(name_stack)
    if not found:
        return None
    recipe, primitive, products, equation = found[-1]
    return ContractionScope(recipe, primitive, int(products), equation)
