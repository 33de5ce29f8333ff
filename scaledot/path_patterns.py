"""Recipes and other settings by layer: glob patterns over the paths of layers, of which the first match applies.

"mxfp8"                                             every layer
{"block_*/mlp/*": "fp8_block", "*": "mxfp8"}        by path, in this order
{"head": None, "*": "mxfp8"}                        every layer except "head"
"""

import difflib
import fnmatch
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from scaledot.recipes import Recipe, find_recipe

Rules = str | Recipe | Mapping[str, str | Recipe | None]


class PathPatterns:
    """A mapping of patterns to values, or one value for every path; records the paths that were looked up.

    `name` is the argument's name in error messages.
    """

    def __init__(self, value: Any, name: str):
        self.by_path = value if isinstance(value, Mapping) else {} if value is None else {"*": value}
        self.name = name
        self.looked_up: set[str] = set()

    def value_for(self, path: str) -> Any:
        """The value of the first pattern that matches `path`; None without a match."""
        self.looked_up.add(path)
        return next((value for pattern, value in self.by_path.items() if fnmatch.fnmatchcase(path, pattern)), None)

    def check_all_matched(self) -> None:
        """Raises ValueError for a pattern that none of the paths looked up so far matches."""
        for pattern in self.by_path:
            if not any(fnmatch.fnmatchcase(path, pattern) for path in self.looked_up):
                paths = sorted(self.looked_up)
                nearest = ", ".join(difflib.get_close_matches(pattern, paths, n=4, cutoff=0.3) or paths[:8])
                raise ValueError(
                    f"{pattern!r} of `{self.name}` matches no layer that takes a recipe; "
                    f"near paths: {nearest or 'none'}"
                )


class Layer(NamedTuple):
    """A layer of a model: the name of its type, its recipe, and the `reason` if it has none."""

    type: str
    recipe: Recipe | None
    reason: str = ""
    overlooked: bool = False  # a pattern assigns a recipe that the layer does not support


def table(layers: Mapping[str, Layer]) -> str:
    """A table with one line per layer: path, type, and recipe or the reason why it has none."""
    rows = [
        (path, layer.type, layer.recipe.name if layer.recipe else f"none: {layer.reason}")
        for path, layer in layers.items()
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:2] if rows else []
    return "\n".join(f"{path:{widths[0]}}  {type:{widths[1]}}  {rest}" for path, type, rest in rows)


def warn_of_overlooked(layers: Mapping[str, Layer], stacklevel: int) -> None:
    """Warns of layers whose pattern assigns a recipe that they do not support."""
    names = [f"{path} ({layer.type}: {layer.reason})" for path, layer in layers.items() if layer.overlooked]
    if names:
        warnings.warn(
            f"layers in full precision although `rules` assigns them a recipe: {'; '.join(names)}. If that is "
            "intended, map these paths to None in `rules`",
            stacklevel=stacklevel + 1,
        )


class RecipesByPath(PathPatterns):
    """A mapping of patterns to recipes; `layers` records the decision for each layer."""

    def __init__(self, rules: Rules):
        super().__init__(rules, "rules")
        if not self.by_path:
            raise ValueError("`rules` must be a recipe, or a mapping of path patterns to recipes, not empty")
        self.by_path = {p: None if r is None else find_recipe(r) for p, r in self.by_path.items()}
        self.layers: dict[str, Layer] = {}

    def recipe_for(self, path: str) -> Recipe | None:
        """The recipe of the first pattern that matches `path`; None without a match."""
        return self.value_for(path)

    def decide(self, path: str, type: str, own: str | None, obstacle: Callable[[Recipe], str | None]) -> Recipe | None:
        """The recipe of a layer, recorded in `layers`: that of its path, unless the layer cannot use one.

        own: name of a custom argument of the layer, such as its own `dot_general`, which a recipe would replace; None
        without one. obstacle: returns the reason why the layer does not support a recipe, or None.
        """
        recipe = self.recipe_for(path)
        if recipe is None:
            layer = Layer(type, None, "no rule gives it one")
        elif own is not None:
            layer = Layer(type, None, f"it has a {own} of its own")
        elif (reason := obstacle(recipe)) is not None:
            layer = Layer(type, None, reason, overlooked=True)
        else:
            layer = Layer(type, recipe)
        self.layers[path] = layer
        return layer.recipe
