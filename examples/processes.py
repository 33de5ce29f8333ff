"""Multi-process training with checkpoints and restarts.

    python -m examples.processes --processes 2 --steps 40 --recipe fp8_current

Starts processes on this machine that share the four devices of a mesh: two-way data parallel, two-way tensor parallel.
The model, its sharding and its checkpoints are those of `examples.gpt_sharded`. Losses are bit-identical for any number
of processes.

If a process dies, the others are stopped, and the last complete checkpoint and the command that resumes from it are
printed; the number of processes may then differ. On several machines, start each process with --worker and
--coordinator.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import queue
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn, TextIO

import jax
import orbax.checkpoint as ocp

import scaledot as sd
from examples import gpt_sharded

DEVICES = math.prod(gpt_sharded.AXES.values())
COUNTS = [count for count in range(1, DEVICES + 1) if DEVICES % count == 0]  # possible numbers of processes
PROGRAM = "examples.processes"
GRACE = 5.0  # seconds until the other processes are killed after one has died
SIGNAL_GRACE = 1.0  # seconds after a failure in which a peer that was killed by a signal is recognised as its cause
COMPILATION = 600  # timeout of compilation in seconds


@dataclasses.dataclass
class Process:
    """A worker process of the launcher."""

    index: int
    popen: subprocess.Popen
    log: Path
    step: int | None = None  # the last step reported

    def listen(self, events: queue.Queue) -> None:
        """Puts (self, report) for each report, and (self, None) when the process has ended."""
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            events.put((self, gpt_sharded.Report(*json.loads(line))))
        self.popen.wait()
        events.put((self, None))

    def ending(self) -> str:
        """Describes how and when the process ended, with the last line of its log."""
        status = self.popen.returncode
        when = "before its first step" if self.step is None else f"after step {self.step}"
        if status < 0:
            return f"was killed by {signal.Signals(-status).name} {when}"
        *_, last_line = self.log.read_text().splitlines() or [""]
        return f"exited with status {status} {when} ({last_line})"


def launch(args: argparse.Namespace) -> None:
    """Starts all processes and prints the reports of the first; raises SystemExit if one of them fails."""
    events: queue.Queue = queue.Queue()
    with started(args, events) as processes:
        pids = ", ".join(str(process.popen.pid) for process in processes)
        print(f"{len(processes)} processes ({pids}) for {DEVICES} devices, in {args.directory}", flush=True)
        failed = watch(processes, events)
        if failed is not None:
            stop(processes)
            raise SystemExit(failure_message(args, failed))
    print(f"done: step {args.steps} is in {checkpoints_of(args) / str(args.steps)}")


@contextlib.contextmanager
def started(args: argparse.Namespace, events: queue.Queue) -> Iterator[list[Process]]:
    """Starts the processes, each with a thread that reads its reports; kills those that run at exit."""
    processes = []
    try:
        coordinator = f"127.0.0.1:{free_port()}"
        for index in range(args.processes):
            worker = [*command(args), "--worker", str(index), "--coordinator", coordinator]
            log = args.directory / f"process_{index}.log"
            with log.open("w") as file:
                popen = subprocess.Popen(worker, stdout=subprocess.PIPE, stderr=file, text=True)
            processes.append(Process(index, popen, log))
            threading.Thread(target=processes[-1].listen, args=(events,), daemon=True).start()
        yield processes
    finally:
        for process in processes:
            process.popen.kill()
            process.popen.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def command(args: argparse.Namespace) -> list[str]:
    """The command that starts or resumes this run."""
    names = ("processes", "recipe", "steps", "blocks", "every", "patience", "directory")
    return [sys.executable, "-m", PROGRAM, *(f"--{name}={getattr(args, name)}" for name in names)]


def checkpoints_of(args: argparse.Namespace) -> Path:
    return args.directory / "checkpoints"


def watch(processes: list[Process], events: queue.Queue) -> Process | None:
    """Prints reports until all processes have exited; returns the one whose failure ended the run, or None.

    That is the first to fail, unless another was killed by a signal: its peers then fail with broken connections, and
    their ends may be noticed before its own.
    """
    running, failed, deadline = len(processes), None, math.inf
    while running:
        try:
            process, report = events.get(timeout=None if failed is None else max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return failed
        if report is None:
            running -= 1
            if process.popen.returncode < 0:
                return process
            if process.popen.returncode and failed is None:
                failed, deadline = process, time.monotonic() + SIGNAL_GRACE
            continue
        process.step = report.step
        if process.index == 0:  # nine digits identify every float32, so that runs can be compared exactly
            saved = "  saved" if report.saved else ""
            print(f"step {report.step:>4}  excess {report.excess:.9g}{saved}", flush=True)
    return failed


def stop(processes: list[Process]) -> None:
    """Kills the processes after GRACE seconds, in which they may log errors.

    SIGTERM would not end them: JAX takes it as a preemption notice.
    """
    deadline = time.monotonic() + GRACE
    for process in processes:
        try:
            process.popen.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.popen.kill()


def failure_message(args: argparse.Namespace, failed: Process) -> str:
    """Describes the failure, the last complete checkpoint, and how to resume."""
    last = gpt_sharded.last_checkpoint(checkpoints_of(args))
    checkpoint = "there is no complete checkpoint"
    if last is not None:
        checkpoint = f"the last complete checkpoint is {checkpoints_of(args) / str(last)}"
    return (
        f"process {failed.index} of {args.processes} {failed.ending()}, and the others were stopped; logs are in "
        f"{args.directory}\n"
        f"{checkpoint}; to resume, with --processes one of {COUNTS}:\n"
        f"  {shlex.join(command(args))}"
    )


def run_worker(args: argparse.Namespace) -> None:
    """Runs one worker. If it fails it exits at once: JAX's exit handlers would wait for the other processes."""
    try:
        train(args, redirect_stdout())
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def train(args: argparse.Namespace, reports: TextIO) -> None:
    join(args)
    run, mesh = gpt_sharded.Run(args.recipe, args.steps, args.blocks), gpt_sharded.make_mesh()
    program = gpt_sharded.compile_run(run, mesh)
    ocp.multihost.get_barrier_sync_fn()(key="compiled", timeout_ms=1000 * COMPILATION)
    for report in gpt_sharded.fit(run, mesh, program, checkpoints_of(args), args.every):
        print(json.dumps(report), file=reports, flush=True)


