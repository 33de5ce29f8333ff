"""The table of formats.

A low-precision tensor is `decoded codes x broadcast scale`. A Format, one row of the table, defines the element type
of the codes, the dtype of the scales, the block of elements that share a scale, and the rule that computes a scale from
the amax of its block. All other code reads these fields and never compares names, so a new format is a
`dataclasses.replace` of an existing row and works in every function of the library:

>>> import dataclasses
>>> fp8_pow2 = dataclasses.replace(FORMATS["fp8_e4m3"], name="fp8_pow2", pow2=True)
>>> mxint8 = dataclasses.replace(FORMATS["int8"], name="mxint8", scale="float8_e8m0fnu", block=(32,), rule="floor")
>>> mxint8.bits, mxint8.max, mxint8.bits_per_element
(8, 127.0, 8.25)

Bits, maximum and storage dtype are computed from the fields. Formats that reproduce the arithmetic of other libraries
bit for bit are rows as well, in `scaledot.format_variants`. This module does not import jax.
"""

import dataclasses
import difflib
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from scaledot import deprecated
from scaledot.hashing import hash_once

# The 16 quantiles of a normal distribution that QLoRA defines, to the last digit of float32.
NF4_CODEBOOK = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)

Row = TypeVar("Row")
# Scale rules, with F = `Format.max` and emax = `Format.emax`. The exponent of an E8M0 scale:
E8M0_RULES = (
    "ceil",  # ceil(log2(amax / F)): no element saturates; RCEIL in torchao, and what TransformerEngine does
    "floor",  # floor(log2(amax)) - emax, as in the OCP MX specification
    "even",  # `floor` of amax rounded half up to the element's mantissa bits, EVEN in torchao
    "even1",  # the same with 1 mantissa bit
    "ceil_log2",  # ceil(log2(amax)) - emax, CEIL in torchao
)
# A float scale, which stores the reciprocal of F / amax, or amax / F itself:
FLOAT_RULES = ("f_over_amax", "amax_over_f")
# An E4M3 block scale under a tensor scale s = amax(tensor) / (F * scale_max), with S = 1 / s: five orders of the same
# float32 arithmetic, which round differently.
TWO_LEVEL_RULES = (
    "multiply",  # amax * (S * (1 / F)), as TransformerEngine's CUDA kernels do
    "divide_multiply",  # (amax / F) * S, as its JAX code does
    "divide_divide",  # (amax / F) / s, torchao
    "divide_by_product",  # amax / (F * s), ModelOpt
    "round_divide_multiply",  # S * round(amax / F), rounded to the input's dtype, compressed-tensors
)

# XLA has no 6-bit dtype: these codes are stored as raw bits, one code per byte.
_RAW_BITS = ("float6_e2m3fn", "float6_e3m2fn")


@dataclasses.dataclass(frozen=True)
class Quirks:
    """Deviations of other libraries from the default arithmetic, needed to reproduce their bits.

    divide: quantise as round(x / scale); default: round(x * multiplier) with multiplier = float32(1 / scale).
    own_dtype: round x / scale and all zero-point arithmetic to the input dtype (e.g. bfloat16); default: float32.
    zero_first: quantise as round(x / scale + zero); default: round(x / scale) + zero.
    scales_first: dequantise as code * (scale * tensor_scale); default: (code * scale) * tensor_scale.
    unsigned_zero: encode -0.0 as +0, and dequantise the code of -0 to +0; default: the sign is kept.
    log2_pow2: with `pow2`, compute the power of two as exp2(floor(log2(multiplier))) with a float32 log2, which rounds
        up for a multiplier just below a power of two; default: from the exponent bits, exactly.
    least_amax: lower bound of the block amax, applied before the scale rule; 0: none.
    least_scale: lower bound of an E4M3 block scale, applied before it is rounded to E4M3; 0: none.
    empty_scale: scale stored for a block whose scale would be 0, e.g. a block of zeros; "eps": the machine epsilon of
        the scale dtype; None: 1 as a float scale, 0 as an E4M3 scale.
    """

    divide: bool = False
    own_dtype: bool = False
    zero_first: bool = False
    scales_first: bool = False
    unsigned_zero: bool = False
    log2_pow2: bool = False
    least_amax: float = 0.0
    least_scale: float = 0.0
    empty_scale: float | str | None = None


