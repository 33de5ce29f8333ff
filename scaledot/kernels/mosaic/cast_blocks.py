"""One read of a matrix, casts with blocks along its rows and down its columns: MXFP8 and NVFP4.

A program has as many rows as a block is long in shared memory, and a thread a few neighbouring columns of them. Blocks
down the columns are its own, and so are the groups of a rotation; blocks along a row it shares with some neighbours.
One loop over the rows casts those and looks for the largest magnitudes down the columns, a second one casts these.

What tensor cores of Hopper multiply exactly is not codes but the values that they stand for, which fit bfloat16; so a
view may ask for those instead. Codes of 4 bits are stored two to a byte, those of an odd row above the even row's.

Codes and scales have the reference's bits, and the scale of a block that holds NaN or infinities is NaN. Values below
2^-126 are kept where the reference makes them zeros, and so are sums of a rotation: neither shows in a product.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from scaledot.formats import Format
from scaledot.kernels.mosaic.casts import block_of
from scaledot.kernels.mosaic.memory import THREADS, flushed, load, rotated, side_by_side, to_float8
from scaledot.numerics.bits import amax_of_bits, amax_of_rank, magnitude_bits, magnitude_rank, power_of_two
from scaledot.numerics.encode import float_code, rounded
from scaledot.numerics.hadamard import Hadamard
from scaledot.numerics.rounding import uniform_at
from scaledot.numerics.scale import E4M3_MAX, e8m0_code

COLUMNS = THREADS * 8  # what K must be a multiple of
TOGETHER = 4  # rows of one turn of a loop
# 2^-127, the smallest MX scale, is no normal number; the largest one of 8-bit floats leaves room for a constant share.
SHARE = np.float32(2.0**-8)
AMAX_BLOCKS = 8  # blocks of rows of one program that looks for the largest magnitude


@dataclasses.dataclass(frozen=True)
class View:
    """A cast: blocks along rows ("along"), down columns ("down") or as long as wide ("square").

    values: bfloat16 instead of codes and scales. rotation: down the columns, before the cast.
    """

    format: Format
    shape: str
    values: bool
    stochastic: bool = False
    rotation: Hadamard | None = None

    @property
    def packs(self) -> bool:
        return not self.values and self.format.bits == 4

    def is_same_cast(self, other: "View") -> bool:
        """Whether both have the same codes; what is rounded by chance has a key of its own."""
        return not self.stochastic and dataclasses.replace(self, values=other.values) == other


class Made(NamedTuple):
    """Codes or values, and the bytes of the scales where there are codes."""

    data: jax.Array
    scale: jax.Array | None


def cast(
    x: jax.Array, views: tuple[View, ...], up: jax.Array | None, seeds: jax.Array | None, width: int
) -> tuple[Made, ...]:
    """The casts of x (M, K) that the views ask for; M must be a multiple of the block and K of 1024.

    up: for each view of a two-level format what brings its largest block maximum to the largest scale, and the
    reciprocal; float32 (V, 2). seeds: where any rounds by chance, the two words of each view's key, uint32 (V, 2).
    width: the length of rows by which elements are counted for that.
    """
    m, k = x.shape
    size = block_of(views[0].format)
    vector = _vector(size, x.dtype)
    columns = THREADS * vector  # of one program

    given = [each for each in (up, seeds) if each is not None]

    def kernel(x_gmem, *others):
        *others, x_smem, full = others
        outs = iter(others)
        up_gmem, seeds_gmem = (None if each is None else next(outs) for each in (up, seeds))
        first, beside = lax.axis_index("row") * size, lax.axis_index("column") * (columns // size)
        plgpu.copy_gmem_to_smem(x_gmem.at[pl.ds(first, size), pl.ds(beside, columns // size)], x_smem, full)
        pending = [Out(i, view, next(outs), None if view.values else next(outs)) for i, view in enumerate(views)]
        made = []
        while pending:
            view = pending[0].view
            together = [pending[0], *(out for out in pending[1:] if view.is_same_cast(out.view))]
            pending = [out for out in pending if out not in together]
            number = together[0].number
            level = None if up_gmem is None else (up_gmem[number, 0], up_gmem[number, 1])
            uniform = functools.partial(_uniform, seeds_gmem, number, width) if view.stochastic else None
            made.append(Cast(view, level, tuple(together), uniform))
        plgpu.barrier_wait(full)
        _make(made, Rows(x_smem, first, beside, vector))

    def outputs(view: View) -> list[jax.ShapeDtypeStruct]:
        dtype = jnp.bfloat16 if view.values else jnp.uint8 if view.packs else view.format.element_dtype
        data = jax.ShapeDtypeStruct((m // 2 if view.packs else m, k // size, size), dtype)
        scales = {"along": (m, k // size), "down": (m // size, k // size, size), "square": (m // size, k // size)}
        return [data] if view.values else [data, jax.ShapeDtypeStruct(scales[view.shape], jnp.uint8)]

    run = plgpu.kernel(
        kernel,
        out_type=tuple(output for view in views for output in outputs(view)),
        grid=(m // size, k // columns),
        grid_names=("row", "column"),
        scratch_types=[plgpu.SMEM((size, columns // size, size), x.dtype), plgpu.Barrier()],
        compiler_params=_PARAMETERS,
    )
    written = iter(run(x.reshape(m, k // size, size), *given))

    def made(view: View) -> Made:
        data = next(written)
        scale = None if view.values else next(written)
        return Made(data.reshape(-1, k), None if scale is None else scale.reshape(scale.shape[0], -1))

    return tuple(map(made, views))


def amaxes(x: jax.Array, rotations: tuple[Hadamard | None, ...], size: int) -> tuple[jax.Array, ...]:
    """The largest finite magnitude of x, and of x rotated down its columns in groups of `size`."""
    m, k = x.shape
    vector, deep = _vector(size, x.dtype), m // size
    columns = THREADS * vector
    strips = -(-deep // AMAX_BLOCKS)

    def kernel(x_gmem, out_gmem):
        strip, column = lax.axis_index("strip"), lax.axis_index("column")

        def block(i, largest):
            first, blocks = (strip + i * strips) * size, pl.ds(column * (columns // size), columns // size)
            loaded = [_row(x_gmem.at[first + j, blocks], vector) for j in range(size)]
            found = []
            for rotation, most in zip(rotations, largest, strict=True):
                values = loaded if rotation is None else rotated(loaded, rotation)
                found.append(functools.reduce(jnp.maximum, map(magnitude_rank, values), most))
            return tuple(found)

        nothing = plgpu.layout_cast(jnp.zeros((columns // size, size), jnp.uint32), side_by_side(size, vector))
        count = lax.div(deep - strip + strips - 1, strips)
        for number, most in enumerate(lax.fori_loop(0, count, block, (nothing,) * len(rotations))):
            out_gmem[number, strip, column] = jnp.max(jnp.max(amax_of_rank(most), axis=1), axis=0)

    grid = (strips, k // columns)
    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((len(rotations), *grid), jnp.float32),
        grid=grid,
        grid_names=("strip", "column"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return tuple(jnp.max(run(x.reshape(m, k // size, size)), axis=(1, 2)))


# Nothing that a cast writes is read again, so no thread need wait for another.
_PARAMETERS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True)


def _vector(size: int, dtype) -> int:
    """Neighbouring columns of a thread: 16 bytes, or half of that where blocks are short."""
    return 8 if size == 32 and dtype.itemsize == 2 else 4


def _row(ref, vector: int) -> jax.Array:
    """Blocks of a row as float32, (blocks, elements)."""
    return load(ref, side_by_side(ref.shape[-1], vector), optimized=False).astype(jnp.float32)


class Rows(NamedTuple):
    """Rows of one block in shared memory: the number of the first, that of its first block, the columns of a thread.

    Of those in memory, the blocks from `skipped` on count.
    """

    smem: Any
    first: Any
    beside: Any
    vector: int
    skipped: Any = 0

    @property
    def size(self) -> int:
        return self.smem.shape[0]

    @property
    def layout(self) -> Any:
        return side_by_side(self.size, self.vector)

    @property
    def shape(self) -> tuple[int, int]:
        return THREADS * self.vector // self.size, self.size

    @property
    def blocks(self) -> Any:
        """Its blocks among those of a row."""
        return pl.ds(self.beside + self.skipped, self.shape[0])

    def load(self, i) -> jax.Array:
        return _row(self.smem.at[i, pl.ds(self.skipped, self.shape[0])], self.vector)

    def halves(self, work) -> None:
        """work(rows) with half the columns of each thread, twice."""

        @pl.loop(0, 2)
        def _(half):
            work(self._replace(vector=self.vector // 2, skipped=half * (self.shape[0] // 2)))

    def in_steps(self, body, carry):
        """body(rows of a step, numbered) over all steps."""

        def step(i, carry):
            return body([(i * TOGETHER + j, self.load(i * TOGETHER + j)) for j in range(TOGETHER)], carry)

        return lax.fori_loop(0, self.size // TOGETHER, step, carry)

    def spread(self, value: jax.Array) -> jax.Array:
        """One number per block as one per element."""
        if value.ndim == 2:
            return value
        return plgpu.layout_cast(lax.broadcast_in_dim(value, self.shape, (0,)), self.layout)


@dataclasses.dataclass(frozen=True, eq=False)
class Out:
    """Where the codes or values of a view go, and its scales; and which of the views it is."""

    number: int
    view: View
    data: Any
    scale: Any

    def write(self, rows: Rows, numbered: list[tuple[Any, jax.Array]], scales: "list[Scale]", uniforms: list) -> None:
        """Some rows of a block, each under its scale; packed ones come in pairs."""
        results = [
            _cast(self.view, row, scale, rows.spread, uniform)
            for (_, row), scale, uniform in zip(numbered, scales, uniforms, strict=True)
        ]
        if not self.view.packs:
            for (i, _), result in zip(numbered, results, strict=True):
                self.data[rows.first + i, rows.blocks] = result
            return
        for (i, _), even, odd in zip(numbered[::2], results[::2], results[1::2], strict=True):
            self.data[lax.div(rows.first + i, 2), rows.blocks] = (even | (odd << 4)).astype(jnp.uint8)


class Cast(NamedTuple):
    """One cast: the view that says how, its tensor's level, all that want it, and what rounds a row, if by chance."""

    view: View
    level: tuple[Any, Any] | None
    outs: tuple[Out, ...]
    uniform: Any

    def scale_of(self, largest: jax.Array) -> "Scale":
        """From the largest bits of magnitudes in each block."""
        return _scale_of(self.view.format, amax_of_bits(largest), self.level)

    def write(self, rows: Rows, numbered: list[tuple[Any, jax.Array]], scales: "list[Scale]") -> None:
        uniforms = [None if self.uniform is None else self.uniform(rows, i) for i, _ in numbered]
        for out in self.outs:
            out.write(rows, numbered, scales, uniforms)

    def write_scale(self, rows: Rows, at, scale: "Scale") -> None:
        for out in self.outs:
            if out.scale is not None:
                out.scale[at, rows.blocks] = scale.stored


