"""The command line: `python -m scaledot tune`."""

import argparse
import sys
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    from scaledot.kernels.mosaic import tune, tuning

    try:
        tune.tune(options.layer or tune.LAYERS, options.output or tuning.path_of_device())
    except NotImplementedError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scaledot", description="Low-precision tensors for JAX.")
    commands = parser.add_subparsers(dest="command", required=True)
    tune = commands.add_parser("tune", help="measure kernel tiles on this machine's GPU and write its table")
    tune.add_argument(
        "--layer",
        nargs=3,
        type=int,
        action="append",
        metavar=("TOKENS", "INPUTS", "OUTPUTS"),
        help="a layer whose products are measured; may be given several times (default: those of the benchmarks)",
    )
    tune.add_argument("--output", type=Path, help="the table's file (default: the one that kernels read)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
