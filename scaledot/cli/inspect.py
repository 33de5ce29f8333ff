"""`scaledot inspect`: lists the tensors of a checkpoint, with formats, sizes and the SNR against a reference."""

import argparse
import math
from pathlib import Path
from typing import Any

from scaledot.cli.arguments import add_json
from scaledot.cli.output import aligned, show

EXAMPLES = (
    "scaledot inspect Llama-3.1-8B-NVFP4",
    "scaledot inspect model.gguf --json",
    "scaledot inspect Llama-3.1-8B-NVFP4 --reference Llama-3.1-8B",
)
TITLES = ("tensor", "format", "block", "shape", "bytes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help="a folder, a .safetensors or a .gguf file")
    parser.add_argument("--reference", type=Path, metavar="CKPT", help="the model before quantisation, for the SNR")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    from scaledot.checkpoint.listing import inspect

    listing = inspect(options.checkpoint, options.reference)
    has_snr = options.reference is not None
    rows = [(*TITLES, "SNR (dB)") if has_snr else TITLES, *(_cells(row, has_snr) for row in listing.rows)]
    total = sum(row.nbytes for row in listing.rows)
    title = f"{options.checkpoint}: layout {listing.layout or 'without quantisation'}, {len(listing.rows)} tensors"
    record = {
        "checkpoint": str(options.checkpoint),
        "layout": listing.layout,
        "bytes": total,
        "tensors": [row._asdict() | {"snr_db": _finite(row.snr_db)} for row in listing.rows],
    }
    show(options, f"{title}, {total:,} bytes\n{aligned(rows)}", record)
    return 0


def _finite(snr_db: float | None) -> float | str | None:
    """JSON has no infinity, the SNR of equal tensors."""
    return snr_db if snr_db is None or math.isfinite(snr_db) else str(snr_db)


def _cells(row: Any, has_snr: bool) -> tuple[str, ...]:
    block = "" if row.block is None else "×".join("all" if size == 0 else str(size) for size in row.block)
    cells = (row.name, row.format, block, "×".join(map(str, row.shape)) or "scalar", f"{row.nbytes:,}")
    return (*cells, "" if row.snr_db is None else f"{row.snr_db:.1f}") if has_snr else cells
