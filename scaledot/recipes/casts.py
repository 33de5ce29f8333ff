"""How the operands of a matmul are quantised: Delayed scaling, a Cast of one operand, a Gemm of two Casts."""

import dataclasses
import math
from typing import Any

import numpy as np

from scaledot import deprecated
from scaledot.formats import Format, find_format
from scaledot.numerics import calibrate, eden
from scaledot.numerics.format_checks import checked_calibration, checked_format
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
        row = checked_format(find_format(self.format))
        object.__setattr__(self, "format", row)
        if self.rotation is not None and not isinstance(self.rotation, Hadamard):
            raise TypeError(f"`rotation` of a Cast must be a Hadamard or None, not {self.rotation!r}")
        one_scale = checked_calibration(row, self.calibration).method == "fixed"
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
