"""What the runs of the code GPT show, in words, with their numbers."""

import itertools
import textwrap

from benchmarks.convergence.code_gpt import statistics
from benchmarks.convergence.code_gpt.rows import ROWS
from benchmarks.convergence.code_gpt.statistics import Difference, Losses, gap_text, ratio_text

# Placeholders are the keys of RATIOS, GAPS, CHANGES, WEIGHTS and WEIGHT_CHANGES, with their prefix.
FINDINGS = (
    """The loss gap of `nvfp4_plus` to bf16 is {ratio_plus} times that of `nvfp4`, and the gap of `if4` {ratio_if4}
    times. With these seeds, the difference between `nvfp4_plus` and `if4`, {change_grid} nats, cannot be distinguished
    from noise. The gap of `quartet_ii` is {ratio_quartet} times that of `nvfp4`, and the gap of `mxfp8`, a format with
    nearly twice the bits, {ratio_mxfp8} times.""",
    """Most of the gap is due to fwd. With only fwd quantised, `nvfp4` has a gap of {gap_forward} and `nvfp4_plus` of
    {gap_forward_plus}; with only dgrad and wgrad, `nvfp4` has {gap_backward} and `nvfp4_plus` without means
    {gap_backward_plus}. With only x of fwd quantised, `nvfp4_plus` has a gap of {gap_x}, with only w {gap_w}: gaps of
    parts do not add up.""",
    """The parts of `nvfp4_plus` with the largest effects are two of its fwd: without the scale search its gap changes
    by {change_unsearched}, and the mean of x changes it by {change_mean}. Neither alone is significant with these
    seeds; all parts together are.""",
    """In one seed each, these differences cannot be distinguished from noise: the mean of g in addition to that of x
    ({change_mean_g}), 1×16 blocks of weights alone ({change_blocks}), on top of `nvfp4` both means (`averis`,
    {change_averis}) or block scales that map the amax to 4 or 6, whichever has the smaller error
    (`nvfp4_four_over_six`, {change_four_over_six}), 4-bit integers instead of E2M1 (`nvint4_plus`, {change_int}), and a
    rotation in its fwd ({change_rotated}).""",
    """A uniform grid alone, in `nvfp4` with 1×16 blocks of weights, changes the gap by {change_int_alone}, which is
    within the noise. The choice of E2M1 or 4-bit integers for each block alone changes it by {change_if4_alone}; the
    gap is then {ratio_if4_alone} times that of `nvfp4`, a difference of {change_if4_nvfp4} that is not significant.
    `ufp4`, 4-bit integers with a rotation in all matmuls, differs from `nvfp4` by {change_ufp4}, within the noise.""",
    """Nor can any change of the backward pass be distinguished from it: MS-EDEN instead of stochastic rounding
    {change_eden} for `nvfp4`, {change_eden_searched} with 1×16 weights and a searched fwd; searched scales in dgrad and
    wgrad {change_searched_backward}; operands that are cast from the codes of fwd {change_requantised}. MS-EDEN is
    chosen because it is unbiased with less noise, except for groups with one dominant or few nonzero elements ([bias
    and stalls](convergence.md)).""",
    """Higher precision in the last block changes the gap of `nvfp4` by {change_last_nvfp4} and that of `nvfp4_plus` by
    {change_last}, to {ratio_last} times the gap that `nvfp4` has without it; if both have it, `nvfp4_plus` differs from
    `nvfp4` by {change_plus_last}. With the last block in mxfp8, `if4` has {ratio_last_if4} times the gap of
    `nvfp4`.""",
    """With the last fifth of the run in bf16, the gap of `nvfp4` changes by {change_switch_nvfp4} and that of
    `nvfp4_plus` by {change_switch}, to {ratio_switch} times the gap that `nvfp4` has without it; if both end in bf16,
    their difference, {change_plus_switch}, cannot be distinguished from noise.""",
    """Part of a gap is the quantisation error of the evaluation. Evaluated in bf16, the weights of `nvfp4` have a gap
    of {weights_nvfp4}, those of `quartet_ii` of {weights_quartet}, those of `nvfp4_plus` of {weights_plus} and those of
    `if4` of {weights_if4}: {weight_ratio_quartet}, {weight_ratio_plus} and {weight_ratio_if4} times that of `nvfp4`.
    Those of all three are significantly better than those of `nvfp4`, and cannot be distinguished from each other: that
    the gap of `nvfp4_plus` is smaller than that of `quartet_ii` comes from its more accurate forward pass, from which
    deployment benefits only if inference also subtracts the mean of x and multiplies it by unquantised weights. The
    weights of `nvfp4_plus` gain little from a last block in mxfp8 ({weight_change_last}) or a last fifth in bf16
    ({weight_change_switch}).""",
)
RATIOS = {
    "plus": "nvfp4_plus",
    "if4": "if4",
    "quartet": "quartet_ii",
    "mxfp8": "mxfp8",
    "last": "nvfp4_plus, last block mxfp8",
    "last_if4": "if4, last block mxfp8",
    "switch": "nvfp4_plus, bf16 from 80 %",
    "if4_alone": "nvfp4, 1x16 weights, if4 grid",
}
GAPS = {
    "forward": "nvfp4, forward only",
    "forward_plus": "nvfp4_plus, forward only",
    "backward": "nvfp4, backward only",
    "backward_plus": "nvfp4_plus, no mean, backward only",
    "x": "nvfp4_plus, only x of fwd",
    "w": "nvfp4_plus, only w of fwd",
}
CHANGES = {  # the second row's gap minus the first one's
    "eden": ("nvfp4", "nvfp4, MS-EDEN backward"),
    "eden_searched": ("nvfp4, 1x16 weights, searched forward", "nvfp4_plus, no mean"),
    "unsearched": ("nvfp4_plus", "nvfp4_plus, no search forward"),
    "mean": ("nvfp4_plus, no mean", "nvfp4_plus"),
    "mean_g": ("nvfp4_plus", "nvfp4_plus, means of x and g"),
    "blocks": ("nvfp4", "nvfp4, 1x16 weights"),
    "averis": ("nvfp4", "averis"),
    "four_over_six": ("nvfp4", "nvfp4_four_over_six"),
    "searched_backward": ("nvfp4_plus", "nvfp4_plus, searched backward"),
    "requantised": ("nvfp4_plus, no mean", "nvfp4_plus, no mean, requantised"),
    "int": ("nvfp4_plus", "nvint4_plus"),
    "rotated": ("nvint4_plus", "nvint4_plus, rotated forward"),
    "grid": ("nvfp4_plus", "if4"),
    "int_alone": ("nvfp4, 1x16 weights", "nvfp4, 1x16 weights, nvint4 grid"),
    "if4_alone": ("nvfp4, 1x16 weights", "nvfp4, 1x16 weights, if4 grid"),
    "if4_nvfp4": ("nvfp4", "nvfp4, 1x16 weights, if4 grid"),
    "ufp4": ("nvfp4", "ufp4"),
    "switch_nvfp4": ("nvfp4", "nvfp4, bf16 from 80 %"),
    "switch": ("nvfp4_plus", "nvfp4_plus, bf16 from 80 %"),
    "last_nvfp4": ("nvfp4", "nvfp4, last block mxfp8"),
    "last": ("nvfp4_plus", "nvfp4_plus, last block mxfp8"),
    "plus_last": ("nvfp4, last block mxfp8", "nvfp4_plus, last block mxfp8"),
    "plus_switch": ("nvfp4, bf16 from 80 %", "nvfp4_plus, bf16 from 80 %"),
}
# Differences that FINDINGS says are within the noise, and those of them of which it says "in one seed each".
ONE_SEED = ("mean_g", "blocks", "averis", "four_over_six", "int", "rotated")
WITHIN_NOISE = (
    *ONE_SEED,
    "int_alone",
    "if4_nvfp4",
    "ufp4",
    "eden",
    "eden_searched",
    "searched_backward",
    "requantised",
    "grid",
    "plus_switch",
)
# Of the weights, evaluated in bf16. FINDINGS says that those of the others are significantly better than the first, and
# that differences between the others are within the noise.
WEIGHTS = {"nvfp4": "nvfp4", "quartet": "quartet_ii", "plus": "nvfp4_plus", "if4": "if4"}
WEIGHT_CHANGES = {
    "last": ("nvfp4_plus", "nvfp4_plus, last block mxfp8"),
    "switch": ("nvfp4_plus", "nvfp4_plus, bf16 from 80 %"),
}
UNTRAINED = "Rows that are defined, but were not trained after shared steps: {}."


