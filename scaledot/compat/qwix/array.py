"""QArray: Qwix's quantised array, with its functions on shapes.

A QArray holds the leaves of a ScaledArray under Qwix's field names; `as_scaled` and `as_qarray` convert without copying
data. For an int8 qvalue of shape (8, 64) with a scale of shape (8, 4), each 1×16 tile shares one entry of the scale.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from scaledot import format_variants
from scaledot.array import ScaledArray
from scaledot.formats import FORMATS, Format
from scaledot.numerics import blocks

ShapeT: TypeAlias = Sequence[int]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class QArray:
    """Codes with scales: original ≈ (qvalue - zero_point) * scale, scale and zero_point broadcast over their tiles.

    qvalue has the original shape; scale and zero_point have the same rank, and each of their dims divides qvalue's.
    `dtype` is the scale's. qtype is the logical type: a dtype, or a name such as "nf4" or "int3"; by default qvalue's
    dtype.

    >>> q = QArray(jnp.array([[1, 2], [3, 4]], jnp.int8), jnp.array([[0.5], [2.0]]))
    >>> q.shape, q.scale_tile_shape, q.T.scale.shape
    ((2, 2), (1, 2), (1, 2))
    """

    qvalue: Any
    scale: Any
    zero_point: Any = None
    qtype: Any = dataclasses.field(default=None, metadata={"static": True})

    def __post_init__(self):
        if self.qtype is None:
            object.__setattr__(self, "qtype", getattr(self.qvalue, "dtype", None))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.qvalue.shape)

    @property
    def ndim(self) -> int:
        return self.qvalue.ndim

    @property
    def dtype(self) -> np.dtype:
        return self.scale.dtype

    @property
    def T(self) -> "QArray":
        return self.transpose()

    @property
    def mT(self) -> "QArray":
        return self.swapaxes(-1, -2)

    @property
    def scale_tile_shape(self) -> tuple[int, ...]:
        return _tile_shape(self.shape, self.scale)

    @property
    def zero_point_tile_shape(self) -> tuple[int, ...] | None:
        return None if self.zero_point is None else _tile_shape(self.shape, self.zero_point)

    def reshape(self, *shape) -> "QArray":
        return reshape(self, *shape)

    def transpose(self, *axes) -> "QArray":
        return as_qarray(as_scaled(self).transpose(*axes), self.qtype)

    def swapaxes(self, axis1: int, axis2: int) -> "QArray":
        return as_qarray(as_scaled(self).swapaxes(axis1, axis2), self.qtype)

    def astype(self, dtype) -> "QArray":
        """Casts the scale, whose dtype is the dequantised dtype; codes stay."""
        return dataclasses.replace(self, scale=self.scale.astype(dtype))

    def __getitem__(self, index) -> "QArray":
        return rewriting_take(self, index)


MaybeQArray: TypeAlias = jax.Array | QArray


def _tile_shape(shape: tuple[int, ...], scale: jax.Array) -> tuple[int, ...]:
    return tuple(size // count for size, count in zip(shape, scale.shape, strict=True))


def format_of(qtype) -> Format:
    """Returns the Format of a qtype, with Qwix's arithmetic."""
    name = qtype if isinstance(qtype, str) else np.dtype(qtype).name
    format = getattr(format_variants.qwix, name, None)
    if format is None:
        if name in FORMATS and FORMATS[name].two_level:
            raise ValueError(
                f"`qtype` {name!r} needs a second scale, which a QArray cannot hold; use scaledot.quantize(x, {name!r})"
            )
        known = ", ".join(vars(format_variants.qwix))
        raise ValueError(f"`qtype` {qtype!r} is unknown; use one of {known}, as a name or a dtype")
    return format


def as_scaled(q: QArray) -> ScaledArray:
    """Returns a ScaledArray with the leaves of a QArray."""
    if q.scale.ndim != q.qvalue.ndim:
        raise ValueError(f"`scale` {q.scale.shape} must have the rank of `qvalue` {q.shape}")
    block = tuple(
        0 if count == 1 else size // max(count, 1) for size, count in zip(q.shape, q.scale.shape, strict=True)
    )
    return ScaledArray(
        q.qvalue,
        q.scale,
        None,
        _zero_point_per_scale(q),
        format=format_of(q.qtype),
        block=blocks.trim(block),
        dtype=np.dtype(q.scale.dtype),
    )


def _zero_point_per_scale(q: QArray) -> Any:
    """Returns the zero point, broadcast to the scale's shape if its tiles are larger."""
    if q.zero_point is None or q.zero_point.shape == q.scale.shape:
        return q.zero_point
    return call_with_generic_broadcast(lambda z, s: jnp.broadcast_to(z, s.shape), q.zero_point, q.scale)


def as_qarray(scaled: ScaledArray, qtype) -> QArray:
    return QArray(scaled.data, scaled.scale, scaled.zero, qtype)


