"""Errors for names of other libraries that scaledot does not provide, which say what to write instead."""

import dis
import importlib
import sys
import types
from collections.abc import Callable, Mapping


def module_getattr(
    library: str, instead: Mapping[str, str], module: str, on_demand: tuple[str, ...] = (), others: str | None = None
) -> Callable[[str], object]:
    """Returns a module's `__getattr__`, which imports submodules `on_demand` and raises for the names in `instead`.

    instead: what to write instead of each name of `library` that is not provided.
    others: what to write instead of public names that are not in `instead`, for modules that provide nothing.

    `module.name` raises AttributeError, as hasattr requires. `from module import name` raises ImportError, because
    Python would replace an AttributeError by its own ImportError, without the replacement's name.
    """

    def getattr_(name: str) -> object:
        if name in on_demand:
            return importlib.import_module(f"{module}.{name}")
        replacement = instead.get(name, None if name.startswith("_") else others)
        if replacement is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        message = f"{library}'s {name!r} is not provided: {replacement}"
        if _executes_from_import(sys._getframe(1)):
            raise ImportError(message)
        raise AttributeError(message)

    return getattr_


def _executes_from_import(frame: types.FrameType) -> bool:
    """Whether the frame's current instruction is IMPORT_FROM, that of `from module import name`.

    The instruction is the only way to tell the two accesses apart: `__getattr__` gets nothing but the name, and no
    class can derive from both AttributeError and ImportError.
    """
    return frame.f_code.co_code[frame.f_lasti] == dis.opmap["IMPORT_FROM"]
