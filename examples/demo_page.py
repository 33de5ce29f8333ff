"""The demo's HTML page: tables, loss curves, signal-to-noise ratios and next steps, in one file."""

import datetime
import html
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np
from matplotlib.figure import Figure

import scaledot as sd
from examples.demo_times import LARGE, Timed

if TYPE_CHECKING:
    from examples.demo import Run

COLOURS = {
    "float32": "#222222",
    "bfloat16": "#9a9a9a",
    "fp8_current": "#1f77b4",
    "fp8_delayed": "#17a2b8",
    "mxfp8": "#2ca02c",
    "nvfp4": "#e8710a",
    "nvfp4_plus": "#8c4bc9",
}
MATMULS = {"y": "forward, y = x w", "dx": "gradient of activations, dx = g wᵀ", "dw": "gradient of weights, dw = xᵀ g"}
Ratios = dict[str, dict[str, dict[str, float]]]  # dB by recipe, layer and matmul

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 60rem; margin: 2.5rem auto; padding: 0 1rem }
h1 { font-size: 1.9rem; margin-bottom: .2rem } h2 { font-size: 1.25rem; margin: 2.2rem 0 .4rem }
p { max-width: 46rem } .quiet { color: #666; font-size: .9rem }
table { border-collapse: collapse; margin: 1rem 0 } th, td { padding: .35rem .9rem; text-align: right }
th { color: #666; font-weight: 500; border-bottom: 1px solid #ccc } td:first-child, th:first-child { text-align: left }
tr:nth-child(even) td { background: #f7f7f7 } svg { width: 100%; height: auto }
pre { background: #f7f7f7; padding: .7rem 1rem; overflow-x: auto; font-size: .9rem; line-height: 1.45 }
.dot { display: inline-block; width: .75em; height: .75em; border-radius: 50%; margin-right: .5em }
"""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Low precision trains</title><style>{style}</style></head><body>
<h1>Low precision trains</h1>
<p>One small GPT, trained {runs} times for {steps} steps: the same initial parameters, the same batches, the same
optimizer. Only the precision of its eight linear layers differs, in all three matmuls, forward and backward.</p>
{table}
<p class="quiet"><b>Excess</b> is the loss on held-out sequences, in nats per symbol above the entropy of the source,
which is known because the source is a Markov chain: 0 is a perfect model. <b>Residuals</b> are what the linear layers
save for the backward pass: activations, or codes of activations and weights.</p>
<h2>Loss</h2>
{curves}
<h2>How exact is each matmul?</h2>
<p>Signal-to-noise ratio of the three matmuls of every linear layer, on the trained model's own tensors; 6 dB more
halve the error. <code>nvfp4</code> uses stochastic rounding for gradients: noisier, but nearly unbiased.
<code>nvfp4_plus</code> subtracts the mean of x over tokens, searches the block scales of least error, and corrects
those of gradients so that rounding to nearest is unbiased.</p>
{ratios}
<h2>How fast is it?</h2>
{times}
<h2>What next?</h2>
<p>Apply a recipe to your own Flax model. The model does not change:</p>
<pre>import scaledot as sd
model = sd.linen.with_recipe(model, "mxfp8")                      # Flax linen
sd.nnx.with_recipe(model, "fp8_current", rngs=nnx.Rngs(sr_rng=0))  # Flax NNX, in place</pre>
<p>Or run other examples from this repository:</p>
<pre>python -m examples.demo --steps 1000             # the same comparison, trained for longer
python -m examples.gpt_nnx --recipe fp8_block    # another recipe, in Flax NNX
make formats                                     # size and error of each format
make decode                                      # generate text with 4-bit weights
make moe                                         # a mixture of experts in fp8</pre>
<p>Read how to <a href="docs/howto/train-in-fp8.md">train in fp8</a>,
<a href="docs/howto/multiply.md">multiply by a quantised weight</a>,
<a href="docs/howto/shard-a-model.md">shard a model</a> and <a href="docs/howto/run-on-hopper.md">run on Hopper</a>;
the <a href="README.md">README</a> has the rest.</p>
<p class="quiet">scaledot {version}, jax {jax}, {device}, {date}. Written by <code>make demo</code>.</p>
</body></html>
"""

ON_A_CPU = """<p>On a CPU low precision saves memory, not time, so nothing was timed. On a machine with a GPU,
<code>make demo</code> times a large layer. On an H200, a linear layer of 4096&nbsp;→&nbsp;14336 trains
<a href="docs/notes/performance.md">1.7 times as fast</a> in fp8 as in bfloat16.</p>"""

ON_A_GPU = """<p>A linear layer of {inputs}&nbsp;→&nbsp;{outputs} on {tokens} tokens, forward and both gradients, on
this machine's {device}:</p>
{table}
<p class="quiet">Median of single steps, dispatch included. Formats that the GPU's tensor cores do not support are
dequantised to bfloat16 for their matmuls, which saves memory, not time.</p>"""


def page(runs: Sequence["Run"], ratios: Ratios, times: Sequence[Timed], steps: int) -> str:
    device = html.escape(jax.devices()[0].device_kind)
    return PAGE.format(
        style=STYLE,
        runs=len(runs),
        steps=steps,
        table=_run_table(runs),
        curves=_svg(draw_curves(runs)),
        ratios=_svg(draw_ratios(ratios)),
        times=times_section(times, device),
        version=sd.__version__,
        jax=jax.__version__,
        device=device,
        date=datetime.date.today().isoformat(),
    )


def times_section(times: Sequence[Timed], device: str) -> str:
    return ON_A_GPU.format(table=_time_table(times), device=device, **LARGE._asdict()) if times else ON_A_CPU


def _run_table(runs: Sequence["Run"]) -> str:
    first = runs[0]
    rows = []
    for run in runs:
        gap = "" if run is first else f"{run.excess - first.excess:+.4f}"
        residuals = f"{run.residual_bytes / 1024:,.0f} KiB", f"{run.residual_bytes / first.residual_bytes:.0%}"
        rows.append((run.name, f"{run.excess:.4f}", gap, *residuals))
    return _table(("", "excess", "gap to float32", "residuals", "of float32"), rows)


def _time_table(times: Sequence[Timed]) -> str:
    rows = [
        (t.name, f"{t.milliseconds:.2f}", f"{t.teraflops:,.0f}", f"{times[0].milliseconds / t.milliseconds:.2f} ×")
        for t in times
    ]
    return _table(("", "ms", "TFLOP/s", "speedup over bfloat16"), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An HTML table; the first cell of each row is the name of a precision."""
    lines = ["".join(f"<th>{cell}</th>" for cell in head)]
    for name, *cells in rows:
        dot = f'<span class="dot" style="background:{COLOURS[name]}"></span>'
        lines.append(f"<td>{dot}{name}</td>" + "".join(f"<td>{cell}</td>" for cell in cells))
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def draw_curves(runs: Sequence["Run"]) -> Figure:
    """Charts of the excess loss over all steps and over the last quarter."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    all_steps, last_quarter = figure.subplots(1, 2)
    steps = len(runs[0].curve)
    for run in runs:
        means, centres = _smoothed(run.curve)
        for axes in (all_steps, last_quarter):
            axes.plot(centres, means, color=COLOURS[run.name], label=run.name, linewidth=1.6)
    all_steps.set(yscale="log", xlabel="step", ylabel="nats above the entropy", title="all steps")
    last = [_smoothed(run.curve)[0][-len(_smoothed(run.curve)[0]) // 4 :] for run in runs]
    last_quarter.set(xlim=(0.75 * steps, steps), ylim=(0.9 * min(map(min, last)), 1.05 * max(map(max, last))))
    last_quarter.set(xlabel="step", title="the last quarter")
    all_steps.legend(frameon=False)
    return _cleaned(figure)


def _smoothed(curve: Sequence[float]) -> tuple[list[float], list[float]]:
    """Returns means over windows, and the steps at their centres."""
    width = max(1, len(curve) // 40)
    means = np.convolve(curve, np.full(width, 1 / width), mode="valid")
    return means.tolist(), (np.arange(len(means)) + (width - 1) / 2).tolist()


def draw_ratios(ratios: Ratios) -> Figure:
    """Charts of signal-to-noise ratios by layer, one per matmul."""
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    panels = figure.subplots(1, len(MATMULS), sharey=True)
    for axes, (matmul, title) in zip(panels, MATMULS.items(), strict=True):
        for i, (recipe, layers) in enumerate(ratios.items()):
            decibels = [layer[matmul] for layer in layers.values()]
            width = max(1.2, 3.6 - 1.6 * i)  # lines drawn first are wider, so that they stay visible under others
            axes.plot(decibels, "o-", color=COLOURS[recipe], label=recipe, markersize=2 + width, linewidth=width)
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
