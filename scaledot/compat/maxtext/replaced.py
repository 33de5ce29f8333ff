"""Functions of MaxText that scaledot replaces while it is installed."""

from typing import Any

_originals: dict[tuple[Any, str], Any] = {}  # by module or class and name


def replace(target: Any, name: str, function: Any) -> None:
    """Replaces an attribute of a module or class until `restore_all`."""
    _originals[target, name] = getattr(target, name)
    setattr(target, name, function)


def original(target: Any, name: str) -> Any:
    """The attribute of a module or class as it was before `replace`."""
    return _originals.get((target, name)) or getattr(target, name)


def restore_all() -> None:
    """Restores all attributes that `replace` replaced."""
    while _originals:
        (target, name), value = _originals.popitem()
        setattr(target, name, value)
