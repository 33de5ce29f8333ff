"""Parses JSON of untrusted files, within bounds of memory and time."""

import json
import math
from collections import Counter
from os import PathLike
from pathlib import Path
from typing import Any

from scaledot.checkpoint.errors import CheckpointError, quoted

MAX_BYTES = 100_000_000  # the limit of the safetensors package for a header
MAX_CONTAINERS = 3_000_000  # lists and objects; a tensor of a header takes 3
MAX_ITEMS = 10_000_000
MAX_DEPTH = 64  # so that functions that recurse over a value, repr among them, stay far from Python's limit


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
        value = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_without_duplicates,
            parse_float=_finite,
            parse_constant=_no_constant,
        )
    except UnicodeDecodeError as error:
        raise CheckpointError(path, f"{what} is not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise CheckpointError(path, f"{what} is nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(path, f"{what} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(path, f"{what} must be a JSON object, not {type(value).__name__}")
    if not _is_shallow(value):
        raise CheckpointError(path, f"{what} is nested more than {MAX_DEPTH} levels deep")
    if b"\\ud" in text.lower() and not _is_unicode(value):
        raise CheckpointError(path, f"{what} has an escaped surrogate without its pair, which is no character")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """Parses a JSON file."""
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise CheckpointError(path, f"the file has {size} bytes; at most {MAX_BYTES} are supported")
    with path.open("rb") as file:
        return parse_object(file.read(size), path, "the file")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        ((duplicate, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"duplicate key {quoted(duplicate)}")
    return result


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{quoted(text)} is out of the range of float64")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


def _is_shallow(value: dict[str, Any]) -> bool:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        children = (container.values() if type(container) is dict else container for container in level)
        level = [child for some in children for child in some if type(child) in (dict, list)]
        if not level:
            return True
    return False


def _is_unicode(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
