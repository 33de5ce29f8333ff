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
import fnmatch
import itertools
import operator
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from jax.core import Tracer

from scaledot.path_patterns import Rules
from scaledot.recipes import Recipe, find_recipe


def with_last_blocks(
    rules: Rules, path: str, *, blocks: int, last: int = 1, recipe: str | Recipe | None
) -> dict[str, str | Recipe | None]:
    """Returns `rules` with another recipe, or None for full precision, for the last blocks of a model.

    The first rule that matches a layer applies. Rules of None at the start of `rules` stay at the start, so that the
    layers they exclude stay in full precision inside the last blocks as well; the new rules follow them. Those that
    exclude all of a last block, such as {"*": None}, come after the new rules.

    >>> with_last_blocks({"*/router": None, "*": "nvfp4"}, "block_{}/*", blocks=12, recipe="mxfp8")
    {'*/router': None, 'block_11/*': 'mxfp8', '*': 'nvfp4'}

    Args:
      rules: of all other layers, as in `scaledot.linen.with_recipe`.
      path: the pattern of the layers of one block, as a Python format string of the block's index, which counts from
        0: "block_{}/*", or "block_{:02d}/*" for two digits.
      blocks: the number of blocks. last: how many of them get `recipe`.
    """
    for name, count in (("blocks", blocks), ("last", last)):
        if not _is_integer(count):
            raise TypeError(f"`{name}` must be a whole number, not {count!r}")
    if not 0 <= last <= blocks:
        raise ValueError(f"`last` {last} must be between 0 and the number of `blocks`, {blocks}")
    _check_recipes(rules)
    _check_recipes(recipe)
    others: dict[str, Any] = dict(rules) if isinstance(rules, Mapping) else {"*": rules}
    chosen = {_pattern(path, index): recipe for index in range(blocks - last, blocks)}
    excluded = dict(itertools.takewhile(lambda rule: rule[1] is None, others.items()))
    inside_blocks = {pattern: None for pattern in excluded if not any(fnmatch.fnmatchcase(c, pattern) for c in chosen)}
    return {**inside_blocks, **chosen, **(others | chosen)}


def _pattern(path: str, index: int) -> str:
    """Returns the path pattern of the block with this index."""
    if not isinstance(path, str):
        raise TypeError(f"`path` must be a pattern such as 'block_{{}}/*', not {path!r}")
    try:
        pattern, other = path.format(index), path.format(index + 1)
    except (LookupError, ValueError, AttributeError) as error:
        raise ValueError(
            f"`path` {path!r} must contain {{}} for the index of a block; Python says {error!r}"
        ) from error
    if pattern == other:
        raise ValueError(f"`path` {path!r} must contain {{}}, which stands for the index of a block")
    return pattern


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _checked_steps(name: str, value: Any) -> int:
    """A number of steps as a Python integer, also of a jax array, such as a step counter."""
    try:
        steps = operator.index(value)
    except TypeError:
        raise TypeError(f"`{name}` must be a whole number, not {value!r}") from None
    if steps < 0:
        raise ValueError(f"`{name}` must be at least 0, not {steps}")
    return steps


def _check_recipes(rules: Any) -> None:
    """Raises unless `rules` is None, a recipe, or a mapping of path patterns to these, whose names exist."""
    if isinstance(rules, (list, tuple)):
        raise TypeError(f"rules are a recipe, or a mapping of path patterns to recipes, not a {type(rules).__name__}")
    for recipe in rules.values() if isinstance(rules, Mapping) else (rules,):
        if recipe is not None:
            find_recipe(recipe)


class Phase(NamedTuple):
    """Steps from `start` up to, but not including, `stop`, which train under `rules`."""

    start: int
    stop: int
    rules: Rules


def _copied(rules: Rules | None) -> Rules:
    """Copies a mapping, so that the caller may change the original; None becomes {"*": None}."""
    return dict(rules) if isinstance(rules, Mapping) else {"*": None} if rules is None else rules


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """Rules by the step from which they apply, such as {0: "nvfp4", 9000: "mxfp8"}.

    Rules of None mean full precision and are stored as {"*": None}.
    """

    rules_from: Mapping[int, Rules | None]

    def __post_init__(self):
        if not isinstance(self.rules_from, Mapping):
            raise TypeError(f"a Schedule takes a mapping of steps to rules, not a {type(self.rules_from).__name__}")
        for step, rules in self.rules_from.items():
            if not _is_integer(step):
                raise TypeError(f"the steps of a Schedule are whole numbers, not {step!r}")
            _check_recipes(rules)
        if not self.rules_from or min(self.rules_from) != 0:
            first = min(self.rules_from, default=None)
            raise ValueError(f"a Schedule must say which rules apply from step 0 on; its first step is {first}")
        copied = {int(step): _copied(self.rules_from[step]) for step in sorted(self.rules_from)}
        object.__setattr__(self, "rules_from", copied)

    def __eq__(self, other: Any) -> bool:
        return self._items == other._items if isinstance(other, Schedule) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._items)

    @property
    def _items(self) -> tuple[Any, ...]:
        """The rules of each step in their order, in which the first that matches a layer applies."""
        return tuple(
            (step, tuple(rules.items()) if isinstance(rules, Mapping) else rules)
            for step, rules in self.rules_from.items()
        )

    def at(self, step: int) -> Rules:
        """Returns the rules of a step, a Python integer."""
        if isinstance(step, Tracer):
            raise TypeError(
                "`step` must be a Python integer, not traced: the program of each phase is compiled separately"
            )
        step = _checked_steps("step", step)
        starts = list(self.rules_from)
        return self._rules(starts[bisect.bisect_right(starts, step) - 1])

    def phases(self, steps: int) -> Iterator[Phase]:
        """Yields the phases of a run of `steps` steps.

        >>> [(phase.start, phase.stop) for phase in Schedule({0: "nvfp4", 900: "mxfp8"}).phases(1000)]
        [(0, 900), (900, 1000)]
        """
        steps = _checked_steps("steps", steps)
        starts = [start for start in self.rules_from if start < steps]
        for start, stop in itertools.pairwise([*starts, steps]):
            yield Phase(start, stop, self._rules(start))

    def _rules(self, start: int) -> Rules:
        rules = self.rules_from[start]
        assert rules is not None  # see `_copied`
        return _copied(rules)  # so that a caller may change it
