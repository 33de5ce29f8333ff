"""Prints a plan: as text, with one table per recipe and one that compares them, or as a record for JSON."""

import dataclasses
import datetime
import platform
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

import scaledot
from scaledot.plan.cost import Cost
from scaledot.plan.gemm_kinds import BASELINE
from scaledot.plan.rates import Rates
from scaledot.plan.setup import Setup

DISPLAY_NAMES = {"compute": "compute", "nvlink": "NVLink", "network": "network"}


class Plan(NamedTuple):
    """Costs of a setup under several recipes.

    mesh_reason: why this mesh was chosen; empty if `--mesh` was passed.
    required_recipes: those that must fit the memory; all of `costs` if empty.
    """

    setup: Setup
    rates: Rates
    mesh_reason: str
    costs: Mapping[str, Cost]
    required_recipes: tuple[str, ...] = ()

    @property
    def too_large(self) -> dict[str, float]:
        """Bytes of memory per device under the required recipes that do not fit."""
        needed = {name: self.costs[name].memory_bytes for name in self.required_recipes or self.costs}
        return {name: size for name, size in needed.items() if size > self.rates.memory.bytes}

    @property
    def fits(self) -> bool:
        return not self.too_large


def text(plan: Plan, proposal: Plan | None = None) -> str:
    """Returns the tables of a plan; if it does not fit, also the proposal's."""
    if plan.fits:
        return _tables(plan)
    proposed = [] if proposal is None else ["", _tables(proposal)]
    return "\n".join([_tables(plan), _does_not_fit(plan, proposal), *proposed])


def _does_not_fit(plan: Plan, proposal: Plan | None) -> str:
    needed = ", ".join(f"{name} {_gb(size)} GB" for name, size in plan.too_large.items())
    line = f"{plan.setup.mesh} does not fit {plan.rates.memory.gb:g} GB: {needed}"
    if proposal is not None:
        return f"{line}\nproposed: {proposal.setup.mesh}"
    setup = plan.setup
    smaller = (
        "a smaller `--batch` or `--sequence`"
        if setup.sequence_parallel
        else "`--sequence-parallel` or a smaller `--batch`"
    )
    tokens = f"{setup.batch} × {setup.sequence} tokens per tp group"
    return f"{line}\nno mesh fits {tokens}; {smaller} would reduce the residuals\n"


def _tables(plan: Plan) -> str:
    sections = [_heading(plan), *(_recipe(plan, name, cost) for name, cost in plan.costs.items()), _comparison(plan)]
    return "\n\n".join(sections) + "\n"


def record(plan: Plan) -> dict[str, Any]:
    """Returns everything that the text contains, with the environment and rates, as JSON values."""
    setup = plan.setup
    return {
        "environment": {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "python": platform.python_version(),
            "jax": jax.__version__,
            "scaledot": scaledot.__version__,
        },
        "model": dataclasses.asdict(setup.model) | {"parameters": setup.model.parameters},
        "mesh": setup.mesh.sizes,
        "mesh_reason": plan.mesh_reason,
        "compiled_mesh": setup.compilation_setup.mesh.sizes,
        "batch": setup.batch,
        "sequence": setup.sequence,
        "sequence_parallel": setup.sequence_parallel,
        "tokens_per_step": setup.tokens_per_step,
        "fits": plan.fits,
        "rates": dataclasses.asdict(plan.rates),
        "recipes": {name: _cost_record(cost) for name, cost in plan.costs.items()},
    }


def _cost_record(cost: Cost) -> dict[str, Any]:
    seconds, bottleneck = cost.full_overlap
    return {
        "compute_ms": {name: 1e3 * value for name, value in cost.compute_seconds.items()},
        "traffic": [
            {"axes": row.axes, "link": row.link, "kind": row.kind, "dtype": row.dtype, "collectives": row.collectives}
            | {"sent_bytes": row.sent_bytes, "ms": 1e3 * row.seconds}
            for row in cost.traffic
        ],
        "memory_bytes": cost.memory,
        "step_ms": {"no_overlap": 1e3 * cost.no_overlap, "full_overlap": 1e3 * seconds, "bottleneck": bottleneck},
    }


