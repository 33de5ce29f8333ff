"""Makes plans: compiles the programs of a setup, computes its costs, and proposes another mesh if it does not fit."""

import dataclasses
from collections.abc import Sequence
from itertools import islice

from scaledot.plan import compile_process, fit
from scaledot.plan.cost import cost
from scaledot.plan.gemm_kinds import BASELINE
from scaledot.plan.programs import Job
from scaledot.plan.rates import Rates
from scaledot.plan.report import Plan
from scaledot.plan.setup import Setup
from scaledot.recipes import Recipe

# Candidates that are compiled before giving up: a candidate fits by its estimate, but may not once it is compiled.
MAX_CANDIDATES = 2


def make_plan(setup: Setup, rates: Rates, recipes: Sequence[Recipe], mesh_reason: str = "") -> Plan:
    """Compiles a decoder block under bfloat16 and every recipe, and the output head in bfloat16.

    Returns the costs of a step under each of these recipes.
    """
    compared = list(dict.fromkeys((BASELINE, *recipes)))
    for recipe in compared:
        setup.check(recipe)
    compiled_setup = setup.compilation_setup
    jobs = [Job("head", BASELINE.name, compiled_setup)]
    jobs += [Job("block", recipe.name, compiled_setup) for recipe in compared]
    head, *blocks = compile_process.compile_jobs(jobs)
    costs = {r.name: cost(setup, rates, r, block, head) for r, block in zip(compared, blocks, strict=True)}
    return Plan(setup, rates, mesh_reason, costs, tuple(recipe.name for recipe in recipes))


def propose_plan(plan: Plan, recipes: Sequence[Recipe]) -> Plan | None:
    """Returns a plan that fits: on another mesh with as many devices, else on the fewest devices; None if none fits."""
    setup, rates = plan.setup, plan.rates
    others = [one for one in fit.nearest_fitting(setup, recipes, rates) if one.mesh.sizes != setup.mesh.sizes]
    proposal = _first_fitting(others, rates, recipes, f"the fitting mesh nearest to {setup.mesh}")
    if proposal is not None:
        return proposal
    fewest = fit.fewest_devices(setup, recipes, rates)
    return _first_fitting(fewest, rates, recipes, _reason_for_fewest(setup, rates, recipes))


def _reason_for_fewest(setup: Setup, rates: Rates, recipes: Sequence[Recipe]) -> str:
    reason = f"the fewest devices that fit; no mesh of {setup.mesh.devices} does"
    parallel = fit.nearest_fitting(dataclasses.replace(setup, sequence_parallel=True), recipes, rates)
    return f"{reason}, but {parallel[0].mesh} would with --sequence-parallel" if parallel else reason


def _first_fitting(setups: Sequence[Setup], rates: Rates, recipes: Sequence[Recipe], mesh_reason: str) -> Plan | None:
    plans = (make_plan(setup, rates, recipes, mesh_reason) for setup in islice(setups, MAX_CANDIDATES))
    return next((plan for plan in plans if plan.fits), None)
