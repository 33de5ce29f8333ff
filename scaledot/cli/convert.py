"""`scaledot convert`: rewrites a checkpoint in another layout or format."""

import argparse
from pathlib import Path

from scaledot.cli.arguments import add_json, sizes
from scaledot.cli.output import show

EXAMPLES = (
    "scaledot convert Llama-3.1-8B Llama-3.1-8B-NVFP4 --layout compressed-tensors --format nvfp4",
    "scaledot convert Llama-3.1-8B Llama-3.1-8B-FP8 --layout hf-fp8 --format fp8_e4m3 --block 128x128",
    "scaledot convert Llama-3.1-8B-GPTQ Llama-3.1-8B --format bfloat16",
)
LAYOUTS = ("scaledot", "compressed-tensors", "modelopt", "hf-fp8")  # as in checkpoint.writers; a test compares both
DEFAULT_EXCLUDE = "embeddings, lm_head, norms and routers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="IN", help="a folder, a .safetensors or a .gguf file")
    parser.add_argument("target", type=Path, metavar="OUT", help="the folder to write; an existing one is replaced")
    parser.add_argument("--layout", choices=LAYOUTS, default="scaledot", help="default: %(default)s")
    parser.add_argument(
        "--format",
        metavar="NAME",
        help="format of the matrices, such as nvfp4 or compressed_tensors.nvfp4, or a float dtype (default: as in IN)",
    )
    parser.add_argument("--block", type=sizes, metavar="SIZES", help="block, such as 128x128 (default: the format's)")
    parser.add_argument("--include", nargs="+", default=["*.weight"], metavar="PATTERN", help="matrices to quantise")
    parser.add_argument("--exclude", nargs="*", metavar="PATTERN", help=f"and not these (default: {DEFAULT_EXCLUDE})")
    parser.add_argument("--activations", choices=("dynamic", "static"), help="what config.json says about activations")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    from scaledot.checkpoint import convert, inspect
    from scaledot.checkpoint.conversion import DEFAULT_EXCLUDE

    convert(
        options.source,
        options.target,
        options.layout,
        format=options.format,
        block=options.block,
        include=options.include,
        exclude=DEFAULT_EXCLUDE if options.exclude is None else options.exclude,
        activations=options.activations,
    )
    before, after = (sum(row.nbytes for row in inspect(path).rows) for path in (options.source, options.target))
    text = f"wrote {options.target}: {after:,} bytes, {options.source} has {before:,}"
    show(options, text, {"target": str(options.target), "bytes": after, "source_bytes": before})
    return 0
