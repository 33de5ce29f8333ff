"""Runs inputs of a target within limits of time and memory, and keeps those that fail."""

import contextlib
import dataclasses
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random

from scaledot.checkpoint import CheckpointError
from tests.fuzzing.checkpoints import GOLDEN, Files
from tests.fuzzing.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
SECONDS, BYTES = 1.0, 100_000_000
_ABORT_SECONDS = 10.0
_MAX_MESSAGE = 3000  # characters; a message quotes at most a few values of a file


@dataclasses.dataclass
class Failure:
    """An input that failed, and why."""

    number: str
    reason: str
    files: Files

    def save(self, folder: Path) -> Path:
        path = folder / self.number
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        for name, content in self.files.items():
            (path / name).write_bytes(content)
        return path


@dataclasses.dataclass
class Result:
    """outcomes: the number of inputs that were opened, refused and that failed; failures: one for each reason."""

    seconds: float = 0.0
    outcomes: Counter[str] = dataclasses.field(default_factory=Counter)
    failures: dict[str, Failure] = dataclasses.field(default_factory=dict)

    @property
    def count(self) -> int:
        return self.outcomes.total()

    def __str__(self) -> str:
        kinds = ", ".join(f"{self.outcomes[kind]} {kind}" for kind in ("opened", "refused", "failed"))
        return f"{self.count} inputs in {self.seconds:.1f} s, {self.count / max(self.seconds, 1e-9):.0f}/s: {kinds}"


class _TooSlow(BaseException):
    """Not an Exception, so that no reader catches it."""


def run(target: str, count: int, seed: int, *, golden: Path = GOLDEN, report=lambda result: None) -> Result:
    """Reads the saved inputs of a target and `count` random ones; calls `report` about every two seconds."""
    result, start, reported = Result(), time.perf_counter(), time.perf_counter()
    with _folder() as folder, _limits():
        _reset_peak()
        present: set[str] = set()
        for number, files in _inputs(target, count, seed, golden):
            reason = _judge(target, folder, files, present)
            present = set(files)
            result.outcomes[reason if reason in ("opened", "refused") else "failed"] += 1
            if reason not in ("opened", "refused"):
                result.failures.setdefault(reason, Failure(number, reason, files))
            if (now := time.perf_counter()) > reported + 2:
                result.seconds, reported = now - start, now
                report(result)
    result.seconds = time.perf_counter() - start
    return result


def _inputs(target: str, count: int, seed: int, golden: Path) -> Iterable[tuple[str, Files]]:
    for folder in sorted((CORPUS / target).glob("*")):
        yield folder.name, {path.name: path.read_bytes() for path in folder.iterdir()}
    make = TARGETS[target].inputs(golden)
    for number in range(count):
        yield f"{seed}-{number}", make(Random(seed << 32 | number))


def _judge(target: str, folder: Path, files: Files, present: set[str]) -> str:
    """ "opened", "refused", or the reason why an input failed."""
    for name in present - set(files):
        (folder / name).unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    peak, start = _peak_bytes(), time.process_time()
    outcome = _outcome(target, folder, files)
    if time.process_time() - start > SECONDS:
        return f"takes more than {SECONDS:g} s of CPU time: {outcome}"
    if _peak_bytes() > peak + BYTES:
        _reset_peak()
        return f"raises the peak memory by more than {BYTES} bytes: {outcome}"
    return outcome


def _outcome(target: str, folder: Path, files: Files) -> str:
    signal.setitimer(signal.ITIMER_PROF, _ABORT_SECONDS)
    try:
        TARGETS[target].read(folder, files)
    except CheckpointError as error:
        message = str(error)
        if not message.startswith(str(folder)) or len(message) > _MAX_MESSAGE:
            return f"message without the path or too long at {_place(error)}: {message[:100]}"
        return "refused"
    except Exception as error:  # what the fuzzer searches for
        return f"{type(error).__name__} at {_place(error)}"
    except _TooSlow as error:
        return f"aborted after {_ABORT_SECONDS:g} s at {_place(error)}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return "opened"


def _place(error: BaseException) -> str:
    """The last line of the library in a traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    library = [frame for frame in frames if f"{Path('/')}scaledot{Path('/')}" in frame.filename] or frames
    return f"{Path(library[-1].filename).name}:{library[-1].lineno}"


def _reset_peak() -> None:
    """Makes the peak memory of the process its present memory; elsewhere than on Linux it stays as it is."""
    control = Path("/proc/self/clear_refs")
    if control.exists():
        control.write_text("5")


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A temporary folder, in memory where the system has one there."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    def abort(signum, frame):
        raise _TooSlow

    previous = signal.signal(signal.SIGPROF, abort)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    finally:
        signal.signal(signal.SIGPROF, previous)