def _heading(plan: Plan) -> str:
    setup, mesh, compiled = plan.setup, plan.setup.mesh, plan.setup.compilation_setup.mesh
    lines = [
        f"{setup.model.name}, {setup.model.parameters:,} parameters, on {mesh.devices} × "
        f"{plan.rates.device}: {mesh}{', sequence parallel' if setup.sequence_parallel else ''}",
        f"{_tokens(setup)}, {setup.tokens_per_step:,} per step",
    ]
    lines += [plan.mesh_reason] if plan.mesh_reason else []
    if compiled != mesh:
        lines.append(
            f"compiled for {compiled}: devices along dp run identical programs, with only all-reduces along dp"
        )
    else:
        lines.append("compiled for this mesh")
    return "\n".join(lines)


def _tokens(setup: Setup) -> str:
    """Returns batch and sequence in words; the devices of a tp group have the same sequences."""
    tp = setup.mesh.sizes["tp"]
    group = "device" if tp == 1 else f"tp group of {tp} devices"
    return f"{setup.batch} × {setup.sequence} tokens per {group}"


def _recipe(plan: Plan, name: str, cost: Cost) -> str:
    seconds, bottleneck = cost.full_overlap
    rows = [(kind, "", "", "", "", _ms(value)) for kind, value in cost.compute_seconds.items()]
    rows += [
        (
            f"{row.kind} {row.dtype}",
            "·".join(row.axes),
            DISPLAY_NAMES[row.link],
            str(row.collectives),
            _gb(row.sent_bytes),
            _ms(row.seconds),
        )
        for row in cost.traffic
    ]
    total, capacity = cost.memory_bytes, plan.rates.memory.bytes
    memory = ", ".join(f"{kind} {_gb(size)}" for kind, size in cost.memory.items())
    fits = "" if total <= capacity else ": does not fit"
    return "\n".join(
        [
            f"{name}, per device and step",
            _aligned([("", "axes", "link", "count", "GB sent", "ms"), *rows]),
            f"  compute {_ms(cost.compute)} ms, NVLink {_ms(cost.seconds_on('nvlink'))} ms, "
            f"network {_ms(cost.seconds_on('network'))} ms",
            f"  no overlap {_ms(cost.no_overlap)} ms, full overlap {_ms(seconds)} ms ({DISPLAY_NAMES[bottleneck]})",
            f"  memory in GB: {memory}; {_gb(total)} of {plan.rates.memory.gb:g}{fits}",
        ]
    )


def _comparison(plan: Plan) -> str:
    """Returns a table with one row per recipe; its columns are those of docs/notes/scaling.md."""
    base = plan.costs[BASELINE.name]
    rows = [_COMPARISON_COLUMNS]
    for name, cost in plan.costs.items():
        seconds, bottleneck = cost.full_overlap
        rows.append(
            (
                name,
                _gb(cost.gathered_bytes),
                _percentage(cost.gathered_bytes, base.gathered_bytes),
                _gb(cost.sent_bytes),
                f"{1e3 * cost.compute:.1f}",
                f"{1e3 * cost.seconds_on('nvlink'):.1f}",
                f"{1e3 * cost.seconds_on('network'):.1f}",
                f"{1e3 * cost.no_overlap:.1f}",
                f"{base.no_overlap / cost.no_overlap:.2f} ×",
                f"{1e3 * seconds:.1f} ({DISPLAY_NAMES[bottleneck]})",
                f"{base.full_overlap[0] / seconds:.2f} ×",
                f"{cost.memory_bytes / 1e9:.0f} of {plan.rates.memory.gb:g}",
            )
        )
    return f"comparison with bf16, times in ms per step\n{_aligned(rows)}"


_COMPARISON_COLUMNS = (
    *("recipe", "GB gathered", "of bf16", "GB sent", "compute", "NVLink", "network"),
    *("no overlap", "speedup", "full overlap", "speedup", "GB of memory"),
)


def _percentage(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _aligned(rows: list[tuple[str, ...]]) -> str:
    """Returns lines with the first column aligned to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        for first, *rest in rows
    )
    return "\n".join(f"  {'  '.join(line)}".rstrip() for line in lines)


def _gb(size: float) -> str:
    return f"{size / 1e9:.3f}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"
