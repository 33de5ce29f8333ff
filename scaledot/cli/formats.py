"""`scaledot formats`: prints the table of formats, or one of them. This module does not import jax."""

import argparse
import dataclasses
from typing import Any

from scaledot.cli.arguments import add_json
from scaledot.cli.output import aligned, show
from scaledot.formats import FORMATS, Format, find_format, rules_of

EXAMPLES = (
    "scaledot formats",
    "scaledot formats nvfp4",
    "scaledot formats --json",
)
TITLES = ("name", "element", "scale", "block", "scale rule", "bits per element", "max")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="show this format (default: list all of them)")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    if options.name is None:
        rows = [TITLES, *map(_cells, FORMATS.values())]
        show(options, aligned(rows), {"formats": [record(format) for format in FORMATS.values()]})
    else:
        format = find_format(options.name)
        show(options, f"{format.name}\n{aligned(_details(format))}", record(format))
    return 0


def record(format: Format) -> dict[str, Any]:
    """Returns the fields and derived properties of a format, for JSON."""
    derived = {
        "bits": format.bits,
        "bits_per_element": format.bits_per_element,
        "max": format.max,
        "code_dtype": str(format.code_dtype),
        "rules": rules_of(format),
    }
    return dataclasses.asdict(format) | derived


def _cells(format: Format) -> tuple[str, ...]:
    return (
        format.name,
        format.element,
        _scale(format),
        _block(format),
        format.rule,
        f"{format.bits_per_element:g}",
        f"{format.max:g}",
    )


def _details(format: Format) -> list[tuple[str, str]]:
    """Returns (title, value) rows; codes and codebook only for the formats that have them."""
    rows: list[tuple[str, str]] = list(zip(TITLES[1:], _cells(format)[1:], strict=True))
    rows.append(("stored as", f"{format.code_dtype}, {format.bits} bits packed"))
    rows.append(("scale rules", ", ".join(rules_of(format))))
    if format.is_integer or format.is_unsigned:
        rows.append(("codes", f"{format.integer_range[0]} to {format.integer_range[1]}"))
    if format.grids is not None:
        rows.append(("grids", f"{' or '.join(format.grids)}, by the sign of the block scale"))
    if format.codebook is not None:
        rows.append(("codebook", ", ".join(f"{value:.4g}" for value in format.codebook)))
    return [(f"  {title}", value) for title, value in rows]


def _scale(format: Format) -> str:
    return f"{format.scale}, float32 per tensor" if format.two_level else format.scale


def _block(format: Format) -> str:
    if format.block is None:
        return "tensor"
    return "×".join("axis" if size == 0 else str(size) for size in format.block)
