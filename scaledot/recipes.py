"""Recipes: what is quantised where when a product is differentiated.

y = x w has three products: fwd sums over what x and w share, dgrad (the gradient of x) multiplies g = dy by w, and
wgrad (the gradient of w) multiplies x by g. A Recipe is three Gemms of two Casts each, all frozen values; variation is
`dataclasses.replace`, and printing one shows it as a table:

>>> print(FP8_BLOCK)
fp8_block
  fwd    x fp8_e4m3 1×128      w fp8_e4m3 128×128
  dgrad  g fp8_e4m3 1×128      w fp8_e4m3 128×128
  wgrad  x fp8_e4m3 1×128      g fp8_e4m3 1×128

Blocks are written (kept × summed): their last entry runs along the axis that the product sums over. A recipe without
dgrad and wgrad is straight-through: the backward pass multiplies full-precision gradients by the values that forward
multiplied, and gradients are zero where the forward cast clipped.
"""

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from scaledot.formats import FORMATS, Format, Quirks, find_format, row_of
from scaledot.hashing import hash_once
from scaledot.numerics import calibrate
from scaledot.numerics.hadamard import Hadamard

PRODUCTS = {"fwd": ("x", "w"), "dgrad": ("g", "w"), "wgrad": ("x", "g")}  # the tensors that each one multiplies


@dataclasses.dataclass(frozen=True)
class Delayed:
    """A scale from the largest magnitudes of earlier steps.

    length: how many steps are remembered. algorithm: "max" over them or "most_recent". margin: powers of two that the
    factor stays below what the magnitude allows.
    """

    length: int = 1024
    algorithm: str = "max"
    margin: int = 0

    def __post_init__(self):
        if not isinstance(self.length, int) or self.length < 1:
            raise ValueError(f"`length` of a history must be a whole number of at least 1, not {self.length!r}")
        if self.algorithm not in ("max", "most_recent"):
            raise ValueError(f"`algorithm` {self.algorithm!r} is not known; use 'max' or 'most_recent'")
        if not isinstance(self.margin, int):
            raise TypeError(f"`margin` must be a whole number of powers of two, not {self.margin!r}")


@dataclasses.dataclass(frozen=True)
class Cast:
    """How one operand of one product is quantised.

    format: a Format or its name. block: (kept, summed) or (summed,), the format's own by default; 0 is a whole axis.
    rounding: "nearest" or "stochastic". rotation: a Hadamard along the summed axis. delayed: None scales by the tensor
    itself. calibration: as in `quantize`.
    """

    format: Format
    block: tuple[int, ...] | None = None
    rounding: str = "nearest"
    rotation: Hadamard | None = None
    delayed: Delayed | None = None
    calibration: str = "absmax"

    def __post_init__(self):
        row = find_format(self.format)
        object.__setattr__(self, "format", row)
        one_scale = calibrate.parse(self.calibration).method == "fixed"
        block = (None if one_scale else row.block) if self.block is None else self.block
        object.__setattr__(self, "block", None if block is None else _sizes(block))
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(f"`rounding` {self.rounding!r} is not known; use 'nearest' or 'stochastic'")
        if self.delayed is not None and not isinstance(self.delayed, Delayed):
            raise TypeError(f"`delayed` of a Cast must be a Delayed or None, not {self.delayed!r}")
        if self.delayed is not None and (self.rotation is not None or self.calibration != "absmax" or row.pow2):
            raise ValueError(
                f"delayed scaling follows the largest magnitude of the tensor as it is, which {self} is not"
            )
        if self.delayed is not None and (any(self.tile) or row.scale != "float32" or not row.is_float):
            raise ValueError(f"delayed scaling keeps one float32 factor per tensor; {self} has more")

    @property
    def tile(self) -> tuple[int, int]:
        """(kept, summed) elements that share a scale; 0 is a whole axis."""
        if self.block is None:
            return (0, 0)
        kept, summed = (1, *self.block)[-2:]
        return kept, summed

    @property
    def is_per_tensor(self) -> bool:
        return self.tile == (0, 0)

    @property
    def cuts(self) -> bool:
        """Whether blocks or a rotation cut an axis into pieces."""
        return any(b > 1 for b in self.tile) or self.rotation is not None

    @property
    def clips(self) -> bool:
        """Whether some elements may be out of range: by calibration, or because the scale is of earlier steps."""
        parsed = calibrate.parse(self.calibration)
        return (
            self.delayed is not None
            or parsed.method not in ("absmax", "minmax")
            or (bool(parsed.values) and parsed.values[0] < 1)
        )

    def __str__(self) -> str:
        words = [self.format.name]
        if not self.is_per_tensor:
            words.append("×".join("all" if b == 0 else str(b) for b in self.tile))
        words += ["stochastic"] if self.rounding == "stochastic" else []
        words += [f"hadamard{self.rotation.size}"] if self.rotation else []
        words += [f"delayed({self.delayed.length})"] if self.delayed else []
        words += [self.calibration] if self.calibration != "absmax" else []
        return " ".join(words)


