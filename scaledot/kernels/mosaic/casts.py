"""A matrix cast for both of its products in one pass: which casts the kernels make, and what becomes of their results.

A product takes its operands with the summed axis last. A matrix that one product sums over columns and the other over
rows is therefore wanted as it lies and transposed.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from scaledot.array import ScaledArray
from scaledot.formats import Format
from scaledot.kernels.manual import vary_as
from scaledot.kernels.mosaic import support
from scaledot.numerics import blocks
from scaledot.numerics.bits import flush
from scaledot.numerics.calibrate import block_amax
from scaledot.numerics.scale import Levels, levels_from_factor, levels_of

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
INPUTS = ("bfloat16", "float16", "float32")
WHOLE = 128  # rows and columns are filled up to multiples of it


@dataclasses.dataclass(frozen=True)
class View:
    """How one product takes a matrix: cast to a format in tiles of (rows, columns), and summed over an axis."""

    format: Format
    tile: tuple[int, int]
    summed: int

    @property
    def is_per_tensor(self) -> bool:
        return self.tile == (0, 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Transposed:
    """A quantised matrix that is stored with its axes exchanged."""

    stored: ScaledArray


def logical(q):
    """A quantised matrix with its axes in their own order."""
    return q.stored.T if isinstance(q, Transposed) else q


class Fused(NamedTuple):
    """One ScaledArray or Transposed for each view, the largest magnitude, and float32 sums of the columns."""

    arrays: tuple[ScaledArray | Transposed, ...]
    amax: jax.Array | None
    sums: jax.Array | None


def supports(shape: tuple[int, ...], dtype, views: tuple[View, ...]) -> str | None:
    return views_reason(shape, dtype, views) or support.device_reason()


def views_reason(shape: tuple[int, ...], dtype, views: tuple[View, ...]) -> str | None:
    """Why no kernel makes these casts, whatever the device."""
    if len(shape) != 2 or not all(shape):
        return f"it casts matrices, not an array of shape {shape}"
    if np.dtype(dtype).name not in INPUTS:
        return f"it reads {', '.join(INPUTS)}, not {dtype}"
    for view in views:
        if view.format.element not in FLOAT8 or view.format.scale != "float32" or not view.is_per_tensor:
            return f"{view.format.name} in tiles of {view.tile} is not an 8-bit float under one scale"
    if len({view.format for view in views}) > 1:
        return "the two products take different formats"
    return None


def run(x: jax.Array, views: tuple[View, ...], factor: jax.Array | None, amax: bool, sums: bool) -> Fused:
    """The casts of all views; `factor` is a given one, None for that of the matrix itself."""
    return _tensor_cast(x, views, factor, amax, sums)


def _tensor_cast(x: jax.Array, views: tuple[View, ...], factor: jax.Array | None, amax: bool, sums: bool) -> Fused:
    from scaledot.kernels.mosaic.cast_tensor import Config, Wanted, cast

    format = views[0].format
    levels, largest = _tensor_levels(x, format, factor)
    summed = {view.summed for view in views}
    made = cast(
        _filled(x),
        levels.factors[0].reshape(1),
        format.element_dtype,
        wanted=Wanted(rows=1 in summed, transposed=0 in summed, amax=amax and largest is None, sums=sums),
        config=Config(columns=64, stages=2, resident=4) if x.dtype.itemsize == 4 else Config(),
        multiprocessors=support.multiprocessors(),
    )
    m, k = x.shape
    codes = {1: made.rows, 0: made.transposed}

    def array(view: View) -> ScaledArray | Transposed:
        data = vary_as(codes[view.summed], x)
        data = data[:m, :k] if view.summed else data[:k, :m]
        q = ScaledArray(data, levels.scale, format=format, block=(0, 0), dtype=x.dtype)
        return q if view.summed else Transposed(q)

    column_sums = None if made.sums is None else vary_as(made.sums, x)[:k]
    return Fused(tuple(map(array, views)), made.amax if largest is None else largest, column_sums)


def _tensor_levels(x: jax.Array, format: Format, factor: jax.Array | None) -> tuple[Levels, jax.Array | None]:
    """Scale and factor of the whole matrix, and its largest magnitude if that was looked for."""
    if factor is not None:
        return levels_from_factor(factor.reshape(1, 1)), None
    largest = block_amax(flush(x.astype(jnp.float32)), (0, 0))
    return levels_of(largest, format, x.dtype), largest.reshape(())


def _filled(x: jax.Array) -> jax.Array:
    missing = [(0, -size % WHOLE) for size in x.shape]
    return jnp.pad(x, missing) if any(more for _, more in missing) else x
