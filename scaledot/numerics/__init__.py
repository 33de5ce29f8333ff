"""Arithmetic of quantisation and dequantisation, bit-identical on every backend: pure functions of arrays."""