def validate_qarray(array: QArray) -> None:
    """Raises ValueError unless qvalue, scale and zero_point have compatible shapes and dtypes."""
    if not isinstance(array.qvalue, jax.Array):
        return  # QArrays of shardings or PartitionSpecs have no shapes to check
    parts = [("scale", array.scale)] + ([] if array.zero_point is None else [("zero_point", array.zero_point)])
    for name, part in parts:
        if part.ndim != array.ndim:
            raise ValueError(f"`{name}` {part.shape} must have the rank of `qvalue` {array.shape}")
        if any(count == 0 or size % count for size, count in zip(array.shape, part.shape, strict=True)):
            raise ValueError(f"each dim of `{name}` {part.shape} must divide that of `qvalue` {array.shape}")
    if array.qvalue.dtype.itemsize > 1:
        raise ValueError(f"`qvalue` is {array.qvalue.dtype}; it must have at most 8 bits")
    if not jnp.issubdtype(array.scale.dtype, jnp.floating) or jnp.finfo(array.scale.dtype).bits < 16:
        raise ValueError(f"`scale` is {array.scale.dtype}; it must be a float of at least 16 bits")
    if array.zero_point is not None and array.zero_point.dtype != array.qvalue.dtype:
        raise ValueError(f"`zero_point` is {array.zero_point.dtype}, but `qvalue` is {array.qvalue.dtype}")


def reshape(array: QArray, *shape) -> QArray:
    """Reshapes codes and scales; raises ValueError if a tile would be split."""
    return as_qarray(as_scaled(array).reshape(*shape), array.qtype)


def rewriting_take(array: QArray, idx) -> QArray:
    """Returns array[idx]. Along a tiled axis the index must be an int, or a slice from one tile boundary to another."""
    return as_qarray(as_scaled(array)[tuple(idx) if isinstance(idx, list) else idx], array.qtype)


def transpose_array(array: jax.Array, transpose: Sequence[int | None]) -> jax.Array:
    """Transposes; a None in `transpose` inserts a dim of size 1, and dims of size 1 may be omitted.

    >>> transpose_array(jnp.ones((2, 1, 3)), [2, None, 0]).shape
    (3, 1, 2)
    """
    axes = [axis for axis in transpose if axis is not None]
    omitted = tuple(axis for axis in range(array.ndim) if axis not in axes)
    if any(array.shape[axis] != 1 for axis in omitted):
        raise ValueError(f"cannot transpose {array.shape} as {list(transpose)}: a dim larger than 1 is left out")
    transposed = jnp.squeeze(array.transpose([*axes, *omitted]), tuple(range(len(axes), array.ndim)))
    return jnp.expand_dims(transposed, tuple(i for i, axis in enumerate(transpose) if axis is None))


def tile_size(size: int, tile: int | float) -> int:
    """Returns the elements per tile of an axis; a float `tile` is 1 / (number of tiles)."""
    return round(size * tile) if isinstance(tile, float) else int(tile)


def split_axis(array: jax.Array, tiled_axes: Mapping[int, int | float]) -> jax.Array:
    """Reshapes each tiled axis to two: (number of tiles, tile size).

    >>> split_axis(jnp.ones((2, 6)), {1: 3}).shape
    (2, 2, 3)
    """
    tiles = {blocks.positive_axis(axis, array.ndim): tile for axis, tile in tiled_axes.items()}
    shape: list[int] = []
    for axis, size in enumerate(array.shape):
        tile = tile_size(size, tiles[axis]) if axis in tiles else size
        if tile <= 0 or size % tile:
            raise ValueError(
                f"shape {array.shape} cannot be tiled as {dict(tiled_axes)}: axis {axis} has {size} elements"
            )
        shape += [size // tile, tile] if axis in tiles else [size]
    return array.reshape(shape)


def broadcast_to(operand: MaybeQArray, target_shape: tuple[int, ...]) -> MaybeQArray:
    """Broadcasts an array, or the codes, scales and zero points of a QArray, to a shape of at least its rank.

    >>> broadcast_to(QArray(jnp.ones((1, 4), jnp.int8), jnp.array([[2.0, 3.0]])), (2, 4)).scale
    Array([[2., 2., 3., 3.],
           [2., 2., 3., 3.]], dtype=float32)
    """

    def broadcast(x: jax.Array) -> jax.Array:
        x = x.reshape((1,) * (len(target_shape) - x.ndim) + x.shape)
        return call_with_generic_broadcast(lambda a, b: jnp.broadcast_to(a, b.shape), x, jnp.zeros(target_shape, bool))

    return operand if operand.shape == tuple(target_shape) else jax.tree.map(broadcast, operand)


def get_tiled_axes(array: QArray) -> dict[int, int]:
    """Returns {axis: tile size} of the axes that have more than one scale but fewer scales than elements."""
    pairs = enumerate(zip(array.shape, array.scale.shape, strict=True))
    return {axis: size // count for axis, (size, count) in pairs if count not in (1, size)}


def call_with_generic_broadcast(
    op: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, y: jax.Array
) -> jax.Array:
    """Returns op(x, y), broadcasting tiles: if a dim of one array divides that of the other, its entries are repeated.

    >>> call_with_generic_broadcast(jnp.multiply, jnp.ones((1, 4)), jnp.array([[2.0, 3.0]]))
    Array([[2., 2., 3., 3.]], dtype=float32)
    """
    if x.ndim != y.ndim:
        raise ValueError(f"cannot broadcast {x.shape} with {y.shape}: ranks differ")
    x_shape, y_shape, out_shape = [], [], []
    for a, b in zip(x.shape, y.shape, strict=True):
        small, large = min(a, b), max(a, b)
        if large % max(small, 1):
            raise ValueError(f"cannot broadcast {x.shape} with {y.shape}: {small} does not divide {large}")
        tiled = small not in (0, 1, large)
        x_shape += [small, a // small] if tiled else [a]
        y_shape += [small, b // small] if tiled else [b]
        out_shape.append(large if small else 0)
    return op(x.reshape(x_shape), y.reshape(y_shape)).reshape(out_shape)
