"""Matrix products on Hopper's tensor cores, with scales and bias applied before the one rounding of the result.

One persistent program per multiprocessor. Its third warpgroup fetches tiles of both operands, over the ends of output
tiles, into a ring of shared-memory slots; the other two multiply and store. Operands lie with the summed axis last, 16-bit ones in either
order.

Tensor cores add 8-bit floats in an accumulator of about 14 bits. `promote` moves each tile's partial sums into float32
registers; a warpgroup's tile is then multiplied in parts, because there is no room for two accumulators of it.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

WARPGROUPS = 2  # that multiply; one more fetches
SWIZZLE = 128  # bytes of a row of a tile in shared memory
ROW_TILE = 8  # rows of such a tile
FETCH_REGISTERS = 40


@dataclasses.dataclass(frozen=True)
class Config:
    """How a product is cut up.

    rows, columns: the tile of one warpgroup. split: whether the two of a program lie below each other ("rows") or side
    by side ("columns"). stages: slots of the ring. parts: pieces in which a promoted tile is multiplied. band: how many
    output tiles wide the path is that programs walk along the result, for the cache; along: the axis that it follows.
    """

    rows: int = 64
    columns: int = 256
    split: str = "rows"
    stages: int = 4
    parts: int = 2
    band: int = 8
    along: int = 0
    epilogue_columns: int = 64

    @property
    def program_rows(self) -> int:
        return self.rows * (WARPGROUPS if self.split == "rows" else 1)

    @property
    def program_columns(self) -> int:
        return self.columns * (WARPGROUPS if self.split == "columns" else 1)


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


def along_rows(ref, first, shape: tuple[int, int]) -> jax.Array:
    """One number, or those of `shape[0]` rows, spread over the columns."""
    if ref.shape == (1,):
        return plgpu.layout_cast(jnp.full(shape, ref[0]), plgpu.Layout.WGMMA)
    values = plgpu.load(ref, pl.ds(first, shape[0]), layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
    return lax.broadcast_in_dim(values, shape, (0,))


def along_columns(ref, first, shape: tuple[int, int]) -> jax.Array:
    """One number, or those of `shape[1]` columns, spread over the rows."""
    if ref.shape == (1,):
        return plgpu.layout_cast(jnp.full(shape, ref[0]), plgpu.Layout.WGMMA)
    values = plgpu.load(ref, pl.ds(first, shape[1]), layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
    return lax.broadcast_in_dim(values, shape, (1,))


def tiled(row_bytes: int, itemsize: int) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
    """The layout in shared memory of rows of that many bytes, or of pieces of them."""
    swizzle = min(SWIZZLE, row_bytes)
    return plgpu.TilingTransform((ROW_TILE, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)


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
    summed_first: tuple[bool, bool] = (False, False),
) -> jax.Array:
    """a (M, K) times b (N, K) transposed, times factors, plus bias (N,).

    16-bit operands may also be (K, M) and (K, N), as `summed_first` says; tensor cores take 8-bit ones with K last only.
    Sizes must suit the tiles: K a multiple of 128 bytes, M of 8 and N of 16, or of 64 where they lie last in an operand.
    Factors are float32 (1,), or (M,) and (N,) filled up to whole programs, as the bias is.
    """
    a_turned, b_turned = summed_first
    (m, k), n = a.shape[::-1] if a_turned else a.shape, b.shape[1 if b_turned else 0]
    step_k = SWIZZLE // a.dtype.itemsize
    grid_m, grid_n, steps = pl.cdiv(m, config.program_rows), pl.cdiv(n, config.program_columns), k // step_k
    out_dtype = jnp.dtype(out_dtype)
    epilogue_columns = _epilogue_columns(n, config, out_dtype)

    def kernel(a_gmem, b_gmem, rows_gmem, columns_gmem, *rest):
        *bias_gmem, out_gmem, a_ring, b_ring, out_smem, full, empty = rest
        warpgroup = lax.axis_index("warpgroup")

        def slot_of(step):
            return lax.rem(step, config.stages)

        def over_tiles(work):
            """work(first step, row tile, column tile) for each output tile of this program."""

            @plgpu.nd_loop((grid_m * grid_n,), collective_axes="program")
            def _(info: plgpu.NDLoopInfo):
                row, column = plgpu.planar_snake(info.index[0], (grid_m, grid_n), config.along, config.band)
                work(info.local_index * steps, row, column)

        def fetch():
            plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")

            def tile(first, row, column):
                a_rows = pl.ds(row * config.program_rows, config.program_rows)
                b_rows = pl.ds(column * config.program_columns, config.program_columns)

                @pl.loop(0, steps)
                def _(step):
                    slot = slot_of(first + step)

                    @pl.when(first + step >= config.stages)
                    def _():
                        plgpu.barrier_wait(empty.at[slot])

                    along = pl.ds(step * step_k, step_k)
                    a_tile = a_gmem.at[along, a_rows] if a_turned else a_gmem.at[a_rows, along]
                    b_tile = b_gmem.at[along, b_rows] if b_turned else b_gmem.at[b_rows, along]
                    plgpu.copy_gmem_to_smem(a_tile, a_ring.at[slot], full.at[slot])
                    plgpu.copy_gmem_to_smem(b_tile, b_ring.at[slot], full.at[slot])

            over_tiles(tile)
            tiles = pl.cdiv(grid_m * grid_n - lax.axis_index("program"), programs)

            @pl.loop(lax.max(tiles * steps - config.stages, 0), tiles * steps)
            def _(step):  # nobody may still be at a slot when the program ends
                plgpu.barrier_wait(empty.at[slot_of(step)])

        def multiply():
            plgpu.set_max_registers(_multiply_registers(), action="increase")
            factors = Factors(rows_gmem, columns_gmem)
            sums = _promoted_sums if promote else _chained_sums
            below = warpgroup * config.rows if config.split == "rows" else 0
            beside = warpgroup * config.columns if config.split == "columns" else 0

            def operands(slot, part_at: int, part: int):
                a_rows, b_rows = pl.ds(below, config.rows), pl.ds(beside + part_at, part)
                left = a_ring.at[slot, :, a_rows].T if a_turned else a_ring.at[slot, a_rows]
                right = b_ring.at[slot, :, b_rows] if b_turned else b_ring.at[slot, b_rows].T
                return left, right

            def tile(first, row, column):
                ring = Ring(first, steps, slot_of, full, empty)
                top = row * config.program_rows + below
                left = column * config.program_columns + beside

                def store(at: int, values: jax.Array):
                    for piece in range(values.shape[1] // epilogue_columns):
                        slot = (at // epilogue_columns + piece) % 2
                        along = slice(piece * epilogue_columns, (piece + 1) * epilogue_columns)
                        first_column = left + at + piece * epilogue_columns
                        result = factors.apply(values[:, along], top, first_column)
                        if bias_gmem:
                            result += along_columns(bias_gmem[0], first_column, result.shape)
                        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                        out_smem[warpgroup, slot] = result.astype(out_dtype)
                        plgpu.commit_smem()
                        block = out_gmem.at[pl.ds(top, config.rows), pl.ds(first_column, epilogue_columns)]
                        plgpu.copy_smem_to_gmem(out_smem.at[warpgroup, slot], block)

                sums(config, ring, operands, store)

            over_tiles(tile)
            plgpu.wait_smem_to_gmem(0)

        lax.cond(warpgroup == WARPGROUPS, fetch, multiply)

    def ring_of(rows: int, dtype, turned: bool):
        shape = (step_k, rows) if turned else (rows, step_k)
        return plgpu.SMEM((config.stages, *shape), dtype, transforms=tiled(SWIZZLE, dtype.itemsize))

    out_row = epilogue_columns * out_dtype.itemsize
    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((m, n), out_dtype),
        grid=(programs,),
        grid_names=("program",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=[
            ring_of(config.program_rows, a.dtype, a_turned),
            ring_of(config.program_columns, b.dtype, b_turned),
            plgpu.SMEM(
                (WARPGROUPS, 2, config.rows, epilogue_columns), out_dtype, transforms=tiled(out_row, out_dtype.itemsize)
            ),
            plgpu.Barrier(num_arrivals=2, num_barriers=config.stages),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=config.stages),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return run(a, b, row_factors, column_factors, *([] if bias is None else [bias]))


def _multiply_registers() -> int:
    """What is left of a multiprocessor's registers for each thread that multiplies, in steps of 8."""
    return (512 - FETCH_REGISTERS) // WARPGROUPS // 8 * 8


