"""Training: matmuls and convolutions whose operands are quantised in the forward and the backward pass, by a Recipe.

| function | module | operation | inside a shard_map |
|---|---|---|---|
| `dense`, `dot_general`, `einsum` | `dot` | DotOp | `dot_sharded`: ShardedOp |
| `conv_general_dilated` | `conv` | ConvOp | `dot_sharded`: ShardedOp |
| `ragged_dot` | `ragged` | RaggedDotOp | `ragged_sharded`: ShardedRaggedDotOp |

All share one custom_vjp (`vjp`) over an operation (`train_op`), and the same keyword arguments (`options`). `casts`
quantises operands, with block sizes per dim from `resolved_cast`; `residuals` has what is saved for the backward pass.
`cast_weights` (`weights`, `weight_codes`) quantises weights once for many matmuls; `forward_weights` returns those of a
trained model, for checkpoints.

The forward pass of `dense(x, w)` with x (8, 2048, 4096) and w (4096, 1024): `flatten` makes x (16384, 4096); `casts`
quantises x along 4096 for fwd and along 16384 for wgrad, w along 4096 for fwd and along 1024 for dgrad; `vjp`
multiplies the operands of fwd and saves the other two as residuals.
"""

from scaledot.parallel.specs import Specs, SpecsByPath
from scaledot.train.conv import conv_general_dilated
from scaledot.train.dot import dense, dot_general, einsum
from scaledot.train.forward_weights import forward_weights
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
    "forward_weights",
    "ragged_dot",
]
