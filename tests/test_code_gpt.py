"""The code GPT of the convergence suite: its corpus, model, results file, command and a tiny run."""

import concurrent.futures
import dataclasses
import hashlib
import json
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tqdm import tqdm

from benchmarks.convergence import __main__ as convergence
from benchmarks.convergence.code_gpt import command, corpus, model, results, rows, schedule, training
from benchmarks.convergence.code_gpt.config import FRACTIONS, TINY, Config
from scaledot.formats import FORMATS
from scaledot.recipes import UNQUANTISED, Cast, Gemm, Recipe

PROMOTION = {"jax_numpy_dtype_promotion": "standard", "jax_numpy_rank_promotion": "allow"}


@pytest.fixture(autouse=True)
def standard_promotion_in_all_threads():
    """optax mixes dtypes, and the command compiles in a thread, where context managers of the test do not apply."""
    before = {name: getattr(jax.config, name) for name in PROMOTION}
    for name, value in PROMOTION.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


GROUP = results.Group("config", "corpus", "cpu", "0.11.2")


def write_sources(folder, count: int = 300) -> dict[str, bytes]:
    """Writes files of different lengths and returns their contents by SHA-256."""
    contents = [f"x_{i} = {i}\n".encode() * (10 + i % 7) for i in range(count)]
    for i, data in enumerate(contents):
        path = folder / f"package_{i % 3}" / f"module_{i}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return {hashlib.sha256(data).hexdigest(): data for data in contents}


def test_the_corpus_is_in_the_order_of_hashes_and_split_by_file(tmp_path):
    contents = write_sources(tmp_path)
    digests = sorted(contents)
    held_out = [d for d in digests if int(d[-8:], 16) % 100 == 0]
    text = corpus.read(2**20, [tmp_path])
    train = b"".join(contents[d] for d in digests if d not in held_out)
    assert held_out
    assert text.train.tobytes() == train
    assert text.held_out.tobytes() == b"".join(contents[d] for d in held_out)
    assert text.files == len(contents)
    assert text.sha256 == hashlib.sha256(train + text.held_out.tobytes()).hexdigest()


def test_the_corpus_does_not_depend_on_paths_duplicates_other_files_or_this_package(tmp_path):
    write_sources(tmp_path / "a")
    write_sources(tmp_path / "b" / "deeper")
    expected = corpus.read(2**20, [tmp_path / "a"]).sha256
    others = {"empty.py": b"", "latin.py": b"# \xe9\n", "data.txt": b"x", "large.py": b"#" * (2**20 + 1)}
    for name, data in {**others, "scaledot/own.py": b"own", "__editable___finder.py": b"own"}.items():
        path = tmp_path / "b" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    (tmp_path / "b" / "broken.py").symlink_to(tmp_path / "nothing.py")
    assert corpus.read(2**20, [tmp_path / "b"]).sha256 == expected
    assert corpus.read(2**20, [tmp_path / "a", tmp_path / "b"]).sha256 == expected


def test_the_size_limit_keeps_whole_files(tmp_path):
    contents = write_sources(tmp_path)
    train = [contents[d] for d in sorted(contents) if int(d[-8:], 16) % 100]
    limit = len(b"".join(train[:5])) + 1
    assert corpus.read(limit, [tmp_path]).train.tobytes() == b"".join(train[:5])


def test_held_out_windows_are_spread_over_the_split_without_overlap():
    config = dataclasses.replace(TINY, tokens=3, batch=2, held_out_windows=5)
    windows = training.held_out_batches(np.arange(20, dtype=np.uint8), config)
    assert windows.tolist() == [[[0, 1, 2, 3], [5, 6, 7, 8]], [[10, 11, 12, 13], [16, 17, 18, 19]]]
    with pytest.raises(ValueError, match="more than 6 bytes, not 6"):
        training.held_out_batches(np.arange(6, dtype=np.uint8), config)


def test_the_blocks_have_about_20_million_parameters():
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), Config()))
    linears = [shapes["blocks"][name].size for name in model.LINEARS]
    assert sum(linears) == 6 * 512 * (1536 + 512 + 3072 + 1536)


def test_a_byte_is_predicted_from_earlier_bytes_only():
    config = dataclasses.replace(TINY, blocks=1)
    params, key = model.init(jax.random.key(0), config), jax.random.key(1)
    tokens = jax.random.randint(key, (1, 8), 0, 256)
    changed = tokens.at[0, 5].add(1)
    first, second = (model.logits(params, t, key, (None,), config) for t in (tokens, changed))
    assert (first[0, :5] == second[0, :5]).all()
    assert (first[0, 5:] != second[0, 5:]).any(axis=-1).all()


