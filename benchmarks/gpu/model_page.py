"""Generates the whole-model sections of docs/notes/performance.md and the README, and their chart."""

import textwrap
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.gpu import kernel_times, model, model_targets, report
from benchmarks.table import markdown, verdict

TITLES = (
    "model",
    "program",
    "ms per step",
    "speedup over bfloat16",
    "first step incl. compilation, s",
    "beyond bfloat16, s",
    "peak GB",
    "peak less parameters, gradients and moments, GB",
)
README_ROWS = (
    "4 blocks/bfloat16",
    *(f"4 blocks/{recipe}" for recipe in model.RECIPES),
    "4 blocks, quantised LM head/fp8_current",
    f"4 blocks/{model.FLAX}",
    f"4 blocks, torch/{model.TORCHAO}",
    "16 blocks/fp8_current",
    "8 blocks, scanned/fp8_current",
    "8 blocks, scanned, save_quantized_residuals_and_gemms/fp8_current",
    "8 blocks, scanned, nothing_saveable/fp8_current",
)
README_TITLES = "model", "program", "ms per step", "speedup over bfloat16", "first step incl. compilation, s"
README_BASELINES = (
    "Speedups are over the same model in bfloat16, in the same framework and under the same `jax.checkpoint` policy. "
    "bfloat16 cannot use scaledot's policy `save_quantized_residuals_and_gemms`; that row is compared with bfloat16 "
    "under `checkpoint_dots`."
)
GPU_TIME_CASE = "4 blocks"
HEADLINE = "16 blocks/fp8_current"
EARLIER_MARK = "†"  # of rows whose results are not those of the current code
SPEEDUP_COLOURS = {"scaledot": "tab:purple", "bfloat16 and other libraries": "0.75"}
PHASE_COLOURS = {"trace": "tab:green", "lower": "tab:orange", "compile": "tab:blue", "run": "tab:red", "all": "0.4"}


def measured_rows(known: dict[str, Any]) -> list[str]:
    return [row for row in model.rows() if row in known]


def table(results: dict[str, Any]) -> str:
    known = model.measured(results)
    rows = []
    for row in measured_rows(known):
        result, ratio, extra = (
            known[row],
            model_targets.speedup(known, row),
            model_targets.extra_first_step_s(known, row),
        )
        memory = f"{result['peak_bytes'] / 1e9:.1f}", f"{model.activation_bytes(result) / 1e9:.1f}"
        first = model.first_step(result), _number(extra, 1)
        rows.append(
            (
                f"{model.model_name(row)}{_mark(row, result)}",
                row.split("/")[1],
                f"{1e3 * result['seconds']:.1f}",
                _number(ratio, 2),
                *first,
                *memory,
            )
        )
    return markdown(TITLES, rows)


def earlier_rows(results: dict[str, Any]) -> str:
    """A sentence on the rows that `table` marks, or "" if there are none."""
    known = model.measured(results)
    if not any(_is_earlier(row, known[row]) for row in measured_rows(known)):
        return ""
    text = f"{EARLIER_MARK} Measured before {report.AMAX_CHANGE}: times and first steps are those of the earlier code."
    return f"\n\n{textwrap.fill(text, 120)}"


def _mark(row: str, result: dict[str, Any]) -> str:
    return EARLIER_MARK if _is_earlier(row, result) else ""


def _is_earlier(row: str, result: dict[str, Any]) -> bool:
    """Whether a row of scaledot was measured before amaxes were computed by XLA."""
    return row.split("/")[1] in model.RECIPES and report.is_before_amax_change(result)


def gpu_times(results: dict[str, Any]) -> str:
    """GPU milliseconds of one step by kind of kernel, for the models of GPU_TIME_CASE."""
    known = model.measured(results)
    rows = [row for row in measured_rows(known) if row.split("/")[0] == GPU_TIME_CASE and known[row].get("gpu_ms")]
    kinds = list(dict.fromkeys((*kernel_times.KINDS.values(), kernel_times.OTHER)))
    body = []
    for row in rows:
        times = known[row]["gpu_ms"]
        cells = [f"{times[kind]:.1f}" if kind in times else "" for kind in kinds]
        body.append((row.split("/")[1], *cells, f"{sum(times.values()):.1f}"))
    return markdown(("program", *kinds, "sum"), body)


def targets(results: dict[str, Any]) -> str:
    rows = []
    for each in model_targets.targets(results):
        sign, digits = "≤" if each.at_most else "≥", 1 if each.target > 2 else 2
        bounds = f"{sign} {each.target:g}", f"{sign} {each.stretch:g}"
        rows.append((each.name, each.relative_to, *bounds, _number(each.measured, digits), verdict(each.met)))
    return markdown(("measure", "relative to", "target", "stretch", "reached", ""), rows)


def same_losses(results: dict[str, Any]) -> str:
    """A sentence on the largest difference of first losses between NNX and linen, whose parameters are the same."""
    known = model.measured(results)
    pairs = [(f"4 blocks/{program}", f"4 blocks, NNX/{program}") for program in model.CASES["4 blocks, NNX"].programs]
    differences = [abs(known[a]["losses"][0] - known[b]["losses"][0]) for a, b in pairs if a in known and b in known]
    if not differences:
        return ""
    largest = max(differences)
    relation = f"differ from linen's by at most {largest:.1g}" if largest else "equal linen's"
    return f" First losses in NNX {relation}."


