"""The command line: `scaledot`, or `python -m scaledot`.

A command is a module of this package with EXAMPLES, `add_arguments(parser)` and `run(options) -> exit code`. It is
imported when its name is on the command line, and imports jax only in `run`, so that `--help` does not wait for it.

This is the one place that turns exceptions into a line on stderr and an exit code: ValueError and TypeError, which the
library raises for values that cannot be used, into 2, as argparse does for wrong usage, and everything else into 1.
"""

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple, NoReturn

import scaledot

EXIT_CODES = """exit codes:
  0  done
  1  failed: the plan does not fit the memory, there is no GPU to tune, a file cannot be written
  2  wrong usage, or a value that cannot be used
  128 + n  ended by signal n: 130 interrupted, 141 the reader of the output is gone"""
EXAMPLES = (
    "scaledot formats mxfp8",
    "scaledot recipes nvfp4 --json",
    "scaledot explain 8192x4096 4096x14336 --recipe fp8_current",
    "scaledot plan --model llama3-70b --devices 1024 --sequence-parallel",
    "scaledot tune --layer 16384 8192 32768",
)


class Command(NamedTuple):
    help: str


COMMANDS = {
    "formats": Command("list the formats, or show one: codes, scales, blocks, bits per element"),
    "recipes": Command("list the recipes, or show one: the casts of fwd, dgrad and wgrad"),
    "explain": Command("say which kernels a matmul or a training step takes, and why not the others"),
    "plan": Command("estimate a training step on many devices: time, bytes over mesh axes, memory"),
    "tune": Command("measure GEMM tiles on this machine's GPU and write its table"),
}


class Parser(argparse.ArgumentParser):
    """Reports wrong usage as one line, as every other error is."""

    def __init__(self, **how):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **how)

    def error(self, message: str) -> NoReturn:
        _report(f"{message}; see {self.prog} --help")
        self.exit(2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code. Wrong usage and --help raise SystemExit, as argparse does."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        try:
            return _run(given)
        finally:
            sys.stdout.flush()  # here, not at exit, where a closed pipe could no longer be handled
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered goes nowhere
        return 128 + signal.SIGPIPE


def _run(given: list[str]) -> int:
    try:
        command = _command(given)
        options = _parser(command).parse_args(given)
        assert command is not None  # or argparse would have exited
        return command.run(options)
    except (Exception, KeyboardInterrupt) as error:
        if "--debug" in given or isinstance(error, BrokenPipeError):
            raise
        return _failed(error)


def _command(given: list[str]) -> ModuleType | None:
    """Imports the module of the command on the command line: its first word that is no option."""
    name = next((word for word in given if not word.startswith("-")), None)
    if name is None:
        return None
    if name not in COMMANDS:
        from scaledot.formats import row_of

        row_of("command", name, Command, COMMANDS, "the commands")
    return importlib.import_module(f"scaledot.cli.{name}")


def _parser(command: ModuleType | None) -> Parser:
    """Returns the parser of the program; of the commands, only that of `command` knows its arguments."""
    parser = Parser(
        prog="scaledot", description="Low-precision tensors, matmuls and training for JAX.", epilog=_epilog(EXAMPLES)
    )
    parser.add_argument("--version", action="version", version=f"scaledot {scaledot.__version__}")
    parser.add_argument("--debug", action="store_true", help=_DEBUG)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, row in COMMANDS.items():
        own = subparsers.add_parser(name, help=row.help)
        if command is not None and command.__name__ == f"scaledot.cli.{name}":
            own.description = f"{row.help[0].upper()}{row.help[1:]}."
            own.epilog = _epilog(command.EXAMPLES)
            command.add_arguments(own)
            own.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=_DEBUG)
    return parser


_DEBUG = "raise errors with their traceback"


def _epilog(examples: Sequence[str]) -> str:
    return "\n".join([EXIT_CODES, "", "examples:", *(f"  {example}" for example in examples)])


def _failed(error: BaseException) -> int:
    """Reports an error and returns its exit code."""
    if isinstance(error, KeyboardInterrupt):
        _report("interrupted")
        return 128 + signal.SIGINT
    expected = isinstance(error, (ValueError, TypeError, RuntimeError, OSError))
    _report(str(error) if expected else f"{type(error).__name__}: {error}; --debug shows where")
    return 2 if isinstance(error, (ValueError, TypeError)) else 1


def _report(message: str) -> None:
    print(f"scaledot: error: {' '.join(message.split())}", file=sys.stderr)