@hash_once
@dataclasses.dataclass(frozen=True)
class Format:
    """A low-precision format: element type, scale dtype, block shape and scale rule.

    name: used in error messages and reports only.
    element: dtype name of the codes: a float with a finite maximum, `intN`, or `uintN`, whose codes index a `codebook`
        or, without one, are the values themselves, from 0 on.
    scale: dtype name of the stored scale; "input" is the dtype of the array that is quantised.
    block: shape of the elements that share a scale, on the axes that end at `axis`; 0 is a whole axis, None the whole
        tensor.
    rule: how the scale is computed from the block amax: one of `rules_of(format)`, explained at the top of this module.
    pow2: round a float32 scale up to a power of two.
    codebook: sorted dequantised values that unsigned codes index.
    bound: "full" maps the amax of an integer format to its largest code, 2^(b-1) - 1, and "half" to 1/2 more; of
        unsigned codes the largest is 2^b - 1.
    grids: dtype names of two 4-bit elements, of which each block uses the one with the smaller squared error. `element`
        is "uint4": codes are the raw bits (two's complement for int4). The sign bit of the E4M3 block scale is set if
        the block uses the second element; the scale is the magnitude.
    two_level: E4M3 block scales are relative to one float32 scale per tensor (`tensor_scale`).
    guard: map the block amax to 16/17 of the element maximum, so that no element saturates when the block scale is
        rounded down.
    search: "four_over_six" also tries to map the block amax of FP4 to 4 and keeps the smaller squared error; "scales"
        tries E4M3 scales around that of the amax and keeps the one with the smallest squared error of the block
        (`numerics.scale_search`).
    target: the magnitude of a code, possibly between two codes, that the block amax is mapped to; None: the largest.
    scale_max: the largest E4M3 block scale of a two-level format before a search or a correction increases it: the
        tensor scale maps the tensor's amax to target × scale_max. Scales above it are headroom, up to 448.
    quirks: deviations that reproduce another library.
    """

    name: str
    element: str
    scale: str = "float32"
    block: tuple[int, ...] | None = None
    rule: str = "f_over_amax"
    pow2: bool = False
    codebook: tuple[float, ...] | None = None
    bound: str = "full"
    two_level: bool = False
    guard: bool = False
    search: str | None = None
    target: float | None = None
    scale_max: float = 448.0
    quirks: Quirks = Quirks()
    grids: tuple[str, str] | None = None

    def __post_init__(self):
        if isinstance(self.block, int):
            object.__setattr__(self, "block", (self.block,))
        for name in ("block", "codebook", "grids"):  # lists could not be hashed
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))
        object.__setattr__(self, "rule", deprecated.current("scale rule", self.rule, deprecated.SCALE_RULES))

    @property
    def is_integer(self) -> bool:
        return self.element.startswith("int")

    @property
    def is_unsigned(self) -> bool:
        """Whether codes are unsigned integers that are values, not indices; negative elements are encoded as 0."""
        return self.element.startswith("uint") and self.codebook is None and self.grids is None

    @property
    def grid_formats(self) -> "tuple[Format, ...]":
        """The format with each of its `grids` as the element; itself if it has one element only."""
        if self.grids is None:
            return (self,)
        return tuple(dataclasses.replace(self, element=element, grids=None) for element in self.grids)

    @property
    def is_float(self) -> bool:
        return "float" in self.element

    @property
    def has_negative_zero(self) -> bool:
        """Whether a float element has a code of -0; that of the `fnuz` dtypes is NaN."""
        return self.is_float and not self.element.endswith("fnuz")

    @property
    def bits(self) -> int:
        """Bits of one code when packed."""
        if self.is_float:
            return int(ml_dtypes.finfo(self.element_dtype).bits)
        return int(self.element.removeprefix("u").removeprefix("int"))

    @property
    def max(self) -> float:
        """The magnitude that the block amax is mapped to."""
        if self.target is not None:
            return self.target
        return self.largest_code

    @property
    def largest_code(self) -> float:
        """The magnitude of the largest code, of the smaller of two grids; with `bound` "half", half a step more."""
        if self.grids is not None:
            return min(grid.largest_code for grid in self.grid_formats)
        if self.codebook is not None:
            return max(abs(v) for v in self.codebook)
        if not self.is_float:
            return self.integer_range[1] + (0.0 if self.bound == "full" else 0.5)
        return float(ml_dtypes.finfo(self.element_dtype).max)

    @property
    def emax(self) -> int:
        """Exponent of the largest power of two that the element represents."""
        return math.frexp(self.largest_code)[1] - 1

    @property
    def mantissa_bits(self) -> int:
        """Explicit mantissa bits of a float element; of other elements, the bits below the leading one of `max`."""
        if self.grids is not None:
            return max(grid.mantissa_bits for grid in self.grid_formats)
        return int(ml_dtypes.finfo(self.element_dtype).nmant) if self.is_float else self.emax

    @property
    def element_dtype(self) -> np.dtype:
        """The ml_dtypes dtype of a float element, also where XLA lacks it (FP6)."""
        return np.dtype(getattr(ml_dtypes, self.element))

    @property
    def code_dtype(self) -> np.dtype:
        """The dtype of the stored codes: the narrowest JAX dtype that holds them."""
        if self.is_float:
            return np.dtype(np.uint8) if self.element in _RAW_BITS else self.element_dtype
        signed = "int" if self.is_integer else "uint"
        return np.dtype(getattr(ml_dtypes, f"{signed}4")) if self.bits <= 4 else np.dtype(f"{signed}8")

    @property
    def integer_range(self) -> tuple[int, int]:
        """Smallest and largest code of a symmetric or unsigned integer format."""
        if self.is_unsigned:
            return 0, 2**self.bits - 1
        top = 2 ** (self.bits - 1) - 1
        return (-top if self.bound == "full" else -top - 1), top

    @property
    def bits_per_element(self) -> float:
        """Bits of a code plus its share of the block scale; scales per axis or per tensor count as 0."""
        shared = math.prod(self.block) if self.block else 0
        scale_bits = 32 if self.scale == "input" else 8 * _dtype(self.scale).itemsize
        return self.bits + (scale_bits / shared if shared else 0.0)

    def scale_dtype(self, input_dtype) -> np.dtype:
        """The dtype of the stored scale for an input of `input_dtype`."""
        return np.dtype(input_dtype) if self.scale == "input" else _dtype(self.scale)

    def arithmetic_dtype(self, input_dtype) -> np.dtype:
        """The dtype that x / scale and zero points are rounded to for an input of `input_dtype`."""
        return np.dtype(input_dtype if self.quirks.own_dtype else np.float32)

    def __repr__(self) -> str:
        return f"Format({self.name!r})"


