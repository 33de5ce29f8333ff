"""One read of a matrix, casts with blocks along its rows and down its columns: MXFP8 and NVFP4.

A program (CTA) has as many rows as a block is long in shared memory, and a thread a few neighbouring columns of them.
Blocks down the columns are its own, and so are the groups of a rotation; blocks along a row it shares with some
neighbours. One loop over the rows casts those and looks for the largest magnitudes down the columns, a second one casts
these.

What tensor cores of Hopper multiply exactly is not codes but the values that they stand for, which fit bfloat16; so a
view may ask for those instead. Codes of 4 bits are stored two to a byte: those of two rows, the odd one's above, which
costs least; or those of two columns, as XLA stores them. For the latter a program reads bfloat16 as 32-bit words of two
columns, so that a thread has the even and the odd ones in registers of their own.

Codes and scales have the reference's bits. NaN and infinities either propagate, by a NaN scale of their block, or
saturate, and scales follow from finite elements. Values below 2^-126 are kept where the reference makes them zeros, and
so are sums of a rotation: neither shows in a product.
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
from scaledot.kernels.hopper.cast_arithmetic import amax_codec, flush_subnormals, rotated, to_float8
from scaledot.kernels.hopper.launch import call_exported
from scaledot.kernels.hopper.memory_layouts import THREADS, load, row_vector_layout
from scaledot.kernels.hopper.scale_blocks import MICROSCALED_BLOCKS
from scaledot.kernels.hopper.support import kernel_name
from scaledot.numerics.bits import amax_of_rank, float_of, magnitude_rank, power_of_two
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

    values: bfloat16 instead of codes and scales. rotation: down the columns, before the cast. packing: of 4-bit codes,
    two "rows" or two "columns" in a byte. saturates: what becomes of NaN and infinities.
    """

    format: Format
    shape: str
    values: bool
    stochastic: bool = False
    rotation: Hadamard | None = None
    packing: str = ""
    saturates: bool = False

    def is_same_cast(self, other: "View") -> bool:
        """Whether both have the same codes; what is rounded stochastically has a key of its own."""
        return not self.stochastic and dataclasses.replace(self, values=other.values, packing=other.packing) == other


class CastOutputs(NamedTuple):
    """Codes or values, and the bytes of the scales where there are codes."""

    data: jax.Array
    scale: jax.Array | None


