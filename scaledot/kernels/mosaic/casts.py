"""A matrix cast for both of its products in one pass: which casts the kernels make, and what becomes of their results.

A product takes its operands with the summed axis last. A matrix that one product sums over columns and the other over
rows is therefore wanted as it lies and transposed. Rows in groups take a pass for each, because sums over the rows of a
group want them at other places.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scaledot.array import ScaledArray
from scaledot.formats import E8M0_RULES, FLOAT_RULES, FORMATS, Format
from scaledot.kernels.manual import vary_as
from scaledot.kernels.mosaic import support
from scaledot.kernels.operands import block_values, filled_up
from scaledot.numerics import blocks
from scaledot.numerics.bits import ONE, divide, flush
from scaledot.numerics.encode import decode_float
from scaledot.numerics.grouped import room, spaced_strips, strips
from scaledot.numerics.hadamard import Hadamard
from scaledot.numerics.rounding import seeds_of
from scaledot.numerics.scale import multipliers, tensor_level

FLOAT8_ELEMENTS = ("float8_e4m3fn", "float8_e5m2")
TILE_ELEMENTS = (*FLOAT8_ELEMENTS, "int8")
INPUTS = ("bfloat16", "float16", "float32")
LINE = 128  # elements of a line with a float32 scale
MOST_ROWS = 16 * 65535  # a grid has no more blocks of 16 rows
MOST_ROTATED = 16  # elements of a group, which a thread has in registers
BLOCKS = {  # (element, scale): the length of a 1-d block, and of each side of a square one, that `cast_blocks` casts
    ("float8_e4m3fn", "float8_e8m0fnu"): 32,
    ("float8_e5m2", "float8_e8m0fnu"): 32,
    ("float4_e2m1fn", "float8_e4m3fn"): 16,
}
# By the dtype of the scale: a format that the kernels cast to, and the values of its fields that they compute beside
# that format's own. Name and block are free: a view has its own tile.
COMPUTED: dict[str, tuple[Format, dict[str, tuple]]] = {
    "float32": (
        FORMATS["fp8_e4m3"],
        {"element": TILE_ELEMENTS, "rule": FLOAT_RULES, "pow2": (False, True), "bound": ("full", "half")},
    ),
    "float8_e8m0fnu": (FORMATS["mxfp8"], {"element": FLOAT8_ELEMENTS, "rule": E8M0_RULES}),
    "float8_e4m3fn": (FORMATS["nvfp4"], {}),
}
# Values that tensor cores multiply exactly, under one scale.
VALUES = Format("values", element="bfloat16")


def block_of(format: Format) -> int:
    """The length of the blocks that `cast_blocks` casts to a format; 0 if it does not cast to it."""
    return BLOCKS.get((format.element, format.scale), 0)


@dataclasses.dataclass(frozen=True)
class View:
    """How one product takes a matrix: cast to a format in tiles of (rows, columns), and summed over an axis.

    kept: whether it waits for the backward pass, as codes; otherwise it may be the values that codes stand for.
    """

    format: Format
    tile: blocks.Block
    summed: int
    kept: bool = False
    stochastic: bool = False
    rotation: Hadamard | None = None

    @property
    def shape(self) -> str:
        """Along rows, down columns or square, if blocks are of a length that is computed; "" otherwise."""
        size = block_of(self.format)
        lines: dict[blocks.Block, str] = {(1, size): "along", (size, 1): "down", (size, size): "square"}
        return lines.get(self.tile, "") if self.tile[self.summed] > 1 else ""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Transposed:
    """A quantised matrix that is stored with its axes exchanged."""

    stored: ScaledArray

    def logical(self) -> ScaledArray:
        return self.stored.T


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowPairs:
    """A matrix of 4-bit codes whose bytes hold those of two rows, the even one's below; `rows` of them count."""

    stored: ScaledArray
    rows: int = dataclasses.field(metadata={"static": True})

    def logical(self) -> ScaledArray:
        """The values that the codes stand for, under the tensor scale."""
        q, format = self.stored, self.stored.format
        down, across = blocks.expand(q.block, 2)
        (scale,) = multipliers(q.scale, None, format)
        scales = (scale[::2], scale[1::2]) if down == 1 else (scale, scale)

        def values(bits: jax.Array, scale: jax.Array) -> jax.Array:
            spread = blocks.spread(scale, q.shape, (max(down // 2, 1), across))
            return flush(decode_float(bits.astype(jnp.uint32), format) * spread).astype(jnp.bfloat16)

        nibbles = q.data & np.uint8(15), q.data >> 4
        pairs = jnp.stack([values(bits, scale) for bits, scale in zip(nibbles, scales, strict=True)], axis=1)
        data = pairs.reshape(2 * q.shape[0], q.shape[1])[: self.rows]
        return as_values(data, q.tensor_scale, q.dtype, q.rotation)


def as_values(data: jax.Array, scale: jax.Array, dtype, rotation: Hadamard | None = None) -> ScaledArray:
    return ScaledArray(data, scale.reshape(1, 1), format=VALUES, block=(0, 0), dtype=dtype, rotation=rotation)


def values_of(q: ScaledArray) -> jax.Array:
    """The bfloat16 values of codes under their block scales, without the tensor scale."""
    return block_values(q, jnp.bfloat16)


def logical(q):
    """A quantised matrix with its axes in their own order, one element each."""
    return q.logical() if isinstance(q, Transposed | RowPairs) else q


class Fused(NamedTuple):
    """A quantised matrix for each view, the largest magnitude, and float32 sums of the columns."""

    arrays: tuple[ScaledArray | Transposed | RowPairs, ...]
    amax: jax.Array | None
    sums: jax.Array | None


def supports(x: jax.Array, views: tuple[View, ...]) -> str | None:
    reason = views_reason(x.shape, x.dtype, views) or support.device_reason()
    return reason or support.partition_reason(support.devices_of(x))


def views_reason(shape: tuple[int, ...], dtype, views: tuple[View, ...]) -> str | None:
    """Why no kernel makes these casts, whatever the device."""
    if len(shape) != 2 or not all(shape):
        return f"it casts matrices, not an array of shape {shape}"
    if np.dtype(dtype).name not in INPUTS:
        return f"it reads {', '.join(INPUTS)}, not {dtype}"
    if len({view.format for view in views}) > 1:
        return "the two products take different formats"
    if shape[0] > MOST_ROWS:
        return f"it casts at most {MOST_ROWS} rows, not {shape[0]}"
    if all(map(_tiles, views)):
        if len({(_tiles(view), view.stochastic) for view in views}) > 1:
            return "the two products want different kinds of scales, or one of them rounds by chance"
        reasons = (_rotation_reason(shape, view) for view in views)
    else:
        reasons = (_block_reason(shape, view) for view in views)
    return next(filter(None, reasons), None) or _field_reason(views[0].format)


def _field_reason(format: Format) -> str | None:
    """The first field with a value that the kernels are not known to compute, whatever the field means."""
    row, computed = COMPUTED[format.scale]
    known = _fields(row)
    for field, value in _fields(format).items():
        if value != known[field] and value not in computed.get(field, ()):
            return f"`{field}` of {format.name} is {value!r}; the kernel computes casts where it is {known[field]!r}"
    return None


def _fields(format: Format) -> dict[str, Any]:
    """The fields of a format that say how it is cast, and those of its quirks."""
    own = {field.name: getattr(format, field.name) for field in dataclasses.fields(format)}
    quirks = {f"quirks.{field.name}": getattr(format.quirks, field.name) for field in dataclasses.fields(format.quirks)}
    return {name: own[name] for name in own if name not in ("name", "block", "quirks")} | quirks


def _tiles(view: View) -> str:
    """How 8-bit codes have their float32 scales, if in a way that `cast_tiles` knows; "" otherwise."""
    format = view.format
    if format.element not in TILE_ELEMENTS or format.scale != "float32":
        return ""
    line: blocks.Block = (1, LINE) if view.summed else (LINE, 1)
    ways: dict[blocks.Block, str] = {(0, 0): "tensor", line: "lines", (LINE, LINE): "squares"}
    return ways.get(view.tile, "")


def _rotation_reason(shape: tuple[int, ...], view: View) -> str | None:
    rotation, length = view.rotation, shape[view.summed]
    if rotation is None:
        return None
    if _tiles(view) != "lines":
        return f"a rotation is made along lines of {LINE} that have a scale each, not before a cast in {_tiles(view)}"
    if rotation.size > MOST_ROTATED:
        return f"a rotation of {rotation.size} is longer than {MOST_ROTATED}"
    whole = not length % rotation.size
    return None if whole else f"a sum of {length} is not whole groups of a rotation of {rotation.size}"


def _block_reason(shape: tuple[int, ...], view: View) -> str | None:
    format = view.format
    if not view.shape:
        scales = f"float32 scales (one, or one for {LINE} or {LINE}x{LINE} elements)"
        known = f"an 8-bit float or integer with {scales}, MXFP8 or NVFP4"
        return f"{format.name} in tiles of {view.tile} is not {known}"
    if view.rotation is None:
        return None
    size = block_of(format)
    if view.shape != "down" or view.rotation.size != size:
        return f"a rotation of {view.rotation.size} is made down columns in blocks of as many"
    return None if not shape[0] % size else f"{shape[0]} rows are not whole groups of a rotation of {size}"


def run(
    x: jax.Array,
    views: tuple[View, ...],
    keys,
    factor: jax.Array | None,
    amax: bool,
    sums: bool,
    amax_axes: tuple[str, ...] = (),
) -> Fused:
    """The casts of all views. `factor` is a given one, None for that of the matrix; keys: one of each view or None.

    amax_axes: mesh axes over which the matrix is a part of one that has one scale.
    """
    if _tiles(views[0]):
        return _tile_casts(x, views, keys, factor, amax, sums, amax_axes)
    return Fused(_block_casts(x, views, keys, amax_axes), None, None)


def _anywhere(amax: jax.Array, x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The largest of all devices along some mesh axes."""
    return lax.pmax(vary_as(amax, x), axes) if axes else amax


def _block_casts(x: jax.Array, views: tuple[View, ...], keys, amax_axes) -> tuple[ScaledArray | RowPairs, ...]:
    from scaledot.kernels.mosaic import cast_blocks

    (m, k), format = x.shape, views[0].format
    size = block_of(format)
    filled = filled_up(x, size, cast_blocks.COLUMNS)
    wanted = tuple(
        cast_blocks.View(format, view.shape, not view.kept, view.stochastic, view.rotation) for view in views
    )
    levels = _levels(filled, views, size, amax_axes)
    up = seeds = None
    if format.two_level:
        up = jnp.stack([jnp.stack([level.up, divide(ONE, level.up)]) for level in levels])
    if any(view.stochastic for view in views):
        seeds = jnp.stack([_seeds(view, key) for view, key in zip(views, keys, strict=True)])
    made = cast_blocks.cast(filled, wanted, up, seeds, k)

    def array(view: View, level: Level, one) -> ScaledArray | RowPairs:
        tensor_scale = level.down if format.two_level else None
        rotation = None if view.rotation is None else dataclasses.replace(view.rotation, axis=-2)
        if one.scale is None:
            return vary_all(as_values(one.data[:m, :k], level.down, x.dtype, rotation), x)
        rows = m if format.bits == 8 else m + m % 2  # of pairs, both are stored
        grid = blocks.grid((rows, k), view.tile)
        scale = lax.bitcast_convert_type(one.scale[: grid[0], : grid[1]], format.scale_dtype(x.dtype))
        what = {"format": format, "block": blocks.trim(view.tile), "dtype": x.dtype, "rotation": rotation}
        if format.bits == 8:
            return vary_all(ScaledArray(one.data[:m, :k], scale, tensor_scale, **what), x)
        return vary_all(RowPairs(ScaledArray(one.data[: rows // 2, :k], scale, tensor_scale, **what), m), x)

    return tuple(map(array, views, levels, made))


class Level(NamedTuple):
    """What brings the largest block maximum to the largest scale, and what block scales are multiplied by to return."""

    up: Any
    down: Any


def _levels(x: jax.Array, views: tuple[View, ...], size: int, amax_axes: tuple[str, ...]) -> list[Level]:
    from scaledot.kernels.mosaic import cast_blocks

    if not views[0].format.two_level:
        return [Level(ONE, ONE)] * len(views)
    rotations = tuple(dict.fromkeys(view.rotation for view in views))
    amaxes = [_anywhere(amax, x, amax_axes) for amax in cast_blocks.amaxes(x, rotations, size)]
    found = dict(zip(rotations, amaxes, strict=True))
    return [Level(*tensor_level(view.format, x.dtype, None, found[view.rotation])) for view in views]


def _seeds(view: View, key) -> jax.Array:
    return jnp.stack(seeds_of(key)) if view.stochastic else jnp.zeros(2, jnp.uint32)


def _tile_casts(
    x: jax.Array, views: tuple[View, ...], keys, factor: jax.Array | None, amax: bool, sums: bool, amax_axes
) -> Fused:
    from scaledot.kernels.mosaic import cast_tiles

    format, (m, k), way = views[0].format, x.shape, _tiles(views[0])
    filled = filled_up(x, LINE, LINE)
    seen = None
    if way == "tensor" and factor is None:
        seen = _anywhere(cast_tiles.amax(filled, finite=format.is_float), x, amax_axes)
    if seen is not None:
        scaling = cast_tiles.Seen(seen)
    else:
        scaling = cast_tiles.OfBlocks(way == "squares") if factor is None else cast_tiles.Given(factor.reshape(1))
    by_axis = {view.summed: (view, key) for view, key in zip(views, keys, strict=True)}
    wanted = cast_tiles.Wanted(rows=1 in by_axis, transposed=0 in by_axis, amax=amax and seen is None, sums=sums)
    pair = [by_axis.get(axis, (views[0], keys[0])) for axis in (1, 0)]
    seeds = jnp.stack([_seeds(*each) for each in pair]) if views[0].stochastic else None
    along, down = (by_axis[axis][0].rotation if axis in by_axis else None for axis in (1, 0))
    made = cast_tiles.cast(filled, format, scaling, wanted, seeds, k, (along, down))
    if seen is None:
        seen = made.amax

    def array(view: View) -> ScaledArray | Transposed:
        codes = (made.rows, (m, k)) if view.summed else (made.transposed, (k, m))
        return _stored(view, *codes, _stored_scale(made, factor, view, way), x)

    largest = vary_as(jnp.max(seen), x) if amax else None
    return Fused(tuple(map(array, views)), largest, vary_as(jnp.sum(made.sums, axis=0)[:k], x) if sums else None)


def rows_reason(shape: tuple[int, int], dtype, groups: int, view: View, devices: int = 1) -> str | None:
    """Why no kernel makes this cast of rows in groups, which XLA partitions over so many devices."""
    if not view.summed:
        shape = room(shape[0], groups, LINE), shape[1]
    reason = views_reason(shape, dtype, (view,))
    if reason is None and _tiles(view) not in ("tensor", "lines"):
        reason = f"rows in groups are cast to 8-bit codes with one float32 scale, or one for {LINE} elements"
    return reason or support.device_reason() or support.partition_reason(devices)


def run_rows(
    x: jax.Array, sizes: jax.Array, view: View, key, factor: jax.Array | None, amax: bool
) -> tuple[ScaledArray | Transposed, jax.Array | None]:
    """The cast of rows in groups for one product, with zeros in place of rows of no group; and the largest magnitude.

    One that sums over features has them as they lie. One that sums over rows has them transposed, every group beginning
    at a multiple of 128 with zeros between, as `spaced` has it. factor: a number, or one for each row as it lies there,
    whose codes are then under a scale of 1; None for those of lines.
    """
    from scaledot.kernels.mosaic import cast_tiles

    (m, k), format = x.shape, view.format
    rows = m if view.summed else room(m, sizes.size, LINE)
    table = (strips if view.summed else spaced_strips)(sizes, m, LINE)
    if factor is None:
        scaling = cast_tiles.OfBlocks(square=False)
    elif factor.ndim == 0:
        scaling = cast_tiles.Given(factor.reshape(1))
    else:
        scaling = cast_tiles.OfRows(jnp.pad(factor, (0, len(table) * LINE - rows), constant_values=1))
    wanted = cast_tiles.Wanted(rows=view.summed == 1, transposed=view.summed == 0, amax=amax)
    seeds = jnp.stack([_seeds(view, key)] * 2) if view.stochastic else None
    rotations = (view.rotation, None) if view.summed else (None, view.rotation)
    made = cast_tiles.cast(filled_up(x, 2, LINE), format, scaling, wanted, seeds, k, rotations, table)
    if factor is None:
        scale = made.row_scale if view.summed else made.column_scale
    else:
        scale = (divide(ONE, factor) if factor.ndim == 0 else jnp.ones((), jnp.float32)).reshape(1, 1)
    codes = (made.rows, (m, k)) if view.summed else (made.transposed, (k, rows))
    return _stored(view, *codes, scale, x), vary_as(jnp.max(made.amax), x) if amax else None


def _stored(
    view: View, data: jax.Array, shape: tuple[int, int], scale: jax.Array, x: jax.Array
) -> ScaledArray | Transposed:
    """Codes, transposed where the product sums over rows, and scales that lie as they do."""
    tile = view.tile if view.summed else view.tile[::-1]
    scale = scale[tuple(slice(size) for size in blocks.grid(shape, tile))]
    rotation = None if view.rotation is None else dataclasses.replace(view.rotation, axis=-1)
    what = {"format": view.format, "block": blocks.trim(tile), "dtype": x.dtype, "rotation": rotation}
    q = vary_all(ScaledArray(data[: shape[0], : shape[1]], scale, **what), x)
    return q if view.summed else Transposed(q)


def _stored_scale(made, factor: jax.Array | None, view: View, way: str) -> jax.Array:
    """The scales of a view, as its codes are stored."""
    if way == "tensor":
        return (made.row_scale if factor is None else divide(ONE, factor)).reshape(1, 1)
    if way == "squares":
        return made.row_scale if view.summed else made.row_scale.T
    return made.row_scale if view.summed else made.column_scale


def vary_all(tree, x: jax.Array):
    return jax.tree.map(lambda leaf: vary_as(leaf, x), tree)
