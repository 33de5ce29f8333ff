"""Runs of pytest in a scratch copy of the repository: recorded without a mutant, and judged with one."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import pytest

from tests.mutations import log, probes
from tests.mutations.mutants import Mutant

ALL = "--all"  # makes pytest run every test; without it, a selection of those that it is given
COMPILATIONS = ("cheap", "optimized")  # `make test` is one run of pytest for each
QUICK_PER_FILE, QUICK = 3, 40  # tests known to reach a mutant that are run before whole files are


@dataclasses.dataclass(frozen=True)
class Run:
    """One pytest run: the collected tests, (test, outcome, seconds) of each phase, and the last lines of its output."""

    code: int | None  # None: it did not end in time
    seconds: float
    collected: list[str]
    reports: list[tuple[str, str, float]]
    tail: str

    def of_outcome(self, outcome: str) -> list[str]:
        return [test for test, found, _ in self.reports if found == outcome]

    def seconds_of_tests(self) -> dict[str, float]:
        """Seconds of each test, its fixtures included."""
        seconds = dict.fromkeys((test for test, _, _ in self.reports), 0.0)
        for test, _, spent in self.reports:
            seconds[test] += spent
        return seconds


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether a mutant was killed: `test` names by which test, `how` in which way."""

    killed: bool
    how: str
    test: str = ""
    seconds: float = 0


@dataclasses.dataclass(frozen=True)
class Record:
    """What one test file did without a mutant: seconds of each test, and which of them reached which mutant."""

    seconds: dict[str, float]
    reached: dict[str, list[str]]

    def quick(self, mutant: str) -> list[str]:
        """The cheapest tests that are known to reach a mutant; any, where importing the file reaches it."""
        known = [test for test in self.reached[mutant] if test in self.seconds] or self.seconds
        return sorted(known, key=lambda test: self.seconds[test])[:QUICK_PER_FILE]


