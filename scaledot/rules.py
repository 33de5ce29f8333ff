"""Which layer of a model gets what: patterns over paths, the first that matches decides.

"mxfp8"                                             every layer
{"block_*/mlp/*": "fp8_block", "*": "mxfp8"}        by path, in this order
{"head": None, "*": "mxfp8"}                        all but one
"""

import difflib
import fnmatch
from collections.abc import Mapping
from typing import Any

from scaledot.recipes import Recipe, find_recipe

Given = str | Recipe | Mapping[str, str | Recipe | None]


class Patterns:
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


class Rules(Patterns):
    """Patterns and recipes."""

    def __init__(self, given: Given):
        super().__init__(given, "rules")
        if not self.by_path:
            raise ValueError("`rules` must be a recipe, or a mapping of path patterns to recipes, not empty")
        self.by_path = {p: None if r is None else find_recipe(r) for p, r in self.by_path.items()}

    def recipe_for(self, path: str) -> Recipe | None:
        return self.value_for(path)