def text(losses: Losses, in_bf16: Losses, noise: float) -> str:
    """Returns the findings as a list in Markdown; raises ValueError if the losses contradict them.

    in_bf16: losses of the same weights, evaluated in bf16. noise: a difference over one seed is within the noise below
    it.
    """
    _check(losses, noise)
    _check_weights(in_bf16, noise)
    rows, weights = ({row.row: row for row in statistics.summaries(each)} for each in (losses, in_bf16))
    values = {f"ratio_{key}": _with_seeds(ratio_text(rows[row].ratio), rows[row].seeds) for key, row in RATIOS.items()}
    values |= {f"gap_{key}": _with_seeds(gap_text(rows[row].gap), rows[row].seeds) for key, row in GAPS.items()}
    values |= {
        f"weights_{key}": _with_seeds(gap_text(weights[row].gap), weights[row].seeds) for key, row in WEIGHTS.items()
    }
    values |= {
        f"weight_ratio_{key}": _with_seeds(ratio_text(weights[row].ratio), weights[row].seeds)
        for key, row in WEIGHTS.items()
    }
    values |= {f"change_{key}": _change(losses, *pair) for key, pair in CHANGES.items()}
    values |= {f"weight_change_{key}": _change(in_bf16, *pair) for key, pair in WEIGHT_CHANGES.items()}
    findings = [finding.format(**values) for finding in FINDINGS]
    if untrained := [f"`{row.name}`" for row in ROWS if row.name not in rows]:
        findings.append(UNTRAINED.format(", ".join(untrained)))
    return "\n".join(textwrap.fill(" ".join(f"* {each}".split()), 120, subsequent_indent="  ") for each in findings)


