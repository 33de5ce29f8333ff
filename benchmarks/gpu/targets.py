"""Runs the cases of `block`, `grouped` and `decode` that have targets, in some minutes, and prints a table of targets.

Targets are defined in their suites. The suites run the cases and write them to the device's file, from which the table
is printed. `python -m benchmarks.gpu.targets` prints the table of the results that the docs quote, without a GPU. The
table includes the latest results of whole models; `--suite model` runs those.
"""

import json
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.gpu import block, decode, dense, grouped, model_targets, report
from benchmarks.gpu.remarks import remark
from benchmarks.record import RESULTS
from benchmarks.table import verdict

SUITES: dict[str, Any] = {"block": block, "grouped": grouped, "decode": decode}
CASES: dict[str, tuple[str, ...]] = {
    "block": (*block.STEPS, *(name for name, matmul in block.MATMULS.items() if matmul.target is not None)),
    "grouped": tuple(grouped.TARGETS),
    "decode": tuple(name for name, (*_, batch) in decode.CASES.items() if batch in decode.TARGETS),
}
# The baseline of each measure; that of `of_peer` is the case's peer.
OVER = {"ratio": dense.BASE, "of_bf16": decode.BASE, "of_dense": grouped.DENSE, "of_lax": grouped.PEER}
WIDTHS = 55, 28, 7, 7, 6
TITLES = "case", "relative to", "target", "reached", ""


class Row(NamedTuple):
    """A target of a case.

    reached: None if the baseline was not measured. errors: relative errors by implementation and size.
    remark: what limits a case that missed its target, or why its baseline was not measured.
    at_most: whether the target is an upper bound.
    """

    case: str
    over: str
    target: float
    reached: float | None
    errors: dict[str, float]
    remark: str
    at_most: bool = False

    @property
    def met(self) -> bool | None:
        return report.is_met(self.reached, self.target, self.at_most)


def run(cases: tuple[str, ...], rounds: int, skipped: frozenset[str]) -> None:
    for name, suite in SUITES.items():
        selected = tuple(case for case in CASES[name] if not cases or case in cases)
        if selected:
            print(f"{name}: {', '.join(selected)}", flush=True)
            suite.run(selected, rounds, skipped)
    print("\n" + text(json.loads(report.device_file().read_text()), cases))


def text(results: dict[str, Any], cases: tuple[str, ...] = ()) -> str:
    lines = [_line(TITLES)]
    for row in rows(results, cases):
        reached = "-" if row.reached is None else f"{row.reached:.2f}"
        lines.append(
            _line((row.case, row.over, f"{'<=' if row.at_most else '>='} {row.target:g}", reached, verdict(row.met)))
        )
        errors = ", ".join(f"{name}: {error:.1e}" for name, error in row.errors.items())
        notes = [f"errors of {errors}" if errors else "", row.remark]
        lines += [textwrap.indent(textwrap.fill(note, 112), "    ") for note in notes if note]
    return "\n".join(lines)


def _line(cells: tuple[str, ...]) -> str:
    return " | ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()


def rows(results: dict[str, Any], cases: tuple[str, ...] = ()) -> Iterator[Row]:
    """Yields the targets of the cases that were measured."""
    for name, known in CASES.items():
        suite = results.get(name, {"cases": []})
        measured = {case["case"]: case for case in suite["cases"]}
        for case in known:
            if case in measured and (not cases or case in cases):
                yield from _rows_of(name, suite, measured[case])
    for aim in model_targets.aims(results):
        if aim.reached is not None and not cases:
            yield Row(aim.name, aim.over, aim.target, aim.reached, {}, "", aim.at_most)


def _rows_of(name: str, suite: dict[str, Any], case: dict[str, Any]) -> Iterator[Row]:
    for implementation, result in case["sides"].items():
        for measure, target in _targets(result).items():
            over, reached = OVER.get(measure) or case["peer"], result.get(measure)
            text = remark(name, case["case"], implementation, target, reached)
            if reached is None:
                text = f"{over} was not measured: {case['missing'].get(over, 'no reason was recorded')}"
            errors = _errors(suite, case, implementation)
            yield Row(_title(case, implementation), over, target, reached, errors, text)


def _targets(result: dict[str, Any]) -> dict[str, float]:
    """Targets by measure."""
    if "targets" in result:
        return result["targets"]
    (measure,) = (key for key in ("ratio", "of_peer", "of_bf16") if key in result)
    return {} if result["target"] is None else {measure: result["target"]}


def _title(case: dict[str, Any], implementation: str) -> str:
    if "batch" in case:
        return f"{implementation}: {case['batch']} x {case['sequence']} tokens, {case['inputs']} -> {case['outputs']}"
    if "groups" in case:
        sizes = f"{sum(case['groups'])} tokens of {len(case['groups'])} experts"
        return f"{implementation} {case['case']}: {sizes}, {case['inputs']} -> {case['outputs']}"
    size = f", {case['k']}" if "k" in case else ""
    return f"{implementation}: {case['case']}{size}"


def _errors(suite: dict[str, Any], case: dict[str, Any], implementation: str) -> dict[str, float]:
    """Relative errors: for a step, of gradients against XLA's; for a matmul, of scaledot and XLA against float64."""
    if "errors" not in case:
        checks = suite["checks"][implementation.removeprefix("scaledot ")]
        return {f"{gradient} against XLA's": error for gradient, error in checks.items()}
    return case["errors"].get(implementation, case["errors"])


if __name__ == "__main__":
    from benchmarks.gpu.page import QUOTED  # needs matplotlib, which a measuring machine need not have

    print(text(json.loads((RESULTS / QUOTED).read_text())))