class Copy:
    """A scratch copy of the tracked files, which is not a git repository."""

    def __init__(self, root: Path, path: Path):
        self.root, self.path = root, path
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True)
        for name in filter(None, listed.stdout.split("\0")):
            if (root / name).is_file():
                (path / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(root / name, path / name)

    @contextlib.contextmanager
    def changed(self, texts: dict[str, str]) -> Iterator[None]:
        """The copy with other texts of some files, for a while."""
        try:
            for name, text in texts.items():
                (self.path / name).write_text(text)
            yield
        finally:
            for name in texts:
                shutil.copy(self.root / name, self.path / name)

    def pytest(self, *arguments: str, timeout: float | None = None, reached: str = "") -> Run:
        """pytest as `make test` runs it, in the copy; a failure under one compilation spares the other."""
        runs: list[Run] = []
        for compilation in COMPILATIONS:
            runs.append(self._pytest(f"--compilation={compilation}", *arguments, timeout=timeout, reached=reached))
            if runs[-1].code != 0:
                break
        seconds = sum(run.seconds for run in runs)
        tests = [test for run in runs for test in run.collected]
        reports = [report for run in runs for report in run.reports]
        return Run(runs[-1].code, seconds, tests, reports, runs[-1].tail)

    def _pytest(self, *arguments: str, timeout: float | None, reached: str) -> Run:
        """One process of pytest. No bytecode is kept: a mutant may have the size and the time of its original, which
        is all that Python compares."""
        with tempfile.TemporaryDirectory() as scratch:
            logged, printed = Path(scratch, "log"), Path(scratch, "output")
            logged.touch()
            environment = os.environ | {"PYTHONPATH": str(self.path), "PYTHONDONTWRITEBYTECODE": "1"}
            environment |= {log.LOG: str(logged), probes.REACHED: reached}
            command = [sys.executable, "-m", "pytest", "-p", "tests.mutations.log", *arguments]
            start = time.monotonic()
            with printed.open("w") as output:
                code = _run(command, self.path, environment, output, timeout)
            entries = [json.loads(line) for line in logged.read_text().splitlines()]
            collected = next((entry["collected"] for entry in entries if "collected" in entry), [])
            reports = [(e["test"], e["outcome"], e["seconds"]) for e in entries if "test" in e]
            code = 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else code  # all tests are of the other compilation
            return Run(code, time.monotonic() - start, collected, reports, printed.read_text()[-2000:])


def _run(command: list[str], cwd: Path, environment, output, timeout: float | None) -> int | None:
    """The exit code; None after a time-out, which also ends the processes that tests started."""
    process = subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def check_imported_from(copy: Copy) -> None:
    """Raise unless processes started in the copy import the library there, not an installed one."""
    code = "import scaledot; print(scaledot.__file__)"
    words = [sys.executable, "-c", code]
    environment = os.environ | {"PYTHONPATH": str(copy.path)}
    found = subprocess.run(words, cwd=copy.path, env=environment, capture_output=True, text=True, check=True).stdout
    if Path(found.strip()).resolve() != (copy.path / probes.PACKAGE).resolve():
        raise RuntimeError(f"tests in {copy.path} would import scaledot from {found.strip()}; nothing would be mutated")


def collected(copy: Copy, suite: str, paths: list[str]) -> dict[str, list[str]]:
    """The tests that a suite adds, by file; those of the library's docstrings count as one file.

    `all` adds what the default one leaves out: a survivor of the default one has passed the rest.
    """
    found = _collect(copy, paths)
    if suite == "all":
        default = set(found)
        found = [test for test in _collect(copy, [ALL, *paths]) if test not in default]
    files: dict[str, list[str]] = {}
    for test in found:
        file = test.partition("::")[0]
        files.setdefault("scaledot" if file.startswith("scaledot/") else file, []).append(test)
    return files


def _collect(copy: Copy, arguments: list[str]) -> list[str]:
    run = copy.pytest("--collect-only", *arguments)
    if run.code:
        raise RuntimeError(f"pytest cannot collect the unmutated tree:\n{run.tail}")
    return run.collected


def record(copy: Copy, files: dict[str, list[str]], mutants: list[Mutant], store: Path, jobs: int):
    """Each file's Record, from a process of its own; raises if a test fails. Files that pass are stored."""
    store.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(store.read_text()) if store.exists() else {}
    failed = {}

    def run(file: str) -> tuple[str, Run, dict[str, list[str]]]:
        with tempfile.NamedTemporaryFile("r") as written, _selected(files[file]) as tests:
            done = copy.pytest("-n0", *tests, reached=written.name)
            return file, done, probes.reached(written, mutants)

    with copy.changed(probes.with_probes(copy.root, mutants)), ThreadPoolExecutor(jobs) as pool:
        for future in as_completed([pool.submit(run, file) for file in files if file not in known]):
            file, done, reached = future.result()
            if done.code:
                failed[file] = done.of_outcome("failed") or [done.tail]
                continue
            known[file] = {"seconds": done.seconds_of_tests(), "reached": reached}
            store.write_text(json.dumps(known))
            print(f"  {file}: {len(files[file])} tests, {done.seconds:.0f} s, reach {len(reached)} mutants", flush=True)
    if failed:
        raise RuntimeError(f"verdicts mean nothing while the unmutated tree fails: {json.dumps(failed, indent=1)}")
    return {file: Record(**known[file]) for file in files}


def judge(copy: Copy, mutant: Mutant, records: dict[str, Record], jobs: int) -> Verdict:
    """The verdict of a suite on a mutant: first of a few tests that reach it, then of all files that do."""
    files = [record for record in records.values() if mutant.name in record.reached]
    if not files:
        return Verdict(False, "survived: no test executes it")
    cost = {test: seconds for record in files for test, seconds in record.seconds.items()}
    quick = sorted((test for record in files for test in record.quick(mutant.name)), key=lambda test: cost[test])
    verdict, spent = Verdict(False, "survived"), 0.0
    with copy.changed({mutant.file: mutant.text}):
        for tests, workers in ((quick[:QUICK], 0), (list(cost), jobs)):
            limit = 600 + 5 * sum(cost[test] for test in tests)
            with _selected(tests) as chosen:
                run = copy.pytest("-x", f"-n{workers}", *chosen, timeout=limit)
            verdict, spent = _verdict(run), spent + run.seconds
            if verdict.killed:
                break
    return dataclasses.replace(verdict, seconds=round(spent, 1))


def failing(copy: Copy, tests: list[str]) -> list[str]:
    """Those of the tests that fail in the copy as it is, in one process."""
    with _selected(tests) as chosen:
        return copy.pytest("-n0", *chosen).of_outcome("failed")


def _verdict(run: Run) -> Verdict:
    if run.of_outcome("failed"):
        return Verdict(True, "killed", run.of_outcome("failed")[0])
    if run.of_outcome("collection error"):
        return Verdict(True, "killed at import", run.of_outcome("collection error")[0])
    if run.code == pytest.ExitCode.USAGE_ERROR:
        return Verdict(
            False, "undecided: cases have other names under the mutant", run.tail.strip().rpartition("\n")[2]
        )
    if run.code is None:
        return Verdict(True, "killed by time-out", run.reports[-1][0] if run.reports else "")
    if run.code:
        return Verdict(True, f"killed: pytest ended with {run.code}", run.tail.strip().rpartition("\n")[2])
    return Verdict(False, "survived")


@contextlib.contextmanager
def _selected(tests: list[str]) -> Iterator[list[str]]:
    """Arguments for exactly these tests, in their order."""
    with tempfile.NamedTemporaryFile("w", suffix=".tests") as file:
        file.write("\n".join(tests))
        file.flush()
        yield [ALL, f"@{file.name}"]