def _epilogue_columns(n: int, config: Config, out_dtype) -> int:
    """Columns that are stored at a time: as many as the config says, fewer where N is no multiple or they are wide."""
    columns = config.epilogue_columns * 2 // out_dtype.itemsize
    while n % columns:
        columns //= 2
    return columns


@dataclasses.dataclass(frozen=True)
class Ring:
    """The slots of one output tile: steps first, first + 1, ... of the program, each fetched, used and given back."""

    first: jax.Array
    steps: int
    slot_of: object
    full: object
    empty: object


def _chained_sums(config: Config, ring: Ring, operands, store) -> None:
    """All of K in the tensor cores' own accumulator."""

    @functools.partial(pl.run_scoped, sums=plgpu.ACC((config.rows, config.columns), jnp.float32))
    def _(sums):
        @pl.loop(0, ring.steps)
        def _(step):
            slot = ring.slot_of(ring.first + step)
            plgpu.barrier_wait(ring.full.at[slot])
            plgpu.wgmma(sums, *operands(slot, 0, config.columns))
            plgpu.wgmma_wait(1)  # the product before this one is done, so its slot is free

            @pl.when(step > 0)
            def _():
                plgpu.barrier_arrive(ring.empty.at[ring.slot_of(ring.first + step - 1)])

        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(ring.empty.at[ring.slot_of(ring.first + ring.steps - 1)])
        store(0, sums[...])


def _promoted_sums(config: Config, ring: Ring, operands, store) -> None:
    """Each step of K in the tensor cores' accumulator, all steps in float32 registers."""
    part = config.columns // config.parts

    def step_of(step, totals):
        slot = ring.slot_of(ring.first + step)
        plgpu.barrier_wait(ring.full.at[slot])
        grown = []
        for i, total in enumerate(totals):

            def product(sums, at=i * part):
                plgpu.wgmma(sums, *operands(slot, at, part))
                return sums[...]

            grown.append(total + pl.run_scoped(product, plgpu.ACC((config.rows, part), jnp.float32)))
        plgpu.barrier_arrive(ring.empty.at[slot])
        return tuple(grown)

    zeros = plgpu.layout_cast(jnp.zeros((config.rows, part), jnp.float32), plgpu.Layout.WGMMA)
    totals = lax.fori_loop(0, ring.steps, step_of, (zeros,) * config.parts)
    for i, total in enumerate(totals):
        store(i * part, total)
