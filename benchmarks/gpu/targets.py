"""Runs the cases of `block`, `grouped` and `decode` that have targets, in some minutes, and prints a table of targets.

Targets are defined in their suites. The suites run the cases and write them to the device's file, from which the table
is printed. `python -m benchmarks.gpu.targets` prints the table of the performance page's results, without a GPU. The
table includes the latest results of whole models; `--suite model` runs those.
"""

import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.gpu import block, decode, dense, grouped, model_targets, report
from benchmarks.gpu.remarks import remark
from benchmarks.table import verdict

SUITES: dict[str, Any] = {"block": block, "grouped": grouped, "decode": decode}
CASES: dict[str, tuple[str, ...]] = {
    "block": (*block.STEP_LAYERS, *(name for name, matmul in block.MATMULS.items() if matmul.target is not None)),
    "grouped": tuple(grouped.TARGETS),
    "decode": tuple(name for name, (*_, batch) in decode.CASES.items() if batch in decode.TARGETS),
}
# The baseline of each ratio; that of `of_baseline` is recorded with the case.
BASELINES = {"ratio": dense.BASE, "of_bf16": decode.BASE, "of_dense": grouped.DENSE, "of_lax": grouped.LAX}
WIDTHS = 55, 28, 7, 7, 6
TITLES = "case", "relative to", "target", "reached", ""


class Row(NamedTuple):
    """A target of a case.

    measured: None if the baseline was not measured. errors: relative errors by implementation and size.
    remark: what limits a case that missed its target, or why its baseline was not measured.
    at_most: whether the target is an upper bound.
    """

    case: str
    relative_to: str
    target: float
    measured: float | None
    errors: dict[str, float]
    remark: str
    at_most: bool = False

    @property
    def met(self) -> bool | None:
        return report.is_met(self.measured, self.target, self.at_most)


def run(cases: tuple[str, ...], rounds: int, skipped: frozenset[str]) -> None:
    for name, suite in SUITES.items():
        selected = tuple(case for case in CASES[name] if not cases or case in cases)
        if selected:
            print(f"{name}: {', '.join(selected)}", flush=True)
            suite.run(selected, rounds, skipped)
    print("\n" + text(report.read(report.device_file()), cases))


def text(results: dict[str, Any], cases: tuple[str, ...] = ()) -> str:
    lines = [_line(TITLES)]
    for row in rows(results, cases):
        measured = "-" if row.measured is None else f"{row.measured:.2f}"
        lines.append(
            _line(
                (
                    row.case,
                    row.relative_to,
                    f"{'<=' if row.at_most else '>='} {row.target:g}",
                    measured,
                    verdict(row.met),
                )
            )
        )
        errors = ", ".join(f"{name}: {error:.1e}" for name, error in row.errors.items())
        notes = [f"errors of {errors}" if errors else "", row.remark]
        lines += [textwrap.indent(textwrap.fill(note, 112), "    ") for note in notes if note]
    return "\n".join(lines)


def _line(cells: tuple[str, ...]) -> str:
    return " | ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()


def rows(results: dict[str, Any], cases: tuple[str, ...] = ()) -> Iterator[Row]:
    """Yields the targets of the cases that were measured."""
    for name, case_names in CASES.items():
        suite = results.get(name, {"cases": []})
        by_name = {case["case"]: case for case in suite["cases"]}
        for case in case_names:
            if case in by_name and (not cases or case in cases):
                yield from _rows_of(name, suite, by_name[case])
    for each in model_targets.targets(results):
        if each.measured is not None and not cases:
            yield Row(each.name, each.relative_to, each.target, each.measured, {}, "", each.at_most)


def _rows_of(name: str, suite: dict[str, Any], case: dict[str, Any]) -> Iterator[Row]:
    for implementation, result in case["implementations"].items():
        for ratio, target in _targets(result).items():
            baseline, measured = BASELINES.get(ratio) or case["baseline"], result.get(ratio)
            text = remark(name, case["case"], implementation, target, measured)
            if measured is None:
                text = f"{baseline} was not measured: {case['not_run'].get(baseline, 'no reason was recorded')}"
            errors = _errors(suite, case, implementation)
            yield Row(_title(case, implementation), baseline, target, measured, errors, text)


def _targets(result: dict[str, Any]) -> dict[str, float]:
    """Targets by the key of their ratio."""
    if "targets" in result:
        return result["targets"]
    (ratio,) = (key for key in ("ratio", "of_baseline", "of_bf16") if key in result)
    return {} if result["target"] is None else {ratio: result["target"]}


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
    from benchmarks.gpu.page import RESULTS_FILE  # needs matplotlib, which a measuring machine need not have

    print(text(report.read(RESULTS_FILE)))
