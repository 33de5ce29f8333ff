"""`python -m scaledot tune`: its arguments, and what it does with them."""

import argparse
import sys
from pathlib import Path

from scaledot.kernels.hopper import autotune, tile_configs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kind",
        nargs="+",
        choices=autotune.KINDS,
        default=list(autotune.KINDS),
        help="of products: with one scale or none (dense), sums that are precise, scales of 128 terms (blocks), "
        "integers, groups of tokens with a kernel each (default: all)",
    )
    parser.add_argument(
        "--layer",
        nargs=3,
        type=int,
        action="append",
        default=[],
        metavar=("TOKENS", "INPUTS", "OUTPUTS"),
        help="a layer whose products are measured; may be given several times (default: those of the benchmarks)",
    )
    parser.add_argument(
        "--groups", type=int, default=autotune.GROUPS, help="of tokens in a layer (default %(default)s)"
    )
    parser.add_argument("--output", type=Path, help="the table's file (default: the one that kernels read)")


def run(options: argparse.Namespace) -> int:
    shapes = autotune.shapes_of(options.kind, [tuple(layer) for layer in options.layer], options.groups)
    try:
        autotune.tune(shapes, options.output or tile_configs.path_of_device())
    except NotImplementedError as error:
        print(error, file=sys.stderr)
        return 1
    return 0
