"""Whether the fields of a Format fit together, and a calibration fits a format, with errors that say what would."""

import dataclasses

import numpy as np

from scaledot.formats import Format, rules_of
from scaledot.numerics import calibrate
from scaledot.numerics.scale_search import OFFSETS


def checked_format(format: Format, rule: str | None = None) -> Format:
    """Returns the format, with scale rule `rule` if one is passed; raises if its fields contradict each other."""
    allowed = rules_of(format)
    if rule is not None:
        format = dataclasses.replace(format, rule=rule)
    if format.rule not in allowed:
        raise ValueError(
            f"`rule` {format.rule!r} does not apply to {format.scale} scales; "
            f"{format.name} takes one of {', '.join(allowed)}"
        )
    _check_search(format)
    if (format.is_integer or format.is_unsigned) and not 2 <= format.bits <= 8:
        raise ValueError(f"`element` {format.element!r} of {format.name} is not known; integers have 2 to 8 bits")
    if format.grids is not None:
        _check_grids(format, format.grids)
    if format.codebook is not None:
        _check_codebook(format, format.codebook)
    if format.bound not in ("full", "half"):
        raise ValueError(f"`bound` {format.bound!r} of {format.name} is not known; use 'full' or 'half'")
    _check_magnitudes(format)
    if format.two_level and format.scale != "float8_e4m3fn":
        raise ValueError(f"{format.name} has two levels, which needs float8_e4m3fn block scales, not {format.scale}")
    return format


def _check_magnitudes(format: Format) -> None:
    """Raises unless `target` and `scale_max` are numbers in their ranges."""
    for name in ("target", "scale_max"):
        value = getattr(format, name)
        if not isinstance(value, int | float | np.number) and (value is not None or name == "scale_max"):
            raise TypeError(f"`{name}` of {format.name} must be a number, not {value!r}")
    if format.target is not None and not 0 < format.target <= 2 * format.largest_code:
        raise ValueError(
            f"`target` {format.target} of {format.name} must be above 0 and at most twice the largest code, "
            f"{format.largest_code:g}"
        )
    if not 0 < format.scale_max <= 448 or (format.scale_max != 448 and not format.two_level):
        raise ValueError(
            f"`scale_max` {format.scale_max} of {format.name} must be above 0 and at most 448, the largest E4M3, and "
            "needs a two-level format"
        )


def _check_search(format: Format) -> None:
    if format.search not in (None, "four_over_six", "scales"):
        raise ValueError(
            f"`search` {format.search!r} of {format.name} is not known; use 'four_over_six', 'scales' or None"
        )
    if format.search is None:
        return
    searched = ("float4_e2m1fn",) if format.search == "four_over_six" else tuple(OFFSETS)
    elements = format.grids or (format.element,)
    if format.scale != "float8_e4m3fn" or not set(elements) <= set(searched):
        raise ValueError(
            f"`search` {format.search!r} is for float8_e4m3fn block scales of {' or '.join(searched)} elements; "
            f"{format.name} has {format.scale} scales of {format.element}"
        )


def _check_grids(format: Format, grids: tuple[str, ...]) -> None:
    if len(grids) != 2 or len(set(grids) & set(OFFSETS)) != 2 or format.element != "uint4":
        raise ValueError(
            f"`grids` {grids} of {format.name} must be two of {', '.join(OFFSETS)}, with uint4 codes, not "
            f"{format.element}"
        )
    if format.scale != "float8_e4m3fn" or format.codebook is not None or format.target is not None:
        raise ValueError(
            f"`grids` of {format.name} need float8_e4m3fn block scales, whose sign says which grid a block uses, not "
            f"{format.scale}, and neither `codebook` nor `target`"
        )


def _check_codebook(format: Format, codebook: tuple[float, ...]) -> None:
    if not format.element.startswith("uint"):
        raise ValueError(f"`codebook` of {format.name} needs unsigned codes, not {format.element}")
    if not 2 <= len(codebook) <= 2**format.bits or not np.all(np.diff(codebook) > 0):
        raise ValueError(f"`codebook` of {format.name} must hold 2 to {2**format.bits} values in rising order")


def checked_calibration(format: Format, text: str) -> calibrate.Calibration:
    """The calibration that `text` names; raises if it does not fit the format."""
    parsed = calibrate.parse(text)
    is_searched = format.search is not None or format.grids is not None
    if is_searched and parsed != calibrate.Calibration("absmax"):
        raise ValueError(f"`calibration` {text!r} has no effect on {format.name}, whose scales are searched; drop it")
    if parsed.is_range and not (format.is_integer and format.scale in ("float32", "input")):
        raise ValueError(
            f"`calibration` {text!r} computes a zero point, which {format.name} cannot hold; "
            "use an integer format with float32 scales, or 'absmax'"
        )
    return parsed
