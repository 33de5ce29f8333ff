"""`python -m benchmarks.convergence.page`: the page of docs about convergence, made from a results file.

Everything that is a number comes from the file; the words around it are below.
"""

import json
import statistics

from matplotlib.figure import Figure

from benchmarks.convergence.gpt import POINT, bounds
from benchmarks.record import RESULTS

DOCS = RESULTS.parent.parent / "docs"
PAGE, PICTURE = DOCS / "notes" / "convergence.md", DOCS / "images" / "convergence.png"
QUOTED, MENTIONED = "convergence-nvidia-h200-jax0.11.2.json", "convergence-jax0.12.0.1.json"
DRAWN = {
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

Three tests that tell good recipes from bad, run by `python -m benchmarks.convergence --seeds {seeds}` on {device}
with jax {jax}, {date}: [{results}](../../benchmarks/results/{results}). A loss curve of a short run does not show
everything: the last two tests see what it hides.

## A tiny GPT on a source of known entropy

An order-2 Markov source of 16 symbols, so that the loss above its entropy is the model's own; a GPT of two blocks,
{steps} steps ([examples/gpt_linen.py](../../examples/gpt_linen.py)), all four linear layers of each block quantised
in all three products. Every row starts from the same {seeds} initial models and sees the same batches as float32.
*Excess* is in nats per symbol on held-out sequences, *gap* is to float32, with the standard error over seeds. Rows
with a bound are recipes that must keep it; the others are parts taken out of NVFP4's recipe, and what breaks,
whatever they show.

![Excess loss over steps](../images/convergence.png)

{gpt}

{relations}

What this test cannot tell apart: stochastic rounding, the Hadamard transform, four-over-six and the shape of weight
blocks differ by little more than chance in so short a run. Leaving the last block in float32 does not.

[{other}](../../benchmarks/results/{other}) is the same on a CPU with {other_seeds} seeds. Too few for a bound of 0.001:
bfloat16 comes out at {other_bf16} there.

## Bias of the cast

The relative error of the mean of T draws falls like 1/√T where a cast is right on average. *Of the gate* is the
error at T = 1000 over 1.2 times that of one draw over √1000: below 1 is unbiased.

{bias}

NVFP4's block scales are rounded to E4M3 and round down at times; then the largest elements of a block clip, which
is a bias of about 1 % that no rounding mends. `guard=True` in the format maps the maximum to 16/17 and is unbiased;
it costs accuracy of the single draw, and the GPT above loses more with it. The named recipes follow the published
one, without a guard.

## Stall probe

Gradient descent on a quadratic whose curvatures spread over two decades within each block of 16. What is left in
the four flattest coordinates after 600 steps, from 1 at the start: up to 0.10 is good, from 0.14 on they have
stalled.

{stall}

Nearest rounding takes small gradients beside large ones to zero, and so does one key for all steps; a single level
of scales loses gradients of 1e-3 altogether.
"""


def text(results: str, other: str) -> str:
    """The page as Markdown, from the file that it is about and another that it mentions."""
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
            ("cast", "T = 1", "10", "100", "1000", "of the gate", ""), [_bias_cells(r) for r in record["bias"]]
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
    """Excess over steps, and the gaps of the rows at the end."""
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    curves, gaps = figure.subplots(1, 2, width_ratios=(1.15, 1))
    rows = {row["name"]: row for row in record["gpt"]}
    for name, colour in DRAWN.items():
        steps = [POINT * (i + 0.5) for i in range(len(rows[name]["curve"]))]
        curves.semilogy(steps, rows[name]["curve"], color=colour, label=name, linewidth=1.5)
    curves.set(xlabel="step", ylabel="nats above the entropy of the source", title="Training")
    curves.legend(frameon=False, fontsize=9)
    sound = [row for row in record["gpt"][1:] if row["gap"] < 0.1][::-1]
    places = range(len(sound))
    gaps.barh(
        places, [r["gap"] for r in sound], xerr=[r["gap_standard_error"] for r in sound], color="tab:blue", height=0.7
    )
    gaps.set_yticks(places, [row["name"] for row in sound], fontsize=8.5)
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