def _check(losses: Losses, noise: float) -> None:
    """Raises ValueError if the words of FINDINGS are not those of these losses."""
    for key in WITHIN_NOISE:
        found = _difference(losses, *CHANGES[key])
        if key in ONE_SEED and found.seeds > 1:
            raise ValueError(f"{key!r} has {found.seeds} seeds: reword 'In one seed each' of FINDINGS")
        if not statistics.is_within_noise(found, noise):
            raise ValueError(f"{key!r}, {gap_text(found.difference)}, exceeds the noise: reword FINDINGS")


def _check_weights(in_bf16: Losses, noise: float) -> None:
    """Raises ValueError if what FINDINGS says of weights is not true of these losses, which are evaluated in bf16."""
    reference, *others = WEIGHTS.values()
    for row in others:
        found = _difference(in_bf16, reference, row)
        if found.difference.value > 0 or statistics.is_within_noise(found, noise):
            raise ValueError(f"the weights of {row!r} are not significantly better than {reference!r}: reword FINDINGS")
    for row, other in itertools.combinations(others, 2):
        if not statistics.is_within_noise(_difference(in_bf16, row, other), noise):
            raise ValueError(f"the weights of {row!r} and {other!r} differ significantly: reword FINDINGS")


def _difference(losses: Losses, row: str, changed: str) -> Difference:
    found = statistics.difference(losses, row, changed)
    if found is None:
        raise ValueError(f"{row!r} and {changed!r} were not trained with the same seed")
    return found


def _change(losses: Losses, row: str, changed: str) -> str:
    found = _difference(losses, row, changed)
    return _with_seeds(gap_text(found.difference), found.seeds)


def _with_seeds(text: str, seeds: int) -> str:
    few = {1: " (one seed)", 2: " (two seeds)"}
    return text + few.get(seeds, "")