def cast(
    x: jax.Array, views: tuple[View, ...], up: jax.Array | None, seeds: jax.Array | None, width: int
) -> tuple[CastOutputs, ...]:
    """The casts of x (M, K) that the views ask for; M must be a multiple of the block and K of 1024.

    up: for each view of a two-level format what brings its largest block maximum to the largest scale, and the
    reciprocal; float32 (V, 2). seeds: where any rounds stochastically, the two words of each view's key, uint32 (V, 2).
    width: the length of rows by which elements are counted for that. Either all views pack columns or none.
    """
    m, k = x.shape
    call = CastLaunch.of(x, views, up is not None, seeds is not None, width)

    def kernel(*refs) -> None:
        _kernel(call, *refs)

    run = plgpu.kernel(
        kernel,
        out_type=tuple(output for view in views for output in call.outputs(m, k, view)),
        grid=(m // call.size, k // call.columns),
        grid_names=("row", "column"),
        kernel_name=kernel_name("cast", *dict.fromkeys(view.format.name for view in views)),
        scratch_types=[plgpu.SMEM((call.size, call.columns // call.size, call.words), call.dtype), plgpu.Barrier()],
        compiler_params=_PARAMETERS,
    )
    if call.paired:
        x = lax.bitcast_convert_type(x.reshape(m, k // 2, 2), jnp.uint32)
    given = [each for each in (up, seeds) if each is not None]
    written = iter(call_exported(call, run, x.reshape(m, k // call.size, call.words), *given))

    def made(view: View) -> CastOutputs:
        data = next(written)
        scale = None if view.values else next(written)
        if scale is not None and scale.ndim == 4:  # of even and of odd columns
            scale = scale.transpose(0, 2, 3, 1)
        return CastOutputs(
            data.reshape(data.shape[0], -1), None if scale is None else scale.reshape(scale.shape[0], -1)
        )

    return tuple(map(made, views))


class CastLaunch(NamedTuple):
    """One launch, before data. size: of a block. vector: neighbouring elements of a thread, words of two columns where
    columns are `paired`. dtype: of these elements."""

    views: tuple[View, ...]
    size: int
    vector: int
    paired: bool
    dtype: Any
    has_levels: bool
    has_seeds: bool
    width: int

    @classmethod
    def of(cls, x: jax.Array, views: tuple[View, ...], has_levels: bool, has_seeds: bool, width: int) -> "CastLaunch":
        format = views[0].format
        size, paired = MICROSCALED_BLOCKS[format.element, format.scale], views[0].packing == "columns"
        assert all((view.packing == "columns") == paired for view in views)
        vector = _vector(size, x.dtype)
        if paired and any(view.rotation is not None for view in views):
            vector //= 2  # a whole block of each column is in registers
        return cls(views, size, vector, paired, jnp.uint32 if paired else x.dtype, has_levels, has_seeds, width)

    @property
    def words(self) -> int:
        """Elements of a block along a row."""
        return self.size // (2 if self.paired else 1)

    @property
    def columns(self) -> int:
        """Of one program."""
        return THREADS * self.vector * self.size // self.words

    def outputs(self, m: int, k: int, view: View) -> list[jax.ShapeDtypeStruct]:
        across = k // self.size
        dtype = jnp.bfloat16 if view.values else jnp.uint8 if view.packing else view.format.element_dtype
        data = jax.ShapeDtypeStruct((m // 2 if view.packing == "rows" else m, across, self.words), dtype)
        if view.values:
            return [data]
        down = m // self.size
        scales = {"along": (m, across), "down": (down, across, self.size), "square": (down, across)}
        if view.shape == "down" and self.paired:  # of the even columns, then of the odd ones
            return [data, jax.ShapeDtypeStruct((down, 2, across, self.words), jnp.uint8)]
        return [data, jax.ShapeDtypeStruct(scales[view.shape], jnp.uint8)]


def _kernel(call: CastLaunch, x_gmem, *others) -> None:
    *others, x_smem, full = others
    outs = iter(others)
    up_gmem = next(outs) if call.has_levels else None
    seeds_gmem = next(outs) if call.has_seeds else None
    across = call.columns // call.size
    first, beside = lax.axis_index("row") * call.size, lax.axis_index("column") * across
    plgpu.copy_gmem_to_smem(x_gmem.at[pl.ds(first, call.size), pl.ds(beside, across)], x_smem, full)
    pending = [Out(i, view, next(outs), None if view.values else next(outs)) for i, view in enumerate(call.views)]
    made = []
    while pending:
        view = pending[0].view
        row_alignment = [pending[0], *(out for out in pending[1:] if view.is_same_cast(out.view))]
        pending = [out for out in pending if out not in row_alignment]
        number = row_alignment[0].number
        level = None if up_gmem is None else (up_gmem[number, 0], up_gmem[number, 1])
        uniform = functools.partial(_uniform, seeds_gmem, number, call.width) if view.stochastic else None
        made.append(Cast(view, level, tuple(row_alignment), uniform))
    plgpu.barrier_wait(full)
    _make(made, Rows(x_smem, first, beside, call.vector, call.paired))


def amaxes(x: jax.Array, rotations: tuple[Hadamard | None, ...], size: int) -> jax.Array:
    """The largest finite magnitude of x as each rotation, or None, leaves it: (R,). They run down columns of `size`."""
    m, k = x.shape
    vector, deep = _vector(size, x.dtype), m // size
    columns = THREADS * vector
    row_tiles = -(-deep // AMAX_BLOCKS)

    def kernel(x_gmem, out_gmem):
        strip, column = lax.axis_index("strip"), lax.axis_index("column")

        def block(i, largest):
            first, blocks = (strip + i * row_tiles) * size, pl.ds(column * (columns // size), columns // size)
            loaded = [_row(x_gmem.at[first + j, blocks], vector) for j in range(size)]
            found = []
            for rotation, most in zip(rotations, largest, strict=True):
                values = loaded if rotation is None else rotated(loaded, rotation)
                found.append(functools.reduce(jnp.maximum, map(magnitude_rank, values), most))
            return tuple(found)

        nothing = plgpu.layout_cast(jnp.zeros((columns // size, size), jnp.uint32), row_vector_layout(size, vector))
        count = lax.div(deep - strip + row_tiles - 1, row_tiles)
        for number, most in enumerate(lax.fori_loop(0, count, block, (nothing,) * len(rotations))):
            out_gmem[number, strip, column] = jnp.max(jnp.max(amax_of_rank(most), axis=1), axis=0)

    grid = (row_tiles, k // columns)
    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((len(rotations), *grid), jnp.float32),
        grid=grid,
        grid_names=("strip", "column"),
        kernel_name=kernel_name("amax"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    found = call_exported(("amax of blocks", rotations, size), run, x.reshape(m, k // size, size))
    return jnp.max(found, axis=(1, 2))


# Nothing that a cast writes is read again, so no thread need wait for another.
_PARAMETERS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True)


def _vector(size: int, dtype) -> int:
    """Neighbouring columns of a thread: 16 bytes, or half of that where blocks are short."""
    return 8 if size == 32 and dtype.itemsize == 2 else 4


def _row(ref, vector: int) -> jax.Array:
    """Blocks of a row as float32, (blocks, elements)."""
    return load(ref, row_vector_layout(ref.shape[-1], vector), optimized=False).astype(jnp.float32)


def _paired_row(ref, vector: int) -> tuple[jax.Array, jax.Array]:
    """The even and the odd columns of a row of bfloat16 pairs: its bits are the upper half of float32's."""
    words = load(ref, row_vector_layout(ref.shape[-1], vector), optimized=False)
    return float_of(words << 16), float_of(words & np.uint32(0xFFFF0000))


Row = tuple[jax.Array, ...]  # float32 (blocks, elements); where columns are paired, the even ones and the odd ones
Numbered = list[tuple[Any, Row]]  # rows of a program, with their numbers


class Rows(NamedTuple):
    """Rows of one block in shared memory: the number of the first, that of its first block, the elements of a thread.

    Of the blocks in memory, those from `skipped` on count.
    """

    smem: Any
    first: Any
    beside: Any
    vector: int
    paired: bool = False
    skipped: Any = 0

    @property
    def size(self) -> int:
        return self.smem.shape[0]

    @property
    def words(self) -> int:
        return self.smem.shape[-1]

    @property
    def layout(self) -> Any:
        return row_vector_layout(self.words, self.vector)

    @property
    def shape(self) -> tuple[int, int]:
        return THREADS * self.vector // self.words, self.words

    @property
    def blocks(self) -> Any:
        """Its blocks among those of a row."""
        return pl.ds(self.beside + self.skipped, self.shape[0])

    def load(self, i) -> Row:
        ref = self.smem.at[i, pl.ds(self.skipped, self.shape[0])]
        return _paired_row(ref, self.vector) if self.paired else (_row(ref, self.vector),)

    def nothing(self) -> Row:
        """Magnitudes that are below all others."""
        zeros = plgpu.layout_cast(jnp.zeros(self.shape, jnp.uint32), self.layout)
        return (zeros,) * (2 if self.paired else 1)

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

    def write(self, rows: Rows, numbered: Numbered, scales: "list[Scales]", uniforms: list[Row | None]) -> None:
        """Some rows of a block, each under its scale; packed ones come in pairs."""
        results = [
            [
                _cast(self.view, values, scale, rows.spread, None if uniform is None else uniform[column])
                for column, (values, scale) in enumerate(zip(row, of_row, strict=True))
            ]
            for (_, row), of_row, uniform in zip(numbered, scales, uniforms, strict=True)
        ]
        numbers = [rows.first + i for i, _ in numbered]
        if self.view.packing == "rows":
            numbers = [lax.div(number, 2) for number in numbers[::2]]
            results = [even + odd for even, odd in zip(results[::2], results[1::2], strict=True)]
        for number, result in zip(numbers, results, strict=True):
            self.data[number, rows.blocks] = (
                (result[0] | (result[1] << 4)).astype(jnp.uint8) if self.view.packing else result[0]
            )

    def write_scale(self, rows: Rows, at, scales: "Scales") -> None:
        if self.scale is None:
            return
        if self.view.shape == "down" and rows.paired:
            for column, scale in enumerate(scales):
                self.scale[at, column, rows.blocks] = scale.stored
        else:
            self.scale[at, rows.blocks] = scales[0].stored


class Cast(NamedTuple):
    """One cast: the view that says how, its tensor's level, all that want it, and uniform numbers for a row, if any."""

    view: View
    level: tuple[Any, Any] | None
    outs: tuple[Out, ...]
    uniform: Any

    @property
    def ordered(self) -> Any:
        return amax_codec(self.view.saturates)[0]

    def scale_of(self, largest: jax.Array) -> "Scale":
        """From the largest of `ordered` magnitudes in each block."""
        return _scale_of(self.view.format, amax_codec(self.view.saturates)[1](largest), self.level)

    def write(self, rows: Rows, numbered: Numbered, scales: "list[Scales]") -> None:
        uniforms = [None if self.uniform is None else self.uniform(rows, i) for i, _ in numbered]
        for out in self.outs:
            out.write(rows, numbered, scales, uniforms)

    def write_scale(self, rows: Rows, at, scales: "Scales") -> None:
        for out in self.outs:
            out.write_scale(rows, at, scales)


class Scale(NamedTuple):
    """The bytes of a scale, what data is multiplied by, and what codes are, in turn."""

    stored: jax.Array
    multiplier: jax.Array
    back: tuple[Any, ...]


Scales = tuple[Scale, ...]  # of each array of a Row


def _make(made: list[Cast], rows: Rows) -> None:
    along = [cast for cast in made if cast.view.shape == "along"]
    down = [cast for cast in made if cast.view.shape != "along" and cast.view.rotation is None]

    def first(numbered: Numbered, largest: Row) -> Row:
        for cast in along:
            _along(cast, rows, numbered)
        return _larger(down[0].ordered, [row for _, row in numbered], largest) if down else largest

    largest = rows.in_steps(first, rows.nothing()) if along or down else rows.nothing()
    for cast in made:
        if cast.view.rotation is not None:  # half the columns at a time, because a whole block of each is in registers
            rows.halves(functools.partial(_down_rotated, cast, cast.view.rotation))
    for cast in down:
        _down(cast, rows, largest)


def _larger(ordered, rows: list[Row], largest: Row) -> Row:
    """The elementwise maximum of `largest` and `ordered(row)` over the rows."""
    return tuple(
        functools.reduce(jnp.maximum, map(ordered, column), most)
        for column, most in zip(zip(*rows, strict=True), largest, strict=True)
    )


def _along(cast: Cast, rows: Rows, numbered: Numbered) -> None:
    scales = []
    for i, row in numbered:
        largest = functools.reduce(jnp.maximum, map(cast.ordered, row))
        scales.append((cast.scale_of(jnp.max(largest, axis=1)),) * len(row))
        cast.write_scale(rows, rows.first + i, scales[-1])
    cast.write(rows, numbered, scales)


def _down_rotated(cast: Cast, rotation: Hadamard, rows: Rows) -> None:
    loaded = [rows.load(i) for i in range(rows.size)]
    turned = list(zip(*(rotated(list(column), rotation) for column in zip(*loaded, strict=True)), strict=True))
    largest = (functools.reduce(jnp.maximum, map(cast.ordered, column)) for column in zip(*turned, strict=True))
    scales = tuple(map(cast.scale_of, largest))
    cast.write_scale(rows, lax.div(rows.first, rows.size), scales)
    cast.write(rows, list(enumerate(turned)), [scales] * rows.size)


def _down(cast: Cast, rows: Rows, largest: Row) -> None:
    if cast.view.shape == "square":
        scales = (cast.scale_of(jnp.max(functools.reduce(jnp.maximum, largest), axis=1)),) * len(largest)
    else:
        scales = tuple(map(cast.scale_of, largest))
    cast.write_scale(rows, lax.div(rows.first, rows.size), scales)

    def body(numbered, carry):
        cast.write(rows, numbered, [scales] * len(numbered))
        return carry

    rows.in_steps(body, jnp.int32(0))


def _scale_of(format: Format, amax: jax.Array, level) -> Scale:
    """The scale of blocks with these magnitudes; NaN, and so is every value, where one is infinite."""
    nan = np.float32(np.nan)
    if format.scale == "float8_e8m0fnu":
        code = e8m0_code(amax, format)
        multiplier = jnp.where(code == 255, nan, power_of_two(127 - code))
        return Scale(code.astype(jnp.uint8), multiplier, (SHARE, power_of_two(code - 119)))
    up, down = level
    relative = jnp.minimum(amax * (up * np.float32(1 / format.max)), E4M3_MAX)
    relative = jnp.where(amax == np.float32(np.inf), nan, relative)
    stored = relative.astype(jnp.float8_e4m3fn)
    value = stored.astype(jnp.float32)
    multiplier = jnp.minimum(np.float32(1) / (value * down), np.finfo(np.float32).max)
    multiplier = jnp.where(value == 0, np.float32(0), multiplier)
    return Scale(lax.bitcast_convert_type(stored, jnp.uint8), multiplier, (value,))


def _cast(view: View, row: jax.Array, scale: Scale, spread, uniform: jax.Array | None) -> jax.Array:
    """Codes of a row, packed ones as bits; or the values that they stand for. Subnormal numbers are zeros."""
    format = view.format
    up = flush_subnormals(row) * spread(scale.multiplier)
    if view.packing:
        return float_code(up, format, uniform)
    if format.bits == 8 and uniform is None:
        codes = to_float8(up, format.element_dtype, view.saturates)
        if not view.values:
            return codes
        values = codes.astype(jnp.float32)
    else:
        values = rounded(up, format, uniform)
        if not view.values:
            return to_float8(values, format.element_dtype, view.saturates)
    for multiplier in scale.back:
        values = values * (multiplier if multiplier.ndim == 0 else spread(multiplier))
    return values.astype(jnp.bfloat16)


def _uniform(seeds_gmem, number: int, width: int, rows: Rows, i) -> Row:
    """Numbers in [0, 1) for the elements of a row."""
    block, element = (plgpu.broadcasted_iota(jnp.uint32, rows.shape, axis, layout=rows.layout) for axis in range(2))
    start = (rows.first + i) * np.int32(width) + (rows.beside + rows.skipped) * np.int32(rows.size)
    start = start.astype(jnp.uint32) + block * np.uint32(rows.size)
    places = [start + 2 * element, start + 2 * element + 1] if rows.paired else [start + element]
    return tuple(uniform_at(place, seeds_gmem[number, 0], seeds_gmem[number, 1]) for place in places)
