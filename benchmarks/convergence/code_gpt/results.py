"""The results file, which grows by one run at a time.

{"suite", "configs", "corpora", "recipes", "runs"}: a run names its config, corpus and casts by hashes, which the three
tables resolve. The file is replaced atomically after each run, so that an interrupted session loses only the run in
progress, and under a lock, so that several processes may add to it. A run is in one line of the file.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.convergence.code_gpt.config import AVERAGED, Config
from benchmarks.convergence.code_gpt.corpus import Corpus
from benchmarks.convergence.code_gpt.rows import BASELINE, ROWS, Row
from benchmarks.convergence.code_gpt.training import Outcome

Run = dict[str, Any]
TABLES = ("configs", "corpora", "recipes")


def last_losses(run: Run) -> list[float]:
    """Returns the held-out losses of the last tenth of a run."""
    return [loss for fraction, loss in run["held_out"].items() if float(fraction) >= AVERAGED]


def final_loss(run: Run) -> float:
    return statistics.fmean(last_losses(run))


def final_loss_in_bf16(run: Run) -> float | None:
    """Returns the final loss of the parameters in bf16; None for runs of versions that did not compute it."""
    if run["row"] == BASELINE:
        return final_loss(run)
    return statistics.fmean(run["held_out_bf16"].values()) if "held_out_bf16" in run else None


@dataclasses.dataclass(frozen=True)
class Group:
    """What runs must share to be compared: hashes of the config and of the corpus, device and version of jax."""

    config: str
    corpus: str
    device: str
    jax: str

    @classmethod
    def of(cls, run: Run) -> "Group":
        return cls(run["config"], run["corpus"], run["device"], run["environment"]["jax"])


def is_complete(run: Run) -> bool:
    """Returns whether a run was also evaluated in bf16. Early versions did not; the command trains such runs again."""
    return run["row"] == BASELINE or "held_out_bf16" in run


def _identity(run: Run) -> tuple[Any, ...]:
    return Group.of(run), *(run[key] for key in ("row", "recipe", "seed"))


class Results:
    """The runs in a file, which need not exist yet."""

    def __init__(self, path: Path):
        self.path = path

    def read(self) -> dict[str, Any]:
        if self.path.exists():
            return json.loads(self.path.read_text())
        return {"suite": "code-gpt", **{table: {} for table in TABLES}, "runs": []}

    def runs(self, group: Group | None = None) -> list[Run]:
        """Returns the runs of a group, or all, in the order in which they ended."""
        return [run for run in self.read()["runs"] if group is None or Group.of(run) == group]

    def groups(self) -> list[Group]:
        return list(dict.fromkeys(Group.of(run) for run in self.runs()))

    def seeds(self, group: Group, row: str, recipe: str) -> set[int]:
        """Returns the seeds of complete runs of a row, with casts of the hash `recipe`."""
        runs = (run for run in self.runs(group) if (run["row"], run["recipe"]) == (row, recipe))
        return {run["seed"] for run in runs if is_complete(run)}

    def add(self, run: Run, **tables: Mapping[str, Any]) -> None:
        """Appends a run, and the entries of `tables` that it refers to by hash.

        Does nothing if the file already has a run of the same recipe and seed that was evaluated in bf16, too.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._locked():
            contents = self.read()
            if any(_identity(other) == _identity(run) and is_complete(other) for other in contents["runs"]):
                return  # another process trained it meanwhile
            for table, entries in tables.items():
                contents[table] |= entries
            contents["runs"].append(run)
            self._write(contents)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Waits until no other process changes the file; the system drops the lock of a process that is killed."""
        with open(self.path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _write(self, contents: dict[str, Any]) -> None:
        lines = [f' "{key}": {json.dumps(value)}' for key, value in contents.items() if key not in (*TABLES, "runs")]
        for table in TABLES:
            entries = (f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in contents[table].items())
            lines.append(f' "{table}": {{\n' + ",\n".join(entries) + "\n }")
        lines.append(' "runs": [\n' + ",\n".join(f"  {json.dumps(run)}" for run in contents["runs"]) + "\n ]")
        temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        temporary.replace(self.path)


@dataclasses.dataclass(frozen=True)
class Session:
    """Adds the runs of one call of the program to the results. environment: versions; its date is that of the start."""

    results: Results
    config: Config
    corpus: Corpus
    environment: dict[str, Any]
    command: str

    @property
    def group(self) -> Group:
        return Group(self.config.digest(), self.corpus.sha256, self.environment["device"], self.environment["jax"])

    def add(self, row: Row, seed: int, outcome: Outcome, compile_s: float, date: str) -> Run:
        """Writes a run, with the date at which it ended, to the file and returns it."""
        recipe, group = row.digest(self.config), self.group
        run = {
            "row": row.name,
            "seed": seed,
            "config": group.config,
            "corpus": group.corpus,
            "device": group.device,
            "recipe": recipe,
            "start": outcome.start,
            "held_out": outcome.held_out,
            "held_out_bf16": outcome.held_out_bf16,
            "compile_s": round(compile_s, 2),
            "run_s": round(outcome.seconds, 2),
            "tokens_per_s": round(self.config.own_tokens / outcome.seconds),
            "curve": outcome.curve,
            "command": self.command,
            "environment": self.environment | {"date": date},
        }
        self.results.add(
            run,
            configs={self.group.config: dataclasses.asdict(self.config)},
            corpora={self.corpus.sha256: self.corpus.about()},
            recipes={recipe: row.casts(self.config)},
        )
        return run


def unequal_starts(runs: Sequence[Run]) -> list[int]:
    """Returns the seeds whose runs do not all have the same parameters after the shared steps in bf16.

    Their losses are not paired. Another version of XLA, for example, rounds the shared steps differently. Runs without
    shared steps did not record their initial parameters, and are not checked.
    """
    starts: dict[int, set[str]] = {}
    for run in runs:
        starts.setdefault(run["seed"], set()).add(run.get("start", ""))
    return sorted(seed for seed, hashes in starts.items() if len(hashes) > 1)


def current_runs(results: Results, group: Group) -> list[Run]:
    """Returns the runs in `group` whose recipe is still in ROWS and has not changed since, sorted as in ROWS."""
    config = Config(**results.read()["configs"][group.config])
    current = [(row.name, row.digest(config)) for row in ROWS]
    runs = [run for run in results.runs(group) if (run["row"], run["recipe"]) in current]
    return sorted(runs, key=lambda run: current.index((run["row"], run["recipe"])))


def losses_of(runs: Sequence[Run], loss: Callable[[Run], float | None] = final_loss) -> dict[str, dict[int, float]]:
    """Returns {row: {seed: loss}}, averaged over runs with the same row and seed.

    loss: computes the loss of a run; runs for which it returns None are left out.
    """
    losses: dict[str, dict[int, list[float]]] = {}
    for run in runs:
        if (value := loss(run)) is not None:
            losses.setdefault(run["row"], {}).setdefault(run["seed"], []).append(value)
    return {row: {seed: statistics.fmean(each) for seed, each in seeds.items()} for row, seeds in losses.items()}
