"""Inference with quantised weights: kernels of a Flax model become ScaledArrays, activations stay as they are.

`weights` quantises one kernel along its contracting dims and multiplies by it; `linen` and `nnx` find the kernels of a
model. The public names are in `scaledot.linen` and `scaledot.nnx`.
"""
