"""Matmuls on Hopper's tensor cores, with scales and bias applied before the one rounding of the result.

The kernel is persistent and warp-specialised. There is one CTA for each SM. Its last warpgroup is the producer, which
fetches tiles of both operands into a ring of SMEM slots, without a pause between output tiles. The others are
consumers, which multiply and store. Two CTAs may work as a pair (a cluster) on neighbouring output tiles; each then
fetches half of the operand tile that both need, and multicasts it to both.

The phases have files of their own: `tiles` says which CTA computes which output tiles, `matmul_mainloop` has the ring
and the accumulation over K, and `matmul_epilogue` scales, rounds and stores. Here they become one kernel.

Tensor cores accumulate 8-bit floats with about 14 bits. With `promote`, the partial accumulators of each step, 128
elements along K, are added up in float32 registers. While one consumer does that, the others must keep the tensor cores
busy. Scales that change along K, every 128 elements, are applied to the partial accumulators as these are promoted.
Scales of 1×128 blocks are fetched into the slot of the step; the one scale of a 128×128 block is read from GMEM a step
ahead. A scale of a times a scale of b must be a normal float32.

Groups, as of tokens by experts, are either groups of rows, each multiplied by a matrix of its own, or groups of
elements along K, each with a result of its own. Their sizes are data: CTAs look up their tiles in a small table. A tile
that its group does not fill is stored in pieces, so that a neighbouring group's rows are not overwritten.
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
from scaledot.kernels.hopper.tiles import FETCH_REGISTERS, Config, Groups, Tile, TileSchedule, Warpgroup


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
    programs: int,
    in_steps: bool = False,
    k_first: tuple[bool, bool] = (False, False),
    groups: Groups | None = None,
) -> jax.Array:
    """Returns row_factors * column_factors * (a @ b.T) + bias, (M, N), of a (M, K), b (N, K) and bias (N,).

    16-bit operands may also be (K, M) and (K, N), as `k_first` says; 8-bit ones have K last. Sizes must be padded
    for the copies: K to a multiple of 128 bytes, M of 8 and N of 16, or of 64 where they are an operand's last axis.
    `programs` is the number of CTAs.

    Scales (`row_scales`, `column_scales`) are float32 (1,), or (M,) and (N,) padded to multiples of the config's
    `team_rows` and `team_columns`, as the bias is. With `in_steps`, scales change along K of 8-bit operands: they are
    (K / 128, M) and (K / 128, N), or (K / 128, N / 128) for 128×128 blocks of b, with M and N padded likewise, and
    accumulators are always promoted.

    With groups of rows, b and its scales have a leading axis of groups, N is a multiple of 64, and scales of rows are
    padded by another `program_rows`. With groups of K, which are whole steps, the result has a leading axis of groups,
    and so have scales that do not change along K.
    """
    m, k = a.shape[::-1] if k_first[0] else a.shape
    n = b.shape[-1 if k_first[1] else -2]
    kernel = Kernel(
        TileSchedule(m, n, k * a.dtype.itemsize // SWIZZLE, config, programs, groups),
        a.dtype,
        b.dtype,
        jnp.dtype(out_dtype),
        promote=promote or in_steps,
        in_steps=in_steps,
        square_blocks=in_steps and column_scales.shape[-1] < n,
        k_first=k_first,
        has_bias=bias is not None,
    )
    optional = [None if groups is None else groups.table, bias]
    return kernel.launch(a, b, row_scales, column_scales, *(x for x in optional if x is not None))


class Scratch(NamedTuple):
    """SMEM and barriers of a CTA, as types for the launch and as refs in the kernel; None for what it does not need.

    a, b, a_factors, b_factors, full, empty: see `Pipeline`. out, out_edge: staging and edge_staging of `Epilogue`.
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
    """A matmul kernel: all that is known when it is traced, its launch, and its body for each kind of warpgroup.

    promote: whether the accumulators of each step are promoted to float32 registers. in_steps: whether scales change
    along K. square_blocks: whether b then has one scale for each 128×128 block.
    """

    schedule: TileSchedule
    a_dtype: Any
    b_dtype: Any
    out_dtype: Any
    promote: bool
    in_steps: bool
    square_blocks: bool
    k_first: tuple[bool, bool]
    has_bias: bool

    @property
    def config(self) -> Config:
        return self.schedule.config

    @property
    def grouped(self) -> str | None:
        """What is in groups: "rows", "sum" (K) or None."""
        return None if self.schedule.groups is None else self.schedule.groups.axis

    def launch(self, *operands: jax.Array) -> jax.Array:
        config, schedule = self.config, self.schedule
        results = () if schedule.groups is None or self.grouped != "sum" else (schedule.groups.count,)
        run = plgpu.kernel(
            self.kernel,
            out_type=jax.ShapeDtypeStruct((*results, schedule.m, schedule.n), self.out_dtype),
            grid=(schedule.teams,),
            grid_names=("team",),
            cluster=(config.paired,),
            cluster_names=("member",),
            kernel_name=kernel_name("matmul", *(("grouped",) if self.grouped else ()), self.a_dtype.name),
            num_threads=config.groups + 1,
            thread_name="warpgroup",
            scratch_types=self.scratch(),
            compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        )
        return launch(None if self.grouped else self, run, *operands)  # groups are data

    def scratch(self) -> Scratch:
        config, columns = self.config, self._store_columns()
        of_row, of_column = self.in_steps, self.in_steps and not self.square_blocks
        staging = (config.groups, 2, config.rows, columns)
        edge = (config.groups, config.rows, SWIZZLE // self.out_dtype.itemsize)
        return Scratch(
            a=_operand_slots(config.stages, config.program_rows, self.a_dtype, self.k_first[0]),
            b=_operand_slots(config.stages, config.program_columns, self.b_dtype, self.k_first[1]),
            a_scales=plgpu.SMEM((config.stages, config.program_rows), jnp.float32) if of_row else None,
            b_scales=plgpu.SMEM((config.stages, config.program_columns), jnp.float32) if of_column else None,
            out=plgpu.SMEM(staging, self.out_dtype, transforms=tiled(columns, self.out_dtype)),
            # Neither tiled nor swizzled, because single rows are copied from it.
            out_edge=plgpu.SMEM(edge, self.out_dtype) if self.grouped == "rows" else None,
            full=plgpu.Barrier(num_arrivals=2 + of_row + of_column, num_barriers=config.stages),
            empty=_empty_barriers(config),
        )

    def _store_columns(self) -> int:
        """Columns that are stored at a time: as the config says, or fewer for wider results or if N is no multiple."""
        columns = self.config.epilogue_columns * 2 // self.out_dtype.itemsize
        while self.schedule.n % columns:
            columns //= 2
        return columns

    def kernel(self, a, b, row_scales, column_scales, *refs) -> None:
        """The body of every warpgroup of a CTA, of which the last is the producer."""
        rest = list(refs)
        table = None if self.schedule.groups is None else rest.pop(0)
        bias = rest.pop(0) if self.has_bias else None
        inputs = Inputs(a, b, row_scales, column_scales, table, bias)
        out, scratch = rest[0], Scratch(*rest[1:])
        rings = scratch.a, scratch.b, scratch.a_scales, scratch.b_scales, scratch.full, scratch.empty
        ring = Pipeline(self.config, *rings, self.k_first)
        index = lax.axis_index("warpgroup")
        produce = functools.partial(self._produce, inputs, ring)
        consume = functools.partial(self._consume, inputs, ring, out, scratch, index)
        lax.cond(index == self.config.groups, produce, consume)

    def _produce(self, inputs: Inputs, ring: Pipeline) -> None:
        """Fetches the operands of all tiles of the CTA."""
        plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")
        steps = self.schedule.over_tiles(
            inputs.table, lambda tile: ring.fetch_tile(tile, self._inputs_of_group(inputs, tile))
        )
        ring.drain(steps)

    def _consume(self, inputs: Inputs, ring: Pipeline, out, scratch: Scratch, index) -> None:
        """Multiplies and stores one warpgroup's part of all tiles of the CTA."""
        config = self.config
        plgpu.set_max_registers(config.registers, action="increase")
        # Without groups all tiles have the same scales, so that a scalar one is loaded once.
        factors = None if self.in_steps or self.grouped else EpilogueScales(inputs.row_scales, inputs.column_scales)
        row = index * config.rows if config.split == "rows" else 0
        column = index * config.columns if config.split == "columns" else 0
        warpgroup = Warpgroup(index, row, column)

        def work(tile: Tile) -> None:
            epilogue = self._epilogue(inputs, factors, out, scratch, tile, warpgroup)
            squares = self._inputs_of_group(inputs, tile).column_scales if self.square_blocks else None
            MainLoop(config, ring, tile, warpgroup, squares).run(self.promote, epilogue.store)

        self.schedule.over_tiles(inputs.table, work)
        plgpu.wait_smem_to_gmem(0)

    def _epilogue(self, inputs: Inputs, factors, out, scratch: Scratch, tile: Tile, warpgroup: Warpgroup) -> Epilogue:
        row, column = tile.row + warpgroup.row, tile.column + warpgroup.column
        if self.grouped and not self.in_steps:
            own = self._inputs_of_group(inputs, tile)
            factors = EpilogueScales(own.row_scales, own.column_scales)
        result = out.at[tile.group] if self.grouped == "sum" else out
        return Epilogue(tile, warpgroup, row, column, factors, inputs.bias, result, scratch.out, scratch.out_edge)

    def _inputs_of_group(self, inputs: Inputs, tile: Tile) -> Inputs:
        """The inputs of a tile, without the axis of groups that some of them have."""
        of_rows, of_result = self.grouped == "rows", self.grouped == "sum" and not self.in_steps
        return inputs._replace(
            b=inputs.b.at[tile.group] if of_rows else inputs.b,
            row_scales=inputs.row_scales.at[tile.group] if of_result else inputs.row_scales,
            column_scales=inputs.column_scales.at[tile.group] if of_rows or of_result else inputs.column_scales,
        )


def _operand_slots(stages: int, rows: int, dtype, k_first: bool) -> Any:
    depth = SWIZZLE // dtype.itemsize
    shape = (depth, rows) if k_first else (rows, depth)
    return plgpu.SMEM((stages, *shape), dtype, transforms=tiled(shape[-1], dtype))


def _empty_barriers(config: Config) -> Any:
    """Barriers that all consumers arrive at, of a pair those of both CTAs: a copy may write to the SMEM of both."""
    if config.pair is None:
        return plgpu.Barrier(num_arrivals=config.groups, num_barriers=config.stages)
    return plgpu.ClusterBarrier(collective_axes=("member",), num_arrivals=config.groups, num_barriers=config.stages)
