"""Training recipes: how each operand of the three matmuls of a linear layer is quantised.

Training y = x w takes three matmuls: fwd (y = x w), dgrad (dx = g wᵀ with g = dy) and wgrad (dw = xᵀ g). A Recipe has a
Gemm for each, and a Gemm has a Cast for each operand. All are frozen dataclasses; a variant is made with
`dataclasses.replace`. Printing a recipe shows it as a table:

>>> print(FP8_BLOCK)
fp8_block
  fwd    x fp8_e4m3 1×128      w fp8_e4m3 128×128
  dgrad  g fp8_e4m3 1×128      w fp8_e4m3 128×128
  wgrad  x fp8_e4m3 1×128      g fp8_e4m3 1×128

Blocks are written (free × contracting): the last entry is along the contracting dim of that matmul. A recipe without
dgrad and wgrad uses the straight-through estimator (quantisation-aware training): the backward pass multiplies
full-precision gradients by the dequantised forward operands, and the gradient is zero where the calibration of the
forward cast clipped.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from scaledot import deprecated
from scaledot.formats import FORMATS, Format, Quirks, find_format, row_of
from scaledot.hashing import hash_once
from scaledot.numerics import calibrate, eden
from scaledot.numerics.hadamard import Hadamard
from scaledot.numerics.rounding import check_rounding
from scaledot.numerics.scale_search import check_stochastic

GEMM_OPERANDS = {"fwd": ("x", "w"), "dgrad": ("g", "w"), "wgrad": ("x", "g")}  # matmul: (lhs, rhs)


@dataclasses.dataclass(frozen=True)
class Delayed:
    """Delayed scaling: the scale is computed from the amax history of earlier steps, as in TransformerEngine.

    length: steps in the history.
    algorithm: "max" over the history, or "most_recent".
    margin: headroom in powers of two: the quantisation multiplier is format.max / amax / 2^margin.
    """

    length: int = 1024
    algorithm: str = "max"
    margin: float = 0

    def __post_init__(self):
        if not isinstance(self.length, int) or self.length < 1:
            raise ValueError(f"`length` of a Delayed must be a whole number of at least 1, not {self.length!r}")
        if self.algorithm not in ("max", "most_recent"):
            raise ValueError(f"`algorithm` {self.algorithm!r} is not known; use 'max' or 'most_recent'")
        if not isinstance(self.margin, (int, float)) or not math.isfinite(self.margin):
            raise TypeError(f"`margin` must be a finite number, the exponent of a power of two, not {self.margin!r}")


@dataclasses.dataclass(frozen=True)
class Cast:
    """How one operand of one matmul is quantised.

    format: a Format or its name.
    block: (free, contracting) or (contracting,) elements that share a scale; 0 is a whole dim; None: the format's.
    rounding: "nearest", "stochastic", or "ms_eden": nearest codes with corrected block scales, which are rounded
      stochastically, in a rotation that draws its signs (`numerics.eden`); unbiased with less noise than "stochastic".
    rotation: a random Hadamard transform along the contracting dim, before the cast.
    delayed: delayed scaling; None computes scales from the tensor itself (current scaling).
    calibration: as in `quantize`.
    requantized: cast the dequantised operand of fwd instead of the tensor itself, for x of wgrad and w of dgrad.
    subtract_mean: for x and g: quantises the differences to the mean over all tokens, one mean per feature; see
        `scaledot.train.means`.
    """

    format: Format
    block: tuple[int, ...] | None = None
    rounding: str = "nearest"
    rotation: Hadamard | None = None
    delayed: Delayed | None = None
    calibration: str = "absmax"
    requantized: bool = False
    subtract_mean: bool = False

    def __post_init__(self):
        row = find_format(self.format)
        object.__setattr__(self, "format", row)
        one_scale = calibrate.parse(self.calibration).method == "fixed"
        block = (None if one_scale else row.block) if self.block is None else self.block
        object.__setattr__(self, "block", None if block is None else _sizes(block))
        check_rounding(self.rounding)
        if self.rounding == "stochastic":
            check_stochastic(row)
        if self.rounding == "ms_eden":
            self._check_eden()
        if self.delayed is not None and not isinstance(self.delayed, Delayed):
            raise TypeError(f"`delayed` of a Cast must be a Delayed or None, not {self.delayed!r}")
        if self.delayed is not None and (self.rotation is not None or self.calibration != "absmax" or row.pow2):
            raise ValueError(
                "delayed scaling uses the amax of the tensor: it takes no `rotation`, no `pow2` and only "
                f"calibration='absmax', not {self}"
            )
        if self.delayed is not None and (any(self.block_2d) or row.scale != "float32" or not row.is_float):
            raise ValueError(
                f"delayed scaling needs a float format with one float32 scale per tensor, such as fp8_e4m3, not {self}"
            )
        for name in ("requantized", "subtract_mean"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"`{name}` of a Cast must be True or False, not {getattr(self, name)!r}")
        if self.rotation is not None and self.rotation.axis != -1:
            raise ValueError(
                "the `rotation` of a Cast is along the contracting dim, whichever axis that is; leave `axis` of the "
                f"Hadamard at -1 instead of {self.rotation.axis}"
            )
        if self.delayed is not None and self.subtract_mean:
            raise ValueError(
                "delayed scaling uses the amax of the tensor itself, not that of its differences to a mean; drop "
                f"`delayed` or `subtract_mean` of {self}"
            )

    def _check_eden(self) -> None:
        free, contracting = self.block_2d
        reason = eden.unsupported(self.format, calibrate.parse(self.calibration), self.rotation, contracting, (free,))
        if reason is None and self.rotation is not None and not self.rotation.draws_signs:
            reason = "is unbiased over new signs in each step: it needs a rotation such as Hadamard(128, mask=None)"
        if reason is not None:
            raise ValueError(f"`rounding` 'ms_eden' of a Cast {reason}")

    @property
    def block_2d(self) -> tuple[int, int]:
        """(free, contracting) elements that share a scale; 0 is a whole dim."""
        if self.block is None:
            return (0, 0)
        free, contracting = (1, *self.block)[-2:]
        return free, contracting

    @property
    def tile(self) -> tuple[int, int]:
        """The old name of `block_2d`."""
        deprecated.warn("`Cast.tile` was renamed to `block_2d`", frames=1)
        return self.block_2d

    @property
    def is_per_tensor(self) -> bool:
        return self.block_2d == (0, 0)

    @property
    def has_blocks_or_rotation(self) -> bool:
        """Whether blocks or a rotation divide an axis into groups of elements."""
        return any(b > 1 for b in self.block_2d) or self.rotation is not None

    @property
    def draws_random_numbers(self) -> bool:
        """Whether rounding, or the signs of a rotation, need a key."""
        return self.rounding != "nearest" or (self.rotation is not None and self.rotation.draws_signs)

    @property
    def clips(self) -> bool:
        """Whether elements may saturate: by calibration, or because delayed scaling uses the amax of earlier steps."""
        parsed = calibrate.parse(self.calibration)
        return (
            self.delayed is not None
            or parsed.method not in ("absmax", "minmax")
            or (bool(parsed.values) and parsed.values[0] < 1)
        )

    def __str__(self) -> str:
        words = [self.format.name]
        if not self.is_per_tensor:
            words.append("×".join("all" if b == 0 else str(b) for b in self.block_2d))
        words += [self.rounding] if self.rounding != "nearest" else []
        words += [f"hadamard{self.rotation.size}"] if self.rotation else []
        words += ["requantised"] if self.requantized else []
        words += [f"delayed({self.delayed.length})"] if self.delayed else []
        words += [self.calibration] if self.calibration != "absmax" else []
        words += ["mean"] if self.subtract_mean else []
        return " ".join(words)


def _sizes(block: Any) -> tuple[int, ...]:
    entries = block if isinstance(block, (tuple, list)) else (block,)
    are_sizes = [isinstance(b, (int, np.integer)) and not isinstance(b, bool) and b >= 0 for b in entries]
    if len(entries) not in (1, 2) or not all(are_sizes):
        raise ValueError(
            f"`block` of a Cast must be (free, contracting) or (contracting,), sizes of at least 1 or 0, not {block!r}"
        )
    return tuple(int(b) for b in entries)


@dataclasses.dataclass(frozen=True)
class Gemm:
    """The casts of the two operands of a matmul; None leaves that operand unquantised."""

    lhs: Cast | None = None
    rhs: Cast | None = None

    def __post_init__(self):
        for cast in (self.lhs, self.rhs):
            if cast is not None and not isinstance(cast, Cast):
                raise TypeError(f"a Gemm takes two Casts or None, not {cast!r}; write Cast({cast!r})")
        left, right = (None if c is None else c.rotation for c in (self.lhs, self.rhs))
        if left != right:
            raise ValueError(f"both operands of a Gemm must have the same rotation, not {left} and {right}")


@hash_once
@dataclasses.dataclass(frozen=True)
class Recipe:
    """The casts of fwd, dgrad and wgrad; None for dgrad or wgrad is the straight-through estimator.

    amax_scope: for a scale that covers a whole axis or tensor which is sharded along explicit mesh axes, by `specs` or
        in a shard_map: "global" all-reduces the amax, so that codes are bit-identical to single-device quantisation,
        except of differences to a mean, which depends on the order of its sum;
        "local" uses the amax of each shard, without a collective, unless codes of several shards are gathered.

    >>> mine = dataclasses.replace(FP8_CURRENT, name="exact_wgrad", wgrad=Gemm())
    >>> print(mine)
    exact_wgrad
      fwd    x fp8_e4m3      w fp8_e4m3
      dgrad  g fp8_e5m2      w fp8_e4m3
      wgrad  x unquantised      g unquantised
    """

    name: str
    fwd: Gemm
    dgrad: Gemm | None = None
    wgrad: Gemm | None = None
    amax_scope: str = "global"

    def __post_init__(self):
        if self.amax_scope not in ("global", "local"):
            raise ValueError(f"`amax_scope` {self.amax_scope!r} is not known; use 'global' or 'local'")
        for matmul in GEMM_OPERANDS:
            gemm = getattr(self, matmul)
            if not isinstance(gemm, Gemm) and (gemm is not None or matmul == "fwd"):
                raise TypeError(f"`{matmul}` of a Recipe must be a Gemm, not {gemm!r}")
        self._check_requantized()
        for tensor in "xwg":
            delayed = {cast for _, name, cast in self.casts() if name == tensor and cast.delayed is not None}
            if len(delayed) > 1:
                names = " and ".join(sorted(map(str, delayed)))
                raise ValueError(f"{tensor} of {self.name} has one amax history, but two delayed casts: {names}")
        self._check_straight_through()
        _check_means(self)

    def _check_straight_through(self) -> None:
        for matmul, clipped, multiplied in (("dgrad", "x", "w"), ("wgrad", "w", "x")):
            if getattr(self, matmul) is not None:
                continue
            forward = dict(zip("xw", (self.fwd.lhs, self.fwd.rhs), strict=True))
            cast = forward[clipped]
            if cast is not None and cast.clips and cast.rotation is not None:
                raise ValueError(
                    f"{matmul} of {self.name} is straight-through, but {cast} clips elements after the rotation, which "
                    "gives no mask of the unrotated ones; drop the rotation or use calibration='absmax'"
                )
            cast = forward[multiplied]
            if cast is not None and cast.rotation is not None and cast.rotation.draws_signs:
                raise ValueError(
                    f"{matmul} of {self.name} is straight-through and multiplies by the dequantised {multiplied} of "
                    f"fwd, but the signs of its rotation are drawn and not stored; use a fixed `mask` there, or "
                    f"{matmul}=Gemm() for an unquantised {matmul}"
                )

    def _check_requantized(self) -> None:
        forward = dict(zip("xw", (self.fwd.lhs, self.fwd.rhs), strict=True))
        for matmul, tensor, cast in self.casts():
            if not cast.requantized:
                continue
            of_forward = forward.get(tensor)
            if matmul == "fwd" or of_forward is None:
                raise ValueError(
                    f"{tensor} of {matmul} in {self.name} is `requantized`, which needs a forward cast of the same "
                    "tensor: it is for x of wgrad and w of dgrad, if fwd casts them"
                )
            if cast.delayed != of_forward.delayed:
                raise ValueError(
                    f"{tensor} of {matmul} in {self.name} is `requantized` from the operand of fwd, so both casts need "
                    f"the same `delayed`, not {cast.delayed} and {of_forward.delayed}"
                )
            if of_forward.rotation is not None and of_forward.rotation.draws_signs:
                raise ValueError(
                    f"{tensor} of {matmul} in {self.name} is `requantized`, but the signs of its forward rotation are "
                    "not stored; use a fixed `mask` there"
                )

    def casts(self) -> Iterator[tuple[str, str, Cast]]:
        """Yields (matmul, tensor, cast) for each operand that is quantised."""
        for matmul, tensors in GEMM_OPERANDS.items():
            gemm = getattr(self, matmul)
            for tensor, cast in zip(tensors, (gemm.lhs, gemm.rhs) if gemm else (), strict=False):
                if cast is not None:
                    yield matmul, tensor, cast

    @functools.cached_property
    def delayed(self) -> dict[str, Cast]:
        """{tensor: cast} for the tensors, of x, w and g, that use delayed scaling."""
        return {tensor: cast for _, tensor, cast in self.casts() if cast.delayed is not None}

    @functools.cached_property
    def has_blocks_or_rotation(self) -> bool:
        """Whether blocks or a rotation of any cast divide an axis into groups of elements."""
        return any(cast.has_blocks_or_rotation for _, _, cast in self.casts())

    @functools.cached_property
    def mean_subtracted(self) -> frozenset[tuple[str, str]]:
        """The operands whose mean is subtracted before the cast, as (matmul, tensor)."""
        return frozenset((matmul, tensor) for matmul, tensor, cast in self.casts() if cast.subtract_mean)

    @functools.cached_property
    def stochastic(self) -> tuple[str, ...]:
        """The operands that use stochastic rounding or draw the signs of a rotation, such as "g of dgrad"."""
        return tuple(f"{tensor} of {matmul}" for matmul, tensor, cast in self.casts() if cast.draws_random_numbers)

    def to_dict(self) -> dict[str, Any]:
        """A dict of plain Python values, without fields at their defaults; `Recipe.from_dict` is the inverse."""
        gemms = {m: _gemm_to_dict(getattr(self, m)) for m in GEMM_OPERANDS if getattr(self, m) is not None}
        scope = {} if self.amax_scope == "global" else {"amax_scope": self.amax_scope}
        return {"name": self.name, **gemms, **scope}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Recipe":
        """The recipe that `to_dict` encoded.

        >>> Recipe.from_dict({"name": "w8", "fwd": {"rhs": {"format": "int8"}}}).fwd.rhs.format
        Format('int8')
        """
        _check_keys("recipe", fields, ("name", *GEMM_OPERANDS, "amax_scope"))
        missing = [name for name in ("name", "fwd") if name not in fields]
        if missing:
            raise ValueError(f"a recipe needs {missing[0]!r}; it has {', '.join(fields) or 'nothing'}")
        gemms = (_gemm_from_dict(fields.get(matmul)) for matmul in GEMM_OPERANDS)
        return cls(fields["name"], *gemms, amax_scope=fields.get("amax_scope", "global"))

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Recipe":
        return cls.from_dict(json.loads(text))

    def __str__(self) -> str:
        rows = [
            (matmul, *(f"{t} {_describe(c)}" for t, c in zip(tensors, (gemm.lhs, gemm.rhs), strict=True)))
            for matmul, tensors in GEMM_OPERANDS.items()
            if (gemm := getattr(self, matmul)) is not None
        ]
        width = max(len(left) for _, left, _ in rows) + 5
        lines = [f"  {matmul:<5}  {left:<{width}} {right}" for matmul, left, right in rows]
        unset = " and ".join(matmul for matmul in GEMM_OPERANDS if getattr(self, matmul) is None)
        lines += [f"  {unset} straight through"] if unset else []
        lines += ["  amax of each shard"] if self.amax_scope == "local" else []
        return "\n".join([self.name, *lines])


def _check_means(recipe: Recipe) -> None:
    """Raises ValueError unless `subtract_mean` is set for x or g only, and alike in both matmuls that quantise it."""
    if not recipe.mean_subtracted:
        return
    if any(tensor == "w" for _, tensor in recipe.mean_subtracted):
        raise ValueError(f"w of {recipe.name} has `subtract_mean`, but w has no tokens to average; set it for x or g")
    missing = [matmul for matmul in ("dgrad", "wgrad") if getattr(recipe, matmul) is None]
    if missing:
        raise ValueError(
            f"{missing[0]} of {recipe.name} is straight-through, which `subtract_mean` does not support; pass Gemm() "
            f"as `{missing[0]}` to leave its operands unquantised"
        )
    for tensor in "xg":
        choices = {matmul: cast.subtract_mean for matmul, name, cast in recipe.casts() if name == tensor}
        if len(set(choices.values())) > 1:
            having, lacking = sorted(choices, key=lambda matmul: not choices[matmul])
            raise ValueError(
                f"{tensor} of {recipe.name} has `subtract_mean` in {having} and not in {lacking}; set it in both"
            )


def _describe(cast: Cast | None) -> str:
    return "unquantised" if cast is None else str(cast)


def _gemm_to_dict(gemm: Gemm) -> dict[str, Any]:
    operands = {"lhs": gemm.lhs, "rhs": gemm.rhs}
    return {name: _to_dict(cast) for name, cast in operands.items() if cast is not None}


def _gemm_from_dict(fields: Mapping[str, Any] | None) -> Any:
    if fields is None:
        return None
    _check_keys("matmul", fields, ("lhs", "rhs"))
    return Gemm(*(None if fields.get(name) is None else _cast_from_dict(fields[name]) for name in ("lhs", "rhs")))


def _cast_from_dict(fields: Mapping[str, Any]) -> Cast:
    parsers = {"format": _format_from_dict, "rotation": _from_fields(Hadamard), "delayed": _from_fields(Delayed)}
    known = [f.name for f in dataclasses.fields(Cast)]
    _check_keys("cast", fields, known)
    if "format" not in fields:
        raise ValueError(f"a cast needs a 'format'; it has {', '.join(fields) or 'nothing'}")
    present = {name: value for name, value in fields.items() if value is not None}
    return Cast(**{name: parsers.get(name, lambda v: v)(value) for name, value in present.items()})


def _format_from_dict(value: str | Mapping[str, Any]) -> Format:
    if isinstance(value, str):
        return find_format(value)
    parsers: dict[str, Any] = {"block": tuple, "codebook": tuple, "grids": tuple, "quirks": _from_fields(Quirks)}
    _check_keys("format", value, [f.name for f in dataclasses.fields(Format)])
    fields: dict[str, Any] = {k: parsers[k](v) if k in parsers and v is not None else v for k, v in value.items()}
    return Format(**fields)


def _from_fields(kind: type):
    return lambda fields: kind(**fields)


def _to_dict(value: Any) -> Any:
    """A dataclass as a dict of the fields that differ from their defaults; a row of FORMATS as its name."""
    if isinstance(value, Format) and FORMATS.get(value.name) == value:
        return value.name
    if isinstance(value, tuple):
        return list(value)
    if not dataclasses.is_dataclass(value):
        return value
    changed = {}
    for field in dataclasses.fields(value):
        current, default = getattr(value, field.name), field.default
        if isinstance(value, Cast) and field.name == "block":
            default = Cast(value.format, calibration=value.calibration).block
        if current != default:
            changed[field.name] = _to_dict(current)
    return changed


def _check_keys(kind: str, fields: Mapping[str, Any], known: tuple[str, ...] | list[str]) -> None:
    if not isinstance(fields, Mapping):
        raise TypeError(f"a {kind} must be written as a mapping with {', '.join(known)}, not {fields!r}")
    unknown = [name for name in fields if name not in known]
    if unknown:
        raise ValueError(f"a {kind} has no field {unknown[0]!r}; it takes {', '.join(known)}")


def of_tensors(name: str, x: Cast, w: Cast, g: Cast) -> Recipe:
    """A recipe that quantises each tensor in the same way in both of its matmuls."""
    return Recipe(name, Gemm(x, w), Gemm(g, w), Gemm(x, g))


def _delayed(format: str) -> Cast:
    return Cast(FORMATS[format], delayed=Delayed())


_E4M3, _E5M2 = Cast(FORMATS["fp8_e4m3"]), Cast(FORMATS["fp8_e5m2"])
_E4M3_1X128, _E4M3_128X128 = (Cast(FORMATS["fp8_e4m3"], block) for block in ((1, 128), (128, 128)))
_MX = Cast(FORMATS["mxfp8"])
_NV = Cast(FORMATS["nvfp4"])
_NV_16X16 = Cast(FORMATS["nvfp4"], (16, 16))
_NV_ROTATED = dataclasses.replace(_NV, rotation=Hadamard())
_INT8 = Cast(FORMATS["int8"])
_INT8_1X128 = Cast(FORMATS["int8"], (1, 128))
_INT8_ROTATED = dataclasses.replace(_INT8_1X128, rotation=Hadamard())
_INT4_1X128 = Cast(FORMATS["int4"], (1, 128))


def _stochastic(cast: Cast) -> Cast:
    return dataclasses.replace(cast, rounding="stochastic")


def _four_over_six(cast: Cast) -> Cast:
    return dataclasses.replace(cast, format=dataclasses.replace(cast.format, name="nvfp4_4o6", search="four_over_six"))


# Quartet II, arXiv 2601.22813. Block scales have headroom: four-over-six and MS-EDEN increase them. The target of
# MS-EDEN's block amax is slightly above the largest code, where a clipped maximum costs less than a coarser scale.
_QUARTET_FORWARD = Cast(
    dataclasses.replace(FORMATS["nvfp4"], name="nvfp4_4o6_256", search="four_over_six", scale_max=256.0)
)
_EDEN = Cast(
    dataclasses.replace(FORMATS["nvfp4"], name="nvfp4_eden", target=6 * (16 / 17) / 0.93, scale_max=256.0),
    rounding="ms_eden",
    rotation=Hadamard(128, mask=None),
)
_IF4_EDEN = dataclasses.replace(_EDEN, format=dataclasses.replace(FORMATS["if4"], name="if4_eden", scale_max=256.0))
_EDEN_AGAIN = dataclasses.replace(_EDEN, requantized=True)
_UNIFORM_ROTATED = Cast(FORMATS["nvint4"], rotation=Hadamard())


def _without_mean(cast: Cast) -> Cast:
    return dataclasses.replace(cast, subtract_mean=True)


def _plus(name: str, format: str, backward: Cast) -> Recipe:
    """Scales of least squared error in fwd, MS-EDEN in the backward pass, and differences to the mean for x.

    Operands of the backward pass are cast from x and w themselves, not from the operands of fwd: they are saved at 4
    bits either way. Their scales are not searched and g keeps its mean, because most of the loss gap is that of the
    forward casts.
    """
    forward = Cast(dataclasses.replace(FORMATS[format], name=f"{format}_search", search="scales", scale_max=256.0))
    return Recipe(
        name,
        fwd=Gemm(_without_mean(forward), forward),
        dgrad=Gemm(backward, backward),
        wgrad=Gemm(_without_mean(backward), backward),
    )


FP8_CURRENT = of_tensors("fp8_current", _E4M3, _E4M3, _E5M2)
FP8_DELAYED = of_tensors("fp8_delayed", _delayed("fp8_e4m3"), _delayed("fp8_e4m3"), _delayed("fp8_e5m2"))
FP8_BLOCK = of_tensors("fp8_block", _E4M3_1X128, _E4M3_128X128, _E4M3_1X128)
MXFP8 = of_tensors("mxfp8", _MX, _MX, _MX)
NVFP4 = Recipe(
    "nvfp4",
    fwd=Gemm(_NV, _NV_16X16),
    dgrad=Gemm(_stochastic(_NV), _NV_16X16),
    wgrad=Gemm(_NV_ROTATED, _stochastic(_NV_ROTATED)),
)
NVFP4_FOUR_OVER_SIX = Recipe(
    "nvfp4_four_over_six",
    fwd=Gemm(_four_over_six(_NV), _four_over_six(_NV_16X16)),
    dgrad=Gemm(_stochastic(_NV), _four_over_six(_NV_16X16)),
    wgrad=NVFP4.wgrad,
)
QUARTET_II = Recipe(
    "quartet_ii",
    fwd=Gemm(_QUARTET_FORWARD, _QUARTET_FORWARD),
    dgrad=Gemm(_EDEN, _EDEN_AGAIN),
    wgrad=Gemm(_EDEN_AGAIN, _EDEN),
)
# Averis, arXiv 2603.10444: NVIDIA's recipe with the means over tokens of x and g subtracted before their casts.
AVERIS = Recipe(
    "averis",
    fwd=Gemm(_without_mean(_NV), _NV_16X16),
    dgrad=Gemm(_without_mean(_stochastic(_NV)), _NV_16X16),
    wgrad=Gemm(_without_mean(_NV_ROTATED), _without_mean(_stochastic(_NV_ROTATED))),
)
# UFP4, arXiv 2606.20381: a uniform grid, which gains from a rotation, in all matmuls.
UFP4 = Recipe(
    "ufp4",
    fwd=Gemm(_UNIFORM_ROTATED, _UNIFORM_ROTATED),
    dgrad=Gemm(_stochastic(_UNIFORM_ROTATED), _UNIFORM_ROTATED),
    wgrad=Gemm(_UNIFORM_ROTATED, _stochastic(_UNIFORM_ROTATED)),
)
NVFP4_PLUS = _plus("nvfp4_plus", "nvfp4", _EDEN)
IF4 = _plus("if4", "if4", _IF4_EDEN)
INT8 = of_tensors("int8", _INT8, _INT8, _stochastic(_INT8))
INT8_BLOCK = Recipe(
    "int8_block",
    fwd=Gemm(_INT8_ROTATED, _INT8_ROTATED),
    dgrad=Gemm(_stochastic(_INT8_1X128), _INT8_1X128),
    wgrad=Gemm(_INT8_1X128, _stochastic(_INT8_1X128)),
)
INT8_QAT = Recipe("int8_qat", Gemm(_INT8, _INT8))
FP8_QAT = Recipe("fp8_qat", Gemm(_E4M3, _E4M3))
W8A16_QAT = Recipe("w8a16_qat", Gemm(None, _INT8))
W4A16_QAT = Recipe("w4a16_qat", Gemm(None, _INT4_1X128))
W4A8_QAT = Recipe("w4a8_qat", Gemm(_INT8, _INT4_1X128))
UNQUANTISED = Recipe("unquantised", Gemm(), Gemm(), Gemm())  # not in RECIPES, as it quantises nothing

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
            NVFP4_PLUS,
            QUARTET_II,
            AVERIS,
            UFP4,
            IF4,
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
    """Returns `recipe` itself, or the row of RECIPES with that name.

    >>> find_recipe("mxfp8") is MXFP8
    True
    """
    return row_of("recipe", recipe, Recipe, RECIPES, "RECIPES")
