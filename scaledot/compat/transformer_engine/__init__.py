"""Drop-in replacement of transformer_engine.jax, implemented by scaledot on any device.

    from scaledot.compat import transformer_engine as te       # instead of: import transformer_engine.jax as te
    from scaledot.compat.transformer_engine import flax as te_flax
    from scaledot.compat.transformer_engine.recipe import MXFP8BlockScaling

Submodules have TransformerEngine's names: `flax`, `sharding`, `checkpoint_policies`, `recipe`, `quantize`,
`cpp_extensions`, `dense` (a module, which can also be called as its function `te.dense.dense`), `layernorm`,
`activation`, `layernorm_dense`, `layernorm_mlp`, and the tutorial's `quickstart_jax_utils`. Beyond TransformerEngine,
every recipe runs on CPUs and any GPU, shapes need not be multiples of the block, vmap and batch dims work, and
delayed-scaling states of several micro-batches are merged by maximum instead of added. Attention and whole transformer
layers are not provided; accessing one raises an error that names the replacement.

Programs that cannot be edited run under an import alias: `install()`, or
`python -m scaledot.compat.transformer_engine MODULE ARGUMENTS...`.
"""

from scaledot.compat.transformer_engine import (
    activation,
    attention,
    checkpoint_policies,
    cpp_extensions,
    dense,
    layernorm,
    layernorm_dense,
    layernorm_mlp,
    quantize,
    recipe,
    sharding,
    softmax,
)
from scaledot.compat.transformer_engine.cpp_extensions import CollectiveOp, CollectiveOpSet
from scaledot.compat.transformer_engine.dense import grouped_dense
from scaledot.compat.transformer_engine.install import install
from scaledot.compat.transformer_engine.quantize import (
    NVTE_FP8_COLLECTION_NAME,
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
    autocast,
    fp8_autocast,
    noop_quantizer_set,
    update_collections,
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
from scaledot.compat.transformer_engine.unsupported import module_getattr

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
    "activation",
    "attention",
    "autocast",
    "checkpoint_policies",
    "cpp_extensions",
    "dense",
    "fp8_autocast",
    "global_shard_guard",
    "grouped_dense",
    "install",
    "layernorm",
    "layernorm_dense",
    "layernorm_mlp",
    "noop_quantizer_set",
    "quantize",
    "recipe",
    "sharding",
    "softmax",
    "update_collections",
    "with_sharding_constraint_by_logical_axes",
]

_ON_DEMAND = ("flax", "quickstart_jax_utils")  # imported at first use, so that Flax stays an optional dependency
__getattr__ = module_getattr(__name__, _ON_DEMAND)
