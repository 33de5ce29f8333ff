"""TransformerEngine's names for JAX on this library's core, on any device.

    from scaledot.compat import transformer_engine as te       # instead of: import transformer_engine.jax as te
    from scaledot.compat.transformer_engine import flax as te_flax
    from scaledot.compat.transformer_engine.recipe import MXFP8BlockScaling

Submodules are laid out as theirs: `flax`, `sharding`, `checkpoint_policies`, `recipe`, `quantize`, `cpp_extensions`,
`dense` (so the function is `te.dense.dense`), and the tutorial's `quickstart_jax_utils`. What theirs cannot do and this
does: CPUs and any GPU for every recipe, shapes that do not divide by a block, vmap, batch dimensions, states that are
merged instead of added. Their global `autocast` and their own layers are not offered; the error says what to write
instead.
"""

from scaledot.compat.transformer_engine import checkpoint_policies, cpp_extensions, dense, quantize, recipe, sharding
from scaledot.compat.transformer_engine.cpp_extensions import CollectiveOp, CollectiveOpSet
from scaledot.compat.transformer_engine.dense import grouped_dense
from scaledot.compat.transformer_engine.not_offered import refuse
from scaledot.compat.transformer_engine.quantize import (
    AbstractBaseTensor,
    AbstractBaseTensor1x,
    GroupedScaledTensor1x,
    NoScaleTensor,
    QuantizeLayout,
    Quantizer,
    QuantizerFactory,
    QuantizerSet,
    ScaledTensor,
    ScaledTensor1x,
    ScaledTensor2x,
    ScaledTensorFactory,
    ScalingMode,
    TensorUsage,
    noop_quantizer_set,
)
from scaledot.compat.transformer_engine.recipe import (
    E4M3,
    HYBRID,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from scaledot.compat.transformer_engine.sharding import (
    MeshResource,
    global_shard_guard,
    with_sharding_constraint_by_logical_axes,
)

NVTE_FP8_COLLECTION_NAME = "_overwrite_with_gradient"

__all__ = [
    "E4M3",
    "HYBRID",
    "NVTE_FP8_COLLECTION_NAME",
    "AbstractBaseTensor",
    "AbstractBaseTensor1x",
    "CollectiveOp",
    "CollectiveOpSet",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "GroupedScaledTensor1x",
    "MXFP8BlockScaling",
    "MeshResource",
    "NVFP4BlockScaling",
    "NoScaleTensor",
    "QuantizeLayout",
    "Quantizer",
    "QuantizerFactory",
    "QuantizerSet",
    "Recipe",
    "ScaledTensor",
    "ScaledTensor1x",
    "ScaledTensor2x",
    "ScaledTensorFactory",
    "ScalingMode",
    "TensorUsage",
    "checkpoint_policies",
    "cpp_extensions",
    "dense",
    "global_shard_guard",
    "grouped_dense",
    "noop_quantizer_set",
    "quantize",
    "recipe",
    "sharding",
    "with_sharding_constraint_by_logical_axes",
]

_ON_DEMAND = ("flax", "quickstart_jax_utils")  # nothing else needs Flax
__getattr__ = refuse(__name__, _ON_DEMAND)
