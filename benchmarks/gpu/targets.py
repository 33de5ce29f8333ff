"""The targets of blocks, groups and decoding, in one run of some minutes, and one table of what was reached.

A target stands in its suite, beside the case that it is for. Here the suites run those of their cases that have one,
and write them as ever; the table is made from the device's file. `python -m benchmarks.gpu.targets` prints that of the
results in docs, without a GPU. Those of whole models stand there as last measured; `--suite model` runs them.
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
    "block": (*block.STEPS, *(name for name, product in block.PRODUCTS.items() if product.target is not None)),
    "grouped": tuple(grouped.TARGETS),
    "decode": tuple(name for name, (*_, batch) in decode.CASES.items() if batch in decode.TARGETS),
}
# What a measure of a side is held to; a product's own peer stands in its case.
OVER = {"ratio": dense.BASE, "of_bf16": decode.BASE, "of_dense": grouped.DENSE, "of_lax": grouped.PEER}
WIDTHS = 55, 28, 7, 7, 6
TITLES = "case", "over", "target", "reached", ""


class Row(NamedTuple):
    """A target of a case. reached: None where the other side was not measured. errors: by what they are of.

    at_most: the target is an upper bound.
    words: what limits a row that missed its target, or why there is nothing to compare with.
    """

    case: str
    over: str
    target: float
    reached: float | None
    errors: dict[str, float]
    words: str
    at_most: bool = False

    @property
    def met(self) -> bool | None:
        return report.is_met(self.reached, self.target, self.at_most)


def run(cases: tuple[str, ...], turns: int, skipped: frozenset[str]) -> None:
    for name, suite in SUITES.items():
        chosen = tuple(case for case in CASES[name] if not cases or case in cases)
        if chosen:
            print(f"{name}: {', '.join(chosen)}", flush=True)
            suite.run(chosen, turns, skipped)
    print("\n" + text(json.loads(report.device_file().read_text()), cases))


def text(results: dict[str, Any], cases: tuple[str, ...] = ()) -> str:
    lines = [_line(TITLES)]
    for row in rows(results, cases):
        reached = "-" if row.reached is None else f"{row.reached:.2f}"
        lines.append(
            _line((row.case, row.over, f"{'<=' if row.at_most else '>='} {row.target:g}", reached, verdict(row.met)))
        )
        off = ", ".join(f"{what}: {error:.1e}" for what, error in row.errors.items())
        below = [f"errors of {off}" if off else "", row.words]
        lines += [textwrap.indent(textwrap.fill(words, 112), "    ") for words in below if words]
    return "\n".join(lines)


def _line(cells: tuple[str, ...]) -> str:
    return " | ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()


def rows(results: dict[str, Any], cases: tuple[str, ...] = ()) -> Iterator[Row]:
    """Of those cases that a file has results of."""
    for name, known in CASES.items():
        suite = results.get(name, {"cases": []})
        measured = {case["case"]: case for case in suite["cases"]}
        for case in known:
            if case in measured and (not cases or case in cases):
                yield from _rows_of(name, suite, measured[case])
    for aim in model_targets.aims(results):
        if aim.reached is not None and not cases:
            yield Row(aim.what, aim.over, aim.target, aim.reached, {}, "", aim.at_most)


def _rows_of(name: str, suite: dict[str, Any], case: dict[str, Any]) -> Iterator[Row]:
    for side, found in case["sides"].items():
        for measure, target in _targets(found).items():
            over, reached = OVER.get(measure) or case["peer"], found.get(measure)
            words = remark(name, case["case"], side, target, reached)
            if reached is None:
                words = f"{over} was not measured: {case['missing'].get(over, 'no reason was left')}"
            yield Row(_title(case, side), over, target, reached, _errors(suite, case, side), words)


def _targets(side: dict[str, Any]) -> dict[str, float]:
    """By measure."""
    if "targets" in side:
        return side["targets"]
    (measure,) = (key for key in ("ratio", "of_peer", "of_bf16") if key in side)
    return {} if side["target"] is None else {measure: side["target"]}


def _title(case: dict[str, Any], side: str) -> str:
    if "batch" in case:
        return f"{side}: {case['batch']} x {case['sequence']} tokens, {case['inputs']} -> {case['outputs']}"
    if "groups" in case:
        sizes = f"{sum(case['groups'])} tokens of {len(case['groups'])} experts"
        return f"{side} {case['case']}: {sizes}, {case['inputs']} -> {case['outputs']}"
    size = f", {case['k']}" if "k" in case else ""
    return f"{side}: {case['case']}{size}"


def _errors(suite: dict[str, Any], case: dict[str, Any], side: str) -> dict[str, float]:
    """Of a step, its gradients beside XLA's; of a product, ours and XLA's against float64."""
    if "errors" not in case:
        return {f"{what} beside XLA's": off for what, off in suite["checks"][side.removeprefix("scaledot ")].items()}
    return case["errors"].get(side, case["errors"])


if __name__ == "__main__":
    from benchmarks.gpu.page import QUOTED  # which draws, and a machine that measures need not

    print(text(json.loads((RESULTS / QUOTED).read_text())))
