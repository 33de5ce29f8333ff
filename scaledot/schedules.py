"""Other recipes in the last blocks of a model, and from a step on: what long runs in four bits do.

The last blocks of a decoder are the most sensitive to quantisation, and the end of a run, at a small learning rate, is
when its noise costs most. Both are choices of `rules`, the argument that maps layers to recipes:

>>> rules = with_last_blocks("nvfp4", "block_{}/*", blocks=12, last=2, recipe="mxfp8")
>>> rules
{'block_10/*': 'mxfp8', 'block_11/*': 'mxfp8', '*': 'nvfp4'}
>>> schedule = Schedule({0: rules, 9000: "mxfp8"})
>>> schedule.at(8999) == rules, schedule.at(9000)
(True, 'mxfp8')

A recipe is static, so a training step is compiled once for each phase. State of delayed scaling belongs to a recipe:
initialise it anew where a phase has another one.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from scaledot.path_patterns import Rules
from scaledot.recipes import Recipe, find_recipe


def with_last_blocks(
    rules: Rules, path: str, *, blocks: int, last: int = 1, recipe: str | Recipe | None
) -> dict[str, str | Recipe | None]:
    """Returns `rules` with another recipe, or None for full precision, for the last blocks of a model.

    Args:
      rules: of all other layers, as in `scaledot.linen.with_recipe`.
      path: the pattern of the layers of one block, with {} for the block's index, from 0.
      blocks: the number of blocks. last: how many of them get `recipe`.
    """
    if path.format("") == path:
        raise ValueError(f"`path` {path!r} must contain {{}}, which stands for the index of a block")
    if not 0 <= last <= blocks:
        raise ValueError(f"`last` {last} must be between 0 and the number of `blocks`, {blocks}")
    _check_recipes(rules)
    _check_recipes(recipe)
    others = rules if isinstance(rules, Mapping) else {"*": rules}
    chosen = {path.format(index): recipe for index in range(blocks - last, blocks)}
    return {**chosen, **{pattern: other for pattern, other in others.items() if pattern not in chosen}}


def _check_recipes(rules: Rules | None) -> None:
    """Raises for the name of a recipe that does not exist."""
    for recipe in rules.values() if isinstance(rules, Mapping) else (rules,):
        if recipe is not None:
            find_recipe(recipe)


class Phase(NamedTuple):
    """Steps from `start` up to, but not including, `stop`, which train under `rules`."""

    start: int
    stop: int
    rules: Rules


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Rules by the step from which they apply, such as {0: "nvfp4", 9000: "mxfp8"}."""

    rules_from: Mapping[int, Rules]

    def __post_init__(self):
        for step, rules in self.rules_from.items():
            if not isinstance(step, int):
                raise TypeError(f"the steps of a Schedule are whole numbers, not {step!r}")
            _check_recipes(rules)
        if not self.rules_from or min(self.rules_from) != 0:
            first = min(self.rules_from, default=None)
            raise ValueError(f"a Schedule must say which rules apply from step 0 on; its first step is {first}")
        object.__setattr__(self, "rules_from", MappingProxyType(dict(sorted(self.rules_from.items()))))

    def at(self, step: int) -> Rules:
        """Returns the rules of a step, a Python integer."""
        if step < 0:
            raise ValueError(f"`step` must be at least 0, not {step}")
        starts = list(self.rules_from)
        return self.rules_from[starts[bisect.bisect_right(starts, step) - 1]]

    def phases(self, steps: int) -> Iterator[Phase]:
        """Yields the phases of a run of `steps` steps.

        >>> [(phase.start, phase.stop) for phase in Schedule({0: "nvfp4", 900: "mxfp8"}).phases(1000)]
        [(0, 900), (900, 1000)]
        """
        starts = [start for start in self.rules_from if start < steps]
        for start, stop in itertools.pairwise([*starts, steps]):
            yield Phase(start, stop, self.rules_from[start])
