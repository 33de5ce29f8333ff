"""Fuzzing of the readers of checkpoints with a fixed seed; `python -m tests.fuzzing` runs more inputs."""

import pytest

from scaledot.checkpoint import CheckpointError, safetensors
from scaledot.checkpoint.layouts import find_layout
from scaledot.checkpoint.source import open_source
from tests.fuzzing import checkpoints, engine, targets
from tests.fuzzing.__main__ import main

COUNTS = {"json_text": 3000, "safetensors": 2000, "folder": 800, "gguf": 400, "layouts": 800}
SETS = [pytest.param(1, id="few"), pytest.param(10, id="many", marks=pytest.mark.exhaustive)]


@pytest.fixture(params=list(targets.TARGETS))
def target(request):
    return request.param


@pytest.mark.parametrize("factor", SETS)
def test_mutated_files_are_read_or_refused_in_bounded_time_and_memory(target, factor):
    count = factor * COUNTS[target]
    result = engine.run(target, count, seed=factor)
    assert not result.failures, list(result.failures)
    assert result.count >= count
    assert min(result.outcomes["opened"], result.outcomes["refused"]) > count / 100


def test_checkpoints_are_valid_before_they_are_mutated(tmp_path):
    for number, files in enumerate(targets.valid_inputs()):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        if find_layout(open_source(folder)) is not None:  # one has every dtype, also those of codes, without a layout
            targets.TARGETS["folder"].read(folder, files)


def test_an_input_depends_on_the_seed_and_its_number_only(target):
    first, second = (dict(engine._inputs(target, 20, seed, checkpoints.GOLDEN)) for seed in (0, 1))
    again = dict(engine._inputs(target, 20, 0, checkpoints.GOLDEN))
    assert first == again
    assert first.keys() & second.keys() == {path.name for path in (engine.CORPUS / target).glob("*")}
    assert list(first.values()) != list(second.values())


FAULTS = {
    "other exceptions": (KeyError("w"), "KeyError at"),
    "messages without the file": (CheckpointError("config.json", "damaged"), "message without the path"),
    "assertions": (AssertionError(), "AssertionError at"),
}


@pytest.mark.parametrize(("error", "reason"), FAULTS.values(), ids=list(FAULTS))
def test_the_fuzzer_finds_and_saves_inputs_that_fail(monkeypatch, tmp_path, capsys, error, reason):
    def read_header(path):
        header = valid(path)
        if len(header.tensors) == 5:
            raise error
        return header

    valid = safetensors.read_header
    monkeypatch.setattr(targets, "read_header", read_header)
    monkeypatch.setattr("tests.fuzzing.__main__.BUILD", tmp_path)
    assert main(["safetensors", "--count", "500"]) == 1
    assert reason in capsys.readouterr().out
    (saved,) = (tmp_path / "safetensors").iterdir()
    assert len(valid(saved / "model.safetensors").tensors) == 5


def test_the_fuzzer_finds_inputs_that_take_too_long_or_too_much_memory(monkeypatch):
    def parse_object(text, *rest):
        if text == b"large":
            return len(b"x" * (engine.BYTES + 2**20))
        while True:
            pass

    monkeypatch.setattr(engine, "_ABORT_SECONDS", 0.5)
    monkeypatch.setattr(targets, "parse_object", parse_object)
    monkeypatch.setattr(engine, "_inputs", lambda *_: [(kind, {"text": kind.encode()}) for kind in ("slow", "large")])
    found = {failure.number: reason for reason, failure in engine.run("json_text", 0, 0).failures.items()}
    assert "aborted after 0.5 s" in found["slow"]
    assert "peak memory" in found["large"]