def readme(results: dict[str, Any], path: str) -> str:
    """The README's section on whole models. path: of the results file."""
    known = model.measured(results)
    rows = []
    for row in (row for row in README_ROWS if row in known):
        result, ratio = known[row], _number(model_targets.speedup(known, row), 2)
        total = f"{sum(result['first'].values()):.0f}"
        rows.append((model.model_name(row), row.split("/")[1], f"{1e3 * result['seconds']:.1f}", ratio, total))
    ratio, blocks = model_targets.speedup(known, HEADLINE), HEADLINE.split("/")[0]
    text = f"A Llama-like decoder, trained on one H200 ([results]({path}))."
    if ratio is not None:
        headline = f"**A Llama-like decoder of {blocks} trains {ratio:.2f} times as fast in fp8 as in bfloat16**"
        scope = "forward pass, backward pass and AdamW, with the dense layers of the blocks in fp8"
        others = "All other layers compute in bfloat16; loss, parameters and optimizer are float32."
        text = f"{headline} on one H200: {scope} ([results]({path})). {others}"
    return f"{textwrap.fill(f'{text} {README_BASELINES}', 120)}\n\n{markdown(README_TITLES, rows)}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def figure_of(results: dict[str, Any]) -> Figure:
    """Bar charts of speedups over bfloat16 and of first steps; rows with the same baseline share axes."""
    known = model.measured(results)
    families: dict[str, list[str]] = {}
    for row in measured_rows(known):
        if model.base_row(row) in known:
            families.setdefault(model.base_row(row), []).insert(0, row)  # barh draws from the bottom
    heights = [len(rows) + 1.2 for rows in families.values()]
    figure = Figure(figsize=(11, 0.27 * sum(heights) + 0.8), layout="constrained")
    axes = figure.subplots(len(families), 2, sharex="col", sharey="row", squeeze=False, height_ratios=heights)
    for (left, right), (base, rows) in zip(axes, families.items(), strict=True):
        labels = [f"{_label(row, base)}{_mark(row, known[row])}" for row in rows]
        _speedups(left, labels, [known[base]["seconds"] / known[row]["seconds"] for row in rows], rows)
        _first_steps(right, labels, [known[row]["first"] for row in rows])
        title = base.split("/")[0] if model.policy_of(base) is None else "8 blocks, scanned, rematerialised"
        left.set_title(title, fontsize=9, loc="left")
        for axis in (left, right):
            axis.margins(x=0.08)
            axis.tick_params(axis="y", labelsize=7)
            axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("speedup of a step over bfloat16")
    axes[-1, 1].set_xlabel("first step incl. compilation, s")
    shown = {phase for row in known.values() for phase in row["first"]}
    labels = {"all": "total only (torch)"}
    phases = {labels.get(phase, phase): colour for phase, colour in PHASE_COLOURS.items() if phase in shown}
    earlier = f" ({EARLIER_MARK}: of earlier code)" if earlier_rows(results) else ""
    _legend(figure, f"left: speedup of a step{earlier}", SPEEDUP_COLOURS, "outside upper left")
    _legend(figure, "right: phases of the first step", phases, "outside upper right")
    return figure


def _legend(figure: Figure, title: str, colours: dict[str, str], location: str) -> None:
    handles = [Patch(color=colour, label=label) for label, colour in colours.items()]
    options: dict[str, Any] = {"loc": location, "ncols": len(handles), "fontsize": 8, "title_fontsize": 8}
    figure.legend(handles=handles, title=title, frameon=False, **options)


def _label(row: str, base: str) -> str:
    """The program, and how its model differs from that of its baseline."""
    name, program = row.split("/")
    extra = model.policy_of(row) or name.removeprefix(base.split("/")[0]).removeprefix(", ")
    return f"{program}, {extra}" if extra else program


def _speedups(axis: Any, labels: list[str], ratios: list[float], rows: list[str]) -> None:
    ours, others = SPEEDUP_COLOURS.values()
    colours = [ours if row.split("/")[1] in model.RECIPES else others for row in rows]
    bars = axis.barh(labels, ratios, color=colours)
    white = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
    axis.bar_label(bars, [f"{ratio:.2f}" for ratio in ratios], padding=4, fontsize=7, bbox=white)
    axis.axvline(1, color="black", linewidth=0.8, zorder=0.5)


def _first_steps(axis: Any, labels: list[str], firsts: list[dict[str, float]]) -> None:
    left = [0.0] * len(labels)
    for phase, colour in PHASE_COLOURS.items():
        seconds = [first.get(phase, 0.0) for first in firsts]
        bars = axis.barh(labels, seconds, left=left, color=colour)
        left = [start + width for start, width in zip(left, seconds, strict=True)]
    axis.bar_label(bars, [f"{total:.0f}" for total in left], padding=4, fontsize=7)
