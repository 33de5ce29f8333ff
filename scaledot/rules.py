"""Which layer of a model gets which recipe: patterns over paths, the first that matches decides.

"mxfp8"                                             every layer
{"block_*/mlp/*": "fp8_block", "*": "mxfp8"}        by path, in this order
{"head": None, "*": "mxfp8"}                        all but one
"""

import difflib
import fnmatch
from collections.abc import Mapping

from scaledot.recipes import Recipe, find_recipe

Given = str | Recipe | Mapping[str, str | Recipe | None]


class Rules:
    """Patterns and recipes; remembers which paths it was asked about."""

    def __init__(self, given: Given):
        by_path = given if isinstance(given, Mapping) else {"*": given}
        if not by_path:
            raise ValueError("`rules` must be a recipe, or a mapping of path patterns to recipes, not empty")
        self.recipes = {pattern: None if r is None else find_recipe(r) for pattern, r in by_path.items()}
        self.asked: set[str] = set()

    def recipe_for(self, path: str) -> Recipe | None:
        self.asked.add(path)
        return next((r for pattern, r in self.recipes.items() if fnmatch.fnmatchcase(path, pattern)), None)

    def check_all_matched(self) -> None:
        """Raise for a pattern that no path has matched."""
        for pattern in self.recipes:
            if not any(fnmatch.fnmatchcase(path, pattern) for path in self.asked):
                paths = sorted(self.asked)
                near = difflib.get_close_matches(pattern, paths, n=4, cutoff=0.3) or paths[:8]
                words = ", ".join(near) or "there is none"
                raise ValueError(f"the rule {pattern!r} matches no layer that takes a recipe; near paths: {words}")