def _dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def _mx(name: str, element: str, rule: str) -> Format:
    return Format(name, element, scale="float8_e8m0fnu", block=(32,), rule=rule)


def _two_level(name: str, element: str) -> Format:
    return Format(name, element, scale="float8_e4m3fn", block=(16,), rule="multiply", two_level=True)


def _integer(bits: int) -> Format:
    return Format(f"int{bits}", f"int{bits}", block=(0,), rule="amax_over_f")


_ROWS = (
    Format("fp8_e4m3", "float8_e4m3fn"),
    Format("fp8_e5m2", "float8_e5m2"),
    _mx("mxfp8", "float8_e4m3fn", "ceil"),
    _mx("mxfp8_e5m2", "float8_e5m2", "ceil"),
    _mx("mxfp6_e2m3", "float6_e2m3fn", "ceil"),
    _mx("mxfp6_e3m2", "float6_e3m2fn", "ceil"),
    _mx("mxfp4", "float4_e2m1fn", "even"),
    _two_level("nvfp4", "float4_e2m1fn"),
    _two_level("nvint4", "int4"),
    dataclasses.replace(_two_level("if4", "uint4"), grids=("float4_e2m1fn", "int4")),
    *(_integer(bits) for bits in (8, 7, 6, 5, 4, 3, 2)),
    Format("nf4", "uint4", block=(64,), rule="amax_over_f", codebook=NF4_CODEBOOK),
)

FORMATS: Mapping[str, Format] = MappingProxyType({row.name: row for row in _ROWS})


def find_format(format: str | Format) -> Format:
    """Returns `format` itself, or the row of FORMATS with that name.

    >>> find_format("mxfp8")
    Format('mxfp8')
    """
    return row_of("format", format, Format, FORMATS, "FORMATS")


def row_of(argument: str, value: Any, kind: type[Row], table: Mapping[str, Row], title: str) -> Row:
    """Returns `value` if it is a `kind`, else the row of `table` with that name; errors list the nearest names."""
    if isinstance(value, kind):
        return value
    if not isinstance(value, str):
        raise TypeError(f"`{argument}` must be a {kind.__name__} or one of the names in {title}, not {value!r}")
    if value not in table:
        by_lower = {name.lower(): name for name in table}
        near = [by_lower[name] for name in difflib.get_close_matches(value.lower(), by_lower, n=3, cutoff=0.4)]
        names = ", ".join(map(repr, near or table))
        raise ValueError(f"`{argument}` {value!r} is not in {title}; did you mean {names}?")
    return table[value]


def rules_of(format: Format) -> tuple[str, ...]:
    """Returns the scale rules that apply to the format's scale dtype.

    >>> rules_of(FORMATS["mxfp8"])
    ('ceil', 'floor', 'even', 'even1', 'ceil_log2')
    """
    if format.scale == "float8_e8m0fnu":
        return E8M0_RULES
    return TWO_LEVEL_RULES if format.scale == "float8_e4m3fn" else FLOAT_RULES
