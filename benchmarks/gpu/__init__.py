"""Suites for a GPU: our kernels beside every peer that is installed, in one process, in turns."""