class Scale(NamedTuple):
    """The bytes of a scale, what data is multiplied by, and what codes are, in turn."""

    stored: jax.Array
    factor: jax.Array
    back: tuple[Any, ...]


def _make(made: list[Cast], rows: Rows) -> None:
    along = [cast for cast in made if cast.view.shape == "along"]
    down = [cast for cast in made if cast.view.shape != "along" and cast.view.rotation is None]

    def first(numbered, largest):
        for cast in along:
            _along(cast, rows, numbered)
        return functools.reduce(jnp.maximum, (magnitude_bits(row) for _, row in numbered), largest) if down else largest

    nothing = plgpu.layout_cast(jnp.zeros(rows.shape, jnp.uint32), rows.layout)
    largest = rows.in_steps(first, nothing) if along or down else nothing
    for cast in made:
        if cast.view.rotation is not None:  # half the columns at a time, because a whole block of each is in registers
            rows.halves(functools.partial(_down_rotated, cast, cast.view.rotation))
    for cast in down:
        _down(cast, rows, largest)


def _along(cast: Cast, rows: Rows, numbered: list[tuple[Any, jax.Array]]) -> None:
    scales = []
    for i, row in numbered:
        scales.append(cast.scale_of(jnp.max(magnitude_bits(row), axis=1)))
        cast.write_scale(rows, rows.first + i, scales[-1])
    cast.write(rows, numbered, scales)


