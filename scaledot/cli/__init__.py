"""The command line: `scaledot`, or `python -m scaledot`.

A command is a module of this package with EXAMPLES, `add_arguments(parser)` and `run(options) -> exit code`. It is
imported only if its name is on the command line, and imports jax only in `run`, because that import is slow
and `--help` does not need it.

Only this module turns exceptions into a line on stderr and an exit code: 2 for ValueError and TypeError, which the
library raises for invalid arguments, as argparse does for wrong usage; 1 for everything else.
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
  0  success
  1  failure: the plan does not fit the memory, there is no GPU to tune, a file cannot be written, checkpoints differ
  2  wrong usage or an invalid value
  128 + n  ended by signal n: 130 interrupted (SIGINT), 141 the output pipe was closed (SIGPIPE)"""
EXAMPLES = (
    "scaledot formats mxfp8",
    "scaledot recipes nvfp4 --json",
    "scaledot explain 8192x4096 4096x14336 --recipe fp8_current",
    "scaledot plan --model llama3-70b --devices 1024 --sequence-parallel",
    "scaledot inspect Llama-3.1-8B-NVFP4",
    "scaledot convert Llama-3.1-8B Llama-3.1-8B-NVFP4 --layout compressed-tensors --format nvfp4",
    "scaledot tune --layer 16384 8192 32768",
)


class Command(NamedTuple):
    help: str


COMMANDS = {
    "formats": Command("list the formats, or show one: element dtype, scales, blocks, bits per element"),
    "recipes": Command("list the recipes, or show one: the casts of fwd, dgrad and wgrad"),
    "explain": Command("print which kernels run a matmul or a training step, and why others do not"),
    "plan": Command("estimate a training step on many devices: time, communication, memory"),
    "inspect": Command("list the tensors of a checkpoint: format, shape, bytes, SNR against a reference"),
    "convert": Command("rewrite a checkpoint in another layout or format"),
    "diff": Command("compare two checkpoints, tensor by tensor"),
    "tune": Command("measure GEMM tile configs on this machine's GPU and write its table"),
}


class Parser(argparse.ArgumentParser):
    """Argument parser that reports wrong usage as one line, like all other errors."""

    def __init__(self, **options):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        _print_error(f"{message}; see {self.prog} --help")
        self.exit(2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code. Wrong usage and --help raise SystemExit, as argparse does."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        try:
            return _run(words)
        finally:
            sys.stdout.flush()  # an error from a closed pipe could not be handled at interpreter exit
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discards what is still buffered
        return 128 + signal.SIGPIPE


def _run(words: list[str]) -> int:
    try:
        command = _command(words)
        options = _parser(command).parse_args(words)
        assert command is not None  # argparse exits if there is no command
        return command.run(options)
    except (Exception, KeyboardInterrupt) as error:
        if "--debug" in words or isinstance(error, BrokenPipeError):
            raise
        return _report_error(error)


def _command(words: list[str]) -> ModuleType | None:
    """Imports and returns the module of the command: the first word that is not an option."""
    name = next((word for word in words if not word.startswith("-")), None)
    if name is None:
        return None
    if name not in COMMANDS:
        from scaledot.formats import row_of

        row_of("command", name, Command, COMMANDS, "the commands")
    return importlib.import_module(f"scaledot.cli.{name}")


def _parser(command: ModuleType | None) -> Parser:
    """Returns the parser of the program; only the subparser of `command` has its arguments."""
    parser = Parser(
        prog="scaledot", description="Low-precision tensors, matmuls and training for JAX.", epilog=_epilog(EXAMPLES)
    )
    parser.add_argument("--version", action="version", version=f"scaledot {scaledot.__version__}")
    parser.add_argument("--debug", action="store_true", help=_DEBUG_HELP)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, row in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=row.help)
        if command is not None and command.__name__ == f"scaledot.cli.{name}":
            subparser.description = f"{row.help[0].upper()}{row.help[1:]}."
            subparser.epilog = _epilog(command.EXAMPLES)
            command.add_arguments(subparser)
            subparser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=_DEBUG_HELP)
    return parser


_DEBUG_HELP = "raise errors with a traceback"


def _epilog(examples: Sequence[str]) -> str:
    return "\n".join([EXIT_CODES, "", "examples:", *(f"  {example}" for example in examples)])


def _report_error(error: BaseException) -> int:
    """Prints an error on stderr and returns its exit code."""
    if isinstance(error, KeyboardInterrupt):
        _print_error("interrupted")
        return 128 + signal.SIGINT
    has_message = isinstance(error, (ValueError, TypeError, RuntimeError, OSError))
    _print_error(str(error) if has_message else f"{type(error).__name__}: {error}; --debug prints the traceback")
    return 2 if isinstance(error, (ValueError, TypeError)) else 1


def _print_error(message: str) -> None:
    print(f"scaledot: error: {' '.join(message.split())}", file=sys.stderr)
