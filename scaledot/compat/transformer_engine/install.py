"""`import transformer_engine` without TransformerEngine: an import alias for programs that are not to be edited.

    from scaledot.compat import transformer_engine as te
    te.install()
    import transformer_engine.jax as te                       # scaledot.compat.transformer_engine
    from transformer_engine.common import recipe              # scaledot.compat.transformer_engine.recipe

`python -m scaledot.compat.transformer_engine MODULE ARGUMENTS...` runs a program under the alias.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence

_ALIAS = "transformer_engine"
_PACKAGE = "scaledot.compat.transformer_engine"
_TARGETS = {f"{_ALIAS}.jax": _PACKAGE, f"{_ALIAS}.common.recipe": f"{_PACKAGE}.recipe"}
_CONTAINERS = (_ALIAS, f"{_ALIAS}.common")  # packages that only contain the others


def install() -> None:
    """Makes `import transformer_engine.jax...` and `transformer_engine.common.recipe` import scaledot's modules.

    The modules are the same objects under both names. A second call does nothing. Raises RuntimeError if
    TransformerEngine itself is installed, because programs would then mix both.

    >>> install()
    >>> from transformer_engine.common.recipe import MXFP8BlockScaling
    >>> MXFP8BlockScaling.__module__
    'scaledot.compat.transformer_engine.recipe'
    """
    if any(isinstance(finder, _AliasFinder) for finder in sys.meta_path):
        return
    if _ALIAS in sys.modules or importlib.util.find_spec(_ALIAS) is not None:
        raise RuntimeError(
            "TransformerEngine is installed, so `import transformer_engine` cannot mean scaledot; import "
            f"{_PACKAGE} by its own name, or uninstall TransformerEngine from this environment"
        )
    # before Python's own finders, which would find the submodules' files by `__path__` and execute them a second time
    sys.meta_path.insert(0, _AliasFinder())


class _AliasFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of `transformer_engine` under the names of scaledot's modules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in _CONTAINERS:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        name = _target(fullname)
        if name is None or importlib.util.find_spec(name) is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, self)

    def exec_module(self, module: types.ModuleType) -> None:
        """Replaces the new module in sys.modules, from where `import` returns it, by scaledot's."""
        name = _target(module.__name__)
        if name is not None:
            sys.modules[module.__name__] = importlib.import_module(name)


def _target(fullname: str) -> str | None:
    """The name of scaledot's module for a name in `transformer_engine`; None if it has none."""
    for alias, target in _TARGETS.items():
        if fullname == alias or fullname.startswith(f"{alias}."):
            return target + fullname.removeprefix(alias)
    return None
