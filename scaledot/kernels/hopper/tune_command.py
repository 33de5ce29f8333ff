"""The command `python -m scaledot tune`: autotunes matmul kernels on the GPU of this machine."""

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
        help="kinds of matmuls: float8 and bfloat16 with at most one scale per operand (dense), float8 under "
        'precision="highest" (precise), scales in blocks of 128 (blocks), int8 (integers), grouped (groups); '
        "default: all",
    )
    parser.add_argument(
        "--layer",
        nargs=3,
        type=int,
        action="append",
        default=[],
        metavar=("TOKENS", "INPUTS", "OUTPUTS"),
        help="a layer whose fwd, dgrad and wgrad matmuls are tuned; repeatable (default: the layers of the benchmarks)",
    )
    parser.add_argument(
        "--groups", type=int, default=autotune.GROUPS, help="token groups of a grouped layer (default %(default)s)"
    )
    parser.add_argument("--output", type=Path, help="the file to write (default: the table that the kernels read)")


def run(options: argparse.Namespace) -> int:
    shapes = autotune.shapes_of(options.kind, [tuple(layer) for layer in options.layer], options.groups)
    try:
        autotune.tune(shapes, options.output or tile_configs.path_of_device())
    except NotImplementedError as error:
        print(error, file=sys.stderr)
        return 1
    return 0
