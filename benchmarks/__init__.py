"""Benchmarks of speed, memory, start-up time and convergence, against other libraries; results are checked first.

`python -m benchmarks.run --suite cpu` prints one line per case and writes the numbers as JSON to `benchmarks/results/`.
"""
