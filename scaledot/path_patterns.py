"""Recipes, formats and other settings by layer: glob patterns over the paths of layers; the first match applies.

"mxfp8"                                             every layer
{"block_*/mlp/*": "fp8_block", "*": "mxfp8"}        by path, in this order
{"head": None, "*": "mxfp8"}                        every layer except "head"
"""

import difflib
import fnmatch
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from scaledot.formats import Format, find_format
from scaledot.recipes import Recipe, find_recipe

Rules = str | Recipe | Mapping[str, str | Recipe | None]
FormatRules = str | Format | Mapping[str, str | Format | None]


class PathPatterns:
    """A mapping of patterns to values, or one value for every path; records the paths that were looked up.

    `name` is the argument's name in error messages.
    """

    matching = "layer that takes a recipe"  # what a pattern should match, in error messages

    def __init__(self, value: Any, name: str):
        self.by_path = value if isinstance(value, Mapping) else {} if value is None else {"*": value}
        self.name = name
        self.looked_up: set[str] = set()

    def value_for(self, path: str) -> Any:
        """The value of the first pattern that matches `path`; None without a match."""
        self.looked_up.add(path)
        return next((value for pattern, value in self.by_path.items() if fnmatch.fnmatchcase(path, pattern)), None)

    def missing_reason(self, path: str) -> str:
        """Why `value_for(path)` is None: the first pattern that matches is mapped to None, or no pattern matches."""
        is_matched = any(fnmatch.fnmatchcase(path, pattern) for pattern in self.by_path)
        return "its rule is None" if is_matched else "no rule matches"

    def check_all_matched(self) -> None:
        """Raises ValueError for a pattern that none of the paths looked up so far matches."""
        for pattern in self.by_path:
            if not any(fnmatch.fnmatchcase(path, pattern) for path in self.looked_up):
                paths = sorted(self.looked_up)
                nearest = ", ".join(difflib.get_close_matches(pattern, paths, n=4, cutoff=0.3) or paths[:8])
                raise ValueError(
                    f"{pattern!r} of `{self.name}` matches no {self.matching}; near paths: {nearest or 'none'}"
                )


class Layer(NamedTuple):
    """A layer of a model: the name of its type, its recipe or the format of its weight, and the `reason` if none."""

    type: str
    setting: Recipe | Format | None
    reason: str = ""
    overlooked: bool = False  # a pattern assigns a setting that the layer does not support
    details: tuple[str, ...] = ()  # further columns of the table


def table(layers: Mapping[str, Layer]) -> str:
    """A table with one line per layer: path, type, and setting with details, or the reason why it has none."""
    rows = [
        (path, layer.type, *((layer.setting.name, *layer.details) if layer.setting else (f"none: {layer.reason}",)))
        for path, layer in layers.items()
    ]
    columns = max(map(len, rows), default=0)
    widths = [max((len(row[i]) for row in rows if len(row) > i + 1), default=0) for i in range(columns)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def warn_of_overlooked(layers: Mapping[str, Layer], stacklevel: int, setting: str = "a recipe") -> None:
    """Warns of layers whose pattern assigns a setting that they do not support."""
    names = [f"{path} ({layer.type}: {layer.reason})" for path, layer in layers.items() if layer.overlooked]
    if names:
        warnings.warn(
            f"layers in full precision although `rules` assigns them {setting}: {'; '.join(names)}. If that is "
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
            layer = Layer(type, None, self.missing_reason(path))
        elif own is not None:
            layer = Layer(type, None, f"it has a {own} of its own")
        elif (reason := obstacle(recipe)) is not None:
            layer = Layer(type, None, reason, overlooked=True)
        else:
            layer = Layer(type, recipe)
        self.layers[path] = layer
        return recipe if layer.setting is not None else None


class FormatsByPath(PathPatterns):
    """A mapping of patterns to formats of weights; `layers` records the decision for each layer."""

    matching = "layer with a `kernel` parameter"

    def __init__(self, rules: FormatRules):
        super().__init__(rules, "rules")
        if not self.by_path:
            raise ValueError("`rules` must be a format, or a mapping of path patterns to formats, not empty")
        self.by_path = {p: None if f is None else find_format(f) for p, f in self.by_path.items()}
        self.layers: dict[str, Layer] = {}

    def decide(self, path: str, type: str, obstacle: Callable[[Format], str | None]) -> Format | None:
        """The format of a layer's weight, recorded in `layers`; None if the weight stays as it is.

        obstacle: returns the reason why the weight cannot be quantised to a format, or None.
        """
        format = self.value_for(path)
        if format is None:
            layer = Layer(type, None, self.missing_reason(path))
        elif (reason := obstacle(format)) is not None:
            layer = Layer(type, None, reason, overlooked=True)
        else:
            layer = Layer(type, format)
        self.layers[path] = layer
        return format if layer.setting is not None else None
