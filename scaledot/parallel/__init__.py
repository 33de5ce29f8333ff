"""Meshes: how arrays are sharded, what that leaves on each device, and what devices exchange.

* `types`: what JAX's types say about mesh axes. `divisibility`: whether a sharding cuts blocks. Neither imports other
  rooms of the library, so that numerics and kernels may use them.
* `sharding` (public): the specs of scales from those of the data.
* `specs`: how the operands and the result of a contraction are sharded. `transfer_plan`: what devices gather, multiply,
  reduce and scatter then. `transfers`: the collectives, on codes and scales.
* `overlap`: matmuls that run while their operands, or partial sums of their results, are transferred.
  `collective_matmul` (public): two of them, to be called inside a shard_map.
* `shard_indices`: the indices of a shard's elements in the whole array, which stochastic rounding hashes.
* `expert_dispatch`: rows and weights on their way to the devices of their experts, and results back.
"""
