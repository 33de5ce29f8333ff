"""Matrix products on Hopper's tensor cores, with scales and bias applied before the one rounding of the result.

One persistent program per multiprocessor. Its last warpgroup fetches tiles of both operands into a ring of slots in
shared memory, without a pause between output tiles; the others multiply and store. Two programs may work as a pair on
neighbouring tiles, and each fetches half of the operand tile that both need, for both.

Tensor cores add 8-bit floats in an accumulator of about 14 bits. `promote` moves the sums of each step into float32
registers; a warpgroup's tile is then multiplied in parts, because there is no room for two accumulators of it. While
one warpgroup does that, the others must keep the tensor cores busy.

Factors that change along the sum, one for each 128 elements of it, are applied to the sums of a step as they are
promoted. They are fetched with the step's operands, or read a step ahead where 128 columns share one. The product of
two of them must be a normal number.

Groups, as of tokens by experts, are parts of the rows, each with its own matrix to multiply, or parts of the sum, each
with its own result. Their sizes are data: programs look up what their tiles are in a small table, and a tile that a
group does not fill is stored in pieces, not to write on a neighbour's rows.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from scaledot.kernels.mosaic.casts import LINE
from scaledot.kernels.mosaic.memory import SWIZZLE, load, tiled
from scaledot.kernels.mosaic.tiles import FETCH_REGISTERS, Config, Groups, Plan, Tile


def matmul(
    a: jax.Array,
    b: jax.Array,
    row_factors: jax.Array,
    column_factors: jax.Array,
    bias: jax.Array | None,
    *,
    out_dtype,
    config: Config,
    promote: bool,
    programs: int,
    in_steps: bool = False,
    summed_first: tuple[bool, bool] = (False, False),
    groups: Groups | None = None,
) -> jax.Array:
    """a (M, K) times b (N, K) transposed, times factors, plus bias (N,).

    16-bit operands may also be (K, M) and (K, N), as `summed_first` says; 8-bit ones have K last. Sizes must suit the
    tiles: K a multiple of 128 bytes, M of 8 and N of 16, or of 64 where they lie last in an operand.
    Factors are float32 (1,), or (M,) and (N,) filled up to whole teams of programs, as the bias is. Factors that change
    along the sum of 8-bit elements (`in_steps`) are (K / 128, M) and (K / 128, N), or (K / 128, N / 128) for squares of
    b; M and N are filled up likewise, and sums are promoted.

    With groups of rows, b and its factors have an axis of groups in front, N is a multiple of 64, and factors of rows
    are filled up by one more tile. With groups of the sum, which have whole steps, the result has an axis of groups in
    front, and so have factors that do not change along the sum.
    """
    m, k = a.shape[::-1] if summed_first[0] else a.shape
    n = b.shape[-1 if summed_first[1] else -2]
    out_dtype = jnp.dtype(out_dtype)
    axis = None if groups is None else groups.axis
    of_rows, of_sum = axis == "rows", axis == "sum"
    plan = Plan(m, n, k * a.dtype.itemsize // SWIZZLE, SWIZZLE // a.dtype.itemsize, config, programs, groups)
    store_columns = _store_columns(n, config, out_dtype)
    edge_columns = SWIZZLE // out_dtype.itemsize  # of a row that can be copied alone
    squares = in_steps and column_factors.shape[-1] < n

    def kernel(a_gmem, b_gmem, rows_gmem, columns_gmem, *rest):
        refs: Any = iter(rest)
        table_gmem: Any = None if groups is None else next(refs)
        bias_gmem: Any = None if bias is None else next(refs)
        out_gmem, a_ring, b_ring, a_factors, b_factors, out_smem, edge_smem, full, empty = refs
        ring = Ring(config, a_ring, b_ring, a_factors, b_factors, full, empty, summed_first)
        warpgroup = lax.axis_index("warpgroup")

        def of_group(tile: Tile) -> tuple[Any, Any, Any]:
            """b, and the factors of rows and of columns, for a tile."""
            rows = rows_gmem.at[tile.group] if of_sum and not in_steps else rows_gmem
            columns = columns_gmem.at[tile.group] if of_rows or (of_sum and not in_steps) else columns_gmem
            return b_gmem.at[tile.group] if of_rows else b_gmem, rows, columns

        def fetch():
            plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")
            steps = plan.over_tiles(table_gmem, lambda tile: ring.fetch_tile(plan, tile, a_gmem, *of_group(tile)))
            ring.drain(steps)

        def multiply():
            plgpu.set_max_registers(config.registers, action="increase")
            for_all = None if in_steps or groups is not None else Factors(rows_gmem, columns_gmem)
            below = warpgroup * config.rows if config.split == "rows" else 0
            beside = warpgroup * config.columns if config.split == "columns" else 0
            sums = _promoted_sums if promote or in_steps else _chained_sums

            def tile_of(tile: Tile):
                top, left = tile.row + below, tile.column + beside
                _, *both = of_group(tile)
                factors = for_all if in_steps or groups is None else Factors(*both)

                def finished(values: jax.Array, first) -> jax.Array:
                    result = values
                    if factors is not None and of_rows:  # rows of no group are zeros, whatever the factors are
                        apply = functools.partial(factors.apply, values, top, first)
                        result = lax.cond(tile.steps > 0, apply, lambda: values)
                    elif factors is not None:
                        result = factors.apply(values, top, first)
                    if bias_gmem is not None:
                        result += along_columns(bias_gmem, first, result.shape)
                    return result.astype(out_dtype)

                def target(first_row, rows: int, first, columns: int) -> Any:
                    result = out_gmem.at[tile.group] if of_sum else out_gmem
                    return result.at[pl.ds(first_row, rows), pl.ds(first, columns)]

                def store(at: int, values: jax.Array):
                    for piece in range(values.shape[1] // store_columns):
                        slot = (at // store_columns + piece) % 2
                        first = left + at + piece * store_columns
                        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                        out_smem[warpgroup, slot] = finished(_columns(values, piece, store_columns), first)
                        plgpu.commit_smem()
                        plgpu.copy_smem_to_gmem(
                            out_smem.at[warpgroup, slot], target(top, config.rows, first, store_columns)
                        )

                def store_edge(at: int, values: jax.Array, low, high):
                    """Only some rows, in pieces whose numbers of rows are powers of two.

                    A copy of one row is one of bytes, which does not see where a row of the result ends: none may begin
                    behind it.
                    """
                    for piece in range(values.shape[1] // edge_columns):
                        first = left + at + piece * edge_columns
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        edge_smem[warpgroup] = finished(_columns(values, piece, edge_columns), first)
                        plgpu.commit_smem()
                        row, size = low, config.rows // 2
                        while size:

                            def copy(row=row, size=size, first=first):
                                piece = edge_smem.at[warpgroup, pl.ds(row, size)]
                                plgpu.copy_smem_to_gmem(piece, target(top + row, size, first, edge_columns))

                            pl.when(((high - low) & size != 0) & (first < n))(copy)
                            row, size = row + ((high - low) & size), size // 2

                def store_what_is_there(at: int, values: jax.Array):
                    low, high = (jnp.clip(end - below, 0, config.rows) for end in tile.rows)
                    whole = high - low == config.rows
                    lax.cond(whole, lambda: store(at, values), lambda: store_edge(at, values, low, high))

                squares_of_tile = both[1] if squares else None
                sums(config, tile, ring, below, beside, store_what_is_there if of_rows else store, squares_of_tile)

            plan.over_tiles(table_gmem, tile_of)
            plgpu.wait_smem_to_gmem(0)

        lax.cond(warpgroup == config.groups, fetch, multiply)

    out_shape = (groups.count, m, n) if groups is not None and of_sum else (m, n)
    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(out_shape, out_dtype),
        grid=(plan.teams,),
        grid_names=("team",),
        cluster=(config.paired,),
        cluster_names=("member",),
        num_threads=config.groups + 1,
        thread_name="warpgroup",
        scratch_types=[
            _ring_of(config.stages, config.program_rows, a.dtype, summed_first[0]),
            _ring_of(config.stages, config.program_columns, b.dtype, summed_first[1]),
            plgpu.SMEM((config.stages, config.program_rows), jnp.float32) if in_steps else None,
            plgpu.SMEM((config.stages, config.program_columns), jnp.float32) if in_steps and not squares else None,
            plgpu.SMEM(
                (config.groups, 2, config.rows, store_columns), out_dtype, transforms=tiled(store_columns, out_dtype)
            ),
            plgpu.SMEM((config.groups, config.rows, edge_columns), out_dtype) if of_rows else None,
            plgpu.Barrier(num_arrivals=2 + (in_steps + (in_steps and not squares)), num_barriers=config.stages),
            _given_back(config),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    extras = [*([] if groups is None else [groups.table]), *([] if bias is None else [bias])]
    return run(a, b, row_factors, column_factors, *extras)


def _columns(values: jax.Array, piece: int, columns: int) -> jax.Array:
    return values[:, piece * columns : (piece + 1) * columns]


def _ring_of(stages: int, rows: int, dtype, summed_first: bool) -> Any:
    step = SWIZZLE // dtype.itemsize
    shape = (step, rows) if summed_first else (rows, step)
    return plgpu.SMEM((stages, *shape), dtype, transforms=tiled(shape[-1], dtype))


def _given_back(config: Config):
    """Barriers of slots that all who multiply have done with; of a pair, both."""
    if config.pair is None:
        return plgpu.Barrier(num_arrivals=config.groups, num_barriers=config.stages)
    return plgpu.ClusterBarrier(collective_axes=("member",), num_arrivals=config.groups, num_barriers=config.stages)


def _store_columns(n: int, config: Config, out_dtype) -> int:
    """Columns that are stored at a time: as many as the config says, fewer where N is no multiple or they are wide."""
    columns = config.epilogue_columns * 2 // out_dtype.itemsize
    while n % columns:
        columns //= 2
    return columns


@dataclasses.dataclass(frozen=True)
class Ring:
    """Slots that are fetched, multiplied and given back in turn; those of factors are None where there are none."""

    config: Config
    a: Any
    b: Any
    a_factors: Any
    b_factors: Any
    full: Any
    empty: Any
    summed_first: tuple[bool, bool]

    def slot(self, step):
        return lax.rem(step, self.config.stages)

    def fetch_tile(self, plan: Plan, tile: Tile, a_gmem, b_gmem, rows_gmem, columns_gmem) -> None:
        config = self.config
        a_rows, b_rows = pl.ds(tile.row, config.program_rows), pl.ds(tile.column, config.program_columns)
        a_shared, b_shared = ("member" if config.pair == by else None for by in ("columns", "rows"))

        @pl.loop(0, tile.steps)
        def _(step):
            slot = self.slot(tile.first + step)
            pl.when(tile.first + step >= config.stages)(lambda: plgpu.barrier_wait(self.empty.at[slot]))
            if self.a_factors is not None:
                plgpu.commit_smem()  # factors are read by threads, not by tensor cores: before they are overwritten
            along = pl.ds((tile.start + step) * plan.depth, plan.depth)
            a_tile = a_gmem.at[along, a_rows] if self.summed_first[0] else a_gmem.at[a_rows, along]
            b_tile = b_gmem.at[along, b_rows] if self.summed_first[1] else b_gmem.at[b_rows, along]
            plgpu.copy_gmem_to_smem(a_tile, self.a.at[slot], self.full.at[slot], collective_axes=a_shared)
            plgpu.copy_gmem_to_smem(b_tile, self.b.at[slot], self.full.at[slot], collective_axes=b_shared)
            for factors, ring, at in ((rows_gmem, self.a_factors, a_rows), (columns_gmem, self.b_factors, b_rows)):
                if ring is not None:
                    plgpu.copy_gmem_to_smem(factors.at[tile.start + step, at], ring.at[slot], self.full.at[slot])

    def drain(self, steps) -> None:
        """Wait until every slot was given back: nobody may still read one when the program ends."""

        @pl.loop(lax.max(steps - self.config.stages, 0), steps)
        def _(step):
            plgpu.barrier_wait(self.empty.at[self.slot(step)])

    def wait(self, step) -> None:
        plgpu.barrier_wait(self.full.at[self.slot(step)])

    def release(self, step) -> None:
        plgpu.barrier_arrive(self.empty.at[self.slot(step)])

    def row_factors(self, step, first_row, rows: int) -> Any:
        """Factors of some rows in a step, None where it has none."""
        if self.a_factors is None:
            return None
        ref = self.a_factors.at[self.slot(step), pl.ds(first_row, rows)]
        return load(ref, plgpu.Layout.WGMMA.reduce(1), optimized=False)

    def operands(self, step, first_row, rows: int, first_column, columns: int) -> tuple[Any, Any]:
        """Rows of a, and of b transposed."""
        slot, a_rows, b_rows = self.slot(step), pl.ds(first_row, rows), pl.ds(first_column, columns)
        left = self.a.at[slot, :, a_rows].T if self.summed_first[0] else self.a.at[slot, a_rows]
        right = self.b.at[slot, :, b_rows] if self.summed_first[1] else self.b.at[slot, b_rows].T
        return left, right


def _accumulator(ring: Ring, rows: int, columns: int) -> Any:
    """Of the tensor cores: integers are summed as integers, exactly."""
    return plgpu.WGMMAAccumulatorRef((rows, columns), jnp.int32 if ring.a.dtype == jnp.int8 else jnp.float32)


def _chained_sums(config: Config, tile: Tile, ring: Ring, below, beside, store, squares=None) -> None:
    """All of K in the tensor cores' own accumulator."""
    assert squares is None, "factors that change along the sum need sums that are promoted"
    first, steps = tile.first, tile.steps

    @functools.partial(pl.run_scoped, sums=_accumulator(ring, config.rows, config.columns))
    def _(sums):
        @pl.loop(0, steps)
        def _(step):
            at = first + step
            ring.wait(at)
            plgpu.wgmma(sums, *ring.operands(at, below, config.rows, beside, config.columns))
            plgpu.wgmma_wait(1)  # the step before this one is multiplied
            pl.when(step > 0)(lambda: ring.release(at - 1))

        plgpu.wgmma_wait(0)
        pl.when(steps > 0)(lambda: ring.release(first + steps - 1))
        store(0, sums[...].astype(jnp.float32))


