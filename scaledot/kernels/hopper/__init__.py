"""Kernels for Hopper in Pallas Mosaic GPU: quantising casts and matmuls.

`support` decides whether the kernels can run. The kernel tables import `support` and the modules that check a problem;
modules that import Pallas are loaded when a kernel is first used.
"""
