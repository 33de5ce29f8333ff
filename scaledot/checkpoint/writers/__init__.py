"""The table of layouts that can be written.

A writer is a module with `plan(contents) -> Written`. It sees shapes and dtypes only: leaves of
ScaledArrays may be jax.ShapeDtypeStructs, so that a checkpoint can be planned before its tensors are computed. Each
`Part` of a weight extracts one tensor of the file from the computed weight.
"""

import importlib
from types import ModuleType
from typing import NamedTuple

from scaledot.formats import row_of


class Writer(NamedTuple):
    """A row of WRITERS: the name of a module of this package."""

    module: str


WRITERS = {
    "scaledot": Writer("native"),
    "compressed-tensors": Writer("compressed_tensors"),
    "modelopt": Writer("modelopt"),
    "hf-fp8": Writer("fine_grained_fp8"),
}


def writer_of(layout: str) -> ModuleType:
    """The module that writes a layout; the error for an unknown name lists the nearest ones."""
    writer = row_of("layout", layout, Writer, WRITERS, "the writable layouts")
    return importlib.import_module(f"scaledot.checkpoint.writers.{writer.module}")
