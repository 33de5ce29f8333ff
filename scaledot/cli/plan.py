"""`scaledot plan`: estimates a training step of a model on a mesh, and proposes another mesh if it does not fit."""

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
        "Estimate a training step on many devices. XLA compiles a decoder block for the mesh on CPU devices;\n"
        "collectives are read from the compiled program, and times follow from a table of rates.\n\n"
        "If a step does not fit the memory of a device, another mesh with the same number of devices is proposed, or\n"
        "the smallest number of devices that fits. The exit code is 1 if --mesh does not fit, or no mesh of --devices."
    )
    parser.add_argument("--model", required=True, help="a name such as llama3-70b, or a .json file with its sizes")
    parser.add_argument("--devices", type=count, help="number of devices; without --mesh, a mesh is chosen")
    parser.add_argument("--mesh", help="axes and their sizes, such as dp=4,fsdp=8,tp=8; the last axis varies fastest")
    parser.add_argument("--device", default="h200", help=f"device type: {', '.join(RATES)} (default %(default)s)")
    parser.add_argument(
        "--recipes",
        nargs="+",
        default=list(RECIPES),
        metavar="RECIPE",
        help=f"recipes to compare with bf16, all of which must fit (default: {' '.join(RECIPES)})",
    )
    parser.add_argument(
        "--batch",
        type=count,
        default=1,
        help="sequences per data-parallel replica, of which there are dp x fsdp (default 1)",
    )
    parser.add_argument("--sequence", type=count, help="tokens of a sequence (default: the model's)")
    parser.add_argument("--sequence-parallel", action="store_true", help="split tokens over tp between the matmuls")
    parser.add_argument(
        "--json", nargs="?", const=True, metavar="PATH", help="print JSON; with PATH, print text and write JSON there"
    )


def run(options: argparse.Namespace) -> int:
    from scaledot.plan import report
    from scaledot.plan.gemm_kinds import find_recipe
    from scaledot.plan.planner import propose_plan

    recipes = [find_recipe(name) for name in dict.fromkeys(options.recipes)]
    plan = _plan(options, recipes)
    proposal = None if plan.fits else propose_plan(plan, recipes)
    record = report.record(plan) | {"proposal": None if proposal is None else report.record(proposal)}
    if options.json is True:
        print(as_json(record))
    else:
        print(report.text(plan, proposal), end="")
    if isinstance(options.json, str):
        Path(options.json).write_text(as_json(record) + "\n")
        print(f"wrote {options.json}", file=sys.stderr)
    return 0 if plan.fits or (options.mesh is None and _has_same_devices(proposal, plan)) else 1


def _has_same_devices(proposal: "Plan | None", plan: "Plan") -> bool:
    return proposal is not None and proposal.setup.mesh.devices == plan.setup.mesh.devices


def _plan(options: argparse.Namespace, recipes: "list[Recipe]") -> "Plan":
    from scaledot.plan import fit
    from scaledot.plan.models import find_model
    from scaledot.plan.planner import make_plan
    from scaledot.plan.rates import find_rates
    from scaledot.plan.setup import Setup

    model, rates = find_model(options.model), find_rates(options.device)
    mesh, mesh_reason = _mesh(options, model, rates)
    setup = Setup(model, mesh, options.batch, options.sequence or model.sequence, options.sequence_parallel)
    # `choose_mesh` looks at sizes of the model only: shards may not be whole blocks of a recipe.
    if options.mesh is None and any(map(setup.unsupported_reason, recipes)):
        setup = next(iter(fit.nearest_fitting(setup, recipes, rates)), setup)
        mesh_reason = f"the nearest mesh that fits; {mesh} would cut blocks of a recipe"
    return make_plan(setup, rates, recipes, mesh_reason)


def _mesh(options: argparse.Namespace, model: "Model", rates: "Rates") -> "tuple[Mesh, str]":
    """Returns the mesh of `--mesh` and "", or a mesh chosen for `--devices` and the reasons for its sizes."""
    from scaledot.plan.mesh import choose_mesh, parse_mesh

    if options.mesh is None and options.devices is None:
        raise ValueError("pass `--devices`, `--mesh`, or both")
    if options.mesh is None:
        return choose_mesh(model, options.devices, rates)
    mesh = parse_mesh(options.mesh)
    if options.devices not in (None, mesh.devices):
        raise ValueError(
            f"the mesh {options.mesh} has {mesh.devices} devices, not the {options.devices} of `--devices`"
        )
    return mesh, ""