def redirect_stdout() -> TextIO:
    """Returns the original stdout, for reports; redirects stdout to the log, because libraries such as Gloo print."""
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return reports


def join(args: argparse.Namespace) -> None:
    """Initialises jax.distributed; fails after `args.patience` seconds without the other processes."""
    devices = DEVICES // args.processes
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    expected = f"process {args.worker} expects {args.processes} processes with {devices} of {DEVICES} devices each"
    print(f"{expected}, with coordinator {args.coordinator}", file=sys.stderr, flush=True)
    jax.distributed.initialize(
        args.coordinator,
        args.processes,
        args.worker,
        initialization_timeout=args.patience,
        heartbeat_timeout_seconds=args.patience,
        shutdown_timeout_seconds=args.patience,
    )
    found = jax.process_count(), jax.device_count()
    if found != (args.processes, DEVICES):  # the same on every process, so all exit
        raise SystemExit(f"{expected}, but there are {found[0]} processes with {found[1]} devices in total")


def check(error: Callable[[str], NoReturn], args: argparse.Namespace) -> None:
    if args.processes < 1 or DEVICES % args.processes:
        error(f"--processes is {args.processes}, which does not divide {DEVICES} devices; use one of {COUNTS}")
    for name in ("steps", "blocks", "every", "patience"):
        if getattr(args, name) < 1:
            error(f"--{name} is {getattr(args, name)}; it must be at least 1")
    if args.worker is None:
        return
    if not 0 <= args.worker < args.processes:
        error(f"--worker is {args.worker}; with --processes {args.processes} it must be 0 to {args.processes - 1}")
    if args.coordinator is None or args.directory is None:
        error("--worker needs --coordinator and --directory, the same for all processes")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        f"python -m {PROGRAM}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    recipes = (*sd.RECIPES, "float32")
    parser.add_argument("--processes", type=int, default=2, help=f"processes that share {DEVICES} devices (default: 2)")
    parser.add_argument("--recipe", default="fp8_current", choices=recipes, help="of all blocks (default: fp8_current)")
    parser.add_argument("--steps", type=int, default=40, help="training steps (default: 40)")
    parser.add_argument("--blocks", type=int, default=2, help="blocks of the model (default: 2)")
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints (default: 10)")
    parser.add_argument("--directory", type=Path, help="for checkpoints and logs; resumes from checkpoints in it")
    parser.add_argument("--patience", type=int, default=30, help="timeout of unresponsive processes in seconds")
    parser.add_argument("--worker", type=int, help="run only this worker, instead of starting all")
    parser.add_argument("--coordinator", help="address and port of process 0")
    args = parser.parse_args(arguments)
    check(parser.error, args)
    if args.worker is None:
        args.directory = args.directory or Path(tempfile.mkdtemp(prefix="processes-"))
        args.directory.mkdir(parents=True, exist_ok=True)
        launch(args)
    else:
        run_worker(args)


if __name__ == "__main__":
    main()
