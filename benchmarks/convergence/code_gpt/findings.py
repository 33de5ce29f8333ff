"""What the runs of the code GPT show, in words, with their numbers."""

import itertools

from benchmarks.convergence.code_gpt.gaps import Comparison, Estimate, gap_text, ratio_text
from benchmarks.convergence.code_gpt.rows import ROWS

# Placeholders are the keys of RATIOS, GAPS, CHANGES, WEIGHTS and WEIGHT_CHANGES, with their prefix.
FINDINGS = (
    """The loss gap of `nvfp4_plus` to bf16 is {ratio_plus} times that of `nvfp4`, and the gap of `if4` {ratio_if4}
    times. The difference between `nvfp4_plus` and `if4`, {change_grid} nats, is not significant. The gap of
    `quartet_ii` is {ratio_quartet} times that of `nvfp4`, and the gap of `mxfp8`, a format with nearly twice the bits,
    {ratio_mxfp8} times.""",
    """Most of the gap is due to fwd. With only fwd quantised, `nvfp4` has a gap of {gap_forward} and `nvfp4_plus` of
    {gap_forward_plus}; with only dgrad and wgrad, `nvfp4` has {gap_backward} and `nvfp4_plus` without means
    {gap_backward_plus}. With only x of fwd quantised, `nvfp4_plus` has a gap of {gap_x}, with only w {gap_w}.""",
    """Two parts of `nvfp4_plus` have significant effects: removing the scale search changes its gap by
    {change_unsearched}, and subtracting the mean of x by {change_mean}.""",
    """Choosing E2M1 or 4-bit integers for each block helps without any other part of `if4`: with 1×16 blocks of weights
    and this choice, the gap is {ratio_if4_alone} times that of `nvfp4` ({change_if4_nvfp4} nats). Using 4-bit integers
    in all blocks does not help ({change_int_alone}); with rotated operands in all matmuls as well (`ufp4`), the gap is
    {ratio_ufp4} times that of `nvfp4` ({change_ufp4}).""",
    """On top of `nvfp4`, no significant difference was found for 1×16 blocks of weights ({change_blocks}), for these
    with a scale search in fwd ({change_searched}), for the means of x and g (`averis`, {change_averis}), or for block
    scales that map the amax to 4 or 6, whichever has the smaller error (`nvfp4_four_over_six`,
    {change_four_over_six}).""",
    """On top of `nvfp4_plus`, none was found for the mean of g ({change_mean_g}), or for 4-bit integers instead of E2M1
    (`nvint4_plus`, {change_int}), to whose gap a rotation in fwd adds {change_rotated}.""",
    """No change of the backward pass is significant: MS-EDEN instead of stochastic rounding {change_eden} for `nvfp4`,
    {change_eden_searched} with 1×16 weights and a searched fwd; searched scales in dgrad and wgrad
    {change_searched_backward}; operands that are cast from the codes of fwd {change_requantised}. MS-EDEN is chosen
    because it is unbiased with less noise, except for groups with one dominant or few nonzero elements
    ([bias and stalls](convergence.md)).""",
    """Higher precision in the last block changes the gap of `nvfp4` by {change_last_nvfp4}, that of `if4` by
    {change_last_if4} and, not significantly, that of `nvfp4_plus` by {change_last}: to {ratio_last_nvfp4},
    {ratio_last_if4} and {ratio_last} times the gap that `nvfp4` has without it. If both have it, `nvfp4_plus` differs
    from `nvfp4` by {change_plus_last}, and `if4` from `nvfp4_plus` by {change_grid_last}.""",
    """With the last fifth of the run in bf16, and the evaluation too, the gap of `nvfp4` changes by
    {change_switch_nvfp4} and that of `nvfp4_plus` by {change_switch}. Much of this is the evaluation: with the weights
    of all rows evaluated in bf16, the changes are {weight_change_switch_nvfp4} and, not significantly,
    {weight_change_switch}. If both end in bf16, the difference between `nvfp4_plus` and `nvfp4`, {change_plus_switch},
    is not significant.""",
    """Part of a gap is the quantisation error of the evaluation. Evaluated in bf16, the weights of `nvfp4` have a gap
    of {weights_nvfp4}, those of `quartet_ii` of {weights_quartet}, those of `nvfp4_plus` of {weights_plus} and those of
    `if4` of {weights_if4}: {weight_ratio_quartet}, {weight_ratio_plus} and {weight_ratio_if4} times that of `nvfp4`.
    All three are significantly better than `nvfp4`, and do not differ significantly from each other. `nvfp4_plus` has a
    smaller gap than `quartet_ii` because of its more accurate forward pass, from which inference benefits as far as it
    casts alike: searched weights can be stored, while the searched scales of x, and its mean times unquantised w, must
    be computed at inference. A last block in mxfp8 changes the weights of `nvfp4_plus` by {weight_change_last}, which
    is not significant.""",
)
RATIOS = {
    "plus": "nvfp4_plus",
    "if4": "if4",
    "quartet": "quartet_ii",
    "mxfp8": "mxfp8",
    "if4_alone": "nvfp4, 1x16 weights, if4 grid",
    "ufp4": "ufp4",
    "last_nvfp4": "nvfp4, last block mxfp8",
    "last": "nvfp4_plus, last block mxfp8",
    "last_if4": "if4, last block mxfp8",
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
    "grid": ("nvfp4_plus", "if4"),
    "unsearched": ("nvfp4_plus", "nvfp4_plus, no search forward"),
    "mean": ("nvfp4_plus, no mean", "nvfp4_plus"),
    "if4_nvfp4": ("nvfp4", "nvfp4, 1x16 weights, if4 grid"),
    "int_alone": ("nvfp4, 1x16 weights", "nvfp4, 1x16 weights, nvint4 grid"),
    "ufp4": ("nvfp4", "ufp4"),
    "mean_g": ("nvfp4_plus", "nvfp4_plus, means of x and g"),
    "blocks": ("nvfp4", "nvfp4, 1x16 weights"),
    "searched": ("nvfp4", "nvfp4, 1x16 weights, searched forward"),
    "averis": ("nvfp4", "averis"),
    "four_over_six": ("nvfp4", "nvfp4_four_over_six"),
    "int": ("nvfp4_plus", "nvint4_plus"),
    "rotated": ("nvint4_plus", "nvint4_plus, rotated forward"),
    "eden": ("nvfp4", "nvfp4, MS-EDEN backward"),
    "eden_searched": ("nvfp4, 1x16 weights, searched forward", "nvfp4_plus, no mean"),
    "searched_backward": ("nvfp4_plus", "nvfp4_plus, searched backward"),
    "requantised": ("nvfp4_plus, no mean", "nvfp4_plus, no mean, requantised"),
    "last_nvfp4": ("nvfp4", "nvfp4, last block mxfp8"),
    "last_if4": ("if4", "if4, last block mxfp8"),
    "last": ("nvfp4_plus", "nvfp4_plus, last block mxfp8"),
    "plus_last": ("nvfp4, last block mxfp8", "nvfp4_plus, last block mxfp8"),
    "grid_last": ("nvfp4_plus, last block mxfp8", "if4, last block mxfp8"),
    "switch_nvfp4": ("nvfp4", "nvfp4, bf16 from 80 %"),
    "switch": ("nvfp4_plus", "nvfp4_plus, bf16 from 80 %"),
    "plus_switch": ("nvfp4, bf16 from 80 %", "nvfp4_plus, bf16 from 80 %"),
}
# Of the weights, evaluated in bf16. FINDINGS says that all are significantly better than the first, and that they do
# not differ significantly from each other.
WEIGHTS = {"nvfp4": "nvfp4", "quartet": "quartet_ii", "plus": "nvfp4_plus", "if4": "if4"}
WEIGHT_CHANGES = {key: CHANGES[key] for key in ("last", "switch_nvfp4", "switch")}
# FINDINGS says that these differences are significant, and that all others are not.
SIGNIFICANT_CHANGES = {
    "unsearched",
    "mean",
    "if4_nvfp4",
    "ufp4",
    "last_nvfp4",
    "last_if4",
    "plus_last",
    "grid_last",
    "switch_nvfp4",
    "switch",
}
SIGNIFICANT_WEIGHT_CHANGES = {"switch_nvfp4"}
UNTRAINED = "Rows that are defined, but were not trained after shared steps: {}."


