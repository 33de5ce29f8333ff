"""The convergence suite: its page matches its results, its bounds can fail, and an interrupted run resumes."""

import dataclasses
import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.convergence import bias, gpt, page, stall
from benchmarks.convergence.code_gpt import rows as code_gpt_rows
from examples import gpt_linen
from scaledot import FORMATS, Cast
from scaledot.recipes import RECIPES

pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax and benchmarks mix dtypes


class Progress:
    """A progress bar that records the lines written above it."""

    def __init__(self):
        self.lines = []

    def update(self, n=1): ...

    def set_description(self, text): ...

    def write(self, line):
        self.lines.append(line)


def test_the_page_is_generated_from_the_results():
    assert page.PAGE.read_text() == page.text(page.GPU_RESULTS, page.CAST_RESULTS, page.CPU_RESULTS)
    assert page.FIGURE.stat().st_size > 10_000


def test_the_results_of_the_page_are_as_expected_and_the_gpt_meets_its_bounds():
    record = page.read(page.GPU_RESULTS)
    assert record["seeds"] >= 3
    casts = page.read(page.CAST_RESULTS)
    assert [row["name"] for row in casts["bias"]] == [case.name for case in bias.cases()]
    assert [row["name"] for row in casts["stall"]] == [probe.name for probe in stall.probes()]
    assert all(row["as_expected"] for row in casts["bias"] + casts["stall"])
    assert [row["name"] for row in record["gpt"]] == [row.name for row in gpt.rows()]
    assert all(row["met"] is not False for row in record["gpt"] + record["relations"])


def test_every_recipe_is_in_each_test():
    assert set(RECIPES) - set(gpt.FINER) <= {row.name for row in gpt.rows()}
    assert set(gpt.FINER) <= {row.name for row in code_gpt_rows.ROWS}
    casts = [(tensor, alone(cast)) for r in RECIPES.values() for _, tensor, cast in r.casts()]
    assert {cast for tensor, cast in casts if tensor == "g"} <= {probe.cast for probe in stall.probes()}
    assert {cast for _, cast in casts if cast.rounding != "nearest"} <= {case.cast for case in bias.cases()}


def alone(cast):
    """The cast of one array: not of another cast's result, nor of differences to a mean."""
    return dataclasses.replace(cast, requantized=False, subtract_mean=False)


def test_the_bias_of_rounding_to_nearest_is_detected():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 64)), jnp.float32)
    cases = [bias.Case(Cast(FORMATS["int8"], rounding=rounding)) for rounding in ("stochastic", "nearest")]
    stochastic, nearest = (bias._row(case, bias.errors(case, x)) for case in cases)
    assert stochastic["unbiased"]
    assert stochastic["as_expected"]
    assert not nearest["unbiased"]


@pytest.mark.parametrize(("error", "verdict"), [(0.1, "good"), (0.12, "between"), (0.14, "bad"), (np.nan, "bad")])
def test_verdicts_of_the_stall_probe(error, verdict):
    assert stall.verdict(error) == verdict


def test_a_gap_outside_its_bounds_fails():
    float32 = {"name": "float32", "excess": [0.1, 0.2, 0.3]}
    row = gpt.Row("row", min_gap=0.01, max_gap=0.03)
    for shift, met in ((0.0, False), (0.02, True), (0.05, False), (np.nan, False)):
        shifted = {"name": "row", "excess": [e + shift for e in float32["excess"]]}
        assert gpt._judged(row, shifted, float32)["met"] is met
    assert gpt._judged(gpt.Row("row"), {"name": "row", "excess": float32["excess"]}, float32)["met"] is None


@pytest.mark.end_to_end
def test_an_interrupted_run_resumes_where_it_stopped(tmp_path, monkeypatch):
    rows = [gpt.Row("float32"), gpt.Row("mxfp8", {"block_*": "mxfp8"}, max_gap=1.0)]
    monkeypatch.setattr(gpt, "rows", lambda: iter(rows))
    monkeypatch.setattr(gpt, "HELD_OUT", 2)
    monkeypatch.setattr(gpt, "CHUNK", gpt.POINT)
    monkeypatch.setattr(gpt_linen, "Gpt", functools.partial(gpt_linen.Gpt, blocks=1))
    journal, progress = tmp_path / "journal.jsonl", Progress()
    first = gpt.run(gpt.CHUNK, 2, journal, progress)
    assert [json.loads(line)["name"] for line in journal.read_text().splitlines()] == ["float32", "mxfp8"]
    assert len(first[0]["curve"]) == 1
    assert first[0]["excess"][0] != first[0]["excess"][1]
    assert first[1]["met"]
    monkeypatch.setattr(gpt, "train", lambda *args: pytest.fail("a finished row was trained again"))
    assert gpt.run(gpt.CHUNK, 2, journal, progress) == first
    assert progress.lines[-1] == gpt.line(first[1])


def test_ablations_change_the_casts_they_are_named_for():
    by_name = {row.name: row.rules["block_*"] for row in gpt.rows() if row.rules is not None}
    casts = {name: {str(c) for _, _, c in recipe.casts()} for name, recipe in by_name.items()}
    assert not any("hadamard" in cast for cast in casts["nvfp4, no Hadamard"])
    assert not any("stochastic" in cast for cast in casts["nvfp4, no stochastic rounding"])
    assert not any("16×16" in cast for cast in casts["nvfp4, 1×16 weights"])
    assert all(
        c.format == dataclasses.replace(FORMATS["nvfp4"], name="nvfp4_one_level", two_level=False)
        for _, _, c in by_name["nvfp4, no tensor scale"].casts()
    )
