"""An independent implementation of the casts in numpy, which tests compare the library with.

It was written from the specifications of the formats and shares no code with the library. Every operation that
determines a code or a scale is one correctly rounded float32 operation; only dequantised values are float64. The errors
that a search compares are integers. A comment starting with "Choice:" documents what the specification leaves open.
"""

from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np

f32 = np.float32
SMALLEST_NORMAL = f32(2.0**-126)
LARGEST_MULTIPLIER = f32(2.0**126)
LARGEST_FLOAT32 = np.finfo(np.float32).max


class Element(NamedTuple):
    """A float element type: its largest value, the exponent of its smallest normal and its mantissa width."""

    largest: float
    smallest_exponent: int
    mantissa_bits: int
    has_nan: bool


E4M3 = Element(448.0, -6, 3, True)
E5M2 = Element(57344.0, -14, 2, True)
E2M3 = Element(7.5, 0, 3, False)
E2M1 = Element(6.0, 0, 1, False)

# format: (element, or the largest code of an integer format; kind of scale; block along the contracting dim, 0 = all)
FORMATS = {
    "fp8_e4m3": (E4M3, "float32", 0),
    "fp8_e5m2": (E5M2, "float32", 0),
    "mxfp8": (E4M3, "ceil", 32),
    "mxfp8_e5m2": (E5M2, "ceil", 32),
    "mxfp6_e2m3": (E2M3, "ceil", 32),
    "mxfp4": (E2M1, "even", 32),
    "nvfp4": (E2M1, "nvfp4", 16),
    "nvint4": (7, "nvfp4", 16),
    "if4": (E2M1, "nvfp4", 16),
    "int8": (127, "integer", 0),
    "int4": (7, "integer", 0),
}


class Quantized(NamedTuple):
    """Decoded codes, the scale of every element and the tensor scale, all float64."""

    codes: np.ndarray
    scale: np.ndarray
    tensor_scale: np.float64

    @property
    def values(self):
        """The dequantised values, still rotated if there was a rotation; the sign of a scale only names a grid."""
        return self.codes * np.abs(self.scale) * self.tensor_scale


# Elements and rounding.


def flush(x):
    """Replace float32 subnormals by zeros of the same sign."""
    return np.where(np.abs(x) < SMALLEST_NORMAL, np.copysign(f32(0), x), x)


def round_float(x, element, uniform=None):
    """Clip float32 values and round them to a float element: nearest even, or stochastically on magnitudes."""
    magnitude = np.minimum(np.abs(x), f32(element.largest))  # a NaN stays NaN
    exponent = np.frexp(np.where(np.isnan(magnitude), f32(0), magnitude))[1] - 1
    exponent = np.maximum(exponent, element.smallest_exponent)
    step = np.ldexp(f32(1), exponent - element.mantissa_bits)
    count = magnitude / step  # exact: step is a power of two
    if uniform is None:
        count = np.rint(count)
    else:
        lower = np.floor(count)
        count = lower + (count - lower > uniform).astype(f32)
    return np.copysign(count * step, x)


def round_integer(x, bound, uniform=None):
    """Clip float32 values and round them to integers: nearest even, or stochastically upwards from the floor."""
    x = np.clip(x, f32(-bound), f32(bound))
    if uniform is None:
        return np.rint(x) + f32(0)
    lower = np.floor(x)
    return lower + (x - lower > uniform).astype(f32)


def bfloat16(x):
    """Round float32 values to bfloat16 and return them as float32."""
    return x.astype(ml_dtypes.bfloat16).astype(f32)


# Blocks.


def in_blocks(x, block):
    """Pad with zeros to whole blocks and reshape to (block rows, rows, block columns, columns)."""
    rows, columns = block
    x = np.pad(x, ((0, -x.shape[0] % rows), (0, -x.shape[1] % columns)))
    return x.reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns)


def per_element(per_block, block, shape):
    """Repeat one number per block over the elements of an array of the given shape."""
    padded = per_block.repeat(block[0], axis=0).repeat(block[1], axis=1)
    return padded[: shape[0], : shape[1]]


def block_amax(x, block):
    """The largest finite magnitude of every block."""
    magnitude = np.where(np.isfinite(x), np.abs(x), f32(0))
    return in_blocks(magnitude, block).max(axis=(1, 3))


# Scales.


def float32_multiplier(amax, largest):
    """The quantisation multiplier of a per-tensor, per-channel or blockwise fp8 cast."""
    multiplier = np.minimum(f32(largest) / amax, LARGEST_MULTIPLIER)
    return np.where(amax == 0, f32(1), multiplier)


