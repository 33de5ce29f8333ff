"""Which layer of a model gets what: patterns over paths, the first that matches decides.

"mxfp8"                                             every layer
{"block_*/mlp/*": "fp8_block", "*": "mxfp8"}        by path, in this order
{"head": None, "*": "mxfp8"}                        all but one
"""

import difflib
import fnmatch
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from scaledot.recipes import Recipe, find_recipe

Given = str | Recipe | Mapping[str, str | Recipe | None]


class PathPatterns:
    """Patterns and what they stand for, or one thing for every path; remembers which paths it was asked about.

    `name` is that of the argument.
    """

    def __init__(self, given: Any, name: str):
        self.by_path = given if isinstance(given, Mapping) else {} if given is None else {"*": given}
        self.name = name
        self.asked: set[str] = set()

    def value_for(self, path: str) -> Any:
        self.asked.add(path)
        return next((value for pattern, value in self.by_path.items() if fnmatch.fnmatchcase(path, pattern)), None)

    def check_all_matched(self) -> None:
        """Raise for a pattern that no path has matched."""
        for pattern in self.by_path:
            if not any(fnmatch.fnmatchcase(path, pattern) for path in self.asked):
                paths = sorted(self.asked)
                near = difflib.get_close_matches(pattern, paths, n=4, cutoff=0.3) or paths[:8]
                words = ", ".join(near) or "there is none"
                raise ValueError(
                    f"{pattern!r} of `{self.name}` matches no layer that takes a recipe; near paths: {words}"
                )


class Layer(NamedTuple):
    """A layer of a model: the name of its type, the recipe that it takes, and, if it takes none, why."""

    type: str
    recipe: Recipe | None
    reason: str = ""
    overlooked: bool = False  # a rule gives it a recipe, and it cannot take one


def table(layers: Mapping[str, Layer]) -> str:
    """One line for each layer: path, type, and recipe or the reason why it has none."""
    rows = [
        (path, layer.type, layer.recipe.name if layer.recipe else f"none: {layer.reason}")
        for path, layer in layers.items()
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:2] if rows else []
    return "\n".join(f"{path:{widths[0]}}  {type:{widths[1]}}  {rest}" for path, type, rest in rows)


def warn_of_overlooked(layers: Mapping[str, Layer], stacklevel: int) -> None:
    """Name the layers to which a rule gives a recipe that they cannot take."""
    words = [f"{path} ({layer.type}: {layer.reason})" for path, layer in layers.items() if layer.overlooked]
    if words:
        warnings.warn(
            f"in full precision although a rule gives them a recipe: {'; '.join(words)}. Where that is intended, map "
            "these paths to None in `rules`",
            stacklevel=stacklevel + 1,
        )


class RecipesByPath(PathPatterns):
    """Patterns and recipes; remembers what became of each layer."""

    def __init__(self, given: Given):
        super().__init__(given, "rules")
        if not self.by_path:
            raise ValueError("`rules` must be a recipe, or a mapping of path patterns to recipes, not empty")
        self.by_path = {p: None if r is None else find_recipe(r) for p, r in self.by_path.items()}
        self.layers: dict[str, Layer] = {}

    def recipe_for(self, path: str) -> Recipe | None:
        return self.value_for(path)

    def decide(self, path: str, type: str, own: str | None, obstacle: Callable[[Recipe], str | None]) -> Recipe | None:
        """The recipe that a layer takes: that of its path, unless it has a product of its own or meets an obstacle."""
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
