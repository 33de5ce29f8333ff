"""Meshes: shardings of arrays, the shards on each device, and the collectives between devices.

* `types`: mesh axes of JAX types. `divisibility`: whether a sharding cuts blocks. Neither imports other packages of the
  library, so that numerics and kernels can use them.
* `sharding` (public): PartitionSpecs of scales, derived from those of the data.
* `specs`: shardings of the operands and the result of a contraction. `transfer_plan`: the collectives that follow from
  them. `transfers`: these collectives on codes and scales.
* `overlap`: collective matmuls, which overlap transfers with compute. `collective_matmul` (public): two of them, to be
  called inside a shard_map.
* `custom_partition`, `partitioned_ops`: casts and matmuls by Pallas kernels on automatic mesh axes.
* `shard_indices`: global indices of a shard's elements, which stochastic rounding hashes.
* `expert_dispatch`: all-to-all, all-gather and reduce-scatter of rows and weights to and from the devices of experts.
"""
