"""Speed, memory and start-up time, measured beside the peers and never without a check of the result.

`python -m benchmarks.run --suite cpu` prints one line per case and writes its JSON twin to `benchmarks/results/`.
"""
