"""The page of the demo: a table, loss curves and signal-to-noise ratios, in one HTML file that needs no other."""

import datetime
import html
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np
from matplotlib.figure import Figure

import scaledot as sd

if TYPE_CHECKING:
    from examples.demo import Run

COLOURS = {
    "float32": "#222222",
    "bfloat16": "#9a9a9a",
    "fp8_current": "#1f77b4",
    "fp8_delayed": "#17a2b8",
    "mxfp8": "#2ca02c",
    "nvfp4": "#e8710a",
}
PRODUCTS = {"y": "forward, y = x w", "dx": "gradient of activations, dx = g wᵀ", "dw": "gradient of weights, dw = xᵀ g"}
Ratios = dict[str, dict[str, dict[str, float]]]  # dB by recipe, layer and product

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 60rem; margin: 2.5rem auto; padding: 0 1rem }
h1 { font-size: 1.9rem; margin-bottom: .2rem } h2 { font-size: 1.25rem; margin: 2.2rem 0 .4rem }
p { max-width: 46rem } .quiet { color: #666; font-size: .9rem }
table { border-collapse: collapse; margin: 1rem 0 } th, td { padding: .35rem .9rem; text-align: right }
th { color: #666; font-weight: 500; border-bottom: 1px solid #ccc } td:first-child, th:first-child { text-align: left }
tr:nth-child(even) td { background: #f7f7f7 } svg { width: 100%; height: auto }
.dot { display: inline-block; width: .75em; height: .75em; border-radius: 50%; margin-right: .5em }
"""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Low precision trains</title><style>{style}</style></head><body>
<h1>Low precision trains</h1>
<p>One small GPT, trained {runs} times for {steps} steps: the same initial parameters, the same batches, the same
optimizer. Only the precision of its eight linear layers differs, in all three products, forward and backward.</p>
{table}
<p class="quiet"><b>Excess</b> is the loss on sequences that were not trained on, in nats per symbol above the entropy
of the source, which is known because the source is a Markov chain: 0 is a perfect model. <b>Kept for backward</b> is
what the linear layers hold between the two passes: activations, or codes of activations and weights.</p>
<h2>Loss</h2>
{curves}
<h2>How exact is each product?</h2>
<p>Signal-to-noise ratio of the three products of every linear layer, on the trained model's own numbers. Six decibels
more halve the error. Gradients of <code>nvfp4</code> are rounded by chance: noisier, but nearly right on average.</p>
{ratios}
<p class="quiet">scaledot {version}, jax {jax}, {device}, {date}. Made by <code>make demo</code>.</p>
</body></html>
"""


def page(runs: Sequence["Run"], ratios: Ratios, steps: int) -> str:
    return PAGE.format(
        style=STYLE,
        runs=len(runs),
        steps=steps,
        table=_table(runs),
        curves=_svg(draw_curves(runs)),
        ratios=_svg(draw_ratios(ratios)),
        version=sd.__version__,
        jax=jax.__version__,
        device=html.escape(jax.devices()[0].device_kind),
        date=datetime.date.today().isoformat(),
    )


def _table(runs: Sequence["Run"]) -> str:
    first = runs[0]
    head = "<tr><th></th><th>excess</th><th>gap to float32</th><th>kept for backward</th><th>of float32</th></tr>"
    rows = [head]
    for run in runs:
        gap = "" if run is first else f"{run.excess - first.excess:+.4f}"
        cells = (f"{run.excess:.4f}", gap, f"{run.kept / 1024:,.0f} KiB", f"{run.kept / first.kept:.0%}")
        dot = f'<span class="dot" style="background:{COLOURS[run.name]}"></span>'
        rows.append(f"<tr><td>{dot}{run.name}</td>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f"<table>{''.join(rows)}</table>"


def draw_curves(runs: Sequence["Run"]) -> Figure:
    """Excess over steps, whole and from where the curves part."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    whole, end = figure.subplots(1, 2)
    steps = len(runs[0].curve)
    for run in runs:
        smooth, at = _smoothed(run.curve)
        for axes in (whole, end):
            axes.plot(at, smooth, color=COLOURS[run.name], label=run.name, linewidth=1.6)
    whole.set(yscale="log", xlabel="step", ylabel="nats above the entropy", title="all steps")
    last = [_smoothed(run.curve)[0][-len(_smoothed(run.curve)[0]) // 4 :] for run in runs]
    end.set(xlim=(0.75 * steps, steps), ylim=(0.9 * min(map(min, last)), 1.05 * max(map(max, last))))
    end.set(xlabel="step", title="the last quarter")
    whole.legend(frameon=False)
    return _cleaned(figure)


def _smoothed(curve: Sequence[float]) -> tuple[list[float], list[float]]:
    """Means over windows, and the steps at their centres."""
    width = max(1, len(curve) // 40)
    means = np.convolve(curve, np.full(width, 1 / width), mode="valid")
    return means.tolist(), (np.arange(len(means)) + (width - 1) / 2).tolist()


def draw_ratios(ratios: Ratios) -> Figure:
    """A panel for each product, layers from left to right."""
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    panels = figure.subplots(1, len(PRODUCTS), sharey=True)
    for axes, (product, title) in zip(panels, PRODUCTS.items(), strict=True):
        for i, (recipe, layers) in enumerate(ratios.items()):
            values = [layer[product] for layer in layers.values()]
            width = max(1.2, 3.6 - 1.6 * i)  # what lies under another line is wider
            axes.plot(values, "o-", color=COLOURS[recipe], label=recipe, markersize=2 + width, linewidth=width)
        names = [name.removeprefix("block_").replace("/", " ") for name in next(iter(ratios.values()))]
        axes.set_xticks(range(len(names)), names, rotation=60, fontsize=9)
        axes.set_title(title, fontsize=10)
        axes.grid(axis="y", color="0.92")
    panels[0].set_ylabel("dB")
    panels[0].set_ylim(bottom=0)
    panels[0].legend(frameon=False, fontsize=9)
    return _cleaned(figure)


def _cleaned(figure: Figure) -> Figure:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg")
    return text.getvalue()[text.getvalue().index("<svg") :]
