"""What the runs of the code GPT show, in words, with their numbers."""

import textwrap

from benchmarks.convergence.code_gpt import statistics
from benchmarks.convergence.code_gpt.rows import ROWS
from benchmarks.convergence.code_gpt.statistics import Losses, gap_text, ratio_text

# Placeholders are the keys of RATIOS, GAPS, WEIGHTS and CHANGES, with their prefix.
FINDINGS = (
    """`nvfp4_plus` has {ratio_plus} times the gap of `nvfp4`, and `if4` {ratio_if4} times; `quartet_ii` has
    {ratio_quartet} times, and `mxfp8`, with twice the bits, {ratio_mxfp8} times.""",
    """Nearly all of the gap is due to fwd. With only dgrad and wgrad quantised, `nvfp4_plus` without means has a gap of
    {gap_backward}. MS-EDEN instead of stochastic rounding changes the gap of `nvfp4` by {change_eden}, and with 1×16
    weights and a searched fwd by {change_eden_searched}. It is chosen because it is unbiased with less noise ([bias and
    stalls](convergence.md)), which a run of this length does not show.""",
    """Two parts of fwd reduce the gap. The scale search changes it by {change_search} alone, and by
    {change_unsearched} if it is taken out of `nvfp4_plus`. The mean of x changes it by {change_mean}, and the mean of g
    by another {change_mean_g}. 1×16 blocks of weights instead of 16×16 alone change it by {change_blocks}.""",
    """Parts do not add up. IF4 instead of NVFP4 changes the gap by {change_grid_no_mean} without the mean of x, and by
    {change_grid} with it. A last block in `mxfp8` changes that of `nvfp4` by {change_last_nvfp4}, and that of
    `nvfp4_plus` by {change_last}, to {ratio_last} times the gap of `nvfp4`; that of `if4` becomes {ratio_last_if4}
    times.""",
    """Part of a gap is the quantisation error of the evaluation. Evaluated in bf16, the weights of `quartet_ii` have a
    gap of {weights_quartet} and those of `nvfp4_plus` of {weights_plus}: equally good weights. `nvfp4_plus` has the
    smaller gap because its forward pass is more accurate, which inference gains from only if it quantises x alike.""",
)
RATIOS = {
    "plus": "nvfp4_plus",
    "if4": "if4",
    "quartet": "quartet_ii",
    "mxfp8": "mxfp8",
    "last": "nvfp4_plus, last block mxfp8",
    "last_if4": "if4, last block mxfp8",
}
GAPS = {"backward": "nvfp4_plus, no mean, backward only"}
WEIGHTS = {"quartet": "quartet_ii", "plus": "nvfp4_plus"}
CHANGES = {  # the second row's gap minus the first one's
    "eden": ("nvfp4", "nvfp4, MS-EDEN backward"),
    "eden_searched": ("nvfp4, 1x16 weights, searched forward", "nvfp4_plus, no mean"),
    "search": ("nvfp4, 1x16 weights", "nvfp4, 1x16 weights, searched forward"),
    "unsearched": ("nvfp4_plus", "nvfp4_plus, no search forward"),
    "mean": ("nvfp4_plus, no mean", "nvfp4_plus"),
    "mean_g": ("nvfp4_plus", "nvfp4_plus, means of x and g"),
    "blocks": ("nvfp4", "nvfp4, 1x16 weights"),
    "grid_no_mean": ("nvfp4_plus, no mean", "if4, no mean"),
    "grid": ("nvfp4_plus", "if4"),
    "last_nvfp4": ("nvfp4", "nvfp4, last block mxfp8"),
    "last": ("nvfp4_plus", "nvfp4_plus, last block mxfp8"),
}
UNTRAINED = "Rows that are defined, but were not trained: {}."


def text(losses: Losses, in_bf16: Losses) -> str:
    """Returns the findings as a list in Markdown. in_bf16: losses of the same weights, evaluated in bf16."""
    rows, weights = ({row.row: row for row in statistics.summaries(each)} for each in (losses, in_bf16))
    values = {f"ratio_{key}": _with_seeds(ratio_text(rows[row].ratio), rows[row].seeds) for key, row in RATIOS.items()}
    values |= {f"gap_{key}": _with_seeds(gap_text(rows[row].gap), rows[row].seeds) for key, row in GAPS.items()}
    values |= {
        f"weights_{key}": _with_seeds(gap_text(weights[row].gap), weights[row].seeds) for key, row in WEIGHTS.items()
    }
    values |= {f"change_{key}": _change(losses, *pair) for key, pair in CHANGES.items()}
    findings = [" ".join(finding.split()).format(**values) for finding in FINDINGS]
    if untrained := [f"`{row.name}`" for row in ROWS if row.name not in rows]:
        findings.append(UNTRAINED.format(", ".join(untrained)))
    return "\n".join(textwrap.fill(f"* {finding}", 120, subsequent_indent="  ") for finding in findings)


def _change(losses: Losses, row: str, changed: str) -> str:
    found = statistics.difference(losses, row, changed)
    if found is None:
        raise ValueError(f"{row!r} and {changed!r} were not trained with the same seed")
    return _with_seeds(gap_text(found.difference), found.seeds)


def _with_seeds(text: str, seeds: int) -> str:
    return f"{text} (one seed)" if seeds == 1 else text
