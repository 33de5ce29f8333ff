"""The GPU suites as far as they need no GPU: bookkeeping, and the page generated from their results."""

import json

import jax
import pytest

from benchmarks import record, run
from benchmarks.gpu import (
    block,
    decode,
    dense,
    grouped,
    implementations,
    model,
    model_page,
    model_targets,
    page,
    remarks,
    report,
    sizes,
    targets,
)


def counting(name: str, calls: list[str], first_s: float = 0.0) -> implementations.Implementation:
    return implementations.Implementation(
        name, lambda: implementations.Program(lambda: calls.append(name), lambda _: None, first_s, None)
    )


@pytest.fixture
def short_rounds(monkeypatch):
    monkeypatch.setattr(implementations, "ROUND_S", 1e-4)


def test_the_page_is_generated_from_the_results():
    assert page.PAGE.read_text() == page.text(published())


def test_the_readme_is_generated_from_the_results():
    text = page.README.read_text()
    assert text == page.readme(text, published())


def test_the_page_can_be_generated_while_rows_of_models_are_missing():
    results = published()
    about = results["model"]["cases"][0]
    results["model"]["cases"] = [case for case in results["model"]["cases"] if case["case"] == "4 blocks/fp8_current"]
    assert "| 4 blocks | fp8_current | " in page.text(results)
    assert "times as fast" not in model_page.readme(results, "results.json")
    names = [row for row in model.rows() if row != "4 blocks/bfloat16"]
    results["model"]["cases"] = [{**about, "case": row} for row in names]
    results["model"]["cases"][-1]["first"] = {"all": 3.0}
    assert model_page.table(results).count("\n") == len(names) + 1
    assert {axis.get_title("left") for axis in model_page.figure_of(results).axes} >= {"4 blocks, NNX", "16 blocks"}


def test_implementations_alternate_and_missing_ones_are_listed(short_rounds):
    calls: list[str] = []
    absent = implementations.Implementation("absent", lambda: pytest.fail("was built"), needs=("no_such_module",))
    timed, not_run = implementations.measure([counting("a", calls), absent, counting("b", calls)], 3, frozenset())
    assert set(timed) == {"a", "b"}
    assert all(len(times.seconds) == 3 for times in timed.values())
    assert not_run == {"absent": "not installed: no_such_module"}


def test_another_library_may_fail_and_scaledot_may_not(short_rounds):
    def broken():
        raise ValueError("cannot be built\nfor a long reason")

    _, not_run = implementations.measure([implementations.Implementation("torch", broken)], 1, frozenset())
    assert not_run == {"torch": "failed: ValueError: cannot be built"}
    with pytest.raises(ValueError, match="cannot be built"):
        implementations.measure([implementations.Implementation("scaledot", broken, ours=True)], 1, frozenset())


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
    assert {*model_targets.SPEEDUPS, *model_targets.EXTRA_FIRST_STEP_S, model_targets.SECOND_PROCESS_ROW} <= set(
        model.rows()
    )
    assert {model.base_row(row) for row in model.rows()} <= set(model.rows())
    with pytest.raises(SystemExit, match=r"no row '5 blocks/fp8_current'; rows are: 4 blocks/bfloat16; "):
        model.run(("5 blocks/fp8_current",), 1, frozenset())


def test_targets_of_models_are_compared_with_measurements():
    def row(seconds, first, peak=1e9):
        return {"seconds": seconds, "first": {"compile": first}, "peak_bytes": peak}

    def scanned(policy, program="fp8_current"):
        return f"8 blocks, scanned, {policy}/{program}"

    plain = scanned("checkpoint_dots", "bfloat16")
    cases = {"4 blocks/bfloat16": row(3, 10), "4 blocks/fp8_current": row(2, 18), plain: row(3, 1)}
    cases |= {"16 blocks/bfloat16": row(3, 20), "16 blocks/fp8_current": row(2.5, 34)}
    cases |= {scanned("save_quantized_residuals_and_gemms"): row(1, 1, 2e9)}
    cases |= {scanned("save_quantized_residuals"): row(2.5, 1)}
    cases |= {scanned("checkpoint_dots_and_quantized_gemms"): row(2, 1, 1.0009e9)}  # within MEMORY_TOLERANCE
    cases |= {scanned("dots_and_quantized_gemms_with_no_batch_dims"): row(1.5, 1, 1.0011e9)}
    results = {"model": {"cases": [{"case": name, **case} for name, case in cases.items()]}}
    measured = [(t.target, t.measured, t.met) for t in model_targets.targets(results) if t.measured is not None]
    assert measured == [(1.45, 1.5, True), (1.5, 1.2, False), (1.43, 1.5, True), (8, 8, True), (0.3, 0.5, False)]
    assert [row.met for row in targets.rows(results)] == [met for *_, met in measured]


def small(row: str, steps: int = 1) -> list[float]:
    """Losses of a tiny stack."""
    name, program = row.split("/")
    with pytest.MonkeyPatch.context() as patch:
        if not model.CASES[name].scanned:
            patch.setitem(sizes.TINY, "blocks", 1)  # each block is compiled
        init, step, data = model.training(model.CASES[name], program, True, sizes.TINY_BATCH, sizes.TINY_TOKENS)
    state, step, losses = init(jax.random.key(0)), jax.jit(step), []
    for _ in range(steps):
        state, loss = step(state, data, jax.random.key(1))
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize(
    "row",
    [
        "4 blocks/fp8_delayed",
        "8 blocks, scanned, save_quantized_residuals_and_gemms/fp8_current",
        f"4 blocks/{model.FLAX}",
    ],
)
def test_a_small_stack_learns(row, standard_promotion):
    losses = small(row, 4)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("program", [pytest.param("bfloat16", marks=pytest.mark.exhaustive), "fp8_current"])