def run_of(row: str, seed: int, recipe: str = "r", **changes):
    group = {"config": GROUP.config, "corpus": GROUP.corpus, "device": GROUP.device}
    group["environment"] = {"jax": GROUP.jax}
    times = {"run_s": 10.0, "compile_s": 5.0, "held_out": {"1": 1.0}, "held_out_bf16": {"1": 1.0}}
    return {"row": row, "seed": seed, "recipe": recipe, **group, **times, **changes}


def test_runs_accumulate_and_those_of_other_groups_are_kept_apart(tmp_path):
    file = results.Results(tmp_path / "new" / "runs.json")
    assert file.runs() == []
    file.add(run_of("a", 0), configs={"config": {"steps": 4}})
    file.add(run_of("a", 1, config="other"), configs={"other": {"steps": 8}})
    file.add(newer := run_of("a", 0, environment={"jax": "0.12"}))
    reread = results.Results(file.path)
    assert reread.runs() == [run_of("a", 0), run_of("a", 1, config="other"), newer]
    assert reread.read()["configs"] == {"config": {"steps": 4}, "other": {"steps": 8}}
    assert reread.seeds(GROUP, "a", "r") == {0}
    assert len(reread.groups()) == 3


def test_a_kill_while_writing_leaves_the_earlier_runs(tmp_path, monkeypatch):
    file = results.Results(tmp_path / "runs.json")
    file.add(run_of("a", 0))

    def killed(self, target):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(file.path), "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            file.add(run_of("a", 1))
    assert file.runs() == [run_of("a", 0)]
    file.add(run_of("a", 2))
    assert [run["seed"] for run in file.runs()] == [0, 2]


def test_runs_that_several_processes_add_at_once_are_all_kept(tmp_path, monkeypatch):
    read = results.Results.read

    def slow_read(self):
        contents = read(self)
        time.sleep(0.05)  # another writer would read the same contents now, were it not for the lock
        return contents

    monkeypatch.setattr(results.Results, "read", slow_read)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda seed: results.Results(tmp_path / "runs.json").add(run_of("a", seed)), range(4)))
    assert sorted(run["seed"] for run in results.Results(tmp_path / "runs.json").runs()) == [0, 1, 2, 3]


def test_runs_without_an_evaluation_in_bf16_are_repeated_and_kept(tmp_path):
    file, earlier = results.Results(tmp_path / "runs.json"), run_of("a", 0)
    del earlier["held_out_bf16"]
    file.add(earlier)
    file.add(run_of("b", 0))
    assert file.runs()[0] == earlier
    assert file.seeds(GROUP, "a", "r") == set()
    file.add(run_of("a", 0, held_out={"1": 2.0}))
    file.add(run_of("a", 0))  # complete since
    assert file.seeds(GROUP, "a", "r") == {0}
    assert file.runs() == [earlier, run_of("b", 0), run_of("a", 0, held_out={"1": 2.0})]
    assert results.losses_of(file.runs()) == {"a": {0: 1.5}, "b": {0: 1.0}}
    assert results.losses_of(file.runs(), results.final_loss_in_bf16) == {"a": {0: 1.0}, "b": {0: 1.0}}


def test_a_run_that_another_process_added_is_not_added_again(tmp_path):
    file = results.Results(tmp_path / "runs.json")
    for _ in range(2):
        file.add(run_of("a", 0))
    assert len(file.runs()) == 1


@pytest.mark.parametrize(
    ("row", "compiled", "seconds"), [("a", False, 15.0), ("a", True, 10.0), ("new", False, 90.0), ("new", True, 70.0)]
)
def test_the_next_run_takes_as_long_as_earlier_ones(row, compiled, seconds):
    runs = [run_of("a", 0), run_of("b", 0, run_s=70.0, compile_s=20.0)]
    assert schedule.estimated_seconds(runs, row, compiled) == pytest.approx(schedule.MARGIN * seconds)
    assert schedule.estimated_seconds([], row, compiled) == 0


def test_a_deadline_allows_what_ends_before_it(monkeypatch):
    monkeypatch.setattr(schedule.time, "monotonic", lambda: 100.0)
    deadline = schedule.Deadline.after(2, start=90.0)
    assert deadline.allows(110)
    assert not deadline.allows(111)
    assert schedule.Deadline.after(None, start=0).allows(1e9)


