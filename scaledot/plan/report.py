"""A plan for people, one table for each recipe and one that compares them, and for programs."""

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


class Plan(NamedTuple):
    """why: a mesh was chosen; empty where it was given."""

    setup: Setup
    rates: Rates
    why: str
    costs: Mapping[str, Cost]


def text(plan: Plan) -> str:
    parts = [_heading(plan), *(_recipe(plan, name, cost) for name, cost in plan.costs.items()), _comparison(plan)]
    return "\n\n".join(parts) + "\n"


def record(plan: Plan) -> dict[str, Any]:
    """Everything that the text says, and what it comes from."""
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
        "why": plan.why,
        "compiled_mesh": setup.compiled.mesh.sizes,
        "batch": setup.batch,
        "sequence": setup.sequence,
        "sequence_parallel": setup.sequence_parallel,
        "tokens_per_step": setup.all_tokens,
        "rates": dataclasses.asdict(plan.rates),
        "recipes": {name: _cost(cost) for name, cost in plan.costs.items()},
    }


def _cost(cost: Cost) -> dict[str, Any]:
    seconds, limit = cost.at_once
    return {
        "work_ms": {name: 1e3 * of for name, of in cost.work.items()},
        "traffic": [
            {"axes": row.axes, "link": row.link, "kind": row.kind, "dtype": row.dtype, "collectives": row.collectives}
            | {"sent_bytes": row.sent, "ms": 1e3 * row.seconds}
            for row in cost.traffic
        ],
        "memory_bytes": cost.memory,
        "step_ms": {"in_turns": 1e3 * cost.in_turns, "at_once": 1e3 * seconds, "limit": limit},
    }


def _heading(plan: Plan) -> str:
    setup, mesh, compiled = plan.setup, plan.setup.mesh, plan.setup.compiled.mesh
    lines = [
        f"{setup.model.name}, {setup.model.parameters:,} parameters, on {mesh.devices} × "
        f"{plan.rates.device}: {mesh}{', sequence parallel' if setup.sequence_parallel else ''}",
        f"{setup.batch} × {setup.sequence} tokens on a device, {setup.all_tokens:,} in a step",
    ]
    lines += [plan.why] if plan.why else []
    if compiled != mesh:
        lines.append(f"compiled for {compiled}: devices along dp repeat each other, and only sums run along it")
    else:
        lines.append("compiled for this mesh")
    return "\n".join(lines)


def _recipe(plan: Plan, name: str, cost: Cost) -> str:
    seconds, limit = cost.at_once
    rows = [(of, "", "", "", "", f"{1e3 * time:.2f}") for of, time in cost.work.items()]
    rows += [
        (
            f"{row.kind} {row.dtype}",
            "·".join(row.axes),
            row.link,
            str(row.collectives),
            _gb(row.sent),
            f"{1e3 * row.seconds:.2f}",
        )
        for row in cost.traffic
    ]
    total, capacity = sum(cost.memory.values()), 1e9 * plan.rates.memory.gb
    memory = ", ".join(f"{of} {_gb(size)}" for of, size in cost.memory.items())
    fits = "" if total <= capacity else ": does not fit"
    return "\n".join(
        [
            f"{name}, on a device in a step",
            _aligned([("", "axes", "link", "number", "GB sent", "ms"), *rows]),
            f"  in turns {1e3 * cost.in_turns:.2f} ms; all at once {1e3 * seconds:.2f} ms, which {limit} takes",
            f"  memory in GB: {memory}; {_gb(total)} of {plan.rates.memory.gb:g}{fits}",
        ]
    )


def _comparison(plan: Plan) -> str:
    """Against bfloat16: what collectives send and take, and the step."""
    base = plan.costs[BASELINE.name]
    rows = [_COMPARED]
    for name, cost in plan.costs.items():
        rows.append(
            (
                name,
                _gb(cost.gathered),
                _share(cost.gathered, base.gathered),
                _gb(cost.sent),
                _share(cost.sent, base.sent),
                f"{1e3 * cost.moving:.1f}",
                f"{1e3 * (base.moving - cost.moving):.1f}",
                f"{1e3 * cost.in_turns:.1f}",
                f"{base.in_turns / cost.in_turns:.2f} ×",
                f"{1e3 * cost.at_once[0]:.1f}",
                f"{base.at_once[0] / cost.at_once[0]:.2f} ×",
            )
        )
    return f"collectives and steps beside bf16, times in ms\n{_aligned(rows)}"


_COMPARED = (
    *("recipe", "GB gathered", "of bf16", "GB sent", "of bf16", "ms of it", "saved"),
    *("in turns", "faster", "at once", "faster"),
)


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _aligned(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        for first, *rest in rows
    )
    return "\n".join(f"  {'  '.join(line)}".rstrip() for line in lines)


def _gb(size: float) -> str:
    return f"{size / 1e9:.3f}"
