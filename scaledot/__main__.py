"""The command line: `python -m scaledot tune`, `python -m scaledot plan`.

A command is a module with `add_arguments(parser)` and `run(options) -> status`, which is imported when it is asked for.
"""

import argparse
import importlib
import sys
from typing import NamedTuple


class Command(NamedTuple):
    module: str
    help: str


COMMANDS = {
    "tune": Command(
        "scaledot.kernels.hopper.tune_command", "measure kernel tiles on this machine's GPU and write its table"
    ),
    "plan": Command("scaledot.plan.command", "what a step takes on many devices: times, bytes over mesh axes, memory"),
}


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m scaledot", description="Low-precision tensors for JAX.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        own = commands.add_parser(name, help=command.help)
        if given[:1] == [name]:
            importlib.import_module(command.module).add_arguments(own)
    options = parser.parse_args(given)
    return importlib.import_module(COMMANDS[options.command].module).run(options)


if __name__ == "__main__":
    sys.exit(main())