def e8m0_ceil(amax, element):
    """The E8M0 code by the rule `ceil`, with subnormal products as in IEEE arithmetic."""
    bits = (amax * f32(1 / element.largest)).view(np.uint32).astype(np.int64)
    field, mantissa = bits >> 23, bits & 0x7FFFFF
    bump = np.where(field == 0, mantissa > 0x400000, (mantissa != 0) & (field != 254))
    return field + bump


def e8m0_even(amax, element):
    """The E8M0 code by the rule `even`."""
    bits = amax.view(np.uint32).astype(np.int64)
    half = 1 << (22 - element.mantissa_bits)
    largest_exponent = int(np.frexp(element.largest)[1]) - 1
    return np.clip(((bits + half) >> 23) - largest_exponent, 0, 254)


def nvfp4_cast(x, block, target, tensor_multiplier, uniform):
    """Codes and e4m3 block scales that map the amax of every block to `target`, for S = `tensor_multiplier`."""
    # Choice: another target than 6 replaces the constant float32(1/6) by float32(1/target); S and t do not change.
    d = block_amax(x, block) * (tensor_multiplier * f32(1 / target))
    d8 = per_element(round_float(d, E4M3), block, x.shape)
    # Choice: a subnormal product d8 * (1/S), possible only for A < 2688 * 2^-117, is kept as IEEE gives it.
    multiplier = np.minimum(f32(1) / (d8 * (f32(1) / tensor_multiplier)), LARGEST_FLOAT32)
    codes = round_float(x * multiplier, E2M1, uniform)
    # Choice: the zero codes of a block with d8 = 0 keep the sign of the element.
    return np.where(d8 == 0, np.copysign(f32(0), x), codes), d8


def quantize_nvfp4(x, block, uniform, search, guard, target, scale_max, group, amax=None):
    """Quantise to E2M1 with e4m3 block scales and a float32 tensor scale.

    The amax of a block is mapped to `target`, that of the tensor to target * scale_max. MS-EDEN corrects the scales of
    every `group` of elements, a shape, and takes one uniform number for every block: that of its first element.
    amax: of the tensor, if it is not that of x.
    """
    if search is not None:
        assert target == 6
        assert not guard
        grid = GRIDS["e2m1" if search == "scales" else search]
        return quantize_searched(x, block, (grid,), scale_max, search == "scales", uniform, group, amax)
    amax, largest = block_amax(x, x.shape)[0, 0] if amax is None else amax, f32(target) * f32(scale_max)
    tensor_multiplier = np.minimum(largest / amax, LARGEST_MULTIPLIER) if amax > 0 else f32(1)
    t = np.maximum(amax / largest, SMALLEST_NORMAL) if amax > 0 else f32(1)
    shrink = 16 / 17 if guard else 1
    first = quantized(*nvfp4_cast(x, block, target * shrink, tensor_multiplier, None if group else uniform), t)
    if group:
        return corrected(x, first, tensor_multiplier, block, group, uniform)
    return first


def corrected(x, q, tensor_multiplier, block, group, uniform):
    """The quantised array with its scales multiplied by <s, s> / <s, codes> of their group, rounded stochastically."""
    d8, codes = q.scale.astype(f32), q.codes.astype(f32)
    multiplier = np.minimum(f32(1) / (np.abs(d8) * (f32(1) / tensor_multiplier)), LARGEST_FLOAT32)
    scaled = np.where(d8 == 0, f32(0), x * multiplier)
    # Choice: elements in steps of 2^-9, so that the sums do not depend on their order.
    steps = np.rint(scaled * f32(512)).astype(np.int64)
    squares = in_blocks(steps * steps, group).sum(axis=(1, 3))
    projections = in_blocks(steps * (2 * codes).astype(np.int64), group).sum(axis=(1, 3))
    correction = squares.astype(f32) / (projections.astype(f32) * f32(256))
    correction = per_element(np.where(projections == 0, f32(1), correction), group, x.shape)
    of_first = in_blocks(uniform, block)[:, 0, :, 0]
    scale = round_float(d8 * correction, E4M3, per_element(of_first, block, x.shape))
    return quantized(codes, scale, q.tensor_scale)


# Scale search.


class Grid(NamedTuple):
    """The codes of a 4-bit element: the largest one, rounding to them, and the E4M3 scales tried for them.

    Offsets are in E4M3 codes from the scale of the amax, in the order in which candidates are compared; without a
    search, the scales are those of the amax times `ratios`.
    """

    largest: int
    round: Callable
    offsets: tuple[int, ...]
    ratios: tuple[float, ...] = (1.0,)


