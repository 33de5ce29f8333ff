"""Policies for `jax.checkpoint` that save results and residuals of quantised matmuls.

A matmul under a recipe saves codes as residuals. A rematerialised one is computed again, casts included, unless the
policy saves it by its `checkpoint_name`: `scaledot_gemm` for results (`scaledot_batched_gemm` with batch dims) and
`scaledot_residual` for codes and their scales. `jax.checkpoint_policies.checkpoint_dots` alone saves no results of
Pallas kernels, because these are not `dot_general` primitives.

| policy | saves | recomputes |
|---|---|---|
| `checkpoint_dots_and_quantized_gemms` | results of all matmuls | casts |
| `dots_and_quantized_gemms_with_no_batch_dims` | results of matmuls without batch dims | casts, attention |
| `save_quantized_residuals` | codes for dgrad and wgrad | matmuls, and casts for fwd with other blocks or layouts |
| `save_quantized_residuals_and_gemms` | these codes, results of matmuls under a recipe | other matmuls (attention) |

    jax.checkpoint(block, policy=sd.checkpoint_policies.checkpoint_dots_and_quantized_gemms)
"""

import jax

from scaledot.train.residuals import BATCHED_GEMM_NAME, GEMM_NAME, RESIDUAL_NAME

_jax = jax.checkpoint_policies

checkpoint_dots_and_quantized_gemms = _jax.save_from_both_policies(
    _jax.checkpoint_dots, _jax.save_only_these_names(GEMM_NAME, BATCHED_GEMM_NAME)
)
dots_and_quantized_gemms_with_no_batch_dims = _jax.save_from_both_policies(
    _jax.checkpoint_dots_with_no_batch_dims, _jax.save_only_these_names(GEMM_NAME)
)
save_quantized_residuals = _jax.save_only_these_names(RESIDUAL_NAME)
save_quantized_residuals_and_gemms = _jax.save_only_these_names(RESIDUAL_NAME, GEMM_NAME, BATCHED_GEMM_NAME)