def _down_rotated(cast: Cast, rotation: Hadamard, rows: Rows) -> None:
    turned = rotated([rows.load(i) for i in range(rows.size)], rotation)
    scale = cast.scale_of(functools.reduce(jnp.maximum, map(magnitude_bits, turned)))
    cast.write_scale(rows, lax.div(rows.first, rows.size), scale)
    cast.write(rows, list(enumerate(turned)), [scale] * rows.size)


def _down(cast: Cast, rows: Rows, largest: jax.Array) -> None:
    scale = cast.scale_of(jnp.max(largest, axis=1) if cast.view.shape == "square" else largest)
    cast.write_scale(rows, lax.div(rows.first, rows.size), scale)

    def body(numbered, carry):
        cast.write(rows, numbered, [scale] * len(numbered))
        return carry

    rows.in_steps(body, jnp.int32(0))


def _scale_of(format: Format, amax: jax.Array, level) -> Scale:
    """The scale of blocks with these magnitudes; NaN, and so is every value, where one is infinite."""
    nan = np.float32(np.nan)
    if format.scale == "float8_e8m0fnu":
        code = e8m0_code(amax, format)
        factor = jnp.where(code == 255, nan, power_of_two(127 - code))
        return Scale(code.astype(jnp.uint8), factor, (SHARE, power_of_two(code - 119)))
    up, down = level
    relative = jnp.minimum(amax * (up * np.float32(1 / format.max)), E4M3_MAX)
    relative = jnp.where(amax == np.float32(np.inf), nan, relative)
    stored = relative.astype(jnp.float8_e4m3fn)
    value = stored.astype(jnp.float32)
    factor = jnp.minimum(np.float32(1) / (value * down), np.finfo(np.float32).max)
    factor = jnp.where(value == 0, np.float32(0), factor)
    return Scale(lax.bitcast_convert_type(stored, jnp.uint8), factor, (value,))