GRIDS = {
    "e2m1": Grid(6, lambda x, uniform=None: round_float(x, E2M1, uniform), (0, -1, -2, 1, 3, 4, 5, 6)),
    "uniform": Grid(7, lambda x, uniform=None: round_integer(x, 7, uniform), (0, -1, -2, -3, 1, 2)),
}
GRIDS["four_over_six"] = GRIDS["e2m1"]._replace(ratios=(1.0, 1.5))
GRIDS_OF = {
    "nvfp4": (GRIDS["e2m1"],),
    "nvint4": (GRIDS["uniform"],),
    "if4": (GRIDS["e2m1"], GRIDS["uniform"]),
}
E4M3_VALUES = np.array([c * 2.0**-9 if c < 8 else (8 + c % 8) * 2.0 ** (c // 8 - 10) for c in range(127)], f32)


@np.errstate(all="ignore")
def quantize_searched(x, block, grids, scale_max=448, search=True, uniform=None, group=None, amax=None) -> Quantized:
    """Codes, and E4M3 block scales that are negative for the second grid; the first least error is kept.

    uniform: of stochastic rounding, if scales are not searched; or with a `group`, of MS-EDEN (see `quantize_nvfp4`).
    amax: of the tensor, if it is not that of x.
    """
    assert uniform is None or group or not search
    x = flush(np.asarray(x, f32))
    x = np.where(np.isnan(x), f32(0), x)
    amax, block_amaxes = block_amax(x, x.shape)[0, 0] if amax is None else amax, block_amax(x, block)
    top = f32(min(grid.largest for grid in grids) * scale_max)
    tensor_multiplier = np.minimum(top / amax, LARGEST_MULTIPLIER) if amax > 0 else f32(1)
    t = np.maximum(amax / top, SMALLEST_NORMAL) if amax > 0 else f32(1)
    # Errors in fixed point, so that the sums of the squares of at most 4 units fit the 24 bits of a float32.
    unit = f32(2 ** ((20 - int(np.ceil(np.log2(block[0] * block[1])))) // 2))
    least = codes = scale = None
    for sign, grid in zip((1, -1), grids, strict=False):
        for ratio, offset in [(1.0, offset) for offset in grid.offsets] if search else [(r, 0) for r in grid.ratios]:
            relative = block_amaxes * f32(ratio) * (tensor_multiplier * f32(1 / grid.largest))
            code = np.searchsorted(E4M3_VALUES, round_float(relative, E4M3))
            # Choice: a scale that rounds to 0 is replaced by the smallest one, but not by "four_over_six".
            floor = 1 if search or len(grids) > 1 else 0
            tried = np.where(block_amaxes == 0, 0, np.clip(np.maximum(code, floor) + offset, floor, 126))
            value = E4M3_VALUES[tried]
            multiplier = np.minimum(f32(1) / flush(value * (f32(1) / tensor_multiplier)), LARGEST_FLOAT32)
            multiplier = np.where(value == 0, f32(0), multiplier)
            scaled = x * per_element(multiplier, block, x.shape)
            rounded = grid.round(np.where(np.isnan(scaled), f32(0), scaled), None if group else uniform)
            inside = np.where(np.isfinite(x), np.clip(scaled, -grid.largest - 4, grid.largest + 4), f32(0))
            difference = np.rint(inside * unit).astype(np.int64) - (grid.round(inside) * unit).astype(np.int64)
            error = in_blocks(difference**2, block).sum(axis=(1, 3)).astype(f32) * (value * value)
            # Choice: a scale of 0, whose codes have no unit, is worse than any other.
            error = np.where((value > 0) & (block_amaxes * multiplier <= grid.largest + 4), error, f32(np.inf))
            better = np.ones(error.shape, bool) if least is None else error < least
            least = np.where(better, error, f32(np.inf) if least is None else least)
            keep = per_element(better, block, x.shape)
            codes = np.where(keep, rounded, 0 if codes is None else codes)
            scale = np.where(keep, per_element(sign * value, block, x.shape), 0 if scale is None else scale)
    q = quantized(codes, scale, t)
    return corrected(x, q, tensor_multiplier, block, group, uniform) if group else q


def quantized(codes, scale, tensor_scale=1.0):
    """The result in float64."""
    return Quantized(codes.astype(np.float64), scale.astype(np.float64), np.float64(tensor_scale))


@np.errstate(all="ignore")
def quantize(
    x,
    format,
    axis,
    *,
    block=None,
    uniform=None,
    rotation=None,
    multiplier=None,
    search=None,
    guard=False,
    target=6,
    scale_max=448,
    eden=False,
) -> Quantized:
    """Quantise a 2-D float32 array whose contracting dim is `axis`.

    rotation: the size and the mask of signs; or the signs themselves, and x is then not rounded to bfloat16.
    """
    element, kind, length = FORMATS[format]
    assert multiplier is None or kind == "float32", "`multiplier` is for per-tensor fp8"
    assert kind == "nvfp4" or (search is None and not guard), "search and guard are for nvfp4"
    x, amax = flush(np.asarray(x, f32)), None
    if rotation is not None:
        # Drawn signs: the tensor scale is that of a bound of the rotated amax.
        amax = None if isinstance(rotation, tuple) else block_amax(x, x.shape)[0, 0] * f32(len(rotation) ** 0.5)
        x = flush(hadamard(x, axis, *rotation) if isinstance(rotation, tuple) else rotated(x, axis, rotation))
    if uniform is not None:
        uniform = np.asarray(uniform, f32)
        # Choice: if the axis was padded for a rotation, `uniform` has the padded shape.
        assert uniform.shape == x.shape
    if block is None:
        other = 0 if kind == "float32" else 1
        block = (length, other) if axis == 0 else (other, length)
    block = tuple(size or whole for size, whole in zip(block, x.shape, strict=True))
    if isinstance(element, int) or not element.has_nan:
        x = np.where(np.isnan(x), f32(0), x)

    if kind == "nvfp4":
        group = ((1, len(rotation)) if axis else (len(rotation), 1)) if eden else None
        if format != "nvfp4":
            grids = GRIDS_OF[format]
            return quantize_searched(x, block, grids, scale_max, search is not None, uniform, group, amax)
        return quantize_nvfp4(x, block, uniform, search, guard, target, scale_max, group, amax)
    amax = block_amax(x, block)
    if kind == "float32":
        per_block = (
            float32_multiplier(amax, element.largest) if multiplier is None else np.full_like(amax, f32(multiplier))
        )
        scale = per_element(f32(1) / per_block, block, x.shape)
        return quantized(round_float(x * per_element(per_block, block, x.shape), element, uniform), scale)
    if kind == "integer":
        # Choice: only amax = 0 gives scale 1; a quotient that would be subnormal becomes 2^-126.
        scale = np.where(amax == 0, f32(1), np.maximum(amax / f32(element), SMALLEST_NORMAL))
        inv = per_element(f32(1) / scale, block, x.shape)
        return quantized(round_integer(x * inv, element, uniform), per_element(scale, block, x.shape))
    e = per_element((e8m0_ceil if kind == "ceil" else e8m0_even)(amax, element), block, x.shape)
    codes = round_float(np.ldexp(x, (127 - e).astype(np.int32)), element, uniform)
    return quantized(codes, np.ldexp(1.0, (e - 127).astype(np.int32)))


# The random Hadamard transform.


def hadamard(x, axis, size, mask):
    """Rotate groups of `size` elements along `axis`, padded with zeros to whole groups; bit i of `mask` is a minus."""
    signs = np.array([-1 if mask >> i & 1 else 1 for i in range(size)], f32)
    return bfloat16(rotated(bfloat16(flush(np.asarray(x, f32))), axis, signs, neighbours_last=False))


def rotated(x, axis, signs, neighbours_last=True):
    """Rotate groups along `axis`, padded with zeros to whole groups, in float32."""
    size, x = len(signs), np.moveaxis(flush(np.asarray(x, f32)), axis, -1)
    x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % size)])
    groups = x.reshape(*x.shape[:-1], -1, size) * signs
    strides = [2**i for i in range(int(np.log2(size)))]
    assert 2 ** len(strides) == size, "the size is a power of two"
    for stride in strides[::-1] if neighbours_last else strides:
        pairs = groups.reshape(*groups.shape[:-1], size // (2 * stride), 2, stride)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        groups = np.stack([low + high, low - high], axis=-2).reshape(groups.shape)
    return np.moveaxis((groups * f32(size**-0.5)).reshape(x.shape), -1, axis)


# Delayed scaling.


class Delayed:
    """The state of one cast with delayed scaling; `multiplier` is the quantisation multiplier of the next cast."""

    def __init__(self, length, largest, margin=0, most_recent=False):
        self.largest, self.margin, self.most_recent = f32(largest), margin, most_recent
        self.history = np.zeros(length, f32)
        self.multiplier = f32(1)

    @np.errstate(all="ignore")
    def step(self, amax):
        """Record the amax of a step that was cast with the current multiplier, and compute the next multiplier."""
        self.history[0] = amax
        history_amax = self.history[0] if self.most_recent else self.history.max()
        if history_amax > 0:
            self.multiplier = np.minimum((self.largest / history_amax) / f32(2.0**self.margin), LARGEST_MULTIPLIER)
        self.history = np.roll(self.history, -1)
        self.history[0] = 0
