"""Suites for a GPU: scaledot's kernels and those of other installed libraries, timed alternately in one process."""