def text(losses: Comparison, in_bf16: Comparison) -> str:
    """Returns the findings as a list in Markdown; raises ValueError if the losses contradict them.

    in_bf16: losses of the same weights, evaluated in bf16.
    """
    rows, weights = losses.summaries(), in_bf16.summaries()
    changes = {key: _difference(losses, *pair) for key, pair in CHANGES.items()}
    weight_changes = {key: _difference(in_bf16, *pair) for key, pair in WEIGHT_CHANGES.items()}
    _check(changes, SIGNIFICANT_CHANGES)
    _check(weight_changes, SIGNIFICANT_WEIGHT_CHANGES)
    _check_weights(in_bf16)
    values = {f"ratio_{key}": ratio_text(rows[row].ratio) for key, row in RATIOS.items()}
    values |= {f"gap_{key}": gap_text(rows[row].gap) for key, row in GAPS.items()}
    values |= {f"change_{key}": gap_text(change) for key, change in changes.items()}
    values |= {f"weights_{key}": gap_text(weights[row].gap) for key, row in WEIGHTS.items()}
    values |= {f"weight_ratio_{key}": ratio_text(weights[row].ratio) for key, row in WEIGHTS.items()}
    values |= {f"weight_change_{key}": gap_text(change) for key, change in weight_changes.items()}
    findings = [finding.format(**values) for finding in FINDINGS]
    if untrained := [f"`{row.name}`" for row in ROWS if row.name not in rows]:
        findings.append(UNTRAINED.format(", ".join(untrained)))
    return "\n".join(" ".join(f"* {each}".split()) for each in findings)


def _check(changes: dict[str, Estimate], significant: set[str]) -> None:
    """Raises ValueError unless exactly the changes in `significant` are significant."""
    for key, change in changes.items():
        if change.is_significant != (key in significant):
            verdict = "is" if change.is_significant else "is not"
            raise ValueError(f"{key!r}, {gap_text(change)}, {verdict} significant: reword FINDINGS")


def _check_weights(in_bf16: Comparison) -> None:
    """Raises ValueError if what FINDINGS says of WEIGHTS is not true of these losses."""
    reference, *others = WEIGHTS.values()
    for row in others:
        change = _difference(in_bf16, reference, row)
        if change.value > 0 or not change.is_significant:
            raise ValueError(f"the weights of {row!r} are not significantly better than {reference!r}: reword FINDINGS")
    for row, other in itertools.combinations(others, 2):
        if _difference(in_bf16, row, other).is_significant:
            raise ValueError(f"the weights of {row!r} and {other!r} differ significantly: reword FINDINGS")


def _difference(losses: Comparison, row: str, changed: str) -> Estimate:
    found = losses.difference(row, changed)
    if found is None:
        raise ValueError(f"{row!r} and {changed!r} were not trained with the same seed")
    return found.difference
