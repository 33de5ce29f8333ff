"""`scaledot plan`: what a training step of a model takes on a mesh, and a mesh that fits where that one does not."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from scaledot.cli.arguments import count
from scaledot.cli.output import as_json

if TYPE_CHECKING:
    from scaledot.plan.mesh import Mesh
    from scaledot.plan.models import Model
    from scaledot.plan.rates import Rates
    from scaledot.plan.report import Plan
    from scaledot.recipes import Recipe

EXAMPLES = (
    "scaledot plan --model llama3-405b --devices 10240 --sequence-parallel",
    "scaledot plan --model llama3-70b --mesh dp=4,fsdp=8,tp=8 --recipes fp8_block nvfp4 --device b200",
    "scaledot plan --model mine.json --devices 64 --json > plan.json",
)
RECIPES = ("bf16", "fp8_current", "fp8_block", "mxfp8", "nvfp4")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from scaledot.plan.rates import RATES

    parser.description = (
        "Estimate a training step on many devices. XLA compiles a layer for the mesh on CPU devices, from which\n"
        "collectives are read; times follow from a table of rates.\n\n"
        "Where a step does not fit the memory of a device, another mesh of as many devices is proposed, or the\n"
        "fewest devices that fit. The exit code is 1 where --mesh does not fit, or no mesh of --devices does."
    )
    parser.add_argument("--model", required=True, help="a name such as llama3-70b, or a .json file of its sizes")
    parser.add_argument("--devices", type=count, help="number of devices; without --mesh, a mesh is chosen")
    parser.add_argument(
        "--mesh", help="axes and their sizes, neighbouring devices along the last one: dp=4,fsdp=8,tp=8"
    )
    parser.add_argument("--device", default="h200", help=f"one of {', '.join(RATES)} (default %(default)s)")
    parser.add_argument(
        "--recipes",
        nargs="+",
        default=list(RECIPES),
        metavar="RECIPE",
        help=f"to compare with bf16, and which must fit (default: {' '.join(RECIPES)})",
    )
    parser.add_argument("--batch", type=count, default=1, help="sequences per index along dp and fsdp (default 1)")
    parser.add_argument("--sequence", type=count, help="tokens of a sequence (default: the model's)")
    parser.add_argument("--sequence-parallel", action="store_true", help="split tokens over tp between the matmuls")
    parser.add_argument(
        "--json", nargs="?", const=True, metavar="PATH", help="print JSON; with PATH, print text and write JSON there"
    )


def run(options: argparse.Namespace) -> int:
    from scaledot.plan import make, report
    from scaledot.plan.gemm_kinds import find_recipe

    recipes = [find_recipe(name) for name in dict.fromkeys(options.recipes)]
    plan = _plan(options, recipes)
    proposal = None if plan.fits else make.propose(plan, recipes)
    record = report.record(plan) | {"proposal": None if proposal is None else report.record(proposal)}
    if options.json is True:
        print(as_json(record))
    else:
        print(report.text(plan, proposal), end="")
    if isinstance(options.json, str):
        Path(options.json).write_text(as_json(record) + "\n")
        print(f"wrote {options.json}", file=sys.stderr)
    return 0 if plan.fits or (options.mesh is None and _has_devices(proposal, plan)) else 1


def _has_devices(proposal: "Plan | None", plan: "Plan") -> bool:
    return proposal is not None and proposal.setup.mesh.devices == plan.setup.mesh.devices


def _plan(options: argparse.Namespace, recipes: "list[Recipe]") -> "Plan":
    from scaledot.plan import fit
    from scaledot.plan.make import make
    from scaledot.plan.models import find_model
    from scaledot.plan.rates import find_rates
    from scaledot.plan.setup import Setup

    model, rates = find_model(options.model), find_rates(options.device)
    mesh, why = _mesh(options, model, rates)
    setup = Setup(model, mesh, options.batch, options.sequence or model.sequence, options.sequence_parallel)
    if options.mesh is None and any(map(setup.reason, recipes)):  # chosen by size alone, it cuts blocks of a recipe
        setup = next(iter(fit.nearest(setup, recipes, rates)), setup)
        why = f"the mesh nearest to {mesh}, which cuts blocks of a recipe"
    return make(setup, rates, recipes, why)


def _mesh(options: argparse.Namespace, model: "Model", rates: "Rates") -> "tuple[Mesh, str]":
    """The mesh of `--mesh`, or one chosen for the number of devices, and why."""
    from scaledot.plan.mesh import choose, parse

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
