"""Checkpoints of other libraries: reads and writes the quantised weights that they publish and serve."""

from scaledot.checkpoint.errors import CheckpointError
from scaledot.checkpoint.forms import Flat, Offset, Permuted, dequantize
from scaledot.checkpoint.loading import load

__all__ = ["CheckpointError", "Flat", "Offset", "Permuted", "dequantize", "load"]
