"""`python -m benchmarks.convergence.page`: generates docs/notes/convergence.md and its chart from a results file.

All numbers come from the file; the text around them is below.
"""

import json
import statistics

from matplotlib.figure import Figure

from benchmarks.convergence.gpt import POINT, bounds
from benchmarks.record import RESULTS

DOCS = RESULTS.parent.parent / "docs"
PAGE, PICTURE = DOCS / "notes" / "convergence.md", DOCS / "images" / "convergence.png"
QUOTED, MENTIONED = "convergence-nvidia-h200-jax0.11.2.json", "convergence-jax0.12.0.1.json"
COLOURS = {
    "float32": "black",
    "bfloat16": "0.6",
    "fp8_current": "tab:blue",
    "mxfp8": "tab:cyan",
    "nvfp4": "tab:orange",
    "mxfp4": "tab:red",
    "nvfp4, no tensor scale": "tab:purple",
}

TEXT = """# Does it train?

<!-- Made by `python -m benchmarks.convergence.page`; change that, not this. -->

Three tests that separate good recipes from bad ones, run by `python -m benchmarks.convergence --seeds {seeds}` on
{device} with jax {jax}, {date}: [{results}](../../benchmarks/results/{results}). The last two tests show effects that
the loss curve of a short run does not.

## A tiny GPT on a source of known entropy

The data come from an order-2 Markov source of 16 symbols, whose entropy is known exactly; *excess* is the loss above
it. The model is a GPT of two blocks, trained for {steps} steps
([examples/gpt_linen.py](../../examples/gpt_linen.py)); fwd, dgrad and wgrad of all four linear layers of each block are
quantised. Every row starts from the same {seeds} initial models and trains on the same batches as float32. Excess is in
nats per symbol on held-out sequences, *gap* is the difference to float32, with the standard error over seeds. Rows with
a bound must keep it; most ablations of NVFP4's recipe have none.

![Excess loss over steps](../images/convergence.png)

{gpt}

{relations}

In so short a run, the effects of stochastic rounding, the Hadamard transform, four-over-six and the shape of weight
blocks are little larger than the standard error. That of leaving the last block in float32 is larger.

[{other}](../../benchmarks/results/{other}) is the same test on a CPU with {other_seeds} seeds, too few for a bound of
0.001: the gap of bfloat16 is {other_bf16} there.

## Bias of the cast

The relative error of the mean of T draws falls like 1/√T if a cast is unbiased. *Of the bound* is the error at T = 1000
over 1.2 times the error of one draw over √1000: a cast below 1 is unbiased.

{bias}

NVFP4's block scales are rounded to E4M3, at times down; the largest elements of such a block clip, which is a bias of
about 1 % that no rounding of the codes removes. `guard=True` in the format maps the block's maximum to 16/17 of the
largest code and is unbiased; the error of a single draw is larger, and the GPT above loses more with it. The named
recipes follow the published one, without a guard.

## Stall probe

Gradient descent on a quadratic whose curvatures span two decades within each block of 16. The result is the error that
the four flattest coordinates have left after 600 steps, from 1 at the start: up to 0.10 is good, from 0.14 on they have
stalled.

{stall}

Rounding to nearest turns gradients that are small relative to their block's maximum into zeros; using one key for all
steps stalls too, and with a single level of scales, gradients of 1e-3 are lost entirely.
"""


def text(results: str, other: str) -> str:
    """Returns the page as Markdown. results: the file that it is about; other: one that it mentions."""
    record, mentioned = read(results), read(other)
    environment = record["environment"]
    bf16 = next(row for row in mentioned["gpt"] if row["name"] == "bfloat16")
    return TEXT.format(
        seeds=record["seeds"],
        steps=record["steps"],
        device=f"one {environment['device']}" if environment["device"] != "cpu" else environment["cpu"],
        jax=environment["jax"],
        date=environment["date"][:10],
        results=results,
        other=other,
        other_seeds=mentioned["seeds"],
        other_bf16=_gap(bf16),
        gpt=_table(("", "excess", "gap", "must be", ""), [_gpt_cells(row) for row in record["gpt"]]),
        relations="\n".join(f"* {r['what']}: {r['value']:+.4f}, {_met(r['met'])}" for r in record["relations"]),
        bias=_table(
            ("cast", "T = 1", "10", "100", "1000", "of the bound", ""), [_bias_cells(r) for r in record["bias"]]
        ),
        stall=_table(("cast of the gradient", "error left", ""), [_stall_cells(row) for row in record["stall"]]),
    )


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) + ("---:",) * (len(head) - 2) + ("---",), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _gpt_cells(row: dict) -> tuple[str, ...]:
    gap = "" if row["name"] == "float32" else _gap(row)
    return row["name"], f"{statistics.mean(row['excess']):.4f}", gap, bounds(row), _met(row["met"])


def _gap(row: dict) -> str:
    return f"{row['gap']:+.4f} ± {row['gap_standard_error']:.4f}"


def _bias_cells(row: dict) -> tuple[str, ...]:
    errors = (f"{error:.4f}" for error in row["error"].values())
    return row["name"], *errors, f"{row['over_gate']:.2f}", "unbiased" if row["unbiased"] else "biased"


def _stall_cells(row: dict) -> tuple[str, ...]:
    return row["name"], f"{row['error']:.3f}", row["verdict"]


def _met(met: bool | None) -> str:
    return {True: "met", False: "**missed**", None: ""}[met]


def picture(record: dict) -> Figure:
    """Charts of the excess loss over steps, and of the final gaps to float32."""
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    curves, gaps = figure.subplots(1, 2, width_ratios=(1.15, 1))
    rows = {row["name"]: row for row in record["gpt"]}
    for name, colour in COLOURS.items():
        steps = [POINT * (i + 0.5) for i in range(len(rows[name]["curve"]))]
        curves.semilogy(steps, rows[name]["curve"], color=colour, label=name, linewidth=1.5)
    curves.set(xlabel="step", ylabel="nats above the entropy of the source", title="Training")
    curves.legend(frameon=False, fontsize=9)
    shown = [row for row in record["gpt"][1:] if row["gap"] < 0.1][::-1]
    positions, errors = range(len(shown)), [row["gap_standard_error"] for row in shown]
    gaps.barh(positions, [row["gap"] for row in shown], xerr=errors, color="tab:blue", height=0.7)
    gaps.set_yticks(positions, [row["name"] for row in shown], fontsize=8.5)
    gaps.set(xlabel="nats above float32, on held-out sequences", title=f"Gap, {record['seeds']} seeds")
    for axes in (curves, gaps):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def read(name: str) -> dict:
    return json.loads((RESULTS / name).read_text())


def main() -> None:
    PICTURE.parent.mkdir(exist_ok=True)
    picture(read(QUOTED)).savefig(PICTURE, dpi=110)
    PAGE.write_text(text(QUOTED, MENTIONED))
    print(f"wrote {PAGE.relative_to(DOCS.parent)} and {PICTURE.relative_to(DOCS.parent)}")


if __name__ == "__main__":
    main()
