"""Casts of a recipe laid on arrays.

A Cast speaks of a kept and a summed axis; an array has labels. `Sides` says which labels of a tensor a product keeps
and which it sums over, and from there on a cast is a Plan, as in `quantize`. `quantize` saturates infinities and drops
NaN; casts of training propagate both into every matmul (`ops.plan.propagating`), so that overflow guards see them.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from scaledot.array import ScaledArray
from scaledot.kernels.spec import sum_dtype
from scaledot.numerics import blocks, calibrate
from scaledot.numerics.bits import flush
from scaledot.numerics.scale import multipliers
from scaledot.ops.plan import checked_amax_axes, make_plan, propagating
from scaledot.ops.quantize import amax, quantize_planned
from scaledot.recipes import Cast


class Sides(NamedTuple):
    """The labels of one tensor in one product; others are batch axes. Blocks run along the first of each."""

    labels: str
    kept: str
    summed: str

    def tile(self, cast: Cast) -> blocks.Block:
        """Elements along each axis that share a scale."""
        if cast.is_per_tensor:
            return (0,) * len(self.labels)
        entries = dict.fromkeys(self.labels, 1)
        for group, size in zip((self.kept, self.summed), cast.tile, strict=True):
            entries.update(dict.fromkeys(group, min(size, 1)))
            entries.update(dict.fromkeys(group[:1], size))
        return tuple(entries[c] for c in self.labels)

    @property
    def axis(self) -> int:
        """The axis that blocks and rotations run along."""
        return self.labels.index(self.summed[0])


@dataclasses.dataclass(frozen=True)
class Laid:
    """A cast laid on an array: equal ones give equal codes, so one serves both."""

    cast: Cast
    tile: blocks.Block
    rotated_axis: int | None

    @classmethod
    def on(cls, cast: Cast, sides: Sides) -> "Laid":
        return cls(cast, sides.tile(cast), None if cast.rotation is None else sides.axis)

    @property
    def axes(self) -> tuple[int, ...]:
        """All axes, the rotated one last, as `quantize` takes them."""
        every = range(len(self.tile))
        return tuple(sorted(every, key=lambda a: (a == self.rotated_axis, a)))

    def quantize(
        self,
        x: jax.Array,
        factor: jax.Array | None = None,
        key: jax.Array | None = None,
        tensor_scale=None,
        uniform: jax.Array | None = None,
        amax_axes: tuple[str, ...] = (),
    ) -> ScaledArray:
        cast, x = self.cast, padded(x, self.rotated_axis, self.cast)
        block = tuple(self.tile[a] for a in self.axes)
        plan = make_plan(x, cast.format, self.axes, block, cast.calibration, None, cast.rotation, None, pad=True)
        plan = dataclasses.replace(propagating(plan, x.ndim), amax_axes=checked_amax_axes(plan, amax_axes))
        key = key if cast.rounding == "stochastic" else None
        return quantize_planned(plan, x, cast.rounding, key, uniform, tensor_scale=tensor_scale, factor=factor)

    def inside(self, x: jax.Array, q: ScaledArray) -> jax.Array | None:
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
        limit = math.prod(multipliers(q.scale, q.tensor_scale, q.format), start=reach)
        return ~(jnp.abs(x) > blocks.spread(limit, x.shape, block))


class Arrays:
    """What kinds of products share that cast whole arrays; labels are those of the result and of a bias."""

    out: str
    features: str

    def quantize(self, laid: Laid, x: jax.Array, groups, factor, key) -> ScaledArray:
        return laid.quantize(x, factor, key)

    def fused(
        self, tensor: str, laid: dict[str, Laid], keys, later, x, groups, factor, amax: bool, sums: bool, amax_axes=()
    ) -> Any:
        return None

    def plain(self, product: str, tensor: str, x: jax.Array, groups) -> jax.Array:
        return x

    def logical(self, q) -> Any:
        """Codes in the order of their axes, which those that a kernel made may not have."""
        return q

    def inside(self, laid: Laid, x: jax.Array, q: ScaledArray) -> jax.Array | None:
        return laid.inside(x, q)

    def amax(self, tensor: str, x: jax.Array, groups) -> jax.Array:
        return amax(x)

    def bias_gradient(self, g: jax.Array, groups) -> jax.Array:
        elsewhere = tuple(a for a, c in enumerate(self.out) if c not in self.features)
        kept = [c for c in self.out if c in self.features]
        return jnp.sum(g.astype(sum_dtype(g.dtype)), axis=elsewhere).transpose([kept.index(c) for c in self.features])


def padded(x: jax.Array, axis: int | None, cast: Cast) -> jax.Array:
    """Zeros at the end of an axis, up to whole groups of its rotation; zeros add nothing to what is summed."""
    if cast.rotation is None or axis is None or not x.shape[axis] % cast.rotation.size:
        return x
    short = -x.shape[axis] % cast.rotation.size
    return jnp.pad(x, [(0, short if a == axis else 0) for a in range(x.ndim)])
