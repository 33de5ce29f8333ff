"""The statistics of the code GPT, and the page that is generated from its results."""

import json
import math
import re
import shlex

import numpy as np
import pytest

from benchmarks.convergence.code_gpt import gaps, page, results, rows
from benchmarks.record import RESULTS

LOSSES = {
    "bf16": {0: 1.0, 1: 1.1, 2: 1.2},
    "nvfp4": {0: 1.02, 1: 1.14, 2: 1.26},  # gaps .02, .04, .06
    "better": {0: 1.01, 1: 1.13, 2: 1.22},  # gaps .01, .03, .02
    "one seed": {1: 1.12},
    "unpaired": {7: 1.0},
}


def two_way_residuals(table: np.ndarray) -> np.ndarray:
    return table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()


def deviation() -> float:
    """The standard deviation of a run, from the rows with all seeds: the others have no residuals."""
    complete = np.array([list(LOSSES[row].values()) for row in ("bf16", "nvfp4", "better")])
    return math.sqrt(np.sum(two_way_residuals(complete) ** 2) / ((3 - 1) * (3 - 1)))


def test_gaps_and_standard_errors_are_those_computed_by_hand():
    compared, s = gaps.Comparison(LOSSES), deviation()
    assert (compared.deviation, compared.degrees_of_freedom) == (pytest.approx(s), 4)
    bf16, nvfp4, better, one, unpaired = compared.summaries().values()
    assert bf16.loss == pytest.approx(1.1)
    assert (bf16.gap, bf16.ratio, bf16.to_reference, bf16.more_seeds) == (None, None, None, None)
    assert (nvfp4.gap.value, nvfp4.gap.error) == pytest.approx((0.04, s * math.sqrt(2 / 3)))
    assert nvfp4.relative_gap == pytest.approx(100 * 0.04 / 1.1)
    assert (better.gap.value, better.gap.error) == pytest.approx((0.02, s * math.sqrt(2 / 3)))
    # ratio .5: the error of better - .5 nvfp4 - .5 bf16
    assert (better.ratio.value, better.ratio.error) == pytest.approx((0.5, s * math.sqrt(1.5 / 3) / 0.04))
    assert (better.to_reference.value, better.to_reference.t) == pytest.approx((-0.02, -0.02 / s / math.sqrt(2 / 3)))
    # a gap over n seeds has the error s √(2/n), and n = 2 (s / .002)² seeds suffice
    assert nvfp4.more_seeds == better.more_seeds == math.ceil(2 * (s / 0.002) ** 2) - 3
    assert (one.gap.value, one.gap.error) == pytest.approx((0.02, s * math.sqrt(2)))
    assert (one.ratio.value, one.more_seeds) == (pytest.approx(0.5), better.more_seeds + 2)
    assert (unpaired.seeds, unpaired.gap, unpaired.ratio, unpaired.to_reference) == (1, None, None, None)


def test_the_standard_deviation_of_simulated_runs_is_found_though_seeds_are_missing():
    rng = np.random.default_rng(0)
    effects, of_seeds = rng.normal(size=40), rng.normal(size=3)
    losses = {
        f"row {i}": {j: effect + of_seeds[j] + rng.normal(scale=0.1) for j in range(1 + i % 3)}
        for i, effect in enumerate(effects)
    }
    compared = gaps.Comparison(losses)
    assert compared.degrees_of_freedom == 79 - 40 - 2
    # A chi-square variable with 37 degrees of freedom is between 16 and 70 with a probability of 99.8 %.
    assert 0.1 * math.sqrt(16 / 37) < compared.deviation < 0.1 * math.sqrt(70 / 37)


def test_the_page_says_which_runs_were_repeated():
    runs = [{"row": row, "seed": 0, "held_out": {"1": loss}} for row, loss in (("a", 1.0), ("b", 1.0), ("a", 1.25))]
    assert page._repeats(runs) == "; those of `a` differ by up to 0.2500 nats"
    assert page._repeats(runs[:2]) == ""


def test_without_a_second_seed_errors_are_unknown():
    compared = gaps.Comparison({"bf16": {0: 1.0}, "nvfp4": {0: 1.1, 1: 1.2}, "better": {0: 1.05}})
    better = compared.summaries()["better"]
    assert (better.gap, better.ratio) == (gaps.Estimate(1.05 - 1.0, None), gaps.Estimate((1.05 - 1) / (1.1 - 1), None))
    assert (better.to_reference.t, better.more_seeds) == (None, None)
    with pytest.raises(ValueError, match=r"\+0.0500 is significant needs a standard error, which is None"):
        _ = better.gap.is_significant
    assert "unknown until two rows" in gaps.table(compared)


def test_a_difference_is_significant_from_3_standard_errors_on():
    assert gaps.Estimate(-0.31, 0.1).is_significant
    assert not gaps.Estimate(0.29, 0.1).is_significant


def test_rows_are_compared_over_the_seeds_that_both_have():
    compared = gaps.Comparison(LOSSES)
    found = compared.difference("nvfp4", "better")
    assert (found.seeds, found.first, found.second) == (3, pytest.approx(0.04), pytest.approx(0.02))
    assert found.difference == compared.summaries()["better"].to_reference
    found = compared.difference("nvfp4", "one seed")
    assert (found.seeds, found.first, found.second) == (1, pytest.approx(0.04), pytest.approx(0.02))
    assert (found.difference.value, found.difference.error) == pytest.approx((-0.02, deviation() * math.sqrt(2)))
    assert compared.difference("nvfp4", "unpaired") is compared.difference("nvfp4", "none") is None


