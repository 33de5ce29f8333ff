"""Serialisation of ScaledArray by jax.export and Flax: static fields become JSON, arrays are stored as arrays.

* `jax.export` stores the static fields with an exported function, which another process can load.
* Flax's msgpack (`flax.serialization`) saves a dict of the arrays by name and the JSON, under "static", as a uint8
  array, so that all leaves of a state dict are arrays. As everywhere in Flax, types and static fields of the restored
  object are those of the target. The saved static fields must equal them, because codes decoded with another format or
  rotation would be silently wrong.

Importing scaledot must not import Flax, and serialisation must not depend on the order of imports: `when_imported`
registers with Flax once it is imported. Orbax needs no registration; see `scaledot.orbax`.
"""

import dataclasses
import functools
import importlib.abc
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, TypeVar

import jax
import jax.export
import ml_dtypes
import numpy as np

from scaledot.formats import Format, Quirks
from scaledot.numerics.hadamard import Hadamard

VERSION = 1  # of the JSON; adding a field whose default keeps the meaning of older files needs no new version
Kind = TypeVar("Kind", bound=type)
Record = dict[str, Any]


def register(kind: Kind) -> Kind:
    """Registers a pytree dataclass, whose static fields are the arguments of `to_json`, with jax.export and Flax."""
    static = [field.name for field in dataclasses.fields(kind) if field.metadata.get("static")]
    jax.export.register_pytree_node_serialization(
        kind,
        serialized_name=f"scaledot.{kind.__name__}",
        serialize_auxdata=lambda aux_data: to_json(**dict(zip(static, aux_data, strict=True))),
        deserialize_auxdata=from_json,
        from_children=lambda aux_data, children: kind(*children, **aux_data),
    )
    when_imported("flax.serialization", lambda: _register_with_flax(kind))
    return kind


def to_json(format: Format, block: tuple[int, ...], dtype: Any, rotation: Hadamard | None) -> bytes:
    """The static fields of a ScaledArray as JSON."""
    record = {
        "version": VERSION,
        "format": dataclasses.asdict(format),
        "block": block,
        "dtype": np.dtype(dtype).name,
        "rotation": None if rotation is None else dataclasses.asdict(rotation),
    }
    return json.dumps(record, default=lambda number: number.item()).encode()  # numpy scalars


def from_json(text: bytes) -> Record:
    """The inverse of `to_json`: the static fields by name."""
    return from_record(json.loads(text))


def from_record(record: Record) -> Record:
    """The static fields of the parsed JSON."""
    if record["version"] != VERSION:
        raise ValueError(
            f"a ScaledArray was saved in version {record['version']}; this scaledot reads version {VERSION}"
        )
    format, rotation = record["format"], record["rotation"]
    quirks = _rebuilt(Quirks, format.pop("quirks"))
    return {
        "format": _rebuilt(Format, {**format, "quirks": quirks}),
        "block": tuple(record["block"]),
        "dtype": np.dtype(getattr(ml_dtypes, record["dtype"], record["dtype"])),
        "rotation": None if rotation is None else _rebuilt(Hadamard, rotation),
    }


def _rebuilt(kind: type, record: Record) -> Any:
    unknown = sorted(record.keys() - {field.name for field in dataclasses.fields(kind)})
    if unknown:
        raise ValueError(f"a saved {kind.__name__} has fields that this scaledot does not have: {', '.join(unknown)}")
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in record.items()})


def _register_with_flax(kind: type) -> None:
    from flax import serialization

    def to_state_dict(q: Any) -> Record:
        state = {name: serialization.to_state_dict(array) for name, array in _arrays(q).items()}
        return {**state, "static": np.frombuffer(to_json(**static_fields(q)), np.uint8)}

    def from_state_dict(target: Any, state: Any) -> Any:
        mismatches = "; ".join(_mismatches(target, state))
        if mismatches:
            raise ValueError(f"cannot restore {serialization.current_path()!r} as {target!r}: {mismatches}")
        arrays = {n: serialization.from_state_dict(a, state[n], name=n) for n, a in _arrays(target).items()}
        return dataclasses.replace(target, **arrays)

    serialization.register_serialization_state(kind, to_state_dict, from_state_dict)


def static_fields(q: Any) -> Record:
    return {field.name: getattr(q, field.name) for field in dataclasses.fields(q) if field.metadata.get("static")}


def _arrays(q: Any) -> Record:
    fields = {field.name: getattr(q, field.name) for field in dataclasses.fields(q) if not field.metadata.get("static")}
    return {name: value for name, value in fields.items() if value is not None}


def _mismatches(target: Any, state: Any) -> Iterator[str]:
    """Yields a description of each difference between a saved state dict and the target."""
    if not isinstance(state, dict) or "static" not in state:
        yield f"the saved object is not a {type(target).__name__}"
        return
    yield from static_differences(np.asarray(state["static"]).tobytes(), target)
    saved, expected = state.keys() - {"static"}, _arrays(target).keys()
    if saved != expected:
        yield f"the arrays {', '.join(sorted(saved))} were saved, {', '.join(sorted(expected))} are expected"


def static_differences(saved: bytes, target: Any) -> Iterator[str]:
    """Yields a description of each static field of `target` that differs from the saved JSON."""
    yield from _differences(from_json(saved), static_fields(target))


def _differences(saved: Any, target: Any, name: str = "") -> Iterator[str]:
    """Yields a description of each field, or item, in which two values differ."""
    if dataclasses.is_dataclass(saved) and type(saved) is type(target):
        saved, target = vars(saved), vars(target)
    if isinstance(saved, dict):
        for key, value in saved.items():
            yield from _differences(value, target[key], f"{name}.{key}" if name else key)
    elif saved != target:
        yield f"`{name}` was {saved!r} when saved and is {target!r} now"


def when_imported(name: str, callback: Callable[[], None]) -> None:
    """Calls `callback` now if the module is imported, else at the end of its import."""
    if name in sys.modules:
        callback()
    else:
        sys.meta_path.insert(0, _ImportHook(name, callback))


class _ImportHook(importlib.abc.MetaPathFinder):
    """Delegates to the other finders, and calls back after the module has been executed."""

    def __init__(self, name: str, callback: Callable[[], None]):
        self.name, self.callback, self.searching = name, callback, False

    def find_spec(self, fullname: str, path=None, target=None):
        if fullname != self.name or self.searching:
            return None
        self.searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.searching = False
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(self._run, spec.loader.exec_module)
        return spec

    def _run(self, exec_module: Callable[[ModuleType], None], module: ModuleType) -> None:
        exec_module(module)
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self.callback()
