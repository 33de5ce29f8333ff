"""Kernels for contractions and casts: static descriptions of a problem, and ordered tables of kernels that solve it."""
