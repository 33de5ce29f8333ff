"""The statistics of the code GPT, and the page that is generated from its results."""

import json
import math
import re
import shlex

import numpy as np
import pytest

from benchmarks.convergence.code_gpt import command, page, results, rows, statistics
from benchmarks.record import RESULTS

LOSSES = {
    "bf16": {0: 1.0, 1: 1.1, 2: 1.2},
    "nvfp4": {0: 1.02, 1: 1.14, 2: 1.26},  # gaps .02, .04, .06
    "better": {0: 1.01, 1: 1.13, 2: 1.22},  # gaps .01, .03, .02
    "one seed": {1: 1.12},
    "unpaired": {7: 1.0},
}


def test_statistics_are_those_computed_by_hand():
    bf16, nvfp4, better, one, unpaired = statistics.summaries(LOSSES)
    assert bf16.loss == pytest.approx(1.1)
    assert (bf16.gap, bf16.ratio, bf16.t, bf16.more_seeds) == (None, None, None, None)
    # standard deviations: .02 of nvfp4's gaps, .01 of the better ones
    assert (nvfp4.gap.value, nvfp4.gap.error) == pytest.approx((0.04, 0.02 / math.sqrt(3)))
    assert nvfp4.relative_gap == pytest.approx(100 * 0.04 / 1.1)
    assert (better.gap.value, better.gap.error) == pytest.approx((0.02, 0.01 / math.sqrt(3)))
    # ratio .5; a - .5 b = 0, .01, -.01, of standard deviation .01
    assert (better.ratio.value, better.ratio.error) == pytest.approx((0.5, 0.01 / math.sqrt(3) / 0.04))
    # differences -.01, -.01, -.04: mean -.02, standard deviation sqrt(.0003)
    assert better.t == pytest.approx(-0.02 / (math.sqrt(0.0003) / math.sqrt(3)))
    # (.02 / (.05 · .04))² = 100 and (.01 / .002)² = 25 seeds, of which there are 3; rounding may add one
    assert nvfp4.more_seeds in (97, 98)
    assert better.more_seeds in (22, 23)
    assert (one.gap.value, one.gap.error) == (pytest.approx(0.02), None)
    assert (one.ratio.value, one.ratio.error) == (pytest.approx(0.5), None)
    assert (one.t, one.more_seeds) == (None, None)
    assert (unpaired.seeds, unpaired.gap, unpaired.ratio, unpaired.t) == (1, None, None, None)


def test_rows_are_compared_over_the_seeds_that_both_have():
    found = statistics.difference(LOSSES, "nvfp4", "better")
    assert (found.seeds, found.first, found.second) == (3, pytest.approx(0.04), pytest.approx(0.02))
    assert (found.difference.value, found.difference.error) == pytest.approx((-0.02, math.sqrt(0.0003) / math.sqrt(3)))
    found = statistics.difference(LOSSES, "nvfp4", "one seed")
    assert (found.seeds, found.first, found.second) == (1, pytest.approx(0.04), pytest.approx(0.02))
    assert (found.difference.value, found.difference.error) == (pytest.approx(-0.02), None)
    assert statistics.difference(LOSSES, "nvfp4", "unpaired") is statistics.difference(LOSSES, "nvfp4", "none") is None


def test_the_page_is_generated_from_the_results():
    assert page.PAGE.read_text() == page.text(results.Results(RESULTS / page.FILE))
    assert page.FIGURE.stat().st_size > 10_000


def copied_results(tmp_path, change) -> results.Results:
    """The results of the page, with `change` applied to every run of its comparison."""
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

    with pytest.raises(ValueError, match=r"'averis', \+0.0090, exceeds the noise"):
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
    losses = command.losses_of(command.current_runs(file, page.main_group(file)))
    ratios = {row.row: statistics.ratio_text(row.ratio) for row in statistics.summaries(losses)}
    text = (page.DOCS / "howto" / "which-recipe.md").read_text()
    lines = re.findall(r"^\| `(\w+)`(, last block in `mxfp8`)? \| (\d\.\d\d ± \d\.\d\d) \|", text, re.MULTILINE)
    assert len(lines) == 5
    for name, last, ratio in lines:
        assert ratio == ratios[name + (", last block mxfp8" if last else "")]


def test_the_command_of_the_page_trains_the_rows_of_its_table():
    file = results.Results(RESULTS / page.FILE)
    runs = command.current_runs(file, page.main_group(file))
    (text,) = re.findall("python -m benchmarks.convergence .*", page.PAGE.read_text())
    words = shlex.split(text)
    named = rows.selected(words[words.index("--rows") + 1])
    assert [row.name for row in named] == list(dict.fromkeys(run["row"] for run in runs))
    assert int(words[words.index("--seeds") + 1]) == 1 + max(run["seed"] for run in runs)


def test_rows_that_the_page_compares_exist():
    names = {row.name for row in rows.ROWS}
    assert {name for comparison in page.COMPARISONS for name in comparison[:2]} | set(page.COLOURS) <= names


def test_no_more_seeds_are_needed_once_the_standard_error_is_small():
    assert statistics.more_seeds(np.array([0.02, 0.02]), 0.04) == 0
    assert statistics.more_seeds(np.array([0.02, 0.03]), 0.04) == 11  # .5 (.01 / .002)² = 12.5
    assert statistics.more_seeds(np.array([0.02, np.nan]), 0.04) is None
    assert statistics.more_seeds(np.array([0.02, 0.03]), -0.01) is None


def test_the_table_says_where_a_second_seed_is_needed():
    lines = {line.split("  ")[0]: line for line in statistics.table(statistics.summaries(LOSSES)).splitlines()}
    assert "+0.02000 ± 0.00577" in lines["better"]
    assert "0.500 ± 0.144" in lines["better"]
    assert lines["one seed"].endswith("unknown")
    assert not lines["unpaired"].endswith("unknown")