class FakePrograms:
    """Programs that compute nothing: the loss is the seed; training `stop_at` is interrupted."""

    stop_at: int | None = None
    trained: list[tuple[str, int]] = []  # noqa: RUF012
    compile_s = 1.0

    def __init__(self, row, config, shared):
        self.row = row

    def run(self, seed, progress, deadline):
        if seed == self.stop_at:
            raise KeyboardInterrupt
        self.trained.append((self.row.name, seed))
        losses = {f"{f:g}": float(seed) for f in (*FRACTIONS, 1)}
        return training.Outcome(losses, {"1": seed + 0.5}, [1.0], "start", 60.0)


def use_rows(monkeypatch, *table: rows.Row) -> None:
    monkeypatch.setattr(results, "ROWS", table)
    monkeypatch.setattr(command, "selected", lambda text: rows.selected(text, table))


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """Runs the command on a corpus in a folder, and returns what was trained."""
    write_sources(tmp_path / "sources")
    monkeypatch.setattr(corpus, "python_folders", lambda: [tmp_path / "sources"])

    def run(*arguments: str) -> list[tuple[str, int]]:
        monkeypatch.setattr(FakePrograms, "trained", [])
        path = str(tmp_path / "runs.json")
        convergence.main(["--suite", "code-gpt", "--tiny", "--results", path, *arguments])
        return FakePrograms.trained

    return run


def test_an_interrupted_session_continues_where_it_stopped(suite, monkeypatch, capsys):
    monkeypatch.setattr(command, "Programs", FakePrograms)
    monkeypatch.setattr(FakePrograms, "stop_at", 1)
    with pytest.raises(KeyboardInterrupt):
        suite("--rows", "bf16,nvfp4", "--seeds", "2")
    monkeypatch.setattr(FakePrograms, "stop_at", None)
    assert suite("--rows", "bf16,nvfp4", "--seeds", "2") == [("bf16", 1), ("nvfp4", 0), ("nvfp4", 1)]
    assert suite("--rows", "bf16,nvfp4", "--seeds", "2") == []
    assert suite("--rows", "nvfp4", "--seeds", "3", "--steps", "12") == [("nvfp4", 0), ("nvfp4", 1), ("nvfp4", 2)]
    capsys.readouterr()
    assert suite("--report") == []
    assert capsys.readouterr().out.count("gap to bf16") == 2


def test_no_run_starts_that_would_end_after_the_time_limit(suite, monkeypatch, capsys):
    monkeypatch.setattr(command, "Programs", FakePrograms)
    assert suite("--rows", "bf16", "--seeds", "3", "--minutes", "1") == [("bf16", 0)]  # a run takes 66 s
    assert "would end after the time limit" in capsys.readouterr().out
    assert suite("--rows", "bf16", "--seeds", "3", "--minutes", "2") == [("bf16", 1), ("bf16", 2)]


def test_a_changed_recipe_is_trained_again_and_its_old_runs_leave_the_report(suite, monkeypatch, capsys, tmp_path):
    """They count again if the change is undone."""
    monkeypatch.setattr(command, "Programs", FakePrograms)
    suite("--rows", "nvfp4")
    changed = tuple(dataclasses.replace(row, recipe="mxfp8") if row.name == "nvfp4" else row for row in rows.ROWS)
    use_rows(monkeypatch, *changed)
    suite("--report")
    assert "1 runs of earlier versions of these recipes are left out" in capsys.readouterr().out
    assert suite("--rows", "nvfp4") == [("nvfp4", 0)]
    file = results.Results(tmp_path / "runs.json")
    (group,) = file.groups()
    assert results.current_runs(file, group) == file.runs()[1:]
    use_rows(monkeypatch, *rows.ROWS)
    assert suite("--rows", "nvfp4") == []
    assert results.current_runs(file, group) == file.runs()[:1]


def test_a_row_that_fails_is_reported_and_others_still_run(suite, monkeypatch, capfd):
    class Failing(FakePrograms):
        def __init__(self, row, config, shared):
            super().__init__(row, config, shared)
            if row.name == "mxfp8":
                raise ValueError("a reason")

    monkeypatch.setattr(command, "Programs", Failing)
    with pytest.raises(SystemExit, match="failed: mxfp8: ValueError"):
        suite("--rows", "mxfp8,nvfp4")
    assert FakePrograms.trained == [("nvfp4", 0)]
    assert "a reason" in capfd.readouterr().err


