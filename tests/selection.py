"""Selects the cases of parametrised tests that run by default.

A test over several `parametrize` tables runs a covering array of their product: of two tables every row of each, of
three or more every pair of rows of any two tables (the pairwise selection of combinatorial testing). Rows marked
`exhaustive` share every code path with another row; tests marked `end_to_end` run a whole example, and are selected by
`pytest --examples`. `pytest --all` runs all cases; tests marked `whole_product` always do.
"""

import itertools
from collections.abc import Iterable, Sequence

import pytest

Row = tuple[int, ...]
PARAM = type(pytest.param())


def selected(items: Iterable, examples: bool = False) -> list:
    """Returns the pytest items of a default run, in their order; with `examples` also those marked `end_to_end`."""
    excluded = ("exhaustive",) if examples else ("exhaustive", "end_to_end")
    by_test: dict[object, list] = {}
    for item in items:
        if not any(map(item.get_closest_marker, excluded)):
            by_test.setdefault((item.parent, getattr(item, "originalname", item.name)), []).append(item)
    return [item for cases in by_test.values() for item in _covering_cases(cases)]


def _covering_cases(cases: list) -> list:
    if cases[0].get_closest_marker("whole_product"):
        return cases
    rows = [_row(item) for item in cases]
    strength = max(len(rows[0]) - 1, 1)
    chosen = covering_array(rows, min(strength, 2))
    return [item for item, row in zip(cases, rows, strict=True) if row in chosen]


def _row(item) -> Row:
    """Returns the row of an item in each of its test's `parametrize` tables."""
    return tuple(_position(mark, item.callspec.params) for mark in item.iter_markers("parametrize"))


def _position(mark, params: dict) -> int:
    """Returns the row of a `parametrize` table that contains a case's parameters."""
    names = mark.args[0]
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    arguments = [params[name] for name in names]
    for position, row in enumerate(mark.args[1]):
        values = row.values if isinstance(row, PARAM) else (row if len(names) > 1 else (row,))
        if all(a is b for a, b in zip(values, arguments, strict=True)):
            return position
    raise ValueError(f"{arguments} is no row of the table {names}; pass the table as a list, not as an iterator")


def covering_array(rows: Sequence[Row], strength: int) -> set[Row]:
    """Returns rows, chosen greedily, with every combination of values of `strength` columns that occurs in any row.

    >>> sorted(covering_array([(a, b) for a in range(3) for b in range(2)], strength=1))
    [(0, 0), (1, 1), (2, 0)]
    """
    missing = set().union(*(_combinations(row, strength) for row in rows))
    used: dict[tuple[int, int], int] = {}
    chosen: set[Row] = set()
    while missing:
        # Of the rows that cover most, take the one whose values were used least, so that values occur in many pairings.
        best = max(rows, key=lambda row: (len(_combinations(row, strength) & missing), -_uses(row, used)))
        chosen.add(best)
        missing -= _combinations(best, strength)
        for cell in enumerate(best):
            used[cell] = used.get(cell, 0) + 1
    return chosen


def _combinations(row: Row, strength: int) -> set:
    return set(itertools.combinations(enumerate(row), strength)) or {()}


def _uses(row: Row, used: dict[tuple[int, int], int]) -> int:
    return sum(used.get(cell, 0) for cell in enumerate(row))
