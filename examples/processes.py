"""Several processes train one model, and may be interrupted.

    python -m examples.processes --processes 2 --steps 40 --recipe fp8_current

Starts the processes on this machine, which share the four devices of a mesh: data-parallel by two, tensor-parallel by
two. The model, its layout and its checkpoints are those of `examples.gpt_sharded`. Losses are the same whatever the
number of processes.

When one process dies, the others end and the last whole checkpoint is named. The same command goes on from there, also
with another number of processes. Elsewhere than on one machine, start each process with --worker and --coordinator.
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
COUNTS = [count for count in range(1, DEVICES + 1) if DEVICES % count == 0]  # of processes
PROGRAM = "examples.processes"
GRACE = 5.0  # seconds in which processes may end by themselves after one has died
COMPILATION = 600  # seconds that it may take


@dataclasses.dataclass
class Process:
    """A worker as its launcher sees it."""

    index: int
    popen: subprocess.Popen
    log: Path
    step: int | None = None  # the last that it has reported

    def listen(self, events: queue.Queue) -> None:
        """Hand on what it reports, and then that it has ended."""
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            events.put((self, gpt_sharded.Report(*json.loads(line))))
        self.popen.wait()
        events.put((self, None))

    def ending(self) -> str:
        """How it ended, when, and its last words if it had any."""
        status = self.popen.returncode
        when = "before its first step" if self.step is None else f"after step {self.step}"
        if status < 0:
            return f"was ended by {signal.Signals(-status).name} {when}"
        *_, last_line = self.log.read_text().splitlines() or [""]
        return f"ended with status {status} {when} ({last_line})"


def launch(args: argparse.Namespace) -> None:
    """Start all processes and show what the first reports; raises SystemExit if one of them does not end well."""
    events: queue.Queue = queue.Queue()
    with started(args, events) as processes:
        numbers = ", ".join(str(process.popen.pid) for process in processes)
        print(f"{len(processes)} processes ({numbers}) for {DEVICES} devices, in {args.directory}", flush=True)
        failed = watch(processes, events)
        if failed is not None:
            stop(processes)
            raise SystemExit(account(args, failed))
    print(f"done: step {args.steps} is in {checkpoints_of(args) / str(args.steps)}")


@contextlib.contextmanager
def started(args: argparse.Namespace, events: queue.Queue) -> Iterator[list[Process]]:
    """The processes, each with a thread that listens to it; none outlives this."""
    processes = []
    try:
        coordinator = f"127.0.0.1:{free_port()}"
        for index in range(args.processes):
            words = [*command(args), "--worker", str(index), "--coordinator", coordinator]
            log = args.directory / f"process_{index}.log"
            with log.open("w") as file:
                popen = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=file, text=True)
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
    """What starts, or resumes, this run."""
    names = ("processes", "recipe", "steps", "blocks", "every", "patience", "directory")
    return [sys.executable, "-m", PROGRAM, *(f"--{name}={getattr(args, name)}" for name in names)]


def checkpoints_of(args: argparse.Namespace) -> Path:
    return args.directory / "checkpoints"


def watch(processes: list[Process], events: queue.Queue) -> Process | None:
    """Until all have ended well, or the first that has not."""
    running = len(processes)
    while running:
        process, report = events.get()
        if report is None:
            running -= 1
            if process.popen.returncode:
                return process
            continue
        process.step = report.step
        if process.index == 0:  # nine digits tell every float32 from every other, so that runs can be compared
            saved = "  saved" if report.saved else ""
            print(f"step {report.step:>4}  excess {report.excess:.9g}{saved}", flush=True)
    return None


def stop(processes: list[Process]) -> None:
    """Leave them time to say in their logs what they miss. Not SIGTERM, by which JAX only notes a preemption."""
    deadline = time.monotonic() + GRACE
    for process in processes:
        try:
            process.popen.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.popen.kill()


def account(args: argparse.Namespace, failed: Process) -> str:
    """What happened, what is left, and what to do."""
    last = gpt_sharded.last_checkpoint(checkpoints_of(args))
    place = "not there yet" if last is None else checkpoints_of(args) / str(last)
    return (
        f"process {failed.index} of {args.processes} {failed.ending()}, and the others have ended; logs are in "
        f"{args.directory}\n"
        f"the last whole checkpoint is {place}; to go on, with --processes one of {COUNTS}:\n"
        f"  {shlex.join(command(args))}"
    )


def work(args: argparse.Namespace) -> None:
    """Be one of the processes. One that fails ends at once: JAX's own way out waits for the others first."""
    try:
        train(args, own_stdout())
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


def own_stdout() -> TextIO:
    """Where reports go. What others print to stdout, as Gloo does, goes to the log from here on."""
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return reports


def join(args: argparse.Namespace) -> None:
    """Meet the other processes, or end within `args.patience` seconds."""
    each = DEVICES // args.processes
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", each)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    told = f"process {args.worker} was told of {args.processes} processes with {each} of {DEVICES} devices each"
    print(f"{told} and looks for them at {args.coordinator}", file=sys.stderr, flush=True)
    jax.distributed.initialize(
        args.coordinator,
        args.processes,
        args.worker,
        initialization_timeout=args.patience,
        heartbeat_timeout_seconds=args.patience,
        shutdown_timeout_seconds=args.patience,
    )
    met = jax.process_count(), jax.device_count()
    if met != (args.processes, DEVICES):
        raise SystemExit(f"{told}, but it met {met[0]} processes with {met[1]} devices in all")  # as all of them will


def check(error: Callable[[str], NoReturn], args: argparse.Namespace) -> None:
    if args.processes < 1 or DEVICES % args.processes:
        error(f"--processes is {args.processes}, which does not divide {DEVICES} devices; give one of {COUNTS}")
    for name in ("steps", "blocks", "every", "patience"):
        if getattr(args, name) < 1:
            error(f"--{name} is {getattr(args, name)}; give 1 or more")
    if args.worker is None:
        return
    if not 0 <= args.worker < args.processes:
        error(f"--worker is {args.worker}, but with --processes {args.processes} it is 0 to {args.processes - 1}")
    if args.coordinator is None or args.directory is None:
        error("--worker needs --coordinator and --directory, the same for all processes")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        f"python -m {PROGRAM}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    recipes = (*sd.RECIPES, "float32")
    parser.add_argument("--processes", type=int, default=2, help=f"that share {DEVICES} devices (default: 2)")
    parser.add_argument("--recipe", default="fp8_current", choices=recipes, help="of all blocks (default: fp8_current)")
    parser.add_argument("--steps", type=int, default=40, help="of training (default: 40)")
    parser.add_argument("--blocks", type=int, default=2, help="of the model (default: 2)")
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints (default: 10)")
    parser.add_argument("--directory", type=Path, help="of checkpoints and logs; one with checkpoints is gone on with")
    parser.add_argument("--patience", type=int, default=30, help="seconds until a silent process is given up for dead")
    parser.add_argument("--worker", type=int, help="be this one of the processes, instead of starting all")
    parser.add_argument("--coordinator", help="address and port at which process 0 is found")
    args = parser.parse_args(arguments)
    check(parser.error, args)
    if args.worker is None:
        args.directory = args.directory or Path(tempfile.mkdtemp(prefix="processes-"))
        args.directory.mkdir(parents=True, exist_ok=True)
        launch(args)
    else:
        work(args)


if __name__ == "__main__":
    main()
