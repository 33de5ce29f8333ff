"""`scaledot tune`: measures GEMM tile configs on this machine's GPU and writes the table that kernels read."""

import argparse
import sys
from pathlib import Path

from scaledot.cli.arguments import add_json, count
from scaledot.cli.output import show

EXAMPLES = (
    "scaledot tune",
    "scaledot tune --layer 16384 8192 32768 --layer 8192 4096 14336",
    "scaledot tune --kind groups --layer 16384 4096 14336 --groups 8 --output table.json",
)
KINDS = {  # copied from kernels.hopper.autotune, whose import needs jax; a test compares both
    "dense": "FP8 and bfloat16, scales constant along K",
    "precise": "FP8, scales constant along K, partial accumulators promoted to float32",
    "blocks": "FP8 and int8, scales per 128 elements of K",
    "integers": "int8, scales constant along K",
    "groups": "FP8, one weight per group of tokens",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kind",
        nargs="+",
        choices=KINDS,
        default=list(KINDS),
        help=f"which GEMMs: {', '.join(f'{name} ({words})' for name, words in KINDS.items())} (default: all)",
    )
    parser.add_argument(
        "--layer",
        nargs=3,
        type=count,
        action="append",
        default=[],
        metavar=("TOKENS", "INPUTS", "OUTPUTS"),
        help="a layer whose fwd, dgrad and wgrad are measured; may be repeated (default: those of the benchmarks)",
    )
    parser.add_argument(
        "--groups", type=count, default=8, help="groups of tokens per layer, for --kind groups (default %(default)s)"
    )
    parser.add_argument("--output", type=Path, help="file to write (default: the table that kernels read)")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    from scaledot.kernels.hopper import autotune, tile_configs

    gemms = autotune.gemm_keys(options.kind, [tuple(layer) for layer in options.layer], options.groups)
    path = options.output or tile_configs.path_of_device()
    measured = autotune.tune(gemms, path, lambda line: print(line, file=sys.stderr, flush=True))
    show(options, f"wrote {path}", {"path": str(path), "measured": measured})
    return 0