def test_the_stack_in_nnx_has_the_first_loss_of_linen(program, standard_promotion):
    """To the rounding of bfloat16 logits, whose mean over tokens is the loss."""
    (linen,), (nnx,) = small(f"4 blocks/{program}"), small(f"4 blocks, NNX/{program}")
    assert nnx == pytest.approx(linen, rel=2**-8)


def test_a_tiny_row_runs_in_a_process_of_its_own_and_is_not_written(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(report, "write", lambda *case: pytest.fail("was written"))
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # of the process of the row
    run.main(["--suite", "model", "--tiny", "--repeats", "1", "--cases", "4 blocks/bfloat16"])
    assert "4 blocks/bfloat16" in capsys.readouterr().out.splitlines()[-1]
    with pytest.raises(SystemExit):
        run.main(["--suite", "dense", "--tiny"])


def test_rows_of_other_libraries_that_are_missing_or_fail_are_skipped(monkeypatch, capsys):
    def broken(row, *options):
        raise model.RowError("it failed")

    monkeypatch.setattr(model, "_measure_in_process", broken)
    monkeypatch.setattr(model, "not_installed", lambda row: ["torchao"] if row.endswith(model.TORCHAO) else [])
    model.run(
        (f"4 blocks, torch/{model.TORCHAO}", "4 blocks, torch/bfloat16", f"4 blocks/{model.FLAX}"), 1, frozenset()
    )
    lines = [line for line in capsys.readouterr().out.splitlines() if "is skipped" in line]
    assert [line.split(" is skipped: ")[1] for line in lines] == ["not installed: torchao", "it failed", "it failed"]
    with pytest.raises(SystemExit, match="it failed"):
        model.run(("4 blocks/fp8_current",), 1, frozenset())


def published() -> dict:
    return report.read(page.RESULTS_FILE)


def test_every_target_of_the_suites_is_a_row_of_the_table():
    of_models = [target for target in model_targets.targets(published()) if target.measured is not None]
    others = list(targets.rows(published()))[: -len(of_models)]
    rows = [(row.relative_to, row.target) for row in others]
    steps = [(dense.BASE, block.STEP_TARGET) for _ in block.STEP_LAYERS]
    matmuls = [(matmul.baseline, matmul.target) for matmul in block.MATMULS.values() if matmul.target]
    experts = [(targets.BASELINES[key], target) for case in grouped.TARGETS.values() for key, target in case.items()]
    decoding = [(decode.BASE, target) for _ in decode.SHAPES for target in decode.TARGETS.values()]
    assert rows == steps + matmuls + experts + decoding
    assert all(row.errors for row in others)


def test_rows_of_the_table_have_the_measurement_and_what_limits_it():
    results = published()
    (case,) = (case for case in results["block"]["cases"] if case["case"] == "1x128 and 128x128")
    case["implementations"]["scaledot"]["of_baseline"] = 1.05
    remark = remarks.remark("block", "1x128 and 128x128", "scaledot", 1.1, 1.05)
    lines = targets.text(results, ("1x128 and 128x128",)).splitlines()
    assert lines[1].split(" | ")[1:] == [f"{block.TORCH:<28}", ">= 1.1 ", "1.05   ", "missed"]
    assert lines[2].split("errors of ")[1].startswith("scaledot, K = 528: ")
    assert remark
    assert " ".join(line.strip() for line in lines[3:]) == remark
    case["implementations"]["scaledot"]["of_baseline"] = 1.1
    assert targets.text(results, ("1x128 and 128x128",)).splitlines()[1].endswith("met")
    case["implementations"]["scaledot"]["of_baseline"], case["not_run"] = None, {block.TORCH: "not installed: torch"}
    (row,) = targets.rows(results, ("1x128 and 128x128",))
    assert row.met is None
    assert row.remark == "torch._scaled_mm was not measured: not installed: torch"


@pytest.fixture
def untimed(monkeypatch, tmp_path):
    """Suites whose data are shapes and whose implementations are not run: scaledot's take 1 ms, others 2 ms."""

    def measured(implementations_of_case, rounds, skipped):
        names: list[str] = []
        jax.eval_shape(lambda: names.extend(implementation.name for implementation in implementations_of_case))
        return {
            name: implementations.Timed((1e-3 if name.startswith("scaledot") else 2e-3,), 1.0, None) for name in names
        }, {}

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
    measured = {(row.relative_to, row.measured) for row in targets.rows(results)}
    assert measured == {(block.FP8, 1), (block.TORCH, 2), (grouped.DENSE, 1), (grouped.LAX, 2), (dense.BASE, 2)}
    assert capsys.readouterr().out.endswith(f"\n\n{targets.text(results)}\n")


def test_a_run_of_some_targets_prints_these(untimed, capsys):
    run.main(["--suite", "targets", "--cases", "fp8", "--repeats", "1"])
    assert set(json.loads(report.device_file().read_text())) == {"grouped"}
    table = capsys.readouterr().out.split("\n\n")[-1]
    assert [line.split(" | ")[1].strip() for line in table.splitlines() if " | " in line] == [
        "relative to",
        grouped.DENSE,
        grouped.LAX,
    ]
