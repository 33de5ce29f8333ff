"""Prints results of commands: as text, or with `--json` as JSON."""

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any


def show(options: argparse.Namespace, text: str, record: Mapping[str, Any]) -> None:
    """Prints the text, or the record with `--json`."""
    print(as_json(record) if options.json else text)


def as_json(record: Mapping[str, Any]) -> str:
    return json.dumps(record, indent=1)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Returns one line per row, with columns padded to equal widths."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
