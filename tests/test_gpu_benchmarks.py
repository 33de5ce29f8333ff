"""The suites for GPUs, where they need none: their bookkeeping, and the page that is made of their results."""

import json

import pytest

from benchmarks import record
from benchmarks.gpu import page, report, sides


def counting(name: str, calls: list[str], first_s: float = 0.0) -> sides.Side:
    return sides.Side(name, lambda: sides.Running(lambda: calls.append(name), lambda _: None, first_s, None))


@pytest.fixture
def short_turns(monkeypatch):
    monkeypatch.setattr(sides, "TURN_S", 1e-4)


def test_the_page_says_what_the_results_say():
    assert page.PAGE.read_text() == page.text(json.loads((record.RESULTS / page.QUOTED).read_text()))


def test_sides_take_turns_and_absent_ones_are_named(short_turns):
    calls: list[str] = []
    absent = sides.Side("absent", lambda: pytest.fail("was built"), needs=("no_such_module",))
    timed, missing = sides.measure([counting("a", calls), absent, counting("b", calls)], 3, frozenset())
    assert set(timed) == {"a", "b"}
    assert all(len(side.seconds) == 3 for side in timed.values())
    assert missing == {"absent": "not installed: no_such_module"}


def test_a_peer_may_fail_and_ours_may_not(short_turns):
    def broken():
        raise ValueError("cannot be built\nfor a long reason")

    _, missing = sides.measure([sides.Side("peer", broken)], 1, frozenset())
    assert missing == {"peer": "failed: ValueError: cannot be built"}
    with pytest.raises(ValueError, match="cannot be built"):
        sides.measure([sides.Side("scaledot", broken, ours=True)], 1, frozenset())


def test_cases_that_were_not_run_again_stay_in_the_file(monkeypatch, tmp_path):
    folder = tmp_path / "benchmarks" / "results"
    folder.parent.mkdir()
    monkeypatch.setattr(record, "RESULTS", folder)
    report.write("dense", [{"case": "A", "ms": 1}, {"case": "B", "ms": 2}])
    report.write("gemm", [{"case": "8192", "ms": 3}])
    path = tmp_path / report.write("dense", [{"case": "B", "ms": 4}])
    suites = json.loads(path.read_text())
    assert [(case["case"], case["ms"]) for case in suites["dense"]["cases"]] == [("A", 1), ("B", 4)]
    assert suites["gemm"]["cases"][0]["environment"]["jax"]