def test_the_page_is_generated_from_the_results():
    assert page.PAGE.read_text() == page.text(results.Results(RESULTS / page.FILE))
    assert page.FIGURE.stat().st_size > 10_000


def copied_results(tmp_path, change) -> results.Results:
    """Returns a copy of the results file, after a call of `change` with each run that the page shows."""
    contents = json.loads((RESULTS / page.FILE).read_text())
    group = page.main_group(results.Results(RESULTS / page.FILE))
    for run in contents["runs"]:
        if results.Group.of(run) == group:
            change(run)
    path = tmp_path / page.FILE
    path.write_text(json.dumps(contents))
    return results.Results(path)


def test_a_page_is_not_generated_from_losses_that_contradict_its_words(tmp_path):
    def raise_losses(run):
        if run["row"] == "averis":
            run["held_out"] = {fraction: loss + 0.01 for fraction, loss in run["held_out"].items()}

    with pytest.raises(ValueError, match=r"'averis', \+0.0090 ± 0.0008, is significant"):
        page.text(copied_results(tmp_path, raise_losses))


@pytest.mark.parametrize(
    ("row", "difference", "message"),
    [
        ("nvfp4", -0.01, "the weights of 'quartet_ii' are not significantly better than 'nvfp4'"),
        ("if4", -0.01, "the weights of 'quartet_ii' and 'if4' differ significantly"),
    ],
)
def test_a_page_is_not_generated_from_weights_that_contradict_its_words(tmp_path, row, difference, message):
    def change_losses(run):
        if run["row"] == row and "held_out_bf16" in run:
            run["held_out_bf16"] = {fraction: loss + difference for fraction, loss in run["held_out_bf16"].items()}

    with pytest.raises(ValueError, match=message):
        page.text(copied_results(tmp_path, change_losses))


def test_a_page_is_not_generated_from_runs_that_start_from_different_parameters(tmp_path):
    def change_start(run):
        if (run["row"], run["seed"]) == ("if4", 1):
            run["start"] = "other"

    with pytest.raises(ValueError, match="runs of seed 1 start from different parameters"):
        page.text(copied_results(tmp_path, change_start))


def test_the_ratios_of_the_page_on_recipes_are_those_of_the_results():
    file = results.Results(RESULTS / page.FILE)
    runs = results.current_runs(file, page.main_group(file))
    losses, in_bf16 = (
        gaps.Comparison(results.losses_of(runs, loss)).summaries()
        for loss in (results.final_loss, results.final_loss_in_bf16)
    )
    text = (page.DOCS / "howto" / "which-recipe.md").read_text()
    ratio = r"(\d\.\d\d ± \d\.\d\d)"
    lines = re.findall(rf"^\| `(\w+)`(, last block in `mxfp8`)? \| {ratio} \| {ratio} \|", text, re.MULTILINE)
    assert len(lines) == 6
    for name, last, *shown in lines:
        row = name + (", last block mxfp8" if last else "")
        assert shown == [gaps.ratio_text(summaries[row].ratio) for summaries in (losses, in_bf16)]


def test_the_command_of_the_page_trains_the_rows_of_its_table():
    file = results.Results(RESULTS / page.FILE)
    runs = results.current_runs(file, page.main_group(file))
    (text,) = re.findall("python -m benchmarks.convergence .*", page.PAGE.read_text())
    for shown, trained in ((text, runs), (page.reproducing_command(runs[:3]), runs[:3])):
        words = shlex.split(shown)
        named = rows.selected(words[words.index("--rows") + 1]) if "--rows" in words else rows.ROWS
        assert [row.name for row in named] == list(dict.fromkeys(run["row"] for run in trained))
        assert int(words[words.index("--seeds") + 1]) == 1 + max(run["seed"] for run in trained)


def test_rows_that_the_page_compares_exist():
    names = {row.name for row in rows.ROWS}
    assert {name for comparison in page.COMPARISONS for name in comparison[:2]} | set(page.COLOURS) <= names


def test_no_more_seeds_are_needed_once_the_standard_error_is_small():
    def more_seeds(noise: float, gap: float = 0.04) -> int | None:
        """Of two rows with two seeds, whose gaps differ by 2 · noise: s is noise."""
        losses = {"bf16": {0: 1.0, 1: 1.0}, "nvfp4": {0: 1 + gap - noise, 1: 1 + gap + noise}}
        return gaps.Comparison(losses).summaries()["nvfp4"].more_seeds

    assert more_seeds(0) == 0
    assert more_seeds(0.0055) == 14  # 2 (.0055 / .002)² = 15.1
    assert more_seeds(math.nan) is None
    assert more_seeds(0.0055, gap=-0.01) is None


def test_the_table_shows_errors_and_missing_seeds():
    lines = {line.split("  ")[0]: line for line in gaps.table(gaps.Comparison(LOSSES)).splitlines()}
    error = deviation() * math.sqrt(2 / 3)
    assert f"+0.02000 ± {error:.5f}" in lines["better"]
    assert re.search(rf"0.500 ± .* {-0.02 / error:.1f} ", lines["better"])
    assert lines["unpaired"].endswith("1.0000")
