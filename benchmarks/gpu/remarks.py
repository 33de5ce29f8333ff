"""What limits the cases that miss their target, and which optimisations were tried.

`remark` returns the remark on a case only if it missed its target; `WHOLE_MODELS` is always shown.
"""

WHOLE_MODELS = """
What limits the missed targets:

* *Step, fp8_current*: half of the GPU time is in matmuls, near the power limit; casts take a twentieth, and nearly all
  the rest is in operations that stay in bfloat16 or float32. XLA computes amaxes and fuses most of them with the
  operations that produce a tensor (SwiGLU, the conversion of weights, sums of gradients).
* *Fusing casts with the operations before them* (RMSNorm, SwiGLU) would gain little. Under current scaling the amax
  must be known before the first code is written, so the fused operation would read its inputs twice. Estimated
  from bytes of memory traffic at the rate of the casts, not measured: less than 1 % of the step; under delayed scaling,
  where nothing is read twice, at most 2.5 %.
* *fp8_delayed* has an amax history for each layer, so q, k and v cannot share the cast of their input, nor gate and up,
  and the histories need some six small kernels for each of 84 tensors. It is no faster than fp8_current.
* *fp8_block*: its matmuls promote partial accumulators to float32 every 128 elements of K
  ([below](#matmuls-with-scales-per-128-elements)).
* *mxfp8, nvfp4*: Hopper's tensor cores do not multiply these formats; operands are dequantised to bfloat16, which is
  exact, and multiplied as bfloat16. NVFP4 residuals are saved as 4-bit codes and dequantised in the backward pass.
* *First step of nvfp4*: Python lowers 29 kernels in one thread. *First step of each further block*: XLA's own compile
  time for 39 more kernel calls in the program.
"""
_POWER_8192 = """
The three matmuls take nine tenths of the step, apparently at the chip's power limit, where cuBLAS is no faster. Tried
and adopted: clusters that multicast an operand's tile. Tried and rejected: smaller tiles in the last wave, ping-pong
scheduling of warpgroups, and autotuning, which selected the heuristic's configs. The remaining time is casts, near the
bandwidth of a copy, and the pass over memory for amaxes, which delayed scaling does not need.
"""
_POWER_4096 = """
The three matmuls take nine tenths of the step, apparently at the chip's power limit, where cuBLAS is no faster. Tried
and adopted: clusters that multicast an operand's tile, and autotuning, which selected clusters along N instead of M for
wgrad, and no clusters for dgrad. Tried and rejected: smaller tiles in the last wave and ping-pong scheduling of
warpgroups. The remaining time is casts, near the bandwidth of a copy, and the pass over memory for amaxes.
"""
_HISTORY = """
A step of this size is bound by kernel launches. Delayed scaling adds small launches per tensor for the amax history
and its multiplier; its casts and matmuls are those of current scaling.
"""
_PROMOTED = """
Partial accumulators of every 128 elements along K are scaled and promoted to float32 in registers while other
warpgroups issue MMAs. Two warpgroups with tiles of 64 x 256 have too few registers for that unless a tile is computed
in parts along N, and two with 64 x 128 promote at the same time and leave the tensor cores idle; measured here are
three with 64 x 128. Tried and rejected: ping-pong scheduling of two warpgroups, clusters. The remaining cost over fast
accumulation is promotion and loading scales.
"""
_ROW_BLOCKS = """
The wgrad matmul has 1x128 blocks on both operands: a scale for each row and each column of every 128 elements along K,
so two multiplications per accumulator, and is the slower one of the matmuls above. Casts to 1x128 blocks reduce amax
along each block first.
"""
_INTEGERS = """
Integer accumulation is exact, but each int32 accumulator of 128 elements along K must be converted to float32, at half
the throughput of a multiplication, and the next WGMMA cannot start until the accumulator registers have been read.
Tried and rejected: accumulators that start from the bit pattern of 1.5 x 2^23 and need no conversion, but as many moves
and one more addition.
"""
_FOUR_BITS = """
Matmuls run in bfloat16; what is slower than bfloat16 is casts. This layer has twice as many elements to cast per FLOP
as the larger one. Casts of nvfp4_plus and if4 are bound by instruction issue: for each block, a search computes the
errors of eight scales (if4: 14), in eight or nine instructions per scale and element (six or seven for 4-bit integers),
and if4 compares its two grids in the backward pass as well. Tried and adopted: two warpgroups per CTA, the first stages
of the rotation between GMEM and SMEM, E2M1 codes that are read from the low bits of x + 2^k, which rounds x, sums of g
in the kernel that casts it, a table of the reciprocals of all block scales, subnormals flushed by the instruction that
multiplies, two bfloat16 values per word of SMEM, one rounding for both grids of if4, and errors without saturation for
scales above that of the amax. Five scales instead of eight would lose 0.06 dB
([results](../../benchmarks/results/snr-jax0.10.2.json)); their speed was not measured.
"""
_FEW_BYTES = """
A layer has few bytes, so launch latency and the tail are a notable part of the time, and a reduction of split-K partial
results follows. With 14336 columns, some SMs have no work (56 column tiles x split-K 2 = 112 CTAs on 132 SMs). Adopted:
a producer warpgroup that issues few large TMA loads. Tried and rejected: no producer, so that each consumer warpgroup
issues its own TMA loads; sliced-K with 128 instead of 64 elements per warpgroup; and split-K reduction through DSMEM
within a cluster: not all clusters are resident at the same time, and DSMEM reads take longer than the separate
reduction.
"""
_ENTRIES: tuple[tuple[str, str, tuple[str, ...], tuple[str, ...]], ...] = (  # text, suite, cases, implementations
    (
        _POWER_8192,
        "dense",
        ("8192 -> 32768",),
        ("scaledot fp8_current", "scaledot fp8_delayed", "scaledot fp8_current, nn.Dense"),
    ),
    (_POWER_4096, "dense", ("4096 -> 14336",), ("scaledot fp8_current",)),
    (_HISTORY, "dense", ("2048 -> 2048",), ("scaledot fp8_delayed",)),
    (_FOUR_BITS, "dense", ("4096 -> 14336, four bits",), ("scaledot nvfp4", "scaledot nvfp4_plus", "scaledot if4")),
    (_PROMOTED, "block", ("1x128 and 128x128",), ("scaledot",)),
    (_ROW_BLOCKS, "block", ("4096 -> 14336",), ("scaledot fp8_block",)),
    (_INTEGERS, "block", ("int8, 1x128 and 128x128", "int8, 1x128 and 1x128"), ("scaledot",)),
    (
        _FEW_BYTES,
        "decode",
        tuple(f"{layer}, batch {rows}" for layer in ("4096 -> 14336", "14336 -> 4096") for rows in (1, 16)),
        ("scaledot int4 in groups of 128",),
    ),
)
REMARKS = {
    (suite, case, implementation): text
    for text, suite, cases, implementations in _ENTRIES
    for case in cases
    for implementation in implementations
}


def remark(suite: str, case: str, implementation: str, target: float | None, measured: float | None) -> str:
    """Returns the remark on an implementation that missed its target, otherwise ""."""
    if target is None or measured is None or measured >= target:
        return ""
    return " ".join(REMARKS.get((suite, case, implementation), "").split())
