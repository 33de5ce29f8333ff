"""The command line: `python -m scaledot tune`."""

import argparse
import sys
from pathlib import Path

from scaledot.kernels.mosaic import tune, tuning


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    shapes = tune.shapes_of(options.kind, [tuple(layer) for layer in options.layer], options.groups)
    try:
        tune.tune(shapes, options.output or tuning.path_of_device())
    except NotImplementedError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scaledot", description="Low-precision tensors for JAX.")
    commands = parser.add_subparsers(dest="command", required=True)
    measure = commands.add_parser("tune", help="measure kernel tiles on this machine's GPU and write its table")
    measure.add_argument(
        "--kind",
        nargs="+",
        choices=tune.KINDS,
        default=list(tune.KINDS),
        help="of products: with one scale or none (dense), sums that are precise, scales of 128 terms (blocks), "
        "integers, groups of tokens with a kernel each (default: all)",
    )
    measure.add_argument(
        "--layer",
        nargs=3,
        type=int,
        action="append",
        default=[],
        metavar=("TOKENS", "INPUTS", "OUTPUTS"),
        help="a layer whose products are measured; may be given several times (default: those of the benchmarks)",
    )
    measure.add_argument("--groups", type=int, default=tune.GROUPS, help="of tokens in a layer (default %(default)s)")
    measure.add_argument("--output", type=Path, help="the table's file (default: the one that kernels read)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
