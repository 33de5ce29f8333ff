"""`python -m benchmarks.convergence --suite code-gpt`: trains the selected rows and prints their gaps to bf16.

Finished runs are in the results file and are not repeated: the same command continues an interrupted session.
"""

import argparse
import concurrent.futures
import dataclasses
import datetime
import os
import shlex
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import jax
from tqdm import tqdm

from benchmarks import record
from benchmarks.convergence.code_gpt import corpus, gaps
from benchmarks.convergence.code_gpt.config import FRACTIONS, TINY, Config
from benchmarks.convergence.code_gpt.results import (
    Group,
    Results,
    Session,
    current_runs,
    final_loss,
    losses_of,
    unequal_starts,
)
from benchmarks.convergence.code_gpt.rows import ROWS, Row, selected
from benchmarks.convergence.code_gpt.schedule import Deadline, estimated_seconds
from benchmarks.convergence.code_gpt.training import Programs, SharedStart

PACKAGES = ("optax",)
MEMORY_FRACTION = 0.9  # of the device's memory


def main(arguments: list[str] | None = None) -> None:
    start = time.monotonic()
    arguments_parser = parser()
    options = arguments_parser.parse_args(arguments)
    if options.tiny and options.results is None:
        arguments_parser.error("--tiny needs --results PATH: a dry run must not be added to the results of the device")
    if options.list:
        print("\n".join(f"{row.name:<40}{row}" for row in ROWS))
        return
    # Before JAX initialises the device.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{MEMORY_FRACTION / options.sharing:.2f}")
    results = Results(options.results or default_path())
    failed = [] if options.report else run(options, results, Deadline.after(options.minutes, start))
    print(report(results))
    if failed:
        raise SystemExit(f"failed: {'; '.join(failed)}")


def default_path() -> Path:
    return record.RESULTS / f"code-gpt-{jax.devices()[0].device_kind.lower().replace(' ', '-')}.json"


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.convergence --suite code-gpt", description=__doc__)
    parser.add_argument("--rows", type=_rows, default=list(ROWS), help="names, separated by commas (default: all)")
    parser.add_argument("--seeds", type=_count, default=1, help="seeds 0, 1, ... of each row (default %(default)s)")
    parser.add_argument("--minutes", type=float, help="start no run that would end later than this")
    parser.add_argument("--steps", type=int, help=f"(default {Config().steps})")
    parser.add_argument("--learning-rate", type=float, help=f"(default {Config().learning_rate})")
    parser.add_argument(
        "--corpus-mib", type=float, default=corpus.LIMIT / 2**20, help="limit of the training split (default 64)"
    )
    parser.add_argument("--results", type=Path, help="the results file (default: that of the device)")
    parser.add_argument("--list", action="store_true", help="print the rows and exit")
    parser.add_argument("--report", action="store_true", help="print the table of the results file and exit")
    parser.add_argument(
        "--sharing",
        type=_count,
        default=1,
        metavar="N",
        help="this is one of N such commands, with other rows, that share the device: take 1/N of its memory",
    )
    parser.add_argument("--tiny", action="store_true", help="a dry run with a tiny model; needs --results")
    return parser