def _sizes(block: Any) -> tuple[int, ...]:
    entries = block if isinstance(block, (tuple, list)) else (block,)
    whole = [isinstance(b, (int, np.integer)) and not isinstance(b, bool) and b >= 0 for b in entries]
    if len(entries) not in (1, 2) or not all(whole):
        raise ValueError(f"`block` of a Cast must be (kept, summed) or (summed,), sizes or 0, not {block!r}")
    return tuple(int(b) for b in entries)


@dataclasses.dataclass(frozen=True)
class Gemm:
    """The casts of a product's two operands; None leaves an operand as it is."""

    lhs: Cast | None = None
    rhs: Cast | None = None

    def __post_init__(self):
        for cast in (self.lhs, self.rhs):
            if cast is not None and not isinstance(cast, Cast):
                raise TypeError(f"a Gemm holds two Casts or None, not {cast!r}; Cast({cast!r}) makes one of a format")
        left, right = (None if c is None else c.rotation for c in (self.lhs, self.rhs))
        if left != right:
            raise ValueError(f"a rotation cancels only if both operands have it, not {left} and {right}")


@hash_once
@dataclasses.dataclass(frozen=True)
class Recipe:
    """Three products of two casts each; `dgrad` and `wgrad` None are straight-through.

    amax_scope: where arrays are split over devices that are told so, whether a scale of a whole axis or tensor is that
    of the whole ("global"), or cheaper that of each device's part ("local") wherever parts are not put together.

    >>> mine = dataclasses.replace(FP8_CURRENT, name="exact_wgrad", wgrad=Gemm())
    >>> print(mine)
    exact_wgrad
      fwd    x fp8_e4m3      w fp8_e4m3
      dgrad  g fp8_e5m2      w fp8_e4m3
      wgrad  x as it is      g as it is
    """

    name: str
    fwd: Gemm
    dgrad: Gemm | None = None
    wgrad: Gemm | None = None
    amax_scope: str = "global"

    def __post_init__(self):
        if self.amax_scope not in ("global", "local"):
            raise ValueError(f"`amax_scope` {self.amax_scope!r} is not known; use 'global' or 'local'")
        for product in PRODUCTS:
            gemm = getattr(self, product)
            if not isinstance(gemm, Gemm) and (gemm is not None or product == "fwd"):
                raise TypeError(f"`{product}` of a Recipe must be a Gemm, not {gemm!r}")
        for tensor in "xwg":
            delayed = {cast for _, of, cast in self.casts() if of == tensor and cast.delayed is not None}
            if len(delayed) > 1:
                words = " and ".join(sorted(map(str, delayed)))
                raise ValueError(f"{tensor} of {self.name} has one history, but two delayed casts: {words}")
        for product, cast in (("dgrad", self.fwd.lhs), ("wgrad", self.fwd.rhs)):
            if getattr(self, product) is None and cast is not None and cast.clips and cast.rotation is not None:
                raise ValueError(
                    f"{product} of {self.name} is straight-through, but where {cast} clips is known only in its "
                    "rotated form; drop the rotation or use calibration='absmax'"
                )

    def casts(self) -> Iterator[tuple[str, str, Cast]]:
        """(product, tensor, cast) of everything that is quantised."""
        for product, tensors in PRODUCTS.items():
            gemm = getattr(self, product)
            for tensor, cast in zip(tensors, (gemm.lhs, gemm.rhs) if gemm else (), strict=False):
                if cast is not None:
                    yield product, tensor, cast

    @functools.cached_property
    def delayed(self) -> dict[str, Cast]:
        """The cast of each tensor, x, w or g, that keeps a history."""
        return {tensor: cast for _, tensor, cast in self.casts() if cast.delayed is not None}

    @functools.cached_property
    def cuts(self) -> bool:
        """Whether a cast cuts an axis into blocks."""
        return any(cast.cuts for _, _, cast in self.casts())

    @functools.cached_property
    def stochastic(self) -> tuple[str, ...]:
        """What is rounded by chance, such as "g of dgrad"."""
        return tuple(f"{tensor} of {product}" for product, tensor, cast in self.casts() if cast.rounding != "nearest")

    def to_dict(self) -> dict[str, Any]:
        """Plain names and numbers, without what is default; `Recipe.from_dict` reads them."""
        gemms = {p: _gemm_to_dict(getattr(self, p)) for p in PRODUCTS if getattr(self, p) is not None}
        scope = {} if self.amax_scope == "global" else {"amax_scope": self.amax_scope}
        return {"name": self.name, **gemms, **scope}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Recipe":
        """The recipe that `to_dict` wrote.

        >>> Recipe.from_dict({"name": "w8", "fwd": {"rhs": {"format": "int8"}}}).fwd.rhs.format
        Format('int8')
        """
        _check_keys("recipe", fields, ("name", *PRODUCTS, "amax_scope"))
        missing = [name for name in ("name", "fwd") if name not in fields]
        if missing:
            raise ValueError(f"a recipe needs {missing[0]!r}; it has {', '.join(fields) or 'nothing'}")
        gemms = (_gemm_from_dict(fields.get(p)) for p in PRODUCTS)
        return cls(fields["name"], *gemms, amax_scope=fields.get("amax_scope", "global"))

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Recipe":
        return cls.from_dict(json.loads(text))

    def __str__(self) -> str:
        rows = [
            (product, *(f"{t} {_in_words(c)}" for t, c in zip(tensors, (gemm.lhs, gemm.rhs), strict=True)))
            for product, tensors in PRODUCTS.items()
            if (gemm := getattr(self, product)) is not None
        ]
        width = max(len(left) for _, left, _ in rows) + 5
        lines = [f"  {product:<5}  {left:<{width}} {right}" for product, left, right in rows]
        through = " and ".join(p for p in PRODUCTS if getattr(self, p) is None)
        lines += [f"  {through} straight through"] if through else []
        lines += ["  scales of each device's part"] if self.amax_scope == "local" else []
        return "\n".join([self.name, *lines])


