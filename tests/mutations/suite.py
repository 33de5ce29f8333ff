"""Runs pytest in a scratch copy of the repository: without mutants, to record which tests reach them, and with one."""

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

ALL = "--all"  # without it, pytest runs a selection of the cases (tests/selection.py)
COMPILATIONS = ("cheap", "optimized")  # `make test` runs pytest once with each
QUICK_PER_FILE, QUICK = 3, 40  # numbers of tests, known to reach a mutant, that run before whole files


@dataclasses.dataclass(frozen=True)
class Run:
    """One pytest run: the collected tests, (test, outcome, seconds) of each phase, and the last lines of its output."""

    code: int | None  # None: timed out
    seconds: float
    collected: list[str]
    reports: list[tuple[str, str, float]]
    tail: str

    def of_outcome(self, outcome: str) -> list[str]:
        return [test for test, found, _ in self.reports if found == outcome]

    def seconds_of_tests(self) -> dict[str, float]:
        """Returns the seconds of each test, including its fixtures."""
        seconds = dict.fromkeys((test for test, _, _ in self.reports), 0.0)
        for test, _, spent in self.reports:
            seconds[test] += spent
        return seconds


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether a mutant was killed; `how`, in words, and by which test."""

    killed: bool
    how: str
    test: str = ""
    seconds: float = 0


@dataclasses.dataclass(frozen=True)
class Record:
    """One test file run without mutants: seconds of each test, and the tests that reached each mutant."""

    seconds: dict[str, float]
    reached: dict[str, list[str]]

    def quick(self, mutant: str) -> list[str]:
        """Returns the cheapest tests that are known to reach a mutant; any test, if importing the file reaches it."""
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
        """Replaces the texts of some files inside the context."""
        try:
            for name, text in texts.items():
                (self.path / name).write_text(text)
            yield
        finally:
            for name in texts:
                shutil.copy(self.root / name, self.path / name)

    def pytest(self, *arguments: str, timeout: float | None = None, reached: str = "") -> Run:
        """Runs pytest in the copy as `make test` does; after a failure with one compilation the other is skipped."""
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
        """Runs one process of pytest, without writing bytecode.

        Python reuses bytecode if size and modification time of the source are equal, and those of a mutant may equal
        its original's.
        """
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
            code = (
                0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else code
            )  # all of these tests need the other compilation
            return Run(code, time.monotonic() - start, collected, reports, printed.read_text()[-2000:])


def _run(command: list[str], cwd: Path, environment, output, timeout: float | None) -> int | None:
    """Returns the exit code, or None after a timeout, which also kills the processes that tests started."""
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
    """Raises unless processes that are started in the copy import its library, not an installed one."""
    code = "import scaledot; print(scaledot.__file__)"
    command = [sys.executable, "-c", code]
    environment = os.environ | {"PYTHONPATH": str(copy.path)}
    found = subprocess.run(command, cwd=copy.path, env=environment, capture_output=True, text=True, check=True).stdout
    if Path(found.strip()).resolve() != (copy.path / probes.PACKAGE).resolve():
        raise RuntimeError(f"tests in {copy.path} would import scaledot from {found.strip()}; nothing would be mutated")


def collected(copy: Copy, suite: str, paths: list[str]) -> dict[str, list[str]]:
    """Returns the tests of a suite by file; doctests of the library count as one file.

    The suite `all` contains only what the default suite leaves out: survivors have passed the rest.
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
    """Runs each test file in a separate process and returns its Record; raises if a test fails.

    Records of files that pass are stored, so that an interrupted run resumes.
    """
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
        raise RuntimeError(f"tests fail without a mutant, no verdict is possible: {json.dumps(failed, indent=1)}")
    return {file: Record(**known[file]) for file in files}


def judge(copy: Copy, mutant: Mutant, records: dict[str, Record], jobs: int) -> Verdict:
    """Runs a suite on a mutant: first a few tests that reach it, then all files that do."""
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
    """Returns the tests that fail in the unmutated copy, run in one process."""
    with _selected(tests) as chosen:
        return copy.pytest("-n0", *chosen).of_outcome("failed")


def _verdict(run: Run) -> Verdict:
    if run.of_outcome("failed"):
        return Verdict(True, "killed", run.of_outcome("failed")[0])
    if run.of_outcome("collection error"):
        return Verdict(True, "killed at import", run.of_outcome("collection error")[0])
    if run.code == pytest.ExitCode.USAGE_ERROR:
        return Verdict(False, "undecided: the mutant changes the names of cases", run.tail.strip().rpartition("\n")[2])
    if run.code is None:
        return Verdict(True, "killed by timeout", run.reports[-1][0] if run.reports else "")
    if run.code:
        return Verdict(True, f"killed: pytest ended with {run.code}", run.tail.strip().rpartition("\n")[2])
    return Verdict(False, "survived")


@contextlib.contextmanager
def _selected(tests: list[str]) -> Iterator[list[str]]:
    """Yields the arguments of pytest that run exactly these tests, in their order."""
    with tempfile.NamedTemporaryFile("w", suffix=".tests") as file:
        file.write("\n".join(tests))
        file.flush()
        yield [ALL, f"@{file.name}"]
