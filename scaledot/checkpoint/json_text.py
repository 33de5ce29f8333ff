"""Parses JSON of untrusted files, within bounds of memory and time."""

import json
from os import PathLike
from pathlib import Path
from typing import Any

from scaledot.checkpoint.errors import CheckpointError, quoted

MAX_BYTES = 100_000_000  # the limit of the safetensors package for a header
MAX_CONTAINERS = 3_000_000  # lists and objects; a tensor of a header takes 3
MAX_ITEMS = 10_000_000


def parse_object(text: bytes, path: str | PathLike[str], what: str) -> dict[str, Any]:
    """Parses a JSON object; raises CheckpointError for anything else, duplicate keys and texts past the bounds.

    what: what the text is, for error messages, such as "the header".
    """
    containers, items = text.count(b"[") + text.count(b"{"), text.count(b",")
    for count, limit, unit in (
        (len(text), MAX_BYTES, "bytes"),
        (containers, MAX_CONTAINERS, "lists and objects"),
        (items, MAX_ITEMS, "commas"),
    ):
        if count > limit:
            raise CheckpointError(path, f"{what} has {count} {unit}; at most {limit} are supported")
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_without_duplicates, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise CheckpointError(path, f"{what} is not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise CheckpointError(path, f"{what} is nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(path, f"{what} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(path, f"{what} must be a JSON object, not {type(value).__name__}")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """Parses a JSON file."""
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise CheckpointError(path, f"the file has {size} bytes; at most {MAX_BYTES} are supported")
    with path.open("rb") as file:
        return parse_object(file.read(MAX_BYTES + 1), path, "the file")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        duplicate = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"duplicate key {quoted(duplicate)}")
    return result


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")
