"""Casts as dicts of plain Python values, for JSON.

Fields at their defaults are left out, and a row of FORMATS is its name.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from scaledot.formats import FORMATS, Format, Quirks, find_format
from scaledot.numerics.hadamard import Hadamard
from scaledot.recipes.casts import Cast, Delayed, Gemm


def gemm_to_dict(gemm: Gemm) -> dict[str, Any]:
    operands = {"lhs": gemm.lhs, "rhs": gemm.rhs}
    return {name: _to_dict(cast) for name, cast in operands.items() if cast is not None}


def gemm_from_dict(fields: Mapping[str, Any] | None) -> Any:
    if fields is None:
        return None
    check_keys("matmul", fields, ("lhs", "rhs"))
    return Gemm(*(None if fields.get(name) is None else _cast_from_dict(fields[name]) for name in ("lhs", "rhs")))


def _cast_from_dict(fields: Mapping[str, Any]) -> Cast:
    parsers = {
        "format": _format_from_dict,
        "rotation": _from_fields("rotation", Hadamard),
        "delayed": _from_fields("delayed scaling", Delayed),
    }
    known = [f.name for f in dataclasses.fields(Cast)]
    check_keys("cast", fields, known)
    if "format" not in fields:
        raise ValueError(f"a cast needs a 'format'; it has {', '.join(fields) or 'nothing'}")
    present = {name: value for name, value in fields.items() if value is not None}
    return Cast(**{name: parsers.get(name, lambda v: v)(value) for name, value in present.items()})


def _format_from_dict(value: str | Mapping[str, Any]) -> Format:
    if isinstance(value, str):
        return find_format(value)
    check_keys("format", value, [f.name for f in dataclasses.fields(Format)])
    missing = [name for name in ("name", "element") if name not in value]
    if missing:
        raise ValueError(f"a format needs {missing[0]!r}; it has {', '.join(value) or 'nothing'}")
    fields: dict[str, Any] = dict(value)
    if "quirks" in fields:
        fields["quirks"] = _from_fields("quirks record", Quirks)(fields["quirks"])
    return Format(**fields)


def _from_fields(words: str, kind: type) -> Callable[[Any], Any]:
    """Returns a function from a mapping to an instance of a dataclass. words: what it is in error messages."""

    def parse(fields: Any) -> Any:
        check_keys(words, fields, [field.name for field in dataclasses.fields(kind)])
        return kind(**fields)

    return parse


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


def check_keys(kind: str, fields: Mapping[str, Any], known: tuple[str, ...] | list[str]) -> None:
    if not isinstance(fields, Mapping):
        raise TypeError(f"a {kind} must be written as a mapping with {', '.join(known)}, not {fields!r}")
    unknown = [name for name in fields if name not in known]
    if unknown:
        raise ValueError(f"a {kind} has no field {unknown[0]!r}; it takes {', '.join(known)}")
