"""Checkpoints of other libraries: reads and writes the quantised weights that they publish and serve."""

from scaledot.checkpoint.conversion import convert
from scaledot.checkpoint.errors import CheckpointError
from scaledot.checkpoint.forms import Flat, Offset, Permuted, dequantize
from scaledot.checkpoint.listing import diff, inspect
from scaledot.checkpoint.loading import load
from scaledot.checkpoint.names import GPT_OSS, LLAMA, MIXTRAL, QWEN, NameMap
from scaledot.checkpoint.saving import save

__all__ = [
    "GPT_OSS",
    "LLAMA",
    "MIXTRAL",
    "QWEN",
    "CheckpointError",
    "Flat",
    "NameMap",
    "Offset",
    "Permuted",
    "convert",
    "dequantize",
    "diff",
    "inspect",
    "load",
    "save",
]
