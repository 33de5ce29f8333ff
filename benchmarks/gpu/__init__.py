"""Suites for a GPU: scaledot's kernels and those of every installed peer, timed alternately in one process."""
