"""Ordered rules that choose a recipe for each contraction of a function.

"fp8_current"                                            every matmul by a weight
{"*/head": None, "*/mlp/*": "fp8_block", "*": "mxfp8"}   by path; the first match applies
[Rule("fp8_current", path="*/attention/*", operands="activations"), Rule("mxfp8", where=lambda site: site.flops > 1e9)]

A pattern is matched against three names of a contraction: the path of its parameter ("blocks/0/up/kernel"), that path
without its last part ("blocks/0/up", the path of the layer), and the `jax.named_scope` that it is in. Rules apply to
matmuls by a weight; a matmul of two activations, as in attention, needs a rule with `operands="activations"`.
"""

import dataclasses
import difflib
import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scaledot.recipes import Recipe, find_recipe
from scaledot.transform.site import PRIMITIVES, Site

OPERANDS = ("weight", "activations")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conditions:
    """Conditions on a contraction: see `Rule`."""

    path: str = "*"
    primitive: str | None = None
    operands: str = "weight"
    where: Callable[[Site], bool] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.path, str):
            raise TypeError(f"`path` must be a glob pattern, not {self.path!r}")
        if self.primitive not in (None, *PRIMITIVES):
            raise ValueError(f"`primitive` must be one of {', '.join(PRIMITIVES)} or None, not {self.primitive!r}")
        if self.operands not in OPERANDS:
            raise ValueError(f"`operands` must be one of {', '.join(OPERANDS)}, not {self.operands!r}")
        if self.where is not None and not callable(self.where):
            raise TypeError(f"`where` must be a function of a Site, not {self.where!r}")

    @property
    def is_for_all(self) -> bool:
        """Whether it has no other condition than that one operand is a weight."""
        return self.path == "*" and self.operands == "weight" and self.where is None and self.primitive is None

    def matches(self, site: Site) -> bool:
        """Whether all conditions hold."""
        return (
            any(fnmatch.fnmatchcase(name, self.path) for name in site.names)
            and self.primitive in (None, site.primitive)
            and self.operands == site.operands
            and (self.where is None or bool(self.where(site)))
        )

    def __str__(self) -> str:
        conditions = [repr(self.path)]
        conditions += [self.primitive] if self.primitive else []
        conditions += [self.operands] if self.operands != "weight" else []
        conditions += [getattr(self.where, "__name__", "where")] if self.where else []
        return " ".join(conditions)


@dataclasses.dataclass(frozen=True)
class Rule(Conditions):
    """A recipe for the contractions that satisfy all conditions; recipe None leaves them unquantised.

    path: a glob pattern. primitive: one of `PRIMITIVES`, or None for all. operands: "weight" for contractions of data
    with a parameter, "activations" for those of data with data. where: a further condition on the `Site`.

    >>> Rule("mxfp8", path="*/mlp/*", primitive="dot_general").recipe.name
    'mxfp8'
    """

    recipe: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "recipe", None if self.recipe is None else find_recipe(self.recipe))
        super().__post_init__()


Rules = str | Recipe | Mapping[str, str | Recipe | None] | Sequence[Rule]


def parse_rules(rules: Rules) -> tuple[Rule, ...]:
    """The ordered rules of an argument `rules`."""
    if isinstance(rules, Rule):
        return (rules,)
    if isinstance(rules, (str, Recipe)):
        return (Rule(rules),)
    if isinstance(rules, Mapping):
        parsed = tuple(Rule(recipe, path=pattern) for pattern, recipe in rules.items())
    elif isinstance(rules, Sequence) and all(isinstance(rule, Rule) for rule in rules):
        parsed = tuple(rules)
    else:
        raise TypeError(
            "`rules` must be a recipe, a mapping of path patterns to recipes, or a list of transform.Rule, "
            f"not {rules!r}"
        )
    if not parsed:
        raise ValueError("`rules` must not be empty")
    return parsed


def check_all_match(rules: Sequence[Conditions], sites: Sequence[Site]) -> None:
    """Raises ValueError for a rule that matches no contraction, with the nearest paths; a rule for all never raises."""
    for rule in rules:
        if rule.is_for_all:
            continue
        if not any(rule.matches(site) for site in sites):
            names = sorted({site.path for site in sites})
            nearest = difflib.get_close_matches(rule.path, names, n=4, cutoff=0.3) or names[:8]
            raise ValueError(
                f"the rule {rule} matches no contraction of the function; near paths: {', '.join(nearest) or 'none'}; "
                "transform.report lists all of them"
            )
