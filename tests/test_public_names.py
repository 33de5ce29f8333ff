"""The public interface against a snapshot: names of every public module, and the parameters of public functions.

`python tests/test_public_names.py` writes the snapshot after a deliberate change, which CHANGELOG.md notes. A renamed
name also gets a row in scaledot/deprecated.py.
"""

import importlib
import inspect
from pathlib import Path

SNAPSHOT = Path(__file__).parent / "public_names.txt"
MODULES = (
    "scaledot",
    "scaledot.checkpoint",
    "scaledot.checkpoint_policies",
    "scaledot.compat.jax_nn",
    "scaledot.format_variants",
    "scaledot.linen",
    "scaledot.lora",
    "scaledot.nnx",
    "scaledot.orbax",
    "scaledot.parallel.collective_matmul",
    "scaledot.parallel.sharding",
    "scaledot.recipes",
    "scaledot.state",
    "scaledot.train",
)


def public_names() -> list[str]:
    """Returns one line for each public name, `module.name(parameters)`, sorted."""
    return sorted(line for module in MODULES for line in _names(module))


def _names(module: str) -> list[str]:
    found = importlib.import_module(module)
    names = getattr(found, "__all__", None) or [
        name
        for name, value in vars(found).items()
        if not name.startswith("_") and _is_defined_in(value, module, name in vars(found).get("__annotations__", {}))
    ]
    return [f"{module}.{name}{_parameters(getattr(found, name))}" for name in names]


def _is_defined_in(value, module: str, annotated: bool) -> bool:
    """Returns whether a value is defined in a module, not imported; constants are defined there if annotated."""
    if inspect.ismodule(value):
        return False
    defined_in = getattr(value, "__module__", None)
    return annotated if defined_in is None else defined_in == module


def _parameters(value) -> str:
    if inspect.isclass(value) or not callable(value):
        return ""
    return f"({', '.join(_parameter(p) for p in inspect.signature(value).parameters.values())})"


def _parameter(parameter: inspect.Parameter) -> str:
    mark = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    default = "" if parameter.default is parameter.empty else "="
    return f"{mark}{parameter.name}{default}"


def test_public_names_equal_the_snapshot():
    expected, found = SNAPSHOT.read_text().splitlines(), public_names()
    missing, added = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    assert (missing, added) == ([], []), "see the docstring of this file for what to do after a deliberate change"


if __name__ == "__main__":
    SNAPSHOT.write_text("\n".join(public_names()) + "\n")
