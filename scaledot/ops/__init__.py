"""The public functions on arrays: quantise and dequantise, matmul, einsum, ragged matmul, convolution, explain."""
