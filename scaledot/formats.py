"""The table of formats.

A low-precision tensor is `codes x broadcast scale`; a Format is the row that says which codes, which
scale, how many elements share one, and by which rule the scale follows from the largest magnitude of
its block. Code elsewhere reads these fields and never asks for a name, so a new format is
`dataclasses.replace` of an old row and works in every verb at once:

>>> import dataclasses
>>> fp8_pow2 = dataclasses.replace(FORMATS["fp8_e4m3"], name="fp8_pow2", pow2=True)
>>> mxint8 = dataclasses.replace(FORMATS["int8"], name="mxint8", scale="float8_e8m0fnu", block=(32,), rule="floor")
>>> mxint8.bits, mxint8.max, mxint8.bits_per_element
(8, 127.0, 8.25)

Bits, maximum and storage dtype are computed from the row. What a published tool does differently is a
row too; those live in `scaledot.format_variants`. Nothing here needs jax.
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
E8M0_RULES = ("ceil", "floor", "even", "even1", "ceil_log2")
FLOAT_RULES = ("f_over_amax", "amax_over_f")
# How a two-level block scale is computed, where S = F * 448 / amax(tensor) and s = 1 / S: five orders of the same
# arithmetic in float32, which round differently.
TWO_LEVEL_RULES = (
    "multiply",  # amax * (S * (1 / F)), as TransformerEngine's CUDA kernels do
    "divide_multiply",  # (amax / F) * S, as its JAX code does
    "divide_divide",  # (amax / F) / s, torchao
    "divide_by_product",  # amax / (F * s), ModelOpt
    "round_divide_multiply",  # S * round(amax / F), rounded to the input's dtype, compressed-tensors
)

# XLA has no 6-bit type: their codes travel as raw bits, one per byte.
_RAW_BITS = ("float6_e2m3fn", "float6_e3m2fn")


@dataclasses.dataclass(frozen=True)
class Quirks:
    """Where a published tool departs from the plain arithmetic; the defaults are ours.

    divide: codes are round(x / scale) instead of round(x * (1 / scale)).
    own_dtype: x / scale and the arithmetic of zero points are rounded to the input's dtype.
    zero_first: the zero point is added before rounding.
    scales_first: a value is code * (scale * tensor_scale) instead of (code * scale) * tensor_scale.
    unsigned_zero: a negative zero is stored as +0.
    log2_pow2: `pow2` goes through a float32 log2, which takes a factor just below a power of two for that power.
    least_amax: smaller block maxima count as this.
    least_scale: smaller block scales are stored as this.
    empty_scale: what is stored where the scale would be 0 ("eps": the scale dtype's epsilon).
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
    """One row of the table.

    name: what errors and reports call it.
    element: the codes, by dtype name: a float with a finite maximum, `intN`, or `uintN` with a `codebook`.
    scale: dtype of the stored scale; "input" stores it in the dtype of the array that is quantised.
    block: elements that share a scale, laid on the axes that end at `axis`; 0 is a whole axis, None the whole tensor.
    rule: how the scale follows from the block maximum (numerics.scale).
    pow2: round a float32 scale up to a power of two.
    codebook: sorted values that unsigned codes stand for.
    bound: "full" maps the maximum of an integer format to 2^(b-1) - 1, "half" to 2^(b-1) - 1/2.
    two_level: block scales are relative to one float32 scale per tensor.
    guard: map the block maximum to 16/17 of the element's, so that a block scale that rounds down clips nothing.
    search: "four_over_six" also tries mapping the block maximum of FP4 to 4 and keeps the smaller squared error.
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
    quirks: Quirks = Quirks()

    def __post_init__(self):
        if isinstance(self.block, int):
            object.__setattr__(self, "block", (self.block,))
        object.__setattr__(self, "rule", deprecated.current("scale rule", self.rule, deprecated.SCALE_RULES))

    @property
    def is_integer(self) -> bool:
        return self.element.startswith("int")

    @property
    def is_float(self) -> bool:
        return "float" in self.element

    @property
    def bits(self) -> int:
        """Bits of one code, packed."""
        if self.is_float:
            return int(ml_dtypes.finfo(self.element_dtype).bits)
        return int(self.element.removeprefix("u").removeprefix("int"))

    @property
    def max(self) -> float:
        """The magnitude that the block maximum is mapped to."""
        if self.codebook is not None:
            return max(abs(v) for v in self.codebook)
        if self.is_integer:
            return 2.0 ** (self.bits - 1) - (1.0 if self.bound == "full" else 0.5)
        return float(ml_dtypes.finfo(self.element_dtype).max)

    @property
    def emax(self) -> int:
        """Exponent of the largest power of two that the element holds."""
        return math.frexp(self.max)[1] - 1

    @property
    def mantissa_bits(self) -> int:
        """Stored mantissa bits of a float element; for others the bits below the leading one of `max`."""
        return int(ml_dtypes.finfo(self.element_dtype).nmant) if self.is_float else self.emax

    @property
    def element_dtype(self) -> np.dtype:
        """The dtype that gives a float element its meaning."""
        return np.dtype(getattr(ml_dtypes, self.element))

    @property
    def code_dtype(self) -> np.dtype:
        """The dtype that codes are stored in: JAX's own where it has one wide enough."""
        if self.is_float:
            return np.dtype(np.uint8) if self.element in _RAW_BITS else self.element_dtype
        signed = "int" if self.is_integer else "uint"
        return np.dtype(getattr(ml_dtypes, f"{signed}4")) if self.bits <= 4 else np.dtype(f"{signed}8")

    @property
    def integer_range(self) -> tuple[int, int]:
        """Smallest and largest code of a symmetric integer format."""
        top = 2 ** (self.bits - 1) - 1
        return (-top if self.bound == "full" else -top - 1), top

    @property
    def bits_per_element(self) -> float:
        """Bits of a code plus its share of the block scale (whole axes count as free)."""
        shared = math.prod(self.block) if self.block else 0
        scale_bits = 32 if self.scale == "input" else 8 * _dtype(self.scale).itemsize
        return self.bits + (scale_bits / shared if shared else 0.0)

    def scale_dtype(self, input_dtype) -> np.dtype:
        """The dtype of the stored scale for an input of `input_dtype`."""
        return np.dtype(input_dtype) if self.scale == "input" else _dtype(self.scale)

    def arithmetic_dtype(self, input_dtype) -> np.dtype:
        """The dtype that quotients and zero points are rounded to for an input of `input_dtype`."""
        return np.dtype(input_dtype if self.quirks.own_dtype else np.float32)

    def __repr__(self) -> str:
        return f"Format({self.name!r})"


def _dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def _mx(name: str, element: str, rule: str) -> Format:
    return Format(name, element, scale="float8_e8m0fnu", block=(32,), rule=rule)


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
    Format("nvfp4", "float4_e2m1fn", scale="float8_e4m3fn", block=(16,), rule="multiply", two_level=True),
    *(_integer(bits) for bits in (8, 7, 6, 5, 4, 3, 2)),
    Format("nf4", "uint4", block=(64,), rule="amax_over_f", codebook=NF4_CODEBOOK),
)

