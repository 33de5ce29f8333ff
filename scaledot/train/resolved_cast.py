"""Resolves the casts of a recipe for the dims of an array.

A recipe's Cast has two block sizes, for the free and the contracting dim; which dims these are depends on the tensor
and the matmul. `OperandDims` labels the dims of a tensor as free or contracting; a `ResolvedCast` has a block size for
every dim, and yields the CastSpec that `quantize` would use, with one difference: `quantize` saturates ±inf, and NaN
becomes 0 in most formats, whereas casts in training propagate both to the result of the matmul
(`ops.cast_spec.propagate_nonfinite`), because loss scaling and other overflow guards test results for them.

1×128 blocks of x (256, 512) with labels "mk": for fwd, `OperandDims("mk", "m", "k")`, the block is (1, 128) and scales
have shape (256, 4); for wgrad, which contracts m, `OperandDims("mk", "k", "m")` gives (128, 1) and (2, 512).
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from scaledot.array import ScaledArray
from scaledot.kernels.spec import CastArguments
from scaledot.numerics import blocks, calibrate
from scaledot.numerics.cast import CastSpec
from scaledot.numerics.rounding import flushed_float32
from scaledot.numerics.scale import scale_values
from scaledot.ops.cast_spec import (
    checked_amax_axes,
    checked_key,
    checked_multiplier,
    checked_scales,
    make_cast_spec,
    propagate_nonfinite,
    with_rounding,
)
from scaledot.ops.casts import run_casts
from scaledot.ops.operands import KernelChoice
from scaledot.ops.quantize import single_output
from scaledot.recipes import Cast


class OperandDims(NamedTuple):
    """The labels of a tensor's dims in one matmul: all, free, contracting.

    Blocks larger than 1 apply to the first free and the first contracting dim.
    """

    labels: str
    free: str
    contracting: str

    def block(self, cast: Cast) -> blocks.Block:
        """Returns the block size of a cast along each dim of the tensor; 0 is the whole dim."""
        if cast.is_per_tensor:
            return (0,) * len(self.labels)
        entries = dict.fromkeys(self.labels, 1)
        for group, size in zip((self.free, self.contracting), cast.block_2d, strict=True):
            entries.update(dict.fromkeys(group, min(size, 1)))
            entries.update(dict.fromkeys(group[:1], size))
        return tuple(entries[c] for c in self.labels)

    @property
    def axis(self) -> int:
        """The contracting dim that blocks and rotations run along."""
        return self.labels.index(self.contracting[0])


def cast_input_dtype(cast: Cast, dtype) -> np.dtype:
    """The dtype that a cast of an array of `dtype` starts from: differences to a mean are float32."""
    return np.dtype(np.float32 if cast.subtract_mean else dtype)


@dataclasses.dataclass(frozen=True)
class ResolvedCast:
    """A cast for the dims of one tensor: equal ResolvedCasts of a tensor give equal codes.

    block: the block size along each dim, 0 for the whole dim. rotated_axis: the dim of the Hadamard transform, or None.
    """

    cast: Cast
    block: blocks.Block
    rotated_axis: int | None

    @classmethod
    def on(cls, cast: Cast, dims: OperandDims) -> "ResolvedCast":
        return cls(cast, dims.block(cast), None if cast.rotation is None else dims.axis)

    @property
    def axes(self) -> tuple[int, ...]:
        """All dims with the rotated one last: the `axis` argument of `quantize`."""
        return tuple(sorted(range(len(self.block)), key=lambda a: (a == self.rotated_axis, a)))

    def spec(self, shape: tuple[int, ...], dtype, amax_axes: tuple[str, ...] = ()) -> CastSpec:
        """The CastSpec for an array of `shape`; its rotated dim is padded to a multiple of the rotation's size."""
        rotation, sizes = self.cast.rotation, list(shape)
        if rotation is not None and self.rotated_axis is not None:
            sizes[self.rotated_axis] += -sizes[self.rotated_axis] % rotation.size
        x, block = (
            jax.ShapeDtypeStruct(sizes, cast_input_dtype(self.cast, dtype)),
            tuple(self.block[a] for a in self.axes),
        )
        spec = make_cast_spec(
            x, self.cast.format, self.axes, block, self.cast.calibration, None, rotation, dtype, pad=True
        )
        spec = with_rounding(propagate_nonfinite(spec, x.ndim), self.cast.rounding)
        return dataclasses.replace(spec, amax_axes=checked_amax_axes(spec, amax_axes))

    def quantize(
        self,
        x: jax.Array,
        multiplier: jax.Array | None = None,
        key: jax.Array | None = None,
        uniform: jax.Array | None = None,
        *,
        tensor_scale: jax.Array | None = None,
        amax_axes: tuple[str, ...] = (),
        kernel: KernelChoice = None,
        signs: jax.Array | None = None,
    ) -> ScaledArray:
        """x quantised in a pass of its own, in logical layout.

        uniform: random numbers that replace the key, in the shape of x after it is padded for a rotation. tensor_scale:
        that of a two-level format, if known. signs: of a rotation that draws them.
        """
        spec, rounding = self.spec(x.shape, x.dtype, amax_axes), self.cast.rounding
        key = None if uniform is not None else checked_key(rounding, key)
        multiplier = checked_multiplier(spec, x, None, multiplier)
        _, tensor_scale = checked_scales(spec, x, None, tensor_scale)
        arguments = CastArguments((key,), (uniform,), multiplier, tensor_scale=tensor_scale, signs=(signs,))
        output = dataclasses.replace(single_output(spec, rounding), signs=None if signs is None else 0)
        return run_casts(x, (output,), arguments, kernel).arrays[0]

    def unclipped_mask(self, x: jax.Array, q: ScaledArray) -> jax.Array | None:
        """A mask that is true where x was not clipped or the scale is NaN; None if the cast never clips."""
        if not self.cast.clips:
            return None
        parsed, block = calibrate.parse(self.cast.calibration), self.block
        x = flushed_float32(x)
        if parsed.is_range:
            low, high = calibrate.extremes(x, parsed, block)
            return ~((x < blocks.repeat_scale(low, x.shape, block)) | (x > blocks.repeat_scale(high, x.shape, block)))
        # max × scale differs from the calibrated amax by an ulp or two: 2^-21 keeps the amax itself unclipped.
        largest_code = jnp.float32(self.cast.format.largest_code * (1 + 2.0**-21))
        limit = math.prod(scale_values(q.scale, q.tensor_scale, q.format), start=largest_code)
        return ~(jnp.abs(x) > blocks.repeat_scale(limit, x.shape, block))