def _in_words(cast: Cast | None) -> str:
    return "as it is" if cast is None else str(cast)


def _gemm_to_dict(gemm: Gemm) -> dict[str, Any]:
    sides = {"lhs": gemm.lhs, "rhs": gemm.rhs}
    return {side: _to_dict(cast) for side, cast in sides.items() if cast is not None}


def _gemm_from_dict(fields: Mapping[str, Any] | None) -> Any:
    if fields is None:
        return None
    _check_keys("product", fields, ("lhs", "rhs"))
    return Gemm(*(None if fields.get(side) is None else _cast_from_dict(fields[side]) for side in ("lhs", "rhs")))


def _cast_from_dict(fields: Mapping[str, Any]) -> Cast:
    inner = {"format": _format_from_dict, "rotation": _maker(Hadamard), "delayed": _maker(Delayed)}
    known = [f.name for f in dataclasses.fields(Cast)]
    _check_keys("cast", fields, known)
    if "format" not in fields:
        raise ValueError(f"a cast needs a 'format'; it has {', '.join(fields) or 'nothing'}")
    given = {name: value for name, value in fields.items() if value is not None}
    return Cast(**{name: inner.get(name, lambda v: v)(value) for name, value in given.items()})


def _format_from_dict(value: str | Mapping[str, Any]) -> Format:
    if isinstance(value, str):
        return find_format(value)
    inner: dict[str, Any] = {"block": tuple, "codebook": tuple, "quirks": _maker(Quirks)}
    _check_keys("format", value, [f.name for f in dataclasses.fields(Format)])
    fields: dict[str, Any] = {k: inner[k](v) if k in inner and v is not None else v for k, v in value.items()}
    return Format(**fields)


def _maker(kind: type):
    return lambda fields: kind(**fields)


def _to_dict(value: Any) -> Any:
    """The fields that differ from their defaults; a row of FORMATS is its name."""
    if isinstance(value, Format) and FORMATS.get(value.name) == value:
        return value.name
    if isinstance(value, tuple):
        return list(value)
    if not dataclasses.is_dataclass(value):
        return value
    found = {}
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        default = field.default
        if isinstance(value, Cast) and field.name == "block":
            default = Cast(value.format, calibration=value.calibration).block
        if inner != default:
            found[field.name] = _to_dict(inner)
    return found


def _check_keys(what: str, fields: Mapping[str, Any], known: tuple[str, ...] | list[str]) -> None:
    if not isinstance(fields, Mapping):
        raise TypeError(f"a {what} must be written as a mapping with {', '.join(known)}, not {fields!r}")
    unknown = [name for name in fields if name not in known]
    if unknown:
        raise ValueError(f"a {what} has no field {unknown[0]!r}; it takes {', '.join(known)}")


