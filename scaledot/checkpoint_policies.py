"""Policies for `jax.checkpoint` that know quantised products.

A product under a recipe keeps codes for its backward pass. Rematerialised, it would be computed again, casts and all,
unless its results are saved by name: `scaledot_gemm` for results (`scaledot_batched_gemm` where there are batch axes)
and `scaledot_residual` for codes and their scales. jax.checkpoint_policies.checkpoint_dots alone does not see results
of kernels that are no dot.

    jax.checkpoint(block, policy=sd.checkpoint_policies.checkpoint_dots_and_quantized_gemms)
"""

import jax

from scaledot.train.residuals import BATCHED_GEMM_NAME, GEMM_NAME, RESIDUAL_NAME

_own, _jax = jax.checkpoint_policies.save_only_these_names, jax.checkpoint_policies

# Results of products are kept; casts are made again.
checkpoint_dots_and_quantized_gemms = _jax.save_from_both_policies(
    _jax.checkpoint_dots, _own(GEMM_NAME, BATCHED_GEMM_NAME)
)
# The same for products without batch axes; those of attention are computed again.
dots_and_quantized_gemms_with_no_batch_dims = _jax.save_from_both_policies(
    _jax.checkpoint_dots_with_no_batch_dims, _own(GEMM_NAME)
)
# Codes of activations and weights that the backward pass takes are kept; results are computed again where needed, and
# with them casts for the forward matmul other than the kept ones: blocks along another axis, on Hopper another layout.
save_quantized_residuals = _own(RESIDUAL_NAME)
# Both: nothing of a product is done twice.
save_quantized_residuals_and_gemms = _own(RESIDUAL_NAME, GEMM_NAME, BATCHED_GEMM_NAME)
