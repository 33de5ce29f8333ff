"""Rules of the last blocks, and rules by step."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scaledot import transform
from scaledot.path_patterns import RecipesByPath
from scaledot.recipes import MXFP8
from scaledot.schedules import Phase, Schedule, with_last_blocks


def test_the_last_blocks_get_the_other_recipe():
    rules = with_last_blocks({"head": None, "*": "nvfp4"}, "block_{}/*", blocks=3, last=1, recipe="mxfp8")
    by_path = RecipesByPath(rules)
    found = {path: by_path.recipe_for(path) for path in ("block_1/mlp", "block_2/mlp", "head", "other")}
    assert {path: recipe and recipe.name for path, recipe in found.items()} == {
        "block_1/mlp": "nvfp4",
        "block_2/mlp": "mxfp8",
        "head": None,
        "other": "nvfp4",
    }


def test_the_last_blocks_override_rules_of_their_own():
    rules = with_last_blocks({"b2": "fp8_current", "*": "nvfp4"}, "b{}", blocks=3, last=2, recipe="mxfp8")
    assert rules == {"b1": "mxfp8", "b2": "mxfp8", "*": "nvfp4"}


def test_layers_excluded_first_stay_excluded_in_the_last_blocks():
    """A later rule of None stays in place: ahead of the rules before it, it would take layers from them."""
    rules = {"*/router": None, "b2": None, "*/mlp": "mxfp8", "*/attention": None, "*": "nvfp4"}
    changed = with_last_blocks(rules, "b{:02d}/*", blocks=11, recipe="mxfp8")
    assert list(changed.items()) == [("*/router", None), ("b2", None), ("b10/*", "mxfp8"), *list(rules.items())[2:]]


def test_the_last_blocks_override_an_exclusion_of_the_same_pattern():
    assert with_last_blocks({"b2": None, "*": "nvfp4"}, "b{}", blocks=3, recipe="mxfp8") == {
        "b2": "mxfp8",
        "*": "nvfp4",
    }


@pytest.mark.parametrize("rules", [None, {"*": None}, {"b*": None}, {"b2/*": None}])
def test_the_last_blocks_of_a_model_in_full_precision_get_their_recipe(rules):
    by_path = RecipesByPath(with_last_blocks(rules, "b{}/*", blocks=3, recipe="mxfp8"))
    assert {path: by_path.recipe_for(path) for path in ("b1/mlp", "b2/mlp")} == {"b1/mlp": None, "b2/mlp": MXFP8}


def test_schedules_are_values():
    """They are equal to their pickles and copies, with equal hashes, and do not change with the caller's mapping."""
    rules = {"*": "mxfp8"}
    schedule = Schedule({np.int64(5): rules, 0: "nvfp4"})
    rules["*"] = None
    for copied in (
        pickle.loads(pickle.dumps(schedule)),
        copy.deepcopy(schedule),
        Schedule({0: "nvfp4", 5: {"*": "mxfp8"}}),
    ):
        assert copied == schedule
        assert hash(copied) == hash(schedule)
    assert schedule.at(jnp.int32(6)) == {"*": "mxfp8"}
    schedule.at(6)["*"] = None  # a copy
    assert schedule.at(6) == {"*": "mxfp8"}
    assert schedule != "nvfp4"


def test_schedules_whose_rules_are_in_another_order_differ():
    """The first rule that matches a layer applies."""
    rules = {"b*": "mxfp8", "*": "nvfp4"}
    assert Schedule({0: rules}) != Schedule({0: dict(reversed(rules.items()))})


def test_no_last_block_changes_nothing():
    assert with_last_blocks("nvfp4", "block_{}", blocks=3, last=0, recipe=None) == {"*": "nvfp4"}


@pytest.mark.parametrize(
    ("step", "rules"), [(0, "nvfp4"), (9, "nvfp4"), (10, "mxfp8"), (11, "mxfp8"), (20, {"*": None})]
)
def test_a_schedule_changes_at_its_steps(step, rules):
    assert Schedule({10: "mxfp8", 0: "nvfp4", 20: None}).at(step) == rules


@pytest.mark.parametrize(
    ("steps", "phases"),
    [
        (30, [Phase(0, 10, "nvfp4"), Phase(10, 30, "mxfp8")]),
        (10, [Phase(0, 10, "nvfp4")]),
        (5, [Phase(0, 5, "nvfp4")]),
        (0, []),
    ],
)
def test_phases_cover_the_run(steps, phases):
    assert list(Schedule({0: "nvfp4", 10: "mxfp8"}).phases(steps)) == phases


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Schedule({5: "nvfp4"}), "from step 0 on; its first step is 5"),
        (lambda: Schedule({}), "its first step is None"),
        (lambda: Schedule({0: "nvfp4"}).at(-1), "at least 0, not -1"),
        (lambda: with_last_blocks("nvfp4", "block", blocks=3, recipe=None), "`path` 'block' must contain {}"),
        (lambda: with_last_blocks("nvfp4", "b{}", blocks=3, last=4, recipe=None), "`last` 4 .* `blocks`, 3"),
        (lambda: with_last_blocks("nvfp4", "b{}", blocks=3, recipe="mxfp9"), "did you mean 'mxfp8'"),
        (lambda: with_last_blocks("nvfp5", "b{}", blocks=3, recipe=None), "did you mean 'nvfp4'"),
        (lambda: Schedule({0: "nvfp4", 9: {"*": "mxfp9"}}), "did you mean 'mxfp8'"),
        (lambda: Schedule({0: "nvfp4", 0.9: "mxfp8"}), "whole numbers, not 0.9"),
        (lambda: Schedule({0: "nvfp4", True: "mxfp8"}), "whole numbers, not True"),
        (lambda: Schedule([(0, "nvfp4")]), "mapping of steps to rules, not a list"),
        (lambda: Schedule({0: [transform.Rule("nvfp4")]}), "path patterns to recipes, not a list"),
        (lambda: jax.jit(Schedule({0: "nvfp4"}).at)(3), "must be a Python integer"),
        (lambda: with_last_blocks("nvfp4", "b{i}", blocks=3, recipe=None), "`path` 'b{i}' must contain {}"),
        (lambda: with_last_blocks("nvfp4", "b{}{}", blocks=3, recipe=None), "`path` 'b{}{}' must contain {}"),
        (lambda: with_last_blocks("nvfp4", 3, blocks=3, recipe=None), "`path` must be a pattern"),
        (lambda: with_last_blocks("nvfp4", "b{0.foo}", blocks=3, recipe=None), "must contain {}"),
        (lambda: Schedule({0: "nvfp4"}).at(1.5), "`step` must be a whole number, not 1.5"),
        (lambda: list(Schedule({0: "nvfp4"}).phases(-3)), "`steps` must be at least 0, not -3"),
        (lambda: with_last_blocks("nvfp4", "b{}", blocks=3, last=1.0, recipe=None), "`last` must be a whole number"),
    ],
)
def test_bad_schedules_are_explained(call, words):
    with pytest.raises((ValueError, TypeError), match=words):
        call()
