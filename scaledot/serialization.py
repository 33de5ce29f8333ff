"""Registers ScaledArray with what saves pytrees: its static fields become JSON, its arrays are stored by the saver.

* `jax.export` writes the static fields beside an exported function and reads them back, also in another process.
* Flax's msgpack (`flax.serialization`) saves a dict: the arrays by name, and the JSON under "static" as uint8, so that
  all leaves of a state dict are arrays. As everywhere in Flax, restoring takes types and static fields from the target;
  the saved ones are compared with them, because codes decoded with another format or rotation are silently wrong.

Importing scaledot must not import Flax, and the order of imports must not decide what can be saved: where Flax is not
imported yet, `when_imported` registers after its import. Orbax needs no registration; see `scaledot.orbax`.
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

VERSION = 1  # of the JSON; fields may be added with a default that means what files without them mean
Kind = TypeVar("Kind", bound=type)
Record = dict[str, Any]


def register(kind: Kind) -> Kind:
    """Registers a pytree dataclass with jax.export and Flax; its static fields are those that `_to_json` takes."""
    static = [field.name for field in dataclasses.fields(kind) if field.metadata.get("static")]
    jax.export.register_pytree_node_serialization(
        kind,
        serialized_name=f"scaledot.{kind.__name__}",
        serialize_auxdata=lambda aux_data: _to_json(**dict(zip(static, aux_data, strict=True))),
        deserialize_auxdata=_from_json,
        from_children=lambda aux_data, children: kind(*children, **aux_data),
    )
    when_imported("flax.serialization", lambda: _register_with_flax(kind))
    return kind


def _to_json(format: Format, block: tuple[int, ...], dtype: Any, rotation: Hadamard | None) -> bytes:
    record = {
        "version": VERSION,
        "format": dataclasses.asdict(format),
        "block": block,
        "dtype": np.dtype(dtype).name,
        "rotation": None if rotation is None else dataclasses.asdict(rotation),
    }
    return json.dumps(record, default=lambda number: number.item()).encode()  # numbers of numpy


def _from_json(text: bytes) -> Record:
    record = json.loads(text)
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
        raise ValueError(f"a saved {kind.__name__} has {', '.join(unknown)}, which this scaledot does not know")
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in record.items()})


def _register_with_flax(kind: type) -> None:
    from flax import serialization

    def to_state_dict(q: Any) -> Record:
        state = {name: serialization.to_state_dict(array) for name, array in _arrays(q).items()}
        return {**state, "static": np.frombuffer(_to_json(**_static(q)), np.uint8)}

    def from_state_dict(target: Any, state: Any) -> Any:
        wrong = "; ".join(_mismatches(target, state))
        if wrong:
            raise ValueError(f"cannot restore {serialization.current_path()!r} as {target!r}: {wrong}")
        arrays = {n: serialization.from_state_dict(a, state[n], name=n) for n, a in _arrays(target).items()}
        return dataclasses.replace(target, **arrays)

    serialization.register_serialization_state(kind, to_state_dict, from_state_dict)


def _static(q: Any) -> Record:
    return {field.name: getattr(q, field.name) for field in dataclasses.fields(q) if field.metadata.get("static")}


def _arrays(q: Any) -> Record:
    fields = {field.name: getattr(q, field.name) for field in dataclasses.fields(q) if not field.metadata.get("static")}
    return {name: value for name, value in fields.items() if value is not None}


def _mismatches(target: Any, state: Any) -> Iterator[str]:
    """Each difference between a saved state dict and the target, in words."""
    if not isinstance(state, dict) or "static" not in state:
        yield f"what was saved there is no {type(target).__name__}"
        return
    yield from _differences(_from_json(np.asarray(state["static"]).tobytes()), _static(target))
    saved, expected = state.keys() - {"static"}, _arrays(target).keys()
    if saved != expected:
        yield f"the arrays {', '.join(sorted(saved))} were saved, {', '.join(sorted(expected))} are expected"


def _differences(saved: Any, target: Any, name: str = "") -> Iterator[str]:
    """Where two values differ, field by field."""
    if dataclasses.is_dataclass(saved) and type(saved) is type(target):
        saved, target = vars(saved), vars(target)
    if isinstance(saved, dict):
        for key, value in saved.items():
            yield from _differences(value, target[key], f"{name}.{key}" if name else key)
    elif saved != target:
        yield f"`{name}` was {saved!r} when saved and is {target!r} now"


def when_imported(name: str, act: Callable[[], None]) -> None:
    """Calls `act` once the module of that name is imported: at once if it is, else at the end of its import."""
    if name in sys.modules:
        act()
    else:
        sys.meta_path.insert(0, _Awaited(name, act))


class _Awaited(importlib.abc.MetaPathFinder):
    """Leaves finding the module to the other finders, and acts after its code has run."""

    def __init__(self, name: str, act: Callable[[], None]):
        self.name, self.act, self.searching = name, act, False

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
            self.act()