def _cast(view: View, row: jax.Array, scale: Scale, spread, uniform: jax.Array | None) -> jax.Array:
    """Codes of a row, packed ones as bits; or the values that they stand for. Subnormal numbers are zeros."""
    format = view.format
    up = flushed(row) * spread(scale.factor)
    if view.packs:
        return float_code(up, format, uniform)
    if format.bits == 8 and uniform is None:
        codes = to_float8(up, format.element_dtype)
        if not view.values:
            return codes
        values = codes.astype(jnp.float32)
    else:
        values = rounded(up, format, uniform)
        if not view.values:
            return values.astype(format.element_dtype)
    for factor in scale.back:
        values = values * (factor if factor.ndim == 0 else spread(factor))
    return values.astype(jnp.bfloat16)


def _uniform(seeds_gmem, number: int, width: int, rows: Rows, i) -> jax.Array:
    """Numbers in [0, 1) for the elements of a row."""
    block, element = (plgpu.broadcasted_iota(jnp.uint32, rows.shape, axis, layout=rows.layout) for axis in range(2))
    start = (rows.first + i) * np.int32(width) + (rows.beside + rows.skipped) * np.int32(rows.size)
    index = start.astype(jnp.uint32) + block * np.uint32(rows.size) + element
    return uniform_at(index, seeds_gmem[number, 0], seeds_gmem[number, 1])