FORMATS: Mapping[str, Format] = MappingProxyType({row.name: row for row in _ROWS})


def find_format(format: str | Format) -> Format:
    """The Format itself, or the row of that name.

    >>> find_format("mxfp8")
    Format('mxfp8')
    """
    return row_of("format", format, Format, FORMATS, "FORMATS")


def row_of(argument: str, given: Any, kind: type[Row], table: Mapping[str, Row], title: str) -> Row:
    """What was given if it is a row, or the row of that name; a misspelt one lists the nearest."""
    if isinstance(given, kind):
        return given
    if not isinstance(given, str):
        raise TypeError(f"`{argument}` must be a {kind.__name__} or one of the names in {title}, not {given!r}")
    if given not in table:
        near = difflib.get_close_matches(given, table, n=3, cutoff=0.4) or list(table)
        raise ValueError(f"`{argument}` {given!r} is not in {title}; did you mean {', '.join(map(repr, near))}?")
    return table[given]


def rules_of(format: Format) -> tuple[str, ...]:
    """The scale rules that make sense for the format's scale dtype.

    >>> rules_of(FORMATS["mxfp8"])
    ('ceil', 'floor', 'even', 'even1', 'ceil_log2')
    """
    if format.scale == "float8_e8m0fnu":
        return E8M0_RULES
    return TWO_LEVEL_RULES if format.scale == "float8_e4m3fn" else FLOAT_RULES
