"""`python -m scaledot plan`: its arguments, and what it does with them."""

import argparse
import json
import sys
from pathlib import Path

from scaledot.plan import child, report
from scaledot.plan.cost import cost
from scaledot.plan.gemm_kinds import BASELINE, find_recipe
from scaledot.plan.mesh import Mesh, choose, parse
from scaledot.plan.models import Model, find_model
from scaledot.plan.programs import Job
from scaledot.plan.rates import RATES, Rates, find_rates
from scaledot.plan.setup import Setup

RECIPES = ("bf16", "fp8_current", "fp8_block", "mxfp8", "nvfp4")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "XLA compiles a layer for the mesh on CPU devices; a model of costs does the rest."
    parser.add_argument(
        "--model", required=True, help="one of the table, such as llama3-70b, or a .json file of its fields"
    )
    parser.add_argument("--devices", type=_count, help="how many; a mesh is chosen where none is given")
    parser.add_argument("--mesh", help="axes and devices along them, neighbours last: dp=4,fsdp=8,tp=8")
    parser.add_argument("--device", default="h200", help=f"whose rates count: {', '.join(RATES)} (default %(default)s)")
    parser.add_argument(
        "--recipes", nargs="+", default=list(RECIPES), metavar="RECIPE", help=f"default: {' '.join(RECIPES)}"
    )
    parser.add_argument("--batch", type=_count, default=1, help="sequences of each place along dp and fsdp (default 1)")
    parser.add_argument("--sequence", type=_count, help="tokens of one (default: the model's)")
    parser.add_argument("--sequence-parallel", action="store_true", help="split tokens over tp between products")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything there, too")


def run(options: argparse.Namespace) -> int:
    try:
        plan = made(options)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(report.text(plan), end="")
    if options.json:
        options.json.write_text(json.dumps(report.record(plan), indent=1) + "\n")
    return 0


def made(options: argparse.Namespace) -> report.Plan:
    """The plan that is asked for; a ValueError says what cannot be."""
    model, rates = find_model(options.model), find_rates(options.device)
    recipes = [find_recipe(name) for name in dict.fromkeys((BASELINE.name, *options.recipes))]
    mesh, why = _mesh(options, model, rates)
    setup = Setup(model, mesh, options.batch, options.sequence or model.sequence, options.sequence_parallel)
    for recipe in recipes:
        setup.check(recipe)
    jobs = [
        Job("head", BASELINE.name, setup.compiled),
        *(Job("layer", recipe.name, setup.compiled) for recipe in recipes),
    ]
    head, *layers = child.run(jobs)
    costs = {of.name: cost(setup, rates, of, layer, head) for of, layer in zip(recipes, layers, strict=True)}
    return report.Plan(setup, rates, why, costs)


def _mesh(options: argparse.Namespace, model: Model, rates: Rates) -> tuple[Mesh, str]:
    """The mesh that is given, or one for so many devices, and why."""
    if options.mesh is None and options.devices is None:
        raise ValueError("give `--devices`, `--mesh`, or both")
    if options.mesh is None:
        return choose(model, options.devices, rates)
    mesh = parse(options.mesh)
    if options.devices not in (None, mesh.devices):
        raise ValueError(
            f"the mesh {options.mesh} has {mesh.devices} devices, not the {options.devices} of `--devices`"
        )
    return mesh, ""


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value
