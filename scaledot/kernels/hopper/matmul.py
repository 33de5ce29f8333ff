"""Matmuls on Hopper's tensor cores, with scales and bias applied in the epilogue before one rounding.

The kernel is persistent and warp-specialised. There is one CTA for each SM. Its last warpgroup is the producer, which
loads tiles of both operands by TMA into a pipeline of SMEM stages, across output tiles without draining it. The others
are consumers, which issue the WGMMAs and store the result. A cluster of two CTAs may compute neighbouring output tiles;
each CTA then loads half of the operand tile that both need, and multicasts it to both.

This module assembles the kernel from `tiles` (the schedule of output tiles), `matmul_mainloop` (the pipeline and the
accumulation over K) and `matmul_epilogue` (scale, round and store).

Tensor cores accumulate 8-bit floats with about 14 bits. With `promote`, the partial accumulators of each K step, 128
elements, are added up in float32 registers; while one consumer does that, the others keep the tensor cores busy. With
`blockwise`, scales change every 128 elements along K and are applied to the partial accumulators as these are promoted.
Scales of 1×128 blocks are loaded into the stage of their step; the scale of a 128×128 block is read from GMEM one step
ahead. A scale of a times a scale of b must be a normal float32.

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

from scaledot.kernels.hopper.launch import launch
from scaledot.kernels.hopper.matmul_epilogue import Epilogue, EpilogueScales
from scaledot.kernels.hopper.matmul_mainloop import Inputs, MainLoop, Pipeline
from scaledot.kernels.hopper.memory import SWIZZLE, tiled
from scaledot.kernels.hopper.support import kernel_name
from scaledot.kernels.hopper.tiles import PRODUCER_REGISTERS, Config, Groups, Tile, TileSchedule, Warpgroup


def matmul(
    a: jax.Array,
    b: jax.Array,
    row_scales: jax.Array,
    column_scales: jax.Array,
    bias: jax.Array | None,
    *,
    out_dtype,
    config: Config,
    promote: bool,
    ctas: int,
    blockwise: bool = False,
    k_first: tuple[bool, bool] = (False, False),
    groups: Groups | None = None,
) -> jax.Array:
    """Returns row_scales * column_scales * (a @ b.T) + bias, (M, N), of a (M, K), b (N, K) and bias (N,).

    16-bit operands may also be (K, M) and (K, N), where `k_first` is True; 8-bit ones have K last, as WGMMA needs them.
    Sizes must be padded for TMA: K to a multiple of 128 bytes, M of 8 and N of 16, or of 64 where M or N is the minor
    dimension of an operand.

    Scales are float32 (1,), or (M,) and (N,) padded to multiples of the config's `cluster_rows` and `cluster_columns`,
    as the bias is. With `blockwise`, scales of 8-bit operands change along K: they are (K / 128, M) and (K / 128, N),
    or (K / 128, N / 128) for 128×128 blocks of b, with M and N padded likewise, and accumulators are always promoted.

    With groups of rows, b and its scales have a leading group dim, N is a multiple of 64, and `row_scales` are padded
    by another `cta_rows`. With groups of K, each a multiple of 128 elements, the result has a leading group dim, and so
    have scales unless they are blockwise.
    """
    m, k = a.shape[::-1] if k_first[0] else a.shape
    n = b.shape[-1 if k_first[1] else -2]
    kernel = Kernel(
        TileSchedule(m, n, k * a.dtype.itemsize // SWIZZLE, config, ctas, groups),
        a.dtype,
        b.dtype,
        jnp.dtype(out_dtype),
        promote=promote or blockwise,
        blockwise=blockwise,
        square_blocks=blockwise and column_scales.shape[-1] < n,
        k_first=k_first,
        has_bias=bias is not None,
    )
    optional = [None if groups is None else groups.table, bias]
    return kernel.launch(a, b, row_scales, column_scales, *(x for x in optional if x is not None))


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
    """A matmul kernel: its static parameters, its launch, and its body for producer and consumer warpgroups.

    promote: whether the partial accumulators of each K step are promoted to float32 registers. blockwise: whether
    scales change every 128 elements along K. square_blocks: whether b has one scale for each 128×128 block.
    """

    schedule: TileSchedule
    a_dtype: Any
    b_dtype: Any
    out_dtype: Any
    promote: bool
    blockwise: bool
    square_blocks: bool
    k_first: tuple[bool, bool]
    has_bias: bool

    @property
    def config(self) -> Config:
        return self.schedule.config

    @property
    def grouped(self) -> str | None:
        """The dimension of a that is in groups, "rows" or "k", or None."""
        return None if self.schedule.groups is None else self.schedule.groups.axis

    def launch(self, *operands: jax.Array) -> jax.Array:
        config, schedule = self.config, self.schedule
        results = () if schedule.groups is None or self.grouped != "k" else (schedule.groups.count,)
        run = plgpu.kernel(
            self.kernel,
            out_type=jax.ShapeDtypeStruct((*results, schedule.m, schedule.n), self.out_dtype),
            grid=(schedule.clusters,),
            grid_names=("cluster",),
            cluster=(config.cluster_size,),
            cluster_names=("cta",),
            kernel_name=kernel_name("matmul", *(("grouped",) if self.grouped else ()), self.a_dtype.name),
            num_threads=config.consumers + 1,
            thread_name="warpgroup",
            scratch_types=self.scratch(),
            compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        )
        # A grouped kernel holds its table, a traced array, so it is no key to look up a lowered kernel by.
        return launch(None if self.grouped else self, run, *operands)

    def scratch(self) -> Scratch:
        config, columns = self.config, self._store_columns()
        has_a_scales, has_b_scales = self.blockwise, self.blockwise and not self.square_blocks
        staging = (config.consumers, 2, config.rows, columns)
        edge = (config.consumers, config.rows, SWIZZLE // self.out_dtype.itemsize)
        return Scratch(
            a=_operand_stages(config.stages, config.cta_rows, self.a_dtype, self.k_first[0]),
            b=_operand_stages(config.stages, config.cta_columns, self.b_dtype, self.k_first[1]),
            a_scales=plgpu.SMEM((config.stages, config.cta_rows), jnp.float32) if has_a_scales else None,
            b_scales=plgpu.SMEM((config.stages, config.cta_columns), jnp.float32) if has_b_scales else None,
            out=plgpu.SMEM(staging, self.out_dtype, transforms=tiled(columns, self.out_dtype)),
            # Neither tiled nor swizzled, because single rows are copied from it.
            out_edge=plgpu.SMEM(edge, self.out_dtype) if self.grouped == "rows" else None,
            full=plgpu.Barrier(num_arrivals=2 + has_a_scales + has_b_scales, num_barriers=config.stages),
            empty=_empty_barriers(config),
        )

    def _store_columns(self) -> int:
        """Columns stored at a time: those of the config, fewer for 32-bit results or if N is not a multiple of them."""
        columns = self.config.epilogue_columns * 2 // self.out_dtype.itemsize
        while self.schedule.n % columns:
            columns //= 2
        return columns

    def kernel(self, a, b, row_scales, column_scales, *refs) -> None:
        """The body of every warpgroup of a CTA; the last one is the producer."""
        rest = list(refs)
        table = None if self.schedule.groups is None else rest.pop(0)
        bias = rest.pop(0) if self.has_bias else None
        inputs = Inputs(a, b, row_scales, column_scales, table, bias)
        out, scratch = rest[0], Scratch(*rest[1:])
        stages = scratch.a, scratch.b, scratch.a_scales, scratch.b_scales, scratch.full, scratch.empty
        pipeline = Pipeline(self.config, *stages, self.k_first)
        index = lax.axis_index("warpgroup")
        produce = functools.partial(self._produce, inputs, pipeline)
        consume = functools.partial(self._consume, inputs, pipeline, out, scratch, index)
        lax.cond(index == self.config.consumers, produce, consume)

    def _produce(self, inputs: Inputs, pipeline: Pipeline) -> None:
        """Loads the operands of all output tiles of the CTA."""
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        steps = self.schedule.over_tiles(
            inputs.table, lambda tile: pipeline.load_tile(tile, self._inputs_of_group(inputs, tile))
        )
        pipeline.drain(steps)

    def _consume(self, inputs: Inputs, pipeline: Pipeline, out, scratch: Scratch, index) -> None:
        """Multiplies and stores one warpgroup's part of all output tiles of the CTA."""
        config = self.config
        plgpu.set_max_registers(config.registers, action="increase")
        # Without groups all tiles have the same scales, so that scalar ones are loaded once.
        scales = None if self.blockwise or self.grouped else EpilogueScales(inputs.row_scales, inputs.column_scales)
        row = index * config.rows if config.wg_dimension == "rows" else 0
        column = index * config.columns if config.wg_dimension == "columns" else 0
        warpgroup = Warpgroup(index, row, column)

        def work(tile: Tile) -> None:
            epilogue = self._epilogue(inputs, scales, out, scratch, tile, warpgroup)
            square_scales = self._inputs_of_group(inputs, tile).column_scales if self.square_blocks else None
            MainLoop(config, pipeline, tile, warpgroup, square_scales).run(self.promote, epilogue.store)

        self.schedule.over_tiles(inputs.table, work)
        plgpu.wait_smem_to_gmem(0)

    def _epilogue(self, inputs: Inputs, scales, out, scratch: Scratch, tile: Tile, warpgroup: Warpgroup) -> Epilogue:
        row, column = tile.row + warpgroup.row, tile.column + warpgroup.column
        if self.grouped and not self.blockwise:
            group_inputs = self._inputs_of_group(inputs, tile)
            scales = EpilogueScales(group_inputs.row_scales, group_inputs.column_scales)
        result = out.at[tile.group] if self.grouped == "k" else out
        return Epilogue(tile, warpgroup, row, column, scales, inputs.bias, result, scratch.out, scratch.out_edge)

    def _inputs_of_group(self, inputs: Inputs, tile: Tile) -> Inputs:
        """The inputs of a tile, with the group dim of b and of scales indexed by the tile's group."""
        by_rows, by_k = self.grouped == "rows", self.grouped == "k" and not self.blockwise
        return inputs._replace(
            b=inputs.b.at[tile.group] if by_rows else inputs.b,
            row_scales=inputs.row_scales.at[tile.group] if by_k else inputs.row_scales,
            column_scales=inputs.column_scales.at[tile.group] if by_rows or by_k else inputs.column_scales,
        )


def _operand_stages(stages: int, rows: int, dtype, k_first: bool) -> Any:
    depth = SWIZZLE // dtype.itemsize
    shape = (depth, rows) if k_first else (rows, depth)
    return plgpu.SMEM((stages, *shape), dtype, transforms=tiled(shape[-1], dtype))


def _empty_barriers(config: Config) -> Any:
    """One barrier for each stage, which all consumers of the cluster arrive at: multicast writes to both CTAs' SMEM."""
    if config.cluster_dimension is None:
        return plgpu.Barrier(num_arrivals=config.consumers, num_barriers=config.stages)
    return plgpu.ClusterBarrier(collective_axes=("cta",), num_arrivals=config.consumers, num_barriers=config.stages)
