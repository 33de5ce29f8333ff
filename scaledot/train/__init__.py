"""Training: matmuls and convolutions that are quantised forward and backward, as a Recipe says.

The verbs are `dot_general`, `einsum` and `dense` (`dot`), `ragged_dot` (`ragged`) and `conv_general_dilated` (`conv`);
what they take beside operands is one record (`options`). All of them are one custom_vjp (`vjp`), which asks `casts` for
quantised operands and keeps `residuals`. What differs between them is a Kind (`kind`): how a cast lies on a tensor and
how its three matmuls are computed. Mesh forms lie beside their kinds: `dot_sharded`, for convolutions as well, and
`ragged_sharded`. `cast_weights` (`weights`) casts weights ahead of many matmuls, and `weight_codes` is what they take.

A forward pass of `dense(x, w)` with x (8, 2048, 4096) and w (4096, 1024): `dot` flattens x to (16384, 4096), `casts`
has x and w cast, each for fwd and for the backward matmul that will contract it along another axis, `vjp` multiplies
the first and saves the second.
"""

from scaledot.parallel.specs import Specs, SpecsByPath
from scaledot.train.conv import conv_general_dilated
from scaledot.train.dot import dense, dot_general, einsum
from scaledot.train.ragged import ragged_dot
from scaledot.train.weight_codes import CastWeight
from scaledot.train.weights import CastWeights, cast_weights

__all__ = [
    "CastWeight",
    "CastWeights",
    "Specs",
    "SpecsByPath",
    "cast_weights",
    "conv_general_dilated",
    "dense",
    "dot_general",
    "einsum",
    "ragged_dot",
]
