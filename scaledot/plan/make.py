"""A plan from a setup: programs compiled, costs counted; and another one where it does not fit the memory."""

import dataclasses
from collections.abc import Sequence
from itertools import islice

from scaledot.plan import child, fit
from scaledot.plan.cost import cost
from scaledot.plan.gemm_kinds import BASELINE
from scaledot.plan.programs import Job
from scaledot.plan.rates import Rates
from scaledot.plan.report import Plan
from scaledot.plan.setup import Setup
from scaledot.recipes import Recipe

MOST_PROPOSALS = 2  # that are compiled where the first one turns out larger than its estimate


def make(setup: Setup, rates: Rates, recipes: Sequence[Recipe], why: str = "") -> Plan:
    """Compiles the step under every recipe, and bfloat16 to compare with, and counts its costs."""
    every = list(dict.fromkeys((BASELINE, *recipes)))
    for recipe in every:
        setup.check(recipe)
    jobs = [Job("head", BASELINE.name, setup.compiled), *(Job("layer", of.name, setup.compiled) for of in every)]
    head, *layers = child.run(jobs)
    costs = {of.name: cost(setup, rates, of, layer, head) for of, layer in zip(every, layers, strict=True)}
    return Plan(setup, rates, why, costs, tuple(recipe.name for recipe in recipes))


def propose(plan: Plan, recipes: Sequence[Recipe]) -> Plan | None:
    """A plan that fits: on another mesh of as many devices, else on the fewest devices; None where there is none."""
    setup, rates = plan.setup, plan.rates
    others = [one for one in fit.nearest(setup, recipes, rates) if one.mesh.sizes != setup.mesh.sizes]
    proposal = _first_fitting(others, rates, recipes, f"the fitting mesh nearest to {setup.mesh}")
    if proposal is not None:
        return proposal
    return _first_fitting(fit.fewest(setup, recipes, rates), rates, recipes, _why_fewest(setup, rates, recipes))


def _why_fewest(setup: Setup, rates: Rates, recipes: Sequence[Recipe]) -> str:
    why = f"the fewest devices that fit; no mesh of {setup.mesh.devices} does"
    parallel = fit.nearest(dataclasses.replace(setup, sequence_parallel=True), recipes, rates)
    return f"{why}, but {parallel[0].mesh} would with --sequence-parallel" if parallel else why


def _first_fitting(setups: Sequence[Setup], rates: Rates, recipes: Sequence[Recipe], why: str) -> Plan | None:
    plans = (make(setup, rates, recipes, why) for setup in islice(setups, MOST_PROPOSALS))
    return next((plan for plan in plans if plan.fits), None)
