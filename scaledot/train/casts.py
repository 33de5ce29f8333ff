"""Casts of a recipe laid on arrays.

A Cast speaks of a kept and a summed axis; an array has labels. `Sides` says which labels of a tensor a product keeps
and which it sums over, and from there on a cast is a Plan, as in `quantize`. `quantize` saturates infinities and drops
NaN; casts of training propagate both into every matmul (`ops.plan.propagating`), so that overflow guards see them.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from scaledot.array import ScaledArray
from scaledot.kernels.spec import CastArguments, View, sum_dtype
from scaledot.numerics import blocks, calibrate
from scaledot.numerics.bits import flush
from scaledot.numerics.cast import Plan
from scaledot.numerics.scale import multipliers
from scaledot.ops.casts import make_casts
from scaledot.ops.operands import Choice
from scaledot.ops.plan import checked_amax_axes, given_factor, make_plan, propagating
from scaledot.ops.quantize import amax, arguments, view_of
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

    def plan(self, shape: tuple[int, ...], dtype, amax_axes: tuple[str, ...] = ()) -> Plan:
        """The cast of an array of that shape, whose rotated axis is padded to whole groups of the rotation."""
        rotation, sizes = self.cast.rotation, list(shape)
        if rotation is not None and self.rotated_axis is not None:
            sizes[self.rotated_axis] += -sizes[self.rotated_axis] % rotation.size
        x, block = jax.ShapeDtypeStruct(sizes, dtype), tuple(self.tile[a] for a in self.axes)
        plan = make_plan(x, self.cast.format, self.axes, block, self.cast.calibration, None, rotation, None, pad=True)
        return dataclasses.replace(propagating(plan, x.ndim), amax_axes=checked_amax_axes(plan, amax_axes))

    def quantize(
        self,
        x: jax.Array,
        factor: jax.Array | None = None,
        key: jax.Array | None = None,
        tensor_scale=None,
        uniform: jax.Array | None = None,
        amax_axes: tuple[str, ...] = (),
        kernel: Choice = None,
    ) -> ScaledArray:
        """x cast by itself, in its own layout."""
        plan, rounding = self.plan(x.shape, x.dtype, amax_axes), self.cast.rounding
        key = key if rounding == "stochastic" else None
        given = arguments(plan, x, rounding, key, uniform, tensor_scale=tensor_scale, factor=factor)
        return make_casts(x, (view_of(plan, rounding),), given, kernel).arrays[0]

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


@dataclasses.dataclass(frozen=True)
class CastRequest:
    """The casts of one tensor that some products of a step take.

    laid: by product. keys: of those that round stochastically. residual: the product whose operand is saved for the
    backward pass. factor: that of delayed scaling. amax, sums: whether the largest magnitude, and sums over everything
    that shares a bias, are wanted, too. Of shards: uniforms, numbers in the place of keys, and amax_axes, the mesh axes
    over which scales are shared.
    """

    tensor: str
    laid: dict[str, Any]
    keys: dict[Any, jax.Array | None]
    residual: str | None = None
    factor: jax.Array | None = None
    amax: bool = False
    sums: bool = False
    kernel: Choice = None
    uniforms: dict[Any, jax.Array | None] = dataclasses.field(default_factory=dict)
    amax_axes: dict[Any, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    @property
    def distinct(self) -> list[Any]:
        """Casts that give different codes."""
        return list(dict.fromkeys(self.laid.values()))

    def arguments(self, factor: jax.Array | None = None, group_sizes=None) -> CastArguments:
        """With the key of each distinct cast."""
        uniforms = tuple(self.uniforms.get(laid) for laid in self.distinct)
        keys = tuple(self.keys[laid] for laid in self.distinct)
        return CastArguments(keys, uniforms, factor, group_sizes=group_sizes)

    def of_shards(self, uniform: Callable[[Any, jax.Array], jax.Array]) -> "CastRequest":
        """The casts inside those of shards (`partitioned.Part`), which share scales and draw what one device would.

        uniform: the numbers of a shard, from its cast and a key.
        """
        drawn = {part: None if (key := self.keys[part]) is None else uniform(part, key) for part in self.distinct}
        return dataclasses.replace(
            self,
            laid={product: part.laid for product, part in self.laid.items()},
            keys={part.laid: self.keys[part] for part in self.distinct},
            uniforms={part.laid: numbers for part, numbers in drawn.items()},
            amax_axes={part.laid: part.shared for part in self.distinct},
        )

    def key_index(self, laid) -> int | None:
        return self.distinct.index(laid) if laid.cast.rounding == "stochastic" else None


class Made(NamedTuple):
    """A tensor as each product takes it, and what its casts saw on the way; None where they did not look."""

    operands: dict[str, Any]
    amax: jax.Array | None = None
    sums: jax.Array | None = None


class Arrays:
    """What kinds of products share that cast whole arrays; labels are those of the result and of a bias.

    devices: that XLA partitions the operands over.
    """

    out: str
    features: str
    devices: int = 1

    def cast(self, request: CastRequest, x: jax.Array, groups) -> Made:
        """All casts of a request, in one pass where a kernel makes them."""
        plans = {laid: laid.plan(x.shape, x.dtype, request.amax_axes.get(laid, ())) for laid in request.distinct}
        views = tuple(
            View(
                plans[laid],
                request.key_index(laid),
                self.contracted_axis(product, request.tensor, x),
                product == request.residual,
            )
            for product, laid in request.laid.items()
        )
        factor = given_factor(views[0].plan, x, None, request.factor)
        wanted = {"amax": request.amax, "column_sums": request.sums and self.out.endswith(self.features)}
        made = make_casts(x, views, request.arguments(factor), request.kernel, self.devices, **wanted)
        return Made(dict(zip(request.laid, made.arrays, strict=True)), made.amax, made.column_sums)

    def contracted_axis(self, product: str, tensor: str, x: jax.Array) -> int | None:
        """The axis of an operand that a product contracts, if kernels may choose its layout; None elsewhere."""
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
