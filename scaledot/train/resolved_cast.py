"""The casts of a recipe, resolved for the dims of an array.

A recipe's Cast has block sizes for free and contracting dims; an array has labels. `OperandDims` says which labels of a
tensor are free in a matmul and which are contracting; a `ResolvedCast` has a block size for every dim, and its CastSpec
is the one of `quantize`. `quantize` saturates infinities and drops NaN; casts of training propagate both into every
matmul (`ops.cast_spec.propagating`), so that overflow guards see them.

1x128 blocks of x (256, 512) with labels "mk": for fwd, `OperandDims("mk", "m", "k")`, the block is (1, 128) and scales
have shape (256, 4); for wgrad, which contracts m, `OperandDims("mk", "k", "m")` gives (128, 1) and (2, 512).
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from scaledot.array import ScaledArray
from scaledot.numerics import blocks, calibrate
from scaledot.numerics.bits import flush
from scaledot.numerics.cast import CastSpec
from scaledot.numerics.scale import scale_values
from scaledot.ops.cast_spec import checked_amax_axes, make_cast_spec, propagating
from scaledot.ops.casts import make_casts
from scaledot.ops.operands import Choice
from scaledot.ops.quantize import arguments, view_of
from scaledot.recipes import Cast


class OperandDims(NamedTuple):
    """The labels of one tensor in one matmul: all, free and contracted ones. Blocks run along the first of either."""

    labels: str
    free: str
    contracting: str

    def tile(self, cast: Cast) -> blocks.Block:
        """Elements along each axis that share a scale."""
        if cast.is_per_tensor:
            return (0,) * len(self.labels)
        entries = dict.fromkeys(self.labels, 1)
        for group, size in zip((self.free, self.contracting), cast.tile, strict=True):
            entries.update(dict.fromkeys(group, min(size, 1)))
            entries.update(dict.fromkeys(group[:1], size))
        return tuple(entries[c] for c in self.labels)

    @property
    def axis(self) -> int:
        """The axis that blocks and rotations run along."""
        return self.labels.index(self.contracting[0])


@dataclasses.dataclass(frozen=True)
class ResolvedCast:
    """A cast laid on an array: equal ones give equal codes, so one serves both."""

    cast: Cast
    tile: blocks.Block
    rotated_axis: int | None

    @classmethod
    def on(cls, cast: Cast, sides: OperandDims) -> "ResolvedCast":
        return cls(cast, sides.tile(cast), None if cast.rotation is None else sides.axis)

    @property
    def axes(self) -> tuple[int, ...]:
        """All axes, the rotated one last, as `quantize` takes them."""
        every = range(len(self.tile))
        return tuple(sorted(every, key=lambda a: (a == self.rotated_axis, a)))

    def spec(self, shape: tuple[int, ...], dtype, amax_axes: tuple[str, ...] = ()) -> CastSpec:
        """The cast of an array of that shape, whose rotated axis is padded to whole groups of the rotation."""
        rotation, sizes = self.cast.rotation, list(shape)
        if rotation is not None and self.rotated_axis is not None:
            sizes[self.rotated_axis] += -sizes[self.rotated_axis] % rotation.size
        x, block = jax.ShapeDtypeStruct(sizes, dtype), tuple(self.tile[a] for a in self.axes)
        spec = make_cast_spec(
            x, self.cast.format, self.axes, block, self.cast.calibration, None, rotation, None, pad=True
        )
        return dataclasses.replace(propagating(spec, x.ndim), amax_axes=checked_amax_axes(spec, amax_axes))

    def quantize(
        self,
        x: jax.Array,
        multiplier: jax.Array | None = None,
        key: jax.Array | None = None,
        tensor_scale=None,
        uniform: jax.Array | None = None,
        amax_axes: tuple[str, ...] = (),
        kernel: Choice = None,
    ) -> ScaledArray:
        """x cast by itself, in its own layout."""
        spec, rounding = self.spec(x.shape, x.dtype, amax_axes), self.cast.rounding
        key = key if rounding == "stochastic" else None
        given = arguments(spec, x, rounding, key, uniform, tensor_scale=tensor_scale, multiplier=multiplier)
        return make_casts(x, (view_of(spec, rounding),), given, kernel).arrays[0]

    def unclipped_mask(self, x: jax.Array, q: ScaledArray) -> jax.Array | None:
        """Where the cast did not clip x; None if it never clips. A block with a NaN scale counts as not clipped."""
        if not self.cast.clips:
            return None
        parsed, block = calibrate.parse(self.cast.calibration), self.tile
        x = flush(x.astype(jnp.float32))
        if parsed.is_range:
            low, high = calibrate.extremes(x, parsed, block)
            return ~((x < blocks.spread(low, x.shape, block)) | (x > blocks.spread(high, x.shape, block)))
        # What the codes reach; the calibrated magnitude is an ulp or two from it.
        reach = jnp.float32(self.cast.format.max * (1 + 2.0**-21))
        limit = math.prod(scale_values(q.scale, q.tensor_scale, q.format), start=reach)
        return ~(jnp.abs(x) > blocks.spread(limit, x.shape, block))
