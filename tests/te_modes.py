"""Helpers of the tests of `compat.transformer_engine`: scaling modes, a quantizer for each, comparison of tensors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tables import params_of

from scaledot.compat import transformer_engine as te
from scaledot.compat.transformer_engine.quantize import QuantizeLayout, ScalingMode

KEY = jax.random.key(5)
E4M3, E5M2, E2M1 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float4_e2m1fn
MODES = {
    ScalingMode.DELAYED_TENSOR_SCALING: E4M3,
    ScalingMode.CURRENT_TENSOR_SCALING: E4M3,
    ScalingMode.MXFP8_1D_SCALING: E4M3,
    ScalingMode.NVFP4_1D_SCALING: E2M1,
    ScalingMode.NVFP4_2D_SCALING: E2M1,
    ScalingMode.FP8_1D_BLOCK_SCALING: E4M3,
    ScalingMode.FP8_2D_BLOCK_SCALING: E4M3,
}
# Tested by `make test-all` only, because other modes cover them: current scaling by delayed scaling, 1D by 2D blocks
# (NVFP4) and 2D by 1D (FP8), and FP8 blocks by MXFP8.
EXHAUSTIVE_ONLY = ("CURRENT_TENSOR_SCALING", "NVFP4_1D_SCALING", "FP8_2D_BLOCK_SCALING", "FP8_1D_BLOCK_SCALING")
MODE_ROWS = params_of(MODES, EXHAUSTIVE_ONLY, lambda mode: mode.name)
EACH_MODE = pytest.mark.parametrize("mode", MODE_ROWS)
STATELESS_MODE = pytest.mark.parametrize(
    "mode", params_of([m for m in MODES if not m.spec.delayed], EXHAUSTIVE_ONLY[1:], lambda mode: mode.name)
)


def quantizer(mode, layout=QuantizeLayout.ROWWISE_COLWISE, **options):
    return te.QuantizerFactory.create(1, mode, MODES[mode], layout, **options)


def assert_same_leaves(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))