def test_a_run_that_turns_out_too_slow_is_given_up():
    programs = object.__new__(training.Programs)
    programs.config, programs.train, programs.held_out = dataclasses.replace(TINY, blocks=1), None, None
    programs.shared = object.__new__(training.SharedStart)
    programs.shared.evaluate = lambda params, held_out: 0.5
    programs.shared._starts = {0: training.Start(({}, {}), "start", [2.0] * TINY.shared_steps)}
    steps = []

    def advance(state, train, seed, first):
        steps.append(int(first))
        return state, 1.0

    programs._phases = [(TINY.steps, advance, lambda params, held_out: 1.0)]
    assert programs.run(0, tqdm(disable=True), schedule.Deadline(time.monotonic())) is None
    assert steps == [TINY.shared_steps]
    outcome = programs.run(0, tqdm(disable=True), schedule.Deadline(math.inf))
    assert outcome is not None
    assert outcome.curve == [2.0] * TINY.shared_steps + [1.0] * (TINY.steps - TINY.shared_steps)
    assert outcome.start == "start"
    assert set(outcome.held_out_bf16.values()) == {0.5}


def test_a_tiny_model_learns_and_seeds_are_paired(suite, monkeypatch, tmp_path):
    monkeypatch.setattr(command, "TINY", dataclasses.replace(TINY, blocks=1, learning_rate=1e-2))
    dgrad = Gemm(Cast(FORMATS["int8"], rounding="stochastic"))
    use_rows(monkeypatch, rows.Row("exact", UNQUANTISED), rows.Row("dgrad", Recipe("dgrad", Gemm(), dgrad, Gemm())))
    suite("--rows", "exact,dgrad", "--seeds", "2")
    runs = {(run["row"], run["seed"]): run for run in json.loads((tmp_path / "runs.json").read_text())["runs"]}
    assert len(runs) == 4
    for (_, seed), run in runs.items():
        assert list(run["held_out"]) == ["0.5", "0.75", "1"]
        assert list(run["held_out_bf16"]) == ["1"]
        assert run["held_out_bf16"]["1"] == pytest.approx(run["held_out"]["1"], rel=1e-3)  # fwd is not quantised
        assert run["held_out"]["1"] < run["held_out"]["0.5"] < run["curve"][0]
        # Parameters and batches are the same until the recipes update parameters differently.
        shared = TINY.shared_steps
        assert run["curve"][: shared + 1] == runs["exact", seed]["curve"][: shared + 1]
        assert run["curve"][0] != runs["exact", 1 - seed]["curve"][0]
        assert run["start"] == runs["exact", seed]["start"] != runs["exact", 1 - seed]["start"]
    assert runs["dgrad", 0]["curve"] != runs["exact", 0]["curve"]
    assert run["command"] == "python -m benchmarks.convergence --suite code-gpt --rows exact,dgrad --seeds 2 --tiny"


def test_the_shared_start_is_the_same_in_each_process():
    text = corpus.Corpus(*(np.arange(400, dtype=np.uint8) for _ in range(2)), files=1, sha256="")
    config = dataclasses.replace(TINY, blocks=1)
    first, again = (training.SharedStart(config, text) for _ in range(2))
    jax.clear_caches()
    assert first.of(0).digest == again.of(0).digest != first.of(1).digest
    assert first.of(0) is first.of(0)
    assert first.of(0).digest != training._digest(training.init_state(config, np.uint32(0))[0])


def test_runs_of_a_seed_that_start_from_other_parameters_are_reported():
    runs = [run_of("a", 0, start="x"), run_of("b", 0, start="x"), run_of("a", 1, start="x"), run_of("b", 1, start="y")]
    assert results.unequal_starts(runs) == [1]


def test_the_final_loss_is_the_mean_over_the_last_tenth_of_a_run():
    assert results.final_loss(run_of("a", 0, held_out={"0.75": 9.0, "0.9": 3.0, "0.9167": 2.0, "1": 1.0})) == 2
    assert results.final_loss(run_of("a", 0, held_out={"0.5": 9.0, "1": 1.5})) == 1.5


def test_batches_depend_on_the_seed_and_step_and_are_windows_of_the_text():
    text = jnp.arange(100, dtype=jnp.uint8)
    first, again, other = (np.asarray(training.batch(TINY, text, jax.random.key(k))) for k in (0, 0, 1))
    assert (first == again).all()
    assert (first != other).any()
    assert (np.diff(first.astype(int), axis=1) == 1).all()
