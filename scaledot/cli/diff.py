"""`scaledot diff`: compares two checkpoints tensor by tensor."""

import argparse
from pathlib import Path

from scaledot.cli.arguments import add_json
from scaledot.cli.output import aligned, show

EXAMPLES = (
    "scaledot diff model-a model-b",
    "scaledot diff Llama-3.1-8B Llama-3.1-8B-NVFP4 --json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", type=Path, metavar="A", help="a folder, a .safetensors or a .gguf file")
    parser.add_argument("b", type=Path, metavar="B", help="another one")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    from scaledot.checkpoint import diff

    found = diff(options.a, options.b)
    rows = [("tensor", "difference", ""), *map(tuple, found)]
    show(options, aligned(rows) if found else "equal", {"differences": [row._asdict() for row in found]})
    return 1 if found else 0