def of_tensors(name: str, x: Cast, w: Cast, g: Cast) -> Recipe:
    """The same cast of each tensor in both products that it takes part in."""
    return Recipe(name, Gemm(x, w), Gemm(g, w), Gemm(x, g))


def _delayed(format: str) -> Cast:
    return Cast(FORMATS[format], delayed=Delayed())


_E4M3, _E5M2 = Cast(FORMATS["fp8_e4m3"]), Cast(FORMATS["fp8_e5m2"])
_E4M3_LINE, _E4M3_SQUARE = (Cast(FORMATS["fp8_e4m3"], block) for block in ((1, 128), (128, 128)))
_MX = Cast(FORMATS["mxfp8"])
_NV = Cast(FORMATS["nvfp4"])
_NV_SQUARE = Cast(FORMATS["nvfp4"], (16, 16))
_NV_ROTATED = dataclasses.replace(_NV, rotation=Hadamard())
_INT8 = Cast(FORMATS["int8"])
_INT8_LINE = Cast(FORMATS["int8"], (1, 128))
_INT8_ROTATED = dataclasses.replace(_INT8_LINE, rotation=Hadamard())
_INT4_LINE = Cast(FORMATS["int4"], (1, 128))


def _stochastic(cast: Cast) -> Cast:
    return dataclasses.replace(cast, rounding="stochastic")


def _four_over_six(cast: Cast) -> Cast:
    return dataclasses.replace(cast, format=dataclasses.replace(cast.format, name="nvfp4_4o6", search="four_over_six"))


FP8_CURRENT = of_tensors("fp8_current", _E4M3, _E4M3, _E5M2)
FP8_DELAYED = of_tensors("fp8_delayed", _delayed("fp8_e4m3"), _delayed("fp8_e4m3"), _delayed("fp8_e5m2"))
FP8_BLOCK = of_tensors("fp8_block", _E4M3_LINE, _E4M3_SQUARE, _E4M3_LINE)
MXFP8 = of_tensors("mxfp8", _MX, _MX, _MX)
NVFP4 = Recipe(
    "nvfp4",
    fwd=Gemm(_NV, _NV_SQUARE),
    dgrad=Gemm(_stochastic(_NV), _NV_SQUARE),
    wgrad=Gemm(_NV_ROTATED, _stochastic(_NV_ROTATED)),
)
NVFP4_FOUR_OVER_SIX = Recipe(
    "nvfp4_four_over_six",
    fwd=Gemm(_four_over_six(_NV), _four_over_six(_NV_SQUARE)),
    dgrad=Gemm(_stochastic(_NV), _four_over_six(_NV_SQUARE)),
    wgrad=NVFP4.wgrad,
)
INT8 = of_tensors("int8", _INT8, _INT8, _stochastic(_INT8))
INT8_BLOCK = Recipe(
    "int8_block",
    fwd=Gemm(_INT8_ROTATED, _INT8_ROTATED),
    dgrad=Gemm(_stochastic(_INT8_LINE), _INT8_LINE),
    wgrad=Gemm(_INT8_LINE, _stochastic(_INT8_LINE)),
)
INT8_QAT = Recipe("int8_qat", Gemm(_INT8, _INT8))
FP8_QAT = Recipe("fp8_qat", Gemm(_E4M3, _E4M3))
W8A16_QAT = Recipe("w8a16_qat", Gemm(None, _INT8))
W4A16_QAT = Recipe("w4a16_qat", Gemm(None, _INT4_LINE))
W4A8_QAT = Recipe("w4a8_qat", Gemm(_INT8, _INT4_LINE))
UNQUANTISED = Recipe("unquantised", Gemm(), Gemm(), Gemm())  # casts nothing, and so has no row

RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        recipe.name: recipe
        for recipe in (
            FP8_CURRENT,
            FP8_DELAYED,
            FP8_BLOCK,
            MXFP8,
            NVFP4,
            NVFP4_FOUR_OVER_SIX,
            INT8,
            INT8_BLOCK,
            INT8_QAT,
            FP8_QAT,
            W8A16_QAT,
            W4A16_QAT,
            W4A8_QAT,
        )
    }
)


def find_recipe(recipe: str | Recipe) -> Recipe:
    """The Recipe itself, or the one of that name.

    >>> find_recipe("mxfp8") is MXFP8
    True
    """
    return row_of("recipe", recipe, Recipe, RECIPES, "RECIPES")
