"""One read of a matrix, casts with blocks along its rows and down its columns: MXFP8 and NVFP4.

A thread owns a few neighbouring columns of as many rows as a block is long. Blocks down the columns are its own, and so
are the groups of a rotation; blocks along a row it shares with some neighbours. What it reads a second time comes from
the cache.

What tensor cores of Hopper multiply exactly is not codes but the values that they stand for, which fit bfloat16; so a
view may ask for those instead. Codes of 4 bits are stored two to a byte, those of an odd row above the even row's.

Codes and scales have the reference's bits. Values below 2^-126 are kept where the reference makes them zeros, and so
are sums of a rotation: neither shows in a product.
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
from scaledot.kernels.mosaic.memory import load
from scaledot.numerics.bits import MIN_NORMAL, amax_of_rank, magnitude_rank, power_of_two
from scaledot.numerics.encode import float_code, rounded
from scaledot.numerics.hadamard import Hadamard
from scaledot.numerics.rounding import uniform_at
from scaledot.numerics.scale import E4M3_MAX, e8m0_code

LANES, WARPS = 32, 4
THREADS = LANES * WARPS
COLUMNS = THREADS * 8  # what K must be a multiple of
TOGETHER = 4  # rows that are on their way at a time
# 2^-127, the smallest MX scale, is no normal number; the largest one of 8-bit floats leaves room for a constant share.
SHARE = np.float32(2.0**-8)
LEAST = MIN_NORMAL.view(np.float32)
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


def cast(x: jax.Array, views: tuple[View, ...], up: jax.Array, seeds: jax.Array, width: int) -> tuple[Made, ...]:
    """The casts of x (M, K) that the views ask for; M must be a multiple of the block and K of 512.

    up: for each view what brings its largest block maximum to the largest scale, and the reciprocal; float32 (V, 2),
    read by two-level formats. seeds: the two words of each view's key, uint32 (V, 2). width: the length of rows by
    which elements are counted for stochastic rounding.
    """
    m, k = x.shape
    size = block_of(views[0].format)
    vector = _vector(size, x.dtype)
    columns = THREADS * vector  # of one program

    def kernel(x_gmem, up_gmem, seeds_gmem, *outs):
        outs = iter(outs)
        below, first = lax.axis_index("row"), lax.axis_index("column") * (columns // size)
        rows = Rows(x_gmem, below * size, first, size, vector)
        pending = [Out(view, next(outs), None if view.values else next(outs)) for view in views]
        while pending:
            view = pending[0].view
            together = [pending[0], *(out for out in pending[1:] if view.is_same_cast(out.view))]
            pending = [out for out in pending if out not in together]
            number = views.index(view)
            level = up_gmem[number, 0], up_gmem[number, 1]
            uniform = functools.partial(_uniform, seeds_gmem, number, width) if view.stochastic else None
            (_along if view.shape == "along" else _down)(view, rows, level, Outs(tuple(together), uniform))

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
        compiler_params=_PARAMETERS,
    )
    written = iter(run(x.reshape(m, k // size, size), up, seeds))

    def made(view: View) -> Made:
        data = next(written)
        scale = None if view.values else next(written)
        return Made(data.reshape(-1, k), None if scale is None else scale.reshape(scale.shape[0], -1))

    return tuple(map(made, views))


def block_of(format: Format) -> int:
    """Elements of a line that share a scale."""
    (size,) = format.block or (0,)
    return size


def amaxes(x: jax.Array, rotations: tuple[Hadamard | None, ...], size: int) -> tuple[jax.Array, ...]:
    """The largest finite magnitude of x, and of x rotated down its columns in groups of `size`."""
    m, k = x.shape
    vector, deep = _vector(size, x.dtype), m // size
    columns = THREADS * vector
    strips = -(-deep // AMAX_BLOCKS)

    def kernel(x_gmem, out_gmem):
        strip, column = lax.axis_index("strip"), lax.axis_index("column")

        def block(i, largest):
            rows = Rows(x_gmem, (strip + i * strips) * size, column * (columns // size), size, vector)
            loaded = [rows.load(j) for j in range(size)]
            found = []
            for rotation, most in zip(rotations, largest, strict=True):
                values = loaded if rotation is None else _rotated(loaded, rotation)
                found.append(functools.reduce(jnp.maximum, map(magnitude_rank, values), most))
            return tuple(found)

        nothing = plgpu.layout_cast(jnp.zeros((columns // size, size), jnp.uint32), _layout(size, vector))
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


def _layout(size: int, vector: int) -> Any:
    """(blocks, elements) of a row: vectors, the lanes of a warp side by side, warps one after the other."""
    lanes = size // vector
    tiling = plgpu.Tiling(((WARPS * LANES // lanes, size), (LANES // lanes, size), (vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


class Rows(NamedTuple):
    """The rows of one block: the first of them, the first block along a row, and the columns of a thread."""

    gmem: Any
    first: Any
    beside: Any
    size: int
    vector: int

    @property
    def layout(self) -> Any:
        return _layout(self.size, self.vector)

    @property
    def shape(self) -> tuple[int, int]:
        return THREADS * self.vector // self.size, self.size

    def at(self, i) -> tuple[Any, Any]:
        """Where row i lies."""
        return self.first + i, pl.ds(self.beside, self.shape[0])

    def load(self, i) -> jax.Array:
        """float32, (blocks, elements)."""
        return load(self.gmem.at[self.at(i)], self.layout, optimized=False).astype(jnp.float32)

    def halves(self, work) -> None:
        """work(rows) with half the columns of each thread, twice."""
        blocks = self.shape[0] // 2

        @pl.loop(0, 2)
        def _(half):
            work(self._replace(beside=self.beside + half * blocks, vector=self.vector // 2))

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
    """Where the codes or values of a view go, and its scales."""

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
                self.data[rows.at(i)] = result
            return
        for (i, _), even, odd in zip(numbered[::2], results[::2], results[1::2], strict=True):
            at, beside = rows.at(i)
            self.data[lax.div(at, 2), beside] = (even | (odd << 4)).astype(jnp.uint8)


class Outs(NamedTuple):
    """The views of one cast, and the numbers by which it rounds a row, if by chance."""

    members: tuple[Out, ...]
    uniform: Any

    def write(self, rows: Rows, numbered: list[tuple[Any, jax.Array]], scales: "list[Scale]") -> None:
        uniforms = [None if self.uniform is None else self.uniform(rows, i) for i, _ in numbered]
        for out in self.members:
            out.write(rows, numbered, scales, uniforms)

    def write_scale(self, rows: Rows, at, scale: "Scale") -> None:
        for out in self.members:
            if out.scale is not None:
                out.scale[at, rows.at(0)[1]] = scale.stored


class Scale(NamedTuple):
    """The bytes of a scale, what data is multiplied by, and what codes are, in turn."""

    stored: jax.Array
    factor: jax.Array
    back: tuple[Any, ...]


def _along(view: View, rows: Rows, level, out: Outs) -> None:
    def body(numbered, carry):
        scales = []
        for i, row in numbered:
            largest = amax_of_rank(jnp.max(magnitude_rank(row), axis=1))
            scales.append(_scale_of(view.format, largest, level))
            out.write_scale(rows, rows.first + i, scales[-1])
        out.write(rows, numbered, scales)
        return carry

    rows.in_steps(body, jnp.int32(0))


def _down(view: View, rows: Rows, level, out: Outs) -> None:
    if view.rotation is None:
        _down_as_it_is(view, rows, level, out)
    else:  # half the columns at a time, because a whole block of each is in registers
        rows.halves(lambda half: _down_rotated(view, half, level, out))


def _down_rotated(view: View, rows: Rows, level, out: Outs) -> None:
    assert view.rotation is not None
    turned = _rotated([rows.load(i) for i in range(rows.size)], view.rotation)
    scale = _down_scale(view, functools.reduce(jnp.maximum, map(magnitude_rank, turned)), level)
    out.write_scale(rows, lax.div(rows.first, rows.size), scale)
    out.write(rows, list(enumerate(turned)), [scale] * rows.size)


def _down_as_it_is(view: View, rows: Rows, level, out: Outs) -> None:
    nothing = plgpu.layout_cast(jnp.zeros(rows.shape, jnp.uint32), rows.layout)

    def larger(numbered, largest):
        return functools.reduce(jnp.maximum, (magnitude_rank(row) for _, row in numbered), largest)

    scale = _down_scale(view, rows.in_steps(larger, nothing), level)
    out.write_scale(rows, lax.div(rows.first, rows.size), scale)

    def body(numbered, carry):
        out.write(rows, numbered, [scale] * len(numbered))
        return carry

    rows.in_steps(body, jnp.int32(0))


def _down_scale(view: View, largest: jax.Array, level) -> Scale:
    rank = jnp.max(largest, axis=1) if view.shape == "square" else largest
    return _scale_of(view.format, amax_of_rank(rank), level)


def _scale_of(format: Format, amax: jax.Array, level) -> Scale:
    if format.scale == "float8_e8m0fnu":
        code = e8m0_code(amax, format)
        return Scale(code.astype(jnp.uint8), power_of_two(127 - code), (SHARE, power_of_two(code - 119)))
    up, down = level
    relative = jnp.minimum(amax * (up * np.float32(1 / format.max)), E4M3_MAX)
    stored = relative.astype(jnp.float8_e4m3fn)
    value = stored.astype(jnp.float32)
    factor = jnp.minimum(np.float32(1) / (value * down), np.finfo(np.float32).max)
    factor = jnp.where(value == 0, np.float32(0), factor)
    return Scale(lax.bitcast_convert_type(stored, jnp.uint8), factor, (value,))


def _cast(view: View, row: jax.Array, scale: Scale, spread, uniform: jax.Array | None) -> jax.Array:
    """Codes of a row, packed ones as bits; or the values that they stand for. Subnormal numbers are zeros."""
    format, limit = view.format, float(view.format.max)
    scaled = row * jnp.where(jnp.abs(row) < LEAST, np.float32(0), spread(scale.factor))
    if view.packs:
        return float_code(scaled, format, uniform)
    if format.bits == 8 and uniform is None:
        codes = jnp.clip(scaled, -limit, limit).astype(format.element_dtype)
        if not view.values:
            return codes
        values = codes.astype(jnp.float32)
    else:
        values = rounded(scaled, format, uniform)
        if not view.values:
            return values.astype(format.element_dtype)
    for factor in scale.back:
        values = values * (factor if factor.ndim == 0 else spread(factor))
    return values.astype(jnp.bfloat16)


def _rotated(rows: list[jax.Array], rotation: Hadamard) -> list[jax.Array]:
    """Groups down the columns times the Hadamard matrix, in the order of sums and with the roundings of `hadamard`."""

    def round_bfloat16(x: jax.Array) -> jax.Array:
        return x.astype(jnp.bfloat16).astype(jnp.float32)

    values = [round_bfloat16(row) * np.float32(sign) for row, sign in zip(rows, rotation.signs, strict=True)]
    stride = 1
    while stride < rotation.size:
        following = list(values)
        for i in range(rotation.size):
            if not i & stride:
                low, high = values[i], values[i + stride]
                following[i], following[i + stride] = low + high, low - high
        values, stride = following, 2 * stride
    return [round_bfloat16(value * np.float32(rotation.size**-0.5)) for value in values]


def _uniform(seeds_gmem, number: int, width: int, rows: Rows, i) -> jax.Array:
    """Numbers in [0, 1) for the elements of a row."""
    block, element = (plgpu.broadcasted_iota(jnp.uint32, rows.shape, axis, layout=rows.layout) for axis in range(2))
    start = (rows.first + i) * np.int32(width) + rows.beside * np.int32(rows.size)
    index = start.astype(jnp.uint32) + block * np.uint32(rows.size) + element
    return uniform_at(index, seeds_gmem[number, 0], seeds_gmem[number, 1])
