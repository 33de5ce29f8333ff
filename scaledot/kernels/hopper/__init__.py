"""Kernels for Hopper in Pallas Mosaic GPU: fused casts and matrix products.

`support` says where they run and is all that the tables load; the kernels themselves import Pallas when they are used.
"""
