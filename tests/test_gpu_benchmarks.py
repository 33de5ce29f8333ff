"""The suites for GPUs, where they need none: their bookkeeping, and the page that is made of their results."""

import dataclasses
import json

import jax
import pytest

from benchmarks import record, run
from benchmarks.gpu import block, decode, dense, grouped, llama, model, page, remarks, report, sides, targets


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


def test_rows_of_models_have_targets_and_something_to_compare_with():
    assert set(model.TARGETS) <= set(model.rows())
    assert {model.base_row(row) for row in model.rows()} <= set(model.rows())
    with pytest.raises(SystemExit, match=r"no row '5 blocks/fp8_current'; rows are: 4 blocks/bfloat16; "):
        model.run(("5 blocks/fp8_current",), 1, frozenset())


@pytest.mark.parametrize("row", ["4 blocks/fp8_delayed", "8 blocks, scanned, dots saved/fp8_current"])
def test_a_small_stack_learns(row, standard_promotion):
    name, program = row.split("/")
    stack = model.stack_of(model.CASES[name], program)
    sizes = {"blocks": 2, "width": 64, "hidden": 128, "heads": 4, "groups": 2, "vocabulary": 64}
    stack = stack.clone(shape=dataclasses.replace(stack.shape, **sizes))
    init, step, data = llama.training(stack, batch=2, tokens=16)
    state, step, losses = init(jax.random.key(0)), jax.jit(step), []
    for _ in range(4):
        state, loss = step(state, data, jax.random.key(1))
        losses.append(float(loss))
    assert losses[-1] < losses[0]


def quoted() -> dict:
    return json.loads((record.RESULTS / page.QUOTED).read_text())


def test_every_target_of_the_suites_is_a_row_of_the_table():
    found = [(row.over, row.target) for row in targets.rows(quoted())]
    steps = [(dense.BASE, block.STEP_TARGET) for _ in block.STEPS]
    products = [(product.peer, product.target) for product in block.PRODUCTS.values() if product.target]
    experts = [(targets.OVER[over], target) for case in grouped.TARGETS.values() for over, target in case.items()]
    decoding = [(decode.BASE, target) for _ in decode.SHAPES for target in decode.TARGETS.values()]
    assert found == steps + products + experts + decoding
    assert all(row.errors for row in targets.rows(quoted()))


def test_rows_of_the_table_say_what_was_reached_and_what_limits_them():
    results = quoted()
    (case,) = (case for case in results["block"]["cases"] if case["case"] == "1x128 and 128x128")
    case["sides"]["scaledot"]["of_peer"] = 1.05
    words = remarks.remark("block", "1x128 and 128x128", "scaledot", 1.1, 1.05)
    lines = targets.text(results, ("1x128 and 128x128",)).splitlines()
    assert lines[1].split(" | ")[1:] == [f"{block.PEER:<28}", ">= 1.1 ", "1.05   ", "missed"]
    assert lines[2].split("errors of ")[1].startswith("scaledot, K = 528: ")
    assert words
    assert " ".join(line.strip() for line in lines[3:]) == words
    case["sides"]["scaledot"]["of_peer"] = 1.1
    assert targets.text(results, ("1x128 and 128x128",)).splitlines()[1].endswith("met")
    case["sides"]["scaledot"]["of_peer"], case["missing"] = None, {block.PEER: "not installed: torch"}
    (row,) = targets.rows(results, ("1x128 and 128x128",))
    assert row.met is None
    assert row.words == "torch._scaled_mm was not measured: not installed: torch"


@pytest.fixture
def untimed(monkeypatch, tmp_path):
    """Suites whose data are shapes and whose sides are not run: ours take 1 ms, others 2 ms."""

    def measured(sides_of_case, turns, skipped):
        names: list[str] = []
        jax.eval_shape(lambda: names.extend(side.name for side in sides_of_case))
        return {name: sides.Timed((1e-3 if name.startswith("scaledot") else 2e-3,), 1.0, None) for name in names}, {}

    for suite in (block, grouped, decode):
        monkeypatch.setattr(suite, "measure", measured)
        monkeypatch.setattr(suite, "errors", lambda *case: {"scaledot, K = 8": 1e-4, "XLA, K = 8": 2e-4})
    monkeypatch.setattr(dense, "check", lambda recipe: {"dx": 3e-4, "dw": 4e-4})
    monkeypatch.setattr(record, "RESULTS", tmp_path / "benchmarks" / "results")
    record.RESULTS.parent.mkdir()


def test_one_run_measures_the_cases_that_have_targets(untimed, capsys):
    run.main(["--suite", "targets", "--repeats", "1"])
    results = json.loads(report.device_file().read_text())
    assert {name: {case["case"] for case in suite["cases"]} for name, suite in results.items()} == {
        name: set(cases) for name, cases in targets.CASES.items()
    }
    reached = {(row.over, row.reached) for row in targets.rows(results)}
    assert reached == {(block.FP8, 1), (block.PEER, 2), (grouped.DENSE, 1), (grouped.PEER, 2), (dense.BASE, 2)}
    assert capsys.readouterr().out.endswith(f"\n\n{targets.text(results)}\n")


def test_a_run_of_some_targets_prints_these(untimed, capsys):
    run.main(["--suite", "targets", "--cases", "fp8", "--repeats", "1"])
    assert set(json.loads(report.device_file().read_text())) == {"grouped"}
    table = capsys.readouterr().out.split("\n\n")[-1]
    assert [line.split(" | ")[1].strip() for line in table.splitlines() if " | " in line] == [
        "over",
        grouped.DENSE,
        grouped.PEER,
    ]
