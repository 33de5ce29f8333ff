"""`scaledot recipes`: prints the table of recipes, or one of them; `Recipe.from_json` reads its JSON."""

import argparse

from scaledot.cli.arguments import add_json
from scaledot.cli.output import aligned, show

EXAMPLES = (
    "scaledot recipes",
    "scaledot recipes nvfp4",
    "scaledot recipes fp8_block --json > mine.json   # change it, then sd.Recipe.from_json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="show this recipe (default: list all of them)")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    from scaledot.recipes import RECIPES, find_recipe

    if options.name is None:
        rows = [("name", "x of fwd", "w of fwd", "g of dgrad"), *map(_cells, RECIPES.values())]
        show(options, aligned(rows), {"recipes": [recipe.to_dict() for recipe in RECIPES.values()]})
    else:
        recipe = find_recipe(options.name)
        show(options, str(recipe), recipe.to_dict())
    return 0


def _cells(recipe) -> tuple[str, ...]:
    gradient = "straight-through" if recipe.dgrad is None else _cast(recipe.dgrad.lhs)
    return recipe.name, _cast(recipe.fwd.lhs), _cast(recipe.fwd.rhs), gradient


def _cast(cast) -> str:
    return "not cast" if cast is None else str(cast)