def _promoted_sums(config: Config, tile: Tile, ring: Ring, below, beside, store, squares=None) -> None:
    """Each step of K in the tensor cores' accumulator, all steps in float32 registers.

    squares: factors of 128 columns of the result for each step, read one step ahead.
    """
    part = config.columns // config.parts
    assert squares is None or LINE % part == 0, f"{part} columns have more than one factor"

    def squares_of(step) -> tuple[Any, ...]:
        if squares is None:
            return (None,) * config.parts
        at = tile.start + lax.max(lax.min(step, tile.steps - 1), 0)
        return tuple(squares[at, lax.div(tile.column + beside + i * part, LINE)] for i in range(config.parts))

    def step_of(step, carry):
        totals, by = carry
        at = tile.first + step
        following = squares_of(step + 1)
        ring.wait(at)
        rows = ring.row_factors(at, below, config.rows)
        grown = []
        for i, total in enumerate(totals):

            def product(sums, column=i * part):
                plgpu.wgmma(sums, *ring.operands(at, below, config.rows, beside + column, part))
                return sums[...]

            sums = pl.run_scoped(product, _accumulator(ring, config.rows, part)).astype(jnp.float32)
            if rows is not None:
                factors = rows if by[i] is None else rows * by[i]
                sums = sums * lax.broadcast_in_dim(factors, sums.shape, (0,))
            if ring.b_factors is not None:
                sums = sums * along_columns(ring.b_factors.at[ring.slot(at)], beside + i * part, sums.shape)
            grown.append(total + sums)
        ring.release(at)
        return tuple(grown), following

    zeros = plgpu.layout_cast(jnp.zeros((config.rows, part), jnp.float32), plgpu.Layout.WGMMA)
    totals, _ = lax.fori_loop(0, tile.steps, step_of, ((zeros,) * config.parts, squares_of(jnp.int32(0))))
    for i, total in enumerate(totals):
        store(i * part, total)