def _rows(text: str) -> list[Row]:
    try:
        return selected(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def config_of(options: argparse.Namespace) -> Config:
    changes = {"steps": options.steps, "learning_rate": options.learning_rate}
    changed = {name: value for name, value in changes.items() if value is not None}
    return dataclasses.replace(TINY if options.tiny else Config(), **changed)


def command_of(options: argparse.Namespace) -> str:
    """The command that repeats these runs: without paths and time limits, which differ between machines."""
    words = ["--rows", ",".join(row.name for row in options.rows), "--seeds", str(options.seeds)]
    words += ["--tiny"] if options.tiny else []
    words += ["--steps", str(options.steps)] if options.steps else []
    words += ["--learning-rate", str(options.learning_rate)] if options.learning_rate else []
    words += ["--corpus-mib", f"{options.corpus_mib:g}"] if options.corpus_mib * 2**20 != corpus.LIMIT else []
    return f"python -m benchmarks.convergence --suite code-gpt {shlex.join(words)}"


def environment(processes: int) -> dict:
    """processes: that train on the device at the same time, which each run takes longer for."""
    versions = {package: record.version(package) for package in PACKAGES}
    device = jax.devices()[0].device_kind
    return {**record.environment(), **versions, "source": record.source(), "device": device, "processes": processes}


def run(options: argparse.Namespace, results: Results, deadline: Deadline) -> list[str]:
    """Trains all rows and seeds that are not in the results; returns what failed."""
    config, start = config_of(options), time.perf_counter()
    text = corpus.read(int(options.corpus_mib * 2**20))
    print(f"corpus: {text.about()}, {time.perf_counter() - start:.1f} s")
    session = Session(results, config, text, environment(options.sharing), command_of(options))
    rows = [row for row in options.rows if missing_seeds(row, options.seeds, session)]
    shared, failed, compiled = SharedStart(config, text), [], {}
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as compiler:
        for i, row in enumerate(rows):
            for each in rows[i : i + 2]:  # the programs of the next row compile while this one trains
                if each.name not in compiled and (each is row or _allows(deadline, (row, each), session)):
                    compiled[each.name] = compiler.submit(Programs, each, config, shared)
            try:
                is_done = run_row(row, options.seeds, session, deadline, compiled[row.name])
            except Exception as error:  # other rows may still run: an accelerator is lent for a limited time
                traceback.print_exc()
                failed.append(f"{row.name}: {type(error).__name__}")
                continue
            if not is_done:
                print("the remaining runs would end after the time limit")
                break
    return failed


def _allows(deadline: Deadline, rows: Sequence[Row], session: Session) -> bool:
    """Whether there is time for a run of each row."""
    runs = session.results.runs(session.group)
    return deadline.allows(sum(estimated_seconds(runs, row.name) for row in rows))


def missing_seeds(row: Row, seeds: int, session: Session) -> list[int]:
    """Returns the seeds of a row, with its present recipes, that are not in the results."""
    trained = session.results.seeds(session.group, row.name, row.digest(session.config))
    return [seed for seed in range(seeds) if seed not in trained]


def run_row(
    row: Row, seeds: int, session: Session, deadline: Deadline, compiled: concurrent.futures.Future[Programs]
) -> bool:
    """Trains the seeds of a row that are not in the results; returns False if the time does not suffice for all."""
    results, missing = session.results, missing_seeds(row, seeds, session)
    with tqdm(
        total=len(missing) * session.config.steps, desc=row.name, unit="step", leave=False, disable=None
    ) as progress:
        progress.set_postfix_str("compiling")
        for seed in missing:
            runs = results.runs(session.group)
            if not deadline.allows(estimated_seconds(runs, row.name, compiled.done())):
                return False
            programs = compiled.result()
            outcome = programs.run(seed, progress, deadline)
            if outcome is None:
                return False
            date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            progress.write(line(session.add(row, seed, outcome, programs.compile_s, date)))
    return True


def line(run: dict) -> str:
    """The printed line of a run."""
    losses = ", ".join(f"{run['held_out'][f'{fraction:g}']:.5f}" for fraction in FRACTIONS)
    times = f"compile {run['compile_s']:.1f} s, run {run['run_s']:.1f} s, {run['tokens_per_s']:,} tokens/s"
    return f"{run['row']:<36} seed {run['seed']}: held-out loss {losses}, {final_loss(run):.5f}; {times}"


def report(results: Results) -> str:
    """Returns a table for each group of comparable runs."""
    contents = results.read()
    parts = [_group_report(group, results, contents["configs"]) for group in results.groups()]
    return "\n\n".join(parts) or f"no runs in {results.path}"


def _group_report(group: Group, results: Results, configs: dict[str, dict]) -> str:
    config, runs = Config(**configs[group.config]), current_runs(results, group)
    losses, outdated = losses_of(runs), len(results.runs(group)) - len(runs)
    about = f"{group.device}, jax {group.jax}, config {group.config} ({config.steps} steps), corpus {group.corpus[:16]}"
    note = f"\n{outdated} runs of earlier versions of these recipes are left out" if outdated else ""
    if seeds := unequal_starts(runs):
        note += f"\nnot all runs of seed {', '.join(map(str, seeds))} start from the same parameters: gaps vary more"
    return about + "\n" + (gaps.table(gaps.Comparison(losses)) if losses else "no runs") + note
