"""Matmuls on Hopper's tensor cores, with scales and bias applied in the epilogue before one rounding.

The kernel is persistent and warp-specialised. There is one CTA for each SM. Its last warpgroup is the producer, which
loads tiles of both operands by TMA into a pipeline of SMEM stages, across output tiles without draining it. The others
are consumers, which issue the WGMMAs and store the result. A cluster of two CTAs may compute neighbouring output tiles;
each CTA then loads half of the operand tile that both need, and multicasts it to both.

This module assembles the kernel from `tiles` (the schedule of output tiles), `matmul_mainloop` (the pipeline and the
accumulation over K) and `matmul_epilogue` (scale, round and store).

Tensor cores accumulate 8-bit floats with about 14 mantissa bits. With `promote`, the partial accumulators of each K
step, 128 elements, are added up in float32 registers; while one consumer does that, the others keep the tensor cores
busy. With `has_k_block_scales`, scales change every 128 elements along K and are applied to the partial accumulators as
these are promoted. Scales of 1×128 blocks are loaded into the stage of their step; the scale of a 128×128 block is read
from GMEM one step ahead. With 128×128 blocks of b, the two scales are multiplied first, so their product must be a
normal float32.

A grouped matmul (a mixture of experts) has groups of rows of a, each multiplied by a matrix of its own, or groups of
elements along K, each with a result of its own. Group sizes are data: CTAs read their tiles from a small table. If a
group fills an output tile only in part, the epilogue stores only that group's rows.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from scaledot.kernels.hopper.launch import call_exported
from scaledot.kernels.hopper.matmul_epilogue import Epilogue, EpilogueScales
from scaledot.kernels.hopper.matmul_mainloop import Inputs, MainLoop, Pipeline
from scaledot.kernels.hopper.memory_layouts import swizzle_transforms
from scaledot.kernels.hopper.support import kernel_name
from scaledot.kernels.hopper.swizzle_atom import ATOM_BYTES, K_STEP_BYTES
from scaledot.kernels.hopper.tiles import PRODUCER_REGISTERS, Config, Groups, Tile, TileSchedule, Warpgroup


def matmul(
    a: jax.Array,
    b: jax.Array,
    a_scales: jax.Array,
    b_scales: jax.Array,
    bias: jax.Array | None,
    bias_rows: jax.Array | None = None,
    *,
    out_dtype,
    config: Config,
    promote: bool,
    ctas: int,
    has_k_block_scales: bool = False,
    mn_major: tuple[bool, bool] = (False, False),
    groups: Groups | None = None,
) -> jax.Array:
    """Returns a_scales * b_scales * (a @ b.T) + bias, (M, N), of a (M, K), b (N, K) and bias (N,).

    a_scales: float32 (1,) or (M,). b_scales: (1,) or (N,).
    bias_rows: (M,), which the bias is multiplied by: the term is their outer product.
    ctas: of the persistent grid.
    has_k_block_scales: scales of 8-bit operands change along K, and are (K / 128, M) and (K / 128, N), or
    (K / 128, N / 128) for 128×128 blocks of b. Accumulators are then always promoted.
    mn_major: for a and for b, whether the matrix is (K, M) or (K, N), with M or N contiguous; 16-bit operands only,
    because WGMMA takes 8-bit ones K-major.
    groups: with groups of rows, b and its scales have a leading group dim. With groups of K, each a multiple of 128
    elements, the result has a leading group dim, and so have scales that do not change along K.

    The caller pads:
    * K to a multiple of 128 bytes, a swizzle atom;
    * M to a multiple of 8, the rows of an atom; of 64 if a is MN-major, an atom of 16-bit elements;
    * N to a multiple of 16, so that the result can be stored with a swizzle of at least 32 bytes; of 64 if b is
      MN-major, or with groups of rows, as tiles at a group boundary are stored as 128-byte row segments;
    * scales (if not (1,)), bias and bias_rows to multiples of `config.cluster_tile_m` and `config.cluster_tile_n` (for
      128×128 blocks of b, of `config.cluster_tile_n` / 128). They are loaded without bounds checks: scales of 1×128
      blocks by TMA, possibly as `cp.async.bulk` copies, and all others from GMEM to registers. With groups of
      rows, a tile may start at any multiple of 8, so `a_scales` are padded by another `cta_m`.
    """
    m, k = a.shape[::-1] if mn_major[0] else a.shape
    n = b.shape[-1 if mn_major[1] else -2]
    kernel = Kernel(
        TileSchedule(m, n, k * a.dtype.itemsize // K_STEP_BYTES, config, ctas, groups),
        a.dtype,
        b.dtype,
        jnp.dtype(out_dtype),
        promote=promote or has_k_block_scales,
        has_k_block_scales=has_k_block_scales,
        square_blocks=has_k_block_scales and b_scales.shape[-1] < n,
        mn_major=mn_major,
        has_bias=(bias is not None, bias_rows is not None),
    )
    optional = [None if groups is None else groups.table, bias, bias_rows]
    return kernel.call(a, b, a_scales, b_scales, *(x for x in optional if x is not None))


class Scratch(NamedTuple):
    """SMEM and barriers of a CTA, as types for the launch and as refs in the kernel; None for buffers not needed.

    a, b, a_scales, b_scales, full, empty: see `Pipeline`. out, out_edge: staging and edge_staging of `Epilogue`.
    """

    a: Any
    b: Any
    a_scales: Any
    b_scales: Any
    out: Any
    out_edge: Any
    full: Any
    empty: Any


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A matmul kernel: its static parameters, its call, and its body for producer and consumer warpgroups.

    promote: whether the partial accumulators of each K step are promoted to float32 registers. has_k_block_scales:
    whether scales change every 128 elements along K. square_blocks: whether b has one scale for each 128×128 block.
    mn_major: see `matmul`. has_bias: whether there are `bias` and `bias_rows`.
    """

    schedule: TileSchedule
    a_dtype: Any
    b_dtype: Any
    out_dtype: Any
    promote: bool
    has_k_block_scales: bool
    square_blocks: bool
    mn_major: tuple[bool, bool]
    has_bias: tuple[bool, bool]

    @property
    def config(self) -> Config:
        return self.schedule.config

    @property
    def group_axis(self) -> str | None:
        """The dim of a that is in groups, "rows" or "k", or None."""
        return None if self.schedule.groups is None else self.schedule.groups.axis

    def call(self, *operands: jax.Array) -> jax.Array:
        config, schedule = self.config, self.schedule
        out_groups = () if schedule.groups is None or self.group_axis != "k" else (schedule.groups.count,)
        kernel = plgpu.kernel(
            self.body,
            out_type=jax.ShapeDtypeStruct((*out_groups, schedule.m, schedule.n), self.out_dtype),
            grid=(schedule.clusters,),
            grid_names=("cluster",),
            cluster=(config.cluster_size,),
            cluster_names=("cta",),
            kernel_name=kernel_name("matmul", *(("grouped",) if self.group_axis else ()), self.a_dtype.name),
            num_threads=config.consumer_warpgroups + 1,
            thread_name="warpgroup",
            scratch_types=self.scratch(),
            compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        )
        # With groups, `self` holds a traced array and is not hashable, so grouped kernels are lowered at every call.
        return call_exported(None if self.group_axis else self, kernel, *operands)

    def scratch(self) -> Scratch:
        config, columns = self.config, self._store_columns()
        has_a_scales = self.has_k_block_scales
        has_b_scales = self.has_k_block_scales and not self.square_blocks
        staging = (config.consumer_warpgroups, 2, config.wg_m, columns)
        edge = (config.consumer_warpgroups, config.wg_m, ATOM_BYTES // self.out_dtype.itemsize)
        return Scratch(
            a=_operand_stages(config.stages, config.cta_m, self.a_dtype, self.mn_major[0]),
            b=_operand_stages(config.stages, config.cta_n, self.b_dtype, self.mn_major[1]),
            a_scales=plgpu.SMEM((config.stages, config.cta_m), jnp.float32) if has_a_scales else None,
            b_scales=plgpu.SMEM((config.stages, config.cta_n), jnp.float32) if has_b_scales else None,
            out=plgpu.SMEM(staging, self.out_dtype, transforms=swizzle_transforms(columns, self.out_dtype)),
            # Neither tiled nor swizzled, because single rows are copied from it.
            out_edge=plgpu.SMEM(edge, self.out_dtype) if self.group_axis == "rows" else None,
            full=plgpu.Barrier(num_arrivals=2 + has_a_scales + has_b_scales, num_barriers=config.stages),
            empty=_empty_barriers(config),
        )

    def _store_columns(self) -> int:
        """Columns stored at a time: those of the config, fewer for 32-bit results or if N is not a multiple of them."""
        columns = self.config.epilogue_columns * 2 // self.out_dtype.itemsize
        while self.schedule.n % columns:
            columns //= 2
        return columns

    def body(self, a, b, a_scales, b_scales, *refs) -> None:
        """The kernel of every warpgroup of a CTA; the last one is the producer."""
        rest = list(refs)
        table = None if self.schedule.groups is None else rest.pop(0)
        bias, bias_rows = (rest.pop(0) if has else None for has in self.has_bias)
        inputs = Inputs(a, b, a_scales, b_scales, table, bias, bias_rows)
        out, scratch = rest[0], Scratch(*rest[1:])
        stages = scratch.a, scratch.b, scratch.a_scales, scratch.b_scales, scratch.full, scratch.empty
        pipeline = Pipeline(self.config, *stages, self.mn_major)
        index = lax.axis_index("warpgroup")
        produce = functools.partial(self._produce, inputs, pipeline)
        consume = functools.partial(self._consume, inputs, pipeline, out, scratch, index)
        lax.cond(index == self.config.consumer_warpgroups, produce, consume)

    def _produce(self, inputs: Inputs, pipeline: Pipeline) -> None:
        """Loads the operands of all output tiles of the CTA."""
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        pipeline_steps = self.schedule.for_each_tile(
            inputs.table, lambda tile: pipeline.load_tile(tile, self._inputs_of_group(inputs, tile))
        )
        pipeline.drain(pipeline_steps)

    def _consume(self, inputs: Inputs, pipeline: Pipeline, out, scratch: Scratch, index) -> None:
        """Multiplies and stores one warpgroup's part of all output tiles of the CTA."""
        config = self.config
        plgpu.set_max_registers(config.consumer_registers, action="increase")
        # Without groups, all tiles index the same scale arrays, so a per-tensor scale is loaded once, before the tiles.
        shares_scales = not self.has_k_block_scales and not self.group_axis
        scales = EpilogueScales(inputs.a_scales, inputs.b_scales) if shares_scales else None
        row = index * config.wg_m if config.wg_along == "rows" else 0
        column = index * config.wg_n if config.wg_along == "columns" else 0
        warpgroup = Warpgroup(index, row, column)

        def compute_tile(tile: Tile) -> None:
            epilogue = self._epilogue(inputs, scales, out, scratch, tile, warpgroup)
            b_block_scales = self._inputs_of_group(inputs, tile).b_scales if self.square_blocks else None
            MainLoop(config, pipeline, tile, warpgroup, b_block_scales).run(self.promote, epilogue.store)

        self.schedule.for_each_tile(inputs.table, compute_tile)
        plgpu.wait_smem_to_gmem(0)

    def _epilogue(self, inputs: Inputs, scales, out, scratch: Scratch, tile: Tile, warpgroup: Warpgroup) -> Epilogue:
        row, column = tile.row + warpgroup.row, tile.column + warpgroup.column
        if self.group_axis and not self.has_k_block_scales:
            group_inputs = self._inputs_of_group(inputs, tile)
            scales = EpilogueScales(group_inputs.a_scales, group_inputs.b_scales)
        result = out.at[tile.group] if self.group_axis == "k" else out
        bias = inputs.bias, inputs.bias_rows
        return Epilogue(tile, warpgroup, row, column, scales, *bias, result, scratch.out, scratch.out_edge)

    def _inputs_of_group(self, inputs: Inputs, tile: Tile) -> Inputs:
        """The inputs of a tile, with the group dim of b and of scales indexed by the tile's group."""
        by_rows, by_k = self.group_axis == "rows", self.group_axis == "k" and not self.has_k_block_scales
        return inputs._replace(
            b=inputs.b.at[tile.group] if by_rows else inputs.b,
            a_scales=inputs.a_scales.at[tile.group] if by_k else inputs.a_scales,
            b_scales=inputs.b_scales.at[tile.group] if by_rows or by_k else inputs.b_scales,
        )


def _operand_stages(stages: int, mn: int, dtype, mn_major: bool) -> Any:
    tile_k = K_STEP_BYTES // dtype.itemsize
    shape = (tile_k, mn) if mn_major else (mn, tile_k)
    return plgpu.SMEM((stages, *shape), dtype, transforms=swizzle_transforms(shape[-1], dtype))


def _empty_barriers(config: Config) -> Any:
    """One barrier for each stage, which all consumers of the cluster arrive at: multicast writes to both CTAs' SMEM."""
    arrivals, stages = config.consumer_warpgroups, config.stages
    if config.cluster_along is None:
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages)
    return plgpu.ClusterBarrier(collective_axes=("cta",), num_arrivals=arrivals, num_barriers=stages)