class Factors:
    """What the sums are multiplied by: one number or one per row of the result, and one number or one per column."""

    def __init__(self, rows_ref, columns_ref):
        self.rows_ref, self.columns_ref = rows_ref, columns_ref
        self.scalars = rows_ref.shape == columns_ref.shape == (1,)
        if self.scalars:
            left, right = rows_ref[0], columns_ref[0]
            self.smaller, self.larger = jnp.minimum(left, right), jnp.maximum(left, right)

    def apply(self, sums: jax.Array, first_row, first_column) -> jax.Array:
        """The smaller factor first, so that sums of ordinary size do not pass through infinity."""
        if self.scalars:
            return sums * self.smaller * self.larger
        left = along_rows(self.rows_ref, first_row, sums.shape)
        right = along_columns(self.columns_ref, first_column, sums.shape)
        return sums * jnp.minimum(left, right) * jnp.maximum(left, right)


def along_rows(ref, first, shape: tuple[int, ...]) -> jax.Array:
    """One number, or those of `shape[0]` rows, spread over the columns."""
    return _spread(ref, first, shape, axis=0)


def along_columns(ref, first, shape: tuple[int, ...]) -> jax.Array:
    """One number, or those of `shape[1]` columns, spread over the rows."""
    return _spread(ref, first, shape, axis=1)


def _spread(ref, first, shape: tuple[int, ...], axis: int) -> jax.Array:
    if ref.shape == (1,):
        return plgpu.layout_cast(jnp.full(shape, ref[0]), plgpu.Layout.WGMMA)
    layout = plgpu.Layout.WGMMA.reduce(1 - axis)
    values = load(ref.at[pl.ds(first, shape[axis])], layout, optimized=False)
    return lax.broadcast_in_dim(values, shape, (axis,))
